// What holds allocations, and what happens when the last holder gives one up: its driver handle is released, for an import the
// owner is told, and a slab that is then empty is released too.
//
// The caller holds the ledger's lock during each method, and so over the releasing driver calls and their events, so that the
// next owner of an address records later; each method takes the locked ledger as an argument. A caller that may give up an
// import holds a NotifyingLock. No method waits for a peer or for copies: a caller that frees memory has waited for copies
// before (Coordinator::AwaitCopies).
#pragma once

#include <set>

#include "journal/base/no_copies.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/session/dropped_imports.h"
#include "replay/session/pools/chunk_space.h"
#include "replay/session/slabs/slabs.h"
#include "replay/session/tokens.h"
#include "statemachine/types.h"

namespace amem {

class Allocations : NoCopies {
 public:
  // All of them must outlive it. Owns no memory: the ledger has it.
  Allocations(Driver& driver, Slabs& slabs, Tokens& tokens, DroppedImports& dropped)
      : driver_(driver), slabs_(slabs), tokens_(tokens), dropped_(dropped) {}

  // One of NCCL's references. kInvalid: it holds none.
  Status Release(AllocationId allocation, Ledger& ledger) REQUIRES(ledger);
  // The whole mapping that begins there, on the driver too if it is present.
  Status Unmap(Address address, Ledger& ledger) REQUIRES(ledger);
  // A range that no slab and no mapping is in.
  Status FreeRange(Address address, Bytes bytes, Ledger& ledger) REQUIRES(ledger);
  // A chunk with a handle and a range of its own (MakeChunk): its mapping, the reference to it, its range.
  Status FreeChunk(const ChunkSpace::Chunk& chunk, Ledger& ledger) REQUIRES(ledger);
  // A peer's reference to it, which the peer knows as `as`. Nothing, if it has none.
  void DropReference(SessionId by, AllocationId allocation, AllocationId as, Ledger& ledger) REQUIRES(ledger);
  // Call it before the last holder of an allocation gives it up: its handle, its tokens, and what its owner is told.
  Status GiveUp(AllocationId allocation, Ledger& ledger) REQUIRES(ledger);
  void GiveUpOrBreak(AllocationId allocation, Ledger& ledger) REQUIRES(ledger);  // for callers that cannot fail

  // Whether only descriptors of its tokens hold it. They count as one reference, which is nobody's to use or to give up.
  [[nodiscard]] bool OnlyDescriptorsHold(AllocationId allocation, Ledger& ledger) const REQUIRES(ledger);
  // Of what something else holds too: closes memfds that no descriptor is open of, once there are many.
  void DropUnused(Ledger& ledger) REQUIRES(ledger);
  // Releases allocations that only descriptors held, if these are closed. What the driver refuses is tried again by the next
  // call, or at the end of a tag's cycle. `touched` has just lost another holder.
  void DropClosed(Ledger& ledger, AllocationId touched = {}) REQUIRES(ledger);

  // Release empty slabs in which NCCL keeps no ranges: the slab that has just lost a part; all, after a cycle in which peers
  // died or dropped parts late; those that served while NCCL's own resume put memory back.
  void RetireIfEmpty(AllocationId slab, Ledger& ledger) REQUIRES(ledger);
  void RetireEmptySlabs(Ledger& ledger) REQUIRES(ledger);
  void RetireSpareSlabs(Ledger& ledger) REQUIRES(ledger);
  // To a part of a slab that NCCL has no address of and no peer has imported, if there is memory for it. NCCL maps most
  // allocations before it shares them. What it shares first, such as memory behind a symmetric window, it maps at addresses of
  // its own choosing in all processes, where a part of a slab cannot be mapped.
  void GiveOwnHandle(AllocationId part, Ledger& ledger) REQUIRES(ledger);

  // The range of a mapping that another library made where AMem has not seen it reserve: it is recorded with the mapping, and
  // goes with it.
  void NoteRangeOfMapping(Address address, Ledger& ledger) REQUIRES(ledger);

 private:
  Driver& driver_;
  Slabs& slabs_;
  Tokens& tokens_;
  DroppedImports& dropped_;
  std::set<Address> others_ranges_;  // recorded for one mapping; guarded by the ledger's lock
};

}  // namespace amem
