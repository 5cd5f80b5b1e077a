// Allocations, address ranges and mappings; parts.cpp has what concerns parts of slabs.

#include "replay/session/new_memory.h"
#include "replay/session/session.h"

namespace amem {

MemoryTag Session::TagOf(bool for_application) const {
  if (!for_application) return MemoryTag::kNccl;
  return options_.user_memory == UserMemory::kKeep ? MemoryTag::kUser : MemoryTag::kUserReleased;
}

Result<AllocationId> Session::Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags,
                                     const Origin& origin, bool for_application, const std::string& tag) {
  if (bytes >= ChunkSpace::kTooMany) return NoSuchSize("cuMemCreate", bytes);
  const auto gate = EnterCall();
  InTags in;
  PoolId pool;
  if (tag.empty()) {
    AMEM_TRY(RefuseWhilePaused("create an allocation"));
  } else {
    AMEM_ASSIGN(pool, JoinTag(tag, PoolPolicy::kPreserve, in));
    const Locked lock(*this);
    DropClosed();
  }
  AllocationId id;
  const bool may_be_part = !for_application && !pool;
  if (may_be_part) {
    AMEM_ASSIGN(id, slabs_.Create(bytes, properties, flags, origin));
  }
  auto made = id ? Result<DriverHandle>(DriverHandle{}) : driver_.Create(bytes, properties, flags);
  if (may_be_part && origin.alone == Alone::kPreferred && made.status().code() == Code::kOutOfMemory) {
    AMEM_ASSIGN(id, slabs_.Create(bytes, properties, flags, origin.Anywhere()));
    if (id) made = DriverHandle{};
  }
  AMEM_ASSIGN(const auto handle, std::move(made));
  if (pool) pools_->Made(pool, bytes);
  const LedgerLock lock(ledger_);
  if (!id) {
    id = ledger_.TakeAllocationId();
    ledger_.SetHandle(id, handle);
    const MemoryTag whose = pool ? MemoryTag::kUserReleased : TagOf(for_application);
    ledger_.Record(AllocationCreated{id, bytes, properties, flags, handle, origin.site, {}, whose, origin.communicator, pool});
  }
  if (!pool) coordinator_->Made(bytes);
  RememberLastHandle(id);
  return id;
}

Status Session::LetGo(AllocationId allocation) {
  if (const DriverHandle handle = ledger_.HandleOf(allocation)) {
    AMEM_TRY(driver_.Release(handle));
    ledger_.ForgetHandle(allocation);
  }
  const auto* const found = ledger_.Find(allocation);
  if (found != nullptr && found->remote) dropped_.push_back({*found->remote, allocation});
  secrets_.erase(allocation);
  exported_.erase(allocation);
  return {};
}

// Its descriptors count as one reference, which is not the caller's to use or to give up.
static bool OnlyDescriptorsHold(const Allocation* allocation, bool exported) {
  return exported && allocation != nullptr && allocation->guest_references <= 1;
}

Status Session::Release(AllocationId allocation) {
  const auto gate = EnterCall();
  ForgetLastHandle(allocation);
  const InTags tag = EnterTagOf(allocation);
  const Locked lock(*this);
  if (OnlyDescriptorsHold(ledger_.Find(allocation), exported_.contains(allocation)))
    return WrongCall("release", ToText(allocation), "only descriptors of it hold it");
  AMEM_TRY(ReleaseOne(allocation));
  DropClosed(allocation);
  return {};
}

Status Session::ReleaseOne(AllocationId allocation) {
  auto* const a = ledger_.Find(allocation);
  if (a == nullptr || a->guest_references == 0)
    return WrongCall("release", ToText(allocation), "NCCL holds no reference to it");
  const AllocationId slab = a->slab;
  if (a->guest_references == 1 && a->mappings == 0 && a->importers.empty()) AMEM_TRY(LetGo(allocation));
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
  if (!id) return NotOurs("retain", Hex(address), "no mapping of NCCL's is there");
  ledger_.Record(AllocationRetained{id, address});
  RememberLastHandle(id);
  return id;
}

