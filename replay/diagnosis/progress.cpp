#include "replay/diagnosis/progress.h"

#include <algorithm>

#include "statemachine/plan.h"

namespace amem {
namespace {

// These are planned whenever they are asked for, so that only the count shows which of them are done.
bool Repeats(StepKind kind) {
  return kind == StepKind::kQuiesce || kind == StepKind::kCheckMemory || kind == StepKind::kVerify ||
         kind == StepKind::kBeginRestore;
}

// What the state machine would still plan for that phase, given the steps that are done.
void CountStepsLeft(const JournalHistory& journal, const Attempt::PhaseTaken& phase, Progress& progress) {
  if (phase.decided || !journal.findings.whole) return;
  const bool pausing = phase.phase < PhaseKind::kResumeArrive;
  const Plan plan = pausing ? PlanPause(journal.findings.state) : PlanResume(journal.findings.state);
  for (const PlannedPhase& planned : plan.phases) {
    if (planned.phase != phase.phase) continue;
    std::uint64_t repeated = progress.steps_done;
    for (const Step& step : planned.steps) {
      if (Repeats(step.kind) && repeated > 0) {
        --repeated;
        continue;
      }
      if (!progress.step) progress.step = step;
      ++progress.steps_left;
    }
  }
}

}  // namespace

Progress ProgressOf(const JournalHistory& journal) {
  Progress progress;
  if (journal.attempts.empty() || journal.attempts.back().end != Attempt::End::kOpen) return progress;
  const Attempt& attempt = journal.attempts.back();
  progress.since = attempt.begun ? attempt.begun : attempt.arrived;
  if (!attempt.begun) return progress;
  progress.undoing = attempt.decided.has_value();
  if (attempt.phases.empty()) return progress;
  const Attempt::PhaseTaken& phase = attempt.phases.back();
  progress.phase = phase.phase;
  progress.since = phase.decided ? phase.decided : phase.begun;
  progress.steps_done = phase.steps - (attempt.open_step ? 1 : 0);
  CountStepsLeft(journal, phase, progress);
  if (attempt.open_step) {
    progress.step = attempt.open_step->step;
    progress.step_begun = true;
    progress.since = attempt.open_step->at;
    progress.steps_left = std::max<std::uint64_t>(progress.steps_left, 1);
  } else if (journal.last.time_ns > progress.since.time_ns) {
    progress.since = journal.last;
  }
  progress.did_its_part = journal.records_votes ? static_cast<bool>(phase.voted) || phase.decided : progress.steps_left == 0;
  return progress;
}

}  // namespace amem
