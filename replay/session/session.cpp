#include "replay/session/session.h"

#include <algorithm>

#include "replay/peers/token.h"

namespace amem {
namespace {

constexpr Bytes kPrepareFrom = Bytes{64} << 20;

Status NotOurs(std::string what) { return {Code::kNotFound, std::move(what), cuda::kInvalidValue}; }
Status Wrong(std::string what, int driver_result = cuda::kInvalidValue) {
  return {Code::kInvalid, std::move(what), driver_result};
}

// The handle that this thread created, imported or retained last: what it maps next (DESIGN.md 5).
struct LastHandle {
  SessionId session;
  AllocationId allocation;
};
thread_local LastHandle last_handle;

}  // namespace

Session::Session(const SessionOptions& options, Driver& driver, std::unique_ptr<JournalWriter> journal)
    : options_(options), driver_(driver), ledger_(std::move(journal)) {}

Result<std::unique_ptr<Session>> Session::Start(const SessionOptions& options, Driver& driver, SessionOpened who,
                                                std::unique_ptr<JournalWriter> journal, const StartPeers& start_peers) {
  std::unique_ptr<Session> session(new Session(options, driver, std::move(journal)));
  const PeerIdentity self{who.session, who.host, who.pid, who.group, who.rank};
  {
    const auto lock = session->ledger_.Lock();
    session->ledger_.Record(std::move(who));
  }
  auto peers = start_peers(self, *session);
  if (!peers.ok()) return peers.status();
  session->peers_ = *std::move(peers);
  session->coordinator_ = std::make_unique<Coordinator>(session->ledger_, driver, *session->peers_, options.pinned_bytes);
  return session;
}

Session::~Session() {
  if (peers_ != nullptr) peers_->Stop();
}

Status Session::Close(const std::string& reason) {
  if (std::exchange(closed_, true)) return {};
  peers_->Stop();
  const auto lock = ledger_.Lock();
  ledger_.Record(SessionClosed{reason});
  return ledger_.journal() == nullptr ? Status{} : ledger_.journal()->Close();
}

Status Session::RefuseWhilePaused(const std::string& doing) const {
  if (!paused()) return {};
  return {Code::kRefused, doing + ": refused, this process's NCCL memory is paused; call ncclResume first",
          cuda::kIllegalState};
}

// ---- address ranges, allocations, mappings -----------------------------------------------------------------------------

Result<AllocationId> Session::Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags,
                                     const CallSite& site, bool for_application) {
  const std::shared_lock gate(gate_);
  AMEM_TRY(RefuseWhilePaused("create an allocation"));
  if (!for_application && slabs_.Suits(bytes, properties, flags)) {
    auto placed = slabs_.Create(bytes, properties, flags, site);
    // No room for a slab of any size: there may be for the allocation alone, and if not, that is what NCCL should hear.
    if (placed.ok() || placed.status().code() != Code::kOutOfMemory) {
      if (!placed.ok()) return placed;
      RememberLastHandle(*placed);
      const auto lock = ledger_.Lock();
      held_bytes_ += bytes;
      PrepareContents();
      return placed;
    }
  }
  auto handle = driver_.Create(bytes, properties, flags);
  if (!handle.ok()) return handle.status();
  const auto lock = ledger_.Lock();

  const AllocationId id = ledger_.TakeAllocationId();
  ledger_.SetHandle(id, *handle);
  ledger_.Record(AllocationCreated{id, bytes, properties, flags, *handle, site, {}});
  held_bytes_ += bytes;
  PrepareContents();
  RememberLastHandle(id);
  return id;
}

void Session::RememberLastHandle(AllocationId allocation) const { last_handle = {peers_->Self().session, allocation}; }

// Pinned host memory for contents follows what is held, in steps of a sixteenth.
void Session::PrepareContents() {
  if (coordinator_ != nullptr) coordinator_->Busy();
  if (coordinator_ == nullptr || held_bytes_ < prepared_bytes_ + std::max(prepared_bytes_ / 16, kPrepareFrom)) return;
  prepared_bytes_ = held_bytes_;
  coordinator_->Prepare(held_bytes_);
}

void Session::TrimPinned(Bytes keep) {
  const std::lock_guard cycle(cycle_mutex_);
  coordinator_->TrimPinned(keep);
}

Status Session::ReleaseHandle(AllocationId allocation) {
  const DriverHandle handle = ledger_.HandleOf(allocation);
  if (!handle) return {};
  AMEM_TRY(driver_.Release(handle));
  ledger_.ForgetHandle(allocation);
  return {};
}

