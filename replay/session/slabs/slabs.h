// Slabs: large allocations from the driver that NCCL's allocations are cut from.
//
// An allocation gets its place when it is created or imported, before NCCL has an address for it. That NCCL's next reservation
// is meant for it is a guess (NcclMemory::Reserve). While the allocation is untouched, a wrong guess is mended by moving it or
// by giving it a driver handle of its own. An allocation that is shared before it has an address, like the parts of a symmetric
// window, gets its own handle too.
//
// Several threads may call. Each method says whether the caller holds the ledger's lock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>

#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "replay/session/dropped_imports.h"
#include "replay/session/session_options.h"
#include "replay/session/slabs/kept_ranges.h"
#include "replay/session/slabs/part_copies.h"
#include "replay/session/slabs/slab_kinds.h"

namespace amem {

class Slabs {
 public:
  // `dropped` receives imported slabs that went back.
  Slabs(const SessionOptions& options, Driver& driver, Ledger& ledger, DroppedImports& dropped)
      : options_(options), driver_(driver), ledger_(ledger), dropped_(dropped) {}

  // Makes, places and records an allocation. Zero: it does not suit a slab, its origin asks for a handle of its own, or there
  // is no room for a slab of any size; then make it on the driver alone. Without the lock.
  Result<AllocationId> Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags, const Origin& origin);
  // Imports `as`, which the owner of `token` says is part of one of its slabs, and the slab if necessary. An allocation that is
  // imported already keeps its one address, by which NCCL retains it: it gets another reference and is returned. Without the
  // lock.
  Result<AllocationId> Import(const Token& token, AllocationId as, const SharedAllocation& shared, const Origin& origin,
                              Peers& peers);
  // Gives `access` to the slab of a part. Without the lock.
  Status Open(AllocationId part, std::span<const AccessDescriptor> access);
  // Before NCCL maps an allocation at a range that it kept: places the allocation there, in the old slab, which is made again
  // if necessary. False: the range is not kept, or the allocation needs its own handle to be mapped there. Without the lock.
  Result<bool> PutBack(Address address, Bytes bytes, AllocationId allocation);
  // Gives all parts of an own slab handles of their own where they are, and the slab back. Without the lock, while nothing runs
  // on the device or is launched. kUnsupported: a peer or a network card holds the slab. If the driver refuses a call,
  // everything is as before, with that call's error.
  Status Dissolve(AllocationId slab);
  // Frees a range that NCCL kept. False: it is not kept. Without the lock.
  Result<bool> FreeKept(Address address, Bytes bytes);

  // All below: with the lock.
  // Frees the place of a part that only an address range of NCCL's refers to, and remembers the range.
  void Vacate(AllocationId part);
  // Whether NCCL keeps ranges in own slabs that exist.
  [[nodiscard]] bool AwaitsReturns() const;
  // Gives a part that nobody can reach its own driver handle, with its contents. kUnsupported: it is mapped, NCCL has its
  // address, or a peer imported it as a part.
  Status Back(AllocationId part);
  // Puts the untouched part `moved` in the place of the untouched part `other`, which gets its own driver handle.
  Status Swap(AllocationId moved, AllocationId other);
  // After a part was freed: an empty slab goes back to the driver, an imported one to its owner.
  Status Retire(AllocationId slab);
  Status RetireAll();

  // Frees the buffers of copies of parts that missed their deadline and have ended since. Any thread.
  void FreeUnfinished() { copies_.FreeUnfinished(); }
  [[nodiscard]] std::uint64_t wrong_guesses() const { return wrong_guesses_; }

 private:
  using Kind = SlabKind;
  struct Own {
    Kind kind;
    Bytes refused = ~Bytes{0};  // requests of this size did not fit since a part was last freed
  };
  struct Place {
    AllocationId slab;
    Bytes offset = 0;
  };
  std::optional<Place> Find(const Kind& kind, Bytes bytes) REQUIRES(ledger_);
  // FindRoom, but outside the ranges that NCCL keeps in the slab.
  [[nodiscard]] std::optional<Bytes> Room(AllocationId slab, Bytes bytes, Bytes alignment) const REQUIRES(ledger_);
  // These three release the lock while they wait for the driver or a peer.
  Result<AllocationId> OpenOwn(const Kind& kind, Bytes bytes, const KeptRanges::Home* again = nullptr) REQUIRES(ledger_);
  Result<AllocationId> OpenImported(const Token& token, Peers& peers) REQUIRES(ledger_);
  Status Clear(const Place& place, Bytes bytes) REQUIRES(ledger_);
  Status CheckPlace(const Place& place, Bytes bytes) REQUIRES(ledger_);  // free, before it is recorded as taken
  [[nodiscard]] bool IsKept(Address address, Bytes bytes);
  // Whether nothing is mapped where the slab was.
  [[nodiscard]] bool IsEmpty(const KeptRanges::Home& home) const REQUIRES(ledger_);
  KeptRanges::Home HomeOf(AllocationId slab, const Slab& parts, const Allocation& whole) const REQUIRES(ledger_);
  [[nodiscard]] AllocationId ImportedAs(const RemoteAllocation& slab) REQUIRES(ledger_);
  [[nodiscard]] AllocationId PartImportedAs(const RemoteAllocation& part, AllocationId slab, Bytes offset) REQUIRES(ledger_);
  [[nodiscard]] Bytes SizeOfNext(const Kind& kind) REQUIRES(ledger_);

  const SessionOptions& options_;
  Driver& driver_;
  Ledger& ledger_;
  DroppedImports& dropped_;
  Mutex mutex_{LockRank::kSlabs};  // one thread at a time finds room, opens a slab or gives a device access
  SlabKinds kinds_{options_, driver_};
  PartCopies copies_{options_, driver_};
  std::map<AllocationId, Own> own_ GUARDED_BY(ledger_);
  KeptRanges kept_ GUARDED_BY(ledger_);
  // A slab could not be made again for ranges that NCCL keeps, so new memory must not open another.
  bool scarce_ GUARDED_BY(ledger_) = false;
  AllocationId busy_ GUARDED_BY(ledger_);  // being cleared without the ledger's lock; must not be retired
  std::uint64_t wrong_guesses_ = 0;
};

}  // namespace amem
