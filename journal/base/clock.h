// The clocks that the journal writes down, in nanoseconds.
#pragma once

#include <chrono>
#include <cstdint>

namespace amem {

// CLOCK_MONOTONIC: the same for all processes of a host, and std::chrono::steady_clock's. For events and durations.
inline std::uint64_t MonotonicNs() {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}
// CLOCK_REALTIME: since 1970. For the one moment of a session from which readers tell the date of its events.
inline std::uint64_t RealtimeNs() {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count());
}

}  // namespace amem
