// The account of one process's GPU memory, as far as AMem sees it: what pauses have taken, what is on the GPU, and why it
// stays.
#pragma once

#include <map>
#include <string>

#include "statemachine/state.h"

namespace amem {

struct Account {
  // Bytes as the driver gave them. What the driver had given is the sum of all three, and what it gives now that of the last
  // two.
  struct OfDevice {
    std::map<std::string, Bytes> taken;    // by tag, "nccl" and "user" (ncclMemAlloc) among them: gone until a resume
    std::map<std::string, Bytes> running;  // by tag: a pause of it would take this
    std::map<std::string, Bytes> kept;     // by reason: no pause takes it
    friend bool operator==(const OfDevice&, const OfDevice&) = default;
  };
  std::map<DeviceOrdinal, OfDevice> devices;
  // NCCL's memory and that of ncclMemAlloc by what it is for, as far as NCCL's calls show it; each byte of the driver's counts
  // once, whether a pause has it or not.
  struct OfKind {
    Bytes bytes = 0;
    std::map<std::string, Bytes> stays;  // what no pause takes, by reason
  };
  std::map<std::string, OfKind> kinds;
  // On a GPU as well, and of none it is known on which; by whose it is: cuMemAlloc, driver pools, other libraries' allocations.
  std::map<std::string, OutsideShare> unplaced;
};

Account MeasureAccount(const State&);
Account::OfDevice OfAllDevices(const Account&);

// "nccl", "user", or the tag of the pool that it is of.
std::string TagOf(const State&, const Allocation&);

}  // namespace amem
