// The rank's side of requests from outside: comes to the step that was agreed on, waits there, and does what is asked.
//
// Only the thread that came to the safe point, or to the program's own resume (between launches: a thread of AMem's), carries
// out a request. The state is in the object, not on that thread's stack, so that a wait that was left for a signal handler can
// be continued. The session's service thread hands over what is asked, and sends the rank's status to the tool.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "replay/control/request_desk.h"
#include "replay/control/request_under_way.h"
#include "replay/peers/requests.h"
#include "statemachine/event.h"

namespace amem::control {

class RankControl : public RequestServer {
 public:
  explicit RankControl(ServeTimes times = {}) : desk_(std::move(times)), request_(desk_) {}
  ~RankControl() override;
  RankControl(const RankControl&) = delete;
  RankControl& operator=(const RankControl&) = delete;
  // Before a thread of the program comes with Serve or MayResume. `steps`: safe points that were passed before.
  void Begin(SessionId self, Actions& actions, std::uint64_t steps);

  // The program came to its `step`th safe point. True: something is asked, and Serve must be called.
  bool Came(std::uint64_t step) { return desk_.safe_points.Came(step); }
  void CameAt(std::uint64_t coarse_ns) { desk_.safe_points.CameAt(coarse_ns); }

  // Waits for as long as a request holds the caller. With `return_soon` it returns false after ServeTimes::slice, and the
  // caller, an interpreter that has to run its signal handlers, is to call again.
  bool Serve(std::uint64_t step, bool return_soon);

  // Around the program's own pauses and resumes.
  //
  // Waits while the rank is carrying out a request: NCCL's memory is paused for one of the two, and which one brings it back
  // must be the same on all ranks.
  void BeginOwnPause();
  // True: it would not wait now.
  bool MayPause(bool return_soon);
  void OwnPauseEnded(bool holds) { desk_.EndOwnPause(holds); }
  // True: it may resume now. Waits while a request is in force, so that the memory stays away until the resume from outside.
  bool MayResume(bool return_soon);
  void OwnResumeEnded(bool resumed) { desk_.SetOwnPause(resumed ? OwnPause::kNo : OwnPause::kPaused); }

  void OnOrder(const Order& order) override;
  void OnToolGone() override { desk_.ToolGone(); }
  [[nodiscard]] RankStatus CurrentStatus() override;
  void NotifyOfChanges(std::function<void()> notify) override { desk_.NotifyOfChanges(std::move(notify)); }

 private:
  void ServeBetweenLaunches();
  RequestUnderWay::Next TurnOf(std::uint64_t step, RequestDesk::Reading& reading) noexcept;  // what the order asks for now
  bool LetLaunchesGo() noexcept;                                                             // false: try again

  RequestDesk desk_;
  std::mutex serving_;  // over the next one: one thread does what is asked
  RequestUnderWay request_;
  std::atomic<Actions*> holds_launches_{nullptr};  // who can; null: nobody yet
  std::thread between_;                            // ServeBetweenLaunches; the service thread's, and the destructor's
};

}  // namespace amem::control