Result<Address> Session::Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site) {
  const auto gate = EnterCall();
  AMEM_TRY(RefuseWhilePaused("reserve an address range"));
  if (auto place = ReservePart(bytes, alignment, hint, flags, site); place.ok()) return place;
  AMEM_ASSIGN(auto address, driver_.Reserve(bytes, alignment, hint, flags));
  ledger_.LockAndRecord(RangeReserved{address, bytes, alignment, hint, flags, site, {}});
  return address;
}

Status Session::FreeRange(Address address, Bytes bytes) {
  const auto gate = EnterCall();
  const auto kept = slabs_.FreeKept(address, bytes);
  const Locked lock(*this);
  if (kept.ok() && *kept) RetireSpareSlabs();
  if (!kept.ok() || *kept) return kept.status();
  if (const AllocationId slab = ledger_.state().SlabAt(address)) return FreePart(address, bytes, slab);
  if (!ledger_.state().ranges.contains(address)) return NotOurs("free range", Hex(address), "it was not reserved by NCCL");
  // While paused, the driver does not know of the mapping and would free the range under the resume.
  if (const auto mapped = Touching(ledger_.state().mappings, address, bytes); !mapped.empty())
    return WrongCall("free range", Hex(address), "memory is still mapped at " + Hex(mapped.where()));
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
  const InTags tag = EnterTagOf(allocation);
  if (tag.paused) return RefuseInTag("map", address);
  if (tag.gates.empty()) {
    AMEM_TRY(RefuseWhilePaused("map", address));
    AMEM_TRY(PutBackPart(address, bytes, allocation));
  }
  DriverHandle handle;
  bool stands_in = false;  // for what was imported before a pause in which its owner died
  {
    const Locked lock(*this);
    if (OnlyDescriptorsHold(ledger_.Find(allocation), exported_.contains(allocation)))
      return WrongCall("map", Hex(address), ToText(allocation) + " was released");
    const auto mapped = MapPart(address, bytes, offset, allocation);
    if (!mapped.ok() || *mapped) return mapped.status();
    handle = ledger_.HandleOf(allocation);
    auto* const whole = ledger_.Find(allocation);
    stands_in = whole != nullptr && offset == 0 && bytes == whole->bytes && ledger_.RebuiltAs(allocation).stands_in;
  }
  if (!handle) return WrongCall("map", Hex(address), ToText(allocation) + " does not exist");
  AMEM_TRY(stands_in ? MapRepeatedly(driver_, address, bytes, handle, flags)
                     : driver_.Map(address, bytes, offset, handle, flags));
  const LedgerLock lock(ledger_);
  if (!tag.gates.empty() && ledger_.state().RangeAt(address) == ledger_.state().ranges.end()) {
    AMEM_ASSIGN(const Allocation* const mapped, ledger_.Known(allocation));
    ledger_.Record(RangeReserved{address, bytes, 0, {}, 0, {}, {}, mapped->pool});
    others_ranges_.insert(address);
  }
  ledger_.Record(Mapped{address, bytes, offset, allocation, flags});
  return {};
}

// Forgets a mapping, on the driver too if it is there, and its allocation if nobody else holds it.
Status Session::UnmapOne(Address address) {
  AMEM_ASSIGN(const Mapping* const found, ledger_.Known(ledger_.state().mappings, address));
  const Mapping mapping = *found;
  AMEM_ASSIGN(const Allocation* const a, ledger_.Known(mapping.allocation));
  if (mapping.present) AMEM_TRY(driver_.Unmap(address, mapping.bytes));
  if (a->guest_references == 0 && a->mappings == 1 && a->importers.empty()) AMEM_TRY(LetGo(mapping.allocation));
  ledger_.Record(Unmapped{address, mapping.bytes, {}});
  if (exported_.contains(mapping.allocation)) left_to_descriptors_.insert(mapping.allocation);
  if (others_ranges_.erase(address) > 0) ledger_.Record(RangeFreed{address, mapping.bytes, {}});
  return {};
}

