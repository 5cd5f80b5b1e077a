#include "statemachine/state.h"

#include <algorithm>
#include <set>

namespace amem {
namespace {

template <class Map>
typename Map::const_iterator Containing(const Map& map, Address address) {
  auto it = map.upper_bound(address);
  if (it == map.begin()) return map.end();
  --it;
  return address.value - it->first.value < it->second.bytes ? it : map.end();
}

// What holds the bytes of an allocation: the slab that it is a part of, or itself.
const Allocation& Behind(const State& state, const Allocation& a) {
  const auto slab = state.allocations.find(a.slab);
  return slab == state.allocations.end() ? a : slab->second;
}

}  // namespace

std::map<Address, Mapping>::const_iterator State::MappingAt(Address address) const { return Containing(mappings, address); }
std::map<Address, Range>::const_iterator State::RangeAt(Address address) const { return Containing(ranges, address); }

bool State::Orphaned(const Allocation& a) const {
  if (!a.remote) return false;
  const auto owner = peers.find(a.remote->owner);
  return owner != peers.end() && !owner->second.connected;
}

bool State::StandsIn(AllocationId id, const Allocation& a) const {
  if (!a.own() || !a.rebuilt()) return Orphaned(a);
  const auto multicast = multicasts.find(id);
  return multicast != multicasts.end() && multicast->second.incomplete;
}

AllocationId State::SlabAt(Address address) const {
  const auto mapping = MappingAt(address);
  if (mapping == mappings.end() || !slabs.contains(mapping->second.allocation)) return {};
  return mapping->second.allocation;
}

AllocationId State::PartAt(Address address) const {
  const auto slab = slabs.find(SlabAt(address));
  if (slab == slabs.end()) return {};
  auto at = slab->second.parts.upper_bound(address.value - slab->second.address.value);
  if (at == slab->second.parts.begin()) return {};
  --at;
  const auto first = allocations.find(at->second.front());
  const Bytes within = address.value - slab->second.address.value - at->first;
  return first != allocations.end() && within < first->second.bytes ? first->first : AllocationId{};
}

Address State::PlaceOf(const Allocation& allocation) const {
  const auto slab = slabs.find(allocation.slab);
  return slab == slabs.end() ? Address{} : slab->second.address + allocation.offset;
}

PoolId State::PoolNamed(std::string_view tag) const {
  for (const auto& [id, pool] : pools) {
    if (pool.tag == tag) return id;
  }
  return {};
}

std::map<Address, LegacyAllocation>::const_iterator State::LegacyAt(Address address) const {
  return Containing(legacy, address);
}

std::set<PoolId> State::PoolsIn(Address address, Bytes bytes) const {
  std::set<PoolId> found;
  auto it = MappingAt(address);
  if (it == mappings.end()) it = mappings.lower_bound(address);
  for (; it != mappings.end() && it->first < address + bytes; ++it) {
    const auto a = allocations.find(it->second.allocation);
    if (a != allocations.end() && a->second.pool) found.insert(a->second.pool);
  }
  return found;
}

Lifecycle State::LifecycleOf(PoolId id) const {
  if (!id) return lifecycle;
  const auto pool = pools.find(id);
  return pool == pools.end() ? Lifecycle::kRunning : pool->second.lifecycle;
}

const Cycle& State::CycleOf(PoolId id) const {
  const auto pool = pools.find(id);
  return pool == pools.end() ? cycle : pool->second.cycle;
}

bool State::StepUnderWay(AllocationId id, const Allocation& a) const {
  const std::optional<Step>& open = CycleOf(a.pool).open_step;
  return open && open->allocation == id;
}

bool State::Preserves(const Allocation& a) const {
  if (!a.own() || a.multicast) return false;
  const auto pool = pools.find(a.pool);
  return pool == pools.end() || pool->second.policy == PoolPolicy::kPreserve;
}

std::optional<Bytes> FindRoom(const State& state, AllocationId id, Bytes bytes, Bytes alignment,
                              const std::multimap<Bytes, Bytes>& kept) {
  const auto slab = state.slabs.find(id);
  const auto whole = state.allocations.find(id);
  if (slab == state.slabs.end() || whole == state.allocations.end()) return std::nullopt;
  const auto aligned = [&](Bytes at) { return (at + alignment - 1) / alignment * alignment; };
  Bytes at = 0;
  auto held = kept.begin();
  for (auto next = slab->second.parts.begin(); next != slab->second.parts.end() || held != kept.end();) {
    const bool is_part = held == kept.end() || (next != slab->second.parts.end() && next->first <= held->first);
    const auto part = is_part ? state.allocations.find(next->second.front()) : state.allocations.end();
    if (is_part && part == state.allocations.end()) return std::nullopt;  // an invariant is broken: nothing more is placed here
    const auto [offset, size] = is_part ? std::pair(next->first, part->second.bytes) : std::pair(held->first, held->second);
    if (at + bytes <= offset) return at;
    at = std::max(at, aligned(offset + size));
    is_part ? static_cast<void>(++next) : static_cast<void>(++held);
  }
  if (at + bytes <= whole->second.bytes) return at;
  return std::nullopt;
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
  if (allocation.registrations > 0) return KeepReason::kRegistered;
  if (allocation.handed_out) return KeepReason::kHandedOut;
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
  for (const auto& [address, bytes] : state.async) sum.async += bytes;
  for (const auto& [address, l] : state.legacy) {
    if (!l.backing) sum.legacy_kept += l.bytes;
    if (!l.backing && l.why == ToText(KeepReason::kUser)) sum.legacy_user += l.bytes;
  }
  return sum;
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
    if (a.resident) sum.own_resident += a.bytes;
    if (const KeepReason why = WhyKept(a); why != KeepReason::kNone) sum.kept[why] += a.bytes;
    const DeviceOrdinal device{a.properties.location.id};
    const auto at = std::lower_bound(sum.devices.begin(), sum.devices.end(), device);
    if (a.on_device() && (at == sum.devices.end() || *at != device)) sum.devices.insert(at, device);
  }
  return sums;
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
    const auto backing = state.allocations.find(l.backing);
    sum.own += l.bytes;
    ++sum.own_count;
    const bool kept = backing == state.allocations.end() || WhyKept(backing->second) != KeepReason::kNone;
    if (kept || backing->second.resident) sum.own_present += l.bytes;
    if (kept) sum.own_kept += l.bytes;
  }
  return sums;
}

}  // namespace amem
