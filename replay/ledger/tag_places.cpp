#include "replay/ledger/tag_places.h"

#include <mutex>
#include <variant>

#include "journal/base/no_memory.h"

namespace amem {

void TagPlaces::Note(const EventBody& event, const State& state) {
  if (state.pools.empty()) return;
  if (const auto* const mapped = std::get_if<Mapped>(&event)) {
    const auto* const allocation = FindIn(state.allocations, mapped->allocation);
    if (allocation == nullptr || !allocation->pool) return;
    const std::lock_guard lock(mutex_);
    mapped_[mapped->address] = {mapped->bytes, allocation->pool};
    return;
  }
  if (const auto* const unmapped = std::get_if<Unmapped>(&event)) {
    if (unmapped->allocation) return;  // a part of a slab is no tag's
    const std::lock_guard lock(mutex_);
    mapped_.erase(mapped_.lower_bound(unmapped->address), mapped_.lower_bound(unmapped->address + unmapped->bytes));
    return;
  }
  for (const auto& [tag, pool] : state.pools) {
    const bool runs = pool.lifecycle == Lifecycle::kRunning;
    if (runs == running_.contains(tag)) continue;
    const std::lock_guard lock(mutex_);
    if (!runs)
      running_.erase(tag);
    else  // without memory the state is asked
      static_cast<void>(OrNoMemory([this, id = tag] { return running_.insert(id), Status(); }));
  }
}

std::set<PoolId> TagPlaces::In(Address address, Bytes bytes) const {
  std::set<PoolId> found;
  const std::shared_lock lock(mutex_);
  for (const auto& [at, place] : Touching(mapped_, address, bytes)) found.insert(place.tag);
  return found;
}

bool TagPlaces::Runs(PoolId tag) const {
  const std::shared_lock lock(mutex_);
  return running_.contains(tag);
}

}  // namespace amem
