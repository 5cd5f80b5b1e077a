// Reasons to refuse a pause that only this session can see, once all members have come.
#include <algorithm>

#include "replay/cycle/coordinator.h"

namespace amem {

// A peer may have imported memory after the members were found and before this session's part of the round began.
Status Coordinator::AllNeighboursAreMembers(SessionId* outsider) const {
  const State& state = ledger_.state();
  const auto& members = state.ScopeOf(pool_).cycle.members;
  const auto outside = [&](SessionId session) {
    auto* const peer = FindIn(state.peers, session);
    return peer != nullptr && peer->connected && std::ranges::find(members, session) == members.end();
  };
  for (const auto& [id, a] : state.allocations) {
    if (a.pool != pool_) continue;
    std::optional<SessionId> who;
    if (a.remote && outside(a.remote->owner)) who = a.remote->owner;
    for (const auto& [importer, count] : a.importers)
      if (outside(importer.by)) who = importer.by;
    if (who) {
      *outsider = *who;
      return {Code::kRefused, "pause refused: " + ToText(*who) + " (pid " + std::to_string(state.peers.at(*who).pid) +
                                  ") began to share " + ToText(id) + " while the pause began; " + Again(CycleKind::kPause)};
    }
  }
  return {};
}

// An import that a network card or another library holds stays mapped; if its owner made the memory anew, the two would no
// longer share it.
Status Coordinator::ImportsCanLeave() const {
  if (all_keep_) return {};
  for (const auto& [id, a] : ledger_.state().allocations) {
    if (a.own() || a.pool != pool_ || WhyKept(a) == KeepReason::kNone) continue;
    if (WhyKept(a) == KeepReason::kUnseen)
      return {Code::kRefused, "pause refused: while it began, this process began to keep all memory in place (" +
                                  ledger_.state().kept_whole + "); " + Again(CycleKind::kPause)};
    const bool held = WhyKept(a) == KeepReason::kHeld;
    if (!held && WhyKept(a) != KeepReason::kRegistered) continue;
    std::string by;
    for (const std::string& library : LibrariesHolding(ledger_.state(), id)) by += (by.empty() ? "" : ", ") + library;
    return {Code::kRefused,
            "pause refused: " + ToText(id) + " (" + FormatBytes(a.bytes) + ") is imported from " + ToText(a.remote->owner) +
                " and " +
                (held ? "held by " + by + " (retained, exported, registered or bound)" : "registered with a network card") +
                " here, so it would stay here while its owner makes it anew; " +
                (held ? "let that library release it before the pause"
                      : "deregister it before the pause, or register it in the process that owns it")};
  }
  return {};
}

// The driver unbinds by device. In a process with several devices AMem cannot tell the device of memory that is not its own.
Status Coordinator::MulticastsCanLeave() const {
  const State& state = ledger_.state();
  for (const auto& [id, multicast] : state.multicasts) {
    auto* const object = FindIn(state.allocations, id);
    if (object == nullptr || !object->rebuilt()) continue;
    for (const auto& [offset, b] : multicast.bindings) {
      if (b.device.value >= 0) continue;
      return {Code::kRefused, "pause refused: memory at " + Hex(b.address) + ", bound to multicast object " +
                                  std::to_string(id.value) +
                                  ", is not AMem's, and its device is not known; set AMEM_NVLS=keep"};
    }
  }
  return {};
}

Status Coordinator::CanBegin() {
  SessionId outsider;
  const auto check = [&]() -> Status {
    if (!TryLedger()) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    outsider = {};
    AMEM_TRY(AllNeighboursAreMembers(&outsider));
    AMEM_TRY(ImportsCanLeave());
    return pool_ ? Status{} : MulticastsCanLeave();
  };
  Status can = check();
  // A member may have died before this session's journal knew of it; the members were then found without that one.
  for (SessionId awaited; outsider && outsider != awaited && peers_.AwaitLoss(outsider, kLossPatience);) {
    awaited = outsider;
    can = check();
  }
  return can;
}

}  // namespace amem
