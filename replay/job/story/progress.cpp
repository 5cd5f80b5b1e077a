#include "replay/job/story/progress.h"

#include <fmt/format.h>

#include <algorithm>

#include "journal/base/process_stat.h"
#include "replay/job/names.h"
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

}  // namespace

Progress ProgressOf(const SessionStory& story, const Attempt& attempt, const State* state) {
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
    progress.step = attempt.open_step->event;
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

Progress ProgressOf(const SessionStory& story, const std::string& tag) {
  const Attempt* last = LastAttempt(story, tag);
  if (last == nullptr || !last->open()) return {};
  return ProgressOf(story, *last, story.findings.whole ? &story.findings.state : nullptr);
}

std::string TextOf(const FreezeStep& standing, bool here) {
  const std::string when = DateText(standing.begun_ns), command = standing.goal == "frozen" ? "freeze" : "thaw";
  std::string text;
  if (standing.outcome.empty()) {
    text = fmt::format(
        "a {} that was begun with the freeze at {} {}: unless its tool is still at work, amem freeze --continue "
        "finishes it, and amem freeze --undo goes back",
        command, when, here ? "has not come to its end" : "had not come to its end when this copy of its journal was made");
  } else if (standing.outcome == "frozen") {
    text = fmt::format(
        "the job was frozen at {}: the driver keeps its GPU memory in host memory, and its calls wait; amem thaw "
        "brings it back",
        when);
  } else if (standing.outcome == "lost") {
    text = fmt::format("at the thaw after the freeze at {} a process was lost, and the others came back without it", when);
  } else {
    text = fmt::format("the thaw after the freeze at {} stopped half way; amem thaw tries again", when);
  }
  std::string gone;  // their number is another process's now, or nobody's
  for (const FreezeMember& one : standing.members) {
    if (here && StartTicks(one.pid) != one.start_ticks)
      gone += fmt::format("{}{} (pid {})", gone.empty() ? "" : ", ", one.name, one.pid);
  }
  return text + (gone.empty() ? "" : "; ended meanwhile, with what it had on GPUs: " + gone) +
         "; amem log --kind freeze-step has the steps";
}

}  // namespace amem
