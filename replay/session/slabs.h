// Slabs: memory that AMem takes from the driver in large allocations and cuts NCCL's allocations from.
//
// An allocation gets its place when it is created or imported, before NCCL knows an address for it. That the address range
// which NCCL reserves next is meant for it is a guess (Session::Reserve); while the allocation is untouched, a wrong guess is
// mended by moving it, or by giving it a driver handle of its own. The latter also happens to one that is shared before it has
// an address, as the parts of a symmetric window are.
//
// Several of NCCL's threads may call at the same time. A method says whether the ledger's lock is held by the caller.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "replay/driver/driver.h"
#include "replay/driver/mapped_region.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "replay/session/kept_ranges.h"
#include "replay/session/origin.h"
#include "replay/session/session_options.h"

namespace amem {

struct DroppedImport {  // its owner is told once no lock is held
  RemoteAllocation remote;
  AllocationId as;
};

class Slabs {
 public:
  // `dropped` receives the imported slabs that went back (ledger's lock).
  Slabs(const SessionOptions& options, Driver& driver, Ledger& ledger, std::vector<DroppedImport>& dropped)
      : options_(options), driver_(driver), ledger_(ledger), dropped_(dropped) {}

  // A new allocation, recorded and placed. Zero: it does not belong in a slab, or there is no room for a slab of any size, and
  // the driver should be asked for it alone. Without the lock.
  Result<AllocationId> Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags, const Origin& origin);
  // The allocation `as`, which the owner of `token` says is a part of one of its slabs; imports that slab if need be. What is
  // imported already has one address, by which NCCL retains it: that allocation gets another reference, and is returned.
  // Without the lock.
  Result<AllocationId> Import(const Token& token, AllocationId as, const SharedAllocation& shared, std::uint32_t handle_type,
                              const Origin& origin, Peers& peers);
  // Lets `access` reach the slab that a part lies in. Without the lock.
  Status Open(AllocationId part, std::span<const AccessDescriptor> access);
  // Prepares that NCCL maps an allocation at an address range that it kept when it gave up what was mapped there: places the
  // allocation there, in the slab that was there, which is made again if need be. False: that range is none of these, or the
  // allocation needs a handle of its own to be mapped there. Without the lock.
  Result<bool> PutBack(Address address, Bytes bytes, AllocationId allocation);
  // Gives all parts of an own slab handles of their own where they are, and the slab back. Without the lock, and while nothing
  // runs on the device or is launched. kUnsupported: a peer or a network card holds the slab. Where the driver refuses a call,
  // all is as before, with that call's error.
  Status Dissolve(AllocationId slab);
  // Frees a range that NCCL kept. False: it is none of these. Without the lock.
  Result<bool> FreeKept(Address address, Bytes bytes);

  // All below: with the lock.
  // A part that only NCCL's address range keeps alive gives up its place; the range is remembered.
  void Vacate(AllocationId part);
  // Whether NCCL keeps ranges in own slabs that are there.
  [[nodiscard]] bool AwaitsReturns() const;
  // Gives a part that nobody can reach at its place a driver handle of its own, with its contents. kUnsupported: it is mapped
  // there, NCCL has its address, or a peer imported it as a part.
  Status Back(AllocationId part);
  // Puts the untouched part `moved` where the untouched part `other` is, which gets a driver handle of its own.
  Status Swap(AllocationId moved, AllocationId other);
  // After a part was freed: a slab without any parts goes back to the driver, and an imported one to its owner.
  Status Retire(AllocationId slab);
  Status RetireAll();

  [[nodiscard]] std::uint64_t wrong_guesses() const { return wrong_guesses_; }

 private:
  using Kind = SlabKind;
  struct Own {
    Kind kind;
    Bytes refused = ~Bytes{0};  // no request of that size or more has fitted since a part was last freed
  };
  struct Place {
    AllocationId slab;
    Bytes offset = 0;
  };
  // The granularity of what can be part of a slab: ordinary device memory, small against the largest slab, in a process that
  // has allocated on one device only (with several, NCCL maps one handle for each, at addresses that cannot be foreseen).
  std::optional<Bytes> GranularityIfSuited(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags);
  std::optional<Place> Find(const Kind& kind, Bytes bytes) REQUIRES(ledger_);
  // NCCL may bind the memory to a multicast object, so it lies where it can be bound, in its slab and in the address space.
  // What is smaller than the granularity of such objects can never be bound.
  Bytes AlignmentFor(const Kind& kind, Bytes bytes);
  // FindRoom, beside the ranges that NCCL keeps in that slab.
  [[nodiscard]] std::optional<Bytes> Room(AllocationId slab, Bytes bytes, Bytes alignment) const REQUIRES(ledger_);
  // These four let go of the lock while they wait for the driver or for a peer.
  Result<AllocationId> OpenOwn(const Kind& kind, Bytes bytes) REQUIRES(ledger_);
  Status OpenAgain(const KeptRanges::Home& home) REQUIRES(ledger_);
  Result<AllocationId> OpenImported(const Token& token, Peers& peers) REQUIRES(ledger_);
  Status Clear(const Place& place, Bytes bytes) REQUIRES(ledger_);
  void RecordOwnOpened(AllocationId slab, Address address, Bytes bytes, const Kind& kind) REQUIRES(ledger_);
  [[nodiscard]] bool IsKept(Address address, Bytes bytes);
  // Whether nothing is mapped where a slab was.
  [[nodiscard]] bool IsEmpty(const KeptRanges::Home& home) const REQUIRES(ledger_);
  Status CopyContents(const Allocation& part, DriverHandle to) REQUIRES(ledger_);
  [[nodiscard]] Status CanDissolve(const Allocation& whole, const Slab& slab) const REQUIRES(ledger_);
  Status MapApart(const KeptRanges::Home& home, const std::map<AllocationId, OwnedHandle>& handles) REQUIRES(ledger_);
  void GiveBackCutUp(const KeptRanges::Home& home) REQUIRES(ledger_);
  Status Exchange(AllocationId slab, std::map<AllocationId, OwnedHandle>& handles) REQUIRES(ledger_);
  KeptRanges::Home HomeOf(AllocationId slab, const Slab& parts, const Allocation& whole) const REQUIRES(ledger_);
  [[nodiscard]] AllocationId ImportedAs(const RemoteAllocation& slab) REQUIRES(ledger_);
  [[nodiscard]] AllocationId PartImportedAs(const RemoteAllocation& part, AllocationId slab, Bytes offset) REQUIRES(ledger_);
  [[nodiscard]] Bytes SizeOfNext(const Kind& kind) REQUIRES(ledger_);

  const SessionOptions& options_;
  Driver& driver_;
  Ledger& ledger_;
  std::vector<DroppedImport>& dropped_;
  Mutex mutex_{LockRank::kSlabs};  // one thread at a time finds room, opens a slab or lets a device reach one
  std::mutex kinds_mutex_;         // over these three; taken last
  std::set<std::int32_t> devices_;
  std::map<AllocationProperties, Bytes> granularity_;
  Bytes multicast_granularity_ = 0;  // 0: not asked yet
  std::map<AllocationId, Own> own_ GUARDED_BY(ledger_);
  KeptRanges kept_ GUARDED_BY(ledger_);
  // A slab could not be made again for ranges that NCCL keeps, and new memory must not lie in another.
  bool scarce_ GUARDED_BY(ledger_) = false;
  AllocationId busy_ GUARDED_BY(ledger_);  // is being cleared without the ledger's lock, and must not be retired
  std::uint64_t wrong_guesses_ = 0;
};

}  // namespace amem
