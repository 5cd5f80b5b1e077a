#include "replay/session/slabs/slabs.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>
#include <vector>

#include "replay/session/slabs/cut_slab.h"

namespace amem {

// A cycle costs by driver calls and hardly by bytes, so slabs are large; but at most a fourth of what is held, so that a nearly
// empty one costs little.
constexpr Bytes kSmallest = Bytes{128} << 20, kStep = Bytes{32} << 20;
constexpr Bytes kShare = 4;

// Whether memory with the properties `has` serves a request for `wanted`. NCCL's resume does not ask for RDMA, although its
// allocations had it before.
static bool Serves(AllocationProperties has, const AllocationProperties& wanted) {
  has.gpu_direct_rdma = has.gpu_direct_rdma != 0 ? wanted.gpu_direct_rdma : std::uint8_t{0};
  return has == wanted;
}

std::optional<Slabs::Place> Slabs::Find(const Kind& kind, Bytes bytes) {
  for (auto& [id, own] : own_) {
    if (own.kind != kind || bytes >= own.refused || ledger_.Entry(ledger_.state().slabs, id) == nullptr) continue;
    if (const auto offset = Room(id, bytes, kinds_.AlignmentFor(kind, bytes))) return Place{id, *offset};
    own.refused = bytes;
  }
  return std::nullopt;
}

// Nobody has taken the place while the ledger's lock was free (Clear), and the slab has not gone.
Status Slabs::CheckPlace(const Place& place, Bytes bytes) {
  AMEM_ASSIGN(const Slab* const slab, ledger_.Known(ledger_.state().slabs, place.slab));
  AMEM_ASSIGN(const Allocation* const whole, ledger_.Known(place.slab));
  bool is_free = place.offset <= whole->bytes && bytes <= whole->bytes - place.offset;
  const auto behind = slab->parts.lower_bound(place.offset);
  is_free = is_free && (behind == slab->parts.end() || behind->first >= place.offset + bytes);
  if (behind != slab->parts.begin()) {
    const auto before = std::prev(behind);
    AMEM_ASSIGN(const Allocation* const part, ledger_.Known(before->second.front()));
    is_free = is_free && before->first + part->bytes <= place.offset;
  }
  if (ledger_.Check(is_free, fmt::format("slab {} has no room of {} at {}", place.slab.value, bytes, place.offset))) return {};
  return ledger_.Broken();
}

Bytes Slabs::SizeOfNext(const Kind& kind) {
  Bytes held = 0;
  for (const auto& [id, own] : own_) {
    if (own.kind != kind) continue;
    if (const Allocation* slab = ledger_.Entry(id)) held += slab->bytes;
  }
  return std::min(std::max(held / kShare / kStep * kStep, kSmallest), options_.slab_bytes);
}

// If memory is short, tries smaller slabs, unless a slab of before is made `again`.
Result<AllocationId> Slabs::OpenOwn(const Kind& kind, Bytes bytes, const KeptRanges::Home* again) {
  Bytes size = again != nullptr ? bytes : std::max(SizeOfNext(kind), bytes);
  WithoutLedger apart(ledger_);
  auto created = driver_.Create(size, kind.properties, kind.flags);
  while (created.status().code() == Code::kOutOfMemory && size > bytes) {
    size = std::max(std::bit_floor(size - 1), bytes);
    created = driver_.Create(size, kind.properties, kind.flags);
  }
  AMEM_TRY(created.status());
  OwnedHandle handle(driver_, *created);
  const AccessDescriptor access{kind.properties.location, 3};
  const Bytes alignment = kinds_.AlignmentFor(kind, size);
  AMEM_ASSIGN(auto region, again != nullptr
                               ? MappedRegion::MapAt(driver_, again->base, handle.get(), size, std::span(&access, 1))
                               : MappedRegion::Map(driver_, handle.get(), size, alignment, std::span(&access, 1)));
  apart.End();
  const AllocationId id = again != nullptr ? again->slab : ledger_.TakeAllocationId();
  const Address address = region.Detach();
  ledger_.SetHandle(id, handle.get());
  ledger_.Record(AllocationCreated{id, size, kind.properties, kind.flags, handle.Detach(), {}, {}});
  if (again == nullptr) ledger_.Record(RangeReserved{address, size, alignment, {}, 0, {}, {}});
  ledger_.Record(Mapped{address, size, 0, id, 0});
  ledger_.Record(AccessSet{address, size, {access}, {}});
  ledger_.Record(SlabOpened{id, address, {}});
  own_[id] = {kind};
  return id;
}

// Waits for the device without the lock: what runs there may wait for peers, and those for this process.
Status Slabs::Clear(const Place& place, Bytes bytes) {
  AMEM_ASSIGN(const Slab* const slab, ledger_.Known(ledger_.state().slabs, place.slab));
  AMEM_ASSIGN(const Allocation* const memory, ledger_.Known(place.slab));
  const std::vector<ByteRange> dirty = DirtyWithin(*slab, place.offset, bytes);
  if (dirty.empty()) return {};
  const Address base = slab->address;
  const DeviceOrdinal device{memory->properties.location.id};
  busy_ = place.slab;
  WithoutLedger apart(ledger_);
  Status status;
  for (const ByteRange& part : dirty)
    if (status.ok()) status = driver_.Clear(device, base + part.offset, part.bytes);
  const Status finished = driver_.FinishCopies(device, In(options_.deadlines.call()));
  apart.End();
  busy_ = {};
  if (status.ok()) status = finished;
  AMEM_TRY(status);
  for (const ByteRange& part : dirty) ledger_.Record(PartCleared{place.slab, part.offset, part.bytes});
  return {};
}

Result<AllocationId> Slabs::Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags,
                                   const Origin& origin) {
  const auto granularity = kinds_.GranularityIfSuited(bytes, properties, flags);
  if (!granularity || origin.alone != Alone::kNo) return AllocationId{};
  const MutexLock one(mutex_);
  const LedgerLock lock(ledger_);
  scarce_ = scarce_ && !kept_.empty();
  if (scarce_) return AllocationId{};
  const Kind kind{properties, flags, *granularity};
  auto place = Find(kind, bytes);
  if (!place) {
    const auto opened = OpenOwn(kind, bytes);
    if (opened.status().code() == Code::kOutOfMemory) return AllocationId{};
    if (!opened.ok()) return opened.status();
    place = Place{*opened, 0};
  }
  AMEM_TRY(Clear(*place, bytes).Within(fmt::format("clear a part of slab {}", place->slab.value)));
  AMEM_TRY(CheckPlace(*place, bytes));
  const AllocationId id = ledger_.TakeAllocationId();
  ledger_.Record(AllocationCreated{id, bytes, properties, flags, {}, origin.site, {}, {}, origin.communicator});
  ledger_.Record(Placed{id, place->slab, place->offset, false});
  return id;
}

