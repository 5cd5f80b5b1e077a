#include "replay/control/rank_control.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/thread.h"

namespace amem::control {

constexpr int kTries = 20;
constexpr std::chrono::milliseconds kSlice{100};
constexpr std::chrono::microseconds kBetweenReadings{500};  // while launches are held until all stand

// ---- what both threads know ------------------------------------------------------------------------------------------------

void RankControl::Begin(SessionId self, Actions& actions, std::uint64_t steps) {
  const std::lock_guard serving(serving_);
  self_ = self;
  actions_ = &actions;
  steps_.store(steps, std::memory_order_seq_cst);
  const std::lock_guard lock(mutex_);
  held_by_ = &actions;
}

RankControl::~RankControl() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    ++changes_;
    changed_.notify_all();
  }
  if (between_.joinable()) between_.join();
}

void RankControl::SetAsked(std::uint64_t request) {
  asked_.store(request, std::memory_order_seq_cst);
  asked_at_steps_.store(order_.launches.version == 0 ? request : 0, std::memory_order_seq_cst);
}

void RankControl::ChangeStatus(const Change& change) {
  const std::lock_guard lock(mutex_);
  RankStatus before = status_;
  change(status_);
  if (notify_ && status_ != before) notify_();
}

void RankControl::NotifyOfChanges(std::function<void()> tell) {
  const std::lock_guard lock(mutex_);
  notify_ = std::move(tell);
}

void RankControl::OnOrder(const Order& order) {
  const std::lock_guard lock(mutex_);
  void_after_ = In(patience_);
  if (order.request == 0 || order.request <= done_ || order.request < last_request_) return;
  last_request_ = order.request;
  order_ = order;
  tool_lives_ = true;
  SetAsked(order.ask == Ask::kNothing ? 0 : order.request);
  ++changes_;
  changed_.notify_all();
  if (order.launches.version == 0 || order.ask != Ask::kPause || serves_between_ || held_by_ == nullptr) return;
  if (between_.joinable()) between_.join();  // it has ended, or is about to without this lock
  auto started = StartThread("amem-between", [this] { ServeBetweenLaunches(); });
  if (!started.ok()) return;  // the tool gives up at its deadline
  serves_between_ = true;
  between_ = *std::move(started);
}

void RankControl::OnToolGone() {
  const std::lock_guard lock(mutex_);
  tool_lives_ = false;
  ++changes_;
  changed_.notify_all();
}

RankStatus RankControl::CurrentStatus() {
  const std::lock_guard lock(mutex_);
  RankStatus now = status_;
  now.steps = steps_.load(std::memory_order_seq_cst);
  now.last_step_ns = last_step_ns_.load(std::memory_order_relaxed);
  now.last_request = last_request_;
  if (asked_.load(std::memory_order_relaxed) != 0) now.asked = order_;
  if (now.launches.version == 0 && held_by_ != nullptr) now.launches.why_not = held_by_->WhyLaunchesCannotBeHeld();
  return now;
}

bool RankControl::ToolLives() {
  const std::lock_guard lock(mutex_);
  return tool_lives_ && !Passed(void_after_);
}

void RankControl::MarkDone(std::uint64_t request) {
  const std::lock_guard lock(mutex_);
  done_ = std::max(done_, request);
  if (asked_.load(std::memory_order_relaxed) == request) SetAsked(0);
}

// The tool reads `about`, so that it takes nothing that is about an earlier request for an answer to this one.
void RankControl::Begin(std::uint64_t request, Phase phase) {
  ChangeStatus([&](RankStatus& mine) {
    if (mine.about == request) return;
    mine.about = request;
    mine.failure = {};
    mine.phase = phase;
    mine.stage_done = Stage::kCome;
  });
}

void RankControl::Report(Phase phase, Stage done, const Change& change) {
  ChangeStatus([&](RankStatus& mine) {
    change(mine);
    mine.phase = phase;
    mine.stage_done = done;
  });
}

// ---- the thread of the program ---------------------------------------------------------------------------------------------

