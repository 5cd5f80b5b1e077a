#include "replay/session/records.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include "replay/session/lower_parts.h"

namespace amem {

void Records::Note(EventBody event) {
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

std::optional<HostAllocated> Records::NoteFree(HostFreed freed) { return RecordFree(ledger_, &State::host, freed); }
std::optional<AsyncAllocated> Records::NoteFree(AsyncFreed freed) { return RecordFree(ledger_, &State::async, freed); }
std::optional<LegacyAllocated> Records::NoteFree(LegacyFreed freed) { return RecordFree(ledger_, &State::legacy, freed); }

bool Records::TryNote(std::span<const EventBody> facts, std::chrono::milliseconds patience) {
  if (!ledger_.TryLockFor(patience)) return false;
  const LedgerLock lock(ledger_, std::adopt_lock);
  if (ledger_.state().lifecycle == Lifecycle::kClosed) return true;  // nothing follows the journal's last event
  for (const EventBody& fact : facts) ledger_.Record(fact);
  return true;
}

bool Records::NoteRegistration(const Registered& registered) {
  const LedgerLock lock(ledger_);
  if (Touching(ledger_.state().mappings, registered.address, registered.bytes).empty()) return false;
  if (!ledger_.RecordIfThereIsMemory(registered)) throw std::bad_alloc();
  return true;
}

std::string Records::WhyPins(const Extent& part) {
  return Inspect(ledger_, [&](const State& state) -> std::string {
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

bool Records::Manages(const Extent& part) {
  return Inspect(ledger_, [&](const State& state) { return !Touching(state.mappings, part.address, part.bytes).empty(); });
}

Extent Records::MappingAt(Address address) {
  return Inspect(ledger_, [&](const State& state) {
    const auto found = state.MappingAt(address);
    return found == state.mappings.end() ? Extent{} : Extent{found->first, found->second.bytes};
  });
}

AllocationId Records::AllocationOf(DriverHandle handle) {
  const LedgerLock lock(ledger_);
  return ledger_.AllocationOf(handle);
}

void Records::NoteHandedOut(AllocationId allocation, std::uint32_t handle_type, const std::string& library) {
  const LedgerLock lock(ledger_);
  if (ledger_.Find(allocation) != nullptr) ledger_.Record(Exported{allocation, handle_type, library});
}

void Records::NoteHandedOut(Address address, std::uint32_t handle_type, const std::string& library) {
  const LedgerLock lock(ledger_);
  const auto found = ledger_.state().MappingAt(address);
  if (found != ledger_.state().mappings.end()) ledger_.Record(Exported{found->second.allocation, handle_type, library});
}

Result<TagPart> Records::PartOfTag(Address address) {
  const LedgerLock lock(ledger_);
  for (const auto& [id, pool] : ledger_.state().pools) {
    const auto part = Containing(pool.parts, address);
    if (part != pool.parts.end()) return TagPart{part->first, part->second.bytes, part->second.device};
  }
  return NotOurs("a tag's memory at", Hex(address), "there is none");
}

Bytes Records::HandlesOfTags(Address address, Bytes bytes) {
  if (!calls_.HasTags()) return 0;
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  Bytes sum = 0;
  for (const auto& [at, mapping] : Touching(state.mappings, address, bytes)) {
    const auto* const a = FindIn(state.allocations, mapping.allocation);
    if (a == nullptr || !a->pool || a->tag != MemoryTag::kUserReleased) continue;
    sum += std::min(at + mapping.bytes, address + bytes).value - std::max(at, address).value;
  }
  return sum;
}

std::filesystem::path Records::JournalDirectory() {
  constexpr std::chrono::milliseconds kPatience{100};
  if (!ledger_.TryLockFor(kPatience)) return {};
  const LedgerLock lock(ledger_, std::adopt_lock);
  return ledger_.journal() == nullptr || !ledger_.JournalLost().ok() ? std::filesystem::path() : ledger_.journal()->Directory();
}

}  // namespace amem
