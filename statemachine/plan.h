// Plans: what a pause or resume has to do, as a value.
#pragma once

#include <optional>
#include <vector>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

// Steps of one allocation run in their order; after the last step of a phase all members vote, and nobody begins the next phase
// before all did.
struct PlannedPhase {
  PhaseKind phase{};
  std::vector<Step> steps;
  friend bool operator==(const PlannedPhase&, const PlannedPhase&) = default;
};
struct Plan {
  CycleKind kind{};
  std::vector<PlannedPhase> phases;
  friend bool operator==(const Plan&, const Plan&) = default;
};

// What is left to do from here to everything released, respectively everything back. Both work from any half-done state: what
// is done already is not planned again, so the undo of a half-done pause is PlanResume, and the other way round.
//
// A pause frees memory while contents are still being copied: its release phase saves and frees own allocations one after the
// other, in the order in which the phase before (kScan) began to copy them.
Plan PlanPause(const State&);
Plan PlanResume(const State&);

// Memory that stands in for a lost owner's is one piece of this size, mapped over and over: a divisor of the whole, so that a
// slab of a gigabyte costs some megabytes.
Bytes StandInPiece(Bytes whole);

// The save steps of a pause from here.
std::vector<Step> ContentsToSave(const State&);
// The restore step of an allocation whose own device can reach all of it at `address` now; none if it has to wait.
std::optional<Step> ContentsToRestore(const State&, AllocationId, Address address);

}  // namespace amem
