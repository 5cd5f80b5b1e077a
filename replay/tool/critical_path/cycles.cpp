#include "replay/tool/critical_path/cycles.h"

#include <fmt/format.h>

#include <algorithm>

#include "replay/job/clock.h"
#include "replay/job/opening.h"

namespace amem::tool {
namespace {

// Takes the events of one journal in their order.
class CycleReader {
 public:
  explicit CycleReader(SessionCycles& out) : out_(out) {}

  void Take(const Event& event) {
    if (PoolOfCycle(event.body)) return;  // which waits for nobody
    now_ns_ = event.time_ns;
    out_.for_clock.Take(event);
    if (const auto* phase = std::get_if<PhaseBegun>(&event.body)) return Phase(phase->phase);
    if (const auto* begun = std::get_if<CycleBegun>(&event.body)) return Begin(*begun);
    if (!open_) return;
    SessionCycle& cycle = out_.cycles.back();
    cycle.ended_ns = now_ns_;
    if (const auto* step = std::get_if<StepBegun>(&event.body)) {
      steps_.push_back({step->step, now_ns_});
    } else if (const auto* done = std::get_if<StepDone>(&event.body)) {
      StepEnded(done->step);
    } else if (const auto* failed = std::get_if<StepFailed>(&event.body)) {
      StepEnded(failed->step);
    } else if (const auto* vote = std::get_if<VoteCast>(&event.body)) {
      if (PhasePart* part = Part(); part != nullptr && part->phase == vote->phase) part->done_ns = now_ns_;
    } else if (const auto* decided = std::get_if<PhaseDecided>(&event.body)) {
      if (PhasePart* part = Part(); part != nullptr && part->phase == decided->phase) part->decided_ns = now_ns_;
    } else if (std::holds_alternative<CycleDone>(event.body)) {
      End("done");
    } else if (std::holds_alternative<CycleFailed>(event.body)) {
      End("failed");
    }
  }

 private:
  struct RunningStep {
    Step step;
    std::uint64_t begun_ns = 0;
  };

  PhasePart* Part() { return open_ && !out_.cycles.back().parts.empty() ? &out_.cycles.back().parts.back() : nullptr; }

  // An arrive phase comes twice: the first waits for the others, before the pause or resume begins.
  void Phase(PhaseKind phase) {
    const bool arrives = phase == PhaseKind::kPauseArrive || phase == PhaseKind::kResumeArrive;
    const bool arriving = !open_ && arrives;
    if (arriving) Open(phase == PhaseKind::kPauseArrive ? CycleKind::kPause : CycleKind::kResume);
    if (!open_) return;
    steps_.clear();
    out_.cycles.back().parts.push_back({.phase = phase, .arriving = arriving, .begun_ns = now_ns_, .done_ns = now_ns_});
  }

  void Open(CycleKind kind) {
    out_.cycles.push_back({.kind = kind, .begun_ns = now_ns_, .ended_ns = now_ns_, .outcome = "not over"});
    open_ = true;
  }

  void Begin(const CycleBegun& begun) {
    if (!open_ || out_.cycles.back().number != 0) Open(begun.kind);
    SessionCycle& cycle = out_.cycles.back();
    cycle.number = begun.cycle;
    cycle.members = begun.members;
    std::ranges::sort(cycle.members);
    if (PhasePart* part = Part(); part != nullptr && part->arriving) part->decided_ns = now_ns_;
  }

  void StepEnded(const Step& step) {
    const auto begun =
        std::ranges::find_if(steps_.rbegin(), steps_.rend(), [&](const RunningStep& s) { return s.step == step; });
    PhasePart* part = Part();
    if (part == nullptr) return;
    part->done_ns = now_ns_;
    if (begun == steps_.rend()) return;
    const std::uint64_t took = now_ns_ - std::min(now_ns_, begun->begun_ns);
    if (took >= part->step_ns) {
      part->step = ToText(step);
      part->step_ns = took;
    }
    steps_.erase(std::next(begun).base());
  }

  void End(const char* outcome) {
    out_.cycles.back().outcome = outcome;
    open_ = false;
  }

