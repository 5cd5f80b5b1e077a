// Progress: what a session does now in a pause or resume that is open.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "replay/job/story/story.h"
#include "statemachine/event.h"

namespace amem {

struct Progress {
  bool begun = false;              // all have come
  std::optional<PhaseKind> phase;  // none: it waits for the others to join, or has just begun
  bool undoing = false;
  bool voted = false, decided = false;  // on that phase
  bool did_its_part = false;            // it voted, or nothing is left to do in that phase: it waits for the others' votes
  std::uint64_t steps_done = 0, steps_left = 0;
  std::optional<Step> step;  // begun and not finished, or else the next of those left
  bool step_begun = false;
  Moment since;  // of the last thing it recorded in this attempt

  // For the others: until all have come, or when its own part of a phase is done.
  [[nodiscard]] bool waits() const { return !begun || voted || (phase && !decided && !step_begun && steps_left == 0); }
};
// Of its last attempt, or of the last one of the pool with that tag; nothing is set when that has ended.
Progress ProgressOf(const SessionStory& story, const std::string& tag = {});
// The same of that attempt of a session that goes on, in this state; null: it is not known.
Progress ProgressOf(const SessionStory& story, const Attempt& attempt, const State* state);

// A freeze that stands, in a sentence. `here`: its processes are this host's, and not those of a copy of their journals.
std::string TextOf(const FreezeStep& standing, bool here);

}  // namespace amem