bool RankControl::Serve(std::uint64_t step, bool return_soon) {
  std::unique_lock serving(serving_, std::defer_lock);
  // Another thread may be inside for as long as the job is paused.
  for (int tries = 0; !serving.try_lock(); ++tries) {
    if (return_soon && tries >= kTries) return false;
    std::this_thread::sleep_for(kSlice / kTries);
  }
  for (bool slept = false;;) {
    std::unique_lock lock(mutex_);
    const std::uint64_t change = changes_;
    const Order order = asked_.load(std::memory_order_relaxed) != 0 ? order_ : Order();
    lock.unlock();
    const Next next = Advance(order, step);
    if (next == Next::kGoOn) return true;
    if (next == Next::kAgain) continue;
    if (return_soon && std::exchange(slept, true)) return false;
    lock.lock();
    changed_.wait_for(lock, kSlice, [&] { return changes_ != change; });
  }
}

// By AMem's own thread, from the order that holds launches to the end of what came of it. Meanwhile the program runs, until it
// launches.
void RankControl::ServeBetweenLaunches() {
  const std::lock_guard serving(serving_);
  for (;;) {
    std::unique_lock lock(mutex_);
    const std::uint64_t change = changes_;
    const Order order = asked_.load(std::memory_order_relaxed) != 0 ? order_ : Order();
    const bool ends = ends_;
    lock.unlock();
    const Next next = ends ? Next::kGoOn : Advance(order, kBetweenLaunches);
    if (next == Next::kAgain) continue;
    if (next == Next::kGoOn) {
      actions_->LetLaunchesGo();
      ChangeStatus([](RankStatus& mine) {
        mine.launches = {};
        mine.parked = false;
      });
    }
    lock.lock();
    if (next == Next::kGoOn && (changes_ == change || ends)) {
      serves_between_ = false;
      return;
    }
    if (next == Next::kGoOn) continue;
    if (mode_ == Mode::kIdle)
      changed_.wait_for(lock, kBetweenReadings, [&] { return changes_ != change; });
    else
      changed_.wait_for(lock, kSlice, [&] { return changes_ != change; });
  }
}

RankControl::Next RankControl::HoldLaunches(const Order& order, bool own_pause) {
  const agreement::LaunchReading reading = actions_->HoldLaunches(order.launches);
  if (order.launches.stands && reading.why_not.empty()) {
    ChangeStatus([&](RankStatus& mine) { mine.launches = {.version = reading.version}; });  // what it counted matters no more
    return Arrive(order, 0, own_pause);
  }
  Report(Phase::kHeld, Stage::kCome, [&](RankStatus& mine) {
    mine.at = 0;
    mine.launches = reading;
  });
  return Next::kWait;
}

RankControl::Next RankControl::Advance(const Order& order, std::uint64_t step) {
  if (mode_ == Mode::kPaused) return AdvancePaused(order);
  if (mode_ == Mode::kWaiting) return AdvanceWaiting(order);
  if (order.request != 0) return AdvanceIdle(order, step);
  ChangeStatus([](RankStatus& mine) {
    if (mine.phase == Phase::kHeld) mine.phase = Phase::kRunning;
  });
  return Next::kGoOn;
}

RankControl::Next RankControl::AdvanceIdle(const Order& order, std::uint64_t step) {
  Begin(order.request, Phase::kRunning);
  const bool resumes = order.ask == Ask::kResume;  // and nothing is paused
  if (resumes || (order.stage == Stage::kCome && !ToolLives())) {
    MarkDone(order.request);
    Report(Phase::kRunning, resumes ? Stage::kNccl : Stage::kCome);
    return Next::kGoOn;
  }
  // Inside its own pause a program may come to safe points whose numbers the others have not agreed on, and need not.
  const bool own = OwnPauseNow() == OwnPause::kPaused;
  if (step == kBetweenLaunches) return order.launches.version != 0 ? HoldLaunches(order, own) : Next::kGoOn;
  if (step == kOwnResume || own) return Arrive(order, step, true);
  if (order.stage == Stage::kCome && (order.target == 0 || step > order.target)) {
    Report(Phase::kHeld, Stage::kCome, [step](RankStatus& mine) { mine.at = step; });
    return Next::kWait;
  }
  if (step == order.target) return Arrive(order, step, false);
  Report(Phase::kRunning, Stage::kCome);
  return Next::kGoOn;
}