Status Session::Unmap(Address address, Bytes bytes) {
  const auto gate = EnterCall();
  AMEM_TRY(coordinator_->AwaitCopies());
  const InTags tags = EnterTags({address, bytes}, "unmap");
  for (const PoolId pool : Inspect([&](const State& state) { return state.PoolsIn(address, bytes); }))
    AMEM_TRY(pools_->AwaitCopies(pool));
  const Locked lock(*this);
  if (const AllocationId slab = ledger_.state().SlabAt(address)) return UnmapPart(address, bytes, slab);
  // Holes are allowed, as in the driver: NCCL unmaps the whole range of its symmetric windows at once.
  std::vector<Address> whole;
  for (const auto& [at, mapping] : Touching(ledger_.state().mappings, address, bytes)) {
    if (at < address || at + mapping.bytes > address + bytes)
      return WrongCall("unmap", Hex(address), FormatBytes(bytes) + " would cut a mapping in two");
    whole.push_back(at);
  }
  if (whole.empty()) return NotOurs("unmap", Hex(address), "NCCL mapped nothing there");
  for (const Address one : whole) AMEM_TRY(UnmapOne(one));
  DropClosed();
  return {};
}

Status Session::SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access) {
  const auto gate = EnterCall();
  const InTags tags = EnterTags({address, bytes}, "set access");
  if (tags.paused) return RefuseInTag("set access to", address);
  if (tags.gates.empty()) AMEM_TRY(RefuseWhilePaused("set access to", address));
  LedgerLock lock(ledger_);
  AllocationId part;
  if (ledger_.state().SlabAt(address)) {
    AMEM_ASSIGN(part, WholePartAt("set access to", address, bytes));
  } else if (tags.gates.empty() && !ledger_.state().mappings.contains(address)) {
    return NotOurs("set access to", Hex(address), "NCCL mapped nothing there");
  }
  lock.Unlock();
  AMEM_TRY(part ? slabs_.Open(part, access) : driver_.SetAccess(address, bytes, access));
  lock.Lock();
  if (tags.gates.empty()) {
    ledger_.Record(AccessSet{address, bytes, {access.begin(), access.end()}, part});
    return {};
  }
  // What another library has beside it may be the driver's.
  std::vector<Extent> whole;
  for (const auto& [at, mapping] : Touching(ledger_.state().mappings, address, bytes)) whole.push_back({at, mapping.bytes});
  for (const Extent& one : whole) ledger_.Record(AccessSet{one.address, one.bytes, {access.begin(), access.end()}, {}});
  return {};
}

Result<AllocationProperties> Session::Properties(AllocationId allocation) {
  const LedgerLock lock(ledger_);
  auto* const it = ledger_.Find(allocation);
  if (it == nullptr) return WrongCall("properties of", ToText(allocation), "it does not exist");
  return it->properties;
}

Result<std::pair<Address, Bytes>> Session::AddressRange(Address address) {
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  if (const auto it = state.LegacyAt(address); it != state.legacy.end()) return std::pair{it->first, it->second.bytes};
  if (const AllocationId part = MappedPartAt(address)) {
    AMEM_ASSIGN(const Allocation* const a, ledger_.Known(part));
    return std::pair{state.PlaceOf(*a), a->bytes};
  }
  const auto mapping = state.MappingAt(address);
  if (mapping == state.mappings.end() || state.slabs.contains(mapping->second.allocation))
    return NotOurs("address range of", Hex(address), "not NCCL's memory");
  return std::pair{mapping->first, mapping->second.bytes};
}

std::pair<DriverHandle, Bytes> Session::Backing(AllocationId allocation) {
  const LedgerLock lock(ledger_);
  const auto* const found = ledger_.Find(allocation);
  if (found == nullptr || !found->placed()) return {ledger_.HandleOf(allocation), 0};
  return {ledger_.HandleOf(found->slab), found->offset};
}

}  // namespace amem
