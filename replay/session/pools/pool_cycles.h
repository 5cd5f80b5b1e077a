// Pauses and resumes of pools. A pool has one under way at a time; different pools, and NCCL's memory, may overlap. Requests
// without waiting are done by two threads, one for pauses and one for resumes: the highest priority first, then in the order of
// asking; for one pool always in the order of asking.
//
// The public methods take the table's mutex themselves.
#pragma once

#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "journal/base/deadline.h"
#include "journal/base/fork_guard.h"
#include "journal/base/no_copies.h"
#include "replay/cycle/coordinator.h"
#include "replay/session/lower_parts.h"
#include "replay/session/pools/pool_table.h"

namespace amem {

// How long the end of a cycle waits for the ledger, which a driver call that hangs may hold.
inline constexpr std::chrono::milliseconds kToTidyUp{1000};

struct HowToPause {
  bool wait = true;
  // With a stream: saves all contents once the work now in that stream is done, without waiting for other streams; the program
  // must not touch the memory from then on. Without: waits for the pool's devices.
  std::optional<void*> after;
  bool keeps = false;  // saves contents, whatever the policy
};
struct HowToResume {
  bool wait = true;
  int priority = 0;  // higher first
  // waits for sessions that share the memory while they live and stay paused; otherwise until the deadline
  bool patient = true;
};

class PoolCycles : NoCopies {
 public:
  PoolCycles(const LowerParts& parts, PoolTable& table) : parts_(parts), table_(table) {}
  ~PoolCycles();  // waits for what is under way and drops what is only asked for

  // With `wait` the result is that of the pause or resume, after all earlier requests. Otherwise a failure is returned by the
  // next Wait, or by the next Pause that finds the pool still paused; another Resume tries again.
  Status Pause(PoolId pool, const HowToPause& how);
  Status Resume(PoolId pool, const HowToResume& how);
  // Waits for all that is under way, and returns the failure that no caller was given yet. OK if nothing is under way.
  Status Wait(PoolId pool);
  // Waits until all copies of a resume are queued, and makes the stream wait for them. kRefused: the pool is paused, and no
  // resume was requested.
  Status WaitOn(PoolId pool, void* stream);

 private:
  struct Task {
    PoolEntry* pool = nullptr;
    CycleKind kind{};
    int priority = 0;
    bool patient = false;
    bool keeps = false;
    std::unique_ptr<StreamMoment> after;
  };

  // The pools until the end of a call's own time; another thread may be in the driver with them.
  [[nodiscard]] bool TryLock(Deadline until) TRY_ACQUIRE(true, table_.mutex);
  [[nodiscard]] Status TooLate(const PoolEntry* pool, CycleKind kind, const char* why) const;
  [[nodiscard]] static Status CanAsk(const PoolEntry& pool, CycleKind kind);
  // These with a star release the mutex while they wait.
  Status AwaitTurn(PoolEntry& pool, CycleKind kind, bool alone, Deadline until) REQUIRES(table_.mutex);  // *
  Status Now(const Task& task, Deadline until) REQUIRES(table_.mutex);                                   // *
  Status Later(Task task) REQUIRES(table_.mutex);
  Status Run(PoolEntry& pool, const Task& task) REQUIRES(table_.mutex);              // *
  Status CycleOf(PoolEntry& pool, const Task& task);                                 // without the mutex
  Status TidyUp(PoolEntry& pool, CycleKind kind, bool done) REQUIRES(table_.mutex);  // *
  Status StartWorker(CycleKind kind) REQUIRES(table_.mutex);
  void Work(CycleKind kind);
  std::list<Task>::iterator Due(CycleKind kind) REQUIRES(table_.mutex);

  const LowerParts parts_;
  PoolTable& table_;
  std::list<Task> tasks_ GUARDED_BY(table_.mutex);  // in the order of asking
  const ForgottenInChild<std::map<CycleKind, std::thread>> workers_{table_.fork};
  bool stop_ GUARDED_BY(table_.mutex) = false;
};

}  // namespace amem
