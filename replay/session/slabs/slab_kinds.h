// Which allocations suit a slab, and how a slab and its parts are aligned. It asks the driver once for each kind.
//
// Has a mutex of its own, which is taken last: any method may be called with or without the ledger's lock.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "journal/base/no_copies.h"
#include "replay/driver/driver.h"
#include "replay/session/session_options.h"
#include "replay/session/slabs/kept_ranges.h"
#include "statemachine/types.h"

namespace amem {

class SlabKinds : NoCopies {
 public:
  // Both must outlive it.
  SlabKinds(const SessionOptions& options, Driver& driver) : options_(options), driver_(driver) {}

  // The granularity of what suits a slab: ordinary device memory, small against the largest slab, in a process that allocated
  // on one device only. (With several, NCCL maps one handle for each, at addresses that cannot be foreseen.)
  std::optional<Bytes> GranularityIfSuited(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags);
  // NCCL may bind the memory to a multicast object, so it is aligned for that in its slab and in the address space. Smaller
  // memory can never be bound.
  Bytes AlignmentFor(const SlabKind& kind, Bytes bytes);

 private:
  const SessionOptions& options_;
  Driver& driver_;
  std::mutex mutex_;  // guards all below
  std::set<std::int32_t> devices_;
  std::map<AllocationProperties, Bytes> granularity_;
  Bytes multicast_granularity_ = 0;  // 0: not asked yet
};

}  // namespace amem
