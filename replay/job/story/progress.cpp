#include "replay/job/story/progress.h"

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
void CountStepsLeft(const State& state, const Attempt& attempt, Progress& progress) {
  const PoolId pool = state.PoolNamed(attempt.tag);
  const Plan plan = progress.phase < PhaseKind::kResumeArrive ? PlanPause(state, pool) : PlanResume(state, pool);
  std::uint64_t repeated = progress.steps_done;
  for (const PlannedPhase& planned : plan.phases) {
    if (planned.phase != progress.phase) continue;
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

// `state`: null where it is not known.
Progress Of(const SessionStory& story, const Attempt& attempt, const State* state) {
  const bool of_pool = !attempt.tag.empty();
  Progress progress{.begun = static_cast<bool>(attempt.begun), .since = attempt.begun ? attempt.begun : attempt.arrived};
  if (!attempt.begun) return progress;
  progress.undoing = of_pool ? attempt.failed_step.has_value() : attempt.decided.has_value();
  if (attempt.phases.empty()) return progress;
  const Attempt::PhaseTaken& phase = attempt.phases.back();
  progress.phase = phase.phase;
  progress.voted = static_cast<bool>(phase.voted);
  progress.decided = static_cast<bool>(phase.decided);
  progress.since = phase.decided ? phase.decided : phase.begun;
  progress.steps_done = phase.steps;
  if (!phase.decided && state != nullptr) CountStepsLeft(*state, attempt, progress);
  if (attempt.open_step) {
    progress.step = attempt.open_step->step;
    progress.step_begun = true;
    progress.since = attempt.open_step->at;
    progress.steps_left = std::max<std::uint64_t>(progress.steps_left, 1);
  } else if (const Moment& recorded = of_pool ? phase.worked : story.last; recorded.time_ns > progress.since.time_ns) {
    progress.since = recorded;  // what NCCL and other pools do meanwhile is no progress of a pool
  }
  if (of_pool) return progress;  // which waits for nobody
  progress.did_its_part = story.records_votes ? progress.voted || progress.decided : progress.steps_left == 0;
  return progress;
}

}  // namespace

Progress ProgressOf(const SessionStory& story, const std::string& tag) {
  const Attempt* last = LastAttempt(story, tag);
  if (last == nullptr || !last->open()) return {};
  return Of(story, *last, story.findings.whole ? &story.findings.state : nullptr);
}

Progress ProgressOf(const SessionStory& story, const Attempt& attempt, const State& state) {
  return Of(story, attempt, &state);
}

}  // namespace amem