Status Session::Release(AllocationId allocation) {
  const std::shared_lock gate(gate_);
  std::vector<DroppedImport> dropped;
  if (last_handle.allocation == allocation) last_handle = {};
  {
    const auto lock = ledger_.Lock();
    const auto it = ledger_.state().allocations.find(allocation);
    if (it == ledger_.state().allocations.end() || it->second.guest_references == 0) {
      return Wrong("release " + ToText(allocation) + ": NCCL holds no reference to it");
    }
    const Allocation& a = it->second;
    const AllocationId slab = a.slab;
    if (a.guest_references == 1 && a.mappings == 0 && a.importers.empty()) {
      AMEM_TRY(ReleaseHandle(allocation));
      if (a.remote) dropped.push_back({*a.remote, allocation});
      secrets_.erase(allocation);
    }
    ledger_.Record(AllocationReleased{allocation});
    PartWent(slab, dropped);
  }
  Tell(dropped);
  return {};
}

// A slab that lost a part may be empty now.
void Session::PartWent(AllocationId slab, std::vector<DroppedImport>& dropped) {
  if (!slab) return;
  if (const Status retired = slabs_.Retire(slab, dropped); !retired.ok()) ledger_.Break(retired.message());
  if (!ledger_.state().allocations.contains(slab)) secrets_.erase(slab);
}

void Session::Tell(const std::vector<DroppedImport>& dropped) {
  for (const DroppedImport& d : dropped) peers_->DropReference(d.remote, d.as);
}

Result<AllocationId> Session::Retain(Address address) {
  const std::shared_lock gate(gate_);
  const auto lock = ledger_.Lock();
  AllocationId id = MappedPartAt(address);
  if (!id && !ledger_.state().SlabAt(address)) {
    const auto mapping = ledger_.state().MappingAt(address);
    if (mapping != ledger_.state().mappings.end()) id = mapping->second.allocation;
  }
  if (!id) return NotOurs("retain " + Hex(address.value) + ": no mapping of NCCL's is there");
  ledger_.Record(AllocationRetained{id, address});
  RememberLastHandle(id);
  return id;
}

// Of several parts at one place (imported twice), the first that is mapped.
AllocationId Session::MappedPartAt(Address address) const {
  const State& state = ledger_.state();
  const AllocationId part = state.PartAt(address);
  if (!part) return {};
  const Allocation& first = state.allocations.at(part);
  for (const AllocationId id : state.slabs.at(first.slab).parts.at(first.offset)) {
    const Allocation& a = state.allocations.at(id);
    if (a.mappings > 0 && address.value - state.PlaceOf(a).value < a.bytes) return id;
  }
  return {};
}

Result<Address> Session::Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site) {
  const std::shared_lock gate(gate_);
  AMEM_TRY(RefuseWhilePaused("reserve an address range"));
  if (auto place = ReservePart(bytes, alignment, hint, flags, site); place.ok()) return place;
  auto address = driver_.Reserve(bytes, alignment, hint, flags);
  if (!address.ok()) return address;
  const auto lock = ledger_.Lock();
  ledger_.Record(RangeReserved{*address, bytes, alignment, hint, flags, site, {}});
  return address;
}

// The place of the allocation that this thread had in hands last, if that can be what the range is for. kNotFound: it cannot.
Result<Address> Session::ReservePart(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site) {
  const LastHandle last = std::exchange(last_handle, {});
  const Status no{Code::kNotFound, ""};
  if (last.session != peers_->Self().session || hint || flags != 0) return no;
  const auto lock = ledger_.Lock();
  const State& state = ledger_.state();
  const auto it = state.allocations.find(last.allocation);
  if (it == state.allocations.end() || !it->second.placed() || it->second.bytes != bytes) return no;
  const Address place = state.PlaceOf(it->second);
  if (alignment != 0 && place.value % alignment != 0) return no;
  ledger_.Record(RangeReserved{place, bytes, alignment, hint, flags, site, last.allocation});
  return place;
}

Status Session::FreeRange(Address address, Bytes bytes) {
  const std::shared_lock gate(gate_);
  std::vector<DroppedImport> dropped;
  const Status status = FreeOneRange(address, bytes, dropped);
  Tell(dropped);
  return status;
}

Status Session::FreeOneRange(Address address, Bytes bytes, std::vector<DroppedImport>& dropped) {
  const auto lock = ledger_.Lock();
  const State& state = ledger_.state();
  if (const AllocationId slab = state.SlabAt(address)) {
    const AllocationId part = state.PartAt(address);
    if (!part || state.PlaceOf(state.allocations.at(part)) != address) {
      return Wrong("free range " + Hex(address.value) + ": it was not reserved by NCCL");
    }
    for (const AllocationId id : state.slabs.at(slab).parts.at(state.allocations.at(part).offset)) {
      const Allocation& a = state.allocations.at(id);
      if (a.reserved == 0 || a.bytes != bytes || a.reserved <= a.mappings) continue;
      ledger_.Record(RangeFreed{address, bytes, id});
      PartWent(slab, dropped);
      return {};
    }
    return Wrong("free range " + Hex(address.value) + ": NCCL holds no range of that size there, or has memory mapped in it");
  }
  if (!ledger_.state().ranges.contains(address))
    return NotOurs("free range " + Hex(address.value) + ": it was not reserved by NCCL");
  AMEM_TRY(driver_.FreeRange(address, bytes));
  ledger_.Record(RangeFreed{address, bytes, {}});
  return {};
}

