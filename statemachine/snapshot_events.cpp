#include "statemachine/apply.h"
#include "statemachine/check.h"

namespace amem {
namespace {

void AddAllocation(std::vector<EventBody>& out, AllocationId id, const Allocation& a) {
  if (a.multicast && a.own()) return;
  if (a.remote) {
    out.emplace_back(Imported{id, *a.remote, a.bytes, a.properties, 1, {}, a.site, a.created, a.tag, a.communicator});
  } else {
    out.emplace_back(AllocationCreated{id, a.bytes, a.properties, a.flags, {}, a.site, a.created, a.tag, a.communicator});
  }
}

void AddReferences(std::vector<EventBody>& out, AllocationId id, const Allocation& a) {
  for (std::uint32_t i = 0; i < a.exports; ++i) out.emplace_back(Exported{id, 1});
  for (const auto& [importer, count] : a.importers) {
    for (std::uint32_t i = 0; i < count; ++i) out.emplace_back(ReferenceAdded{id, importer.by, importer.as});
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
        const auto found = s.allocations.find(part);
        AMEM_CHECK(found != s.allocations.end(), id, part);
        const Allocation& a = found->second;
        const Address address = slab.address + offset;
        out.emplace_back(Placed{part, id, offset, a.touched});
        for (std::uint32_t i = 0; i < a.reserved; ++i) out.emplace_back(RangeReserved{address, a.bytes, 0, {}, 0, {}, part});
        for (std::uint32_t i = 0; i < a.mappings; ++i) out.emplace_back(Mapped{address, a.bytes, 0, part, 0});
      }
    }
  }
  return {};
}

Status AddMulticasts(std::vector<EventBody>& out, const State& s) {
  for (const auto& [id, m] : s.multicasts) {
    const auto found = s.allocations.find(id);
    AMEM_CHECK(found != s.allocations.end(), id);
    const Allocation& a = found->second;
    if (a.own())
      out.emplace_back(MulticastCreated{id, a.bytes, m.devices, a.properties.handle_types, a.flags, {}, a.tag, m.incomplete});
    for (const DeviceOrdinal d : m.added) out.emplace_back(MulticastDeviceAdded{id, d});
  }
  return {};
}

void AddBindings(std::vector<EventBody>& out, const State& s) {
  for (const auto& [id, m] : s.multicasts) {
    for (const auto& [offset, bindings] : m.bindings) {
      for (const auto& b : bindings)
        out.emplace_back(MulticastBound{id, offset, b.allocation, b.allocation_offset, b.bytes, b.address});
    }
  }
}

void AddCommunicators(std::vector<EventBody>& out, const State& s) {
  for (const auto& [id, c] : s.communicators) {
    out.emplace_back(CommunicatorBegun{id, c.parent, c.how, c.rank, c.ranks});
    if (c.ready) out.emplace_back(CommunicatorReady{id, c.hash, c.rank, c.ranks, c.device});
    if (c.suspended) out.emplace_back(CommunicatorSuspended{id, true});
  }
}
// After the memory that was made for them, which keeps them known.
void AddEnds(std::vector<EventBody>& out, const State& s) {
  for (const auto& [id, c] : s.communicators) {
    if (!c.ended.empty()) out.emplace_back(CommunicatorEnded{id, c.ended});
  }
}

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
  if (s.lifecycle != Lifecycle::kRunning) {
    return Status{Code::kInvalid,
                  "snapshot: the session is " + std::string(ToText(s.lifecycle)) + "; only a running one can be condensed"};
  }
  std::vector<EventBody> out;
  out.emplace_back(Head(s));
  out.emplace_back(s.session);
  for (const auto& l : s.libraries) out.emplace_back(l);
  for (const auto& [id, p] : s.peers) {
    out.emplace_back(PeerConnected{id, p.host, p.pid, p.group, p.rank});
    if (!p.connected) out.emplace_back(PeerLost{id, p.lost_reason});
  }
  AddCommunicators(out, s);
  for (const auto& [address, r] : s.ranges)
    out.emplace_back(RangeReserved{address, r.bytes, r.alignment, r.hint, r.flags, {}, {}});
  for (const auto& [id, a] : s.allocations) AddAllocation(out, id, a);
  AMEM_TRY(AddMulticasts(out, s));
  for (const auto& [address, m] : s.mappings) {
    out.emplace_back(Mapped{address, m.bytes, m.offset, m.allocation, m.flags});
    if (!m.access.empty()) out.emplace_back(AccessSet{address, m.bytes, m.access, {}});
  }
  AMEM_TRY(AddParts(out, s));
  AddBindings(out, s);
  for (const auto& [address, r] : s.registrations) {
    for (std::uint32_t i = 0; i < r.count; ++i) out.emplace_back(Registered{address, r.bytes, r.how});
  }
  for (const auto& [id, a] : s.allocations) AddReferences(out, id, a);
  for (const auto& [address, l] : s.legacy)
    out.emplace_back(LegacyAllocated{address, l.bytes, l.backing, l.offset, l.why, l.site, l.communicator});
  for (const auto& [address, id] : s.legacy_imports) out.emplace_back(LegacyImported{address, id});
  for (const auto& [address, h] : s.host) out.emplace_back(HostAllocated{address, h.bytes, h.flags, h.registered});
  for (const auto& [address, bytes] : s.async) out.emplace_back(AsyncAllocated{address, bytes});
  AddEnds(out, s);
  for (const auto& [id, a] : s.allocations) {
    if (a.guest_references == 0) out.emplace_back(AllocationReleased{id});
  }
  if (!s.broken.empty()) out.emplace_back(SessionBroken{s.broken});
  if (!s.cycle.failure.empty()) {
    out.emplace_back(CycleBegun{s.cycle.kind, s.cycle.number, s.cycle.members});
    out.emplace_back(CycleFailed{s.cycle.kind, s.cycle.number, true, s.cycle.failure});
  }

  State again;
  for (const EventBody& body : out) AMEM_TRY(Apply(again, Event{{}, 0, 0, body}).Within("snapshot does not fold"));
  if (again != s) {
    return Status{Code::kInvalid, "snapshot: this state holds what a snapshot cannot say; the events are kept instead"};
  }
  return out;
}

}  // namespace amem
