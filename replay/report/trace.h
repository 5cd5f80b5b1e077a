// Traces: the journals of a job as a file for chrome://tracing and ui.perfetto.dev.
//
// A process track per session, by rank, a thread track per thread that recorded; slices for pauses and resumes, their phases
// and steps, for the wait between a vote and its decision, and for exports and imports, with an arrow from one to the other;
// instants for votes, failures, lost peers, and what was seen of their processes; counters
// for memory of the device that is held and released, and, where there is any, kept in a pause, and pinned host memory.
//
// Journals are read and the trace is written piece by piece, so that the memory it takes does not grow with their length.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "journal/journal.h"

namespace amem {

// A moment of a job, in nanoseconds: after its first event, which is 0 in the trace, or on the wall clock since 1970.
struct TraceTime {
  std::int64_t ns = 0;
  bool wall = false;
};
// What of the job is drawn; both ends belong to it. A slice that has begun before the window is drawn with its true beginning,
// and one that goes on after it ends with the window. What has ended before is left out, but for the memory held at its
// beginning.
struct TraceWindow {
  std::optional<TraceTime> from, to;  // none: the beginning of the job, or its end
};

struct TraceSummary {
  std::uint64_t sessions = 0, slices = 0, arrows = 0, samples = 0;
  std::uint64_t events = 0;             // in the window
  std::uint64_t duration_ns = 0;        // of the whole job, as far as its journals can be read
  std::vector<std::string> incomplete;  // journals that are not drawn whole, and why
};
// `write` gets the text piece by piece: JSON in UTF-8, whatever bytes the journals have in their strings. kInvalid: the window
// ends before it begins, or a wall clock is asked for in a job that noted none.
Result<TraceSummary> WriteTrace(std::span<const std::unique_ptr<JournalReader>> journals,
                                const std::function<void(std::string_view)>& write, const TraceWindow& window = {});

}  // namespace amem
