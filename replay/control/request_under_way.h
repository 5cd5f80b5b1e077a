// The request that a rank carries out: from the safe point, the resume or the launch at which the rank came, over the stages of
// its pause, to the end of its resume. It is the only one that touches the rank's memory for a request.
//
// Advance does what the order asks for now, and says whether the thread goes on, calls it again or waits. What must be
// remembered between two calls is in this object, not on the thread's stack, so that a wait that was left for a signal handler
// can be continued.
#pragma once

#include <cstdint>
#include <optional>

#include "replay/control/request_desk.h"
#include "replay/peers/requests.h"
#include "statemachine/agreement/launches.h"
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
  // Some or all of NCCL's memory is paused, and no other thread is about to change that; true after a failed pause: it could
  // not be undone.
  virtual bool NcclIsAway() = 0;
  virtual Status ResumeNccl() = 0;
  virtual Bytes Held() = 0;  // GPU memory that is resident now
  virtual void Note(EventBody event) = 0;
  // Holds NCCL's launches as the order says, until LetLaunchesGo. Returns what was launched.
  virtual agreement::LaunchReading HoldLaunches(const agreement::LaunchOrder& order) = 0;
  virtual void LetLaunchesGo() = 0;
  // Waits until what was launched is done on the devices. After that PauseNccl waits for no device, because the program runs
  // on.
  virtual Status AwaitLaunches() = 0;
  virtual std::string WhyLaunchesCannotBeHeld() = 0;  // empty: they can; waits for nobody
  // The status of another rank; waits for a moment at most. kPeerLost: it has ended.
  virtual Result<RankStatus> Ask(SessionId rank) = 0;
};

// One thread at a time.
class RequestUnderWay {
 public:
  enum class Next { kGoOn, kAgain, kWait };
  static constexpr std::uint64_t kOwnResume = 0;                        // a step that no safe point has
  static constexpr std::uint64_t kBetweenLaunches = ~std::uint64_t{0};  // likewise: AMem's own thread, while the program runs
  static constexpr std::uint64_t kOwnPause = ~std::uint64_t{1};         // of a thread that pauses, and comes for no request

  explicit RequestUnderWay(RequestDesk& desk) : desk_(desk) {}
  void Begin(SessionId self, Actions& actions);

  // After an exception what it has done counts, and the next call does the rest.
  Next Advance(const Order& order, std::uint64_t step);
  void LetLaunchesGo();                                             // whatever they were held for
  [[nodiscard]] bool idle() const { return mode_ == Mode::kIdle; }  // the rank has not come for a request

 private:
  enum class Mode { kIdle, kWaiting, kPaused };
  enum class Nccl { kHere, kPaused, kInDoubt };  // in doubt: its last pause or resume failed

  [[nodiscard]] Status Check() const;
  [[nodiscard]] std::optional<Next> UnlessWhole(const Order& order);  // nothing: Check holds, and has always held
  Next AdvanceIdle(const Order& order, std::uint64_t step);
  [[nodiscard]] Result<Stage> StageOf(const Order& order);
  Next HoldLaunches(const Order& order, OwnPause own);
  Next AdvanceWaiting(const Order& order);
  Next AdvancePaused(const Order& order);
  Next PauseAgain(const Order& order);
  Status PauseMoreTags();  // of a rank that is paused
  void EndAgain(const Order& order);
  void StayAsBefore(const Status& why);
  void SayWhatIsSo(const Order& order);
  Next ResumeAsAsked(const Order& order);
  Next Arrive(const Order& order, std::uint64_t step, OwnPause own, bool own_pause);
  Next PauseNow(const Order& order);
  Next StayPaused(CycleKind failed, const Status& why);
  [[nodiscard]] std::optional<Next> UnlessNcclPauses();
  Next StayAway(const Status& why);
  Next GiveUp(const Status& why, Phase phase);
  void JournalRequestOnce(const Order& order);

  struct Numbers {                     // of requests; 0: none
    std::uint64_t about = 0;           // of kWaiting and kPaused
    std::uint64_t again = 0;           // of kPaused: a later pause that is not done yet
    std::uint64_t seen = 0;            // the last one while it was idle
    std::uint64_t journaled = 0;       // the last one that the journal has
    std::uint64_t holds_launches = 0;  // for which launches are held; meanwhile the program runs
  };

  RequestDesk& desk_;
  Actions* actions_ = nullptr;
  SessionId self_;
  Mode mode_ = Mode::kIdle;
  Numbers number_;
  Status failed_before_;     // what the status said before the pause `again`
  bool own_pause_ = false;   // of kWaiting and kPaused: NCCL's memory is away because of the program, which brings it back
  bool tags_done_ = false;   // of the request under way: paused, or back
  Nccl nccl_ = Nccl::kHere;  // as requests have left it
  Bytes held_before_ = 0;
  Status broken_;  // a check that failed; of no later call is anything done
};

}  // namespace amem::control
