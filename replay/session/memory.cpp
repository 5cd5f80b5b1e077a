// Allocations, address ranges and mappings; parts.cpp has what concerns parts of slabs.
#include <spdlog/fmt/fmt.h>

#include "replay/session/failures.h"
#include "replay/session/session.h"

namespace amem {

MemoryTag Session::TagOf(bool for_application) const {
  if (!for_application) return MemoryTag::kNccl;
  return options_.user_memory == UserMemory::kKeep ? MemoryTag::kUser : MemoryTag::kUserReleased;
}

Result<AllocationId> Session::Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags,
                                     const Origin& origin, bool for_application, bool mapped_again) {
  const auto gate = EnterCall();
  AMEM_TRY(RefuseWhilePaused("create an allocation"));
  AllocationId id;
  if (!for_application && !mapped_again) {  // a part of a slab has one address
    AMEM_ASSIGN(id, slabs_.Create(bytes, properties, flags, origin));
  }
  AMEM_ASSIGN(const auto handle, id ? Result<DriverHandle>(DriverHandle{}) : driver_.Create(bytes, properties, flags));
  const LedgerLock lock(ledger_);
  if (!id) {
    id = ledger_.TakeAllocationId();
    ledger_.SetHandle(id, handle);
    ledger_.Record(
        AllocationCreated{id, bytes, properties, flags, handle, origin.site, {}, TagOf(for_application), origin.communicator});
  }
  coordinator_->Made(bytes);
  RememberLastHandle(id);
  return id;
}

Status Session::LetGo(AllocationId allocation) {
  if (const DriverHandle handle = ledger_.HandleOf(allocation)) {
    AMEM_TRY(driver_.Release(handle));
    ledger_.ForgetHandle(allocation);
  }
  const auto* const found = FindIn(ledger_.state().allocations, allocation);
  if (found != nullptr && found->remote) dropped_.push_back({*found->remote, allocation});
  secrets_.erase(allocation);
  return {};
}

Status Session::Release(AllocationId allocation) {
  const auto gate = EnterCall();
  ForgetLastHandle(allocation);
  const Locked lock(*this);
  return ReleaseOne(allocation);
}

Status Session::ReleaseOne(AllocationId allocation) {
  const auto it = ledger_.state().allocations.find(allocation);
  if (it == ledger_.state().allocations.end() || it->second.guest_references == 0) {
    return WrongCall("release " + ToText(allocation) + ": NCCL holds no reference to it");
  }
  const Allocation& a = it->second;
  const AllocationId slab = a.slab;
  if (a.guest_references == 1 && a.mappings == 0 && a.importers.empty()) AMEM_TRY(LetGo(allocation));
  ledger_.Record(AllocationReleased{allocation});
  slabs_.Vacate(allocation);
  RetireIfEmpty(slab);
  return {};
}

Result<AllocationId> Session::Retain(Address address) {
  const auto gate = EnterCall();
  const LedgerLock lock(ledger_);
  AllocationId id = MappedPartAt(address);
  if (!id && !ledger_.state().SlabAt(address)) {
    const auto mapping = ledger_.state().MappingAt(address);
    if (mapping != ledger_.state().mappings.end()) id = mapping->second.allocation;
  }
  if (!id) return NotOurs(fmt::format("retain {}: no mapping of NCCL's is there", Hex(address.value)));
  ledger_.Record(AllocationRetained{id, address});
  RememberLastHandle(id);
  return id;
}

Result<Address> Session::Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site) {
  const auto gate = EnterCall();
  AMEM_TRY(RefuseWhilePaused("reserve an address range"));
  if (auto place = ReservePart(bytes, alignment, hint, flags, site); place.ok()) return place;
  AMEM_ASSIGN(auto address, driver_.Reserve(bytes, alignment, hint, flags));
  const LedgerLock lock(ledger_);
  ledger_.Record(RangeReserved{address, bytes, alignment, hint, flags, site, {}});
  return address;
}

Status Session::FreeRange(Address address, Bytes bytes) {
  const auto gate = EnterCall();
  const auto kept = slabs_.FreeKept(address, bytes);
  const Locked lock(*this);
  if (kept.ok() && *kept) RetireSpareSlabs();
  if (!kept.ok() || *kept) return kept.status();
  if (const AllocationId slab = ledger_.state().SlabAt(address)) return FreePart(address, bytes, slab);
  if (!ledger_.state().ranges.contains(address))
    return NotOurs(fmt::format("free range {}: it was not reserved by NCCL", Hex(address.value)));
  // While paused, the driver does not know of the mapping and would free the range under the resume.
  const auto mapped = ledger_.state().mappings.lower_bound(address);
  if (mapped != ledger_.state().mappings.end() && mapped->first < address + bytes)
    return WrongCall(fmt::format("free range {}: memory is still mapped at {}", Hex(address.value), Hex(mapped->first.value)));
  AMEM_TRY(driver_.FreeRange(address, bytes));
  ledger_.Record(RangeFreed{address, bytes, {}});
  return {};
}

Status Session::Map(Address address, Bytes bytes, Bytes offset, AllocationId allocation, std::uint64_t flags) {
  const Status mapped = MapOnce(address, bytes, offset, allocation, flags);
  if (mapped.code() != Code::kUnsupported || !CutUpSlabOf(allocation)) return mapped;
  return MapOnce(address, bytes, offset, allocation, flags);
}

