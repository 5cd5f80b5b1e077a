#include <algorithm>

#include "statemachine/fold.h"

namespace amem {

Status Fold::operator()(const CycleBegun& e) {
  const std::string doing = "begin " + std::string(ToText(e.kind)) + " " + std::to_string(e.cycle);
  const bool half = s_.lifecycle == Lifecycle::kPausing || s_.lifecycle == Lifecycle::kResuming;
  const bool pause = e.kind == CycleKind::kPause;
  if (s_.lifecycle != (pause ? Lifecycle::kRunning : Lifecycle::kPaused) && !half)
    return Bad(doing + ": the session is " + std::string(ToText(s_.lifecycle)));
  s_.lifecycle = pause ? Lifecycle::kPausing : Lifecycle::kResuming;
  s_.cycles = std::max(s_.cycles, e.cycle);
  s_.cycle = Cycle{e.kind, e.cycle, e.members, {}, {}, {}, half};
  return {};
}

Status Fold::operator()(const StepBegun& e) { return Worded("begin step ", e.step, BeginStep(e.step)); }
Status Fold::operator()(const StepDone& e) { return Worded("finish step ", e.step, FinishStep(e.step)); }
Status Fold::operator()(const StepFailed& e) { return Worded("fail step ", e.step, FailStep(e)); }

Status Fold::BeginStep(const Step& step) {
  AMEM_TRY(InCycle({}));
  if (s_.cycle.open_step) return Bad(": the step before it (" + ToText(*s_.cycle.open_step) + ") is neither done nor failed");
  s_.cycle.open_step = step;
  return {};
}

Status Fold::FinishStep(const Step& step) {
  AMEM_TRY(InCycle({}));
  if (s_.cycle.open_step != step) return Bad(": that step was not begun");
  AMEM_TRY(DoStep({}, step));
  s_.cycle.open_step.reset();
  return {};
}

Status Fold::FailStep(const StepFailed& e) {
  AMEM_TRY(InCycle({}));
  if (s_.cycle.open_step != e.step) return Bad(": that step was not begun");
  s_.cycle.open_step.reset();
  s_.cycle.failure = e.message;
  return {};
}

Status Fold::operator()(const PhaseBegun& e) {
  if (Waits(e.phase)) return {};  // for the others; a cycle begins once all have come
  AMEM_TRY(InCycle("begin phase " + std::string(ToText(e.phase))));
  s_.cycle.phase = e.phase;
  return {};
}

Status Fold::operator()(const PhaseDecided& e) {
  AMEM_TRY(InCycle("decide phase " + std::string(ToText(e.phase))));
  if (!e.passed) s_.cycle.failure = e.message;
  return {};
}

Status Fold::operator()(const CycleDone& e) {
  const std::string doing = "finish " + std::string(ToText(e.kind)) + " " + std::to_string(e.cycle);
  AMEM_TRY(InCycle(doing));
  if (s_.cycle.kind != e.kind || s_.cycle.number != e.cycle) return Bad(doing + ": another cycle is under way");
  if (s_.cycle.open_step) return Bad(doing + ": step " + ToText(*s_.cycle.open_step) + " is open");
  AMEM_TRY(e.kind == CycleKind::kPause ? AllGone(doing) : AllBack(doing));
  s_.lifecycle = e.kind == CycleKind::kPause ? Lifecycle::kPaused : Lifecycle::kRunning;
  if (e.kind == CycleKind::kResume) ForgetSaved();
  s_.cycle = {};
  return {};
}

Status Fold::operator()(const CycleFailed& e) {
  const std::string doing = "fail " + std::string(ToText(e.kind)) + " " + std::to_string(e.cycle);
  if (Waits(e.kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive)) {
    // It never began, because not all have come, and is not counted.
    s_.cycle = Cycle{e.kind, std::min(e.cycle, s_.cycles), {}, {}, {}, e.message};
    return {};
  }
  AMEM_TRY(InCycle(doing));
  if (e.undone) {
    AMEM_TRY(e.kind == CycleKind::kPause ? AllBack(doing) : AllGone(doing));
    s_.lifecycle = e.kind == CycleKind::kPause ? Lifecycle::kRunning : Lifecycle::kPaused;
    if (e.kind == CycleKind::kPause) ForgetSaved();
    s_.cycle.after_failed_undo = false;
  }
  s_.cycle.open_step.reset();
  s_.cycle.phase.reset();
  s_.cycle.failure = e.message;
  return {};
}

Status Fold::InCycle(const std::string& doing) const {
  if (s_.lifecycle == Lifecycle::kPausing || s_.lifecycle == Lifecycle::kResuming) return {};
  if (!seq_) return {};  // a snapshot repeats the last failure of a session that runs again
  return Bad(doing + ": no pause or resume is under way, the session is " + std::string(ToText(s_.lifecycle)));
}

bool Fold::Waits(PhaseKind phase) const {
  return seq_ && ((s_.lifecycle == Lifecycle::kRunning && phase == PhaseKind::kPauseArrive) ||
                  (s_.lifecycle == Lifecycle::kPaused && phase == PhaseKind::kResumeArrive));
}

Status Fold::DoStep(const std::string& doing, const Step& step) {
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
      return DoMappingStep(doing, step);
    case StepKind::kAddDevice:
    case StepKind::kBind:
    case StepKind::kUnbind:
      return DoMulticastStep(doing, step);
    default:
      return DoAllocationStep(doing, step);
  }
}

