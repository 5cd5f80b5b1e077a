// The communicators of this process, as NCCL's own calls show them.
//
// All functions may be called from any thread. The registry has one lock, and observers are called with it held, so that the
// facts of one communicator come in order; an observer must not call back. Nothing here throws: what cannot be noted, because
// memory ran out, is as unknown as a communicator that was made before AMem was there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ncclpatch/nccl/types.h"
#include "statemachine/types.h"

namespace amem::nccl {

enum class Stage : std::uint8_t {
  kMaking,     // NCCL was asked for it
  kReady,      // NCCL has made it, and rank, ranks, device and hash are NCCL's
  kFinalized,  // ncclCommFinalize
  kRevoked,    // ncclCommRevoke
};

struct Communicator {
  CommunicatorId id;
  CommunicatorId parent;  // that it was split, shrunk or grown from; zero: none, or one that was not seen
  std::size_t place = 0;  // of its library, as redirects count
  const char* how = "";   // "init", "init all", "split", "shrink", "grow"
  Stage stage = Stage::kMaking;
  std::uint64_t hash = 0;  // NCCL's commHash, the same in all ranks; 0: unknown, or not yet
  // What the hash may be (hash.h), as complements: where NCCL keeps the hash is searched for in memory, and that must not find
  // this.
  std::array<std::uint64_t, 2> expected_complements = {~std::uint64_t{0}, ~std::uint64_t{0}};
  std::int32_t rank = -1;       // -1: not known yet
  std::int32_t ranks = 0;       // 0: not known yet
  DeviceOrdinal device{-1};     // CUDA ordinal; -1: not known
  ncclComm* address = nullptr;  // null until NCCL has given it one
  bool suspended = false;       // by ncclCommSuspend, as AMem serves it
  std::uint64_t aside = 0;      // the pause, as the session counts them, beside which it is made and runs; 0: none

  // Counts when the process is asked whether all are suspended: NCCL may still use it.
  [[nodiscard]] bool usable() const { return stage == Stage::kMaking || stage == Stage::kReady; }
};

// Is told what happens to communicators.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void Begun(const Communicator& communicator) = 0;
  virtual void Ready(const Communicator& communicator) = 0;
  // "destroyed", "aborted", "failed" (it was never made), "left out" (this rank has no part in it)
  virtual void Ended(CommunicatorId id, const char* how) = 0;
  virtual void Suspended(CommunicatorId id, bool suspended) = 0;
};
// Null: nobody. Must outlive all calls.
void SetObserver(Observer* observer);

std::optional<Communicator> Find(const ncclComm* address);
// Communicator::aside of the one for which this thread calls; 0 where that is not known.
std::uint64_t AsideNow() noexcept;
std::vector<Communicator> All();  // that live, in the order in which they were begun

// Around fork: the child finds the registry's lock free.
void BeforeFork();
void AfterFork();

// ---- for the calls of this folder ----------------------------------------------------------------------------------------

namespace registry {

// A communicator that NCCL is asked for; zero: it could not be noted. `known` has what the arguments say.
CommunicatorId Begin(const Communicator& known) noexcept;
// NCCL gave it an address; one that was there before has ended unseen.
void Bind(CommunicatorId id, ncclComm* address) noexcept;
// NCCL says that it is made. Only the first call of a communicator counts.
void MarkReady(const Communicator& now) noexcept;
void MarkStage(const ncclComm* address, Stage stage) noexcept;
// Ends with `how`, whatever it was.
void End(CommunicatorId id, const char* how) noexcept;
// Takes the address away before NCCL frees it, and gives it back if NCCL did not.
CommunicatorId Detach(const ncclComm* address) noexcept;
CommunicatorId IdOf(const ncclComm* address) noexcept;
// False: it is not known, or was so already.
bool SetSuspended(CommunicatorId id, bool suspended) noexcept;
void SetAside(CommunicatorId id, std::uint64_t pause) noexcept;
// Whether any is suspended: without the lock.
bool AnySuspended() noexcept;
// How many have an address and are not ready: without the lock.
bool AnyUnready() noexcept;

}  // namespace registry
}  // namespace amem::nccl