Status Session::MapOnce(Address address, Bytes bytes, Bytes offset, AllocationId allocation, std::uint64_t flags) {
  const auto gate = EnterCall();
  AMEM_TRY(RefuseWhilePaused("map", address));
  const InTags tag = EnterTagOf(allocation);
  if (tag.paused) return RefuseInTag("map", address);
  AMEM_TRY(PutBackPart(address, bytes, allocation));
  DriverHandle handle;
  {
    const Locked lock(*this);
    const auto mapped = MapPart(address, bytes, offset, allocation);
    if (!mapped.ok() || *mapped) return mapped.status();
    handle = ledger_.HandleOf(allocation);
  }
  if (!handle) return WrongCall(fmt::format("map {}: {} does not exist", Hex(address.value), ToText(allocation)));
  AMEM_TRY(driver_.Map(address, bytes, offset, handle, flags));
  const LedgerLock lock(ledger_);
  ledger_.Record(Mapped{address, bytes, offset, allocation, flags});
  return {};
}

// Forgets a mapping, on the driver too if it is there, and its allocation if nobody else holds it.
Status Session::UnmapOne(Address address) {
  AMEM_ASSIGN(const Mapping* const found, ledger_.Known(ledger_.state().mappings, address));
  const Mapping mapping = *found;
  AMEM_ASSIGN(const Allocation* const a, ledger_.Known(ledger_.state().allocations, mapping.allocation));
  if (mapping.present) AMEM_TRY(driver_.Unmap(address, mapping.bytes));
  if (a->guest_references == 0 && a->mappings == 1 && a->importers.empty()) AMEM_TRY(LetGo(mapping.allocation));
  ledger_.Record(Unmapped{address, mapping.bytes, {}});
  return {};
}

Status Session::Unmap(Address address, Bytes bytes) {
  const auto gate = EnterCall();
  AMEM_TRY(coordinator_->AwaitCopies());
  const InTags tags = EnterTags({address, bytes}, "unmap");
  const Locked lock(*this);
  if (const AllocationId slab = ledger_.state().SlabAt(address)) return UnmapPart(address, bytes, slab);
  // Holes are allowed, as in the driver: NCCL unmaps the whole range of its symmetric windows at once.
  const auto& mappings = ledger_.state().mappings;
  const Address end = address + bytes;
  auto it = ledger_.state().MappingAt(address);
  if (it == mappings.end()) it = mappings.lower_bound(address);
  std::vector<Address> whole;
  for (; it != mappings.end() && it->first < end; ++it) {
    if (it->first < address || it->first + it->second.bytes > end)
      return WrongCall(fmt::format("unmap {}: {} would cut a mapping in two", Hex(address.value), FormatBytes(bytes)));
    whole.push_back(it->first);
  }
  if (whole.empty()) return NotOurs(fmt::format("unmap {}: NCCL mapped nothing there", Hex(address.value)));
  for (const Address one : whole) AMEM_TRY(UnmapOne(one));
  return {};
}

Status Session::SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access) {
  const auto gate = EnterCall();
  AMEM_TRY(RefuseWhilePaused("set access to", address));
  const InTags tags = EnterTags({address, bytes}, "set access");
  if (tags.paused) return RefuseInTag("set access to", address);
  LedgerLock lock(ledger_);
  AllocationId part;
  if (ledger_.state().SlabAt(address)) {
    AMEM_ASSIGN(part, WholePartAt("set access to", address, bytes));
  } else if (!ledger_.state().mappings.contains(address)) {
    return NotOurs(fmt::format("set access to {}: NCCL mapped nothing there", Hex(address.value)));
  }
  lock.Unlock();
  AMEM_TRY(part ? slabs_.Open(part, access) : driver_.SetAccess(address, bytes, access));
  lock.Lock();
  ledger_.Record(AccessSet{address, bytes, {access.begin(), access.end()}, part});
  return {};
}

Result<AllocationProperties> Session::Properties(AllocationId allocation) {
  const LedgerLock lock(ledger_);
  const auto it = ledger_.state().allocations.find(allocation);
  if (it == ledger_.state().allocations.end()) return WrongCall("properties of " + ToText(allocation) + ": it does not exist");
  return it->second.properties;
}

Result<std::pair<Address, Bytes>> Session::AddressRange(Address address) {
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  if (const auto it = state.LegacyAt(address); it != state.legacy.end()) return std::pair{it->first, it->second.bytes};
  if (const AllocationId part = MappedPartAt(address)) {
    AMEM_ASSIGN(const Allocation* const a, ledger_.Known(state.allocations, part));
    return std::pair{state.PlaceOf(*a), a->bytes};
  }
  const auto mapping = state.MappingAt(address);
  if (mapping == state.mappings.end() || state.slabs.contains(mapping->second.allocation))
    return NotOurs(fmt::format("address range of {}: not NCCL's memory", Hex(address.value)));
  return std::pair{mapping->first, mapping->second.bytes};
}

std::pair<DriverHandle, Bytes> Session::Backing(AllocationId allocation) {
  const LedgerLock lock(ledger_);
  const auto* const found = FindIn(ledger_.state().allocations, allocation);
  if (found == nullptr || !found->placed()) return {ledger_.HandleOf(allocation), 0};
  return {ledger_.HandleOf(found->slab), found->offset};
}

}  // namespace amem
