#include "replay/session/pools/pool_table.h"

#include <algorithm>

namespace amem {

PoolEntry* PoolTable::Find(PoolId pool) {
  const auto* const entry = FindIn(pools, pool);
  return entry == nullptr ? nullptr : entry->get();
}

PoolEntry* PoolTable::Named(std::string_view tag) {
  const auto found = std::ranges::find_if(pools, [&](const auto& pool) { return pool.second->tag == tag; });
  return found == pools.end() ? nullptr : found->second.get();
}

Result<PoolEntry*> PoolTable::Known(PoolId pool) {
  if (PoolEntry* const entry = Find(pool)) return entry;
  return Status{Code::kInvalid, ToText(pool) + " is none of this process's tags"};
}

Lifecycle LifecycleOf(const PoolEntry& pool, Ledger& ledger) {
  const LedgerLock lock(ledger);
  return ledger.state().LifecycleOf(pool.id);
}

}  // namespace amem
