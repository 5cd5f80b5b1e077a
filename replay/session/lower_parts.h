// The lower parts of a session, as the upper ones (NcclMemory, LegacyMemory, Sharing, Pools) get them. A part calls only parts
// below it, so that no call re-enters a part that holds a lock; session.h has the order.
#pragma once

#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/session/allocations.h"
#include "replay/session/call_admission.h"
#include "replay/session/dropped_imports.h"
#include "replay/session/session_options.h"
#include "replay/session/slabs/slabs.h"
#include "replay/session/tokens.h"
#include "statemachine/types.h"

namespace amem {

struct LowerParts {  // all of it outlives the upper ones
  const SessionOptions& options;
  SessionId session;
  Driver& driver;
  Ledger& ledger;
  CallAdmission& calls;
  Tokens& tokens;
  DroppedImports& dropped;
  Slabs& slabs;
  Allocations& allocations;
};

// use(state), with the ledger's lock held; it must not take a lock.
template <class Use>
decltype(auto) Inspect(Ledger& ledger, const Use& use) {
  const LedgerLock lock(ledger);
  return use(ledger.state());
}

// The handle that a thread created, imported or retained last: NCCL's next reservation by that thread is for it.
struct LastHandle {
  SessionId session;
  AllocationId allocation;

  static LastHandle& OfThread() {
    static thread_local LastHandle last;
    return last;
  }
  static void Forget(AllocationId allocation) {  // no reservation follows
    if (OfThread().allocation == allocation) OfThread() = {};
  }
};

}  // namespace amem
