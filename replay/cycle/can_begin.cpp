// Reasons to refuse a pause that only this session can see, once all members have come.
#include <algorithm>

#include "replay/cycle/own_part.h"

namespace amem {

Status AllNeighboursAreMembers(const State& state, PoolId pool, const std::string& again, SessionId* outsider) {
  const auto& members = state.ScopeOf(pool).cycle.members;
  const auto outside = [&](SessionId session) {
    auto* const peer = FindIn(state.peers, session);
    return peer != nullptr && peer->connected && std::ranges::find(members, session) == members.end();
  };
  for (const auto& [id, a] : state.allocations) {
    if (a.pool != pool) continue;
    std::optional<SessionId> who;
    if (a.remote && outside(a.remote->owner)) who = a.remote->owner;
    for (const auto& [importer, count] : a.importers)
      if (outside(importer.by)) who = importer.by;
    if (who) {
      *outsider = *who;
      auto* const peer = FindIn(state.peers, *who);
      return {Code::kRefused, "pause refused: " + ToText(*who) + " (pid " + std::to_string(peer == nullptr ? 0 : peer->pid) +
                                  ") began to share " + ToText(id) + " while the pause began; " + again};
    }
  }
  return {};
}

// An import that a network card or another library holds stays mapped; if its owner made the memory anew, the two would no
// longer share it.
Status ImportsCanLeave(const State& state, PoolId pool, const std::string& again) {
  for (const auto& [id, a] : state.allocations) {
    if (a.own() || a.pool != pool || WhyKept(a) == KeepReason::kNone) continue;
    if (WhyKept(a) == KeepReason::kUnseen)
      return {Code::kRefused, "pause refused: while it began, this process began to keep all memory in place (" +
                                  state.kept_whole + "); " + again};
    const bool held = WhyKept(a) == KeepReason::kHeld;
    if (!held && WhyKept(a) != KeepReason::kRegistered) continue;
    std::string by;
    for (const std::string& library : LibrariesHolding(state, id)) by += (by.empty() ? "" : ", ") + library;
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
Status MulticastsCanLeave(const State& state) {
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

}  // namespace amem
