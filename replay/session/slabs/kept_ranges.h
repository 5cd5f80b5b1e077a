// Address ranges in slabs that NCCL keeps although no allocation is there any more.
//
// NCCL's own suspend unmaps and releases memory and keeps its addresses; its resume maps new memory there without reserving
// them again. This table says which addresses NCCL keeps and to which slab they belong, so that new memory gets its old place.
// If the slab is freed, its whole address range stays reserved for them.
//
// The ledger's lock guards it.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <iterator>
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

  void Add(const Home& home, Address address, Bytes bytes) {
    homes_.insert_or_assign(home.base, home);
    ranges_.emplace(address, bytes);
  }
  void Remove(Address address, Bytes bytes) {  // one that was added
    ranges_.erase(Find(address, bytes));
    const auto home = std::prev(homes_.upper_bound(address));
    const auto next = ranges_.lower_bound(home->first);
    if (next == ranges_.end() || !(next->first < home->first + home->second.bytes)) homes_.erase(home);
  }
  // The home of exactly that range; null: it is not kept. Valid until the range is removed.
  [[nodiscard]] const Home* HomeOf(Address address, Bytes bytes) const {
    if (Find(address, bytes) == ranges_.end()) return nullptr;
    return &std::prev(homes_.upper_bound(address))->second;
  }
  [[nodiscard]] const Home* HomeOf(const RemoteAllocation& slab) const {
    const auto it = std::ranges::find_if(homes_, [&](const auto& home) { return home.second.remote == slab; });
    return it == homes_.end() ? nullptr : &it->second;
  }
  [[nodiscard]] bool empty() const { return ranges_.empty(); }
  // Whether NCCL holds any range in the slab at `base`.
  [[nodiscard]] bool AnyIn(Address base) const { return homes_.contains(base); }
  // Ranges that begin at `from` or later.
  using Ranges = std::multimap<Address, Bytes>;
  [[nodiscard]] Ranges::const_iterator From(Address from) const { return ranges_.lower_bound(from); }
  [[nodiscard]] Ranges::const_iterator end() const { return ranges_.end(); }

 private:
  [[nodiscard]] Ranges::const_iterator Find(Address address, Bytes bytes) const {
    const auto [first, last] = ranges_.equal_range(address);
    const auto it = std::find_if(first, last, [&](const auto& range) { return range.second == bytes; });
    return it == last ? ranges_.end() : it;
  }

  std::map<Address, Home> homes_;  // by base; homes without ranges are removed
  Ranges ranges_;
};

}  // namespace amem
