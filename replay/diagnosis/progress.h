// Progress: where a session stands in a pause or resume that is open.
#pragma once

#include <cstdint>
#include <optional>

#include "replay/job/history.h"
#include "statemachine/event.h"

namespace amem {

struct Progress {
  std::optional<PhaseKind> phase;  // none: it waits for the others to join
  bool undoing = false;
  bool did_its_part = false;  // it voted, or nothing is left to do in that phase: it waits for the others' votes
  std::uint64_t steps_done = 0, steps_left = 0;
  std::optional<Step> step;  // begun and not finished, or else the next of those left
  bool step_begun = false;
  Moment since;  // of the last thing it recorded in this attempt
};
// Of its last attempt, or of the last one of the pool with that tag; nothing is set when that has ended.
Progress ProgressOf(const JournalHistory& journal, const std::string& tag = {});

}  // namespace amem
