#include "replay/job/story/job_cycles.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "journal/base/process_sight.h"
#include "replay/job/clock.h"
#include "replay/job/names.h"
#include "statemachine/plan.h"

namespace amem {
namespace {

// Clocks of two hosts are set to within this, or not at all.
constexpr std::int64_t kSkew_ns = 2'000'000'000;

class Joining {
 public:
  explicit Joining(std::span<const TimedStory> sessions) : sessions_(sessions) {}

  std::vector<JobCycle> Run() {
    std::vector<Part> parts;
    for (std::size_t s = 0; s < sessions_.size(); ++s)
      for (std::size_t c = 0; c < sessions_[s].attempts.size(); ++c) parts.emplace_back(s, c);
    std::ranges::stable_sort(parts, {}, [this](const Part& part) { return Begin(part); });
    for (const Part& part : parts) Add(part);
    for (JobCycle& cycle : cycles_) FindAbsent(cycle);
    return std::move(cycles_);
  }

 private:
  using Part = std::pair<std::size_t, std::size_t>;  // (session, attempt of it)
  [[nodiscard]] const Attempt& At(const Part& p) const { return sessions_[p.first].attempts[p.second]; }
  [[nodiscard]] std::int64_t Begin(const Part& p) const {
    return WrappedSum(At(p).came().time_ns, sessions_[p.first].offset_ns);
  }
  [[nodiscard]] std::int64_t End(const Part& p) const { return WrappedSum(At(p).last.time_ns, sessions_[p.first].offset_ns); }

  // A session is a part of a cycle once; they overlap in time, and where both have begun it is a member.
  [[nodiscard]] bool Fits(const JobCycle& cycle, const Part& part) const {
    const Part& other = cycle.parts.front();
    const Attempt &theirs = At(other), &mine = At(part);
    if (theirs.kind != mine.kind || theirs.tag != mine.tag) return false;
    if (std::ranges::find(cycle.parts, part.first, &Part::first) != cycle.parts.end()) return false;
    const SessionOpened &me = *sessions_[part.first].who, &them = *sessions_[other.first].who;
    if (!mine.tag.empty()) {  // each session's own affair: those of one number are shown together
      if (theirs.cycle != mine.cycle) return false;
    } else if (theirs.begun && mine.begun) {
      if (std::ranges::find(theirs.members, me.session) == theirs.members.end()) return false;
    } else if (me.host != them.host && !me.host.empty() && !them.host.empty()) {  // no other host shares memory
      return false;
    }
    const std::int64_t slack = SameBoot(me, them) ? 0 : kSkew_ns;
    const auto until = [slack](std::int64_t end) { return WrappedSum(static_cast<std::uint64_t>(end), slack); };
    return Begin(part) <= until(End(other)) && Begin(other) <= until(End(part));
  }

  void Add(const Part& part) {
    const std::size_t look_back = std::min<std::size_t>(cycles_.size(), 64);
    for (std::size_t i = cycles_.size() - look_back; i < cycles_.size(); ++i)
      if (Fits(cycles_[i], part)) return cycles_[i].parts.push_back(part);
    cycles_.push_back({.kind = At(part).kind, .parts = {part}, .absent = {}});
  }

  void FindAbsent(JobCycle& cycle) {
    std::ranges::sort(cycle.parts);
    const Part& first = cycle.parts.front();
    if (!At(first).tag.empty()) return;
    const auto took_part = [&](SessionId session) {
      return std::ranges::any_of(cycle.parts, [&](const Part& p) { return sessions_[p.first].who->session == session; });
    };
    for (const Part& part : cycle.parts) {
      for (const SessionId member : At(part).members) {
        const bool known = std::ranges::find(cycle.absent, member) != cycle.absent.end();
        if (!known && !took_part(member)) cycle.absent.push_back(member);
      }
      if (At(part).begun) return;  // it names all
    }
    // It never began, so no journal says for whom the others waited: presumably for the rest of the group.
    for (const TimedStory& other : sessions_) {
      const bool there = WrappedSum(other.first_ns, other.offset_ns) <= End(first) &&
                         WrappedSum(other.last_ns, other.offset_ns) >= Begin(first);
      const bool same = other.who->group == sessions_[first.first].who->group;
      if (there && same && !took_part(other.who->session)) cycle.absent.push_back(other.who->session);
    }
  }

  std::span<const TimedStory> sessions_;
  std::vector<JobCycle> cycles_;
};

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
      if (!progress.next_step) progress.next_step = step;
      ++progress.steps_left;
    }
  }
}

}  // namespace

std::vector<JobCycle> JoinAttempts(std::span<const TimedStory> sessions) { return Joining(sessions).Run(); }

std::vector<PauseContents> LastContents(std::span<const SessionStory> stories) {
  std::map<std::string, PauseContents> last;
  const auto take = [&last](const std::vector<Attempt>& attempts) {
    const auto it = std::ranges::find_if(attempts.rbegin(), attempts.rend(),
                                         [](const Attempt& a) { return static_cast<bool>(a.contents); });
    if (it == attempts.rend()) return;
    PauseContents& known = last[it->tag];
    if (it->cycle < known.cycle) return;
    if (it->cycle > known.cycle || known.processes == 0) known = {it->tag, it->cycle, 0, {}};
    ++known.processes;
    known.contents += it->contents;
  };
  for (const SessionStory& story : stories) {
    take(story.attempts);
    for (const auto& [id, attempts] : story.pools) take(attempts);
  }
  std::vector<PauseContents> all;
  for (auto& [tag, contents] : last) all.push_back(std::move(contents));
  return all;
}

Progress ProgressOf(const SessionStory& story, const Attempt& attempt, const State* state) {
  using Stage = Progress::Stage;
  const bool of_pool = !attempt.tag.empty();
  Progress progress{.since = attempt.begun ? attempt.begun : attempt.arrived};
  if (!attempt.begun) return progress;
  progress.stage = Stage::kBegun;
  progress.undoing = of_pool ? attempt.failed_step.has_value() : attempt.decided.has_value();
  if (attempt.phases.empty()) return progress;
  const Attempt::PhaseTaken& phase = attempt.phases.back();
  progress.phase = phase.phase;
  if (phase.decided) {
    progress.stage = phase.voted ? Stage::kDecided : Stage::kDecidedEarly;
  } else {
    progress.stage = phase.voted ? Stage::kVoted : Stage::kWorking;
  }
  progress.since = phase.decided ? phase.decided : phase.begun;
  progress.steps_done = phase.steps;
  if (!phase.decided && state != nullptr) CountStepsLeft(*state, attempt, progress);
  if (attempt.open_step) {
    progress.open_step = attempt.open_step->event;
    progress.since = attempt.open_step->at;
    progress.steps_left = std::max<std::uint64_t>(progress.steps_left, 1);
  } else if (const Moment& recorded = of_pool ? phase.worked : story.acted; recorded.time_ns > progress.since.time_ns) {
    progress.since = recorded;  // what NCCL and other pools do meanwhile is no progress of a pool
  }
  if (of_pool) return progress;  // which waits for nobody
  progress.did_its_part = story.records_votes ? progress.voted() || progress.decided() : progress.steps_left == 0;
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
    if (here && LifeOf({one.pid, one.start_ticks}).HasEnded())
      gone += fmt::format("{}{} (pid {})", gone.empty() ? "" : ", ", one.name, one.pid);
  }
  return text + (gone.empty() ? "" : "; ended meanwhile, with what it had on GPUs: " + gone) +
         "; amem log --kind freeze-step has the steps";
}

}  // namespace amem
