#include <array>

#include "tests/world/action.h"

namespace amem::world {

std::span<const Action> Actions() {
  static constexpr std::array kActions = {
      Action{"make memory", 12, MakeMemory},
      Action{"make much memory", 1, MakeMuchMemory},
      Action{"make memory by cuMemAlloc", 8, MakeLegacy},
      Action{"free", 20, FreeSome},
      Action{"use wrongly", 2, UseWrongly},
      Action{"write", 25, Write},
      Action{"check", 25, Check},
      Action{"launch a collective", 25, Collective},
      Action{"capture", 3, Capture},
      Action{"allocate in a tag", 14, AllocateInTag},
      Action{"allocate much in a tag", 1, AllocateMuchInTag},
      Action{"pause or resume a tag", 12, PauseOrResumeTag},
      Action{"trim or look", 2, TrimOrLook},
      Action{"make a window", 8, MakeWindow},
      Action{"register with a card", 4, RegisterWithCard},
      Action{"deregister", 4, DeregisterFromCard},
      Action{"offer", 4, OfferMemory},
      Action{"import", 8, ImportOffer},
      Action{"fork", 1, Fork},
      Action{"fail a call", 3, FailACall},
      Action{"lose", 1, Lose},
      Action{"rest", 6, Rest},
  };
  return kActions;
}

}  // namespace amem::world
