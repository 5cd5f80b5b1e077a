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
  peers_->KeepEverything();
}

bool Session::NoteRegistration(const Registered& registered) {
  const LedgerLock lock(ledger_);
  if (ledger_.state().MappingAt(registered.address) == ledger_.state().mappings.end()) return false;
  ledger_.Record(registered);
  return true;
}

}  // namespace amem
