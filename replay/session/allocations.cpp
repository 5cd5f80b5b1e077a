#include "replay/session/allocations.h"

#include <vector>

#include "replay/session/session_options.h"

namespace amem {

Status Allocations::GiveUp(AllocationId allocation, Ledger& ledger) {
  if (const auto* const a = ledger.Find(allocation)) {
    const std::uint64_t own = a->guest_references + a->mappings;
    if (!ledger.Check(own <= 1 && (own == 0 || a->importers.empty()),
                      ToText(allocation) + " is given up by one holder while others have it"))
      return ledger.Broken();
  }
  if (const DriverHandle handle = ledger.HandleOf(allocation)) {
    AMEM_TRY(driver_.Release(handle));
    ledger.ForgetHandle(allocation);
  }
  const auto* const found = ledger.Find(allocation);
  if (found != nullptr && found->remote) dropped_.Add(*found->remote, allocation, ledger);
  tokens_.Forget(allocation, ledger);
  return {};
}

void Allocations::GiveUpOrBreak(AllocationId allocation, Ledger& ledger) {
  if (const Status given_up = GiveUp(allocation, ledger); !given_up.ok()) ledger.Break(given_up.message());
}

Status Allocations::Release(AllocationId allocation, Ledger& ledger) {
  auto* const a = ledger.Find(allocation);
  if (a == nullptr || a->guest_references == 0)
    return WrongCall("release", ToText(allocation), "NCCL holds no reference to it");
  const AllocationId slab = a->slab;
  if (a->guest_references == 1 && a->mappings == 0 && a->importers.empty()) AMEM_TRY(GiveUp(allocation, ledger));
  ledger.Record(AllocationReleased{allocation});
  slabs_.Vacate(allocation);
  RetireIfEmpty(slab, ledger);
  return {};
}

Status Allocations::Unmap(Address address, Ledger& ledger) {
  AMEM_ASSIGN(const Mapping* const found, ledger.Known(ledger.state().mappings, address));
  const Mapping mapping = *found;
  AMEM_ASSIGN(const Allocation* const a, ledger.Known(mapping.allocation));
  if (mapping.present) AMEM_TRY(driver_.Unmap(address, mapping.bytes));
  if (a->guest_references == 0 && a->mappings == 1 && a->importers.empty()) AMEM_TRY(GiveUp(mapping.allocation, ledger));
  ledger.Record(Unmapped{address, mapping.bytes, {}});
  tokens_.LeaveToDescriptors(mapping.allocation, ledger);
  if (others_ranges_.erase(address) > 0) ledger.Record(RangeFreed{address, mapping.bytes, {}});
  return {};
}

Status Allocations::FreeRange(Address address, Bytes bytes, Ledger& ledger) {
  // While paused, the driver does not know of the mapping and would free the range under the resume.
  if (const auto mapped = Touching(ledger.state().mappings, address, bytes); !mapped.empty())
    return WrongCall("free range", Hex(address), "memory is still mapped at " + Hex(mapped.where()));
  AMEM_TRY(driver_.FreeRange(address, bytes));
  ledger.Record(RangeFreed{address, bytes, {}});
  return {};
}

Status Allocations::FreeChunk(const ChunkSpace::Chunk& chunk, Ledger& ledger) {
  AMEM_TRY(Unmap(chunk.address, ledger));
  DropClosed(ledger);
  AMEM_TRY(Release(chunk.allocation, ledger));
  DropClosed(ledger, chunk.allocation);
  return FreeRange(chunk.address, chunk.bytes, ledger);
}

void Allocations::DropReference(SessionId by, AllocationId allocation, AllocationId as, Ledger& ledger) {
  const auto* const a = ledger.Find(allocation);
  if (a == nullptr) return;
  const auto* const importer = FindIn(a->importers, Importer{by, as});
  if (importer == nullptr) return;
  if (a->importers.size() == 1 && *importer == 1 && a->guest_references == 0 && a->mappings == 0)
    GiveUpOrBreak(allocation, ledger);
  const AllocationId slab = ledger.state().slabs.contains(allocation) ? allocation : a->slab;
  ledger.Record(ReferenceDropped{allocation, by, as});
  slabs_.Vacate(allocation);
  RetireIfEmpty(slab, ledger);
  DropClosed(ledger, allocation);
}

bool Allocations::OnlyDescriptorsHold(AllocationId allocation, Ledger& ledger) const {
  const auto* const a = ledger.Find(allocation);
  return a != nullptr && a->guest_references <= 1 && tokens_.HasDescriptors(allocation, ledger);
}

void Allocations::DropClosed(Ledger& ledger, AllocationId touched) {
  if (touched) tokens_.LeaveToDescriptors(touched, ledger);
  for (const AllocationId id : tokens_.TakeClosed(ledger))
    if (!Release(id, ledger).ok()) tokens_.LeaveToDescriptors(id, ledger);
}

void Allocations::DropUnused(Ledger& ledger) {
  for (const AllocationId id : tokens_.TakeUnused(ledger)) ledger.Record(AllocationReleased{id});
}

void Allocations::RetireIfEmpty(AllocationId slab, Ledger& ledger) {
  if (!slab) return;
  if (const Status retired = slabs_.Retire(slab); !retired.ok()) ledger.Break(retired.message());
  if (ledger.Find(slab) == nullptr) tokens_.Forget(slab, ledger);
}

void Allocations::RetireSpareSlabs(Ledger& ledger) {
  if (slabs_.AwaitsReturns()) return;
  if (const Status retired = slabs_.RetireAll(); !retired.ok()) ledger.Break(retired.message());
}

void Allocations::RetireEmptySlabs(Ledger& ledger) {
  std::vector<AllocationId> parts;  // that peers have dropped
  for (const auto& [id, a] : ledger.state().allocations)
    if (a.placed()) parts.push_back(id);
  for (const AllocationId id : parts) slabs_.Vacate(id);
  if (const Status retired = slabs_.RetireAll(); !retired.ok()) ledger.Break(retired.message());
}

void Allocations::GiveOwnHandle(AllocationId part, Ledger& ledger) {
  const Allocation* const a = ledger.Entry(part);
  if (ledger.state().lifecycle != Lifecycle::kRunning) return;
  if (a == nullptr || !a->placed() || a->reserved > 0 || a->mappings > 0 || !a->importers.empty()) return;
  const AllocationId slab = a->slab;
  if (slabs_.Back(part).ok()) RetireIfEmpty(slab, ledger);
}

void Allocations::NoteRangeOfMapping(Address address, Ledger& /*ledger*/) { others_ranges_.insert(address); }

}  // namespace amem
