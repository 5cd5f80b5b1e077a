// What the session's service thread and the rank's other threads share, under one lock: the order in force, how far it has been
// carried out, and the status for the tool. With the lock held nothing is called but the listener for changes, and what a
// caller of ChangeStatus or Report passes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

#include "journal/base/deadline.h"
#include "replay/peers/requests.h"

namespace amem::control {

// A program's safe points, and whether anything is asked of it there; a safe point without a request costs two atomic
// operations. Both sides use sequentially consistent operations (requests.h).
class SafepointCounter {
 public:
  void Begin(std::uint64_t steps) { steps_.store(steps, std::memory_order_seq_cst); }
  // True: something is asked. If several threads call it, the highest count wins.
  bool Came(std::uint64_t step) {
    std::uint64_t last = steps_.load(std::memory_order_relaxed);
    while (last < step && !steps_.compare_exchange_weak(last, step, std::memory_order_seq_cst)) {
    }
    return asked_at_steps_.load(std::memory_order_seq_cst) != 0;
  }
  void CameAt(std::uint64_t coarse_ns) { last_step_ns_.store(coarse_ns, std::memory_order_relaxed); }

  // The request of which something is still to be done; 0: none.
  [[nodiscard]] std::uint64_t asked() const { return asked_.load(std::memory_order_relaxed); }
  void SetAsked(std::uint64_t request, bool at_safe_points);
  void Describe(RankStatus& status) const;

 private:
  alignas(64) std::atomic<std::uint64_t> steps_{0};
  std::atomic<std::uint64_t> last_step_ns_{0};
  std::atomic<std::uint64_t> asked_{0}, asked_at_steps_{0};
};

// Of the rank's side.
struct ServeTimes {
  std::chrono::milliseconds patience{30'000};  // a tool that is silent, because it was stopped, is taken for alive so long
  std::chrono::milliseconds slice{100};        // after which a waiting thread of an interpreter is given back
  std::function<Deadline()> now = Now;         // the clock of `patience`
};

class RequestDesk {
 public:
  explicit RequestDesk(ServeTimes times) : times_(std::move(times)) {}

  SafepointCounter safe_points;
  [[nodiscard]] std::chrono::milliseconds slice() const { return times_.slice; }

  // ---- the service thread
  // True: a thread has to serve this order between launches, and there is none; the caller starts one, or says that it could
  // not (BetweenLaunchesEnded). `can_hold`: this rank can hold launches.
  [[nodiscard]] bool Receive(const Order& order, bool can_hold);
  void ToolGone();
  [[nodiscard]] RankStatus Current();
  void NotifyOfChanges(std::function<void()> notify);

  // ---- the threads that carry out requests
  struct Reading {
    Order order;  // request 0: nothing is asked
    std::uint64_t change = 0;
    bool ends = false;  // the rank ends, and serves no more
  };
  [[nodiscard]] Reading Read();
  void AwaitChange(std::uint64_t after, std::chrono::microseconds most);  // of what Read has
  [[nodiscard]] bool ToolLives();
  void MarkDone(std::uint64_t request);  // nothing more is to be done about this one
  // The tool reads which request a status is about, so that it takes nothing that is about an earlier one for an answer.
  void Begin(std::uint64_t request, Phase phase);
  // The status of a rank that is paused says how that request has ended, or is about a later one.
  [[nodiscard]] bool HasAnswered(std::uint64_t request);
  using Change = std::function<void(RankStatus&)>;
  void ChangeStatus(const Change& change);  // under the lock
  void Report(
      Phase phase, Stage done, const Change& change = [](RankStatus&) {});
  // The rank comes for the request, unless its program's own pause is another than the caller saw, or is changing.
  [[nodiscard]] bool Arrive(OwnPause seen, const Change& change);
  [[nodiscard]] OwnPause OwnPauseNow();
  // The rank has come for a request, which is to end before an own pause begins.
  [[nodiscard]] bool HoldsOwnPauses();
  // False: so it is. True: the status of an own pause says that it is under way.
  [[nodiscard]] bool BeginOwnPause();
  void EndOwnPause(bool holds);
  void SetOwnPause(OwnPause own);  // these three, and BeginOwnResume, need no memory
  // The tool counts a rank that its own program has paused as arrived, so the lock is held while this checks for a request.
  // False: there is one. True: there is none, and the status of an own pause now says that the rank resumes it.
  [[nodiscard]] bool BeginOwnResume();

  // ---- the thread that serves between launches
  // True: nothing has changed since that reading, or the rank ends; from now on an order needs another thread.
  [[nodiscard]] bool MayEndBetweenLaunches(const Reading& reading);
  void BetweenLaunchesEnded();
  void End();  // before that thread is joined for the last time

 private:
  // The order in force, as the connection of its tool left it.
  struct InForce {
    Order order;
    std::uint64_t last_request = 0, done = 0;  // numbers up to `done` need nothing more
    bool tool_lives = false;                   // the one that gave `order`
    Deadline void_after{};                     // unless that tool sends something before
  };
  void SetAskedLocked(std::uint64_t request);
  void SetOwnPauseLocked(OwnPause own);

  const ServeTimes times_;
  alignas(64) std::mutex mutex_;  // over all below
  std::condition_variable changed_;
  std::uint64_t changes_ = 0;
  InForce in_force_;
  RankStatus status_;  // but for safe points and what is asked
  std::function<void()> notify_;
  bool served_between_ = false, ends_ = false;
};

}  // namespace amem::control
