#include "journal/base/clock.h"

#include <time.h>

namespace amem {
namespace {

std::uint64_t Read(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace

std::uint64_t MonotonicNs() { return Read(CLOCK_MONOTONIC); }
std::uint64_t RealtimeNs() { return Read(CLOCK_REALTIME); }

}  // namespace amem