Status Session::Map(Address address, Bytes bytes, Bytes offset, AllocationId allocation, std::uint64_t flags) {
  const std::shared_lock gate(gate_);
  AMEM_TRY(RefuseWhilePaused("map " + Hex(address.value)));
  auto lock = ledger_.Lock();
  bool at_its_place = false;
  AMEM_TRY(MapPart(address, bytes, offset, allocation, at_its_place));
  if (at_its_place) return {};
  const DriverHandle handle = ledger_.HandleOf(allocation);
  if (!handle) return Wrong("map " + Hex(address.value) + ": " + ToText(allocation) + " does not exist");
  lock.unlock();
  AMEM_TRY(driver_.Map(address, bytes, offset, handle, flags));
  lock.lock();
  ledger_.Record(Mapped{address, bytes, offset, allocation, flags});
  return {};
}

// Maps an allocation in a slab where it is, or takes it out of the slab so that it can be mapped where NCCL wants it.
Status Session::MapPart(Address address, Bytes bytes, Bytes offset, AllocationId allocation, bool& at_its_place) {
  const State& state = ledger_.state();
  const auto it = state.allocations.find(allocation);
  if (it == state.allocations.end()) return {};
  const std::string doing = "map " + Hex(address.value) + " of " + ToText(allocation);
  if (const AllocationId other = state.PartAt(address);
      other && (!it->second.placed() || state.PlaceOf(it->second) != address)) {
    // The range was reserved for another allocation: that was the wrong guess.
    const Allocation& there = state.allocations.at(other);
    const Address place = state.PlaceOf(there);
    if (place != address || there.reserved != 1 || there.mappings > 0 || there.guest_references == 0) {
      return {Code::kUnsupported, doing + ": " + ToText(other) + " is there; set AMEM_LAYOUT=direct", cuda::kNotSupported};
    }
    const Bytes whole = there.bytes;
    ledger_.Record(RangeFreed{place, whole, other});
    const Status swapped = slabs_.Swap(allocation, other);
    ledger_.Record(RangeReserved{place, whole, 0, {}, 0, {}, swapped.ok() ? allocation : other});
    AMEM_TRY(swapped.Within(doing));
  }
  if (!it->second.placed()) return {};
  if (state.PlaceOf(it->second) == address) {
    if (offset != 0 || bytes != it->second.bytes) return Wrong(doing + ": an allocation is mapped whole");
    if (it->second.mappings >= it->second.reserved) {
      return Wrong(doing + (it->second.reserved == 0 ? ": the address range is not reserved" : ": it is mapped there already"));
    }
    ledger_.Record(Mapped{address, bytes, 0, allocation, 0});
    at_its_place = true;
    return {};
  }
  const AllocationId slab = it->second.slab;
  AMEM_TRY(slabs_.Back(allocation).Within(doing));
  std::vector<DroppedImport> none;  // what leaves a slab here is own memory
  PartWent(slab, none);
  return {};
}

// Forgets one mapping, on the driver where it is present, and its allocation with it if nobody else holds that.
Status Session::UnmapOne(Address address, std::vector<DroppedImport>& dropped) {
  const Mapping mapping = ledger_.state().mappings.at(address);
  const Allocation& a = ledger_.state().allocations.at(mapping.allocation);
  if (mapping.present) AMEM_TRY(driver_.Unmap(address, mapping.bytes));
  std::optional<RemoteAllocation> remote;
  if (a.guest_references == 0 && a.mappings == 1 && a.importers.empty()) {
    AMEM_TRY(ReleaseHandle(mapping.allocation));
    remote = a.remote;
    secrets_.erase(mapping.allocation);
  }
  ledger_.Record(Unmapped{address, mapping.bytes, {}});
  if (remote) dropped.push_back({*remote, mapping.allocation});
  return {};
}

Status Session::Unmap(Address address, Bytes bytes) {
  const std::shared_lock gate(gate_);
  std::vector<DroppedImport> dropped;
  const Status status = UnmapAll(address, bytes, dropped);
  Tell(dropped);
  return status;
}

Status Session::UnmapAll(Address address, Bytes bytes, std::vector<DroppedImport>& dropped) {
  const auto lock = ledger_.Lock();
  if (const AllocationId slab = ledger_.state().SlabAt(address)) return UnmapPart(address, bytes, slab, dropped);
  const auto& mappings = ledger_.state().mappings;
  std::vector<Address> whole;
  Address at = address;
  for (auto it = mappings.find(address); it != mappings.end() && it->first == at && at < address + bytes; ++it) {
    whole.push_back(it->first);
    at = at + it->second.bytes;
  }
  if (whole.empty()) return NotOurs("unmap " + Hex(address.value) + ": NCCL mapped nothing there");
  if (at != address + bytes)
    return Wrong("unmap " + Hex(address.value) + ": " + FormatBytes(bytes) + " would cut a mapping in two");
  for (const Address one : whole) AMEM_TRY(UnmapOne(one, dropped));
  return {};
}

