// What a tool asks of a rank from outside, and what the rank says of itself: plain values, and the interface by which a service
// thread hands them to the rank. replay/control implements both sides.
//
//   The step that all agree on. A rank stores the number of its safe point and then reads whether it is asked; its service
//   stores what is asked and then reads that number, which is in its answer to the tool. Everything is sequentially
//   consistent, so a rank that has stored s and did not see the request is seen with s at least, and sees the request at s + 1:
//   no rank passes the largest number that the tool has read by more than one.
#pragma once

#include <cstdint>
#include <functional>

#include "statemachine/agreement/launches.h"
#include "statemachine/types.h"

namespace amem::control {

enum class Phase : std::uint8_t {
  kRunning,  // nothing is asked, or the rank is on its way to the step that was agreed on
  kHeld,     // in a safe point, until a step is agreed on; or between launches, until all have stopped
  kArrived,  // in the safe point that was agreed on, in its own resume, or between launches; waits for all others
  kPausing,
  kPaused,  // stays inside the safe point until a resume is asked for
  kResuming,
  kFailed,  // the pause failed, and the rank runs on as before
};

constexpr Enumerators<Phase> EnumeratorsOf(Phase) { return {Phase::kFailed, "phase"}; }

enum class Ask : std::uint8_t { kNothing, kPause, kResume };
constexpr Enumerators<Ask> EnumeratorsOf(Ask) { return {Ask::kResume, "request"}; }

// The stages of a request, up to which it may be carried out. A rank waits at each stage until all ranks have reached it.
enum class Stage : std::uint8_t {
  kCome,  // no more than coming: the request can be withdrawn, and is void when the tool dies
  kTags,  // the program's tags
  kNccl,  // NCCL's memory, together with all others; from here on the request is carried out without the tool
};
constexpr Enumerators<Stage> EnumeratorsOf(Stage) { return {Stage::kNccl, "stage"}; }

// Whether the program's own pause holds. While the program pauses or resumes, the rank comes for no request.
enum class OwnPause : std::uint8_t { kNo, kPaused, kResuming, kPausing };
constexpr Enumerators<OwnPause> EnumeratorsOf(OwnPause) { return {OwnPause::kPausing, "pause of its own"}; }

// What a tool wants of a rank; it takes the place of what was wanted before.
struct Order {
  std::uint64_t request = 0;  // goes up within a job; 0: what was asked stays, and the tool lives
  Ask ask{};                  // kNothing: the request is withdrawn
  Stage stage{};
  bool all_tags = false;
  std::uint64_t target = 0;  // the step; 0: not agreed on yet
  std::int32_t by_pid = 0;
  SessionId told_first{};             // the rank that gets each order first; should the tool die, its last order counts for all
  agreement::LaunchOrder launches{};  // version 0: the rank is asked at its safe points
  friend bool operator==(const Order&, const Order&) = default;
};

// What a rank says of itself.
struct RankStatus {
  std::uint64_t steps = 0;         // safe points that it came to
  std::uint64_t last_step_ns = 0;  // CLOCK_MONOTONIC_COARSE of the last one
  OwnPause own_pause{};
  Phase phase{};
  Stage stage_done{};              // of request `about`
  std::uint64_t about = 0;         // the request that phase, stage_done, at and failure are about
  std::uint64_t at = 0;            // the step at which it waits
  std::uint64_t at_ns = 0;         // and since when (CLOCK_MONOTONIC)
  Status failure{};                // why `about` failed on this rank
  Bytes freed = 0, held = 0;       // by the last pause; resident when it last came, paused or resumed
  Order asked{};                   // the order in force; request 0: none
  std::uint64_t last_request = 0;  // numbers up to this one were given out
  agreement::LaunchReading launches{};
  bool parked = false;  // it has stopped between launches, with all its memory in place
  friend bool operator==(const RankStatus&, const RankStatus&) = default;
};

// The rank's side, as its service sees it. OnOrder, OnToolGone and CurrentStatus are called by the service thread, and wait
// for nobody.
class RequestServer {
 public:
  virtual ~RequestServer() = default;
  virtual void OnOrder(const Order& order) = 0;
  virtual void OnToolGone() = 0;  // the connection of the tool that gave the last order has ended
  [[nodiscard]] virtual RankStatus CurrentStatus() = 0;
  // `notify` is called by the thread that changes what CurrentStatus shows, but for steps. Empty: nobody is notified any more,
  // and no call of the one before is under way when this returns.
  virtual void NotifyOfChanges(std::function<void()> notify) = 0;
};

}  // namespace amem::control
