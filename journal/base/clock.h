// The clocks that the journal writes down, in nanoseconds.
#pragma once

#include <chrono>
#include <cstdint>

namespace amem {

// CLOCK_MONOTONIC: the same for all processes of a host, and std::chrono::steady_clock's. For events and durations.
inline std::uint64_t MonotonicNs() {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}
// CLOCK_REALTIME: since 1970. For the moments of a session from which readers tell the date of its events.
inline std::uint64_t RealtimeNs() {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count());
}

// Both clocks at one moment, from which readers tell the date of events.
struct WallClock {
  std::uint64_t realtime_ns = 0;
  std::uint64_t monotonic_ns = 0;  // 0: not known
  bool operator==(const WallClock&) const = default;
  static WallClock Now() { return {RealtimeNs(), MonotonicNs()}; }

  // What is to be added to a monotonic time; the difference wraps around.
  [[nodiscard]] constexpr std::int64_t Offset() const { return static_cast<std::int64_t>(realtime_ns - monotonic_ns); }
  // Somebody set the clock between: it has moved by more than a clock that runs a little fast or slow does.
  [[nodiscard]] constexpr bool IsSetSince(const WallClock& before) const {
    constexpr std::int64_t kSecond = 1'000'000'000;
    const auto moved =
        static_cast<std::int64_t>(static_cast<std::uint64_t>(Offset()) - static_cast<std::uint64_t>(before.Offset()));
    return moved > kSecond || moved < -kSecond;
  }
};

}  // namespace amem