AllocationId Slabs::ImportedAs(const RemoteAllocation& slab) {
  for (const auto& [id, unused] : ledger_.state().slabs) {
    const Allocation* memory = ledger_.Entry(id);
    if (memory != nullptr && memory->remote == slab) return id;
  }
  return {};
}

AllocationId Slabs::PartImportedAs(const RemoteAllocation& part, AllocationId slab, Bytes offset) {
  const Slab* parts = ledger_.Entry(ledger_.state().slabs, slab);
  const auto* const at = parts == nullptr ? nullptr : FindIn(parts->parts, offset);
  if (at == nullptr) return {};
  for (const AllocationId id : *at) {
    const Allocation* a = ledger_.Entry(id);
    if (a != nullptr && a->remote == part) return id;
  }
  return {};
}

Result<AllocationId> Slabs::OpenImported(const Token& token, Peers& peers) {
  const RemoteAllocation remote{token.session, token.allocation};
  // If its owner made the slab again where it was, it is imported to where it was.
  const KeptRanges::Home* home = kept_.HomeOf(remote);
  const Extent kept = home == nullptr || !IsEmpty(*home) ? Extent{} : Extent{home->base, home->bytes};
  const AllocationId id = kept.address ? home->slab : ledger_.TakeAllocationId();
  WithoutLedger apart(ledger_);
  AMEM_ASSIGN(auto shared, peers.Import(token, id));
  const auto failed = [&](Status why) {
    peers.DropReference(remote, id);
    return why;
  };
  if (kept.address && shared.bytes != kept.bytes)
    return failed({Code::kCorrupt, ToText(id) + " has another size than before", cuda::kInvalidValue});
  const auto imported = driver_.Import(shared.descriptor);
  if (!imported.ok()) return failed(imported.status());
  OwnedHandle handle(driver_, *imported);
  auto region = kept.address ? MappedRegion::MapAt(driver_, kept.address, handle.get(), shared.bytes, {})
                             : MappedRegion::Map(driver_, handle.get(), shared.bytes, 0, {});
  if (!region.ok()) return failed(region.status());
  apart.End();
  const Address address = region->Detach();
  ledger_.SetHandle(id, handle.get());
  ledger_.Record(Imported{id, remote, shared.bytes, shared.properties, 1, handle.Detach(), {}, {}});
  if (!kept.address) ledger_.Record(RangeReserved{address, shared.bytes, 0, {}, 0, {}, {}});
  ledger_.Record(Mapped{address, shared.bytes, 0, id, 0});
  ledger_.Record(SlabOpened{id, address, {}});
  return id;
}