Status Session::UnmapPart(Address address, Bytes bytes, AllocationId slab, std::vector<DroppedImport>& dropped) {
  const AllocationId part = MappedPartAt(address);
  if (!part) return Wrong("unmap " + Hex(address.value) + ": NCCL mapped nothing there");
  const Allocation& a = ledger_.state().allocations.at(part);
  if (ledger_.state().PlaceOf(a) != address || a.bytes != bytes)
    return Wrong("unmap " + Hex(address.value) + ": " + FormatBytes(bytes) + " would cut a mapping in two");
  if (a.guest_references == 0 && a.mappings == 1 && a.importers.empty()) {
    if (a.remote) dropped.push_back({*a.remote, part});
    secrets_.erase(part);
  }
  ledger_.Record(Unmapped{address, bytes, part});
  PartWent(slab, dropped);
  return {};
}

Status Session::SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access) {
  const std::shared_lock gate(gate_);
  AMEM_TRY(RefuseWhilePaused("set access to " + Hex(address.value)));
  auto lock = ledger_.Lock();
  if (ledger_.state().SlabAt(address)) {
    const AllocationId part = MappedPartAt(address);
    if (!part) return Wrong("set access to " + Hex(address.value) + ": NCCL mapped nothing there");
    const Address place = ledger_.state().PlaceOf(ledger_.state().allocations.at(part));
    if (place != address || ledger_.state().allocations.at(part).bytes != bytes)
      return Wrong("set access to " + Hex(address.value) + ": " + FormatBytes(bytes) + " is not what is mapped there");
    lock.unlock();
    AMEM_TRY(slabs_.Open(part, access));
    lock.lock();
    ledger_.Record(AccessSet{address, bytes, {access.begin(), access.end()}, part});
    return {};
  }
  if (!ledger_.state().mappings.contains(address))
    return NotOurs("set access to " + Hex(address.value) + ": NCCL mapped nothing there");
  lock.unlock();
  AMEM_TRY(driver_.SetAccess(address, bytes, access));
  lock.lock();
  ledger_.Record(AccessSet{address, bytes, {access.begin(), access.end()}, {}});
  return {};
}

Result<AllocationProperties> Session::Properties(AllocationId allocation) {
  const auto lock = ledger_.Lock();
  const auto it = ledger_.state().allocations.find(allocation);
  if (it == ledger_.state().allocations.end()) return Wrong("properties of " + ToText(allocation) + ": it does not exist");
  return it->second.properties;
}

Result<std::pair<Address, Bytes>> Session::AddressRange(Address address) {
  const auto lock = ledger_.Lock();
  const State& state = ledger_.state();
  if (auto it = state.legacy.upper_bound(address); it != state.legacy.begin()) {
    --it;
    if (address.value - it->first.value < it->second.bytes) return std::pair{it->first, it->second.bytes};
  }
  if (const AllocationId part = MappedPartAt(address)) {
    const Allocation& a = state.allocations.at(part);
    return std::pair{state.PlaceOf(a), a.bytes};
  }
  const auto mapping = state.MappingAt(address);
  if (mapping == state.mappings.end() || state.slabs.contains(mapping->second.allocation))
    return NotOurs("address range of " + Hex(address.value) + ": not NCCL's memory");
  return std::pair{mapping->first, mapping->second.bytes};
}

std::pair<DriverHandle, Bytes> Session::Backing(AllocationId allocation) {
  const auto lock = ledger_.Lock();
  const auto it = ledger_.state().allocations.find(allocation);
  if (it == ledger_.state().allocations.end() || !it->second.placed()) return {ledger_.HandleOf(allocation), 0};
  return {ledger_.HandleOf(it->second.slab), it->second.offset};
}

void Session::Note(EventBody event) {
  const auto lock = ledger_.Lock();
  ledger_.Record(std::move(event));
}

// ---- sharing -----------------------------------------------------------------------------------------------------------

Result<Secret> Session::SecretOf(AllocationId allocation) {
  if (const auto it = secrets_.find(allocation); it != secrets_.end()) return it->second;
  auto secret = RandomSecret();
  if (secret.ok()) secrets_.emplace(allocation, *secret);
  return secret;
}

