// Traces: the journals of a job as a file for chrome://tracing and ui.perfetto.dev.
//
// A process track per session, by rank, a thread track per thread that recorded; slices for pauses and resumes, their phases
// and steps, and for exports and imports, with an arrow from one to the other; instants for failures and lost peers; counters
// for memory of the device that is held and released, and, where there is any, kept in a pause, and pinned host memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "journal/journal.h"

namespace amem {

struct TraceSummary {
  std::uint64_t sessions = 0, slices = 0, arrows = 0, samples = 0;
  std::vector<std::string> incomplete;  // journals that are not drawn whole, and why
};
// `write` gets the text piece by piece: JSON in UTF-8, whatever bytes the journals have in their strings.
Result<TraceSummary> WriteTrace(std::span<const std::unique_ptr<JournalReader>> journals,
                                const std::function<void(std::string_view)>& write);

}  // namespace amem
