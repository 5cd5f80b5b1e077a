#include "replay/session/slabs.h"

#include <algorithm>
#include <bit>

namespace amem {
namespace {

// A pause and a resume cost by the number of driver calls, hardly by bytes, so slabs are large; but no more than a fourth of
// what is held already, so that one that is almost empty costs little.
constexpr Bytes kSmallest = Bytes{128} << 20, kStep = Bytes{32} << 20;
constexpr Bytes kShare = 4;

}  // namespace

Result<Bytes> Slabs::GranularityOf(const AllocationProperties& properties) {
  if (const auto it = granularity_.find(properties); it != granularity_.end()) return it->second;
  auto granularity = driver_.Granularity(properties);
  if (granularity.ok()) granularity_.emplace(properties, *granularity);
  return granularity;
}

bool Slabs::Suits(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags) {
  if (options_.layout != Layout::kSlab) return false;
  const auto lock = ledger_.Lock();
  if (properties.location.type == LocationType::kDevice) devices_.insert(properties.location.id);
  constexpr std::uint32_t kPinned = 1, kPosix = 1;
  if (devices_.size() > 1 || properties.location.type != LocationType::kDevice || properties.type != kPinned) return false;
  if ((properties.handle_types & ~kPosix) != 0 || properties.compression != 0 || flags != 0) return false;
  if (bytes == 0 || bytes > options_.slab_bytes / 2) return false;
  const auto granularity = GranularityOf(properties);
  return granularity.ok() && bytes % *granularity == 0;  // the driver says what is wrong with another size
}

// ---- own slabs ---------------------------------------------------------------------------------------------------------

std::optional<Slabs::Place> Slabs::Find(const Kind& kind, Bytes bytes, Bytes alignment) {
  for (auto& [id, own] : own_) {
    if (own.kind != kind || bytes >= own.refused) continue;
    if (const auto offset = FindRoom(ledger_.state(), id, bytes, alignment)) return Place{id, *offset};
    own.refused = bytes;
  }
  return std::nullopt;
}

Bytes Slabs::SizeOfNext(const Kind& kind) const {
  Bytes held = 0;
  for (const auto& [id, own] : own_) {
    if (own.kind == kind) held += ledger_.state().allocations.at(id).bytes;
  }
  return std::min(std::max(held / kShare / kStep * kStep, kSmallest), options_.slab_bytes);
}

// Returns with the lock held; the slab has no part yet.
Result<AllocationId> Slabs::OpenOwn(const Kind& kind, Bytes bytes, std::unique_lock<std::mutex>& lock) {
  Bytes size = std::max(SizeOfNext(kind), bytes);
  const Bytes granularity = granularity_.at(kind.properties);
  lock.unlock();
  auto handle = driver_.Create(size, kind.properties, kind.flags);
  while (!handle.ok() && handle.status().code() == Code::kOutOfMemory && size > bytes) {
    size = std::max(std::bit_floor(size - 1), bytes);
    handle = driver_.Create(size, kind.properties, kind.flags);
  }
  if (!handle.ok()) {
    lock.lock();
    return handle.status();
  }
  const AccessDescriptor access{kind.properties.location, 3};
  auto address = driver_.Reserve(size, granularity, {}, 0);
  Status status = address.status();
  if (address.ok()) {
    status = driver_.Map(*address, size, 0, *handle, 0);
    if (status.ok()) {
      status = driver_.SetAccess(*address, size, std::span(&access, 1));
      if (!status.ok()) static_cast<void>(driver_.Unmap(*address, size));
    }
    if (!status.ok()) static_cast<void>(driver_.FreeRange(*address, size));
  }
  if (!status.ok()) static_cast<void>(driver_.Release(*handle));
  lock.lock();
  AMEM_TRY(status);
  const AllocationId id = ledger_.TakeAllocationId();
  ledger_.SetHandle(id, *handle);
  ledger_.Record(AllocationCreated{id, size, kind.properties, kind.flags, *handle, {}, {}});
  ledger_.Record(RangeReserved{*address, size, granularity, {}, 0, {}, {}});
  ledger_.Record(Mapped{*address, size, 0, id, 0});
  ledger_.Record(AccessSet{*address, size, {access}, {}});
  ledger_.Record(SlabOpened{id, *address, {}});
  own_[id] = {kind};
  return id;
}

// Waits for the device, without the lock: what is running there may be waiting for this process's peers, and they for it.
Status Slabs::Clear(const Place& place, Bytes bytes, std::unique_lock<std::mutex>& lock) {
  const Slab& slab = ledger_.state().slabs.at(place.slab);
  const std::vector<ByteRange> dirty = DirtyWithin(slab, place.offset, bytes);
  if (dirty.empty()) return {};
  const Address base = slab.address;
  const DeviceOrdinal device{ledger_.state().allocations.at(place.slab).properties.location.id};
  busy_ = place.slab;
  lock.unlock();
  Status status;
  for (const ByteRange& part : dirty) {
    if (status.ok()) status = driver_.Clear(device, base + part.offset, part.bytes);
  }
  const Status finished = driver_.FinishCopies(device);
  lock.lock();
  busy_ = {};
  if (status.ok()) status = finished;
  AMEM_TRY(status);
  for (const ByteRange& part : dirty) ledger_.Record(PartCleared{place.slab, part.offset, part.bytes});
  return {};
}

Result<AllocationId> Slabs::Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags,
                                   const CallSite& site) {
  const std::lock_guard one(mutex_);
  auto lock = ledger_.Lock();
  const Kind kind{properties, flags};
  const auto granularity = GranularityOf(properties);
  if (!granularity.ok()) return granularity.status();
  auto place = Find(kind, bytes, *granularity);
  if (!place) {
    auto opened = OpenOwn(kind, bytes, lock);
    if (!opened.ok()) return opened.status();
    place = Place{*opened, 0};
  }
  AMEM_TRY(Clear(*place, bytes, lock).Within("clear a part of slab " + std::to_string(place->slab.value)));
  const AllocationId id = ledger_.TakeAllocationId();
  ledger_.Record(AllocationCreated{id, bytes, properties, flags, {}, site, {}});
  ledger_.Record(Placed{id, place->slab, place->offset, false});
  return id;
}

