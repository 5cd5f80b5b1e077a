// The settings of a session, and what its calls have in common. The other settings of the process are in
// ncclpatch/runtime/options.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "journal/base/deadline.h"
#include "replay/driver/driver.h"
#include "statemachine/types.h"

namespace amem {

class Network;  // replay/cycle/network.h

enum class Layout : std::uint8_t { kDirect, kSlab };
enum class UserMemory : std::uint8_t { kKeep, kRelease };
enum class Nvls : std::uint8_t { kKeep, kRelease };

struct SessionOptions {
  Layout layout = Layout::kSlab;               // AMEM_LAYOUT
  Bytes slab_bytes = Bytes{256} << 20;         // the largest slab, of AMEM_LAYOUT too; a power of two, at least 2 MiB
  UserMemory user_memory = UserMemory::kKeep;  // AMEM_USER_MEMORY: what a pause does with ncclMemAlloc memory
  // AMEM_NVLS: what a pause does with multicast objects that this session makes, and with memory bound to them. Importers do
  // what the owner's setting says. kRelease has never run on hardware.
  Nvls nvls = Nvls::kKeep;
  Network* network = nullptr;                // AMEM_NETWORK=renew; null: what network cards hold stays. Outlives the session
  Deadlines deadlines;                       // AMEM_TIMEOUT_MS
  bool compare = false;                      // AMEM_VERIFY: compare all bytes after each resume with what was saved
  Bytes pinned_bytes = Bytes{4} << 30;       // host memory pinned ahead for NCCL's memory, at most
  std::filesystem::path host_claims;         // one file for all ranks of the host; empty: none
  Bytes pool_pinned_bytes = Bytes{4} << 30;  // the same for all pools together
  std::int64_t unpins_for = 1000;            // PinnedSupply::Options
  std::function<void()> first_tag;           // called before the session has its first tag; must not call the session
};

// The tag of memory that NCCL makes; `for_application`: by ncclMemAlloc.
inline MemoryTag TagFor(bool for_application, UserMemory user_memory) {
  if (!for_application) return MemoryTag::kNccl;
  return user_memory == UserMemory::kKeep ? MemoryTag::kUser : MemoryTag::kUserReleased;
}

// Whether memory gets a driver handle of its own. kPreferred, for what a network card will hold: unless only a slab has room
// for it. kNeeded: for what will be mapped twice.
enum class Alone : std::uint8_t { kNo, kPreferred, kNeeded };

// Which call of NCCL makes memory.
struct Origin {
  CallSite site;
  CommunicatorId communicator;  // for which NCCL makes the memory; zero: none, or unknown
  Alone alone = Alone::kNo;

  Origin() = default;
  Origin(const CallSite& from, CommunicatorId made_for = {})  // NOLINT(google-explicit-constructor)
      : site(from), communicator(made_for) {}
  [[nodiscard]] Origin Anywhere() const {
    Origin same = *this;
    same.alone = Alone::kNo;
    return same;
  }
};

// The most frequent failures of a session's calls: "free range 0x7f00: it was not reserved by NCCL".
inline Status WrongCall(std::string_view call, const std::string& subject, std::string_view why, Code code = Code::kInvalid) {
  return {code, std::string(call).append(" ").append(subject).append(": ").append(why), cuda::kInvalidValue};
}
// The address or handle is the driver's: pass the call through. NCCL gets this answer if that is not possible.
inline Status NotOurs(std::string_view call, const std::string& subject, std::string_view why) {
  return WrongCall(call, subject, why, Code::kNotFound);
}

}  // namespace amem
