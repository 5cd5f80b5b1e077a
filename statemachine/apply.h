// The one transition function.
#pragma once

#include <cstdint>
#include <vector>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

// Folds `event` into `state`. On failure (kInvalid) the state is unchanged and the message names the order that was broken:
// "mapped: address 0x7f00, 2 MiB, allocation 3: that range is mapped already (at 0x7f00)". Event::seq must be State::last plus
// one, or zero for the events of a snapshot (Condensed and what follows it). A failed check (check.h) comes back the same way:
// then the state was damaged before, and the event may be applied in part.
Status Apply(State& state, const Event& event);

// What must hold between events; kInvalid names the first thing that does not.
Status CheckInvariants(const State& state);

// The same on every machine for the same state; used to compare a replay with the original.
std::uint64_t Digest(const State& state);

// The shortest list of events that leads from the empty state to `state` (equal but for nothing), beginning with Condensed;
// to be applied with sequence number 0 each. At any moment of a session's pauses and resumes; kInvalid before its first event,
// after its last, and for a state that events cannot say.
Result<std::vector<EventBody>> ToSnapshotEvents(const State& state);

}  // namespace amem