Result<UniqueFd> Session::Export(AllocationId allocation) {
  const std::shared_lock gate(gate_);
  Token token{peers_->Self().session, allocation, {}, 0};
  {
    const auto lock = ledger_.Lock();
    const auto it = ledger_.state().allocations.find(allocation);
    if (it == ledger_.state().allocations.end()) return Wrong("export " + ToText(allocation) + ": it does not exist");
    if (it->second.own()) {
      auto secret = SecretOf(allocation);
      if (!secret.ok()) return secret.status();
      token.secret = *secret;
      ledger_.Record(Exported{allocation, 1});
    } else {
      return Status{Code::kUnsupported, "export " + ToText(allocation) + ": it is itself imported; export it from its owner",
                    cuda::kNotSupported};
    }
  }
  return MakeTokenDescriptor(token);
}

Result<AllocationId> Session::Import(int descriptor, const CallSite& site) {
  const std::shared_lock gate(gate_);
  AMEM_TRY(RefuseWhilePaused("import an allocation"));
  coordinator_->Busy();
  auto token = ReadTokenDescriptor(descriptor);
  if (!token.ok()) return token.status();
  return ImportToken(*token, 1, site);
}

Result<AllocationId> Session::ImportToken(const Token& token, std::uint32_t handle_type, const CallSite& site) {
  AllocationId as;
  {
    const auto lock = ledger_.Lock();
    as = ledger_.TakeAllocationId();
  }
  // Waits for the owner, so not under the lock: the owner may be waiting for us.
  auto shared = peers_->Import(token, as);
  if (!shared.ok()) return shared.status();
  const RemoteAllocation remote{token.session, token.allocation};
  if (shared->part) {
    if (Status placed = slabs_.Import(token, as, *shared, handle_type, site, *peers_); !placed.ok()) {
      peers_->DropReference(remote, as);
      return placed;
    }
    RememberLastHandle(as);
    return as;
  }
  auto handle = driver_.Import(shared->descriptor);
  if (!handle.ok()) {
    peers_->DropReference(remote, as);
    return handle.status();
  }
  const auto lock = ledger_.Lock();

  ledger_.SetHandle(as, *handle);
  ledger_.Record(Imported{as, remote, shared->bytes, shared->properties, handle_type, *handle, site, {}});
  RememberLastHandle(as);
  return as;
}

Result<SharedAllocation> Session::OnImport(const PeerIdentity& by, AllocationId as, const Token& token) {
  auto lock = ledger_.Lock();
  const auto it = ledger_.state().allocations.find(token.allocation);
  const auto secret = secrets_.find(token.allocation);
  if (it == ledger_.state().allocations.end() || secret == secrets_.end()) {
    return Status{Code::kNotFound,
                  ToText(token.allocation) + " does not exist any more at its owner, " + ToText(peers_->Self()) +
                      "; its communicator was probably destroyed",
                  cuda::kInvalidValue};
  }
  if (!SameSecret(secret->second, token.secret)) {
    return Status{
        Code::kRefused,
        "the token's secret for " + ToText(token.allocation) + " is wrong; it was not made by " + ToText(peers_->Self()),
        cuda::kNotPermitted};
  }
  const AllocationId slab = it->second.slab;
  if (!(slab ? ledger_.state().allocations.at(slab) : it->second).resident) {
    return Status{Code::kRefused,
                  ToText(token.allocation) + " is paused at its owner, " + ToText(peers_->Self()) + "; call ncclResume there",
                  cuda::kIllegalState};
  }
  SharedAllocation shared{{}, it->second.bytes, it->second.properties, {}};
  if (slab) {
    const bool first = !secrets_.contains(slab);
    auto slab_secret = SecretOf(slab);
    if (!slab_secret.ok()) return slab_secret.status();
    shared.part = SharedPart{slab, *slab_secret, it->second.offset};
    if (first) ledger_.Record(Exported{slab, 1});
  }
  // The reference comes first: from here on the allocation cannot die under the export.
  ledger_.Record(ReferenceAdded{token.allocation, by.session, as});
  if (slab) return shared;
  lock.unlock();
  auto descriptor = ExportWhole(token.allocation);
  if (!descriptor.ok()) {
    OnReferenceDropped(by, token.allocation, as);
    return descriptor.status();
  }
  shared.descriptor = *std::move(descriptor);
  return shared;
}

// A slab's descriptor is kept: other peers will want it, and exporting costs ten times what a copy costs.
Result<UniqueFd> Session::ExportWhole(AllocationId allocation) {
  bool slab = false;
  {
    const auto lock = ledger_.Lock();
    slab = ledger_.state().slabs.contains(allocation);
  }
  return ledger_.Export(allocation, driver_, slab);
}

