// Address ranges in slabs that NCCL keeps although no allocation is there any more.
//
// NCCL's own suspend unmaps and releases memory and keeps its addresses; its resume maps new memory there without reserving
// them again. This table says which addresses those are and which slab they belong to, so that new memory gets the old place.
// If the slab is gone, its whole address range stays reserved for them.
//
// The ledger's lock guards it.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>

#include "statemachine/event.h"
#include "statemachine/types.h"

namespace amem {

struct SlabKind {  // the properties that an allocation and its slab share
  AllocationProperties properties;
  std::uint64_t flags = 0;
  Bytes granularity = 0;
  friend auto operator<=>(const SlabKind&, const SlabKind&) = default;
};

class KeptRanges {
 public:
  struct Home {  // the slab that a range belongs to; if it is made again, it has the same id and addresses
    AllocationId slab;
    Address base;
    Bytes bytes = 0;
    SlabKind kind;                           // of the session's own slab
    std::optional<RemoteAllocation> remote;  // of an imported slab
  };

  void Add(const Home& home, Address address, Bytes bytes);
  void Remove(Address address, Bytes bytes);  // one that was added
  // The home of exactly that range; null: it is not kept. Valid until the range is removed.
  [[nodiscard]] const Home* HomeOf(Address address, Bytes bytes) const;
  [[nodiscard]] const Home* HomeOf(const RemoteAllocation& slab) const;
  [[nodiscard]] bool empty() const { return ranges_.empty(); }
  // Whether NCCL holds any range in the slab at `base`.
  [[nodiscard]] bool AnyIn(Address base) const { return homes_.contains(base); }
  // Ranges that begin at `from` or later.
  using Ranges = std::multimap<Address, Bytes>;
  [[nodiscard]] Ranges::const_iterator From(Address from) const { return ranges_.lower_bound(from); }
  [[nodiscard]] Ranges::const_iterator end() const { return ranges_.end(); }

 private:
  [[nodiscard]] Ranges::const_iterator Find(Address address, Bytes bytes) const;

  std::map<Address, Home> homes_;  // by base; homes without ranges are removed
  Ranges ranges_;
};

}  // namespace amem
