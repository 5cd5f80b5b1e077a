// Parts of the page's data about the job as a whole: the strip of all pauses, what was seen of processes, who held a device.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>

#include "replay/report/timeline.h"

namespace amem {

// Every pause and resume, as columns: beginning (differences), length, kind, number of the first, how many, how many failed.
// Taken from the session that has most of them.
nlohmann::ordered_json StripJson(const JobTimeline& job);
// What others saw of a session's process, [by, event, time, text, dead], and what it saw of its own threads.
nlohmann::ordered_json SeenJson(const JobTimeline& job, std::size_t session);
// When, and by whom, the end of a session was noticed, [time, by, event]; null: nobody did.
nlohmann::ordered_json DeathJson(const JobTimeline& job, std::size_t session);
// What came of requests from outside, and freezes: [event, time, text].
nlohmann::ordered_json OutsideJson(const JobTimeline& job, std::size_t session);
nlohmann::ordered_json ShortagesJson(const JobTimeline& job);

}  // namespace amem
