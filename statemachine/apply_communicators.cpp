#include "statemachine/fold.h"

namespace amem {

Communicator* Fold::FindLiving(CommunicatorId id) {
  auto* const found = FindIn(s_.communicators, id);
  return found == nullptr || !found->ended.empty() ? nullptr : found;
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
  const auto [it, fresh] = s_.communicators.emplace(e.communicator, std::move(made));
  return fresh ? Status{} : Bad("that id is in use");
}

Status Fold::operator()(const CommunicatorReady& e) {
  Communicator* c = FindLiving(e.communicator);
  if (c == nullptr) return Bad("it was not begun, or has ended");
  c->hash = e.hash;
  c->rank = e.rank;
  c->ranks = e.ranks;
  c->device = e.device;
  c->ready = true;
  return {};
}

Status Fold::operator()(const CommunicatorEnded& e) {
  Communicator* c = FindLiving(e.communicator);
  if (c == nullptr) return Bad("it was not begun, or has ended");
  c->ended = e.how.empty() ? "ended" : e.how;
  c->suspended = false;
  if (c->memory == 0) s_.communicators.erase(e.communicator);
  return {};
}

Status Fold::operator()(const CommunicatorSuspended& e) {
  Communicator* c = FindLiving(e.communicator);
  if (c == nullptr) return Bad("it was not begun, or has ended");
  c->suspended = e.suspended;
  return {};
}

}  // namespace amem
