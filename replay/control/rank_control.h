// The rank's side of requests from outside: comes to the step that was agreed on, waits there, and does what is asked.
//
// What a rank does for a request is done by the thread that came to the safe point (or to the program's own resume), and by no
// other. The state is the object's and not that thread's, so that a wait that was left for a signal handler is gone on with.
// The session's service thread hands over what is asked, and tells the tool how the rank stands.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>

#include "journal/base/deadline.h"
#include "replay/peers/requests.h"
#include "statemachine/event.h"

namespace amem::control {

// What is done to the rank's memory. Each is called by one thread at a time.
class Actions {
 public:
  virtual ~Actions() = default;
  // The program's tags that are resident, but for those whose contents a pause would forget. On failure none is paused.
  virtual Status PauseTags() = 0;
  virtual Status ResumeTags() = 0;  // those that PauseTags has paused; none: ok
  // Together with all ranks that share memory; on failure nothing has changed, unless NcclIsAway.
  virtual Status PauseNccl() = 0;
  // All of its memory or some, and no other thread is about to change that; after a pause that failed: it could not be undone.
  virtual bool NcclIsAway() = 0;
  virtual Status ResumeNccl() = 0;
  virtual Bytes Held() = 0;  // GPU memory that is resident now
  virtual void Note(EventBody event) = 0;
  // Launches of NCCL's are held as the order says, and what is launched is told; until LetLaunchesGo.
  virtual agreement::LaunchReading HoldLaunches(const agreement::LaunchOrder& order) = 0;
  virtual void LetLaunchesGo() = 0;
  // Until what was launched is done on the devices. From then on PauseNccl waits for no device, because the program runs on.
  virtual Status AwaitLaunches() = 0;
  virtual std::string WhyLaunchesCannotBeHeld() = 0;  // empty: they can; waits for nobody
  // How another rank stands; waits for a moment at most. kPeerLost: it has ended.
  virtual Result<RankStatus> Ask(SessionId rank) = 0;
};

class RankControl : public RequestServer {
 public:
  // How long a tool is taken for alive that is silent, because it was stopped.
  explicit RankControl(std::chrono::milliseconds patience = std::chrono::seconds(30)) : patience_(patience) {}
  ~RankControl() override;
  RankControl(const RankControl&) = delete;
  RankControl& operator=(const RankControl&) = delete;
  // Before a thread of the program comes with Serve or MayResume. `steps`: safe points that were passed before.
  void Begin(SessionId self, Actions& actions, std::uint64_t steps);

  // The program came to its `step`th safe point. True: something is asked, and Serve must be called.
  bool Came(std::uint64_t step) {
    std::uint64_t last = steps_.load(std::memory_order_relaxed);
    // Both ends are sequentially consistent (requests.h). Of several threads the one that is ahead has told.
    while (last < step && !steps_.compare_exchange_weak(last, step, std::memory_order_seq_cst)) {
    }
    return asked_at_steps_.load(std::memory_order_seq_cst) != 0;
  }
  void CameAt(std::uint64_t coarse_ns) { last_step_ns_.store(coarse_ns, std::memory_order_relaxed); }

  // Waits for as long as a request holds the caller. With `return_soon` it returns false after a tenth of a second, and the
  // caller, an interpreter that has to run its signal handlers, is to call again.
  bool Serve(std::uint64_t step, bool return_soon);

  // Around the program's own pauses and resumes.
  void OwnPauseHolds() { SetOwnPause(OwnPause::kPaused); }
  // True: it may resume now. Waits while a request stands, so that the memory stays away until the resume from outside.
  bool MayResume(bool return_soon);
  void OwnResumeEnded(bool resumed) { SetOwnPause(resumed ? OwnPause::kNo : OwnPause::kPaused); }

  void OnOrder(const Order& order) override;
  void OnToolGone() override;
  [[nodiscard]] RankStatus CurrentStatus() override;
  void NotifyOfChanges(std::function<void()> tell) override;

 private:
  enum class Mode { kIdle, kWaiting, kPaused };
  enum class Next { kGoOn, kAgain, kWait };
  enum class Nccl { kHere, kPaused, kInDoubt };                         // in doubt: its last pause or resume failed
  static constexpr std::uint64_t kOwnResume = 0;                        // a step that no safe point has
  static constexpr std::uint64_t kBetweenLaunches = ~std::uint64_t{0};  // likewise: AMem's own thread, while the program runs

  Next Advance(const Order& order, std::uint64_t step);
  Next AdvanceIdle(const Order& order, std::uint64_t step);
  void SetAsked(std::uint64_t request);
  void ServeBetweenLaunches();
  Next HoldLaunches(const Order& order, bool own_pause);
  Next AdvanceWaiting(const Order& order);
  Next AdvancePaused(const Order& order);
  Next ResumeAsAsked(const Order& order);
  Next Arrive(const Order& order, std::uint64_t step, bool own_pause);
  Next PauseNow(const Order& order);
  Next StayPaused(CycleKind failed, const Status& why);
  [[nodiscard]] std::optional<Next> UnlessNcclPauses();
  Next StayAway(const Status& why);
  Next GiveUp(const Status& why, Phase phase);
  void JournalRequestOnce(const Order& order);

  [[nodiscard]] bool ToolLives();
  void SetOwnPause(OwnPause own);
  [[nodiscard]] OwnPause OwnPauseNow();
  void MarkDone(std::uint64_t request);  // nothing more is to be done about this one
  void Begin(std::uint64_t request, Phase phase);
  using Change = std::function<void(RankStatus&)>;
  void ChangeStatus(const Change& change);  // of status_, under the lock
  void Report(
      Phase phase, Stage done, const Change& change = [](RankStatus&) {});

  const std::chrono::milliseconds patience_;
  alignas(64) std::atomic<std::uint64_t> steps_{0};
  std::atomic<std::uint64_t> last_step_ns_{0};
  // The request of order_, while something is to be done about it; and if it is to be done at a safe point.
  std::atomic<std::uint64_t> asked_{0}, asked_at_steps_{0};
  alignas(64) std::mutex mutex_;  // over the next ones
  std::condition_variable changed_;
  Order order_;
  RankStatus status_;  // but for steps and what is asked
  std::uint64_t changes_ = 0, done_ = 0, last_request_ = 0;
  Deadline void_after_{};    // unless the tool is heard before
  bool tool_lives_ = false;  // the one that gave order_
  std::function<void()> notify_;
  Actions* held_by_ = nullptr;  // what holds launches
  std::thread between_;         // ServeBetweenLaunches
  bool serves_between_ = false, ends_ = false;

  std::mutex serving_;  // over all below: one thread does what is asked
  Actions* actions_ = nullptr;
  SessionId self_;
  Mode mode_ = Mode::kIdle;
  std::uint64_t about_ = 0;  // the request of kWaiting and kPaused
  std::uint64_t seen_ = 0;   // is in the journal
  bool own_pause_ = false;   // of kWaiting and kPaused: NCCL's memory is away because of the program, which brings it back
  Bytes held_before_ = 0;
  bool tags_done_ = false;   // of `about_`: paused, or back
  Nccl nccl_ = Nccl::kHere;  // as requests have left it
};

}  // namespace amem::control
