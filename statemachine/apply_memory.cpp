#include "statemachine/fold.h"

namespace amem {

Status Fold::operator()(const RangeReserved& e) {
  AMEM_TRY(Running(e.pool));
  if (e.allocation) {
    AMEM_ASSIGN(Allocation* const a, AtItsPlace(e.allocation, e.address, e.bytes));
    ++a->reserved;
    return {};
  }
  if (e.bytes == 0 || !e.address) return Bad("a range needs an address and a size");
  if (const auto there = Touching(s_.ranges, e.address, e.bytes); !there.empty())
    return Bad("overlaps the range reserved at " + Hex(there.where()) + ", which was not freed");
  s_.ranges.emplace(e.address, Range{e.bytes, e.alignment, e.hint, e.flags});
  return {};
}

Status Fold::operator()(const RangeFreed& e) {
  if (e.allocation) {
    AMEM_ASSIGN(Allocation* const a, AtItsPlace(e.allocation, e.address, e.bytes));
    if (a->reserved == 0) return Bad("it is not reserved");
    if (a->reserved <= a->mappings) return Bad(ToText(e.allocation) + " is still mapped there");
    --a->reserved;
    return EraseIfDead(e.allocation);
  }
  const auto* const range = FindIn(s_.ranges, e.address);
  if (range == nullptr) return Bad("no range is reserved there");
  if (range->bytes != e.bytes) return Bad("its size is " + FormatBytes(range->bytes) + ", not " + FormatBytes(e.bytes));
  if (const auto there = Touching(s_.mappings, e.address, e.bytes); !there.empty())
    return Bad("something is still mapped at " + Hex(there.where()));
  s_.ranges.erase(e.address);
  return {};
}

Status Fold::operator()(const AllocationCreated& e) {
  Allocation a = MadeBy(e);
  a.flags = e.flags;
  return Add(e.allocation, std::move(a));
}

Status Fold::operator()(const AllocationRetained& e) {
  AMEM_ASSIGN(Allocation* const a, Known(e.allocation));
  if (a->mappings == 0 && e.address) return Bad("it is not mapped anywhere");
  ++a->guest_references;
  return {};
}

Status Fold::operator()(const AllocationReleased& e) {
  AMEM_ASSIGN(Allocation* const a, Known(e.allocation));
  if (a->guest_references == 0) return Bad("all references were released before");
  --a->guest_references;
  return EraseIfDead(e.allocation);
}

Status Fold::operator()(const Mapped& e) {
  AMEM_ASSIGN(Allocation* const a, Known(e.allocation));
  AMEM_TRY(Running(a->pool));
  if (a->placed()) {
    AMEM_TRY(AtItsPlace(e.allocation, e.address, e.bytes).status());
    if (e.offset != 0) return Bad("a part of a slab is mapped whole");
    if (a->reserved == 0) return Bad("the address range is not reserved");
    if (a->mappings >= a->reserved) return Bad("that range is mapped already");
    ++a->mappings;
    a->touched = true;
    return {};
  }
  if (!a->resident) return Bad("its memory is released");
  if (e.bytes == 0 || e.offset > a->bytes || e.bytes > a->bytes - e.offset)
    return Bad(FormatBytes(e.bytes) + " from offset " + FormatBytes(e.offset) + " is outside its " + FormatBytes(a->bytes));
  const auto range = s_.RangeAt(e.address);
  if (range == s_.ranges.end() || e.bytes > range->second.bytes - (e.address.value - range->first.value))
    return Bad("the address range is not reserved");
  if (const auto there = Touching(s_.mappings, e.address, e.bytes); !there.empty())
    return Bad("that range is mapped already (at " + Hex(there.where()) + ")");
  s_.mappings.emplace(e.address, Mapping{e.bytes, e.offset, e.allocation, e.flags, {}});
  ++a->mappings;
  return {};
}

Status Fold::operator()(const Unmapped& e) {
  if (e.allocation) {
    AMEM_ASSIGN(Allocation* const a, AtItsPlace(e.allocation, e.address, e.bytes));
    if (a->mappings == 0) return Bad(ToText(e.allocation) + " is not mapped");
    --a->mappings;
    return EraseIfDead(e.allocation);
  }
  for (const auto& [address, mapping] : Touching(s_.mappings, e.address, e.bytes)) {
    const auto* const slab = FindIn(s_.slabs, mapping.allocation);
    if (slab != nullptr && !slab->parts.empty())
      return Bad("that slab has " + std::to_string(slab->parts.size()) + " allocations");
    AMEM_TRY(NoParts(address, mapping));
  }
  AMEM_TRY(CoversWhole(e.address, e.bytes));
  const Address end = e.address + e.bytes;
  for (auto it = s_.mappings.find(e.address); it != s_.mappings.end() && it->first < end;) {
    const AllocationId id = it->second.allocation;
    AMEM_TRY(LoseRegions(it->first, it->second));
    it = s_.mappings.erase(it);
    --Find(id)->mappings;
    AMEM_TRY(EraseIfDead(id));
  }
  return {};
}

Status Fold::operator()(const AccessSet& e) {
  const auto* const first = FindIn(s_.mappings, e.address);
  const Allocation* mapped = first == nullptr ? nullptr : Find(first->allocation);
  AMEM_TRY(Running(mapped != nullptr ? mapped->pool : PoolId{}));
  if (e.allocation) {
    AMEM_ASSIGN(const Allocation* const a, AtItsPlace(e.allocation, e.address, e.bytes));
    const auto* const mapping = FindIn(s_.mappings, s_.slabs.find(a->slab)->second.address);
    AMEM_CHECK(mapping != nullptr, e.allocation);
    for (const AccessDescriptor& wanted : e.access)
      if (!Allows(mapping->access, wanted)) return Bad("its slab has no such access for " + ToText(wanted.location));
    return {};
  }
  AMEM_TRY(CoversWhole(e.address, e.bytes));
  for (const auto& [address, mapping] : Touching(s_.mappings, e.address, e.bytes))
    if (!mapping.present) return Bad("its memory is released");
  for (auto& [address, mapping] : Touching(s_.mappings, e.address, e.bytes))
    for (const AccessDescriptor& change : e.access) MergeAccess(mapping.access, change);
  return {};
}

Status Fold::CoversWhole(Address address, Bytes bytes) {
  Address at = address;
  for (const auto& [begin, mapping] : Touching(s_.mappings, address, bytes)) {
    if (begin != at) break;
    const Allocation* a = Find(mapping.allocation);
    AMEM_CHECK(a != nullptr, at, mapping.allocation);
    AMEM_CHECK(a->mappings > 0U, at, mapping.allocation);
    at = at + mapping.bytes;
  }
  if (at < address + bytes) return Bad("nothing is mapped at " + Hex(at));
  if (at != address + bytes || bytes == 0) return Bad(FormatBytes(bytes) + " would cut a mapping in two");
  return {};
}

}  // namespace amem
