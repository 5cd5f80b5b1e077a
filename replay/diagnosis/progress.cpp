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
void CountStepsLeft(const JournalHistory& journal, PoolId pool, const Attempt::PhaseTaken& phase, Progress& progress) {
  if (phase.decided || !journal.findings.whole) return;
  const bool pausing = phase.phase < PhaseKind::kResumeArrive;
  const Plan plan = pausing ? PlanPause(journal.findings.state, pool) : PlanResume(journal.findings.state, pool);
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

Progress ProgressOf(const JournalHistory& journal, const std::string& tag) {
  Progress progress;
  const Attempt* last = LastAttempt(journal, tag);
  if (last == nullptr || last->end != Attempt::End::kOpen) return progress;
  const Attempt& attempt = *last;
  const bool of_pool = !tag.empty();
  progress.since = attempt.begun ? attempt.begun : attempt.arrived;
  if (!attempt.begun) return progress;
  progress.undoing = of_pool ? attempt.failed_step.has_value() : attempt.decided.has_value();
  if (attempt.phases.empty()) return progress;
  const Attempt::PhaseTaken& phase = attempt.phases.back();
  progress.phase = phase.phase;
  progress.since = phase.decided ? phase.decided : phase.begun;
  progress.steps_done = phase.steps - (attempt.open_step ? 1 : 0);
  CountStepsLeft(journal, journal.findings.state.PoolNamed(tag), phase, progress);
  if (attempt.open_step) {
    progress.step = attempt.open_step->step;
    progress.step_begun = true;
    progress.since = attempt.open_step->at;
    progress.steps_left = std::max<std::uint64_t>(progress.steps_left, 1);
  } else if (const Moment& recorded = of_pool ? phase.done : journal.last; recorded.time_ns > progress.since.time_ns) {
    progress.since = recorded;  // what NCCL and other pools do meanwhile is no progress of a pool
  }
  if (of_pool) return progress;  // which waits for nobody
  progress.did_its_part = journal.records_votes ? static_cast<bool>(phase.voted) || phase.decided : progress.steps_left == 0;
  return progress;
}

}  // namespace amem
