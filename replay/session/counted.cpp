// Memory that stays the driver's. AMem records it so that reports can say how much a pause leaves in place.
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

std::optional<HostAllocated> Session::NoteFree(HostFreed freed) {
  const LedgerLock lock(ledger_);
  const auto* const found = FindIn(ledger_.state().host, freed.address);
  if (found == nullptr) return std::nullopt;
  const HostAllocated known{freed.address, found->bytes, found->flags, found->registered};
  ledger_.Record(freed);
  return known;
}

std::optional<AsyncAllocated> Session::NoteFree(AsyncFreed freed) {
  const LedgerLock lock(ledger_);
  const auto* const found = FindIn(ledger_.state().async, freed.address);
  if (found == nullptr) return std::nullopt;
  const AsyncAllocated known{freed.address, *found};
  ledger_.Record(freed);
  return known;
}

std::optional<LegacyAllocated> Session::NoteFree(LegacyFreed freed) {
  const LedgerLock lock(ledger_);
  const auto* const found = FindIn(ledger_.state().legacy, freed.address);
  if (found == nullptr || found->backing) return std::nullopt;
  LegacyAllocated known{freed.address, found->bytes, AllocationId{}, 0, found->why, found->site, found->communicator};
  ledger_.Record(freed);
  return known;
}

void Session::KeepEverything(const std::string& why) {
  const auto gate = EnterCall();
  Note(EverythingKept{why});
  peers_->KeepEverything();
}

bool Session::NoteRegistration(const Registered& registered) {
  const LedgerLock lock(ledger_);
  if (ledger_.state().MappingAt(registered.address) == ledger_.state().mappings.end()) return false;
  ledger_.Record(registered);
  return true;
}

}  // namespace amem
