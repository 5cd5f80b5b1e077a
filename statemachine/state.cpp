#include "statemachine/state.h"

namespace amem {
namespace {

template <class Map>
typename Map::const_iterator Containing(const Map& map, Address address) {
  auto it = map.upper_bound(address);
  if (it == map.begin()) return map.end();
  --it;
  return address.value - it->first.value < it->second.bytes ? it : map.end();
}

}  // namespace

std::map<Address, Mapping>::const_iterator State::MappingAt(Address address) const { return Containing(mappings, address); }
std::map<Address, Range>::const_iterator State::RangeAt(Address address) const { return Containing(ranges, address); }

bool State::Orphaned(const Allocation& a) const {
  if (!a.remote) return false;
  const auto owner = peers.find(a.remote->owner);
  return owner != peers.end() && !owner->second.connected;
}

KeepReason WhyKept(const Allocation& allocation) {
  if (allocation.multicast || allocation.multicast_bindings > 0) return KeepReason::kMulticast;
  if (!allocation.on_device()) return KeepReason::kHostMemory;
  if (allocation.registrations > 0) return KeepReason::kRegistered;
  return KeepReason::kNone;
}

Holdings Measure(const State& state) {
  Holdings sum;
  for (const auto& [id, a] : state.allocations) {
    if (!a.own()) {
      sum.imported += a.bytes;
      ++sum.imported_count;
      continue;
    }
    if (!a.on_device() || a.multicast) continue;
    sum.own_device += a.bytes;
    ++sum.own_count;
    if (a.backed) sum.own_device_backed += a.bytes;
    if (const KeepReason why = WhyKept(a); why != KeepReason::kNone) sum.kept[why] += a.bytes;
  }
  for (const auto& [address, h] : state.host) sum.host += h.bytes;
  for (const auto& [address, bytes] : state.async) sum.async += bytes;
  for (const auto& [address, l] : state.legacy) {
    if (!l.backing) sum.legacy_kept += l.bytes;
  }
  return sum;
}

}  // namespace amem
