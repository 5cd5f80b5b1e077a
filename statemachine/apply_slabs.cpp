#include "statemachine/fold.h"

namespace amem {

static void MarkClean(Slab& slab, Bytes offset, Bytes bytes) {
  for (const ByteRange& part : DirtyWithin(slab, offset, bytes)) {
    const auto it = std::prev(slab.dirty.upper_bound(part.offset));
    const Bytes from = it->first, to = it->first + it->second, end = part.offset + part.bytes;
    slab.dirty.erase(it);
    if (from < part.offset) slab.dirty.emplace(from, part.offset - from);
    if (end < to) slab.dirty.emplace(end, to - end);
  }
}

static void MarkDirty(Slab& slab, Bytes offset, Bytes bytes) {
  MarkClean(slab, offset, bytes);
  auto next = slab.dirty.lower_bound(offset);
  if (next != slab.dirty.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = slab.dirty.erase(next);
  }
  if (next != slab.dirty.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  slab.dirty.emplace(offset, bytes);
}

Status Fold::operator()(const SlabOpened& e) {
  AMEM_TRY(Running());
  const auto* const m = FindIn(s_.mappings, e.address);
  if (m == nullptr || m->allocation != e.slab) return Bad("it is not mapped at " + Hex(e.address));
  const Allocation* whole = Find(e.slab);
  AMEM_CHECK(whole != nullptr, e.slab, e.address);
  if (m->offset != 0 || m->bytes != whole->bytes) return Bad("it is not mapped whole");
  if (whole->placed()) return Bad("it is itself a part of a slab");
  Slab slab{e.address, {}, {}};
  for (const ByteRange& d : e.dirty) slab.dirty.emplace(d.offset, d.bytes);
  if (!s_.slabs.emplace(e.slab, std::move(slab)).second) return Bad("it is one already");
  return {};
}

Status Fold::operator()(const Placed& e) {
  AMEM_TRY(Running());
  Allocation* a = Find(e.allocation);
  auto* const slab = FindIn(s_.slabs, e.slab);
  if (a == nullptr || slab == nullptr || s_.slabs.contains(e.allocation))
    return Bad("there is no such allocation, or no such slab");
  const Allocation* whole = Find(e.slab);
  AMEM_CHECK(whole != nullptr, e.slab);
  AMEM_CHECK(!whole->placed(), e.slab, whole->slab);
  const auto* const mapping = FindIn(s_.mappings, slab->address);
  if (mapping == nullptr || mapping->allocation != e.slab) return Bad("that slab is not mapped");
  if (!a->untouched()) return Bad("it is in use where it is");
  if (e.offset > whole->bytes || a->bytes > whole->bytes - e.offset) return Bad("it ends outside");
  if (a->own() != whole->own() || (a->remote && a->remote->owner != whole->remote->owner))
    return Bad("they are not the same session's");
  if (a->own()) AMEM_TRY(IsFree(*slab, e.offset, a->bytes));
  AMEM_TRY(RemoveFromSlab(e.allocation, *a));
  a->slab = e.slab;
  a->offset = e.offset;
  a->touched = e.touched;
  slab->parts[e.offset].push_back(e.allocation);
  return {};
}

Status Fold::operator()(const Backed& e) {
  AMEM_TRY(Running());
  Allocation* a = Find(e.allocation);
  if (a == nullptr || !a->placed()) return Bad("it is not part of a slab");
  if (a->reserved > 0 || a->mappings > 0 || !a->importers.empty()) return Bad("it is in use where it is");
  return RemoveFromSlab(e.allocation, *a);
}

Status Fold::operator()(const PartCleared& e) {
  auto* const slab = FindIn(s_.slabs, e.slab);
  if (slab == nullptr) return Bad("it does not exist");
  MarkClean(*slab, e.offset, e.bytes);
  return {};
}

Status Fold::RemoveFromSlab(AllocationId id, Allocation& a) {
  if (!a.placed()) return {};
  auto* const slab = FindIn(s_.slabs, a.slab);
  AMEM_CHECK(slab != nullptr, id, a.slab);
  const auto at = slab->parts.find(a.offset);
  AMEM_CHECK(at != slab->parts.end(), id, a.slab, a.offset);
  const auto erased = std::erase(at->second, id);
  AMEM_CHECK(erased == 1U, id, a.slab);
  if (at->second.empty()) slab->parts.erase(at);
  if (a.own() && a.touched) MarkDirty(*slab, a.offset, a.bytes);
  a.slab = {};
  a.offset = 0;
  return {};
}

Status Fold::MarkGapsDirty(AllocationId id, const Allocation& whole) {
  auto* const slab = FindIn(s_.slabs, id);
  if (slab == nullptr || !whole.own()) return {};
  std::map<Bytes, Bytes> dirty;
  Bytes at = 0;
  for (const auto& [offset, parts] : slab->parts) {
    const Allocation* part = Find(parts.front());
    AMEM_CHECK(part != nullptr, id, offset, parts.front());
    AMEM_CHECK(at <= offset, id, parts.front());
    if (at < offset) dirty.emplace(at, offset - at);
    at = offset + part->bytes;
  }
  if (at < whole.bytes) dirty.emplace(at, whole.bytes - at);
  slab->dirty = std::move(dirty);
  return {};
}

Status Fold::IsFree(const Slab& slab, Bytes offset, Bytes bytes) {
  auto next = slab.parts.lower_bound(offset);
  if (next != slab.parts.end() && next->first < offset + bytes) return Bad(ToText(next->second.front()) + " is there");
  if (next != slab.parts.begin()) {
    --next;
    const AllocationId before = next->second.front();
    const Allocation* part = Find(before);
    AMEM_CHECK(part != nullptr, before, next->first);
    if (next->first + part->bytes > offset) return Bad(ToText(before) + " is there");
  }
  if (!DirtyWithin(slab, offset, bytes).empty()) return Bad("what was there before was not cleared");
  return {};
}

Result<Allocation*> Fold::AtItsPlace(AllocationId id, Address address, Bytes bytes) const {
  auto* const a = FindIn(s_.allocations, id);
  if (a == nullptr) return Bad(ToText(id) + " does not exist");
  if (!a->placed()) return Bad(ToText(id) + " is not part of a slab");
  AMEM_CHECK(s_.slabs.contains(a->slab), id, a->slab);
  const Address place = s_.PlaceOf(*a);
  if (place == address && a->bytes == bytes) return a;
  return Bad(ToText(id) + " is " + FormatBytes(a->bytes) + " at " + Hex(place));
}

}  // namespace amem