// ---- imported slabs ----------------------------------------------------------------------------------------------------

AllocationId Slabs::ImportedAs(const RemoteAllocation& slab) const {
  for (const auto& [id, unused] : ledger_.state().slabs) {
    if (ledger_.state().allocations.at(id).remote == slab) return id;
  }
  return {};
}

// Returns with the lock held; the slab has no part yet.
Result<AllocationId> Slabs::OpenImported(const Token& token, Peers& peers, std::unique_lock<std::mutex>& lock) {
  const RemoteAllocation remote{token.session, token.allocation};
  const AllocationId id = ledger_.TakeAllocationId();
  lock.unlock();
  auto shared = peers.Import(token, id);
  auto handle = shared.ok() ? driver_.Import(shared->descriptor) : Result<DriverHandle>(shared.status());
  Status status = handle.status();
  Result<Address> address = Address{};
  if (handle.ok()) {
    address = driver_.Reserve(shared->bytes, 0, {}, 0);
    status = address.status();
    if (address.ok()) {
      status = driver_.Map(*address, shared->bytes, 0, *handle, 0);
      if (!status.ok()) static_cast<void>(driver_.FreeRange(*address, shared->bytes));
    }
    if (!status.ok()) static_cast<void>(driver_.Release(*handle));
  }
  if (shared.ok() && !status.ok()) peers.DropReference(remote, id);
  lock.lock();
  AMEM_TRY(status);
  ledger_.SetHandle(id, *handle);
  ledger_.Record(Imported{id, remote, shared->bytes, shared->properties, 1, *handle, {}, {}});
  ledger_.Record(RangeReserved{*address, shared->bytes, 0, {}, 0, {}, {}});
  ledger_.Record(Mapped{*address, shared->bytes, 0, id, 0});
  ledger_.Record(SlabOpened{id, *address, {}});
  return id;
}

Status Slabs::Import(const Token& token, AllocationId as, const SharedAllocation& shared, std::uint32_t handle_type,
                     const CallSite& site, Peers& peers) {
  const std::lock_guard one(mutex_);
  auto lock = ledger_.Lock();
  AllocationId slab = ImportedAs({token.session, shared.part->slab});
  if (!slab) {
    auto opened = OpenImported({token.session, shared.part->slab, shared.part->secret, 0}, peers, lock);
    if (!opened.ok()) return opened.status();
    slab = *opened;
  }
  const Bytes whole = ledger_.state().allocations.at(slab).bytes;
  if (shared.part->offset > whole || shared.bytes > whole - shared.part->offset) {
    return {Code::kCorrupt, ToText(token.allocation) + " ends outside its owner's slab " + std::to_string(slab.value),
            cuda::kInvalidValue};
  }
  const RemoteAllocation remote{token.session, token.allocation};
  ledger_.Record(Imported{as, remote, shared.bytes, shared.properties, handle_type, {}, site, {}});
  ledger_.Record(Placed{as, slab, shared.part->offset, false});
  return {};
}

