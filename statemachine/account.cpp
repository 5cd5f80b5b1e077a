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
  if (why == KeepReason::kNone) return {};
  const std::string reason = why == KeepReason::kHeld ? "held by " + Holders(state, id) : std::string(ToText(why));
  return a.pool ? "tag " + TagOf(state, a) + ": " + reason : reason;
}

// The first that fits. A window of NCCL's own is shared with peers like their buffers are.
const char* KindOf(const Allocation& a) {
  if (a.tag != MemoryTag::kNccl) return "user buffers";
  if (a.multicast_bindings > 0) return "multicast (NVLS)";
  if (a.renewable > 0 || a.pinned > a.held) return "network buffers";
  if (a.exports > 0 || !a.importers.empty()) return "peer buffers and windows";
  return "private (channels, scratch)";
}

// By kind, what the driver gave: an allocation of its own, or a slab, by its parts, and the rest of it as unused.
void AddKinds(const State& state, AllocationId id, const Allocation& whole, const std::string& why, Account& account) {
  const auto add = [&](const std::string& kind, Bytes bytes) {
    Account::OfKind& sum = account.kinds[kind];
    sum.bytes += bytes;
    if (!why.empty()) sum.stays[why] += bytes;
  };
  const Slab* const slab = FindIn(state.slabs, id);
  if (slab == nullptr) return add(KindOf(whole), whole.bytes);
  Bytes rest = whole.bytes;
  for (const auto& [offset, parts] : slab->parts)
    for (const AllocationId part : parts)
      if (const auto* const a = FindIn(state.allocations, part); a != nullptr && a->bytes <= rest) {
        add(KindOf(*a), a->bytes);
        rest -= a->bytes;
      }
  if (rest > 0) add("unused parts of slabs", rest);
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
    const std::string why = ReasonOf(state, id, a);
    if (!a.pool) AddKinds(state, id, a, why, account);
    Account::OfDevice& device = account.devices[DeviceOrdinal{a.properties.location.id}];
    if (!a.resident)
      device.taken[TagOf(state, a)] += a.bytes;
    else if (why.empty())
      device.running[TagOf(state, a)] += a.bytes;
    else
      device.kept[why] += a.bytes;
  }
  const auto add = [&](const std::string& whose, std::uint64_t pieces, Bytes bytes) {
    OutsideShare& share = account.unplaced[whose];
    share.pieces += pieces;
    share.bytes += bytes;
  };
  const auto left = [&](const char* kind, Bytes bytes, const std::string& why) {
    account.kinds[kind].bytes += bytes;
    account.kinds[kind].stays[why] += bytes;
  };
  for (const auto& [address, memory] : state.legacy) {
    if (memory.backing) continue;
    add("NCCL's cuMemAlloc", 1, memory.bytes);
    left(memory.why == ToText(KeepReason::kUser) ? "user buffers" : "private (channels, scratch)", memory.bytes, memory.why);
  }
  for (const auto& [address, memory] : state.async) {
    add("NCCL's driver pools", 1, memory.bytes);
    left("driver pools", memory.bytes, "stream-ordered allocation");
  }
  for (const auto& [what, share] : state.outside) {
    if (what.second == OutsideKind::kUnseen) continue;
    add(what.second == OutsideKind::kLeft ? what.first : std::string(ToText(what.second)) + " by " + what.first, share.pieces,
        share.bytes);
  }
  return account;
}

}  // namespace amem
