#include "statemachine/account.h"

namespace amem {
namespace {

// Two libraries that hold the same memory hold it once.
std::string Holders(const State& state, AllocationId id) {
  std::string all;
  for (const std::string& library : LibrariesHolding(state, id)) all += (all.empty() ? "" : " and ") + library;
  return all;
}

std::string ReasonOf(const State& state, AllocationId id, const Allocation& a) {
  const KeepReason why = WhyKept(a);
  const std::string reason = why == KeepReason::kHeld ? "held by " + Holders(state, id) : std::string(ToText(why));
  return a.pool ? "tag " + TagOf(state, a) + ": " + reason : reason;
}

}  // namespace

std::string TagOf(const State& state, const Allocation& a) {
  if (const auto* const pool = FindIn(state.pools, a.pool)) return pool->tag;
  return a.tag == MemoryTag::kNccl ? "nccl" : "user";
}

Account::OfDevice OfAllDevices(const Account& account) {
  Account::OfDevice all;
  const auto add = [](std::map<std::string, Bytes>& sums, const std::map<std::string, Bytes>& more) {
    for (const auto& [whose, bytes] : more) sums[whose] += bytes;
  };
  for (const auto& [device, here] : account.devices) {
    add(all.taken, here.taken);
    add(all.running, here.running);
    add(all.kept, here.kept);
  }
  return all;
}

Account MeasureAccount(const State& state) {
  Account account;
  for (const auto& [id, a] : state.allocations) {
    // A multicast object has no memory of its own, a part of a slab that of the slab, and an import that of its owner.
    if (!a.own() || !a.on_device() || a.multicast || a.placed()) continue;
    Account::OfDevice& device = account.devices[DeviceOrdinal{a.properties.location.id}];
    if (!a.resident)
      device.taken[TagOf(state, a)] += a.bytes;
    else if (WhyKept(a) == KeepReason::kNone)
      device.running[TagOf(state, a)] += a.bytes;
    else
      device.kept[ReasonOf(state, id, a)] += a.bytes;
  }
  const auto add = [&](const std::string& whose, std::uint64_t pieces, Bytes bytes) {
    OutsideShare& share = account.unplaced[whose];
    share.pieces += pieces;
    share.bytes += bytes;
  };
  for (const auto& [address, memory] : state.legacy)
    if (!memory.backing) add("NCCL's cuMemAlloc", 1, memory.bytes);
  for (const auto& [address, memory] : state.async) add("NCCL's driver pools", 1, memory.bytes);
  for (const auto& [what, share] : state.outside) {
    if (what.second == OutsideKind::kUnseen) continue;
    const bool left = what.second == OutsideKind::kLeft;
    add(left ? what.first : std::string(ToText(what.second)) + " by " + what.first, share.pieces, share.bytes);
  }
  return account;
}

}  // namespace amem
