// The pauses and resumes of a timeline.
#include <algorithm>

#include "replay/report/timeline_parts.h"

namespace amem {

CycleCollector::CycleCollector(SessionTimeline& out, std::size_t limit) : out_(out), limit_(std::max<std::size_t>(limit, 8)) {}

void CycleCollector::Take(const Event& event, const Held& held) {
  if (const auto* begun = std::get_if<CycleBegun>(&event.body)) return Begin(event, *begun, held);
  if (!open_ && !Arrives(event, held)) return;
  CycleRecord& cycle = out_.cycles.back();
  cycle.ended_ns = event.time_ns;
  cycle.after = held;
  if (const auto* e = std::get_if<PhaseBegun>(&event.body)) {
    cycle.phases.push_back({.phase = e->phase, .begun_ns = event.time_ns, .worked_ns = event.time_ns});
  } else if (std::holds_alternative<StepBegun>(event.body)) {
    step_ns_ = event.time_ns;
  } else if (const auto* done = std::get_if<StepDone>(&event.body)) {
    Step(cycle, done->step.kind, event.time_ns);
  } else if (const auto* failed = std::get_if<StepFailed>(&event.body)) {
    Step(cycle, failed->step.kind, event.time_ns);
    if (!cycle.failed) {
      cycle.failed = *failed;
      cycle.failed_seq = event.seq;
    }
  } else if (const auto* decided = std::get_if<PhaseDecided>(&event.body)) {
    Decide(cycle, *decided, event.time_ns);
  } else if (std::holds_alternative<CycleDone>(event.body)) {
    End(cycle, event, Outcome::kDone);
  } else if (const auto* gave_up = std::get_if<CycleFailed>(&event.body)) {
    cycle.message = gave_up->message;
    cycle.number = gave_up->cycle;
    End(cycle, event, gave_up->undone ? Outcome::kUndone : Outcome::kNotUndone);
  }
}

void CycleCollector::Finish() { Thin(limit_); }

void CycleCollector::Open(CycleKind kind, std::uint64_t now_ns, const Held& held) {
  if (out_.cycles.size() >= 2 * limit_) Thin(limit_);
  out_.cycles.push_back({.kind = kind, .arrived_ns = now_ns, .ended_ns = now_ns, .before = held, .after = held});
  open_ = true;
}

// An arrival opens a cycle before it begins; a failure without any (of an older build) is one too.
bool CycleCollector::Arrives(const Event& event, const Held& held) {
  if (const auto* e = std::get_if<PhaseBegun>(&event.body)) {
    Open(e->phase == PhaseKind::kPauseArrive ? CycleKind::kPause : CycleKind::kResume, event.time_ns, held);
    return true;
  }
  const auto* failed = std::get_if<CycleFailed>(&event.body);
  if (failed) Open(failed->kind, event.time_ns, held);
  return failed != nullptr;
}

void CycleCollector::Begin(const Event& event, const CycleBegun& begun, const Held& held) {
  const bool arrived = open_ && !out_.cycles.back().begun && out_.cycles.back().kind == begun.kind;
  if (!arrived) Open(begun.kind, event.time_ns, held);
  CycleRecord& cycle = out_.cycles.back();
  cycle.number = begun.cycle;
  cycle.members = begun.members;
  cycle.begun = event.seq;
  cycle.begun_ns = cycle.ended_ns = event.time_ns;
  for (PhaseRecord& phase : cycle.phases) {  // the wait for the others
    phase.decided_ns = event.time_ns;
    phase.passed = true;
  }
}

void CycleCollector::Step(CycleRecord& cycle, StepKind kind, std::uint64_t now_ns) {
  if (const auto at = static_cast<std::size_t>(kind); at < kStepKinds) {
    ++cycle.steps[at].count;
    cycle.steps[at].duration_ns += now_ns - std::min(now_ns, step_ns_);
  }
  if (cycle.phases.empty()) return;
  ++cycle.phases.back().steps;
  cycle.phases.back().worked_ns = now_ns;
}

void CycleCollector::Decide(CycleRecord& cycle, const PhaseDecided& decided, std::uint64_t now_ns) {
  const bool known = !cycle.phases.empty() && cycle.phases.back().phase == decided.phase && cycle.phases.back().decided_ns == 0;
  if (!known) cycle.phases.push_back({.phase = decided.phase, .begun_ns = now_ns, .worked_ns = now_ns});
  PhaseRecord& phase = cycle.phases.back();
  phase.decided_ns = now_ns;
  phase.passed = decided.passed;
  phase.culprit = decided.culprit;
  if (decided.passed) return;
  if (!cycle.culprit) cycle.culprit = decided.culprit;
  if (cycle.message.empty()) cycle.message = decided.message;
}

void CycleCollector::End(CycleRecord& cycle, const Event& event, Outcome outcome) {
  cycle.ended = event.seq;
  cycle.outcome = outcome;
  open_ = false;
  if (outcome != Outcome::kDone) {
    ++out_.cycles_failed;
  } else {
    ++(cycle.kind == CycleKind::kPause ? out_.pauses_done : out_.resumes_done);
  }
}

// Keeps the first quarter, the last half, and of the cycles between them those that failed, preferring the newest.
void CycleCollector::Thin(std::size_t limit) {
  std::vector<CycleRecord>& all = out_.cycles;
  if (all.size() <= limit) return;
  const std::size_t begin = limit / 4, end = all.size() - limit / 2;
  std::size_t room = limit - limit / 4 - limit / 2;
  std::vector<bool> keep(all.size(), true);
  for (std::size_t i = end; i-- > begin;) {
    keep[i] = all[i].outcome != Outcome::kDone && room > 0;
    if (keep[i]) --room;
  }
  std::size_t at = 0;
  out_.cycles_left_out += std::erase_if(all, [&](const CycleRecord&) { return !keep[at++]; });
}

}  // namespace amem
