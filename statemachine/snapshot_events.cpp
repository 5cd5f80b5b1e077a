#include <algorithm>

#include "statemachine/apply.h"
#include "statemachine/check.h"

namespace amem {
namespace {

void AddAll(std::vector<EventBody>& out, const auto& events_by_address) {
  for (const auto& [address, event] : events_by_address) out.emplace_back(event);
}

void AddAllocation(std::vector<EventBody>& out, AllocationId id, const Allocation& a) {
  if (a.multicast && a.own()) return;
  if (a.remote) {
    out.emplace_back(Imported{id, *a.remote, a.bytes, a.properties, 1, {}, a.site, a.created, a.tag, a.communicator, a.pool});
  } else {
    out.emplace_back(
        AllocationCreated{id, a.bytes, a.properties, a.flags, {}, a.site, a.created, a.tag, a.communicator, a.pool});
  }
}

void AddReferences(std::vector<EventBody>& out, AllocationId id, const Allocation& a) {
  for (std::uint32_t i = 0; i < a.exports; ++i) out.emplace_back(Exported{id, a.handed_out ? kFabricHandle : 1, a.handed_to});
  for (const auto& [importer, count] : a.importers)
    for (std::uint32_t i = 0; i < count; ++i) out.emplace_back(ReferenceAdded{id, importer.by, importer.as});
  if (a.touched && !a.placed() && a.importers.empty() && a.exports != 0) {  // a peer held it once
    out.emplace_back(ReferenceAdded{id, SessionId{1}, id});
    out.emplace_back(ReferenceDropped{id, SessionId{1}, id});
  }
  for (std::uint32_t i = 1; i < a.guest_references; ++i) out.emplace_back(AllocationRetained{id, {}});
}

Status AddParts(std::vector<EventBody>& out, const State& s) {
  for (const auto& [id, slab] : s.slabs) {
    SlabOpened opened{id, slab.address, {}};
    for (const auto& [offset, bytes] : slab.dirty) opened.dirty.push_back({offset, bytes});
    out.emplace_back(std::move(opened));
    for (const auto& [offset, parts] : slab.parts) {
      for (const AllocationId part : parts) {
        const auto* const a = FindIn(s.allocations, part);
        AMEM_CHECK(a != nullptr, id, part);
        AMEM_CHECK(a->slab == id, part);
        AMEM_CHECK(a->offset == offset, part, id);
        const Address address = slab.address + offset;
        out.emplace_back(Placed{part, id, offset, a->touched});
        for (std::uint32_t i = 0; i < a->reserved; ++i) out.emplace_back(RangeReserved{address, a->bytes, 0, {}, 0, {}, part});
        for (std::uint32_t i = 0; i < a->mappings; ++i) out.emplace_back(Mapped{address, a->bytes, 0, part, 0});
      }
    }
  }
  return {};
}

Status AddMulticasts(std::vector<EventBody>& out, const State& s) {
  for (const auto& [id, m] : s.multicasts) {
    const auto* const a = FindIn(s.allocations, id);
    AMEM_CHECK(a != nullptr, id);
    if (a->own()) {
      out.emplace_back(
          MulticastCreated{id, a->bytes, m.devices, a->properties.handle_types, a->flags, {}, a->tag, m.incomplete});
    }
    for (const DeviceOrdinal d : m.added) out.emplace_back(MulticastDeviceAdded{id, d});
  }
  return {};
}

void AddBindings(std::vector<EventBody>& out, const State& s) {
  for (const auto& [id, m] : s.multicasts) {
    for (const auto& [offset, b] : m.bindings)
      out.emplace_back(MulticastBound{id, offset, b.allocation, b.allocation_offset, b.bytes, b.address});
  }
}

void AddCommunicators(std::vector<EventBody>& out, const State& s) {
  for (const auto& [id, c] : s.communicators) {
    out.emplace_back(CommunicatorBegun{id, c.parent, c.how, c.rank, c.ranks});
    if (c.ready) out.emplace_back(CommunicatorReady{id, c.hash, c.rank, c.ranks, c.device});
    if (c.suspended) out.emplace_back(CommunicatorSuspended{id, true});
  }
}
// Ends come after the memory of what ended, because that memory refers to it.
void AddEnds(std::vector<EventBody>& out, const State& s) {
  for (const auto& [id, c] : s.communicators)
    if (!c.ended.empty()) out.emplace_back(CommunicatorEnded{id, c.ended});
  if (s.freeze) out.emplace_back(*s.freeze);
  for (const auto& [what, share] : s.outside)
    out.emplace_back(SharedOutside{what.first, what.second, share.pieces, share.bytes});
}

// The events of a scope's last pause, and of the resume that may have followed, that lead to the present state of its memory.
// The scope is a pool's, or NCCL's (zero), which alone has multicast objects.
class ScopeCycleEvents {
 public:
  ScopeCycleEvents(std::vector<EventBody>& out, const State& s, PoolId id) : out_(out), s_(s), id_(id), scope_(s.ScopeOf(id)) {}

