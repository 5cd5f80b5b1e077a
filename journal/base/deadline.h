// When waits end. A pause or resume makes one Deadline when it begins and hands it down to all that it waits for; the parts
// follow from Deadlines, which a process makes once, from AMEM_TIMEOUT_MS.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>

namespace amem {

using Deadline = std::chrono::steady_clock::time_point;
inline Deadline Now() { return std::chrono::steady_clock::now(); }
inline Deadline In(std::chrono::milliseconds time) { return Now() + time; }
inline bool Passed(Deadline deadline) { return Now() >= deadline; }
// Rounded up, never negative, and at most some days, which fit into 32 bits.
inline std::chrono::milliseconds LeftUntil(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Now());
  return std::clamp(left, std::chrono::milliseconds(0), std::chrono::milliseconds(1'000'000'000));
}
inline std::chrono::milliseconds SinceThen(Deadline began) {
  return std::chrono::round<std::chrono::milliseconds>(Now() - began);
}

// How long a call may take. Ranks begin at different times, but what they do together, a round, begins for all of them when the
// last one has come, and ends for all when the time of the one that came first is up. A call that fails then is undone within
// a time of its own, so that the whole takes at most twice as long as `call`, and an eighth more where the rank that counts the
// votes has fallen silent.
class Deadlines {
 public:
  using Time = std::chrono::milliseconds;
  constexpr Deadlines() = default;
  explicit constexpr Deadlines(Time call) : call_(call) {}

  [[nodiscard]] constexpr Time call() const { return call_; }
  // A rank's own waits end so long before the round does, so that the reason is its vote. Also the least time that a vote has:
  // ranks that live are not left behind because the time of the round is up.
  [[nodiscard]] constexpr Time margin() const { return std::min(std::max(call_ / 8, Time(100)), call_ / 2); }
  [[nodiscard]] Deadline OwnPartOf(Deadline round) const { return round - margin(); }
  // What a round has at least, however late its last member came.
  [[nodiscard]] constexpr Time round_least() const { return 2 * margin(); }
  [[nodiscard]] constexpr Time undo() const { return call_ - call_ / 4; }

 private:
  Time call_{60'000};
};

// The advice of every message about a wait whose time was up and that a longer one may mend.
inline std::string OrRaiseTheTimeout(const std::string& advice) { return advice + ", or raise AMEM_TIMEOUT_MS"; }

}  // namespace amem