RankControl::Next RankControl::Arrive(const Order& order, std::uint64_t step, bool own_pause) {
  JournalRequestOnce(order);
  actions_->Note(SafepointReached{order.request, step});
  mode_ = Mode::kWaiting;
  about_ = order.request;
  own_pause_ = own_pause;
  tags_done_ = false;
  nccl_ = Nccl::kHere;
  held_before_ = actions_->Held();
  Report(Phase::kArrived, Stage::kCome, [&](RankStatus& mine) {
    mine.at = step;
    mine.at_ns = MonotonicNs();
    mine.held = held_before_;
  });
  return Next::kAgain;
}

RankControl::Next RankControl::AdvanceWaiting(const Order& order) {
  if (order.request != about_) return GiveUp({Code::kRefused, "the request was withdrawn"}, Phase::kRunning);
  Stage stage = order.stage;
  if (stage != Stage::kNccl && !ToolLives()) {
    // It may have died between its last word to one rank and that to another. The one that it told first decides for all.
    const bool asks = stage == Stage::kTags && order.told_first != SessionId() && order.told_first != self_;
    const auto first = asks ? actions_->Ask(order.told_first) : Result<RankStatus>(Status(Code::kPeerLost, "nobody"));
    if (!first && first.status().code() == Code::kTimeout) return Next::kWait;  // stopped: what it was told is not known yet
    const bool told =
        first && first->asked.request == about_ && first->asked.ask == Ask::kPause && first->asked.stage == Stage::kNccl;
    if (!told) return GiveUp({Code::kPeerLost, "the program that asked has ended, or does not answer"}, Phase::kRunning);
    stage = Stage::kNccl;
  }
  if (stage == Stage::kCome) return Next::kWait;
  if (!tags_done_) {
    Report(Phase::kPausing, Stage::kCome);
    if (order.all_tags)
      if (const Status paused = actions_->PauseTags(); !paused.ok()) return GiveUp(paused, Phase::kFailed);
    tags_done_ = true;
    Report(Phase::kPausing, Stage::kTags);
    return Next::kAgain;
  }
  return stage == Stage::kTags ? Next::kWait : PauseNow(order);
}

RankControl::Next RankControl::PauseNow(const Order& order) {
  const bool between = order.launches.version != 0, parks = order.launches.parks;
  if (!own_pause_) {
    if (between)
      if (const Status idle = actions_->AwaitLaunches(); !idle.ok()) return GiveUp(idle, Phase::kFailed);
    if (const auto next = parks ? std::nullopt : UnlessNcclPauses()) return *next;
  }
  mode_ = Mode::kPaused;
  const Bytes held = actions_->Held();
  const Bytes freed = held_before_ - std::min(held_before_, held);
  actions_->Note(RequestEnded{about_, CycleKind::kPause, Code::kOk, "", freed});
  Report(Phase::kPaused, Stage::kNccl, [&](RankStatus& mine) {
    mine.held = held;
    mine.freed = freed;
    mine.parked = parks;
  });
  return Next::kWait;
}

// A pause that the program has made meanwhile is for the program to end.
std::optional<RankControl::Next> RankControl::UnlessNcclPauses() {
  const Status paused = actions_->PauseNccl();
  nccl_ = Nccl::kPaused;
  if (paused.ok()) return {};
  const bool away = actions_->NcclIsAway() && OwnPauseNow() == OwnPause::kNo;
  nccl_ = away ? Nccl::kInDoubt : Nccl::kHere;
  return away ? StayAway(paused) : GiveUp(paused, Phase::kFailed);
}

// The undo of the pause failed too, on all ranks that share memory. What the program would launch now is refused, so it waits
// here like after a pause, and a resume from outside mends it, which brings the tags back first.
RankControl::Next RankControl::StayAway(const Status& why) {
  MarkDone(about_);
  mode_ = Mode::kPaused;
  return StayPaused(CycleKind::kPause, why);
}

// The rank goes on as before the request. Where its tags do not come back, it must not: it stays, and a resume from outside can
// mend it.
RankControl::Next RankControl::GiveUp(const Status& why, Phase phase) {
  const Status undone = actions_->ResumeTags();
  MarkDone(about_);
  if (!undone.ok()) {
    mode_ = Mode::kPaused;
    return StayPaused(CycleKind::kResume,
                      {undone.code(), why.message() + "; then its tags could not be resumed: " + undone.message()});
  }
  mode_ = Mode::kIdle;
  actions_->Note(RequestEnded{about_, CycleKind::kPause, why.code(), why.message()});
  Report(phase, Stage::kCome, [&](RankStatus& mine) {
    if (phase == Phase::kFailed) mine.failure = why;
  });
  return phase == Phase::kFailed ? Next::kGoOn : Next::kAgain;
}

