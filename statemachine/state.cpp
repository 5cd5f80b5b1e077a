#include "statemachine/state.h"

#include <algorithm>

namespace amem {

// What holds the bytes of an allocation: the slab that it is a part of, or itself.
static const Allocation& Behind(const State& state, const Allocation& a) {
  const auto* const slab = FindIn(state.allocations, a.slab);
  return slab == nullptr ? a : *slab;
}

// Memory that the driver has behind an allocation, or had before a pause.
static void Add(const State& state, AllocationId id, const Allocation& a, PoolHoldings& sum) {
  if (a.resident) sum.own_resident += a.bytes;
  if (const KeepReason why = WhyKept(a); why != KeepReason::kNone) sum.kept[why] += a.bytes;
  if (a.held > 0 || !a.handed_to.empty())
    for (const std::string& library : LibrariesHolding(state, id)) sum.held_by[library] += a.bytes;
  if (a.on_device()) sum.devices.emplace(a.properties.location.id);
}

bool Allows(const std::vector<AccessDescriptor>& access, const AccessDescriptor& wanted) {
  return std::ranges::any_of(access, [&](const AccessDescriptor& has) {
    return has.location == wanted.location && (has.flags & wanted.flags) == wanted.flags;
  });
}

void MergeAccess(std::vector<AccessDescriptor>& access, const AccessDescriptor& change) {
  const auto at = std::ranges::lower_bound(access, change.location, {}, &AccessDescriptor::location);
  const bool there = at != access.end() && at->location == change.location;
  if (change.flags == 0) {
    if (there) access.erase(at);
  } else if (there) {
    at->flags = change.flags;
  } else {
    access.insert(at, change);
  }
}

// Here, because each file that makes or compares states would compile all of these maps.
State::State() { lifecycle = Lifecycle::kNew; }
State::State(const State&) = default;
State::State(State&&) noexcept = default;
State& State::operator=(const State&) = default;
State& State::operator=(State&&) noexcept = default;
State::~State() = default;
bool operator==(const State&, const State&) = default;

bool State::Orphaned(const Allocation& a) const {
  if (!a.remote) return false;
  const auto* const owner = FindIn(peers, a.remote->owner);
  return owner != nullptr && !owner->connected;
}

bool State::IsSubstitute(AllocationId id, const Allocation& a) const {
  if (!a.own() || !a.rebuilt()) return Orphaned(a);
  const auto* const multicast = FindIn(multicasts, id);
  return multicast != nullptr && multicast->incomplete;
}

AllocationId State::SlabAt(Address address) const {
  const auto mapping = MappingAt(address);
  if (mapping == mappings.end() || !slabs.contains(mapping->second.allocation)) return {};
  return mapping->second.allocation;
}

AllocationId State::PartAt(Address address) const {
  const auto* const slab = FindIn(slabs, SlabAt(address));
  if (slab == nullptr) return {};
  auto at = slab->parts.upper_bound(address.value - slab->address.value);
  if (at == slab->parts.begin()) return {};
  --at;
  const auto first = allocations.find(at->second.front());
  const Bytes within = address.value - slab->address.value - at->first;
  return first != allocations.end() && within < first->second.bytes ? first->first : AllocationId{};
}

Address State::PlaceOf(const Allocation& allocation) const {
  const auto* const slab = FindIn(slabs, allocation.slab);
  return slab == nullptr ? Address{} : slab->address + allocation.offset;
}

PoolId State::PoolNamed(std::string_view tag) const {
  for (const auto& [id, pool] : pools)
    if (pool.tag == tag) return id;
  return {};
}

std::set<PoolId> State::PoolsIn(Address address, Bytes bytes) const {
  std::set<PoolId> found;
  for (const auto& [at, mapping] : Touching(mappings, address, bytes)) {
    const auto* const a = FindIn(allocations, mapping.allocation);
    if (a != nullptr && a->pool) found.insert(a->pool);
  }
  return found;
}

bool State::HasOwnMemory(PoolId pool) const {
  return std::ranges::any_of(allocations, [&](const auto& one) { return one.second.pool == pool && one.second.own(); });
}

Lifecycle State::LifecycleOf(PoolId id) const {
  return id && !pools.contains(id) ? Lifecycle::kRunning : ScopeOf(id).lifecycle;
}

const Scope& State::ScopeOf(PoolId id) const {
  const Pool* const pool = FindIn(pools, id);
  return pool == nullptr ? static_cast<const Scope&>(*this) : *pool;
}

bool State::StepUnderWay(AllocationId id, const Allocation& a) const {
  const std::optional<Step>& open = ScopeOf(a.pool).cycle.open_step;
  return open && open->allocation == id;
}

bool State::Preserves(const Allocation& a) const {
  if (!a.own() || a.multicast) return false;
  const auto* const pool = FindIn(pools, a.pool);
  return pool == nullptr || pool->Preserves();
}

std::optional<Bytes> FindRoom(const State& state, AllocationId id, Bytes bytes, Bytes alignment,
                              const std::multimap<Bytes, Bytes>& kept) {
  const auto* const slab = FindIn(state.slabs, id);
  const auto* const whole = FindIn(state.allocations, id);
  if (slab == nullptr || whole == nullptr) return std::nullopt;
  std::vector<std::pair<Bytes, Bytes>> taken(kept.begin(), kept.end());
  for (const auto& [offset, parts] : slab->parts) {
    const auto* const part = FindIn(state.allocations, parts.front());
    if (part == nullptr) return std::nullopt;  // an invariant is broken: nothing more is placed here
    taken.emplace_back(offset, part->bytes);
  }
  std::ranges::sort(taken);
  Bytes at = 0;
  for (const auto& [offset, size] : taken) {
    if (at + bytes <= offset) return at;
    at = std::max(at, (offset + size + alignment - 1) / alignment * alignment);
  }
  return at + bytes <= whole->bytes ? std::optional(at) : std::nullopt;
}

std::vector<ByteRange> DirtyWithin(const Slab& slab, Bytes offset, Bytes bytes) {
  std::vector<ByteRange> found;
  auto it = slab.dirty.upper_bound(offset);
  if (it != slab.dirty.begin()) --it;
  for (; it != slab.dirty.end() && it->first < offset + bytes; ++it) {
    const Bytes from = std::max(it->first, offset), to = std::min(it->first + it->second, offset + bytes);
    if (from < to) found.push_back({from, to - from});
  }
  return found;
}

KeepReason WhyKept(const Allocation& allocation) {
  if (allocation.multicast) return allocation.rebuilt() ? KeepReason::kNone : KeepReason::kMulticast;
  // A pause of a pool unbinds nothing, because it is no pause of NCCL.
  if (allocation.multicast_bindings > (allocation.pool ? 0 : allocation.released_bindings)) return KeepReason::kMulticast;
  if (!allocation.on_device()) return KeepReason::kHostMemory;
  if (allocation.pinned > allocation.held) return KeepReason::kRegistered;
  if (allocation.handed_out && allocation.handed_to.empty()) return KeepReason::kHandedOut;
  if (allocation.held > 0 || allocation.handed_out) return KeepReason::kHeld;
  if (allocation.kept_with_all) return KeepReason::kUnseen;
  if (allocation.pool) return KeepReason::kNone;
  if (allocation.tag == MemoryTag::kUser) return KeepReason::kUser;
  return KeepReason::kNone;
}

Holdings Measure(const State& state) {
  Holdings sum;
  for (const auto& [id, a] : state.allocations) {
    const bool slab = state.slabs.contains(id);
    if (!a.own()) {
      sum.imported += slab ? 0 : a.bytes;
      ++(slab ? sum.imported_slab_count : sum.imported_count);
      continue;
    }
    if (a.pool) {
      sum.pools += a.bytes;
      if (a.resident) sum.pools_resident += a.bytes;
      continue;
    }
    if (!a.on_device() || a.multicast) continue;
    if (slab) {
      sum.slabs += a.bytes;
      sum.slabs_free += a.bytes;  // less the parts, below
      ++sum.slab_count;
    } else {
      sum.own_device += a.bytes;
      ++sum.own_count;
    }
    if (a.placed()) sum.slabs_free -= a.bytes;
    if (a.placed()) continue;
    if (a.resident) sum.own_device_resident += a.bytes;
    if (a.tag != MemoryTag::kNccl) sum.user += a.bytes;
    if (a.tag != MemoryTag::kNccl && a.resident) sum.user_resident += a.bytes;
    if (const KeepReason why = WhyKept(a); why != KeepReason::kNone) sum.kept[why] += a.bytes;
  }
  for (const auto& [address, h] : state.host) sum.host += h.bytes;
  for (const auto& [address, a] : state.async) sum.async += a.bytes;
  for (const auto& [address, l] : state.legacy) {
    if (!l.backing) sum.legacy_kept += l.bytes;
    if (!l.backing && l.why == ToText(KeepReason::kUser)) sum.legacy_user += l.bytes;
  }
  return sum;
}

std::set<std::string> LibrariesHolding(const State& state, AllocationId id) {
  std::set<std::string> libraries;
  const auto* const a = FindIn(state.allocations, id);
  if (a == nullptr) return libraries;
  if (!a->handed_to.empty()) libraries.insert(a->handed_to);
  if (a->held == 0) return libraries;
  for (const auto& [of, registration] : state.registrations)
    if (!of.second.empty() && std::ranges::find(registration.allocations, id) != registration.allocations.end())
      libraries.insert(of.second);
  return libraries;
}

std::map<PoolId, PoolHoldings> MeasurePools(const State& state) {
  std::map<PoolId, PoolHoldings> sums;
  if (state.pools.empty()) return sums;  // most jobs have none, and may have thousands of allocations
  for (const auto& [id, pool] : state.pools) {
    PoolHoldings& sum = sums[id];
    sum.part_count = pool.parts.size();
    for (const auto& [address, part] : pool.parts) sum.parts += part.bytes;
  }
  for (const auto& [id, a] : state.allocations) {
    if (!a.pool || !a.own()) continue;
    PoolHoldings& sum = sums[a.pool];
    sum.own += a.bytes;
    ++sum.chunk_count;
    if (a.tag == MemoryTag::kUserReleased) sum.parts += a.bytes, ++sum.part_count;
    Add(state, id, a, sum);
  }
  return sums;
}

PoolHoldings MeasureTag(const State& state, bool program) {
  PoolHoldings sum;
  for (const auto& [id, a] : state.allocations) {
    if (!a.own() || !a.on_device() || a.multicast || a.pool || (a.tag != MemoryTag::kNccl) != program) continue;
    if (!state.slabs.contains(id)) sum.parts += a.bytes, ++sum.part_count;
    if (a.placed()) continue;
    sum.own += a.bytes;
    Add(state, id, a, sum);
  }
  return sum;
}

Savable MeasureSavable(const State& state, PoolId scope) {
  Savable sum;
  for (const auto& [id, a] : state.allocations) {
    if (a.pool != scope || state.slabs.contains(id) || !state.Preserves(a)) continue;
    if (WhyKept(Behind(state, a)) != KeepReason::kNone) continue;
    (a.tag == MemoryTag::kNccl ? sum.nccl : sum.program) += a.bytes;
  }
  return sum;
}

std::map<std::string, CardHoldings> MeasureCards(const State& state) {
  std::map<std::string, CardHoldings> cards;
  const auto pin = [&](const std::string& card, const std::string& why, Bytes bytes) {
    cards[card].pinned.Add(bytes);
    cards[card].by_why[why].Add(bytes);
  };
  for (const auto& [id, region] : state.regions) {
    if (!region.kept.empty()) {  // by the pause that is under way
      pin(region.card, region.kept, region.bytes);
      continue;
    }
    CardHoldings& card = cards[region.card];
    card.renewable.Add(region.bytes);
    card.renewable_now += region.present ? region.bytes : 0;
  }
  for (const auto& [of, r] : state.registrations)
    if (of.second.empty()) pin(r.card, r.pins.empty() ? r.how : r.pins, r.bytes);  // not another library's
  return cards;
}

std::map<CommunicatorId, CommunicatorHoldings> MeasureCommunicators(const State& state) {
  std::map<CommunicatorId, CommunicatorHoldings> sums;
  std::set<AllocationId> backings;  // of cuMemAlloc memory, which is counted by itself
  for (const auto& [address, l] : state.legacy) backings.insert(l.backing);
  for (const auto& [id, a] : state.allocations) {
    if (state.slabs.contains(id) || a.multicast || a.tag != MemoryTag::kNccl || backings.contains(id)) continue;
    CommunicatorHoldings& sum = sums[a.communicator];
    if (!a.own()) {
      sum.imported += a.bytes;
      ++sum.imported_count;
    } else if (a.on_device()) {
      sum.own += a.bytes;
      ++sum.own_count;
      if (Behind(state, a).resident) sum.own_present += a.bytes;
      if (WhyKept(Behind(state, a)) != KeepReason::kNone) sum.own_kept += a.bytes;
    }
  }
  for (const auto& [address, l] : state.legacy) {
    if (l.why == ToText(KeepReason::kUser)) continue;
    CommunicatorHoldings& sum = sums[l.communicator];
    const auto* const backing = FindIn(state.allocations, l.backing);
    sum.own += l.bytes;
    ++sum.own_count;
    const bool kept = backing == nullptr || WhyKept(*backing) != KeepReason::kNone;
    if (kept || backing->resident) sum.own_present += l.bytes;
    if (kept) sum.own_kept += l.bytes;
  }
  return sums;
}

}  // namespace amem
