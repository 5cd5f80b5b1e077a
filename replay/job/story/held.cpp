#include "replay/job/story/held.h"

#include <algorithm>
#include <numeric>

namespace amem {

namespace {

// What one allocation adds to what is held now.
struct Share {
  MemoryClass as = MemoryClass::kOwn;
  Bytes bytes = 0;
};
Share ShareOf(const Allocation& a) {
  if (a.placed()) return {};  // a part of a slab, which counts as a whole
  const Bytes bytes = a.resident ? a.bytes : 0;
  if (a.pool) return {MemoryClass::kTagged, bytes};
  if (!a.own()) return {MemoryClass::kImported, bytes};
  if (a.multicast) return {};  // it has no memory of its own; the allocations bound to it count
  if (!a.on_device()) return {MemoryClass::kHost, bytes};
  return {WhyKept(a) == KeepReason::kNone ? MemoryClass::kOwn : MemoryClass::kOwnKept, bytes};
}

// Kinds of events that leave the memory held as it is.
template <class Body>
constexpr bool ChangesNothing() {
  return kIsOneOf<Body, SessionClosed, GroupChanged, LibraryAttached, DriverSymbolBound, RangeReserved, AllocationRetained,
                  Mapped, AccessSet, Exported, ReferenceAdded, PeerConnected, LegacyExported, LegacyImported, LegacyClosed,
                  PassedThrough, CycleBegun, StepBegun, StepFailed, PhaseBegun, PhaseDecided, CycleDone, CycleFailed,
                  SlabOpened, PartCleared, CommunicatorBegun, CommunicatorReady, CommunicatorEnded, CommunicatorSuspended,
                  VoteCast, MemberHeard, ProcessSeen, ThreadSeen, LaunchRefused, PoolOpened, PoolAllocated, PoolFreed,
                  RequestSeen, SafepointReached, RequestEnded, Frozen, FreezeStep, EverythingKept, SharedOutside, BallotShown>;
}

}  // namespace

Bytes Sum(const Held& held) { return std::accumulate(held.begin(), held.end(), Bytes{0}); }

Bytes DeviceBytes(const Held& held) {
  return Sum(held) - held[static_cast<std::size_t>(MemoryClass::kImported)] -
         held[static_cast<std::size_t>(MemoryClass::kHost)];
}

Held HeldIn(const State& state) {
  Held held{};
  const auto add = [&held](MemoryClass as, Bytes bytes) { held[static_cast<std::size_t>(as)] += bytes; };
  for (const auto& [id, a] : state.allocations) add(ShareOf(a).as, ShareOf(a).bytes);
  for (const auto& [address, h] : state.host) add(MemoryClass::kHost, h.bytes);
  for (const auto& [address, a] : state.async) add(MemoryClass::kPool, a.bytes);
  for (const auto& [address, l] : state.legacy)
    if (!l.backing) add(MemoryClass::kDriver, l.bytes);
  return held;
}

// Finds the allocations that an event touches, by its kind.
struct HeldCounter::Looker {
  HeldCounter& c;
  const State& before;

  template <class Body>
  void operator()(const Body& e) const {
    if constexpr (kIsOneOf<Body, RangeFreed, AllocationCreated, AllocationReleased, Imported, ReferenceDropped, Placed,
                           Backed>) {
      c.Touch(e.allocation, before);
    } else {
      c.recount_ = !ChangesNothing<Body>();
    }
  }
  void operator()(const Unmapped& e) const {
    if (e.allocation) return c.Touch(e.allocation, before);
    const auto end = before.mappings.lower_bound(e.address + e.bytes);
    for (auto it = before.mappings.lower_bound(e.address); it != end; ++it) c.Touch(it->second.allocation, before);
  }
  void operator()(const HostAllocated& e) const { c.Add(MemoryClass::kHost, e.bytes); }
  void operator()(const HostFreed& e) const {
    if (const HostAllocated* host = FindIn(before.host, e.address)) c.Remove(MemoryClass::kHost, host->bytes);
  }
  void operator()(const AsyncAllocated& e) const {
    (*this)(AsyncFreed{e.address});  // a pool may give an address out again
    c.Add(MemoryClass::kPool, e.bytes);
  }
  void operator()(const AsyncFreed& e) const {
    if (const AsyncAllocated* async = FindIn(before.async, e.address)) c.Remove(MemoryClass::kPool, async->bytes);
  }
  void operator()(const LegacyAllocated& e) const {
    if (!e.backing) c.Add(MemoryClass::kDriver, e.bytes);
  }
  void operator()(const LegacyFreed& e) const {
    const LegacyAllocated* legacy = FindIn(before.legacy, e.address);
    if (legacy != nullptr && !legacy->backing) c.Remove(MemoryClass::kDriver, legacy->bytes);
  }
  void operator()(const StepDone& e) const { c.Touch(e.step.allocation, before); }
};

void HeldCounter::Before(const Event& event, const State& before) {
  touched_.clear();
  recount_ = false;
  std::visit(Looker{*this, before}, static_cast<const EventVariant&>(event.body));
  for (const AllocationId id : touched_) Count(id, before, false);
}

void HeldCounter::After(const State& after) {
  if (recount_) return Recount(after);
  for (const AllocationId id : touched_) Count(id, after, true);
}

void HeldCounter::Touch(AllocationId id, const State& state) {
  if (!id || std::find(touched_.begin(), touched_.end(), id) != touched_.end()) return;
  touched_.push_back(id);
  // A slab may be kept in a pause because of one of its parts only.
  if (const Allocation* a = FindIn(state.allocations, id); a != nullptr && a->placed()) Touch(a->slab, state);
}

void HeldCounter::Count(AllocationId id, const State& state, bool add) {
  const Allocation* a = FindIn(state.allocations, id);
  if (a == nullptr) return;
  const Share share = ShareOf(*a);
  add ? Add(share.as, share.bytes) : Remove(share.as, share.bytes);
}

}  // namespace amem
