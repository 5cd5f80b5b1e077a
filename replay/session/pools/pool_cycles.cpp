#include "replay/session/pools/pool_cycles.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <utility>

#include "journal/base/no_memory.h"
#include "journal/base/thread.h"

namespace amem {

// How long the end of a cycle waits for the ledger to release what only closed descriptors held.
constexpr std::chrono::milliseconds kForClosedDescriptors{1};

PoolCycles::~PoolCycles() {
  if (table_.fork.InChild()) return;
  {
    const MutexLock lock(table_.mutex);
    stop_ = true;
    table_.changed->NotifyAll();
  }
  for (auto& [kind, worker] : *workers_) worker.join();
}

// A resume failed and no caller was given that; the program believes that the tag is back.
static Status NotBack(const std::string& tag, bool in_use, const Status& unheard) {
  return unheard.Within("tag " + tag + (in_use ? " is not wholly resumed" : " is still paused"));
}

bool PoolCycles::TryLock(Deadline until) { return TryLockUntil(table_.mutex, until); }

Status PoolCycles::TooLate(const PoolEntry* pool, CycleKind kind, const char* why) const {
  const std::string tag = pool == nullptr ? "" : " of tag " + pool->tag;
  return {Code::kRefused,
          fmt::format("{}{} refused: {}, and has not returned within {} ms", ToText(kind), tag, why,
                      parts_.options.deadlines.call().count()),
          cuda::kNotReady};
}

// Until no thread makes or gives back memory of the pool, and, `alone`, nothing else of it is under way.
Status PoolCycles::AwaitTurn(PoolEntry& pool, CycleKind kind, bool alone, Deadline until) {
  while ((alone && pool.turn.busy()) || pool.memory->changing(table_.mutex)) {
    if (table_.changed->WaitUntil(table_.mutex, until) || !Passed(until)) continue;
    return TooLate(&pool, kind,
                   pool.memory->changing(table_.mutex) ? "a thread takes memory of it from the driver, or gives some back"
                                                       : "another pause or resume of it is under way");
  }
  return {};
}

Status PoolCycles::CycleOf(PoolEntry& pool, const Task& task) {
  const auto queued = [&] {
    const MutexLock now(table_.mutex);
    // A device that gets access only at the end of the resume cannot use the memory earlier.
    pool.turn.queued = pool.memory->AllHaveAccess(table_.devices, table_.mutex);
    table_.changed->NotifyAll();
  };
  const auto is_followed = [&] {
    const MutexLock now(table_.mutex);
    pool.turn.queued = false;
    return pool.turn.followed;
  };
  return pool.cycle->Cycle(task.kind, {.after = task.after.get(), .keeps = task.keeps, .patient = task.patient},
                           {.copies_queued = queued, .is_followed = is_followed});
}

// The caller made sure that nothing else of the pool is under way.
Status PoolCycles::Run(PoolEntry& pool, const Task& task) {
  PoolTurn& turn = pool.turn;
  if (const Status mine = AwaitTurn(pool, task.kind, false, In(parts_.options.deadlines.call())); !mine.ok()) {
    turn.running.reset();
    turn.failure = mine.message();
    table_.changed->NotifyAll();
    return mine;
  }
  turn.running = task.kind;
  turn.queued = turn.followed = false;
  WithoutLock apart(table_.mutex);
  Status status = OrNoMemory([&] { return CycleOf(pool, task); });
  if (parts_.ledger.TryLockFor(kForClosedDescriptors)) {
    const NotifyingLock lock(parts_.ledger, parts_.dropped, std::adopt_lock);
    parts_.allocations.DropClosed(parts_.ledger);
  }
  apart.End();
  const auto tidy_up = [&]() -> Status {  // what there is no memory for now is for the next cycle
    table_.mutex.AssertHeld();
    turn.failure = status.message();
    return TidyUp(pool, task.kind, status.ok());
  };
  static_cast<void>(OrNoMemory(tidy_up));
  turn.running.reset();
  turn.queued = false;
  table_.changed->NotifyAll();
  return status;
}

Status PoolCycles::TidyUp(PoolEntry& pool, CycleKind kind, bool done) {
  PoolMemory& memory = *pool.memory;
  if (memory.HasFreed(table_.mutex)) {
    const bool running = LifecycleOf(pool, parts_.ledger) == Lifecycle::kRunning;
    memory.GiveBackFreed(
        running, [] { return false; }, table_.mutex);
  }
  // A driver call may hold the ledger; devices that came meanwhile get access later.
  if (!parts_.ledger.TryLockFor(kToTidyUp)) return {};
  LedgerLock lock(parts_.ledger, std::adopt_lock);
  const Lifecycle now = parts_.ledger.state().LifecycleOf(pool.id);
  const Lifecycle asked = kind == CycleKind::kPause ? Lifecycle::kPaused : Lifecycle::kRunning;
  if (done)
    parts_.ledger.Check(now == asked,
                        "tag " + pool.tag + ": a " + std::string(ToText(kind)) + " that succeeded left it otherwise");
  lock.Unlock();
  if (now == Lifecycle::kRunning) memory.GrantAccess(table_.devices, table_.mutex);
  return {};
}

Status PoolCycles::CanAsk(const PoolEntry& pool, CycleKind kind) {
  if (kind == CycleKind::kResume || pool.turn.inside == 0) return {};
  return {Code::kRefused,
          fmt::format("pause of tag {}: a thread is inside the tag (amem_pool_enter, amem.pool), and may take memory of it at "
                      "any time; leave it first",
                      pool.tag)};
}

Status PoolCycles::Now(const Task& task, Deadline until) {
  PoolEntry& pool = *task.pool;
  AMEM_TRY(CanAsk(pool, task.kind));
  // A resume waits as long as the others do.
  AMEM_TRY(AwaitTurn(pool, task.kind, true, task.patient ? In(std::chrono::hours(24)) : until));
  const Status unheard = std::exchange(pool.turn.unheard, {});
  // A failed resume that no caller was given left the pool paused; the program believes that it runs.
  if (!unheard.ok() && task.kind == CycleKind::kPause && LifecycleOf(pool, parts_.ledger) != Lifecycle::kRunning)
    return NotBack(pool.tag, pool.turn.followed, unheard);
  pool.turn.last_asked = task.kind;
  return Run(pool, task);
}

Status PoolCycles::Pause(PoolId id, const HowToPause& how) {
  const Deadline until = In(parts_.options.deadlines.call());
  if (!TryLock(until)) return TooLate(nullptr, CycleKind::kPause, "a thread is in the driver with a tag's memory");
  const MutexLock lock(table_.mutex, std::adopt_lock);
  AMEM_ASSIGN(PoolEntry* const pool, table_.Known(id));
  Task task{.pool = pool, .kind = CycleKind::kPause, .keeps = how.keeps};
  if (how.after) {
    // Taken before any wait, because what the program submits after this call does not count.
    auto moment = pool->cycle->MomentOf(*how.after);
    if (!moment.ok()) return moment.status().Within("pause of tag " + pool->tag);
    task.after = *std::move(moment);
  }
  return how.wait ? Now(task, until) : Later(std::move(task));
}

Status PoolCycles::Resume(PoolId id, const HowToResume& how) {
  const Deadline until = In(parts_.options.deadlines.call());
  if (!TryLock(until)) return TooLate(nullptr, CycleKind::kResume, "a thread is in the driver with a tag's memory");
  const MutexLock lock(table_.mutex, std::adopt_lock);
  AMEM_ASSIGN(PoolEntry* const pool, table_.Known(id));
  Task task{.pool = pool, .kind = CycleKind::kResume, .priority = how.priority, .patient = how.patient};
  return how.wait ? Now(task, until) : Later(std::move(task));
}

Status PoolCycles::Wait(PoolId id) {
  const MutexLock lock(table_.mutex);
  AMEM_ASSIGN(PoolEntry* const pool, table_.Known(id));
  while (pool->turn.busy()) table_.changed->Wait(table_.mutex);
  return std::exchange(pool->turn.unheard, {});
}

Status PoolCycles::WaitOn(PoolId id, void* stream) {
  MutexLock lock(table_.mutex);
  AMEM_ASSIGN(PoolEntry* const pool, table_.Known(id));
  PoolTurn& turn = pool->turn;
  while (turn.busy() && (turn.waiting > 0 || !turn.queued)) table_.changed->Wait(table_.mutex);
  if (turn.busy()) {
    turn.followed = true;
    lock.Unlock();
    return pool->cycle->MakeStreamWaitForCopies(stream).Within("wait for tag " + pool->tag);
  }
  if (!turn.unheard.ok()) return std::exchange(turn.unheard, {});
  if (LifecycleOf(*pool, parts_.ledger) == Lifecycle::kRunning) return {};
  return {Code::kRefused,
          fmt::format("wait for tag {}: it is paused, and no resume was asked for; resume it first", pool->tag)};
}

Status PoolCycles::Later(Task task) {
  PoolEntry& pool = *task.pool;
  AMEM_TRY(CanAsk(pool, task.kind));
  const CycleKind kind = task.kind;
  if (!pool.turn.busy()) {
    const Lifecycle now = LifecycleOf(pool, parts_.ledger);
    if (!pool.turn.unheard.ok() && kind == CycleKind::kPause && now != Lifecycle::kRunning)
      return NotBack(pool.tag, pool.turn.followed, std::exchange(pool.turn.unheard, {}));
    if (now == (kind == CycleKind::kPause ? Lifecycle::kPaused : Lifecycle::kRunning)) return {};
  }
  AMEM_TRY(StartWorker(kind));
  pool.turn.unheard = {};
  pool.turn.last_asked = kind;
  ++pool.turn.waiting;
  tasks_.push_back(std::move(task));
  table_.changed->NotifyAll();
  return {};
}

Status PoolCycles::StartWorker(CycleKind kind) {
  if (workers_->contains(kind)) return {};
  AMEM_ASSIGN(auto started,
              StartThread(kind == CycleKind::kPause ? "amem-pool-out" : "amem-pool-in", [this, kind] { Work(kind); }));
  workers_->emplace(kind, std::move(started));
  return {};
}

// A pool's first task is due if nothing of the pool is under way.
std::list<PoolCycles::Task>::iterator PoolCycles::Due(CycleKind kind) {
  auto due = tasks_.end();
  for (auto task = tasks_.begin(); task != tasks_.end(); ++task) {
    const bool behind = std::any_of(tasks_.begin(), task, [&](const Task& one) { return one.pool == task->pool; });
    if (behind || task->kind != kind || task->pool->turn.running) continue;
    if (due == tasks_.end() || task->priority > due->priority) due = task;
  }
  return due;
}

void PoolCycles::Work(CycleKind kind) {
  const MutexLock lock(table_.mutex);
  while (!stop_) {
    const auto due = Due(kind);
    if (due == tasks_.end()) {
      table_.changed->Wait(table_.mutex);
      continue;
    }
    const Task task = std::move(*due);
    tasks_.erase(due);
    PoolEntry& pool = *task.pool;
    pool.turn.running = kind;  // set before any wait
    --pool.turn.waiting;
    Status status = Run(pool, task);
    if (!status.ok()) pool.turn.unheard = std::move(status);
  }
}

}  // namespace amem
