// Shortages: who held a device when its memory ran out, as the journals of the job say.
#pragma once

#include <cstddef>
#include <functional>

#include "journal/journal.h"
#include "replay/report/timeline.h"

namespace amem {

// Fills JobTimeline::shortages with the latest few steps that failed for lack of device memory. The states of that moment are
// read from the journals again: `reader_of` gives that of a session (by index in the job), null where it cannot be read.
void FindShortages(JobTimeline& job, const std::function<JournalReader*(std::size_t session)>& reader_of);

}  // namespace amem
