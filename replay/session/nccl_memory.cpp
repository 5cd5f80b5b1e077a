#include "replay/session/nccl_memory.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "replay/session/new_memory.h"

namespace amem {

NcclMemory::NcclMemory(const LowerParts& parts, Coordinator& cycles, Pools& pools)
    : options_(parts.options),
      session_(parts.session),
      driver_(parts.driver),
      ledger_(parts.ledger),
      calls_(parts.calls),
      tokens_(parts.tokens),
      dropped_(parts.dropped),
      slabs_(parts.slabs),
      allocations_(parts.allocations),
      cycles_(cycles),
      pools_(pools) {}

Result<AllocationId> NcclMemory::Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags,
                                        const Origin& origin, bool for_application, const std::string& tag) {
  if (bytes >= ChunkSpace::kTooMany) return NoSuchSize("cuMemCreate", bytes);
  const auto gate = calls_.EnterCall();
  InTags in;
  PoolId pool;
  if (tag.empty()) {
    AMEM_TRY(calls_.RefuseWhilePaused("create an allocation"));
  } else {
    AMEM_ASSIGN(pool, pools_.Join(tag, PoolPolicy::kPreserve, in));
    const NotifyingLock lock(ledger_, dropped_);
    allocations_.DropClosed(ledger_);
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
  if (pool) pools_.Made(pool, bytes);
  const LedgerLock lock(ledger_);
  if (!id) {
    id = ledger_.TakeAllocationId();
    ledger_.SetHandle(id, handle);
    const MemoryTag whose = pool ? MemoryTag::kUserReleased : TagFor(for_application, options_.user_memory);
    ledger_.Record(AllocationCreated{id, bytes, properties, flags, handle, origin.site, {}, whose, origin.communicator, pool});
  }
  if (!pool) cycles_.Made(bytes);
  RememberLastHandle(id);
  return id;
}

Status NcclMemory::Release(AllocationId allocation) {
  const auto gate = calls_.EnterCall();
  LastHandle::Forget(allocation);
  const InTags tag = calls_.EnterTagOf(allocation);
  const NotifyingLock lock(ledger_, dropped_);
  if (allocations_.OnlyDescriptorsHold(allocation, ledger_))
    return WrongCall("release", ToText(allocation), "only descriptors of it hold it");
  AMEM_TRY(allocations_.Release(allocation, ledger_));
  allocations_.DropClosed(ledger_, allocation);
  return {};
}

Result<AllocationId> NcclMemory::Retain(Address address) {
  const auto gate = calls_.EnterCall();
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

Result<Address> NcclMemory::Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site) {
  const auto gate = calls_.EnterCall();
  AMEM_TRY(calls_.RefuseWhilePaused("reserve an address range"));
  if (auto place = ReservePart(bytes, alignment, hint, flags, site); place.ok()) return place;
  AMEM_ASSIGN(auto address, driver_.Reserve(bytes, alignment, hint, flags));
  ledger_.LockAndRecord(RangeReserved{address, bytes, alignment, hint, flags, site, {}});
  return address;
}

Status NcclMemory::FreeRange(Address address, Bytes bytes) {
  const auto gate = calls_.EnterCall();
  const auto kept = slabs_.FreeKept(address, bytes);
  const NotifyingLock lock(ledger_, dropped_);
  if (kept.ok() && *kept) allocations_.RetireSpareSlabs(ledger_);
  if (!kept.ok() || *kept) return kept.status();
  if (const AllocationId slab = ledger_.state().SlabAt(address)) return FreePart(address, bytes, slab);
  if (!ledger_.state().ranges.contains(address)) return NotOurs("free range", Hex(address), "it was not reserved by NCCL");
  return allocations_.FreeRange(address, bytes, ledger_);
}

Status NcclMemory::Map(Address address, Bytes bytes, Bytes offset, AllocationId allocation, std::uint64_t flags) {
  const Status mapped = MapOnce(address, bytes, offset, allocation, flags);
  if (mapped.code() != Code::kUnsupported || !CutUpSlabOf(allocation)) return mapped;
  return MapOnce(address, bytes, offset, allocation, flags);
}

Status NcclMemory::MapOnce(Address address, Bytes bytes, Bytes offset, AllocationId allocation, std::uint64_t flags) {
  const auto gate = calls_.EnterCall();
  const InTags tag = calls_.EnterTagOf(allocation);
  if (tag.paused) return calls_.RefuseInTag("map", address);
  if (tag.gates.empty()) {
    AMEM_TRY(calls_.RefuseWhilePaused("map", address));
    AMEM_TRY(PutBackPart(address, bytes, allocation));
  }
  DriverHandle handle;
  bool stands_in = false;  // for what was imported before a pause in which its owner died
  {
    const NotifyingLock lock(ledger_, dropped_);
    if (allocations_.OnlyDescriptorsHold(allocation, ledger_))
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
    allocations_.NoteRangeOfMapping(address, ledger_);
  }
  ledger_.Record(Mapped{address, bytes, offset, allocation, flags});
  return {};
}

Status NcclMemory::Unmap(Address address, Bytes bytes) {
  const auto gate = calls_.EnterCall();
  AMEM_TRY(cycles_.AwaitCopies());
  const InTags tags = calls_.EnterTags({address, bytes}, "unmap");
  for (const PoolId pool : Inspect(ledger_, [&](const State& state) { return state.PoolsIn(address, bytes); }))
    AMEM_TRY(pools_.AwaitCopies(pool));
  const NotifyingLock lock(ledger_, dropped_);
  if (const AllocationId slab = ledger_.state().SlabAt(address)) return UnmapPart(address, bytes, slab);
  // Holes are allowed, as in the driver: NCCL unmaps the whole range of its symmetric windows at once.
  std::vector<Address> whole;
  for (const auto& [at, mapping] : Touching(ledger_.state().mappings, address, bytes)) {
    if (at < address || at + mapping.bytes > address + bytes)
      return WrongCall("unmap", Hex(address), FormatBytes(bytes) + " would cut a mapping in two");
    whole.push_back(at);
  }
  if (whole.empty()) return NotOurs("unmap", Hex(address), "NCCL mapped nothing there");
  for (const Address one : whole) AMEM_TRY(allocations_.Unmap(one, ledger_));
  allocations_.DropClosed(ledger_);
  return {};
}

Status NcclMemory::SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access) {
  const auto gate = calls_.EnterCall();
  const InTags tags = calls_.EnterTags({address, bytes}, "set access");
  if (tags.paused) return calls_.RefuseInTag("set access to", address);
  if (tags.gates.empty()) AMEM_TRY(calls_.RefuseWhilePaused("set access to", address));
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

Result<AllocationProperties> NcclMemory::Properties(AllocationId allocation) {
  const LedgerLock lock(ledger_);
  auto* const it = ledger_.Find(allocation);
  if (it == nullptr) return WrongCall("properties of", ToText(allocation), "it does not exist");
  return it->properties;
}

Result<std::pair<Address, Bytes>> NcclMemory::AddressRange(Address address) {
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

std::pair<DriverHandle, Bytes> NcclMemory::Backing(AllocationId allocation) {
  const LedgerLock lock(ledger_);
  const auto* const found = ledger_.Find(allocation);
  if (found == nullptr || !found->placed()) return {ledger_.HandleOf(allocation), 0};
  return {ledger_.HandleOf(found->slab), found->offset};
}

Result<AllocationProperties> NcclMemory::PausedAt(Address address) {
  const Status none{Code::kNotFound, Hex(address) + ": no memory of NCCL's is missing there", cuda::kInvalidValue};
  const LedgerLock lock(ledger_);
  const auto mapping = ledger_.state().MappingAt(address);
  if (mapping == ledger_.state().mappings.end() || mapping->second.present) return none;
  const Allocation* a = ledger_.Entry(mapping->second.allocation);
  return a == nullptr || !a->own() || a->multicast ? Result<AllocationProperties>(none) : a->properties;
}

// ---- parts of slabs

// Parts that begin where the part at `address` does: one, or several if it was imported more than once.
const std::vector<AllocationId>& NcclMemory::PartsAt(Address address) {
  static const std::vector<AllocationId> none;
  const State& state = ledger_.state();
  const AllocationId part = state.PartAt(address);
  if (!part) return none;
  const Allocation* first = ledger_.Entry(part);
  const Slab* slab = first == nullptr ? nullptr : ledger_.Entry(state.slabs, first->slab);
  const auto* parts = slab == nullptr ? nullptr : ledger_.Entry(slab->parts, first->offset);
  return parts == nullptr ? none : *parts;
}

// The first of these that is mapped.
AllocationId NcclMemory::MappedPartAt(Address address) {
  for (const AllocationId id : PartsAt(address)) {
    const Allocation* a = ledger_.Entry(id);
    if (a == nullptr) return {};
    if (a->mappings > 0 && address.value - ledger_.state().PlaceOf(*a).value < a->bytes) return id;
  }
  return {};
}

Result<AllocationId> NcclMemory::WholePartAt(std::string_view call, Address address, Bytes bytes) {
  const AllocationId part = MappedPartAt(address);
  if (!part) return WrongCall(call, Hex(address), "NCCL mapped nothing there");
  AMEM_ASSIGN(const Allocation* const a, ledger_.Known(part));
  if (ledger_.state().PlaceOf(*a) != address || a->bytes != bytes)
    return WrongCall(call, Hex(address), FormatBytes(bytes) + " is not the size of the mapping there, which cannot be cut");
  return part;
}

Result<Address> NcclMemory::ReservePart(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site) {
  const LastHandle last = std::exchange(LastHandle::OfThread(), {});
  const Status no{Code::kNotFound, ""};
  if (last.session != session_ || hint || flags != 0) return no;
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  const auto* const found = FindIn(state.allocations, last.allocation);
  if (found == nullptr || !found->placed() || found->bytes != bytes) return no;
  const Address place = state.PlaceOf(*found);
  if (alignment != 0 && place.value % alignment != 0) return no;
  ledger_.Record(RangeReserved{place, bytes, alignment, hint, flags, site, last.allocation});
  return place;
}

Status NcclMemory::FreePart(Address address, Bytes bytes, AllocationId slab) {
  const State& state = ledger_.state();
  for (const AllocationId id : PartsAt(address)) {
    AMEM_ASSIGN(const Allocation* const a, ledger_.Known(id));
    if (state.PlaceOf(*a) != address) break;
    if (a->reserved == 0 || a->bytes != bytes || a->reserved <= a->mappings) continue;
    ledger_.Record(RangeFreed{address, bytes, id});
    allocations_.RetireIfEmpty(slab, ledger_);
    return {};
  }
  return WrongCall("free range", Hex(address),
                   "NCCL holds no range of " + FormatBytes(bytes) + " there, or has memory mapped in it");
}

// NCCL's own suspend releases memory at both ends of a connection and keeps the addresses; its resume maps new memory there. A
// peer may still be suspending, and hold what its owner has already released.
Status NcclMemory::PutBackPart(Address address, Bytes bytes, AllocationId allocation) {
  constexpr std::chrono::milliseconds kOften{1}, kPatience{5000};
  const auto held_by_peer_only = [&](const State& state) {
    const auto there = state.allocations.find(state.PartAt(address));
    return there != state.allocations.end() && there->first != allocation && there->second.guest_references == 0 &&
           there->second.mappings == 0 && !there->second.importers.empty();
  };
  for (auto waited = kOften; waited < kPatience && Inspect(ledger_, held_by_peer_only); waited += kOften)
    std::this_thread::sleep_for(kOften);
  const auto back = slabs_.PutBack(address, bytes, allocation);
  if (!back.ok() || !*back) return back.status();
  const NotifyingLock lock(ledger_, dropped_);
  allocations_.RetireSpareSlabs(ledger_);
  return {};
}

// Maps an allocation of a slab in its place, or takes it out of the slab so that it can be mapped where NCCL wants it.
Result<bool> NcclMemory::MapPart(Address address, Bytes bytes, Bytes offset, AllocationId allocation) {
  const State& state = ledger_.state();
  auto* const a = FindIn(state.allocations, allocation);
  if (a == nullptr) return false;
  const auto subject = [&] { return Hex(address) + " of " + ToText(allocation); };
  if (const AllocationId other = state.PartAt(address); other && (!a->placed() || state.PlaceOf(*a) != address)) {
    // The range was reserved for another allocation: the guess was wrong.
    AMEM_TRY(MoveTo(address, allocation, other).Within("map " + subject()));
  }
  if (!a->placed()) return false;
  if (state.PlaceOf(*a) == address) {
    if (offset != 0 || bytes != a->bytes) return WrongCall("map", subject(), "an allocation is mapped whole");
    if (a->mappings >= a->reserved)
      return WrongCall("map", subject(), a->reserved == 0 ? "the address range is not reserved" : "it is mapped there already");
    ledger_.Record(Mapped{address, bytes, 0, allocation, 0});
    return true;
  }
  const AllocationId slab = a->slab;
  AMEM_TRY(slabs_.Back(allocation).Within("map " + subject()));
  allocations_.RetireIfEmpty(slab, ledger_);
  return false;
}

// A part that is mapped, and whose address NCCL has, is to be mapped elsewhere too. The driver neither maps nor unmaps part of
// a handle, so the whole slab is cut up while nothing runs. What runs may wait for a copy that a thread of NCCL's is about to
// make, so the device is waited for with the gate open, and behind the closed gate only for what came in between.
bool NcclMemory::CutUpSlabOf(AllocationId allocation) {
  // how long to wait for other threads' calls, which may wait for this one; and for what these submitted
  constexpr std::chrono::milliseconds kShort{50}, kLongest{1'000}, kOpen{10};
  const Deadline until = options_.deadlines.OwnPartOf(Now() + options_.deadlines.call());
  const auto home = [&] {
    return Inspect(ledger_, [&](const State& state) {
      const auto* const found = FindIn(state.allocations, allocation);
      if (found == nullptr || !found->own()) return std::pair(AllocationId{}, DeviceOrdinal{});
      return std::pair(found->slab, DeviceOrdinal{found->properties.location.id});
    });
  };
  CallGate& gate = calls_.GateOf({});
  // Longer each time, so that a device to which other libraries give work without end is idle at some time, too.
  for (auto closed = kShort;; closed = std::min(2 * closed, kLongest), std::this_thread::sleep_for(kOpen)) {
    const auto [slab, device] = home();
    if (!slab || Passed(until) || !driver_.Synchronize(device, until).ok()) return false;
    if (!gate.Close(kShort).ok()) continue;
    const OpenAtEnd open_at_end(gate);
    if (calls_.paused()) return false;
    if (home().first != slab) return true;  // another thread has cut it up meanwhile
    const Status idle = driver_.Synchronize(device, std::min(until, In(closed)));
    if (idle.code() == Code::kRefused) continue;
    if (!idle.ok() || !slabs_.Dissolve(slab).ok()) return false;
    const LedgerLock lock(ledger_);
    tokens_.Forget(slab, ledger_);
    return true;
  }
}

// Gives `allocation` the place at `address` that was reserved for `other`.
Status NcclMemory::MoveTo(Address address, AllocationId allocation, AllocationId other) {
  const State& state = ledger_.state();
  AMEM_ASSIGN(const Allocation* const there, ledger_.Known(other));
  if (state.PlaceOf(*there) != address || there->reserved != 1 || there->mappings > 0 || there->guest_references == 0)
    return {Code::kUnsupported, ToText(other) + " is there; set AMEM_LAYOUT=direct", cuda::kNotSupported};
  const Bytes bytes = there->bytes;
  ledger_.Record(RangeFreed{address, bytes, other});
  Status swapped = slabs_.Swap(allocation, other);
  ledger_.Record(RangeReserved{address, bytes, 0, {}, 0, {}, swapped.ok() ? allocation : other});
  return swapped;
}

Status NcclMemory::UnmapPart(Address address, Bytes bytes, AllocationId slab) {
  AMEM_ASSIGN(const auto part, WholePartAt("unmap", address, bytes));
  AMEM_ASSIGN(const Allocation* const a, ledger_.Known(part));
  if (a->guest_references == 0 && a->mappings == 1 && a->importers.empty()) AMEM_TRY(allocations_.GiveUp(part, ledger_));
  ledger_.Record(Unmapped{address, bytes, part});
  slabs_.Vacate(part);
  allocations_.RetireIfEmpty(slab, ledger_);
  return {};
}

// ---- multicast objects, and the memory that NCCL binds to them

AllocationId NcclMemory::NoteMulticast(MulticastCreated created) {
  const LedgerLock lock(ledger_);
  created.allocation = ledger_.TakeAllocationId();
  created.tag = options_.nvls == Nvls::kRelease ? MemoryTag::kMulticastReleased : MemoryTag::kNccl;
  ledger_.SetHandle(created.allocation, created.handle);
  ledger_.Record(created);
  return created.allocation;
}

void NcclMemory::PrepareBind(AllocationId memory) {
  const LedgerLock lock(ledger_);
  if (ledger_.Find(memory) != nullptr) allocations_.GiveOwnHandle(memory, ledger_);
}

bool NcclMemory::ForgetUnbound(AllocationId multicast, DeviceOrdinal device, Bytes offset, Bytes bytes) {
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  const auto* const a = FindIn(state.allocations, multicast);
  if (a == nullptr || !a->rebuilt()) return false;
  if (ledger_.RebuiltAs(multicast).stands_in) return true;
  const auto* const object = FindIn(state.multicasts, multicast);
  if (object == nullptr) return false;
  const bool unbound = std::ranges::any_of(object->bindings, [&](const auto& one) {
    const MulticastBinding& b = one.second;
    return one.first == offset && b.device == device && b.bytes == bytes && !b.bound;
  });
  if (unbound) ledger_.Record(MulticastUnbound{multicast, device, offset, bytes});
  return unbound;
}

}  // namespace amem