Result<SharedAllocation> Session::OnReimport(const PeerIdentity& by, const ShareRequest& request) {
  auto lock = ledger_.Lock();
  const auto it = ledger_.state().allocations.find(request.allocation);
  if (it == ledger_.state().allocations.end() || !it->second.importers.contains(Importer{by.session, request.as})) {
    return Status{Code::kRefused,
                  ToText(by) + " holds no reference to " + ToText(request.allocation) + " as " + ToText(request.as)};
  }
  if (!it->second.resident) {
    return Status{Code::kNotFound, ToText(request.allocation) + " has no memory yet at its owner, " + ToText(peers_->Self())};
  }
  SharedAllocation shared{{}, it->second.bytes, it->second.properties, {}};
  // Own memory stays until every member has voted, and the one that asks has not.
  lock.unlock();
  auto descriptor = ExportWhole(request.allocation);
  if (!descriptor.ok()) return descriptor.status().Within("export " + ToText(request.allocation));
  shared.descriptor = *std::move(descriptor);
  return shared;
}

void Session::OnReferenceDropped(const PeerIdentity& by, AllocationId allocation, AllocationId as) {
  std::vector<DroppedImport> none;  // what peers refer to is own memory
  const auto lock = ledger_.Lock();
  const auto it = ledger_.state().allocations.find(allocation);
  if (it == ledger_.state().allocations.end()) return;
  const auto importer = it->second.importers.find(Importer{by.session, as});
  if (importer == it->second.importers.end()) return;
  const bool last =
      it->second.importers.size() == 1 && importer->second == 1 && it->second.guest_references == 0 && it->second.mappings == 0;
  if (last) {
    if (const Status released = ReleaseHandle(allocation); !released.ok()) ledger_.Break(released.message());
    secrets_.erase(allocation);
  }
  const AllocationId slab = ledger_.state().slabs.contains(allocation) ? allocation : it->second.slab;
  ledger_.Record(ReferenceDropped{allocation, by.session, as});
  PartWent(slab, none);
}

void Session::OnPeerConnected(const PeerIdentity& peer) {
  const auto lock = ledger_.Lock();
  const auto it = ledger_.state().peers.find(peer.session);
  if (it != ledger_.state().peers.end() && it->second.connected) return;
  ledger_.Record(PeerConnected{peer.session, peer.host, peer.pid, peer.group, peer.rank});
}

void Session::OnPeerLost(const PeerIdentity& peer, const std::string& reason) {
  const auto lock = ledger_.Lock();
  const auto known = ledger_.state().peers.find(peer.session);
  if (known == ledger_.state().peers.end() || !known->second.connected) return;
  for (const auto& [id, a] : ledger_.state().allocations) {
    if (a.guest_references > 0 || a.mappings > 0 || a.importers.empty()) continue;
    const bool only =
        std::all_of(a.importers.begin(), a.importers.end(), [&](const auto& entry) { return entry.first.by == peer.session; });
    if (!only) continue;
    if (const Status released = ReleaseHandle(id); !released.ok()) ledger_.Break(released.message());
    secrets_.erase(id);
  }
  ledger_.Record(PeerLost{peer.session, reason});
  RetireEmptySlabs();
}

// With the ledger's lock held.
void Session::RetireEmptySlabs() {
  std::vector<DroppedImport> dropped;
  if (const Status retired = slabs_.RetireAll(dropped); !retired.ok()) ledger_.Break(retired.message());
  // Does not wait, and takes no lock of the session's.
  Tell(dropped);
}

std::vector<SessionId> Session::Neighbours() {
  const auto lock = ledger_.Lock();
  const State& state = ledger_.state();
  std::set<SessionId> found;
  for (const auto& [id, a] : state.allocations) {
    if (a.remote) found.insert(a.remote->owner);
    for (const auto& [importer, count] : a.importers) found.insert(importer.by);
  }
  found.erase(state.session.session);
  for (const auto& [id, peer] : state.peers) {
    if (!peer.connected) found.erase(id);
  }
  return {found.begin(), found.end()};
}

CycleProgress Session::Progress() {
  const auto lock = ledger_.Lock();
  return {ledger_.state().lifecycle, ledger_.state().cycles};
}

// ---- cuMemAlloc and its IPC handles ------------------------------------------------------------------------------------