// ---- both --------------------------------------------------------------------------------------------------------------

Status Slabs::Open(AllocationId part, std::span<const AccessDescriptor> access) {
  const std::lock_guard one(mutex_);
  auto lock = ledger_.Lock();
  const State& state = ledger_.state();
  const AllocationId slab = state.allocations.at(part).slab;
  const Address address = state.slabs.at(slab).address;
  const Mapping& mapping = state.mappings.at(address);
  const Bytes bytes = mapping.bytes;
  std::vector<AccessDescriptor> missing;
  for (const AccessDescriptor& wanted : access) {
    const bool there = std::any_of(mapping.access.begin(), mapping.access.end(), [&](const AccessDescriptor& has) {
      return has.location == wanted.location && (has.flags & wanted.flags) == wanted.flags;
    });
    // A part cannot have less than its slab, and nobody asks for less: NCCL unmaps.
    if (!there && wanted.flags != 0) missing.push_back(wanted);
  }
  if (missing.empty()) return {};
  lock.unlock();
  AMEM_TRY(driver_.SetAccess(address, bytes, missing));
  lock.lock();
  ledger_.Record(AccessSet{address, bytes, std::move(missing), {}});
  return {};
}

Status Slabs::Back(AllocationId part) {
  const Allocation& a = ledger_.state().allocations.at(part);
  if (!a.own() || !a.untouched()) {
    return {
        Code::kUnsupported,
        ToText(part) + " lies in a slab, where NCCL has its address, and cannot be mapped elsewhere; set AMEM_LAYOUT=direct",
        cuda::kNotSupported};
  }
  auto handle = driver_.Create(a.bytes, a.properties, a.flags);
  if (!handle.ok()) return handle.status();
  ++wrong_guesses_;
  ledger_.SetHandle(part, *handle);
  ledger_.Record(Backed{part, *handle});
  return {};
}

Status Slabs::Swap(AllocationId moved, AllocationId other) {
  const State& state = ledger_.state();
  const Allocation& from = state.allocations.at(moved);
  const Allocation& to = state.allocations.at(other);
  if (!from.placed() || !from.own() || !to.own() || !from.untouched() || from.bytes != to.bytes ||
      from.properties != to.properties) {
    return {Code::kUnsupported,
            ToText(moved) + " is mapped where " + ToText(other) +
                " was expected, and cannot take its place; set AMEM_LAYOUT=direct",
            cuda::kNotSupported};
  }
  const Placed place{moved, to.slab, to.offset, false};
  AMEM_TRY(Back(other));
  ledger_.Record(place);
  return {};
}

Status Slabs::Retire(AllocationId id, std::vector<DroppedImport>& dropped) {
  const State& state = ledger_.state();
  const auto slab = state.slabs.find(id);
  if (slab == state.slabs.end() || id == busy_) return {};
  if (const auto own = own_.find(id); own != own_.end()) own->second.refused = ~Bytes{0};
  const Allocation& a = state.allocations.at(id);
  const bool whole = state.lifecycle == Lifecycle::kRunning || state.lifecycle == Lifecycle::kPaused;
  if (!whole || !slab->second.parts.empty() || !a.importers.empty()) return {};
  const Address address = slab->second.address;
  const Bytes bytes = a.bytes;
  const std::optional<RemoteAllocation> remote = a.remote;
  if (state.mappings.at(address).present) AMEM_TRY(driver_.Unmap(address, bytes));
  ledger_.Record(Unmapped{address, bytes, {}});
  AMEM_TRY(driver_.FreeRange(address, bytes));
  ledger_.Record(RangeFreed{address, bytes, {}});
  if (const DriverHandle handle = ledger_.HandleOf(id)) AMEM_TRY(driver_.Release(handle));
  ledger_.ForgetHandle(id);
  ledger_.Record(AllocationReleased{id});
  own_.erase(id);
  if (remote) dropped.push_back({*remote, id});
  return {};
}

Status Slabs::RetireAll(std::vector<DroppedImport>& dropped) {
  std::vector<AllocationId> all;
  for (const auto& [id, slab] : ledger_.state().slabs) {
    if (slab.parts.empty()) all.push_back(id);
  }
  Status first;
  for (const AllocationId id : all) {
    if (Status status = Retire(id, dropped); first.ok()) first = std::move(status);
  }
  return first;
}

}  // namespace amem
