// Memory that stays the driver's: AMem only records it, so that reports can tell how much a pause leaves in place.
#include "replay/session/session.h"

namespace amem {

void Session::Note(EventBody event) {
  const auto lock = ledger_.Lock();
  ledger_.Record(std::move(event));
}

std::optional<HostAllocated> Session::NoteFree(HostFreed freed) {
  const auto lock = ledger_.Lock();
  const auto it = ledger_.state().host.find(freed.address);
  if (it == ledger_.state().host.end()) return std::nullopt;
  const HostAllocated known{freed.address, it->second.bytes, it->second.flags, it->second.registered};
  ledger_.Record(freed);
  return known;
}

std::optional<AsyncAllocated> Session::NoteFree(AsyncFreed freed) {
  const auto lock = ledger_.Lock();
  const auto it = ledger_.state().async.find(freed.address);
  if (it == ledger_.state().async.end()) return std::nullopt;
  const AsyncAllocated known{freed.address, it->second};
  ledger_.Record(freed);
  return known;
}

std::optional<LegacyAllocated> Session::NoteFree(LegacyFreed freed) {
  const auto lock = ledger_.Lock();
  const auto it = ledger_.state().legacy.find(freed.address);
  if (it == ledger_.state().legacy.end() || it->second.backing) return std::nullopt;
  LegacyAllocated known{freed.address, it->second.bytes, AllocationId{}, 0, it->second.why, it->second.site};
  ledger_.Record(freed);
  return known;
}

bool Session::NoteRegistration(const Registered& registered) {
  const auto lock = ledger_.Lock();
  if (ledger_.state().MappingAt(registered.address) == ledger_.state().mappings.end()) return false;
  ledger_.Record(registered);
  return true;
}

AllocationId Session::NoteMulticast(MulticastCreated created) {
  const auto lock = ledger_.Lock();
  created.allocation = ledger_.TakeAllocationId();
  ledger_.SetHandle(created.allocation, created.handle);
  ledger_.Record(created);
  return created.allocation;
}

}  // namespace amem
