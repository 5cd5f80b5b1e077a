#include <algorithm>
#include <utility>
#include <vector>

#include "statemachine/apply.h"

namespace amem {
namespace {

Status Broken(std::string what) { return {Code::kInvalid, "invariant: " + std::move(what)}; }

// How often each id was added. A sorted array, because the reader of a journal checks after every few events, and asks about
// ascending ids.
template <class Id>
class Counts {
 public:
  explicit Counts(std::size_t most) { ids_.reserve(most); }
  void Add(Id id) { ids_.push_back(id); }
  [[nodiscard]] std::uint64_t Of(Id id) {
    if (!std::exchange(sorted_, true)) std::ranges::sort(ids_);
    while (next_ < ids_.size() && ids_[next_] < id) ++next_;
    const std::size_t first = next_;
    while (next_ < ids_.size() && ids_[next_] == id) ++next_;
    return next_ - first;
  }

 private:
  std::vector<Id> ids_;
  std::size_t next_ = 0;  // of the first id above those asked about
  bool sorted_ = false;
};

// Entries by address: each ends before the next begins.
Status CheckOverlaps(const std::string& what, const auto& by_address) {
  Address end;
  for (const auto& [address, one] : by_address) {
    if (address < end) return Broken(what + " overlap at " + Hex(address));
    end = address + one.bytes;
  }
  return {};
}

std::string Whose(const State& s, PoolId pool) {
  const auto* const found = FindIn(s.pools, pool);
  return found == nullptr ? std::string("the session") : "pool " + found->tag;
}

// Here and of allocations: the memory of each pool, and NCCL's, is there as a whole or gone as a whole while no pause or resume
// of it is under way.
Status CheckMappings(const State& s) {
  AMEM_TRY(CheckOverlaps("mappings", s.mappings));
  for (const auto& [address, m] : s.mappings) {
    const auto range = s.RangeAt(address);
    if (range == s.ranges.end() || address + m.bytes > range->first + range->second.bytes)
      return Broken("mapping " + Hex(address) + " lies outside any reserved range");
    const auto* const a = FindIn(s.allocations, m.allocation);
    if (a == nullptr) return Broken("mapping " + Hex(address) + " is of " + ToText(m.allocation) + ", which does not exist");
    if (m.offset + m.bytes > a->bytes) return Broken("mapping " + Hex(address) + " is larger than " + ToText(m.allocation));
    if (m.present && !a->resident)
      return Broken("mapping " + Hex(address) + " is present and " + ToText(m.allocation) + " has no memory");
    if (m.accessible && !m.present) return Broken("mapping " + Hex(address) + " is accessible and not present");
    if (!m.present && a->resident && s.LifecycleOf(a->pool) == Lifecycle::kRunning)
      return Broken("mapping " + Hex(address) + " is absent and " + Whose(s, a->pool) + " is running");
  }
  return {};
}

// One walk for all checks of an allocation, because the checks run after every few events, over all that a session holds.
Status CheckAllocations(const State& s, std::uint64_t& placed) {
  Counts<AllocationId> mapped(s.mappings.size());
  for (const auto& [address, m] : s.mappings) mapped.Add(m.allocation);
  for (const auto& [id, a] : s.allocations) {
    if (!id || id.value >= s.next_allocation) return Broken(ToText(id) + " has an id that was never given out");
    if (a.dead()) return Broken(ToText(id) + " is held by nobody");
    if (a.placed()) {
      ++placed;
      if (!a.resident || a.saved || a.awaiting_restore)
        return Broken(ToText(id) + " is part of a slab, and has memory of its own");
      if (a.mappings > a.reserved) return Broken(ToText(id) + " is mapped in a range that is not reserved");
    } else {
      if (mapped.Of(id) != a.mappings)
        return Broken(ToText(id) + " counts " + std::to_string(a.mappings) + " mappings, and has another number");
      if (!a.own() && !a.importers.empty()) return Broken(ToText(id) + " is imported, and has importers");
      if (!a.own() && a.saved) return Broken(ToText(id) + " is imported, and its contents are saved");
      if (a.awaiting_restore && !(a.resident && a.saved)) return Broken(ToText(id) + " waits for contents that are not saved");
      if (a.pool && !s.pools.contains(a.pool)) return Broken(ToText(id) + " is a chunk of a pool that does not exist");
      if (!a.resident && !a.saved && s.Preserves(a)) return Broken(ToText(id) + " has neither memory nor saved contents");
    }
    const Lifecycle lifecycle = s.LifecycleOf(a.pool);
    if (lifecycle == Lifecycle::kRunning && (!a.resident || a.awaiting_restore))
      return Broken(ToText(id) + " has no memory and " + Whose(s, a.pool) + " is running");
    // What a pause left in place may lose the reason for that while paused: a network card lets go of it.
    const bool was_free = a.saved || a.multicast;
    if (lifecycle == Lifecycle::kPaused && a.resident && was_free && WhyKept(a) == KeepReason::kNone)
      return Broken(ToText(id) + " has memory and " + Whose(s, a.pool) + " is paused");
  }
  return {};
}

// What a pause undoes and a resume does again: while the card has it, the memory is there; while the session runs, so is it.
Status CheckRegions(const State& s) {
  if (s.regions.empty()) return {};
  Counts<AllocationId> renewable(s.regions.size());
  for (const auto& [id, r] : s.regions) {
    const auto* const a = FindIn(s.allocations, r.allocation);
    const auto mapping = s.MappingAt(r.address);
    if (a == nullptr || mapping == s.mappings.end() || mapping->second.allocation != r.allocation)
      return Broken(ToText(id) + " lies where " + ToText(r.allocation) + " is not mapped");
    if (r.present && !mapping->second.present) return Broken(ToText(id) + " holds memory that is unmapped");
    if (!r.present && !r.kept.empty()) return Broken(ToText(id) + " is kept, and the card has let go of it");
    if (!r.present && s.lifecycle == Lifecycle::kRunning) return Broken(ToText(id) + " is gone and the session is running");
    if (r.kept.empty()) renewable.Add(r.allocation);
  }
  for (const auto& [id, a] : s.allocations)
    if (renewable.Of(id) != a.renewable)
      return Broken(ToText(id) + " counts " + std::to_string(a.renewable) + " renewable registrations, and has another number");
  return {};
}

Status CheckParts(const State& s, AllocationId id, const Slab& slab, const Allocation& whole, std::uint64_t& parts) {
  Bytes end = 0;
  for (const auto& [offset, list] : slab.parts) {
    if (list.empty()) return Broken("slab " + std::to_string(id.value) + " has an empty part");
    if (whole.own() && (offset < end || list.size() > 1))
      return Broken("parts of slab " + std::to_string(id.value) + " overlap");
    for (const AllocationId part : list) {
      const auto* const a = FindIn(s.allocations, part);
      if (a == nullptr || a->slab != id || a->offset != offset)
        return Broken("slab " + std::to_string(id.value) + " lists " + ToText(part) + ", which is not there");
      if (a->own() != whole.own()) return Broken(ToText(part) + " and its slab are not the same session's");
      end = offset + a->bytes;
      if (end > whole.bytes) return Broken(ToText(part) + " ends outside its slab");
      if (whole.own() && !DirtyWithin(slab, offset, a->bytes).empty())
        return Broken(ToText(part) + " lies where nothing was cleared");
      ++parts;
    }
  }
  return {};
}

Status CheckSlabs(const State& s, std::uint64_t placed) {
  std::uint64_t parts = 0;
  for (const auto& [id, slab] : s.slabs) {
    const auto* const whole = FindIn(s.allocations, id);
    if (whole == nullptr) return Broken("slab " + std::to_string(id.value) + " is no allocation");
    const auto* const mapping = FindIn(s.mappings, slab.address);
    if (!slab.parts.empty() && (mapping == nullptr || mapping->allocation != id))
      return Broken("slab " + std::to_string(id.value) + " is not mapped at " + Hex(slab.address));
    AMEM_TRY(CheckParts(s, id, slab, *whole, parts));
  }
  return parts == placed ? Status{} : Broken("the slabs list " + std::to_string(parts) + " parts of " + std::to_string(placed));
}

Status CheckCommunicators(const State& s) {
  if (s.communicators.empty()) return {};
  Counts<CommunicatorId> memory(s.allocations.size() + s.legacy.size());
  for (const auto& [id, a] : s.allocations) memory.Add(a.communicator);
  for (const auto& [address, l] : s.legacy) memory.Add(l.communicator);
  for (const auto& [id, c] : s.communicators) {
    if (memory.Of(id) != c.memory)
      return Broken(ToText(id) + " counts " + std::to_string(c.memory) + " allocations, and has another number");
    if (!c.ended.empty() && c.memory == 0) return Broken(ToText(id) + " has ended, and has no memory left");
  }
  return {};
}

// While a session runs, all memory is bound that NCCL bound; while it is paused, none to an object that a pause releases.
Status CheckBindings(const State& s, bool running) {
  for (const auto& [id, m] : s.multicasts) {
    const auto* const a = FindIn(s.allocations, id);
    if (a == nullptr) return Broken("multicast object " + std::to_string(id.value) + " is no allocation");
    const bool bound = running || !a->rebuilt();
    for (const auto& [offset, b] : m.bindings) {
      if (b.bound != bound)
        return Broken("memory at " + FormatBytes(offset) + " of multicast object " + std::to_string(id.value) + " is " +
                      (b.bound ? "bound and the session is paused" : "not bound and the session is not paused"));
    }
  }
  return {};
}

// amem_alloc's parts do not overlap, and lie in chunks of their pool.
Status CheckPool(const State& s, PoolId id, const Pool& pool) {
  AMEM_TRY(CheckOverlaps("parts of pool " + pool.tag, pool.parts));
  for (const auto& [address, part] : pool.parts) {
    auto* const chunk = FindIn(s.allocations, part.backing);
    if (chunk == nullptr || chunk->pool != id)
      return Broken("part " + Hex(address) + " of pool " + pool.tag + " lies in no chunk of it");
    const auto mapping = s.MappingAt(address);
    if (mapping == s.mappings.end() || mapping->second.allocation != part.backing ||
        address + part.bytes > mapping->first + mapping->second.bytes || address != mapping->first + part.offset)
      return Broken("part " + Hex(address) + " of pool " + pool.tag + " does not lie where " + ToText(part.backing) +
                    " is mapped");
  }
  return {};
}

Status CheckLifecycle(const State& s) {
  const bool whole = s.lifecycle == Lifecycle::kRunning;
  const bool gone = s.lifecycle == Lifecycle::kPaused;
  if ((whole || gone) && s.cycle.open_step)
    return Broken("a step is open and the session is " + std::string(ToText(s.lifecycle)));
  for (const auto& [id, pool] : s.pools) {
    const bool under_way = pool.lifecycle == Lifecycle::kPausing || pool.lifecycle == Lifecycle::kResuming;
    if (!under_way && pool.cycle.open_step)
      return Broken("a step is open and pool " + pool.tag + " is " + std::string(ToText(pool.lifecycle)));
    AMEM_TRY(CheckPool(s, id, pool));
  }
  return whole || gone ? CheckBindings(s, whole) : Status{};
}

}  // namespace

Status CheckInvariants(const State& state) {
  AMEM_TRY(CheckOverlaps("ranges", state.ranges));
  AMEM_TRY(CheckMappings(state));
  std::uint64_t placed = 0;
  AMEM_TRY(CheckAllocations(state, placed));
  AMEM_TRY(CheckSlabs(state, placed));
  AMEM_TRY(CheckCommunicators(state));
  AMEM_TRY(CheckRegions(state));
  return CheckLifecycle(state);
}

}  // namespace amem