Result<AllocationId> Slabs::Import(const Token& token, AllocationId as, const SharedAllocation& shared, const Origin& origin,
                                   Peers& peers) {
  const MutexLock one(mutex_);
  LedgerLock lock(ledger_);
  AllocationId slab = ImportedAs({token.session, shared.part->slab});
  if (!slab) {
    AMEM_ASSIGN(slab, OpenImported({token.session, shared.part->slab, shared.part->secret, 0}, peers));
  }
  AMEM_ASSIGN(const Allocation* const memory, ledger_.Known(slab));
  if (shared.part->offset > memory->bytes || shared.bytes > memory->bytes - shared.part->offset) {
    return Status{Code::kCorrupt, fmt::format("{} ends outside its owner's slab {}", ToText(token.allocation), slab.value),
                  cuda::kInvalidValue};
  }
  const RemoteAllocation remote{token.session, token.allocation};
  if (const AllocationId before = PartImportedAs(remote, slab, shared.part->offset)) {
    ledger_.Record(AllocationRetained{before, {}});
    lock.Unlock();
    peers.DropReference(remote, as);
    return before;
  }
  ledger_.Record(Imported{as, remote, shared.bytes, shared.properties, 1, {}, origin.site, {}, {}, origin.communicator});
  ledger_.Record(Placed{as, slab, shared.part->offset, false});
  return as;
}

Status Slabs::Open(AllocationId part, std::span<const AccessDescriptor> access) {
  const MutexLock one(mutex_);
  LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  AMEM_ASSIGN(const Allocation* const a, ledger_.Known(part));
  AMEM_ASSIGN(const Slab* const slab, ledger_.Known(state.slabs, a->slab));
  AMEM_ASSIGN(const Mapping* const mapping, ledger_.Known(state.mappings, slab->address));
  const Address address = slab->address;
  const Bytes bytes = mapping->bytes;
  std::vector<AccessDescriptor> missing;
  for (const AccessDescriptor& wanted : access) {
    // A part cannot have less access than its slab. NCCL never takes access away: it unmaps.
    if (wanted.flags != 0 && !Allows(mapping->access, wanted)) missing.push_back(wanted);
  }
  if (missing.empty()) return {};
  lock.Unlock();
  AMEM_TRY(driver_.SetAccess(address, bytes, missing));
  lock.Lock();
  ledger_.Record(AccessSet{address, bytes, std::move(missing), {}});
  return {};
}

Status Slabs::Back(AllocationId part) {
  ledger_.AssertHeld();
  AMEM_ASSIGN(const Allocation* const a, ledger_.Known(part));
  if (!a->own() || a->reserved > 0 || a->mappings > 0 || !a->importers.empty() || a->multicast_bindings > 0) {
    return {
        Code::kUnsupported,
        ToText(part) + " lies in a slab, where NCCL has its address, and cannot be mapped elsewhere; set AMEM_LAYOUT=direct",
        cuda::kNotSupported};
  }
  AMEM_ASSIGN(const auto created, driver_.Create(a->bytes, a->properties, a->flags));
  OwnedHandle handle(driver_, created);
  if (a->touched) AMEM_TRY(copies_.Copy(*a, handle.get(), ledger_).Within("copy the contents of " + ToText(part)));
  ++wrong_guesses_;
  ledger_.SetHandle(part, handle.get());
  ledger_.Record(Backed{part, handle.Detach()});
  return {};
}

Status Slabs::Swap(AllocationId moved, AllocationId other) {
  ledger_.AssertHeld();
  AMEM_ASSIGN(const Allocation* const from, ledger_.Known(moved));
  AMEM_ASSIGN(const Allocation* const to, ledger_.Known(other));
  if (!from->placed() || !from->own() || !to->own() || !from->untouched() || !to->untouched() || from->bytes != to->bytes ||
      from->properties != to->properties) {
    return {Code::kUnsupported,
            fmt::format("{} is mapped where {} was expected, and cannot take its place; set AMEM_LAYOUT=direct", ToText(moved),
                        ToText(other)),
            cuda::kNotSupported};
  }
  const Placed place{moved, to->slab, to->offset, false};
  AMEM_TRY(Back(other));
  ledger_.Record(place);
  return {};
}

