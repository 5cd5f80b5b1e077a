#include <algorithm>
#include <tuple>

#include "statemachine/fold.h"

namespace amem {

Status Fold::operator()(const HostAllocated& e) {
  return s_.host.emplace(e.address, e).second ? Status{} : Bad("it is known already");
}

Status Fold::operator()(const HostFreed& e) { return s_.host.erase(e.address) == 1 ? Status{} : Bad("none is known there"); }

Status Fold::operator()(const LegacyAllocated& e) {
  if (e.backing) AMEM_TRY(Known(e.backing).status());
  if (!s_.legacy.emplace(e.address, e).second) return Bad("that address is allocated already");
  CountMemory(e.communicator);
  return {};
}

Status Fold::operator()(const LegacyFreed& e) {
  const auto it = s_.legacy.find(e.address);
  if (it == s_.legacy.end()) return Bad("nothing is allocated there");
  const CommunicatorId communicator = it->second.communicator;
  s_.legacy.erase(it);
  return UncountMemory(communicator);
}

Status Fold::operator()(const LegacyExported& e) {
  AMEM_ASSIGN(Allocation* const a, Known(e.backing));
  Count(a->exports);
  return {};
}

Status Fold::operator()(const LegacyImported& e) {
  AMEM_TRY(Known(e.allocation).status());
  return s_.legacy_imports.emplace(e.address, e).second ? Status{} : Bad("one is open there");
}

Status Fold::operator()(const LegacyClosed& e) {
  return s_.legacy_imports.erase(e.address) == 1 ? Status{} : Bad("none is open there");
}

Status Fold::operator()(const AsyncAllocated& e) {
  s_.async[e.address] = e;
  return {};
}

Status Fold::operator()(const AsyncFreed& e) { return s_.async.erase(e.address) == 1 ? Status{} : Bad("none is known there"); }

Status Fold::operator()(const Registered& e) {
  if (e.region) return AddRegion(e);
  std::vector<AllocationId> below;
  for (const auto& [address, mapping] : Touching(s_.mappings, e.address, e.bytes)) {
    AMEM_CHECK(Find(mapping.allocation) != nullptr, address, mapping.allocation);
    below.push_back(mapping.allocation);
  }
  // Again at that address: perhaps more bytes, or other memory, whose registration outlived what was there before.
  const auto* const known = FindIn(s_.registrations, {e.address, e.library});
  Registration r = known != nullptr ? *known : Registration{0, e.how, 0, {}, e.pins, e.card};
  if (r.card.empty() && !e.card.empty()) std::tie(r.how, r.card) = std::tie(e.how, e.card);  // a dma-buf comes before its card
  if (r.pins.empty()) r.pins = e.pins;
  ++r.count;
  r.bytes = std::max(r.bytes, e.bytes);
  std::vector<AllocationId> added;
  for (const AllocationId id : below) {
    if (std::ranges::find(r.allocations, id) != r.allocations.end()) continue;
    r.allocations.push_back(id);
    added.push_back(id);
  }
  s_.registrations[{e.address, e.library}] = std::move(r);  // the last for which there may be no memory
  for (const AllocationId id : added) {
    Allocation* const a = Find(id);
    ++a->pinned;
    if (!e.library.empty()) ++a->held;
  }
  return {};
}

Status Fold::AddRegion(const Registered& e) {
  if (!e.library.empty()) return Bad("only NCCL's own can be done again");
  if (s_.regions.contains(e.region)) return Bad("that id is in use");
  const auto mapping = s_.MappingAt(e.address);
  if (mapping == s_.mappings.end() || e.bytes == 0 ||
      e.bytes > mapping->second.bytes - (e.address.value - mapping->first.value))
    return Bad("it does not lie in one mapping");
  if (!mapping->second.present) return Bad("its memory is released");
  Allocation* const a = Find(mapping->second.allocation);
  AMEM_CHECK(a != nullptr, e.address, mapping->second.allocation);
  if (!a->own() || !a->on_device() || a->multicast || a->pool)
    return Bad(ToText(mapping->second.allocation) + " is no device memory of NCCL's own in this session");
  s_.regions.emplace(e.region,
                     Region{e.address, e.bytes, e.how, mapping->second.allocation, e.card, e.domain, e.access_flags, e.flags});
  ++a->renewable;
  return {};
}

Status Fold::LoseRegions(Address address, const Mapping& mapping) {
  for (auto it = s_.regions.begin(); it != s_.regions.end();) {
    const Region& region = it->second;
    if (region.allocation != mapping.allocation || region.address < address || !(region.address < address + mapping.bytes)) {
      ++it;
      continue;
    }
    Allocation* const a = Find(mapping.allocation);
    AMEM_CHECK(a != nullptr, address, mapping.allocation);
    --(region.kept.empty() ? a->renewable : a->pinned);
    if (region.present) {
      Registration& r =
          s_.registrations.try_emplace({region.address, ""}, Registration{0, region.how, 0, {}, {}, region.card}).first->second;
      ++r.count;
      r.bytes = std::max(r.bytes, region.bytes);
      if (std::ranges::find(r.allocations, mapping.allocation) == r.allocations.end()) {
        r.allocations.push_back(mapping.allocation);
        ++a->pinned;
      }
    }
    it = s_.regions.erase(it);
  }
  return {};
}

Status Fold::operator()(const RegionKept& e) {
  AMEM_TRY(InCycle({}).status());
  if (s_.lifecycle != Lifecycle::kPausing) return Bad("no pause is under way, " + LifecycleText(OwnerOf({})));
  auto* const region = FindIn(s_.regions, e.region);
  if (region == nullptr) return Bad(ToText(e.region) + " does not exist");
  if (e.why.empty()) return Bad("it gives no reason");
  if (!region->present) return Bad("the card has let go of it");
  if (region->kept.empty()) {
    Allocation* const a = Find(region->allocation);
    AMEM_CHECK(a != nullptr, e.region, region->allocation);
    --a->renewable;
    ++a->pinned;
  }
  region->kept = e.why;
  return {};
}

Status Fold::operator()(const Deregistered& e) {
  if (const auto* const region = FindIn(s_.regions, e.region)) {
    Allocation* const a = Find(region->allocation);
    AMEM_CHECK(a != nullptr, e.region, region->allocation);
    --(region->kept.empty() ? a->renewable : a->pinned);
    s_.regions.erase(e.region);
    return {};
  }
  auto* const known = FindIn(s_.registrations, std::pair(e.address, e.library));
  if (known == nullptr) return Bad("it was not registered");
  AMEM_CHECK(known->count > 0U, e.address);
  if (--known->count > 0) return {};
  for (const AllocationId id : known->allocations) {
    Allocation* const a = Find(id);
    if (a == nullptr || a->pinned == 0) continue;
    --a->pinned;
    if (!e.library.empty() && a->held > 0) --a->held;
  }
  s_.registrations.erase({e.address, e.library});
  return {};
}

Status Fold::operator()(const EverythingKept& e) {
  if (e.why.empty()) return Bad("it gives no reason");
  if (s_.kept_whole.empty()) s_.kept_whole = e.why;
  for (auto& [id, a] : s_.allocations) a.kept_with_all = true;
  return {};
}

Status Fold::operator()(const SharedOutside& e) {
  if (e.pieces == 0) {
    s_.outside.erase({e.library, e.kind});
  } else {
    s_.outside[{e.library, e.kind}] = {e.pieces, e.bytes};
  }
  return {};
}

Status Fold::operator()(const PoolOpened& e) {
  if (s_.lifecycle == Lifecycle::kNew || s_.lifecycle == Lifecycle::kClosed) return Bad("the session is not open");
  if (!e.pool) return Bad("zero is no id");
  // A pool that a peer's memory came with has the policy that the program gives it later.
  if (auto* const known = FindIn(s_.pools, e.pool); known != nullptr && known->tag == e.tag) {
    // Earlier versions let it change while memory without a part was there, and their journals must still be read.
    if (!known->parts.empty()) return Bad("it holds memory, and its policy cannot change");
    known->policy = e.policy;
    return {};
  }
  if (s_.pools.contains(e.pool)) return Bad("that id is in use");
  if (e.tag.empty() || e.tag == "nccl" || e.tag == "user") return Bad("that is no tag for a pool");
  if (s_.PoolNamed(e.tag)) return Bad("that tag is " + ToText(s_.PoolNamed(e.tag)) + "'s");
  Pool& pool = s_.pools[e.pool];
  pool.tag = e.tag;
  pool.policy = e.policy;
  pool.cycles = e.cycles;
  return {};
}

Status Fold::operator()(const PoolAllocated& e) {
  const Allocation* chunk = Find(e.backing);
  if (chunk == nullptr || !chunk->pool) return Bad(ToText(e.backing) + " is no chunk of a pool");
  AMEM_TRY(Running(chunk->pool));
  if (e.bytes == 0) return Bad("its size is zero");
  if (chunk->properties.location != Location{LocationType::kDevice, e.device.value})
    return Bad(ToText(e.backing) + " is on " + ToText(chunk->properties.location));
  const auto mapping = s_.MappingAt(e.address);
  if (mapping == s_.mappings.end() || mapping->second.allocation != e.backing || mapping->second.offset != 0 ||
      mapping->first + e.offset != e.address || e.bytes > mapping->second.bytes - e.offset)
    return Bad("that is no part of " + ToText(e.backing) + " from offset " + FormatBytes(e.offset));
  auto* const pool = FindIn(s_.pools, chunk->pool);
  AMEM_CHECK(pool != nullptr, chunk->pool);
  auto& parts = pool->parts;
  if (const auto there = Touching(parts, e.address, e.bytes); !there.empty())
    return Bad("it overlaps the part at " + Hex(there.where()));
  parts.emplace(e.address, e);
  return {};
}

Status Fold::operator()(const PoolFreed& e) {
  const auto mapping = s_.MappingAt(e.address);
  const Allocation* chunk = mapping == s_.mappings.end() ? nullptr : Find(mapping->second.allocation);
  auto* const pool = chunk == nullptr ? nullptr : FindIn(s_.pools, chunk->pool);
  if (pool == nullptr || pool->parts.erase(e.address) != 1) return Bad("nothing is allocated there");
  return {};
}

Status Fold::NoParts(Address address, const Mapping& mapping) {
  const Allocation* chunk = Find(mapping.allocation);
  if (chunk == nullptr || !chunk->pool) return {};
  const auto* const pool = FindIn(s_.pools, chunk->pool);
  AMEM_CHECK(pool != nullptr, address, mapping.allocation);
  const auto there = Touching(pool->parts, address, mapping.bytes);
  return there.empty() ? Status{} : Bad("amem_alloc's part at " + Hex(there.where()) + " was not freed");
}

}  // namespace amem