Result<LegacyBlock> Session::NewLegacyBlock(Bytes bytes, DeviceOrdinal device, const CallSite& site) {
  AllocationProperties properties;
  properties.handle_types = 1;
  properties.location = {LocationType::kDevice, device.value};
  properties.gpu_direct_rdma = 1;  // as cuMemAlloc memory is, where the device can
  auto granularity = driver_.Granularity(properties);
  if (!granularity.ok()) {
    properties.gpu_direct_rdma = 0;
    granularity = driver_.Granularity(properties);
    if (!granularity.ok()) return granularity.status();
  }
  const Bytes rounded = (std::max(bytes, LegacyPool::kBlockBytes) + *granularity - 1) / *granularity * *granularity;
  auto handle = driver_.Create(rounded, properties, 0);
  if (!handle.ok() && properties.gpu_direct_rdma == 1 && handle.status().code() != Code::kOutOfMemory) {
    properties.gpu_direct_rdma = 0;
    handle = driver_.Create(rounded, properties, 0);
  }
  if (!handle.ok()) return handle.status();
  auto address = driver_.Reserve(rounded, 0, {}, 0);
  if (!address.ok()) {
    static_cast<void>(driver_.Release(*handle));
    return address.status();
  }
  Status mapped = driver_.Map(*address, rounded, 0, *handle, 0);
  legacy_devices_.insert(device);
  std::vector<AccessDescriptor> access;
  for (const DeviceOrdinal d : legacy_devices_) access.push_back({{LocationType::kDevice, d.value}, 3});
  if (mapped.ok()) {
    mapped = driver_.SetAccess(*address, rounded, access);
    if (!mapped.ok()) static_cast<void>(driver_.Unmap(*address, rounded));
  }
  if (!mapped.ok()) {
    static_cast<void>(driver_.FreeRange(*address, rounded));
    static_cast<void>(driver_.Release(*handle));
    return mapped;
  }
  const AllocationId id = ledger_.TakeAllocationId();
  ledger_.SetHandle(id, *handle);
  ledger_.Record(AllocationCreated{id, rounded, properties, 0, *handle, site, {}});
  ledger_.Record(RangeReserved{*address, rounded, 0, {}, 0, site, {}});
  ledger_.Record(Mapped{*address, rounded, 0, id, 0});
  ledger_.Record(AccessSet{*address, rounded, access, {}});
  return LegacyBlock{*address, rounded, id, device};
}

// cuMemAlloc memory is within reach of every device of the process that has peer access. Devices are opened as they turn up.
void Session::OpenLegacyTo(DeviceOrdinal device) {
  if (!legacy_devices_.insert(device).second) return;
  const AccessDescriptor access{{LocationType::kDevice, device.value}, 3};
  for (const auto& [address, entry] : legacy_.blocks()) {
    // Devices without a link to each other stay apart, as they would with cuMemAlloc.
    if (driver_.SetAccess(address, entry.block.bytes, std::span(&access, 1)).ok()) {
      ledger_.Record(AccessSet{address, entry.block.bytes, {access}, {}});
    }
  }
}

Result<Address> Session::LegacyAllocate(Bytes bytes, DeviceOrdinal device, const CallSite& site) {
  const std::shared_lock gate(gate_);
  AMEM_TRY(RefuseWhilePaused("cuMemAlloc"));
  if (bytes == 0) return Wrong("cuMemAlloc of zero bytes");
  const auto lock = ledger_.Lock();
  OpenLegacyTo(device);
  if (!LegacyPool::IsLarge(bytes)) {
    if (const auto place = legacy_.Take(bytes, device)) return RecordLegacy(place->first, place->second, bytes, site);
  }
  auto block = NewLegacyBlock(bytes, device, site);
  if (!block.ok()) return block.status();
  return RecordLegacy(*block, legacy_.AddBlock(*block, bytes), bytes, site);
}

Address Session::RecordLegacy(const LegacyBlock& block, Address address, Bytes bytes, const CallSite& site) {
  ledger_.Record(LegacyAllocated{address, bytes, block.allocation, address.value - block.address.value, {}, site});
  return address;
}

Status Session::DropLegacyBlock(const LegacyBlock& block) {
  std::vector<DroppedImport> none;  // a block is own memory
  AMEM_TRY(UnmapOne(block.address, none));
  AMEM_TRY(driver_.FreeRange(block.address, block.bytes));
  ledger_.Record(RangeFreed{block.address, block.bytes, {}});
  const Allocation& a = ledger_.state().allocations.at(block.allocation);
  if (a.guest_references == 1 && a.importers.empty()) AMEM_TRY(ReleaseHandle(block.allocation));
  ledger_.Record(AllocationReleased{block.allocation});
  return {};
}

Status Session::LegacyFree(Address address) {
  const std::shared_lock gate(gate_);
  const auto lock = ledger_.Lock();
  if (!ledger_.state().legacy.contains(address))
    return NotOurs("cuMemFree " + Hex(address.value) + ": NCCL did not allocate it");
  ledger_.Record(LegacyFreed{address});
  if (const auto empty = legacy_.Give(address)) return DropLegacyBlock(*empty);
  return {};
}

Result<std::array<std::byte, 64>> Session::LegacyExport(Address address) {
  const std::shared_lock gate(gate_);
  const auto lock = ledger_.Lock();
  const auto block = legacy_.BlockAt(address);
  if (!block) return NotOurs("IPC handle of " + Hex(address.value) + ": not memory that NCCL allocated");
  auto secret = SecretOf(block->allocation);
  if (!secret.ok()) return secret.status();
  ledger_.Record(LegacyExported{address, block->allocation});
  return Encode(Token{peers_->Self().session, block->allocation, *secret, address.value - block->address.value});
}

