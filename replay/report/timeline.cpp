#include "replay/report/timeline.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>

#include "replay/job/fold.h"
#include "replay/job/opening.h"
#include "replay/report/timeline_parts.h"

namespace amem {
namespace {

class TimelineBuilder final : public FoldObserver {
 public:
  TimelineBuilder(SessionTimeline& out, const TimelineLimits& limits)
      : out_(out),
        points_(limits.points),
        series_(limits.points - limits.points / 4),
        rows_(limits.rows),
        limit_of_cycles_(limits.cycles),
        cycles_(out, out.cycles, limits.cycles),
        allocations_(out, limits.allocations),
        seen_(out) {}

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
    CyclesOf(PoolOfCycle(event.body), after).Take(event, memory_.held());
    seen_.Take(event);
    if (held_before_ != memory_.held() || series_.changes() == 0) {
      Note({.time_ns = event.time_ns, .seq = event.seq, .held = memory_.held()});
    }
    return {};
  }
  // The list of events goes on.
  bool Behind(const Event& event) override {
    Count(event);
    return true;
  }

  void Finish(Folded folded) {
    if (folded.broken) out_.stopped = ToText(*folded.broken);
    out_.info = std::move(folded.info);
    out_.damage = std::move(folded.damage);
    out_.state = std::move(folded.state);
    out_.changes = series_.changes();
    cycles_.Finish();
    for (auto& [id, pool] : pools_) {
      pool.collector.Finish();
      std::ranges::move(pool.cycles, std::back_inserter(out_.cycles));
    }
    std::ranges::stable_sort(out_.cycles, {}, &CycleRecord::arrived_ns);
    out_.series = series_.Points();
    if (series_.thinned()) AddMoments();
    allocations_.Finish(out_.state);
    out_.rows = rows_.Take();
    out_.who = Completed(out_.state.session, out_.info, out_.first_ns);
  }

 private:
  void Count(const Event& event) {
    if (out_.events++ == 0) Start(event);
    out_.for_clock.Take(event);
    out_.last_ns = std::max(out_.last_ns, event.time_ns);
    ++out_.kinds[event.body.index()];
    rows_.Add(event);
  }

  CycleCollector& CyclesOf(PoolId id, const State& state) {
    const auto pool = state.pools.find(id);
    if (pool == state.pools.end()) return cycles_;
    return pools_.try_emplace(id, out_, limit_of_cycles_, pool->second.tag).first->second.collector;
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
      out_.series.push_back({.time_ns = cycle->begun_ns, .seq = cycle->begun, .held = cycle->before});
      out_.series.push_back({.time_ns = cycle->ended_ns, .seq = cycle->ended, .held = cycle->after});
      room -= 2;
    }
    std::sort(out_.series.begin(), out_.series.end(), [](const auto& a, const auto& b) { return a.seq < b.seq; });
    const auto same = [](const auto& a, const auto& b) { return a.seq == b.seq; };
    out_.series.erase(std::unique(out_.series.begin(), out_.series.end(), same), out_.series.end());
  }

  void Note(const SeriesPoint& point) {
    series_.Add(point);
    for (std::size_t i = 0; i < kMemoryClasses; ++i) out_.most[i] = std::max(out_.most[i], point.held[i]);
    if (DeviceBytes(point.held) > DeviceBytes(out_.peak.held)) out_.peak = point;
  }

  struct PoolCycles {
    PoolCycles(SessionTimeline& out, std::size_t limit, std::string tag) : collector(out, cycles, limit, std::move(tag)) {}
    std::vector<CycleRecord> cycles;
    CycleCollector collector;
  };

  SessionTimeline& out_;
  std::size_t points_;
  SeriesBuilder series_;
  RowBuilder rows_;
  std::size_t limit_of_cycles_;
  CycleCollector cycles_;  // NCCL's
  std::map<PoolId, PoolCycles> pools_;
  AllocationCollector allocations_;
  SeenCollector seen_;
  HeldCounter memory_;
  Held held_before_{};
  const State* start_ = nullptr;
};

}  // namespace

std::string_view ToText(Outcome outcome) {
  constexpr std::array<std::string_view, 4> kWords = {"done", "failed, undone", "failed, not undone", "not finished"};
  return kWords.at(static_cast<std::size_t>(outcome));
}

std::string_view ToText(AllocationKind kind) {
  constexpr std::array<std::string_view, 9> kWords = {"own",        "imported", "multicast",     "pinned host", "pool",
                                                      "cuMemAlloc", "slab",     "imported slab", "tagged"};
  return kWords.at(static_cast<std::size_t>(kind));
}

Result<SessionTimeline> ReadTimeline(JournalReader& reader, const TimelineLimits& limits) {
  SessionTimeline timeline;
  TimelineBuilder builder(timeline, limits);
  Result<Folded> folded = FoldJournal(reader, std::array<FoldObserver*, 1>{&builder});
  if (!folded) return folded.status();
  builder.Finish(*std::move(folded));
  return timeline;
}

}  // namespace amem
