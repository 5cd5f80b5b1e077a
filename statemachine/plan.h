// Plans: what a pause or resume has to do, as a value.
#pragma once

#include <vector>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

// Imports whose descriptors the owner sends in one message: as many as a process may hold open at once.
struct ImportBatch {
  SessionId owner;
  std::vector<AllocationId> imports;  // in the order of their steps
  friend bool operator==(const ImportBatch&, const ImportBatch&) = default;
};

// After the last step of a phase all members vote, and nobody begins the next phase before all did.
struct PlannedPhase {
  PhaseKind phase{};
  std::vector<Step> steps;  // in the order in which they run
  // What each kScan or kBeginRestore step begins to copy, in the order of those steps: save or restore steps, which wait for
  // their own copies later.
  std::vector<std::vector<Step>> copies{};
  std::vector<ImportBatch> imports{};  // all import steps, in their order
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
//
// A resume copies contents back while it creates memory and imports: a copy begins (kBeginRestore) as soon as memory for
// kRestoreAtOnce can be reached, and what can only be reached through a mapping made for the copy comes after all own memory.
// Multicast objects that leave (Allocation::rebuilt) are unmapped, unbound and released before the memory that is bound to
// them. A resume makes an own one anew with the own memory, imports others with the imported memory, and adds this session's
// devices to each at once. The vote after that phase says that all sessions have added theirs, and only then is memory bound
// and the object mapped, in kResumeVerify: before that the driver would let these calls wait.
//
// A pause drains the network once all members have come and their devices are idle, because a kernel may wait for what another
// member still has to send. What a card holds is deregistered just before it is unmapped, and registered as soon as it is
// mapped with access.
//
// Imports are taken in batches, owner by owner in turns. Every session begins with the owner after itself, so that not all of
// them ask the same one; the first batches are small, because everybody waits for those.
//
// With a pool these are the plans for the chunks of that pool, and for those of others that were imported under its tag: the
// same phases and steps, but there are no multicast objects, and contents are saved and restored only where the pool's policy
// is to preserve them. The plans without a pool leave chunks of pools alone. A pool that does not exist has plans without any
// steps on memory.
inline constexpr Bytes kRestoreAtOnce = Bytes{256} << 20;
Plan PlanPause(const State&, PoolId pool = {});
Plan PlanResume(const State&, PoolId pool = {});

// The substitute for a lost owner's memory is one piece of this size, mapped over and over: a divisor of the whole, so that a
// slab of a gigabyte costs some megabytes.
Bytes SubstitutePiece(Bytes whole);

}  // namespace amem
