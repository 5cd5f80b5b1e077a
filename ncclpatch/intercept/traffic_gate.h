// The gate before what a network card or plugin does for NCCL. A pause shuts it once nothing is under way there; what NCCL
// begins then waits, or is answered as by a plugin that is not ready yet, until a resume opens it.
//
// Whoever begins something counts it and then asks IsShut; a pause shuts the gate and then asks what is under way. So the pause
// sees what was begun, or its thread sees that the gate is shut. Any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <string>

#include "journal/base/deadline.h"

namespace amem::intercept {

class TrafficGate {
 public:
  TrafficGate() = default;
  TrafficGate(const TrafficGate&) = delete;
  TrafficGate& operator=(const TrafficGate&) = delete;
  virtual ~TrafficGate() = default;

  [[nodiscard]] bool IsShut() const { return shut_.load(); }
  // Shuts each of these gates once nothing is under way there. Of one that cannot be: what is still under way, for people;
  // empty: it is shut.
  static std::map<TrafficGate*, std::string> Shut(const std::set<TrafficGate*>& gates, Deadline until);
  void Reopen();  // what waits goes on
  // Of a thread that found the gate shut. False: NCCL joins this thread, so what it wanted to begin is refused.
  [[nodiscard]] bool AwaitReopening();
  // A join of one of NCCL's threads has begun.
  static void ThreadIsJoined() noexcept;

 protected:
  struct Traffic {
    std::string what;        // for people; empty: nothing is under way
    bool for_ever = false;   // waiting longer for it is in vain
    bool as_before = false;  // probably in vain: an earlier pause has waited for as much
  };
  virtual Traffic UnderWay() = 0;
  // Around a wait, which was in vain if something is still under way at its end.
  virtual void BeginsToWait() {}
  virtual void WaitedInVain(std::chrono::nanoseconds waited) { static_cast<void>(waited); }

 private:
  struct Wait {
    std::chrono::nanoseconds took{};
    bool ends = false;
  };
  Traffic Busy();                                         // UnderWay, or what NCCL's threads are about to begin or to end
  bool ShutOrGiveUp(const Wait& wait, std::string* why);  // false: it has to wait more
  Traffic ShutIfQuiet();                                  // what is under way behind the gate; empty: it is shut

  std::atomic<bool> shut_{false};
};

}  // namespace amem::intercept