Status Slabs::Retire(AllocationId id) {
  ledger_.AssertHeld();
  const State& state = ledger_.state();
  const auto* const slab = FindIn(state.slabs, id);
  if (slab == nullptr || id == busy_) return {};
  if (auto* const own = FindIn(own_, id)) own->refused = ~Bytes{0};
  const Address address = slab->address;
  AMEM_ASSIGN(const Allocation* const a, ledger_.Known(id));
  AMEM_ASSIGN(const Mapping* const mapping, ledger_.Known(state.mappings, address));
  const bool whole = state.lifecycle == Lifecycle::kRunning || state.lifecycle == Lifecycle::kPaused;
  if (!whole || !slab->parts.empty() || !a->importers.empty()) return {};
  const Bytes bytes = a->bytes;
  const std::optional<RemoteAllocation> remote = a->remote;
  if (mapping->present) AMEM_TRY(driver_.Unmap(address, bytes));
  ledger_.Record(Unmapped{address, bytes, {}});
  if (!kept_.AnyIn(address)) {
    AMEM_TRY(driver_.FreeRange(address, bytes));
    ledger_.Record(RangeFreed{address, bytes, {}});
  }
  if (const DriverHandle handle = ledger_.HandleOf(id)) AMEM_TRY(driver_.Release(handle));
  ledger_.ForgetHandle(id);
  ledger_.Record(AllocationReleased{id});
  own_.erase(id);
  if (remote) dropped_.Add(*remote, id, ledger_);
  return {};
}

Status Slabs::RetireAll() {
  ledger_.AssertHeld();
  std::vector<AllocationId> all;
  for (const auto& [id, slab] : ledger_.state().slabs)
    if (slab.parts.empty()) all.push_back(id);
  Status first;
  for (const AllocationId id : all)
    if (Status status = Retire(id); first.ok()) first = std::move(status);
  return first;
}

// ---- ranges that NCCL keeps without memory

KeptRanges::Home Slabs::HomeOf(AllocationId slab, const Slab& parts, const Allocation& whole) const {
  const auto* const own = FindIn(own_, slab);
  return {slab, parts.address, whole.bytes, own == nullptr ? Kind{} : own->kind, whole.remote};
}

void Slabs::Vacate(AllocationId part) {
  ledger_.AssertHeld();
  const State& state = ledger_.state();
  auto* const a = FindIn(state.allocations, part);
  if (a == nullptr || !a->placed()) return;
  if (a->guest_references > 0 || a->mappings > 0 || !a->importers.empty()) return;
  const Slab* slab = ledger_.Entry(state.slabs, a->slab);
  const Allocation* whole = ledger_.Entry(a->slab);
  if (slab == nullptr || whole == nullptr) return;
  const KeptRanges::Home home = HomeOf(a->slab, *slab, *whole);
  const Address place = state.PlaceOf(*a);
  const Bytes bytes = a->bytes;
  for (std::uint32_t left = a->reserved; left > 0; --left) {  // the last one frees it
    kept_.Add(home, place, bytes);
    ledger_.Record(RangeFreed{place, bytes, part});
  }
}

bool Slabs::IsKept(Address address, Bytes bytes) {
  const LedgerLock lock(ledger_);
  return kept_.HomeOf(address, bytes) != nullptr;
}

Result<bool> Slabs::FreeKept(Address address, Bytes bytes) {
  if (!IsKept(address, bytes)) return false;
  const MutexLock one(mutex_);  // a slab may just be made again there
  const LedgerLock lock(ledger_);
  const KeptRanges::Home* found = kept_.HomeOf(address, bytes);
  if (found == nullptr) return false;
  const KeptRanges::Home home = *found;
  const State& state = ledger_.state();
  const auto mapped = state.mappings.lower_bound(address);
  if (mapped != state.mappings.end() && mapped->first < address + bytes && !state.slabs.contains(mapped->second.allocation))
    return WrongCall("free range", Hex(address), "NCCL has memory mapped in it");
  kept_.Remove(address, bytes);
  if (kept_.AnyIn(home.base) || state.slabs.contains(home.slab)) return true;
  if (Status freed = driver_.FreeRange(home.base, home.bytes); !freed.ok()) {
    kept_.Add(home, address, bytes);
    return freed;
  }
  ledger_.Record(RangeFreed{home.base, home.bytes, {}});
  return true;
}

