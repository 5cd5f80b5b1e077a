// Slabs and the ranges in them that NCCL keeps without memory.
#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "replay/session/slabs.h"

namespace amem {

// Whether memory with the properties `has` serves a request for `wanted`. NCCL's resume does not ask for RDMA, although its
// allocations had it before.
static bool Serves(AllocationProperties has, const AllocationProperties& wanted) {
  has.gpu_direct_rdma = has.gpu_direct_rdma != 0 ? wanted.gpu_direct_rdma : std::uint8_t{0};
  return has == wanted;
}

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
    const DriverHandle alone = ledger_.HandleOf(id);
    ledger_.Record(Placed{id, place.slab, place.offset, false});
    if (alone) AMEM_TRY(driver_.Release(alone));
    ledger_.ForgetHandle(id);
  }
  kept_.Remove(address, bytes);
  ledger_.Record(RangeReserved{address, bytes, home.kind.granularity, {}, 0, {}, id});
  return true;
}

// Of a part that nobody can reach, so nobody writes to it. By way of the host, because this is rare.
Status Slabs::CopyContents(const Allocation& part, DriverHandle to) {
  const DeviceOrdinal device{part.properties.location.id};
  const AccessDescriptor access{part.properties.location, 3};
  AMEM_ASSIGN(auto region, MappedRegion::Map(driver_, to, part.bytes, 0, std::span(&access, 1)));
  FreeUnfinished();
  AMEM_ASSIGN(auto pinned, driver_.AllocatePinned(part.bytes));
  const Deadline until = In(options_.deadlines.call());
  Status copied = driver_.CopyToHost(device, pinned->data(), ledger_.state().PlaceOf(part), part.bytes);
  if (copied.ok()) copied = driver_.FinishCopies(device, until);
  if (copied.ok()) copied = driver_.CopyToDevice(device, region.address(), pinned->data(), part.bytes);
  if (copied.ok()) copied = driver_.FinishCopies(device, until);
  // A copy that has not ended must not outlive the buffer and the mapping.
  if (!copied.ok() && !driver_.FinishCopies(device, until).ok())
    unfinished_.Add(device, std::pair(std::move(pinned), std::move(region)));
  return copied;
}

Status Slabs::CanDissolve(const Allocation& whole, const Slab& slab) const {
  const State& state = ledger_.state();
  const bool held = !whole.own() || !whole.importers.empty() || WhyKept(whole) != KeepReason::kNone || !whole.resident ||
                    whole.multicast_bindings > 0 || whole.renewable > 0;
  const bool simple = std::ranges::all_of(slab.parts, [&](const auto& at) {
    const auto* const part = FindIn(state.allocations, at.second.front());
    return part != nullptr && part->importers.empty() && part->mappings <= 1 && part->reserved <= 1;
  });
  if (!held && simple && state.lifecycle == Lifecycle::kRunning) return {};
  return {Code::kUnsupported, "a peer or a network card uses its slab, which cannot be cut up; set AMEM_LAYOUT=direct",
          cuda::kNotSupported};
}

Status Slabs::Dissolve(AllocationId id) {
  const MutexLock one(mutex_);
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  const auto* const slab = FindIn(state.slabs, id);
  const auto* const whole = FindIn(state.allocations, id);
  if (slab == nullptr || whole == nullptr) return {};
  AMEM_TRY(CanDissolve(*whole, *slab));
  std::map<AllocationId, OwnedHandle> handles;
  for (const auto& [offset, parts] : slab->parts) {
    AMEM_ASSIGN(const Allocation* const part, ledger_.Known(parts.front()));
    AMEM_ASSIGN(const auto created, driver_.Create(part->bytes, part->properties, part->flags));
    const auto handle = handles.emplace(parts.front(), OwnedHandle(driver_, created)).first;
    AMEM_TRY(CopyContents(*part, handle->second.get()));
  }
  return Exchange(id, handles);
}