  SessionCycles& out_;
  std::vector<RunningStep> steps_;
  std::uint64_t now_ns_ = 0;
  bool open_ = false;
};

// One session's try, on the clock of all.
struct Try {
  const SessionCycle* cycle = nullptr;
  SessionId session;
  std::int64_t offset_ns = 0;
  [[nodiscard]] std::int64_t At(std::uint64_t time_ns) const { return WrappedSum(time_ns, offset_ns); }
};

std::uint64_t Positive(std::int64_t difference_ns) { return difference_ns < 0 ? 0 : static_cast<std::uint64_t>(difference_ns); }

// The nth phase of each try that has the same.
CyclePhase JoinPhase(const std::vector<Try>& tries, std::size_t nth, const PhasePart& like) {
  CyclePhase phase{.name = like.arriving ? "arrival" : std::string(ToText(like.phase))};
  std::vector<std::pair<std::int64_t, const Try*>> ends;
  std::int64_t begun = 0, over = 0;
  for (const Try& t : tries) {
    if (nth >= t.cycle->parts.size() || t.cycle->parts[nth].phase != like.phase ||
        t.cycle->parts[nth].arriving != like.arriving)
      continue;
    const PhasePart& part = t.cycle->parts[nth];
    const std::int64_t from = t.At(part.begun_ns), to = t.At(std::max(part.done_ns, part.decided_ns));
    begun = ends.empty() ? from : std::min(begun, from);
    over = ends.empty() ? to : std::max(over, to);
    ends.emplace_back(t.At(part.done_ns), &t);
  }
  std::ranges::sort(ends, {}, [](const auto& end) { return std::pair(end.first, end.second->session); });
  const auto& [last_ns, last] = ends.back();
  phase.took_ns = Positive(WrappedDifference(over, begun));
  phase.last = last->session;
  phase.step = last->cycle->parts[nth].step;
  phase.step_ns = last->cycle->parts[nth].step_ns;
  phase.cost_ns = ends.size() < 2 ? 0 : Positive(WrappedDifference(last_ns, ends[ends.size() - 2].first));
  for (const auto& [end_ns, t] : ends) phase.waits.push_back({t->session, Positive(WrappedDifference(last_ns, end_ns))});
  return phase;
}

JobCycle Join(const std::vector<Try>& tries) {
  const Try& first = tries.front();
  JobCycle cycle{.kind = first.cycle->kind,
                 .members = std::max<std::uint64_t>(first.cycle->members.size(), tries.size()),
                 .seen = tries.size(),
                 .outcome = "done"};
  const auto longest = std::ranges::max_element(tries, {}, [](const Try& t) { return t.cycle->parts.size(); });
  std::int64_t began = first.At(first.cycle->begun_ns), ended = first.At(first.cycle->ended_ns);
  for (const Try& t : tries) {
    began = std::min(began, t.At(t.cycle->begun_ns));
    ended = std::max(ended, t.At(t.cycle->ended_ns));
    cycle.number = std::max(cycle.number, t.cycle->number);
    if (t.cycle->outcome == "failed" || cycle.outcome == "done") cycle.outcome = t.cycle->outcome;
  }
  cycle.began_ns = Positive(began);
  cycle.took_ns = Positive(WrappedDifference(ended, began));
  for (std::size_t i = 0; i < longest->cycle->parts.size(); ++i)
    cycle.phases.push_back(JoinPhase(tries, i, longest->cycle->parts[i]));
  return cycle;
}

// Whether the other belongs to the same pause or resume: the same members, at the same time. Who never began knows no members.
bool Together(const Try& a, const Try& b) {
  if (a.cycle->kind != b.cycle->kind || a.session == b.session) return false;
  const bool known = !a.cycle->members.empty() && !b.cycle->members.empty();
  if (known && a.cycle->members != b.cycle->members) return false;
  return a.At(a.cycle->begun_ns) <= b.At(b.cycle->ended_ns) && b.At(b.cycle->begun_ns) <= a.At(a.cycle->ended_ns);
}

}  // namespace

Result<SessionCycles> ReadCycles(JournalReader& reader, ReadReport& damage) {
  Result<Opening> opening = ReadOpening(reader);
  if (!opening) return opening.status();
  SessionCycles cycles{.who = std::move(opening->who), .first_ns = opening->first_ns};
  CycleReader taker(cycles);
  Result<ReadReport> read =
      reader.Read(SequenceNumber{1}, kToTheEnd, [&](const Event& event) { return taker.Take(event), true; });
  if (!read) return read.status();
  damage = *std::move(read);
  return cycles;
}

std::vector<JobCycle> JoinCycles(const std::vector<SessionCycles>& sessions) {
  std::vector<JobClock::Journal> journals;
  for (const SessionCycles& s : sessions) journals.push_back({&s.who, s.first_ns, s.for_clock});
  const JobClock clock(journals);
  std::vector<Try> tries;
  for (const SessionCycles& s : sessions) {
    for (const SessionCycle& cycle : s.cycles) tries.push_back({&cycle, s.who.session, clock.OffsetOf(s.who)});
  }
  std::ranges::stable_sort(tries, {}, [](const Try& t) { return t.At(t.cycle->begun_ns); });
  std::vector<std::vector<Try>> groups;
  for (const Try& t : tries) {
    // Tries are in order of time, so those of one pause or resume are near the end.
    const auto fits = [&t](const std::vector<Try>& group) {
      return Together(group.front(), t) &&
             std::ranges::none_of(group, [&t](const Try& other) { return other.session == t.session; });
    };
    const std::size_t near = std::min<std::size_t>(groups.size(), 16);
    const auto group = std::ranges::find_if(groups.rbegin(), groups.rbegin() + static_cast<std::ptrdiff_t>(near), fits);
    if (group != groups.rbegin() + static_cast<std::ptrdiff_t>(near)) {
      group->push_back(t);
    } else {
      groups.push_back({t});
    }
  }
  std::vector<JobCycle> cycles;
  for (const auto& group : groups) cycles.push_back(Join(group));
  return cycles;
}

std::string CycleName(const JobCycle& cycle) {
  const std::string kind(ToText(cycle.kind));
  return cycle.number == 0 ? kind + " that never began" : fmt::format("{} {}", kind, cycle.number);
}

}  // namespace amem::tool
