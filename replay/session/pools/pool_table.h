// The tags of a session, each with its pool: what it is, its memory, and what is under way with it. One mutex guards all of it.
// It is released while a pool pauses or resumes, and while the driver makes a chunk or takes one back.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "journal/base/fork_guard.h"
#include "journal/base/mutex.h"
#include "journal/base/no_copies.h"
#include "replay/cycle/coordinator.h"
#include "replay/ledger/ledger.h"
#include "replay/session/pools/pool_memory.h"
#include "statemachine/event.h"

namespace amem {

// What is under way with a pool, and how it ended.
struct PoolTurn {
  std::optional<CycleKind> running;  // a pause or resume is under way
  std::size_t waiting = 0;           // requests that wait for a worker
  std::size_t inside = 0;            // how often threads have entered the pool
  CycleKind last_asked = CycleKind::kResume;
  bool queued = false;    // all copies of the resume under way are queued, so a stream may follow them
  bool followed = false;  // and a stream does
  Status unheard;         // a failure that no caller was given yet
  std::string failure;    // of the last pause or resume; empty: success

  [[nodiscard]] bool busy() const { return running || waiting > 0; }
};

struct PoolEntry {
  PoolId id;
  std::string tag;
  PoolPolicy policy{};
  bool joined = false;  // opened for the memory of a peer or a library, and not by the program
  std::unique_ptr<Coordinator> cycle;
  std::unique_ptr<PoolMemory> memory;
  PoolTurn turn{};
};

struct PoolTable : NoCopies {
  const ForkGuard fork{};
  Mutex mutex{LockRank::kPools};
  const ForgottenInChild<Condition> changed{fork};
  std::map<PoolId, std::unique_ptr<PoolEntry>> pools GUARDED_BY(mutex);  // never erased
  std::set<DeviceOrdinal> devices GUARDED_BY(mutex);                     // with chunks

  [[nodiscard]] PoolEntry* Find(PoolId pool) REQUIRES(mutex);            // null: there is none
  [[nodiscard]] PoolEntry* Named(std::string_view tag) REQUIRES(mutex);  // likewise
  [[nodiscard]] Result<PoolEntry*> Known(PoolId pool) REQUIRES(mutex);   // for callers that answer with a Status
};

// What the ledger says; takes its lock.
[[nodiscard]] Lifecycle LifecycleOf(const PoolEntry& pool, Ledger& ledger);

}  // namespace amem
