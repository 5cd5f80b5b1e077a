#include "replay/report/timeline.h"

#include <algorithm>
#include <tuple>

#include "statemachine/apply.h"

namespace amem {
namespace {

void Take(LinkRecord& link, Bytes bytes) {
  link.bytes += bytes;
  ++link.count;
  ++link.total;
  link.most_bytes = std::max(link.most_bytes, link.bytes);
  link.most_count = std::max(link.most_count, link.count);
}
void Give(LinkRecord& link, Bytes bytes) {
  link.bytes -= std::min(bytes, link.bytes);
  link.count -= std::min<std::uint64_t>(1, link.count);
}

// ---- pauses and resumes ----------------------------------------------------------------------------------------------------

class Cycles {
 public:
  Cycles(SessionTimeline& out, std::size_t limit) : out_(out), limit_(std::max<std::size_t>(limit, 8)) {}

  // `held` is what is held after the event.
  void Take(const Event& event, const Held& held) {
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

  void Finish() { Thin(limit_); }

 private:
  void Open(CycleKind kind, std::uint64_t now_ns, const Held& held) {
    if (out_.cycles.size() >= 2 * limit_) Thin(limit_);
    out_.cycles.push_back({.kind = kind, .arrived_ns = now_ns, .ended_ns = now_ns, .before = held, .after = held});
    open_ = true;
  }

  // An arrival opens a cycle before it begins; a failure without any (of an older build) is one too.
  bool Arrives(const Event& event, const Held& held) {
    if (const auto* e = std::get_if<PhaseBegun>(&event.body)) {
      Open(e->phase == PhaseKind::kPauseArrive ? CycleKind::kPause : CycleKind::kResume, event.time_ns, held);
      return true;
    }
    const auto* failed = std::get_if<CycleFailed>(&event.body);
    if (failed) Open(failed->kind, event.time_ns, held);
    return failed != nullptr;
  }

  void Begin(const Event& event, const CycleBegun& begun, const Held& held) {
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

  void Step(CycleRecord& cycle, StepKind kind, std::uint64_t now_ns) {
    if (const auto at = static_cast<std::size_t>(kind); at < kStepKinds) {
      ++cycle.steps[at].count;
      cycle.steps[at].duration_ns += now_ns - std::min(now_ns, step_ns_);
    }
    if (cycle.phases.empty()) return;
    ++cycle.phases.back().steps;
    cycle.phases.back().worked_ns = now_ns;
  }

  static void Decide(CycleRecord& cycle, const PhaseDecided& decided, std::uint64_t now_ns) {
    const bool known =
        !cycle.phases.empty() && cycle.phases.back().phase == decided.phase && cycle.phases.back().decided_ns == 0;
    if (!known) cycle.phases.push_back({.phase = decided.phase, .begun_ns = now_ns, .worked_ns = now_ns});
    PhaseRecord& phase = cycle.phases.back();
    phase.decided_ns = now_ns;
    phase.passed = decided.passed;
    phase.culprit = decided.culprit;
    if (decided.passed) return;
    if (!cycle.culprit) cycle.culprit = decided.culprit;
    if (cycle.message.empty()) cycle.message = decided.message;
  }

  void End(CycleRecord& cycle, const Event& event, Outcome outcome) {
    cycle.ended = event.seq;
    cycle.outcome = outcome;
    open_ = false;
    if (outcome != Outcome::kDone) {
      ++out_.cycles_failed;
    } else {
      ++(cycle.kind == CycleKind::kPause ? out_.pauses_done : out_.resumes_done);
    }
  }

  // The first quarter, the last half, and what failed between them, the newest first.
  void Thin(std::size_t limit) {
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

  SessionTimeline& out_;
  std::size_t limit_;
  bool open_ = false;
  std::uint64_t step_ns_ = 0;
};

// Of allocations, when not all can stay: what failed, what is there, what is large, what is new.
bool WorthMore(const AllocationRecord& a, const AllocationRecord& b) {
  const auto key = [](const AllocationRecord& r) { return std::tuple(!r.note.empty(), !r.ended, r.bytes, r.created); };
  return key(b) < key(a);
}
bool Earlier(const AllocationRecord& a, const AllocationRecord& b) {
  return std::tie(a.created, a.id, a.address) < std::tie(b.created, b.id, b.address);
}

// ---- allocations -----------------------------------------------------------------------------------------------------------

class Allocations {
 public:
  Allocations(SessionTimeline& out, std::size_t limit) : out_(out), limit_(std::max<std::size_t>(limit, 8)) {}

  void StartFrom(const State& state, std::uint64_t now_ns) {
    for (const auto& [id, a] : state.allocations) {
      AllocationRecord& record = Begin(id, a, a.created, now_ns);
      if (a.remote) amem::Take(out_.imports[a.remote->owner], a.bytes);
      for (const auto& [importer, count] : a.importers) {
        record.importers += count;
        const std::uint32_t counted = state.slabs.contains(id) ? 0 : count;
        for (std::uint32_t i = 0; i < counted; ++i) amem::Take(out_.importers[importer.by], a.bytes);
      }
      record.most_importers = record.importers;
    }
    for (const auto& [address, m] : state.mappings) Place(m.allocation, address);
    for (const auto& [id, slab] : state.slabs) Slab(id);
    for (const auto& [id, a] : state.allocations) Part(id, state);
    for (const auto& [address, h] : state.host) Begin(AllocationKind::kHost, address, h.bytes, {}, now_ns, {});
    for (const auto& [address, bytes] : state.async) Begin(AllocationKind::kPool, address, bytes, {}, now_ns, {});
    for (const auto& [address, l] : state.legacy) {
      if (!l.backing) Begin(AllocationKind::kDriver, address, l.bytes, {}, now_ns, l.site);
    }
  }

  // After the event was applied.
  void Take(const Event& event, const State& state) {
    event_ = &event;
    state_ = &state;
    std::visit([this](const auto& e) { On(e); }, static_cast<const EventVariant&>(event.body));
  }
  // One that the event may have ended.
  void Check(AllocationId id, const Event& event, const State& state) {
    const auto it = live_.find(id);
    if (it != live_.end() && !state.allocations.contains(id)) End(it, event);
  }

  void Finish(const State& state) {
    for (auto& [id, record] : live_) {
      if (const auto it = state.allocations.find(id); it != state.allocations.end()) {
        const auto whole = state.allocations.find(it->second.placed() ? it->second.slab : id);
        record.resident = whole != state.allocations.end() && whole->second.resident;
        record.kept = it->second.own() ? WhyKept(it->second) : KeepReason::kNone;
      }
      out_.allocations.push_back(std::move(record));
    }
    for (auto& [key, record] : other_) out_.allocations.push_back(std::move(record));
    Thin(limit_ - std::min(limit_, out_.allocations.size()));
    std::move(ended_.begin(), ended_.end(), std::back_inserter(out_.allocations));
    std::sort(out_.allocations.begin(), out_.allocations.end(), Earlier);
  }

 private:
  using Live = std::map<AllocationId, AllocationRecord>;
  using Other = std::map<std::pair<AllocationKind, Address>, AllocationRecord>;

  template <class Ignored>
  void On(const Ignored&) {}
  void On(const AllocationCreated& e) { Created(e.allocation); }
  void On(const MulticastCreated& e) { Created(e.allocation); }
  void On(const Imported& e) {
    Created(e.allocation);
    amem::Take(out_.imports[e.remote.owner], e.bytes);
  }
  void On(const Mapped& e) { Place(e.allocation, e.address); }
  void On(const SlabOpened& e) { Slab(e.slab); }
  void On(const Placed& e) { Part(e.allocation, *state_); }
  void On(const Backed& e) {
    if (const auto it = live_.find(e.allocation); it != live_.end()) it->second.slab = {};
  }
  void On(const ReferenceAdded& e) {
    const auto it = live_.find(e.allocation);
    if (it == live_.end()) return;
    it->second.most_importers = std::max(it->second.most_importers, ++it->second.importers);
    if (!IsSlab(it->second)) amem::Take(out_.importers[e.by], it->second.bytes);
  }
  void On(const ReferenceDropped& e) {
    const auto it = live_.find(e.allocation);
    if (it == live_.end()) return;
    it->second.importers -= std::min<std::uint64_t>(1, it->second.importers);
    if (!IsSlab(it->second)) Give(out_.importers[e.by], it->second.bytes);
  }
  void On(const PeerLost& e) {
    out_.importers[e.peer].bytes = out_.importers[e.peer].count = 0;
    for (auto it = live_.begin(); it != live_.end();) {
      const auto known = state_->allocations.find(it->first);
      if (known == state_->allocations.end()) {
        End(it++, *event_);
        continue;
      }
      it->second.importers = 0;
      for (const auto& [importer, count] : known->second.importers) it->second.importers += count;
      ++it;
    }
  }
  void On(const StepFailed& e) {
    if (const auto it = live_.find(e.step.allocation); it != live_.end()) {
      it->second.note = std::string(ToText(e.step.kind)) + " failed: " + e.message;
    }
  }
  void On(const HostAllocated& e) { Begin(AllocationKind::kHost, e.address, e.bytes, event_->seq, event_->time_ns, {}); }
  void On(const HostFreed& e) { End(AllocationKind::kHost, e.address); }
  void On(const AsyncAllocated& e) { Begin(AllocationKind::kPool, e.address, e.bytes, event_->seq, event_->time_ns, {}); }
  void On(const AsyncFreed& e) { End(AllocationKind::kPool, e.address); }
  void On(const LegacyAllocated& e) {
    if (!e.backing) Begin(AllocationKind::kDriver, e.address, e.bytes, event_->seq, event_->time_ns, e.site);
  }
  void On(const LegacyFreed& e) { End(AllocationKind::kDriver, e.address); }

  void Slab(AllocationId id) {
    const auto it = live_.find(id);
    if (it == live_.end()) return;
    const bool imported = it->second.kind == AllocationKind::kImported;
    it->second.kind = imported ? AllocationKind::kImportedSlab : AllocationKind::kSlab;
    if (!imported) return;
    LinkRecord& link = out_.imports[it->second.remote.owner];  // it was counted when it was imported
    Give(link, it->second.bytes);
    --link.total;
  }
  void Part(AllocationId id, const State& state) {
    const auto it = live_.find(id);
    const auto known = state.allocations.find(id);
    if (it == live_.end() || known == state.allocations.end() || !known->second.placed()) return;
    it->second.slab = known->second.slab;
    it->second.address = state.PlaceOf(known->second);
  }
  static bool IsSlab(const AllocationRecord& r) {
    return r.kind == AllocationKind::kSlab || r.kind == AllocationKind::kImportedSlab;
  }
  void Created(AllocationId id) {
    const auto it = state_->allocations.find(id);
    if (it != state_->allocations.end()) Begin(id, it->second, event_->seq, event_->time_ns);
  }
  AllocationRecord& Begin(AllocationId id, const Allocation& a, SequenceNumber seq, std::uint64_t now_ns) {
    ++out_.allocations_total;
    AllocationRecord& record = live_[id];
    record = {
        .id = id, .bytes = a.bytes, .location = a.properties.location, .site = a.site, .created = seq, .created_ns = now_ns};
    record.kind = !a.own() ? AllocationKind::kImported : a.multicast ? AllocationKind::kMulticast : AllocationKind::kOwn;
    if (a.remote) record.remote = *a.remote;
    return record;
  }
  void Begin(AllocationKind kind, Address address, Bytes bytes, SequenceNumber seq, std::uint64_t now_ns,
             const CallSite& site) {
    ++out_.allocations_total;
    other_[{kind, address}] = {
        .kind = kind, .address = address, .bytes = bytes, .site = site, .created = seq, .created_ns = now_ns};
  }
  void Place(AllocationId id, Address address) {
    const auto it = live_.find(id);
    if (it != live_.end() && !it->second.address) it->second.address = address;
  }
  void End(AllocationKind kind, Address address) {
    const auto it = other_.find({kind, address});
    if (it == other_.end()) return;
    Ended(std::move(it->second), *event_);
    other_.erase(it);
  }
  void End(Live::iterator it, const Event& event) {
    if (it->second.kind == AllocationKind::kImported) Give(out_.imports[it->second.remote.owner], it->second.bytes);
    Ended(std::move(it->second), event);
    live_.erase(it);
  }
  void Ended(AllocationRecord record, const Event& event) {
    record.ended = event.seq;
    record.ended_ns = event.time_ns;
    record.resident = false;
    ended_.push_back(std::move(record));
    if (ended_.size() >= 2 * limit_) Thin(limit_);
  }
  void Thin(std::size_t limit) {
    if (ended_.size() <= limit) return;
    const auto cut = ended_.begin() + static_cast<std::ptrdiff_t>(limit);
    std::nth_element(ended_.begin(), cut, ended_.end(), WorthMore);
    for (auto it = cut; it != ended_.end(); ++it) out_.allocations_left_out_bytes += it->bytes;
    ended_.erase(cut, ended_.end());
  }

  SessionTimeline& out_;
  std::size_t limit_;
  Live live_;
  Other other_;
  std::vector<AllocationRecord> ended_;
  const Event* event_ = nullptr;
  const State* state_ = nullptr;
};

// ---- memory held -----------------------------------------------------------------------------------------------------------

// Keeps the sums up to date with what each event touches; where that is not known for a kind, everything is summed up anew.
class Memory {
 public:
  explicit Memory(const State& state) : state_(state) {}

  void Before(const Event& event) {
    touched_.clear();
    recount_ = false;
    std::visit([this](const auto& e) { Look(e); }, static_cast<const EventVariant&>(event.body));
    for (const AllocationId id : touched_) Count(id, false);
  }
  void After() {
    if (recount_) {
      held_ = HeldIn(state_);
      return;
    }
    for (const AllocationId id : touched_) Count(id, true);
  }
  void Recount() { held_ = HeldIn(state_); }
  [[nodiscard]] const std::vector<AllocationId>& touched() const { return touched_; }
  [[nodiscard]] const Held& held() const { return held_; }

 private:
  template <class Other>
  void Look(const Other&) {
    recount_ = true;
  }
  void Look(const SessionClosed&) {}
  void Look(const GroupChanged&) {}
  void Look(const LibraryAttached&) {}
  void Look(const DriverSymbolBound&) {}
  void Look(const RangeReserved&) {}
  void Look(const RangeFreed& e) { Touch(e.allocation); }
  void Look(const AllocationCreated& e) { Touch(e.allocation); }
  void Look(const AllocationRetained&) {}
  void Look(const AllocationReleased& e) { Touch(e.allocation); }
  void Look(const Mapped&) {}
  void Look(const Unmapped& e) {
    if (e.allocation) return Touch(e.allocation);
    const auto end = state_.mappings.lower_bound(e.address + e.bytes);
    for (auto it = state_.mappings.lower_bound(e.address); it != end; ++it) Touch(it->second.allocation);
  }
  void Look(const AccessSet&) {}
  void Look(const Exported&) {}
  void Look(const Imported& e) { Touch(e.allocation); }
  void Look(const ReferenceAdded&) {}
  void Look(const ReferenceDropped& e) { Touch(e.allocation); }
  void Look(const PeerConnected&) {}
  void Look(const HostAllocated& e) { Add(MemoryClass::kHost, e.bytes); }
  void Look(const HostFreed& e) {
    if (const auto it = state_.host.find(e.address); it != state_.host.end()) Remove(MemoryClass::kHost, it->second.bytes);
  }
  void Look(const AsyncAllocated& e) {
    Look(AsyncFreed{e.address});  // a pool may give an address out again
    Add(MemoryClass::kPool, e.bytes);
  }
  void Look(const AsyncFreed& e) {
    if (const auto it = state_.async.find(e.address); it != state_.async.end()) Remove(MemoryClass::kPool, it->second);
  }
  void Look(const LegacyAllocated& e) {
    if (!e.backing) Add(MemoryClass::kDriver, e.bytes);
  }
  void Look(const LegacyFreed& e) {
    const auto it = state_.legacy.find(e.address);
    if (it != state_.legacy.end() && !it->second.backing) Remove(MemoryClass::kDriver, it->second.bytes);
  }
  void Look(const LegacyExported&) {}
  void Look(const LegacyImported&) {}
  void Look(const LegacyClosed&) {}
  void Look(const PassedThrough&) {}
  void Look(const CycleBegun&) {}
  void Look(const StepBegun&) {}
  void Look(const StepDone& e) { Touch(e.step.allocation); }
  void Look(const StepFailed&) {}
  void Look(const PhaseBegun&) {}
  void Look(const PhaseDecided&) {}
  void Look(const CycleDone&) {}
  void Look(const CycleFailed&) {}
  void Look(const SlabOpened&) {}
  void Look(const Placed& e) { Touch(e.allocation); }
  void Look(const Backed& e) { Touch(e.allocation); }
  void Look(const PartCleared&) {}

  void Touch(AllocationId id) {
    if (!id || std::find(touched_.begin(), touched_.end(), id) != touched_.end()) return;
    touched_.push_back(id);
    // What ends with a part of a slab may change why the slab is kept.
    if (const auto it = state_.allocations.find(id); it != state_.allocations.end() && it->second.placed())
      Touch(it->second.slab);
  }
  void Count(AllocationId id, bool add) {
    const auto it = state_.allocations.find(id);
    if (it == state_.allocations.end()) return;
    const Share share = ShareOf(it->second);
    add ? Add(share.as, share.bytes) : Remove(share.as, share.bytes);
  }
  void Add(MemoryClass as, Bytes bytes) { held_[static_cast<std::size_t>(as)] += bytes; }
  void Remove(MemoryClass as, Bytes bytes) { held_[static_cast<std::size_t>(as)] -= bytes; }

  const State& state_;
  Held held_{};
  std::vector<AllocationId> touched_;
  bool recount_ = false;
};

// ---- one journal -----------------------------------------------------------------------------------------------------------

class TimelineFold {
 public:
  TimelineFold(SessionTimeline& out, const TimelineLimits& limits)
      : out_(out),
        points_(limits.points),
        series_(limits.points - limits.points / 4),
        rows_(limits.rows),
        cycles_(out, limits.cycles),
        allocations_(out, limits.allocations),
        memory_(out.state) {}

  void StartFrom(State state) {
    out_.state = std::move(state);
    out_.beginning_dropped = true;
    memory_.Recount();
  }

  void Take(const Event& event) {
    if (out_.events++ == 0) Start(event);
    out_.last_ns = std::max(out_.last_ns, event.time_ns);
    ++out_.kinds[event.body.index()];
    rows_.Add(event);
    if (out_.stopped.empty()) TakeInState(event);
  }

  void Finish() {
    out_.changes = series_.changes();
    cycles_.Finish();
    out_.series = series_.Points();
    if (series_.thinned()) AddMoments();
    allocations_.Finish(out_.state);
    out_.rows = rows_.Take();
    out_.who = out_.state.session;
  }

 private:
  void Start(const Event& event) {
    out_.first_ns = event.time_ns;
    if (out_.beginning_dropped) {
      allocations_.StartFrom(out_.state, event.time_ns);
      Note({.time_ns = event.time_ns, .seq = out_.state.last, .held = memory_.held()});
    }
  }

  void TakeInState(const Event& event) {
    if (event.seq.value != out_.state.last.value + 1) {
      return Stop("events " + std::to_string(out_.state.last.value + 1) + " to " + std::to_string(event.seq.value - 1) +
                  " are missing");
    }
    const Held before = memory_.held();
    memory_.Before(event);
    if (const Status applied = Apply(out_.state, event); !applied) {
      return Stop("event " + std::to_string(event.seq.value) + " does not fit what came before it: " + applied.message());
    }
    memory_.After();
    allocations_.Take(event, out_.state);
    for (const AllocationId id : memory_.touched()) allocations_.Check(id, event, out_.state);
    cycles_.Take(event, memory_.held());
    if (before != memory_.held() || series_.changes() == 0) {
      Note({.time_ns = event.time_ns, .seq = event.seq, .held = memory_.held()});
    }
  }

  // The peak, and what was held before and after each of the latest pauses: however long the job, they are seen.
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

  void Stop(std::string why) { out_.stopped = std::move(why); }

  SessionTimeline& out_;
  std::size_t points_;
  SeriesBuilder series_;
  RowBuilder rows_;
  Cycles cycles_;
  Allocations allocations_;
  Memory memory_;
};

}  // namespace

std::string_view ToText(Outcome outcome) {
  switch (outcome) {
    case Outcome::kDone:
      return "done";
    case Outcome::kUndone:
      return "failed, undone";
    case Outcome::kNotUndone:
      return "failed, not undone";
    case Outcome::kOpen:
      return "not finished";
  }
  return "unknown";
}

std::string_view ToText(AllocationKind kind) {
  switch (kind) {
    case AllocationKind::kOwn:
      return "own";
    case AllocationKind::kImported:
      return "imported";
    case AllocationKind::kMulticast:
      return "multicast";
    case AllocationKind::kHost:
      return "pinned host";
    case AllocationKind::kPool:
      return "pool";
    case AllocationKind::kDriver:
      return "cuMemAlloc";
    case AllocationKind::kSlab:
      return "slab";
    case AllocationKind::kImportedSlab:
      return "imported slab";
  }
  return "unknown";
}

void ThinAllocations(SessionTimeline& timeline, std::size_t limit) {
  std::vector<AllocationRecord>& all = timeline.allocations;
  if (all.size() <= limit) return;
  const auto cut = all.begin() + static_cast<std::ptrdiff_t>(limit);
  std::nth_element(all.begin(), cut, all.end(), WorthMore);
  for (auto it = cut; it != all.end(); ++it) timeline.allocations_left_out_bytes += it->bytes;
  all.erase(cut, all.end());
  std::sort(all.begin(), all.end(), Earlier);
}

Result<SessionTimeline> ReadTimeline(JournalReader& reader, const TimelineLimits& limits) {
  Result<JournalInfo> info = reader.Info();
  if (!info) return info.status();
  SessionTimeline timeline;
  timeline.info = *std::move(info);
  TimelineFold fold(timeline, limits);
  if (timeline.info.first.value > 1) {
    Result<State> start = reader.StateAt(SequenceNumber{timeline.info.first.value - 1});
    if (start) {
      fold.StartFrom(*std::move(start));
    } else {
      timeline.stopped = "the journal begins with event " + std::to_string(timeline.info.first.value) +
                         ", and the state before it cannot be read: " + start.status().message();
    }
  }
  Result<ReadReport> report = reader.Read(SequenceNumber{1}, kToTheEnd, [&fold](const Event& event) {
    fold.Take(event);
    return true;
  });
  if (!report) return report.status();
  timeline.damage = *std::move(report);
  fold.Finish();
  if (!timeline.who.session) timeline.who.session = timeline.info.session;
  if (timeline.who.pid == 0) timeline.who.pid = timeline.info.pid;
  return timeline;
}

}  // namespace amem
