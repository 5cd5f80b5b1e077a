// Memory that stays the driver's, which AMem records so that reports can say how much a pause leaves in place; and multicast
// objects.
#include <algorithm>

#include "replay/session/session.h"

namespace amem {

// New memory at a known address means that the old memory was freed unseen.
void Session::Note(EventBody event) {
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  if (const auto* host = std::get_if<HostAllocated>(&event)) {
    if (state.host.contains(host->address)) ledger_.Record(HostFreed{host->address});
  } else if (const auto* legacy = std::get_if<LegacyAllocated>(&event)) {
    const auto* const known = FindIn(state.legacy, legacy->address);
    if (known != nullptr && !known->backing) ledger_.Record(LegacyFreed{legacy->address});
  }
  ledger_.Record(std::move(event));
}

namespace {

template <class Allocated>
std::optional<Allocated> RecordFree(Ledger& ledger, std::map<Address, Allocated> State::*held, const auto& freed) {
  const LedgerLock lock(ledger);
  const auto* const found = FindIn(ledger.state().*held, freed.address);
  if (found == nullptr) return std::nullopt;
  if constexpr (requires { found->backing; }) {
    if (found->backing) return std::nullopt;  // LegacyFree frees it
  }
  std::optional<Allocated> known = *found;
  ledger.Record(freed);
  return known;
}

}  // namespace

std::optional<HostAllocated> Session::NoteFree(HostFreed freed) { return RecordFree(ledger_, &State::host, freed); }
std::optional<AsyncAllocated> Session::NoteFree(AsyncFreed freed) { return RecordFree(ledger_, &State::async, freed); }
std::optional<LegacyAllocated> Session::NoteFree(LegacyFreed freed) { return RecordFree(ledger_, &State::legacy, freed); }

void Session::KeepEverything(const std::string& why) {
  const auto gate = EnterCall();
  Note(EverythingKept{why});
  peers_->SetReleasesNothing();
}

bool Session::NoteRegistration(const Registered& registered) {
  const LedgerLock lock(ledger_);
  if (Touching(ledger_.state().mappings, registered.address, registered.bytes).empty()) return false;
  ledger_.Record(registered);
  return true;
}

std::string Session::WhyPins(const Extent& part) {
  return Inspect([&](const State& state) -> std::string {
    const auto mapping = state.MappingAt(part.address);
    if (mapping == state.mappings.end()) return "its memory is not AMem's";
    if (mapping->first + mapping->second.bytes < part.address + part.bytes) return "it does not lie in one mapping";
    const auto* const whole = FindIn(state.allocations, mapping->second.allocation);
    if (whole == nullptr || !whole->own()) return "its memory is imported";
    if (whole->pool || whole->tag != MemoryTag::kNccl) return "its memory is the program's";
    if (!whole->on_device() || whole->multicast) return "its memory is no plain device memory";
    return mapping->second.present ? "" : "its memory is paused";
  });
}

bool Session::Manages(const Extent& part) {
  return Inspect([&](const State& state) { return !Touching(state.mappings, part.address, part.bytes).empty(); });
}

Extent Session::MappingAt(Address address) {
  return Inspect([&](const State& state) {
    const auto found = state.MappingAt(address);
    return found == state.mappings.end() ? Extent{} : Extent{found->first, found->second.bytes};
  });
}

AllocationId Session::AllocationOf(DriverHandle handle) {
  const LedgerLock lock(ledger_);
  return ledger_.AllocationOf(handle);
}

void Session::NoteHandedOut(AllocationId allocation, std::uint32_t handle_type, const std::string& library) {
  const LedgerLock lock(ledger_);
  if (ledger_.Find(allocation) != nullptr) ledger_.Record(Exported{allocation, handle_type, library});
}

void Session::NoteHandedOut(Address address, std::uint32_t handle_type, const std::string& library) {
  const LedgerLock lock(ledger_);
  const auto found = ledger_.state().MappingAt(address);
  if (found != ledger_.state().mappings.end()) ledger_.Record(Exported{found->second.allocation, handle_type, library});
}

// ---- multicast objects, and the memory that NCCL binds to them

AllocationId Session::NoteMulticast(MulticastCreated created) {
  const LedgerLock lock(ledger_);
  created.allocation = ledger_.TakeAllocationId();
  created.tag = options_.nvls == Nvls::kRelease ? MemoryTag::kMulticastReleased : MemoryTag::kNccl;
  ledger_.SetHandle(created.allocation, created.handle);
  ledger_.Record(created);
  return created.allocation;
}

void Session::PrepareBind(AllocationId memory) {
  const LedgerLock lock(ledger_);
  if (ledger_.Find(memory) != nullptr) GiveOwnHandle(memory);
}

bool Session::ForgetUnbound(AllocationId multicast, DeviceOrdinal device, Bytes offset, Bytes bytes) {
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
