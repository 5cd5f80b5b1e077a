#include <algorithm>

#include "statemachine/fold.h"

namespace amem {

Status Fold::operator()(const HostAllocated& e) {
  const auto [it, fresh] = s_.host.emplace(e.address, HostAllocation{e.bytes, e.flags, e.registered});
  return fresh ? Status{} : Bad("host memory at " + Hex(e.address.value) + " is known already");
}

Status Fold::operator()(const HostFreed& e) {
  return s_.host.erase(e.address) == 1 ? Status{} : Bad("free host memory " + Hex(e.address.value) + ": none is known there");
}

Status Fold::operator()(const LegacyAllocated& e) {
  if (e.backing && Find(e.backing) == nullptr)
    return Bad("cuMemAlloc " + Hex(e.address.value) + ": " + ToText(e.backing) + " does not exist");
  const auto [it, fresh] =
      s_.legacy.emplace(e.address, LegacyAllocation{e.bytes, e.backing, e.offset, e.why, e.site, e.communicator});
  if (fresh) CountMemory(e.communicator);
  return fresh ? Status{} : Bad("cuMemAlloc " + Hex(e.address.value) + ": that address is allocated already");
}

Status Fold::operator()(const LegacyFreed& e) {
  const auto it = s_.legacy.find(e.address);
  if (it == s_.legacy.end()) return Bad("cuMemFree " + Hex(e.address.value) + ": nothing is allocated there");
  const CommunicatorId communicator = it->second.communicator;
  s_.legacy.erase(it);
  UncountMemory(communicator);
  return {};
}

Status Fold::operator()(const LegacyExported& e) {
  Allocation* a = Find(e.backing);
  if (a == nullptr) return Bad("IPC handle of " + Hex(e.address.value) + ": " + ToText(e.backing) + " does not exist");
  ++a->exports;
  return {};
}

Status Fold::operator()(const LegacyImported& e) {
  if (Find(e.allocation) == nullptr)
    return Bad("open IPC handle at " + Hex(e.address.value) + ": " + ToText(e.allocation) + " does not exist");
  const auto [it, fresh] = s_.legacy_imports.emplace(e.address, e.allocation);
  return fresh ? Status{} : Bad("open IPC handle at " + Hex(e.address.value) + ": one is open there");
}

Status Fold::operator()(const LegacyClosed& e) {
  return s_.legacy_imports.erase(e.address) == 1 ? Status{}
                                                 : Bad("close IPC handle at " + Hex(e.address.value) + ": none is open there");
}

Status Fold::operator()(const AsyncAllocated& e) {
  s_.async[e.address] = e.bytes;
  return {};
}

Status Fold::operator()(const AsyncFreed& e) {
  return s_.async.erase(e.address) == 1 ? Status{} : Bad("free pool memory " + Hex(e.address.value) + ": none is known there");
}

Status Fold::operator()(const Registered& e) {
  std::vector<AllocationId> below;
  auto it = s_.MappingAt(e.address);
  if (it == s_.mappings.end()) it = s_.mappings.lower_bound(e.address);
  for (; it != s_.mappings.end() && it->first < e.address + e.bytes; ++it) {
    AMEM_CHECK(Find(it->second.allocation) != nullptr, it->first, it->second.allocation);
    below.push_back(it->second.allocation);
  }
  // Again at that address: perhaps more bytes, or other memory, whose registration outlived what was there before.
  Registration& r = s_.registrations.try_emplace(e.address, Registration{0, e.how, 0, {}}).first->second;
  ++r.count;
  r.bytes = std::max(r.bytes, e.bytes);
  for (const AllocationId id : below) {
    if (std::find(r.allocations.begin(), r.allocations.end(), id) != r.allocations.end()) continue;
    r.allocations.push_back(id);
    ++Find(id)->registrations;
  }
  return {};
}

Status Fold::operator()(const Deregistered& e) {
  const auto it = s_.registrations.find(e.address);
  if (it == s_.registrations.end()) return Bad("deregister " + Hex(e.address.value) + ": it was not registered");
  if (--it->second.count > 0) return {};
  for (const AllocationId id : it->second.allocations) {
    if (Allocation* a = Find(id); a != nullptr && a->registrations > 0) --a->registrations;
  }
  s_.registrations.erase(it);
  return {};
}

}  // namespace amem
