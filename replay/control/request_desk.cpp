#include "replay/control/request_desk.h"

#include <algorithm>
#include <utility>

namespace amem::control {

void SafepointCounter::SetAsked(std::uint64_t request, bool at_safe_points) {
  asked_.store(request, std::memory_order_seq_cst);
  asked_at_steps_.store(at_safe_points ? request : 0, std::memory_order_seq_cst);
}

void SafepointCounter::Describe(RankStatus& status) const {
  status.steps = steps_.load(std::memory_order_seq_cst);
  status.last_step_ns = last_step_ns_.load(std::memory_order_relaxed);
}

// ---- orders ----------------------------------------------------------------------------------------------------------------

void RequestDesk::SetAskedLocked(std::uint64_t request) {
  safe_points.SetAsked(request, in_force_.order.launches.version == 0);
}

bool RequestDesk::Receive(const Order& order, bool can_hold) {
  const std::lock_guard lock(mutex_);
  in_force_.void_after = times_.now() + times_.patience;
  if (order.request == 0 || order.request <= in_force_.done || order.request < in_force_.last_request) return false;
  in_force_.last_request = order.request;
  in_force_.order = order;
  in_force_.tool_lives = true;
  SetAskedLocked(order.ask == Ask::kNothing ? 0 : order.request);
  ++changes_;
  changed_.notify_all();
  if (order.launches.version == 0 || order.ask != Ask::kPause || !can_hold) return false;
  return !std::exchange(served_between_, true);
}

void RequestDesk::ToolGone() {
  const std::lock_guard lock(mutex_);
  in_force_.tool_lives = false;
  ++changes_;
  changed_.notify_all();
}

RequestDesk::Reading RequestDesk::Read() {
  const std::lock_guard lock(mutex_);
  return {safe_points.asked() != 0 ? in_force_.order : Order(), changes_, ends_};
}

void RequestDesk::AwaitChange(std::uint64_t after, std::chrono::microseconds most) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, most, [&] { return changes_ != after; });
}

bool RequestDesk::ToolLives() {
  const std::lock_guard lock(mutex_);
  return in_force_.tool_lives && times_.now() < in_force_.void_after;
}

void RequestDesk::MarkDone(std::uint64_t request) {
  const std::lock_guard lock(mutex_);
  in_force_.done = std::max(in_force_.done, request);
  if (safe_points.asked() == request) SetAskedLocked(0);
}

// ---- the status of this rank ------------------------------------------------------------------------------------------------

RankStatus RequestDesk::Current() {
  const std::lock_guard lock(mutex_);
  RankStatus now = status_;
  safe_points.Describe(now);
  now.last_request = in_force_.last_request;
  if (safe_points.asked() != 0) now.asked = in_force_.order;
  return now;
}

void RequestDesk::NotifyOfChanges(std::function<void()> notify) {
  const std::lock_guard lock(mutex_);
  notify_ = std::move(notify);
}

void RequestDesk::ChangeStatus(const Change& change) {
  const std::lock_guard lock(mutex_);
  const RankStatus before = status_;
  change(status_);
  if (notify_ && status_ != before) notify_();
}

void RequestDesk::Begin(std::uint64_t request, Phase phase) {
  ChangeStatus([&](RankStatus& mine) {
    if (mine.about == request) return;
    mine.about = request;
    mine.failure = {};
    mine.phase = phase;
    mine.stage_done = Stage::kCome;
  });
}

bool RequestDesk::HasAnswered(std::uint64_t request) {
  const std::lock_guard lock(mutex_);
  const bool says_how = status_.stage_done == Stage::kNccl || !status_.failure.ok();
  return status_.phase == Phase::kPaused && (says_how || status_.about != request);
}

void RequestDesk::Report(Phase phase, Stage done, const Change& change) {
  ChangeStatus([&](RankStatus& mine) {
    change(mine);
    mine.phase = phase;
    mine.stage_done = done;
  });
}

// ---- the program's own pauses ----------------------------------------------------------------------------------------------

bool RequestDesk::Arrive(OwnPause seen, const Change& change) {
  bool comes = false;
  ChangeStatus([&](RankStatus& mine) {
    comes = mine.own_pause == seen && (seen == OwnPause::kNo || seen == OwnPause::kPaused);
    if (!comes) return;
    change(mine);
    mine.phase = Phase::kArrived;
    mine.stage_done = Stage::kCome;
  });
  return comes;
}

// A pause of what the program has paused already changes nothing, and waits for nobody.
static bool HoldsOwnPausesOf(const RankStatus& mine) {
  const bool has_come = mine.phase == Phase::kArrived || mine.phase == Phase::kPausing || mine.phase == Phase::kPaused ||
                        mine.phase == Phase::kResuming;
  return has_come && mine.own_pause != OwnPause::kPaused;
}

bool RequestDesk::HoldsOwnPauses() {
  const std::lock_guard lock(mutex_);
  return HoldsOwnPausesOf(status_);
}

void RequestDesk::SetOwnPauseLocked(OwnPause own) {
  if (std::exchange(status_.own_pause, own) != own && notify_) notify_();
}

bool RequestDesk::BeginOwnPause() {
  const std::lock_guard lock(mutex_);
  if (HoldsOwnPausesOf(status_)) return false;
  if (status_.own_pause == OwnPause::kNo) SetOwnPauseLocked(OwnPause::kPausing);
  return true;
}

// Another thread may have ended one of its own meanwhile, or have begun to resume.
void RequestDesk::EndOwnPause(bool holds) {
  const std::lock_guard lock(mutex_);
  if (holds && status_.own_pause != OwnPause::kResuming) SetOwnPauseLocked(OwnPause::kPaused);
  if (!holds && status_.own_pause == OwnPause::kPausing) SetOwnPauseLocked(OwnPause::kNo);
}

void RequestDesk::SetOwnPause(OwnPause own) {
  const std::lock_guard lock(mutex_);
  SetOwnPauseLocked(own);
}

OwnPause RequestDesk::OwnPauseNow() {
  const std::lock_guard lock(mutex_);
  return status_.own_pause;
}

bool RequestDesk::BeginOwnResume() {
  const std::lock_guard lock(mutex_);
  if (safe_points.asked() != 0) return false;
  if (status_.own_pause != OwnPause::kNo) SetOwnPauseLocked(OwnPause::kResuming);
  return true;
}

// ---- between launches ------------------------------------------------------------------------------------------------------

bool RequestDesk::MayEndBetweenLaunches(const Reading& reading) {
  const std::lock_guard lock(mutex_);
  if (changes_ != reading.change && !reading.ends) return false;
  served_between_ = false;
  return true;
}

void RequestDesk::BetweenLaunchesEnded() {
  const std::lock_guard lock(mutex_);
  served_between_ = false;
}

void RequestDesk::End() {
  const std::lock_guard lock(mutex_);
  ends_ = true;
  ++changes_;
  changed_.notify_all();
}

}  // namespace amem::control
