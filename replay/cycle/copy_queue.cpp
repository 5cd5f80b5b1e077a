#include "replay/cycle/copy_queue.h"

#include <algorithm>

#include "statemachine/check.h"

namespace amem {

using Extents = std::vector<ByteRange>;

// What amem_alloc gave out, by chunk. A chunk may be mapped more than once, for example as a window, so its parts are known by
// their offsets.
static std::map<AllocationId, Extents> PartsByChunk(const Pool& pool) {
  std::map<AllocationId, Extents> parts;  // offsets ascend, as addresses do
  for (const auto& [address, part] : pool.parts) parts[part.backing].push_back({part.offset, part.bytes});
  return parts;
}

// Joins neighbouring parts; what is free lies between the results.
static Extents Joined(const Extents& parts, Bytes chunk) {
  constexpr Bytes kApart = Bytes{2} << 20;
  Extents joined;
  Bytes done = 0;  // the chunk is covered up to here
  for (const ByteRange& part : parts) {
    const Bytes begin = std::max(done, part.offset / kApart * kApart);
    const Bytes end = std::min(chunk, (part.offset + part.bytes + kApart - 1) / kApart * kApart);
    if (begin >= end) continue;
    if (!joined.empty() && begin == done) {
      joined.back().bytes += end - begin;
    } else {
      joined.push_back({begin, end - begin});
    }
    done = end;
  }
  return joined;
}

Status CopyQueue::BeginPhase(PhaseKind phase) {
  const bool expected =
      phase == PhaseKind::kPauseReleaseOwn ? backup_.Saving() : phase == PhaseKind::kResumeImport && !backup_.Saving();
  if (expected) return {};
  return backup_.Queued() || !restoring_.empty() ? Finish() : DropScratch();
}

Status CopyQueue::Begin(std::span<const Step> contents) {
  const auto items = MapForCopies(contents);
  if (!items.ok() || items->empty()) return items.status();
  return contents.front().kind == StepKind::kRestore ? backup_.Restore(*items) : backup_.Save(*items, scan_mode_);
}

Result<std::vector<Backup::Item>> CopyQueue::MapForCopies(std::span<const Step> contents) {
  std::vector<Backup::Item> items;
  if (!ledger_.TryLockUntil(until_)) return NoLedger();
  const LedgerLock lock(ledger_, std::adopt_lock);
  parts_.clear();
  for (const Step& step : contents) {
    auto* const a = ledger_.Find(step.allocation);
    if (a == nullptr || restoring_.contains(step.allocation)) continue;
    if (step.kind == StepKind::kSave && !a->pool && WhyKept(*a) != KeepReason::kNone) continue;  // since the plan was made
    AMEM_TRY(MapForCopy(step, items));
    if (step.kind == StepKind::kRestore) restoring_.insert(step.allocation);
  }
  return items;
}

Status CopyQueue::Compare(std::span<const Step> restored) {
  const auto items = MapForCopies(restored);
  Status same = items.ok() ? backup_.Compare(*items) : items.status();
  restoring_.clear();
  Status dropped = DropScratch();
  return same.ok() ? dropped : same;
}

// A pause saves what amem_alloc gave out of a pool's chunk, and what a library made under its tag whole. A resume restores what
// was saved, even if some was freed since.
std::vector<ByteRange> CopyQueue::ExtentsOf(const Step& step, PoolId pool) {
  auto* const known = FindIn(ledger_.state().pools, pool);
  if (known == nullptr) return {{0, step.bytes}};
  if (step.kind == StepKind::kSave) {
    if (!parts_.contains(pool)) parts_[pool] = PartsByChunk(*known);
    const Extents& parts = parts_[pool][step.allocation];
    auto* const a = ledger_.Find(step.allocation);
    // No chunk; or the program has freed all of it, and other processes still map it whole.
    const bool whole = a == nullptr || a->tag == MemoryTag::kUserReleased || (parts.empty() && !a->importers.empty());
    return whole ? Extents{{0, step.bytes}} : Joined(parts, step.bytes);
  }
  Extents saved;
  for (const Backup::Item& item : backup_.ItemsOf(step.allocation)) saved.push_back({item.offset, item.bytes});
  return saved;
}

// What is copied: the allocation, or the parts of a slab or of a pool's chunk.
Status CopyQueue::MapForCopy(const Step& step, std::vector<Backup::Item>& items) {
  const State& state = ledger_.state();
  if (auto* const slab = FindIn(state.slabs, step.allocation)) {
    for (const auto& [offset, parts] : slab->parts) {
      AMEM_CHECK(!parts.empty(), step.allocation, offset);
      auto* const part = FindIn(state.allocations, parts.front());
      AMEM_CHECK(part != nullptr, step.allocation, parts.front());
      items.push_back({parts.front(), step.device, slab->address + offset, part->bytes});
    }
    return {};
  }
  AMEM_ASSIGN(const auto base, step.address ? Result<Address>(step.address) : MapScratch(step));
  auto* const a = FindIn(state.allocations, step.allocation);
  AMEM_CHECK(a != nullptr, step.allocation);
  for (const ByteRange& extent : ExtentsOf(step, a->pool))
    items.push_back({step.allocation, step.device, base + extent.offset, extent.bytes, extent.offset});
  return {};
}

// The allocation is not mapped for its own device, so the copy needs a mapping of its own.
Result<Address> CopyQueue::MapScratch(const Step& step) {
  auto* const found = ledger_.Find(step.allocation);
  AMEM_CHECK(found != nullptr, step.allocation);
  const Allocation& a = *found;
  AMEM_ASSIGN(const auto range, driver_.Reserve(a.bytes, 0, {}, 0));
  Scratch& scratch = scratch_[step.allocation];
  scratch = {range, a.bytes, false};
  AMEM_TRY(driver_.Map(range, a.bytes, 0, ledger_.HandleOf(step.allocation), 0));
  scratch.mapped = true;
  const AccessDescriptor access{a.properties.location, 3};
  AMEM_TRY(driver_.SetAccess(range, a.bytes, std::span(&access, 1)));
  return range;
}

Status CopyQueue::Await(const Step& step) {
  std::vector<AllocationId> allocations{step.allocation};
  {
    if (!ledger_.TryLockUntil(until_)) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    auto* const own = ledger_.Find(step.allocation);
    if (own != nullptr && own->pool && !backup_.Has(step.allocation)) {
      // A chunk of which nothing was given out has no contents. If any other were not copied, its contents would be lost.
      auto* const pool = FindIn(ledger_.state().pools, own->pool);
      AMEM_CHECK(pool != nullptr, step.allocation, own->pool);
      if (std::ranges::none_of(pool->parts, [&](const auto& part) { return part.second.backing == step.allocation; }))
        return {};
      return {Code::kBroken, ToText(step.allocation) +
                                 " holds memory of the program, and none of it was copied; its contents "
                                 "stay where they are"};
    }
    if (auto* const slab = FindIn(ledger_.state().slabs, step.allocation)) {
      allocations.clear();
      for (const auto& [offset, parts] : slab->parts) allocations.push_back(parts.front());
    }
  }
  for (const AllocationId allocation : allocations)
    AMEM_TRY(step.kind == StepKind::kSave ? backup_.AwaitSaved(allocation) : backup_.AwaitRestored(allocation));
  const auto scratch = scratch_.find(step.allocation);
  if (scratch == scratch_.end()) return {};
  AMEM_TRY(Drop(scratch->second));
  scratch_.erase(scratch);
  return {};
}

Status CopyQueue::Finish() {
  Status finished = backup_.Finish();
  restoring_.clear();
  if (backup_.Queued()) return finished;  // copies may still use the mappings
  Status dropped = DropScratch();
  return finished.ok() ? dropped : finished;
}

Status CopyQueue::Drop(Scratch& scratch) {
  if (scratch.mapped) AMEM_TRY(driver_.Unmap(scratch.address, scratch.bytes));
  scratch.mapped = false;
  return driver_.FreeRange(scratch.address, scratch.bytes);
}

// If the driver refuses to unmap, the mapping stays noted and the next phase tries again; otherwise it would hold memory for
// ever.
Status CopyQueue::DropScratch() {
  Status first;
  for (auto it = scratch_.begin(); it != scratch_.end();) {
    const Status dropped = Drop(it->second);
    if (first.ok()) first = dropped;
    it = dropped.ok() ? scratch_.erase(it) : std::next(it);
  }
  return first;
}

}  // namespace amem
