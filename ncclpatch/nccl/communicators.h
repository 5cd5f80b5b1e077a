// The communicators of this process, as NCCL's calls show them.
//
// Any thread may call. The observer is called under the registry's one lock, so that facts about one communicator come in
// order; it must not call back. Nothing throws: what cannot be noted for lack of memory is unknown, like a communicator made
// before AMem.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "statemachine/event.h"

struct ncclComm;  // opaque, as in nccl.h

namespace amem::nccl {
namespace names {
struct Part;
}

// NCCL's own types, as far as its interface passes them: their sizes and values are the same in all versions from 2.18 on.
struct UniqueId {
  char bytes[128];
};
using Stream = void*;
using Config = void;

// ncclResult_t
inline constexpr int kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7;
inline bool Accepted(int result) { return result == kSuccess || result == kInProgress; }
// What NCCL answers of a call's arguments, before it does anything for the call that other ranks could see. The end of a group
// answers so for a call in it, and then nothing that the group asked for is done.
inline bool IsOfArguments(int result) { return result == kInvalidArgument || result == kInvalidUsage; }

enum class Stage : std::uint8_t {
  kMaking,     // NCCL was asked for it
  kReady,      // rank, ranks and device are NCCL's
  kFinalized,  // ncclCommFinalize
  kRevoked,    // ncclCommRevoke
};

struct Communicator {
  CommunicatorId id;
  CommunicatorId parent;  // split, shrunk or grown from; zero: none, or not seen
  std::size_t place = 0;  // of its library, as redirects count
  const char* how = "";   // "init", "init all", "split", "shrink", "grow"
  Stage stage = Stage::kMaking;
  std::uint64_t name = 0;       // the same in all its ranks (names.h); 0: unknown
  std::int32_t rank = -1;       // -1: unknown
  std::int32_t ranks = 0;       // 0: unknown
  DeviceOrdinal device{-1};     // CUDA ordinal; -1: unknown
  ncclComm* address = nullptr;  // null until NCCL gives it one
  bool suspended = false;       // by ncclCommSuspend, as AMem serves it
  std::uint64_t aside = 0;      // the number of the pause beside which it was made; 0: none

  // NCCL may still use it, so the process is not paused before it is suspended.
  [[nodiscard]] bool usable() const { return stage == Stage::kMaking || stage == Stage::kReady; }
};

// Learns by events what happens to communicators. Null: nobody does.
using Observer = void (*)(EventBody event);
void SetObserver(Observer observer);

std::optional<Communicator> Find(const ncclComm* address);
// Communicator::aside of the communicator that this thread's call is for; 0: unknown.
std::uint64_t AsideNow() noexcept;
std::vector<Communicator> All();  // living ones, oldest first

// Around fork, so that the lock is free in the child.
void BeforeFork();
void AfterFork();

// ---- for the calls of this folder

namespace registry {

// NCCL was asked for a communicator; `known` comes from the arguments. Zero: it could not be noted.
CommunicatorId Begin(const Communicator& known) noexcept;
// NCCL gave it an address. A communicator that had it before ended unseen.
void Bind(CommunicatorId id, ncclComm* address) noexcept;
// NCCL says that it is made. Only the first call counts.
void MarkReady(const Communicator& now) noexcept;
void MarkStage(const ncclComm* address, Stage stage) noexcept;
// Ends with `how`, whatever it was.
void End(CommunicatorId id, const char* how) noexcept;
// Takes the address away before NCCL frees it; Bind gives it back if NCCL did not.
CommunicatorId Detach(const ncclComm* address) noexcept;
CommunicatorId IdOf(const ncclComm* address) noexcept;
// A call that makes a part of a communicator, as it was counted.
struct CountedPart {
  CommunicatorId parent;     // zero: nothing was counted
  std::uint64_t series = 0;  // of calls for parts of it
  std::uint64_t name = 0;    // that the part has; 0: none
};
CountedPart CountNextPart(const ncclComm* parent, const names::Part& part) noexcept;
// That call does not count, because NCCL has done nothing for it: other ranks wait for another one.
void RetractPart(const CountedPart& part) noexcept;
// False: unknown, or so already.
bool SetSuspended(CommunicatorId id, bool suspended) noexcept;
void SetAside(CommunicatorId id, std::uint64_t pause) noexcept;
// Without the lock.
inline constinit std::atomic<int> g_suspended{0};
inline bool AnySuspended() noexcept { return g_suspended.load(std::memory_order_relaxed) > 0; }
// How many have an address and are not ready; without the lock.
bool AnyUnready() noexcept;

}  // namespace registry
}  // namespace amem::nccl