Status Fold::DoMappingStep(const std::string& doing, const Step& step) {
  const auto it = s_.mappings.find(step.address);
  if (it == s_.mappings.end()) return Bad(doing + ": there is no such mapping");
  Mapping& m = it->second;
  const Allocation* a = Find(m.allocation);
  AMEM_CHECK(a != nullptr, step.address, m.allocation);
  if (m.allocation != step.allocation) return Bad(doing + ": that address belongs to " + ToText(m.allocation));
  switch (step.kind) {
    case StepKind::kUnmap:
      if (!m.present) return Bad(doing + ": it is unmapped already");
      m.present = m.accessible = false;
      return {};
    case StepKind::kMap:
      if (m.present) return Bad(doing + ": it is mapped already");
      if (!a->resident) return Bad(doing + ": " + ToText(m.allocation) + " has no memory yet");
      m.present = true;
      return {};
    default:
      if (!m.present) return Bad(doing + ": it is not mapped");
      m.accessible = true;
      return {};
  }
}

Status Fold::DoAllocationStep(const std::string& doing, const Step& step) {
  Allocation* a = Find(step.allocation);
  if (a == nullptr) return Bad(doing + ": the allocation does not exist");
  if (a->placed()) return Bad(doing + ": it is part of a slab, which is released and made whole");
  switch (step.kind) {
    case StepKind::kSave:
      if (!a->own()) return Bad(doing + ": it is imported, and its owner saves it");
      if (!a->resident || a->awaiting_restore) return Bad(doing + ": it has no contents to save");
      a->saved = true;
      return {};
    case StepKind::kRestore:
      if (!a->resident || !a->saved) return Bad(doing + ": it has no memory, or no saved contents");
      a->awaiting_restore = false;
      return {};
    case StepKind::kReleaseImport:
    case StepKind::kReleaseOwn:
      if (a->own() != (step.kind == StepKind::kReleaseOwn)) return Bad(doing + ": it is " + (a->own() ? "own" : "imported"));
      if (!a->resident) return Bad(doing + ": it is released already");
      if (a->own() && !a->saved && !a->multicast) return Bad(doing + ": its contents were not saved");
      if (WhyKept(*a) != KeepReason::kNone) return Bad(doing + ": it must stay: " + std::string(ToText(WhyKept(*a))));
      if (IsBound(step.allocation)) return Bad(doing + ": a binding to a multicast object is in force");
      a->resident = a->awaiting_restore = false;
      if (const auto it = s_.multicasts.find(step.allocation); it != s_.multicasts.end()) LoseDevices(it->second);
      return {};
    case StepKind::kCreate:
    case StepKind::kImport:
      // An orphan is made anew; it may also have been imported in the moment in which its owner was lost.
      if (a->own() != (step.kind == StepKind::kCreate) && !(step.kind == StepKind::kCreate && s_.Orphaned(*a)))
        return Bad(doing + ": it is " + (a->own() ? "own" : "imported"));
      if (a->resident) return Bad(doing + ": it has memory already");
      if (a->saved) AMEM_TRY(MarkGapsDirty(step.allocation, *a));
      a->resident = true;
      a->awaiting_restore = a->saved;
      if (const auto it = s_.multicasts.find(step.allocation); it != s_.multicasts.end()) it->second.fresh = a->own();
      return {};
    default:
      return Bad(doing + ": not a step on an allocation");
  }
}

Status Fold::AllGone(const std::string& doing) const {
  for (const auto& [id, a] : s_.allocations) {
    // The undo of a resume leaves what the pause had left, also if the reason for that has gone since.
    if (s_.lifecycle == Lifecycle::kResuming && a.own() && !a.saved && !a.multicast) continue;
    if (a.resident && !a.placed() && WhyKept(a) == KeepReason::kNone)
      return Bad(doing + ": " + ToText(id) + " still has memory");
  }
  return AllBound(doing, false);
}

Status Fold::AllBack(const std::string& doing) const {
  for (const auto& [id, a] : s_.allocations) {
    if (!a.resident) return Bad(doing + ": " + ToText(id) + " has no memory");
    if (a.awaiting_restore) return Bad(doing + ": the contents of " + ToText(id) + " were not restored");
  }
  for (const auto& [address, m] : s_.mappings) {
    if (!m.present || (!m.accessible && !m.access.empty()))
      return Bad(doing + ": " + Hex(address.value) + " is not mapped with access");
  }
  return AllBound(doing, true);
}

void Fold::ForgetSaved() {
  for (auto& [id, a] : s_.allocations) a.saved = a.awaiting_restore = false;
  for (auto& [address, m] : s_.mappings) m.accessible = true;
  for (auto& [id, m] : s_.multicasts) {
    m.missing.clear();  // still there: of an object that other memory stands in for
    m.fresh = false;
  }
}

}  // namespace amem
