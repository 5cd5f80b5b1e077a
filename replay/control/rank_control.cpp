#include "replay/control/rank_control.h"

#include <thread>
#include <utility>

#include "journal/base/thread.h"

namespace amem::control {

constexpr int kTries = 20;
constexpr std::chrono::microseconds kBetweenReadings{500};  // while launches are held until all have stopped

void RankControl::Begin(SessionId self, Actions& actions, std::uint64_t steps) {
  const std::lock_guard serving(serving_);
  request_.Begin(self, actions);
  desk_.safe_points.Begin(steps);
  holds_launches_.store(&actions);
}

RankControl::~RankControl() {
  desk_.End();
  if (between_.joinable()) between_.join();
}

// ---- the service thread ----------------------------------------------------------------------------------------------------

void RankControl::OnOrder(const Order& order) {
  if (!desk_.Receive(order, holds_launches_.load() != nullptr)) return;
  if (between_.joinable()) between_.join();  // it has ended, or is about to
  auto started = StartThread("amem-between", [this] { ServeBetweenLaunches(); });
  if (!started.ok()) return desk_.BetweenLaunchesEnded();  // the tool gives up at its deadline
  between_ = *std::move(started);
}

RankStatus RankControl::CurrentStatus() {
  RankStatus now = desk_.Current();
  Actions* const actions = holds_launches_.load();
  if (now.launches.version == 0 && actions != nullptr) now.launches.why_not = actions->WhyLaunchesCannotBeHeld();
  return now;
}

// ---- the thread of the program ---------------------------------------------------------------------------------------------

bool RankControl::Serve(std::uint64_t step, bool return_soon) {
  std::unique_lock serving(serving_, std::defer_lock);
  // Another thread may be inside for as long as the job is paused.
  for (int tries = 0; !serving.try_lock(); ++tries) {
    if (return_soon && tries >= kTries) return false;
    std::this_thread::sleep_for(desk_.slice() / kTries);
  }
  for (bool slept = false;;) {
    RequestDesk::Reading reading;
    const auto next = TurnOf(step, reading);
    if (next == RequestUnderWay::Next::kGoOn) return true;
    if (next == RequestUnderWay::Next::kAgain) continue;
    if (return_soon && std::exchange(slept, true)) return false;
    desk_.AwaitChange(reading.change, desk_.slice());
  }
}

// Without memory it may end anywhere; what it has done counts, and the next one, a moment later, does the rest. A thread that
// came for a request must not go on in the middle of it, nor end the process.
RequestUnderWay::Next RankControl::TurnOf(std::uint64_t step, RequestDesk::Reading& reading) noexcept {
  try {
    reading = desk_.Read();
    const bool ends = reading.ends && step == RequestUnderWay::kBetweenLaunches;
    return ends ? RequestUnderWay::Next::kGoOn : request_.Advance(reading.order, step);
  } catch (...) {
    std::this_thread::sleep_for(desk_.slice() / kTries);
    return RequestUnderWay::Next::kWait;
  }
}

bool RankControl::LetLaunchesGo() noexcept {
  try {
    request_.LetLaunchesGo();
    return true;
  } catch (...) {
    std::this_thread::sleep_for(desk_.slice() / kTries);
    return false;
  }
}

// By AMem's own thread, from the order that holds launches to the end of what came of it. Meanwhile the program runs, until it
// launches.
void RankControl::ServeBetweenLaunches() {
  using Next = RequestUnderWay::Next;
  const std::lock_guard serving(serving_);
  for (;;) {
    RequestDesk::Reading reading;
    const Next next = TurnOf(RequestUnderWay::kBetweenLaunches, reading);
    if (next == Next::kAgain) continue;
    if (next == Next::kGoOn) {
      if (LetLaunchesGo() && desk_.MayEndBetweenLaunches(reading)) return;
      continue;
    }
    desk_.AwaitChange(reading.change, request_.idle() ? kBetweenReadings : std::chrono::microseconds(desk_.slice()));
  }
}

void RankControl::BeginOwnPause() {
  while (!desk_.BeginOwnPause()) static_cast<void>(MayPause(false));
}
bool RankControl::MayPause(bool return_soon) {
  while (desk_.HoldsOwnPauses())
    if (!Serve(RequestUnderWay::kOwnPause, return_soon)) return false;
  return true;
}

// Where a request has paused the rank, and another thread of the program resumes, that thread waits too.
bool RankControl::MayResume(bool return_soon) {
  for (bool again = false; !desk_.BeginOwnResume(); again = true) {
    if (again) std::this_thread::sleep_for(return_soon ? desk_.slice() : desk_.slice() / kTries);  // until another thread comes
    if (again && return_soon) return false;
    if (!Serve(RequestUnderWay::kOwnResume, return_soon)) return false;
  }
  return true;
}

}  // namespace amem::control