RankControl::Next RankControl::AdvancePaused(const Order& order) {
  if (order.request == 0 || order.request == about_) return Next::kWait;
  if (order.ask == Ask::kResume) return ResumeAsAsked(order);
  JournalRequestOnce(order);
  about_ = order.request;
  Begin(order.request, Phase::kPausing);
  if (order.all_tags)
    if (const Status paused = actions_->PauseTags(); !paused.ok()) return StayPaused(CycleKind::kResume, paused);
  tags_done_ = true;
  if (nccl_ == Nccl::kInDoubt)
    if (const auto next = UnlessNcclPauses()) return *next;
  actions_->Note(RequestEnded{order.request, CycleKind::kPause, Code::kOk, ""});
  Report(Phase::kPaused, Stage::kNccl, [held = actions_->Held()](RankStatus& mine) { mine.held = held; });
  return Next::kWait;
}

RankControl::Next RankControl::ResumeAsAsked(const Order& order) {
  if (seen_ != order.request) {
    JournalRequestOnce(order);
    tags_done_ = false;
    Begin(order.request, Phase::kResuming);
  }
  if (!tags_done_) {
    if (const Status resumed = actions_->ResumeTags(); !resumed.ok()) {
      about_ = order.request;
      return StayPaused(CycleKind::kResume, resumed);
    }
    tags_done_ = true;
    Report(Phase::kResuming, Stage::kTags);
  }
  // Others may have been told already to bring NCCL's memory back, so that this goes on when the tool has died.
  if (order.stage != Stage::kNccl && ToolLives()) return Next::kWait;
  about_ = order.request;
  if (nccl_ != Nccl::kHere) {
    nccl_ = Nccl::kInDoubt;
    if (const Status resumed = actions_->ResumeNccl(); !resumed.ok()) return StayPaused(CycleKind::kResume, resumed);
  }
  nccl_ = Nccl::kHere;
  mode_ = Mode::kIdle;
  actions_->Note(RequestEnded{order.request, CycleKind::kResume, Code::kOk, ""});
  MarkDone(order.request);
  Report(Phase::kRunning, Stage::kNccl, [held = actions_->Held()](RankStatus& mine) { mine.held = held; });
  return Next::kGoOn;
}

RankControl::Next RankControl::StayPaused(CycleKind failed, const Status& why) {
  actions_->Note(RequestEnded{about_, failed, why.code(), why.message()});
  Report(Phase::kPaused, Stage::kCome, [&](RankStatus& mine) { mine.failure = why; });
  return Next::kWait;
}

void RankControl::JournalRequestOnce(const Order& order) {
  if (std::exchange(seen_, order.request) == order.request) return;
  const bool pauses = order.ask == Ask::kPause;
  actions_->Note(RequestSeen{order.request, pauses ? CycleKind::kPause : CycleKind::kResume, order.by_pid,
                             pauses ? order.target : 0, order.all_tags});
}

// ---- the program's own pauses ----------------------------------------------------------------------------------------------

void RankControl::SetOwnPause(OwnPause own) {
  ChangeStatus([&](RankStatus& mine) { mine.own_pause = own; });
}

OwnPause RankControl::OwnPauseNow() {
  const std::lock_guard lock(mutex_);
  return status_.own_pause;
}

// The tool takes a rank whose own pause holds for one that has come, so under one lock the rank looks whether it is asked, and
// says that it resumes. Where a request has paused the rank, and another thread of the program resumes, that thread waits too.
bool RankControl::MayResume(bool return_soon) {
  for (;;) {
    bool may = false;
    ChangeStatus([&](RankStatus& mine) {
      may = asked_.load(std::memory_order_relaxed) == 0;
      if (may && mine.own_pause != OwnPause::kNo) mine.own_pause = OwnPause::kResuming;
    });
    if (may) return true;
    if (!Serve(kOwnResume, return_soon)) return false;
  }
}

}  // namespace amem::control