bool Slabs::AwaitsReturns() const {
  ledger_.AssertHeld();
  return std::ranges::any_of(own_, [&](const auto& own) {
    ledger_.AssertHeld();
    const auto* const slab = FindIn(ledger_.state().slabs, own.first);
    return slab != nullptr && kept_.AnyIn(slab->address);
  });
}

std::optional<Bytes> Slabs::Room(AllocationId id, Bytes bytes, Bytes alignment) const {
  std::multimap<Bytes, Bytes> kept;
  const State& state = ledger_.state();
  const auto* const slab = FindIn(state.slabs, id);
  const auto* const whole = FindIn(state.allocations, id);
  if (slab != nullptr && whole != nullptr && kept_.AnyIn(slab->address)) {
    const Address base = slab->address;
    for (auto range = kept_.From(base); range != kept_.end() && range->first < base + whole->bytes; ++range)
      kept.emplace(range->first.value - base.value, range->second);
  }
  return FindRoom(state, id, bytes, alignment, kept);
}

bool Slabs::IsEmpty(const KeptRanges::Home& home) const {
  return Touching(ledger_.state().mappings, home.base, home.bytes).empty();
}

Result<bool> Slabs::PutBack(Address address, Bytes bytes, AllocationId id) {
  if (!IsKept(address, bytes)) return false;
  const MutexLock one(mutex_);
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  const auto suits = [&](const KeptRanges::Home* home) {
    ledger_.AssertHeld();
    const auto* const a = FindIn(state.allocations, id);
    if (home == nullptr || a == nullptr || a->bytes != bytes) return false;
    if (state.PlaceOf(*a) == address) return true;
    return !home->remote && a->untouched() && a->own() && Serves(home->kind.properties, a->properties) &&
           (state.slabs.contains(home->slab) || (IsEmpty(*home) && !scarce_));
  };
  if (!suits(kept_.HomeOf(address, bytes))) return false;
  const KeptRanges::Home home = *kept_.HomeOf(address, bytes);
  AMEM_ASSIGN(const Allocation* const whose, ledger_.Known(id));
  if (state.PlaceOf(*whose) != address) {
    if (!state.slabs.contains(home.slab)) {
      Status opened = OpenOwn(home.kind, home.bytes, &home).status();
      if (opened.code() == Code::kOutOfMemory) {  // giving up the allocation's present slab may make enough room
        AMEM_TRY(Back(id));
        AMEM_TRY(RetireAll());
        opened = OpenOwn(home.kind, home.bytes, &home).status();
      }
      scarce_ = opened.code() == Code::kOutOfMemory;
      if (scarce_) return false;
      AMEM_TRY(opened.Within("make a slab again for the addresses that NCCL kept"));
    }
    const Place place{home.slab, address.value - home.base.value};
    AMEM_TRY(Clear(place, bytes));
    if (!suits(kept_.HomeOf(address, bytes))) return false;  // NCCL let go of it meanwhile
    AMEM_TRY(CheckPlace(place, bytes));
    const DriverHandle alone = ledger_.HandleOf(id);
    ledger_.Record(Placed{id, place.slab, place.offset, false});
    if (alone) AMEM_TRY(driver_.Release(alone));
    ledger_.ForgetHandle(id);
  }
  kept_.Remove(address, bytes);
  ledger_.Record(RangeReserved{address, bytes, home.kind.granularity, {}, 0, {}, id});
  return true;
}

Status Slabs::Dissolve(AllocationId id) {
  const MutexLock one(mutex_);
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  const auto* const slab = FindIn(state.slabs, id);
  const auto* const whole = FindIn(state.allocations, id);
  if (slab == nullptr || whole == nullptr) return {};
  AMEM_TRY(CutSlab::CanBeCut(state, *whole, *slab));
  CutSlab cut(driver_, HomeOf(id, *slab, *whole));
  AMEM_TRY(cut.Prepare(*slab, copies_, ledger_));
  AMEM_TRY(cut.MapApart(ledger_));
  cut.Record(kept_, ledger_);
  own_.erase(id);
  wrong_guesses_ += cut.parts();
  return {};
}

}  // namespace amem
