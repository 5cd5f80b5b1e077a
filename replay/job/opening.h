// Opening: where a journal begins, and who wrote it.
#pragma once

#include <cstdint>
#include <optional>

#include "journal/journal.h"
#include "replay/job/clock.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

struct Opening {
  JournalInfo info;
  // From event 1, or from the snapshot where that is gone. What an early crash or a test did not write is filled in: session
  // and pid as the journal's files have them, and as the time of opening that of the first event.
  SessionOpened who;
  State before;  // what the first event follows: nothing, or the snapshot that stands for older events
  std::uint64_t first_ns = 0, last_ns = 0;  // times of the first and the last event; 0: not readable
};
Result<Opening> ReadOpening(JournalReader& reader);

// One event; nothing: there is none of that number, or it is damaged.
Result<std::optional<Event>> ReadEvent(JournalReader& reader, SequenceNumber seq);

// The clock of these journals, which are read for their communicators only where they are of several boots; what of them cannot
// be read is left out.
struct OpenedJournal {
  const Opening* opening = nullptr;
  JournalReader* reader = nullptr;  // null: opened where it is needed
};
JobClock ClockOf(std::span<const OpenedJournal> journals);

// Opening::before alone. A failure says that the journal has lost its beginning.
Result<State> StateBefore(JournalReader& reader, const JournalInfo& info);
// Opening::who of a session that is known already, as from a state. Where the wall clock was set after the session had opened,
// the time of opening is as the clock tells it since: the dates of all events follow from it.
SessionOpened Completed(SessionOpened opened, const JournalInfo& info, std::uint64_t first_ns);

}  // namespace amem
