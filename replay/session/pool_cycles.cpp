// Pauses and resumes of pools: now, or by a thread of their own.
#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "journal/base/no_memory.h"
#include "journal/base/thread.h"
#include "replay/session/pools.h"

namespace amem {

// A resume failed and nobody has heard of it; the program believes that the tag is back.
static Status NotBack(const std::string& tag, bool in_use, const Status& unheard) {
  return unheard.Within("tag " + tag + (in_use ? " is not wholly resumed" : " is still paused"));
}

bool Pools::TryLock(Deadline until) { return TryLockUntil(mutex_, until); }

Status Pools::TooLate(const Entry* pool, CycleKind kind, const char* why) const {
  const std::string tag = pool == nullptr ? "" : " of tag " + pool->tag;
  return {Code::kRefused,
          fmt::format("{}{} refused: {}, and has not returned within {} ms", ToText(kind), tag, why,
                      context_.deadlines.call().count()),
          cuda::kNotReady};
}

// Until no thread makes or gives back memory of the pool, and, `alone`, nothing else of it is under way.
Status Pools::AwaitTurn(Entry& pool, CycleKind kind, bool alone, Deadline until) {
  while ((alone && Busy(pool)) || pool.changing > 0) {
    if (changed_->WaitUntil(mutex_, until) || !Passed(until)) continue;
    return TooLate(&pool, kind,
                   pool.changing > 0 ? "a thread takes memory of it from the driver, or gives some back"
                                     : "another pause or resume of it is under way");
  }
  return {};
}

// The caller made sure that nothing else of the pool is under way.
Status Pools::Run(Entry& pool, const Task& task) {
  if (const Status turn = AwaitTurn(pool, task.kind, false, In(context_.deadlines.call())); !turn.ok()) {
    pool.running.reset();
    pool.failure = turn.message();
    changed_->NotifyAll();
    return turn;
  }
  pool.running = task.kind;
  pool.queued = pool.led = false;
  WithoutLock apart(mutex_);
  const auto queued = [&] {
    const MutexLock now(mutex_);
    // A device that gets access only at the end of the resume cannot use the memory earlier.
    pool.queued = pool.let_in == devices_;
    changed_->NotifyAll();
  };
  const auto is_followed = [&] {
    const MutexLock now(mutex_);
    pool.queued = false;
    return pool.led;
  };
  const auto cycle = [&] {
    return pool.cycle->Cycle(task.kind, {.after = task.after.get(), .keeps = task.keeps, .patient = task.patient},
                             {.copies_queued = queued, .is_followed = is_followed});
  };
  Status status = OrNoMemory(cycle);
  ended_();
  apart.End();
  const auto tidy_up = [&]() -> Status {  // what there is no memory for now is for the next cycle
    mutex_.AssertHeld();
    pool.failure = status.message();
    if (!pool.late.empty()) GiveLate(pool, Who::kCycle);
    if (!ledger_.TryLockFor(kToTidyUp)) return {};  // a driver call may hold it; devices that came meanwhile are let in later
    const bool runs = ledger_.state().LifecycleOf(pool.id) == Lifecycle::kRunning;
    ledger_.unlock();
    if (runs) LetAllIn(pool);
    return {};
  };
  static_cast<void>(OrNoMemory(tidy_up));
  pool.running.reset();
  pool.queued = false;
  changed_->NotifyAll();
  return status;
}

Status Pools::CanAsk(const Entry& pool, CycleKind kind) const {
  if (kind == CycleKind::kResume || pool.inside == 0) return {};
  return {Code::kRefused,
          fmt::format("pause of tag {}: a thread is inside the tag (amem_pool_enter, amem.pool), and may take memory of it at "
                      "any time; leave it first",
                      pool.tag)};
}

Status Pools::Now(const Task& task, Deadline until) {
  Entry& pool = *task.pool;
  AMEM_TRY(CanAsk(pool, task.kind));
  // A resume waits as long as the others do.
  AMEM_TRY(AwaitTurn(pool, task.kind, true, task.patient ? In(std::chrono::hours(24)) : until));
  const Status unheard = std::exchange(pool.unheard, {});
  // A failed resume that nobody heard of left the pool paused; the program believes that it runs.
  if (!unheard.ok() && task.kind == CycleKind::kPause && LifecycleOf(pool) != Lifecycle::kRunning)
    return NotBack(pool.tag, pool.led, unheard);
  pool.last_asked = task.kind;
  return Run(pool, task);
}

Status Pools::Pause(PoolId id, const HowToPause& how) {
  const Deadline until = In(context_.deadlines.call());
  if (!TryLock(until)) return TooLate(nullptr, CycleKind::kPause, "a thread is in the driver with a tag's memory");
  const MutexLock lock(mutex_, std::adopt_lock);
  AMEM_ASSIGN(Entry* const known, Known(id));
  Entry& pool = *known;
  Task task{.pool = &pool, .kind = CycleKind::kPause, .keeps = how.keeps};
  if (how.after) {
    // Taken before any wait, because what the program submits after this call does not count.
    auto moment = pool.cycle->MomentOf(*how.after);
    if (!moment.ok()) return moment.status().Within("pause of tag " + pool.tag);
    task.after = *std::move(moment);
  }
  return how.wait ? Now(task, until) : Later(std::move(task));
}

Status Pools::Resume(PoolId id, const HowToResume& how) {
  const Deadline until = In(context_.deadlines.call());
  if (!TryLock(until)) return TooLate(nullptr, CycleKind::kResume, "a thread is in the driver with a tag's memory");
  const MutexLock lock(mutex_, std::adopt_lock);
  AMEM_ASSIGN(Entry* const pool, Known(id));
  Task task{.pool = pool, .kind = CycleKind::kResume, .priority = how.priority, .patient = how.patient};
  return how.wait ? Now(task, until) : Later(std::move(task));
}

Status Pools::Wait(PoolId id) {
  const MutexLock lock(mutex_);
  AMEM_ASSIGN(Entry* const known, Known(id));
  Entry& pool = *known;
  while (Busy(pool)) changed_->Wait(mutex_);
  return std::exchange(pool.unheard, {});
}

Status Pools::WaitOn(PoolId id, void* stream) {
  MutexLock lock(mutex_);
  AMEM_ASSIGN(Entry* const known, Known(id));
  Entry& pool = *known;
  while (Busy(pool) && (pool.waiting > 0 || !pool.queued)) changed_->Wait(mutex_);
  if (Busy(pool)) {
    pool.led = true;
    lock.Unlock();
    return pool.cycle->MakeStreamWaitForCopies(stream).Within("wait for tag " + pool.tag);
  }
  if (!pool.unheard.ok()) return std::exchange(pool.unheard, {});
  if (LifecycleOf(pool) == Lifecycle::kRunning) return {};
  return {Code::kRefused, fmt::format("wait for tag {}: it is paused, and no resume was asked for; resume it first", pool.tag)};
}

std::vector<Pools::Standing> Pools::Stand() {
  std::vector<Standing> all;
  const MutexLock lock(mutex_);
  for (const auto& [id, pool] : pools_) {
    const Lifecycle now = LifecycleOf(*pool);
    const bool asked_to_pause = Busy(*pool) && pool->last_asked == CycleKind::kPause;
    const bool resuming = Busy(*pool) ? !asked_to_pause && now != Lifecycle::kRunning : now == Lifecycle::kResuming;
    const bool pausing = Busy(*pool) ? asked_to_pause && now != Lifecycle::kPaused : now == Lifecycle::kPausing;
    const char* const state = pausing ? "pausing" : resuming ? "resuming" : now == Lifecycle::kRunning ? "resident" : "paused";
    all.push_back({id, pool->tag, pool->policy, state, pool->cycle->Last(CycleKind::kPause).total_ns,
                   pool->cycle->Last(CycleKind::kResume).total_ns, pool->failure, pool->cycle->Contents()});
  }
  return all;
}

bool Pools::IfAllRun(const std::function<void()>& use) {
  if (!TryLock(::amem::Now())) return false;
  const MutexLock lock(mutex_, std::adopt_lock);
  for (const auto& [id, pool] : pools_)
    if (Busy(*pool) || LifecycleOf(*pool) != Lifecycle::kRunning) return false;
  use();
  return true;
}

void Pools::FreeUnfinished() {
  const MutexLock lock(mutex_);
  for (const auto& [id, pool] : pools_) pool->cycle->FreeUnfinished();
}

bool Pools::IsResident(PoolId id) {
  const MutexLock lock(mutex_);
  const Entry* const pool = Find(id);
  if (pool == nullptr) return false;
  return Busy(*pool) ? pool->last_asked == CycleKind::kResume : LifecycleOf(*pool) == Lifecycle::kRunning;
}

Status Pools::Later(Task task) {
  Entry& pool = *task.pool;
  AMEM_TRY(CanAsk(pool, task.kind));
  const CycleKind kind = task.kind;
  if (!Busy(pool)) {
    const Lifecycle now = LifecycleOf(pool);
    if (!pool.unheard.ok() && kind == CycleKind::kPause && now != Lifecycle::kRunning)
      return NotBack(pool.tag, pool.led, std::exchange(pool.unheard, {}));
    if (now == (kind == CycleKind::kPause ? Lifecycle::kPaused : Lifecycle::kRunning)) return {};
  }
  AMEM_TRY(StartWorker(kind));
  pool.unheard = {};
  pool.last_asked = kind;
  ++pool.waiting;
  tasks_.push_back(std::move(task));
  changed_->NotifyAll();
  return {};
}

Status Pools::StartWorker(CycleKind kind) {
  if (workers_->contains(kind)) return {};
  AMEM_ASSIGN(auto started,
              StartThread(kind == CycleKind::kPause ? "amem-pool-out" : "amem-pool-in", [this, kind] { Work(kind); }));
  workers_->emplace(kind, std::move(started));
  return {};
}

// A pool's first task is due if nothing of the pool is under way.
std::list<Pools::Task>::iterator Pools::Due(CycleKind kind) {
  auto due = tasks_.end();
  for (auto task = tasks_.begin(); task != tasks_.end(); ++task) {
    const bool behind = std::any_of(tasks_.begin(), task, [&](const Task& one) { return one.pool == task->pool; });
    if (behind || task->kind != kind || task->pool->running) continue;
    if (due == tasks_.end() || task->priority > due->priority) due = task;
  }
  return due;
}

void Pools::Work(CycleKind kind) {
  const MutexLock lock(mutex_);
  while (!stop_) {
    const auto due = Due(kind);
    if (due == tasks_.end()) {
      changed_->Wait(mutex_);
      continue;
    }
    const Task task = std::move(*due);
    tasks_.erase(due);
    Entry& pool = *task.pool;
    pool.running = kind;  // set before any wait
    --pool.waiting;
    Status status = Run(pool, task);
    if (!status.ok()) pool.unheard = std::move(status);
  }
}

}  // namespace amem
