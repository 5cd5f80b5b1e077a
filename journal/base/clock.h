// The clocks that the journal writes down, in nanoseconds.
#pragma once

#include <cstdint>

namespace amem {

// CLOCK_MONOTONIC: the same for all processes of a host, and std::chrono::steady_clock's. For events and durations.
std::uint64_t MonotonicNs();
// CLOCK_REALTIME: since 1970. For the one moment of a session from which readers tell the date of its events.
std::uint64_t RealtimeNs();

}  // namespace amem
