// NCCL's calls on parts of slabs. The driver is not asked, because the slab is mapped already.

#include <thread>

#include "replay/session/session.h"

namespace amem {
namespace {

// The handle that this thread created, imported or retained last. NCCL's next reservation is for it.
struct LastHandle {
  SessionId session;
  AllocationId allocation;
};
thread_local LastHandle last_handle;

}  // namespace

void Session::RememberLastHandle(AllocationId allocation) const { last_handle = {peers_->Self().session, allocation}; }

void Session::ForgetLastHandle(AllocationId allocation) {
  if (last_handle.allocation == allocation) last_handle = {};
}

// The slab may be empty after it lost a part.
void Session::RetireIfEmpty(AllocationId slab) {
  if (!slab) return;
  if (const Status retired = slabs_.Retire(slab); !retired.ok()) ledger_.Break(retired.message());
  if (ledger_.Find(slab) == nullptr) secrets_.erase(slab);
}

// Retires empty slabs that served while NCCL's resume put memory back, unless NCCL still keeps ranges that need them.
void Session::RetireSpareSlabs() {
  if (slabs_.AwaitsReturns()) return;
  if (const Status retired = slabs_.RetireAll(); !retired.ok()) ledger_.Break(retired.message());
}

void Session::RetireEmptySlabs() {
  std::vector<AllocationId> parts;  // that peers have dropped
  for (const auto& [id, a] : ledger_.state().allocations)
    if (a.placed()) parts.push_back(id);
  for (const AllocationId id : parts) slabs_.Vacate(id);
  if (const Status retired = slabs_.RetireAll(); !retired.ok()) ledger_.Break(retired.message());
}

// Parts that begin where the part at `address` does: one, or several if it was imported more than once.
const std::vector<AllocationId>& Session::PartsAt(Address address) {
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
AllocationId Session::MappedPartAt(Address address) {
  for (const AllocationId id : PartsAt(address)) {
    const Allocation* a = ledger_.Entry(id);
    if (a == nullptr) return {};
    if (a->mappings > 0 && address.value - ledger_.state().PlaceOf(*a).value < a->bytes) return id;
  }
  return {};
}

Result<AllocationId> Session::WholePartAt(std::string_view call, Address address, Bytes bytes) {
  const AllocationId part = MappedPartAt(address);
  if (!part) return WrongCall(call, Hex(address), "NCCL mapped nothing there");
  AMEM_ASSIGN(const Allocation* const a, ledger_.Known(part));
  if (ledger_.state().PlaceOf(*a) != address || a->bytes != bytes)
    return WrongCall(call, Hex(address), FormatBytes(bytes) + " is not the size of the mapping there, which cannot be cut");
  return part;
}

// The place of this thread's last allocation, if the range can be meant for it. kNotFound: it cannot.
Result<Address> Session::ReservePart(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site) {
  const LastHandle last = std::exchange(last_handle, {});
  const Status no{Code::kNotFound, ""};
  if (last.session != peers_->Self().session || hint || flags != 0) return no;
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  const auto* const found = FindIn(state.allocations, last.allocation);
  if (found == nullptr || !found->placed() || found->bytes != bytes) return no;
  const Address place = state.PlaceOf(*found);
  if (alignment != 0 && place.value % alignment != 0) return no;
  ledger_.Record(RangeReserved{place, bytes, alignment, hint, flags, site, last.allocation});
  return place;
}

Status Session::FreePart(Address address, Bytes bytes, AllocationId slab) {
  const State& state = ledger_.state();
  for (const AllocationId id : PartsAt(address)) {
    AMEM_ASSIGN(const Allocation* const a, ledger_.Known(id));
    if (state.PlaceOf(*a) != address) break;
    if (a->reserved == 0 || a->bytes != bytes || a->reserved <= a->mappings) continue;
    ledger_.Record(RangeFreed{address, bytes, id});
    RetireIfEmpty(slab);
    return {};
  }
  return WrongCall("free range", Hex(address),
                   "NCCL holds no range of " + FormatBytes(bytes) + " there, or has memory mapped in it");
}

// NCCL's own suspend releases memory at both ends of a connection and keeps the addresses; its resume maps new memory there. A
// peer may still be suspending, and hold what its owner has already released.
Status Session::PutBackPart(Address address, Bytes bytes, AllocationId allocation) {
  constexpr std::chrono::milliseconds kOften{1}, kPatience{5000};
  const auto held_by_peer_only = [&](const State& state) {
    const auto there = state.allocations.find(state.PartAt(address));
    return there != state.allocations.end() && there->first != allocation && there->second.guest_references == 0 &&
           there->second.mappings == 0 && !there->second.importers.empty();
  };
  for (auto waited = kOften; waited < kPatience && Inspect(held_by_peer_only); waited += kOften)
    std::this_thread::sleep_for(kOften);
  const auto back = slabs_.PutBack(address, bytes, allocation);
  if (!back.ok() || !*back) return back.status();
  const Locked lock(*this);
  RetireSpareSlabs();
  return {};
}

// Maps an allocation of a slab in its place, or takes it out of the slab so that it can be mapped where NCCL wants it.
Result<bool> Session::MapPart(Address address, Bytes bytes, Bytes offset, AllocationId allocation) {
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
  RetireIfEmpty(slab);
  return false;
}

// A part that is mapped, and whose address NCCL has, is to be mapped elsewhere too. The driver neither maps nor unmaps part of
// a handle, so the whole slab is cut up while nothing runs.
bool Session::CutUpSlabOf(AllocationId allocation) {
  // how long to wait for other threads' calls, which may wait for this one
  constexpr std::chrono::milliseconds kShort{50}, kOpen{10};
  const Deadline until = options_.deadlines.OwnPartOf(Now() + options_.deadlines.call());
  CallGate& gate = gates_.Of({});
  while (!gate.Close(kShort).ok()) {
    if (Passed(until)) return false;
    std::this_thread::sleep_for(kOpen);
  }
  const OpenAtEnd open_at_end{gate};
  if (paused()) return false;
  const auto [slab, device] = Inspect([&](const State& state) {
    const auto* const found = FindIn(state.allocations, allocation);
    if (found == nullptr || !found->own()) return std::pair(AllocationId{}, DeviceOrdinal{});
    return std::pair(found->slab, DeviceOrdinal{found->properties.location.id});
  });
  if (!slab || !driver_.Synchronize(device, In(options_.deadlines.call())).ok() || !slabs_.Dissolve(slab).ok()) return false;
  const LedgerLock lock(ledger_);
  secrets_.erase(slab);
  return true;
}

// Gives `allocation` the place at `address` that was reserved for `other`.
Status Session::MoveTo(Address address, AllocationId allocation, AllocationId other) {
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

Status Session::UnmapPart(Address address, Bytes bytes, AllocationId slab) {
  AMEM_ASSIGN(const auto part, WholePartAt("unmap", address, bytes));
  AMEM_ASSIGN(const Allocation* const a, ledger_.Known(part));
  if (a->guest_references == 0 && a->mappings == 1 && a->importers.empty()) AMEM_TRY(LetGo(part));
  ledger_.Record(Unmapped{address, bytes, part});
  slabs_.Vacate(part);
  RetireIfEmpty(slab);
  return {};
}

}  // namespace amem