Result<Address> Session::LegacyImport(std::span<const std::byte, 64> handle, DeviceOrdinal device, const CallSite& site) {
  const std::shared_lock gate(gate_);
  AMEM_TRY(RefuseWhilePaused("cuIpcOpenMemHandle"));
  auto token = Decode(handle);
  if (!token.ok()) return token.status();
  auto id = ImportToken(*token, 1, site);
  if (!id.ok()) return id.status();
  const auto give_up = [&](Status why) {
    static_cast<void>(ReleaseHandle(*id));
    ledger_.Record(AllocationReleased{*id});
    peers_->DropReference({token->session, token->allocation}, *id);
    return why;
  };
  const auto lock = ledger_.Lock();
  const Bytes bytes = ledger_.state().allocations.at(*id).bytes;
  auto address = driver_.Reserve(bytes, 0, {}, 0);
  if (!address.ok()) return give_up(address.status());
  Status mapped = driver_.Map(*address, bytes, 0, ledger_.HandleOf(*id), 0);
  const AccessDescriptor access{{LocationType::kDevice, device.value}, 3};
  if (mapped.ok()) {
    mapped = driver_.SetAccess(*address, bytes, std::span(&access, 1));
    if (!mapped.ok()) static_cast<void>(driver_.Unmap(*address, bytes));
  }
  if (!mapped.ok()) {
    static_cast<void>(driver_.FreeRange(*address, bytes));
    return give_up(std::move(mapped));
  }
  ledger_.Record(RangeReserved{*address, bytes, 0, {}, 0, site, {}});
  ledger_.Record(Mapped{*address, bytes, 0, *id, 0});
  ledger_.Record(AccessSet{*address, bytes, {access}, {}});
  ledger_.Record(LegacyImported{*address + token->offset, *id});
  return *address + token->offset;
}

Status Session::LegacyClose(Address address) {
  const std::shared_lock gate(gate_);
  std::optional<RemoteAllocation> remote;
  AllocationId id;
  {
    const auto lock = ledger_.Lock();
    const auto it = ledger_.state().legacy_imports.find(address);
    if (it == ledger_.state().legacy_imports.end())
      return NotOurs("cuIpcCloseMemHandle " + Hex(address.value) + ": NCCL did not open it");
    id = it->second;
    const auto mapping = ledger_.state().MappingAt(address);
    const Address base = mapping->first;
    const Bytes bytes = mapping->second.bytes;
    ledger_.Record(LegacyClosed{address});
    std::vector<DroppedImport> none;  // NCCL's reference is dropped below
    AMEM_TRY(UnmapOne(base, none));
    AMEM_TRY(driver_.FreeRange(base, bytes));
    ledger_.Record(RangeFreed{base, bytes, {}});
    remote = ledger_.state().allocations.at(id).remote;
    AMEM_TRY(ReleaseHandle(id));
    ledger_.Record(AllocationReleased{id});
  }
  if (remote) peers_->DropReference(*remote, id);
  return {};
}

// ---- pause and resume --------------------------------------------------------------------------------------------------

Status Session::Cycle(CycleKind kind) {
  const std::lock_guard one(cycle_mutex_);
  const bool pausing = kind == CycleKind::kPause;
  const Lifecycle target = pausing ? Lifecycle::kPaused : Lifecycle::kRunning;
  if (Progress().lifecycle == target) return {};  // and not where an undo that failed has left it: that can be tried again
  auto round = coordinator_->Arrive(kind);
  if (!round.ok()) return round.status();
  const std::unique_lock alone(gate_);
  // Nothing may be launched from here until everything is back.
  paused_.store(true, std::memory_order_release);
  const Status status = coordinator_->Run(kind, **round);
  {
    const auto lock = ledger_.Lock();
    RetireEmptySlabs();  // those that emptied meanwhile: peers died, or let go late
  }
  paused_.store(Progress().lifecycle != Lifecycle::kRunning, std::memory_order_release);
  return status;
}

Status Session::Pause() { return Cycle(CycleKind::kPause); }
Status Session::Resume() { return Cycle(CycleKind::kResume); }

std::shared_lock<std::shared_mutex> Session::EnterLaunch() {
  std::shared_lock entered(gate_, std::try_to_lock);
  if (entered.owns_lock() && paused()) entered.unlock();
  return entered;
}

bool Session::TouchesPaused(Address address, Bytes bytes) {
  if (!paused()) return false;
  const auto lock = ledger_.Lock();
  const auto& mappings = ledger_.state().mappings;
  auto it = ledger_.state().MappingAt(address);
  if (it == mappings.end()) it = mappings.lower_bound(address);
  for (; it != mappings.end() && it->first < address + bytes; ++it) {
    if (!it->second.present) return true;
  }
  return false;
}

void Session::SetGroup(std::int64_t group) {
  peers_->SetGroup(group);
  Note(GroupChanged{group});
}

std::int64_t Session::group() {
  const auto lock = ledger_.Lock();
  return ledger_.state().session.group;
}

State Session::CopyState() {
  const auto lock = ledger_.Lock();
  return ledger_.state();
}

}  // namespace amem