// Unmaps the slab and maps the parts that NCCL has mapped, each where it was. If the driver refuses one, the slab is mapped
// again with its contents; nothing was recorded by then.
Status Slabs::MapApart(const KeptRanges::Home& home, const std::map<AllocationId, OwnedHandle>& handles) {
  const State& state = ledger_.state();
  AMEM_ASSIGN(const Mapping* const whole, ledger_.Known(state.mappings, home.base));
  const std::vector<AccessDescriptor>& access = whole->access;
  std::vector<std::pair<const Allocation*, DriverHandle>> mapped;  // known before the slab is unmapped
  for (const auto& [id, handle] : handles) {
    AMEM_ASSIGN(const Allocation* const part, ledger_.Known(id));
    if (part->mappings > 0) mapped.emplace_back(part, handle.get());
  }
  AMEM_TRY(driver_.Unmap(home.base, home.bytes));
  std::vector<MappedRegion> regions;
  for (const auto& [part, handle] : mapped) {
    auto region = MappedRegion::MapAt(driver_, state.PlaceOf(*part), handle, part->bytes, access);
    if (region.ok()) {
      regions.push_back(*std::move(region));
      continue;
    }
    regions.clear();
    auto again = MappedRegion::MapAt(driver_, home.base, ledger_.HandleOf(home.slab), home.bytes, access);
    if (again.ok()) {
      again->Detach();
    } else {
      ledger_.Break(fmt::format("slab {} was to be cut up, and could neither be ({}) nor be mapped again: {}", home.slab.value,
                                region.status().message(), again.status().message()));
    }
    return region.status();
  }
  for (MappedRegion& region : regions) region.Detach();
  return {};
}

// Its parts have all contents now. If the driver does not take it back, only its memory is lost.
void Slabs::GiveBackCutUp(const KeptRanges::Home& home) {
  const auto note = [&](const Status& status) {
    ledger_.AssertHeld();
    if (!status.ok()) ledger_.Record(PassedThrough{"slab that was cut up", status.message(), status.driver_result()});
  };
  if (const DriverHandle handle = ledger_.HandleOf(home.slab)) note(driver_.Release(handle));
  ledger_.ForgetHandle(home.slab);
  ledger_.Record(AllocationReleased{home.slab});
  own_.erase(home.slab);
  if (kept_.AnyIn(home.base)) return;
  note(driver_.FreeRange(home.base, home.bytes));
  ledger_.Record(RangeFreed{home.base, home.bytes, {}});
}

// The events hold only once all of them are recorded; nobody sees the state in between.
Status Slabs::Exchange(AllocationId id, std::map<AllocationId, OwnedHandle>& handles) {
  const State& state = ledger_.state();
  AMEM_ASSIGN(const Slab* const slab, ledger_.Known(state.slabs, id));
  AMEM_ASSIGN(const Allocation* const whole, ledger_.Known(id));
  const KeptRanges::Home home = HomeOf(id, *slab, *whole);
  AMEM_ASSIGN(const Mapping* const mapping, ledger_.Known(state.mappings, home.base));
  const std::vector<AccessDescriptor> access = mapping->access;
  AMEM_TRY(MapApart(home, handles));
  struct MappedPart {
    Address place;
    AllocationId id;
    Bytes bytes;
  };
  std::vector<MappedPart> mapped;
  for (auto& [part, handle] : handles) {
    AMEM_ASSIGN(const Allocation* const known, ledger_.Known(part));
    const Allocation a = *known;
    const Address place = state.PlaceOf(a);
    if (a.mappings > 0) {
      mapped.push_back({place, part, a.bytes});
      ledger_.Record(AllocationRetained{part, place});
      ledger_.Record(Unmapped{place, a.bytes, part});
    }
    if (a.reserved > 0) {
      kept_.Add(home, place, a.bytes);
      ledger_.Record(RangeFreed{place, a.bytes, part});
    }
    ledger_.SetHandle(part, handle.get());
    ledger_.Record(Backed{part, handle.Detach()});
    ++wrong_guesses_;
  }
  ledger_.Record(Unmapped{home.base, home.bytes, {}});
  GiveBackCutUp(home);
  for (const auto& [place, part, bytes] : mapped) {
    ledger_.Record(Mapped{place, bytes, 0, part, 0});
    ledger_.Record(AccessSet{place, bytes, access, {}});
    ledger_.Record(AllocationReleased{part});
  }
  return {};
}

}  // namespace amem