  void Add() {
    const Cycle& c = scope_.cycle;
    if (scope_.lifecycle == Lifecycle::kRunning) {
      if (!c.failure.empty()) Begin(c.kind, c.number);
      if (!c.failure.empty()) out_.emplace_back(CycleFailed{c.kind, c.number, true, c.failure, {}, 0, {}, id_});
      return;
    }
    const bool paused = scope_.lifecycle == Lifecycle::kPaused;
    const bool was_paused = paused || (scope_.lifecycle == Lifecycle::kResuming && !c.after_failed_undo);
    Begin(CycleKind::kPause, scope_.cycles);
    if (!id_) Bindings(StepKind::kUnbind);
    for (const auto& [region, r] : s_.regions)
      if (!id_ && !r.kept.empty()) out_.emplace_back(RegionKept{region, r.kept});
    ForEach([&](AllocationId id, const Allocation& a) { Leave(id, a, was_paused); });
    const bool not_undone = paused && !c.failure.empty() && c.kind == CycleKind::kPause;
    if (not_undone) out_.emplace_back(CycleFailed{c.kind, c.number, false, c.failure, {}, 0, {}, id_, true});
    if (was_paused && !not_undone) out_.emplace_back(CycleDone{CycleKind::kPause, scope_.cycles, 0, id_});
    if ((paused && !c.failure.empty() && !not_undone) || scope_.lifecycle == Lifecycle::kResuming || c.after_failed_undo)
      Begin(c.kind, c.number);
    ForEach([&](AllocationId id, const Allocation& a) { Return(id, a); });
    if (!id_) Bindings(StepKind::kBind);
    if (!c.failure.empty() && !not_undone) out_.emplace_back(CycleFailed{c.kind, c.number, paused, c.failure, {}, 0, {}, id_});
    if (c.phase) out_.emplace_back(PhaseBegun{*c.phase, id_});
    if (c.open_step) out_.emplace_back(StepBegun{*c.open_step, id_});
  }

 private:
  void Begin(CycleKind kind, std::uint64_t number) {
    const auto* const pool = FindIn(s_.pools, id_);
    const bool keeps = pool != nullptr && kind == CycleKind::kPause && pool->keeps;
    out_.emplace_back(CycleBegun{kind, number, scope_.cycle.members, {}, id_, keeps});
  }
  void Do(Step step) {
    out_.emplace_back(StepBegun{step, id_});
    out_.emplace_back(StepDone{step, id_});
  }
  // Parts of a slab leave and return with it.
  void ForEach(const auto& visit) {
    for (const auto& [id, a] : s_.allocations)
      if (a.pool == id_ && !a.placed()) visit(id, a);
  }
  // As far as the pause took the memory.
  void Leave(AllocationId id, const Allocation& a, bool was_paused) {
    if (a.saved) Do({StepKind::kSave, id, {}, 0, {}});
    const bool goes = WhyKept(a) == KeepReason::kNone && (a.saved || !s_.Preserves(a));
    const bool released = !a.resident || a.awaiting_restore || (was_paused && goes) || IsFresh(id);
    const bool unmapped = released || std::ranges::any_of(s_.mappings, [&](const auto& one) {
                            return one.second.allocation == id && !one.second.accessible;
                          });
    for (const auto& [region, r] : s_.regions) {
      if (r.allocation != id || !r.kept.empty() || (r.present && !unmapped)) continue;
      Do({StepKind::kDeregister, id, r.address, r.bytes, {}, 0, region});
      deregistered_.push_back(region);
    }
    for (const auto& [address, m] : s_.mappings) {
      if (m.allocation != id || (m.accessible && !released)) continue;
      Do({StepKind::kUnmap, id, address, 0, {}});
      unmapped_.push_back(address);
    }
    if (released) Do({a.own() ? StepKind::kReleaseOwn : StepKind::kReleaseImport, id, {}, 0, {}});
    if (released) released_.push_back(id);
  }
  // As far as it is back.
  void Return(AllocationId id, const Allocation& a) {
    const bool created = a.resident && std::ranges::find(released_, id) != released_.end();
    if (created) Do({a.own() ? StepKind::kCreate : StepKind::kImport, id, {}, 0, {}});
    if (const auto* const object = FindIn(s_.multicasts, id); created && object != nullptr) {
      for (const DeviceOrdinal device : object->added)
        if (std::ranges::find(object->missing, device) == object->missing.end()) Do({StepKind::kAddDevice, id, {}, 0, device});
    }
    for (const Address address : unmapped_) {
      const Mapping& m = s_.mappings.find(address)->second;
      if (m.allocation != id) continue;
      if (m.present) Do({StepKind::kMap, id, address, 0, {}});
      if (m.accessible) Do({StepKind::kSetAccess, id, address, 0, {}});
    }
    for (const RegionId region : deregistered_) {
      const Region& r = s_.regions.find(region)->second;
      if (r.allocation == id && r.present) Do({StepKind::kRegister, id, r.address, r.bytes, {}, 0, region});
    }
    if (created && a.saved && !a.awaiting_restore) Do({StepKind::kRestore, id, {}, 0, {}});
  }
  [[nodiscard]] bool IsFresh(AllocationId id) const {
    const auto* const object = FindIn(s_.multicasts, id);
    return object != nullptr && object->fresh;
  }
  // Of the objects that a pause releases: all go, and those that are in force return.
  void Bindings(StepKind kind) {
    for (const auto& [id, m] : s_.multicasts) {
      const auto* const object = FindIn(s_.allocations, id);
      if (object == nullptr || !object->rebuilt()) continue;
      for (const auto& [offset, b] : m.bindings)
        if (kind == StepKind::kUnbind || b.bound) Do({kind, id, {}, b.bytes, b.device, offset});
    }
  }

