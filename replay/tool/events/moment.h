// Times as people give them: "12.5", "90 s", "10 min ago", "2026-11-21 20:20:58".
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace amem::tool {

struct GivenTime {
  bool wall = false;  // nanoseconds since 1970; else nanoseconds since the opening
  std::uint64_t ns = 0;
};
// `now_ns`: the wall clock, from which "ago" counts. Dates and times are UTC. Nothing: it is not a time.
std::optional<GivenTime> ParseTime(const std::string& text, std::uint64_t now_ns);
inline constexpr const char* kTimesKnown =
    "give seconds since the opening (12.5), a time ago (\"90 s ago\", \"10 min ago\", \"2 h ago\", \"1 day ago\"), or a date "
    "and "
    "time in UTC (\"2026-11-21 20:20:58\")";

}  // namespace amem::tool
