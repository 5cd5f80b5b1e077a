#include "replay/cycle/copy_queue.h"

#include <algorithm>

namespace amem {

Status CopyQueue::BeginPhase(PhaseKind phase) {
  const bool expected =
      phase == PhaseKind::kPauseReleaseOwn ? backup_.Saving() : phase == PhaseKind::kResumeImport && !backup_.Saving();
  if (expected) return {};
  return backup_.Queued() || !restoring_.empty() ? Finish() : DropScratch();
}

Status CopyQueue::Begin(std::span<const Step> contents) {
  std::vector<Backup::Item> items;
  bool restore = false;
  {
    const auto lock = ledger_.Lock();
    for (const Step& step : contents) {
      restore = step.kind == StepKind::kRestore;
      if (!ledger_.state().allocations.contains(step.allocation) || restoring_.contains(step.allocation)) continue;
      AMEM_TRY(MapForCopy(step, items));
      if (restore) restoring_.insert(step.allocation);
    }
  }
  if (items.empty()) return {};
  return restore ? backup_.Restore(items) : backup_.Save(items, looking_);
}

// What is copied of a chunk of a pool: what amem_alloc gave out, in as few pieces as it can be told apart from what is free.
// What comes back is what was saved, even if some of it was freed since.
void CopyQueue::AddPartsOfChunk(const Step& step, PoolId pool, std::vector<Backup::Item>& items) const {
  constexpr Bytes kApart = Bytes{2} << 20;
  if (step.kind == StepKind::kRestore) {
    for (Backup::Item& item : backup_.ItemsOf(step.allocation)) {
      item.address = step.address + item.offset;
      items.push_back(item);
    }
    return;
  }
  const auto& parts = ledger_.state().pools.at(pool).parts;
  Bytes done = 0;  // up to here the chunk's parts are in `items`
  const std::size_t first = items.size();
  for (auto part = parts.lower_bound(step.address); part != parts.end() && part->first < step.address + step.bytes; ++part) {
    const Bytes offset = part->first.value - step.address.value;
    const Bytes begin = std::max(done, offset / kApart * kApart);
    const Bytes end = std::min(step.bytes, (offset + part->second.bytes + kApart - 1) / kApart * kApart);
    if (begin >= end) continue;
    if (items.size() > first && begin == done) {
      items.back().bytes += end - begin;
    } else {
      items.push_back({step.allocation, step.device, step.address + begin, end - begin, begin});
    }
    done = end;
  }
}

// What is copied: the allocation, or the parts of a slab or of a pool's chunk.
Status CopyQueue::MapForCopy(const Step& step, std::vector<Backup::Item>& items) {
  const State& state = ledger_.state();
  if (const auto slab = state.slabs.find(step.allocation); slab != state.slabs.end()) {
    for (const auto& [offset, parts] : slab->second.parts) {
      const AllocationId part = parts.front();
      items.push_back({part, step.device, slab->second.address + offset, state.allocations.at(part).bytes});
    }
    return {};
  }
  const PoolId pool = state.allocations.at(step.allocation).pool;
  if (pool && step.address && state.pools.contains(pool)) {
    AddPartsOfChunk(step, pool, items);
    return {};
  }
  if (!step.address) return MapScratch(step, items);
  items.push_back({step.allocation, step.device, step.address, step.bytes});
  return {};
}

// The allocation is not mapped for its own device, so the copy reaches it through a mapping of its own.
Status CopyQueue::MapScratch(const Step& step, std::vector<Backup::Item>& items) {
  const Allocation& a = ledger_.state().allocations.at(step.allocation);
  const auto range = driver_.Reserve(a.bytes, 0, {}, 0);
  if (!range.ok()) return range.status();
  Scratch& scratch = scratch_[step.allocation];
  scratch = {*range, a.bytes, false};
  AMEM_TRY(driver_.Map(*range, a.bytes, 0, ledger_.HandleOf(step.allocation), 0));
  scratch.mapped = true;
  const AccessDescriptor access{a.properties.location, 3};
  AMEM_TRY(driver_.SetAccess(*range, a.bytes, std::span(&access, 1)));
  items.push_back({step.allocation, step.device, *range, step.bytes});
  return {};
}

Status CopyQueue::Await(const Step& step) {
  std::vector<AllocationId> allocations{step.allocation};
  {
    const auto lock = ledger_.Lock();
    const auto own = ledger_.state().allocations.find(step.allocation);
    // A chunk of which nothing was given out has no contents.
    if (own != ledger_.state().allocations.end() && own->second.pool && !backup_.Has(step.allocation)) return {};
    if (const auto slab = ledger_.state().slabs.find(step.allocation); slab != ledger_.state().slabs.end()) {
      allocations.clear();
      for (const auto& [offset, parts] : slab->second.parts) allocations.push_back(parts.front());
    }
  }
  for (const AllocationId allocation : allocations) {
    AMEM_TRY(step.kind == StepKind::kSave ? backup_.AwaitSaved(allocation) : backup_.AwaitRestored(allocation));
  }
  const auto scratch = scratch_.find(step.allocation);
  if (scratch == scratch_.end()) return {};
  AMEM_TRY(Drop(scratch->second));
  scratch_.erase(scratch);
  return {};
}

Status CopyQueue::Finish() {
  Status finished = backup_.Finish();
  restoring_.clear();
  if (backup_.Queued()) return finished;  // copies may still be under way through the mappings
  Status dropped = DropScratch();
  return finished.ok() ? dropped : finished;
}

Status CopyQueue::Drop(Scratch& scratch) {
  if (scratch.mapped) AMEM_TRY(driver_.Unmap(scratch.address, scratch.bytes));
  scratch.mapped = false;
  return driver_.FreeRange(scratch.address, scratch.bytes);
}

// A mapping that the driver refuses to take back stays noted, and the next phase tries again: it would hold memory for ever.
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
