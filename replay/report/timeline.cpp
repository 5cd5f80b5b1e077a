#include "replay/report/timeline.h"

#include <fmt/format.h>

#include <algorithm>

#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/report/timeline_parts.h"

namespace amem {
namespace {

StripRecord InStrip(const Attempt& attempt) {
  return {.kind = attempt.kind,
          .number = attempt.begun || attempt.ended ? attempt.cycle : 0,
          .failed = attempt.end == Attempt::End::kFailed ? 1U : 0U,
          .arrived_ns = attempt.came().time_ns,
          .ended_ns = attempt.last.time_ns};
}

std::string TextOfSeen(const ProcessSeen& seen) {
  std::string text = seen.state.empty() ? "unknown" : seen.state;
  if (!seen.where.empty()) text += " " + seen.where;
  if (seen.exit_code > 128) text += fmt::format(", ended by signal {}", seen.exit_code - 128);
  if (seen.exit_code >= 0 && seen.exit_code <= 128) text += fmt::format(", exit code {}", seen.exit_code);
  if (!seen.answer.empty()) text += "; it answered: " + seen.answer;
  if (seen.waited_ns != 0) text += "; waited for " + DurationText(seen.waited_ns);
  return text;
}

std::vector<SeenRecord> SightsOf(const SessionStory& story) {
  std::vector<SeenRecord> all;
  for (const auto& [seen, at] : story.seen)
    all.push_back({seen.session, at, seen.state == "gone" || seen.state == "zombie", TextOfSeen(seen)});
  for (const auto& [lost, at] : story.lost)
    if (lost.reason == kPeerDied) all.push_back({lost.peer, at, true, "its connection was lost: it died"});
  std::ranges::sort(all, {}, [](const SeenRecord& seen) { return seen.at.seq; });
  if (all.size() > SessionTimeline::kSeen) all.resize(SessionTimeline::kSeen);
  return all;
}

class TimelineBuilder final : public FoldObserver {
 public:
  TimelineBuilder(SessionTimeline& out, const TimelineLimits& limits, StoryBuilder& story)
      : out_(out),
        cycles_(std::max<std::size_t>(limits.cycles, 8)),
        points_(limits.points),
        series_(limits.points - limits.points / 4),
        rows_(limits.rows),
        story_(story),
        allocations_(out, limits.allocations) {}

  void Begin(const State& before) override {
    start_ = &before;
    memory_.Recount(before);
  }
  void Before(const Event& event, const State& before) override {
    Count(event);
    held_before_ = memory_.held();
    memory_.Before(event, before);
  }
  Status After(const Event& event, const State& after) override {
    memory_.After(after);
    allocations_.Take(event, after);
    for (const AllocationId id : memory_.touched()) allocations_.Check(id, event, after);
    if (Attempt* attempt = story_.OfLastEvent()) {
      if (attempt->came().seq == event.seq) attempt->before = memory_.held();
      attempt->after = memory_.held();
    }
    if (const Attempt* over = story_.over()) strip_.Add(InStrip(*over));
    if (held_before_ != memory_.held() || series_.changes() == 0)
      Note({.time_ns = event.time_ns, .seq = event.seq, .held = memory_.held()});
    return {};
  }
  // The list of events goes on.
  bool Behind(const Event& event) override {
    Count(event);
    return true;
  }

  void End(const Folded& folded) override {
    if (folded.broken) out_.stopped = ToText(*folded.broken);
    out_.info = folded.info;
    out_.damage = folded.damage;
    out_.state = folded.state;
    out_.changes = series_.changes();
    out_.story = story_.UpToBreak(cycles_);
    out_.story.times = {};
    if (const Attempt* open = out_.story.OpenAttempt()) strip_.Add(InStrip(*open));
    out_.strip = strip_.all();
    out_.done = out_.story.AllAttempts();
    out_.cycles = TakeAttempts(out_.story);
    out_.seen = SightsOf(out_.story);
    out_.series = series_.Points();
    if (series_.thinned()) AddMoments();
    allocations_.Finish(out_.state);
    out_.rows = rows_.Take();
    out_.who = Completed(out_.state.session, out_.info, out_.first_ns);
    const std::uint64_t present_ns = PresentOf(out_.info, out_.who, began_);
    if (present_ns != 0) out_.as_of_ns = std::max(out_.last_ns, present_ns);
  }

 private:
  void Count(const Event& event) {
    if (out_.events++ == 0) Start(event);
    out_.for_clock.Take(event);
    out_.last_ns = std::max(out_.last_ns, event.time_ns);
    ++out_.kinds[event.body.index()];
    rows_.Add(event);
  }

  void Start(const Event& event) {
    out_.first_ns = event.time_ns;
    if (!start_->last) return;
    out_.beginning_dropped = true;
    allocations_.StartFrom(*start_, event.time_ns);
    Note({.time_ns = event.time_ns, .seq = start_->last, .held = memory_.held()});
  }

  // Adds the peak, and the memory held before and after each of the latest pauses: they are seen however long the job is.
  void AddMoments() {
    std::size_t room = points_ / 4 - 1;
    if (out_.peak.seq) out_.series.push_back(out_.peak);
    for (auto cycle = out_.cycles.rbegin(); cycle != out_.cycles.rend() && room >= 2; ++cycle) {
      if (cycle->kind != CycleKind::kPause || !cycle->begun || !cycle->ended) continue;
      out_.series.push_back({.time_ns = cycle->begun.time_ns, .seq = cycle->begun.seq, .held = cycle->before});
      out_.series.push_back({.time_ns = cycle->ended.time_ns, .seq = cycle->ended.seq, .held = cycle->after});
      room -= 2;
    }
    std::ranges::sort(out_.series, {}, &SeriesPoint::seq);
    const auto same = [](const auto& a, const auto& b) { return a.seq == b.seq; };
    out_.series.erase(std::unique(out_.series.begin(), out_.series.end(), same), out_.series.end());
  }

  void Note(const SeriesPoint& point) {
    series_.Add(point);
    for (std::size_t i = 0; i < kMemoryClasses; ++i) out_.most[i] = std::max(out_.most[i], point.held[i]);
    if (DeviceBytes(point.held) > DeviceBytes(out_.peak.held)) out_.peak = point;
  }

  SessionTimeline& out_;
  const ThisHost began_ = ThisHost::Now();
  const std::size_t cycles_;
  std::size_t points_;
  SeriesBuilder series_;
  RowBuilder rows_;
  StoryBuilder& story_;
  Bundles<StripRecord> strip_{SessionTimeline::kStrip};
  AllocationCollector allocations_;
  HeldCounter memory_;
  Held held_before_{};
  const State* start_ = nullptr;
};

}  // namespace

Outcome OutcomeOf(const Attempt& attempt) {
  if (attempt.open()) return Outcome::kOpen;
  if (attempt.end == Attempt::End::kDone) return Outcome::kDone;
  return attempt.undone ? Outcome::kUndone : Outcome::kNotUndone;
}

std::unique_ptr<FoldObserver> CollectTimeline(SessionTimeline& out, const TimelineLimits& limits, StoryBuilder& story) {
  return std::make_unique<TimelineBuilder>(out, limits, story);
}

}  // namespace amem