  std::vector<EventBody>& out_;
  const State& s_;
  PoolId id_;
  const Scope& scope_;
  std::vector<AllocationId> released_;
  std::vector<Address> unmapped_;
  std::vector<RegionId> deregistered_;
};

Condensed Head(const State& s) {
  Condensed head{s.last, s.next_allocation, s.cycles, {}};
  for (std::size_t kind = 0; kind < s.totals.events.size(); ++kind) {
    if (s.totals.events[kind] == 0) continue;
    head.totals.push_back(kind);
    head.totals.push_back(s.totals.events[kind]);
  }
  return head;
}

}  // namespace

Result<std::vector<EventBody>> ToSnapshotEvents(const State& s) {
  if (s.lifecycle == Lifecycle::kNew || s.lifecycle == Lifecycle::kClosed)
    return Status{Code::kInvalid, "snapshot: the session is " + std::string(ToText(s.lifecycle)) + ", and is not condensed"};
  std::vector<EventBody> out;
  out.emplace_back(Head(s));
  out.emplace_back(s.session);
  for (const auto& l : s.libraries) out.emplace_back(l);
  for (const auto& [id, p] : s.peers) {
    out.emplace_back(PeerConnected{id, p.host, p.pid, p.group, p.rank});
    if (!p.connected) out.emplace_back(PeerLost{id, p.lost_reason});
  }
  AddCommunicators(out, s);
  for (const auto& [id, pool] : s.pools) out.emplace_back(PoolOpened{id, pool.tag, pool.policy, pool.cycles});
  for (const auto& [address, r] : s.ranges)
    out.emplace_back(RangeReserved{address, r.bytes, r.alignment, r.hint, r.flags, {}, {}, {}});
  for (const auto& [id, a] : s.allocations) AddAllocation(out, id, a);
  AMEM_TRY(AddMulticasts(out, s));
  for (const auto& [address, m] : s.mappings) {
    out.emplace_back(Mapped{address, m.bytes, m.offset, m.allocation, m.flags});
    if (!m.access.empty()) out.emplace_back(AccessSet{address, m.bytes, m.access, {}});
  }
  AMEM_TRY(AddParts(out, s));
  AddBindings(out, s);
  for (const auto& [of, r] : s.registrations)
    for (std::uint32_t i = 0; i < r.count; ++i)
      out.emplace_back(Registered{
          .address = of.first, .bytes = r.bytes, .how = r.how, .library = of.second, .card = r.card, .pins = r.pins});
  for (const auto& [id, r] : s.regions)
    out.emplace_back(Registered{r.address, r.bytes, r.how, {}, id, r.card, r.domain, r.access, r.flags});
  for (const auto& [id, a] : s.allocations) AddReferences(out, id, a);
  AddAll(out, s.legacy);
  for (const auto& [id, pool] : s.pools) AddAll(out, pool.parts);
  AddAll(out, s.legacy_imports);
  AddAll(out, s.host);
  AddAll(out, s.async);
  AddEnds(out, s);
  for (const auto& [id, a] : s.allocations)
    if (a.guest_references == 0) out.emplace_back(AllocationReleased{id});
  // EverythingKept comes after the pauses where these have released memory, and before them where they have left all in place.
  const bool kept_last = std::ranges::any_of(s.allocations, [](const auto& item) { return !item.second.resident; });
  if (!s.kept_whole.empty() && !kept_last) out.emplace_back(EverythingKept{s.kept_whole});
  for (const auto& [id, pool] : s.pools) ScopeCycleEvents(out, s, id).Add();
  if (s.lifecycle != Lifecycle::kRunning) ScopeCycleEvents(out, s, {}).Add();
  if (!s.kept_whole.empty() && kept_last) out.emplace_back(EverythingKept{s.kept_whole});
  if (!s.broken.empty()) out.emplace_back(SessionBroken{s.broken});
  if (s.lifecycle == Lifecycle::kRunning && !s.cycle.failure.empty()) {
    out.emplace_back(CycleBegun{s.cycle.kind, s.cycle.number, s.cycle.members});
    out.emplace_back(CycleFailed{s.cycle.kind, s.cycle.number, true, s.cycle.failure});
  }

  State again;
  for (const EventBody& body : out) AMEM_TRY(Apply(again, Event{{}, 0, 0, body}).Within("snapshot does not fold"));
  if (again != s)
    return Status{Code::kInvalid, "snapshot: this state holds what a snapshot cannot say; the events are kept instead"};
  return out;
}

}  // namespace amem
