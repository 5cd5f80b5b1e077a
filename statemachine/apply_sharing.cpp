#include "statemachine/fold.h"

namespace amem {

Status Fold::operator()(const Exported& e) {
  AMEM_ASSIGN(Allocation* const a, Known(e.allocation));
  Count(a->exports);
  if (!a->handed_out) a->handed_to = e.library;
  a->handed_out = a->handed_out || e.handle_type != 1 || !e.library.empty();
  return {};
}

Status Fold::operator()(const Imported& e) {
  Allocation a = MadeBy(e);
  a.remote = e.remote;
  a.multicast = e.tag == MemoryTag::kMulticastReleased;
  if (!e.remote.owner || !e.remote.allocation) return Bad("it names no owner");
  return Add(e.allocation, std::move(a));
}

Status Fold::operator()(const ReferenceAdded& e) {
  AMEM_ASSIGN(Allocation* const a, Known(e.allocation));
  if (!a->own()) return Bad("it is itself imported");
  if (a->exports == 0) return Bad("it was never exported");
  ++a->importers[Importer{e.by, e.as}];
  a->touched = true;
  return {};
}

Status Fold::operator()(const ReferenceDropped& e) {
  AMEM_ASSIGN(Allocation* const a, Known(e.allocation));
  const auto it = a->importers.find(Importer{e.by, e.as});
  if (it == a->importers.end()) return Bad("that session holds none as " + ToText(e.as));
  AMEM_CHECK(it->second > 0U, e.allocation, e.by);
  if (--it->second == 0) a->importers.erase(it);
  LeaveMulticast(e.allocation, *a, e.by);
  return EraseIfDead(e.allocation);
}

Status Fold::operator()(const PeerConnected& e) {
  s_.peers[e.peer] = Peer{e.host, e.pid, e.group, e.rank, true, {}};
  return {};
}

Status Fold::operator()(const PeerLost& e) {
  auto* const peer = FindIn(s_.peers, e.peer);
  if (peer == nullptr) return Bad("it was never connected");
  peer->connected = false;
  peer->lost_reason = e.reason;
  for (auto it = s_.allocations.begin(); it != s_.allocations.end();) {
    const AllocationId id = it->first;
    const auto gone = std::erase_if(it->second.importers, [&](const auto& entry) { return entry.first.by == e.peer; });
    if (gone > 0) LeaveMulticast(id, it->second, e.peer);
    ++it;
    AMEM_TRY(EraseIfDead(id));
  }
  return {};
}

// ---- communicators

Result<Communicator*> Fold::Living(CommunicatorId id) {
  auto* const found = FindIn(s_.communicators, id);
  if (found != nullptr && found->ended.empty()) return found;
  return Bad("it was not begun, or has ended");
}

void Fold::CountMemory(CommunicatorId id) {
  if (auto* const found = FindIn(s_.communicators, id)) ++found->memory;
}

Status Fold::UncountMemory(CommunicatorId id) {
  const auto it = s_.communicators.find(id);
  if (it == s_.communicators.end()) return {};
  AMEM_CHECK(it->second.memory > 0U, id);
  if (--it->second.memory == 0 && !it->second.ended.empty()) s_.communicators.erase(it);
  return {};
}

Status Fold::operator()(const CommunicatorBegun& e) {
  if (!e.communicator) return Bad("zero is no id");
  Communicator made{.parent = e.parent, .how = e.how, .rank = e.rank, .ranks = e.ranks};
  for (const auto& [id, a] : s_.allocations) made.memory += a.communicator == e.communicator ? 1 : 0;
  for (const auto& [address, l] : s_.legacy) made.memory += l.communicator == e.communicator ? 1 : 0;
  return s_.communicators.emplace(e.communicator, std::move(made)).second ? Status{} : Bad("that id is in use");
}

Status Fold::operator()(const CommunicatorReady& e) {
  AMEM_ASSIGN(Communicator* const c, Living(e.communicator));
  c->hash = e.hash;
  c->rank = e.rank;
  c->ranks = e.ranks;
  c->device = e.device;
  c->ready = true;
  return {};
}

Status Fold::operator()(const CommunicatorEnded& e) {
  AMEM_ASSIGN(Communicator* const c, Living(e.communicator));
  c->ended = e.how.empty() ? "ended" : e.how;
  c->suspended = false;
  if (c->memory == 0) s_.communicators.erase(e.communicator);
  return {};
}

Status Fold::operator()(const CommunicatorSuspended& e) {
  AMEM_ASSIGN(Communicator* const c, Living(e.communicator));
  c->suspended = e.suspended;
  return {};
}

}  // namespace amem
