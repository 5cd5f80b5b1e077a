#include <algorithm>
#include <new>

#include "statemachine/fold.h"

namespace amem {

// A failure's text is for people. The cycle goes on as the event says also where the system gives no memory for a copy of it.
static void Say(std::string& failure, const std::string& why) {
  try {
    failure = why;
  } catch (const std::bad_alloc&) {
    failure = "no memory left";  // needs none
  }
}

Status Fold::operator()(const CycleBegun& e) {
  const Owner owner = OwnerOf(e.pool);
  if (owner.scope == nullptr) return Bad(ToText(e.pool) + " does not exist");
  const bool half = owner->lifecycle == Lifecycle::kPausing || owner->lifecycle == Lifecycle::kResuming;
  const bool pause = e.kind == CycleKind::kPause;
  if (owner->lifecycle != (pause ? Lifecycle::kRunning : Lifecycle::kPaused) && !half) return Bad(LifecycleText(owner));
  Cycle begun{e.kind, e.cycle, e.members, {}, {}, {}, half};  // before any change: there may be no memory for it
  owner->lifecycle = pause ? Lifecycle::kPausing : Lifecycle::kResuming;
  owner->cycles = std::max(owner->cycles, e.cycle);
  owner->cycle = std::move(begun);
  if (Pool* const pool = FindIn(s_.pools, owner.pool); pool != nullptr && pause) pool->keeps = e.keeps || (half && pool->keeps);
  return {};
}

Status Fold::operator()(const StepDone& e) { return EndStep(e.step, e.pool, nullptr); }
Status Fold::operator()(const StepFailed& e) { return EndStep(e.step, e.pool, &e.message); }

Status Fold::operator()(const StepBegun& e) {
  AMEM_ASSIGN(const Owner owner, InCycle(e.pool));
  if (owner->cycle.open_step)
    return Bad("the step before it (" + ToText(*owner->cycle.open_step) + ") is neither done nor failed");
  owner->cycle.open_step = e.step;
  return {};
}

Status Fold::EndStep(const Step& step, PoolId pool, const std::string* failure) {
  AMEM_ASSIGN(const Owner owner, InCycle(pool));
  if (owner->cycle.open_step != step) return Bad("that step was not begun");
  if (failure == nullptr) AMEM_TRY(DoStep(step, pool));
  owner->cycle.open_step.reset();
  if (failure != nullptr) Say(owner->cycle.failure, *failure);
  return {};
}

Status Fold::operator()(const PhaseBegun& e) {
  const Owner owner = OwnerOf(e.pool);
  if (Waits(e.phase, owner)) return {};  // for the others; a cycle begins once all have come
  AMEM_TRY(InCycle(e.pool).status());
  owner->cycle.phase = e.phase;
  return {};
}

Status Fold::operator()(const PhaseDecided& e) {
  AMEM_ASSIGN(const Owner owner, InCycle(e.pool));
  if (!e.passed) Say(owner->cycle.failure, e.message);
  return {};
}

Status Fold::operator()(const CycleDone& e) {
  AMEM_ASSIGN(const Owner owner, InCycle(e.pool));
  if (owner->cycle.kind != e.kind || owner->cycle.number != e.cycle) return Bad("another cycle is under way");
  if (owner->cycle.open_step) return Bad("step " + ToText(*owner->cycle.open_step) + " is open");
  AMEM_TRY(End(owner, e.kind == CycleKind::kPause));
  owner->cycle = {};
  return {};
}

Status Fold::operator()(const CycleFailed& e) {
  const Owner owner = OwnerOf(e.pool);
  if (Waits(e.kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive, owner)) {
    // It never began, because not all have come, and is not counted.
    owner->cycle = Cycle{e.kind, std::min(e.cycle, owner->cycles), {}, {}, {}, {}};
    Say(owner->cycle.failure, e.message);
    return {};
  }
  AMEM_TRY(InCycle(e.pool).status());
  if (e.undone || e.paused) {
    AMEM_TRY(End(owner, e.paused || e.kind == CycleKind::kResume));
    owner->cycle.after_failed_undo = false;
  }
  owner->cycle.open_step.reset();
  owner->cycle.phase.reset();
  Say(owner->cycle.failure, e.message);
  return {};
}

Status Fold::End(const Owner& owner, bool paused) {
  AMEM_TRY(paused ? AllGone(owner.pool) : AllBack(owner.pool));
  owner->lifecycle = paused ? Lifecycle::kPaused : Lifecycle::kRunning;
  paused ? ForgetSavedOfKept(owner.pool) : ForgetSaved(owner.pool);
  if (!paused && !owner.pool) ForgetKeptRegions();
  if (Pool* const pool = FindIn(s_.pools, owner.pool); pool != nullptr && !paused) pool->keeps = false;
  return {};
}

std::string Fold::LifecycleText(const Owner& owner) const {
  const auto* const pool = FindIn(s_.pools, owner.pool);
  return (pool != nullptr ? "pool " + pool->tag : "the session") + " is " + std::string(ToText(owner->lifecycle));
}

Result<Fold::Owner> Fold::InCycle(PoolId pool) const {
  const Owner owner = OwnerOf(pool);
  if (owner.scope == nullptr) return Bad(ToText(pool) + " does not exist");
  if (owner->lifecycle == Lifecycle::kPausing || owner->lifecycle == Lifecycle::kResuming) return owner;
  if (!seq_) return owner;  // a snapshot repeats the last failure of a session that runs again
  return Bad("no pause or resume is under way, " + LifecycleText(owner));
}

bool Fold::Waits(PhaseKind phase, const Owner& owner) const {
  if (!seq_ || owner.scope == nullptr) return false;
  return (owner->lifecycle == Lifecycle::kRunning && phase == PhaseKind::kPauseArrive) ||
         (owner->lifecycle == Lifecycle::kPaused && phase == PhaseKind::kResumeArrive);
}

Status Fold::DoStep(const Step& step, PoolId pool) {
  switch (step.kind) {
    case StepKind::kQuiesce:
    case StepKind::kCheckMemory:
    case StepKind::kVerify:
    case StepKind::kScan:
    case StepKind::kBeginRestore:
      return {};
    case StepKind::kUnmap:
    case StepKind::kMap:
    case StepKind::kSetAccess:
      return DoMappingStep(step, pool);
    case StepKind::kAddDevice:
    case StepKind::kBind:
    case StepKind::kUnbind:
      if (pool) return Bad("a pool has no multicast objects");
      return DoMulticastStep(step);
    case StepKind::kDrain:
    case StepKind::kDeregister:
    case StepKind::kRegister:
      if (pool) return Bad("no card's registration is undone for a pool");
      return step.kind == StepKind::kDrain ? Status{} : DoRegionStep(step);
    default:
      return DoAllocationStep(step, pool);
  }
}

Status Fold::DoRegionStep(const Step& step) {
  auto* const region = FindIn(s_.regions, step.region);
  if (region == nullptr) return Bad(ToText(step.region) + " does not exist");
  if (region->allocation != step.allocation) return Bad("it is of " + ToText(region->allocation));
  if (step.kind == StepKind::kDeregister) {
    if (!region->present) return Bad("the card has let go of it already");
    region->present = !region->kept.empty();  // a card that refuses keeps it
    return {};
  }
  if (region->present) return Bad("the card has it already");
  const auto mapping = s_.MappingAt(region->address);
  AMEM_CHECK(mapping != s_.mappings.end(), step.region, region->address);
  if (!mapping->second.present || !mapping->second.accessible) return Bad("its memory is not mapped with access");
  region->present = true;
  return {};
}

Status Fold::DoMappingStep(const Step& step, PoolId pool) {
  auto* const m = FindIn(s_.mappings, step.address);
  if (m == nullptr) return Bad("there is no such mapping");
  const Allocation* a = Find(m->allocation);
  AMEM_CHECK(a != nullptr, step.address, m->allocation);
  if (m->allocation != step.allocation) return Bad("that address belongs to " + ToText(m->allocation));
  AMEM_TRY(OfPool(*a, pool));
  switch (step.kind) {
    case StepKind::kUnmap:
      if (!m->present) return Bad("it is unmapped already");
      if (a->pinned + a->renewable > 0) {
        for (const auto& [id, region] : s_.regions)
          if (region.present && region.allocation == step.allocation && step.address <= region.address &&
              region.address < step.address + m->bytes)
            return Bad("a network card holds it by " + ToText(id));
      }
      m->present = m->accessible = false;
      return {};
    case StepKind::kMap:
      if (m->present) return Bad("it is mapped already");
      if (!a->resident) return Bad(ToText(m->allocation) + " has no memory yet");
      m->present = true;
      return {};
    default:
      if (!m->present) return Bad("it is not mapped");
      m->accessible = true;
      return {};
  }
}

Status Fold::OfPool(const Allocation& a, PoolId pool) {
  if (a.pool == pool) return {};
  return Bad(a.pool ? "it is a chunk of " + ToText(a.pool) : "it belongs to no pool");
}

Status Fold::DoAllocationStep(const Step& step, PoolId pool) {
  AMEM_ASSIGN(Allocation* const a, Known(step.allocation));
  if (a->placed()) return Bad("it is part of a slab, which is released and made whole");
  AMEM_TRY(OfPool(*a, pool));
  switch (step.kind) {
    case StepKind::kSave:
      if (!a->own()) return Bad("it is imported, and its owner saves it");
      if (!a->resident || a->awaiting_restore) return Bad("it has no contents to save");
      a->saved = true;
      return {};
    case StepKind::kRestore:
      if (!a->resident || !a->saved) return Bad("it has no memory, or no saved contents");
      a->awaiting_restore = false;
      return {};
    case StepKind::kReleaseImport:
    case StepKind::kReleaseOwn:
      return DoRelease(step, *a);
    case StepKind::kCreate:
    case StepKind::kImport:
      // An orphan is made anew; it may also have been imported in the moment in which its owner was lost.
      if (a->own() != (step.kind == StepKind::kCreate) && !(step.kind == StepKind::kCreate && s_.Orphaned(*a)))
        return Bad(a->own() ? "it is own" : "it is imported");
      if (a->resident) return Bad("it has memory already");
      if (a->saved) AMEM_TRY(MarkGapsDirty(step.allocation, *a));
      a->resident = true;
      a->awaiting_restore = a->saved;
      if (auto* const object = FindIn(s_.multicasts, step.allocation)) object->fresh = a->own();
      return {};
    default:
      return Bad("not a step on an allocation");
  }
}

Status Fold::DoRelease(const Step& step, Allocation& a) {
  if (a.own() != (step.kind == StepKind::kReleaseOwn)) return Bad(a.own() ? "it is own" : "it is imported");
  if (!a.resident) return Bad("it is released already");
  if (s_.Preserves(a) && !a.saved) return Bad("its contents were not saved");
  if (WhyKept(a) != KeepReason::kNone) return Bad("it must stay: " + std::string(ToText(WhyKept(a))));
  if (IsBound(step.allocation)) return Bad("a binding to a multicast object is in force");
  AMEM_CHECK(!a.placed(), step.allocation, a.slab);
  if (auto* const object = FindIn(s_.multicasts, step.allocation)) {
    object->missing = object->added;
    object->fresh = false;
  }
  a.resident = a.awaiting_restore = false;
  return {};
}

Status Fold::AllGone(PoolId pool) const {
  const bool undo = s_.LifecycleOf(pool) == Lifecycle::kResuming || !seq_;  // or a snapshot of a paused session
  for (const auto& [id, a] : s_.allocations) {
    if (a.pool != pool) continue;
    // The undo of a resume leaves what the pause had left, also if the reason for that has gone since.
    if (undo && s_.Preserves(a) && !a.saved) continue;
    if (a.resident && !a.placed() && WhyKept(a) == KeepReason::kNone) return Bad(ToText(id) + " still has memory");
  }
  return pool ? Status{} : AllBound(false);
}

Status Fold::AllBack(PoolId pool) const {
  for (const auto& [id, a] : s_.allocations) {
    if (a.pool != pool) continue;
    if (!a.resident) return Bad(ToText(id) + " has no memory");
    if (a.awaiting_restore) return Bad("the contents of " + ToText(id) + " were not restored");
  }
  for (const auto& [address, m] : s_.mappings) {
    const auto* const a = FindIn(s_.allocations, m.allocation);
    AMEM_CHECK(a != nullptr, address, m.allocation);
    if (a->pool != pool) continue;
    if (!m.present || (!m.accessible && !m.access.empty())) return Bad(Hex(address) + " is not mapped with access");
  }
  if (pool) return {};
  for (const auto& [id, region] : s_.regions)
    if (!region.present) return Bad(ToText(id) + " with " + region.card + " was not done again");
  return AllBound(true);
}

// Memory that a network card registered after its contents were saved, or did not deregister, stays, and the card may write to
// it during the pause. The copy in the backup is then out of date: if the next resume fails, its undo must not release the
// memory because a copy exists.
void Fold::ForgetSavedOfKept(PoolId pool) {
  for (auto& [id, a] : s_.allocations)
    if (a.pool == pool && a.resident && !a.awaiting_restore) a.saved = false;
}

void Fold::ForgetKeptRegions() {
  for (auto& [id, region] : s_.regions) {
    Allocation* const a = region.kept.empty() ? nullptr : Find(region.allocation);
    region.kept.clear();
    if (a == nullptr) continue;
    --a->pinned;
    ++a->renewable;
  }
}

void Fold::ForgetSaved(PoolId pool) {
  for (auto& [id, a] : s_.allocations)
    if (a.pool == pool) a.saved = a.awaiting_restore = false;
  for (auto& [address, m] : s_.mappings)
    if (const Allocation* a = Find(m.allocation); a != nullptr && a->pool == pool) m.accessible = true;
  if (pool) return;
  for (auto& [id, m] : s_.multicasts) {
    m.missing.clear();  // still there: of an object that has a substitute
    m.fresh = false;
  }
}

}  // namespace amem
