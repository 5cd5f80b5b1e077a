// Imports that this session has given up. Their owners are notified once the ledger's lock is free, because sending may wait.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "journal/base/mutex.h"
#include "journal/base/no_copies.h"
#include "journal/base/no_memory.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "statemachine/types.h"

namespace amem {

class DroppedImports : NoCopies {
 public:
  // `peers` must outlive it, and is set before the first import.
  explicit DroppedImports(const std::unique_ptr<Peers>& peers) : peers_(peers) {}
  // Its owner knows the import as `as`. `ledger`: whose lock guards this object.
  void Add(const RemoteAllocation& remote, AllocationId as, [[maybe_unused]] Ledger& ledger) REQUIRES(ledger) {
    all_.push_back({remote, as});
  }

 private:
  friend class NotifyingLock;
  struct Dropped {
    RemoteAllocation remote;
    AllocationId as;
  };
  const std::unique_ptr<Peers>& peers_;
  std::vector<Dropped> all_;
};

// The ledger's lock for a block that may give up imports: as it is released, their owners are notified.
class SCOPED_CAPABILITY NotifyingLock : NoCopies {
 public:
  NotifyingLock(Ledger& ledger, DroppedImports& dropped) ACQUIRE(ledger) : ledger_(ledger), dropped_(dropped) { ledger.lock(); }
  NotifyingLock(Ledger& ledger, DroppedImports& dropped, std::adopt_lock_t) REQUIRES(ledger)
      : ledger_(ledger), dropped_(dropped) {}
  ~NotifyingLock() RELEASE() {
    const std::vector<DroppedImports::Dropped> all = std::exchange(dropped_.all_, {});
    ledger_.unlock();
    for (const DroppedImports::Dropped& one : all)  // without memory its owner believes to the session's end that it is held
      static_cast<void>(OrNoMemory([&] { return dropped_.peers_->DropReference(one.remote, one.as), Status(); }));
  }

 private:
  Ledger& ledger_;
  DroppedImports& dropped_;
};

}  // namespace amem
