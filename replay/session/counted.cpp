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
    const auto known = state.legacy.find(legacy->address);
    if (known != state.legacy.end() && !known->second.backing) ledger_.Record(LegacyFreed{legacy->address});
  }
  ledger_.Record(std::move(event));
}

std::optional<HostAllocated> Session::NoteFree(HostFreed freed) {
  const LedgerLock lock(ledger_);
  const auto it = ledger_.state().host.find(freed.address);
  if (it == ledger_.state().host.end()) return std::nullopt;
  const HostAllocated known{freed.address, it->second.bytes, it->second.flags, it->second.registered};
  ledger_.Record(freed);
  return known;
}

std::optional<AsyncAllocated> Session::NoteFree(AsyncFreed freed) {
  const LedgerLock lock(ledger_);
  const auto it = ledger_.state().async.find(freed.address);
  if (it == ledger_.state().async.end()) return std::nullopt;
  const AsyncAllocated known{freed.address, it->second};
  ledger_.Record(freed);
  return known;
}

std::optional<LegacyAllocated> Session::NoteFree(LegacyFreed freed) {
  const LedgerLock lock(ledger_);
  const auto it = ledger_.state().legacy.find(freed.address);
  if (it == ledger_.state().legacy.end() || it->second.backing) return std::nullopt;
  LegacyAllocated known{freed.address,  it->second.bytes, AllocationId{},         0,
                        it->second.why, it->second.site,  it->second.communicator};
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
