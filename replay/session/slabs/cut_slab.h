// Cuts up one own slab. Before: one handle mapped at the slab's base, and parts without handles. After: each part has a handle
// of its own, mapped at the same address. An object lives for one such transition, with the ledger's lock held over it:
//
//   CanBeCut     the state allows it
//   Prepare      each part has a new handle with its contents; nothing that anybody sees has changed
//   MapApart     the driver has the parts in place of the slab; if it refuses one, the slab is mapped again as before
//   Record       the ledger has them too, and the slab is gone
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "journal/base/no_copies.h"
#include "replay/driver/driver.h"
#include "replay/driver/mapped_region.h"
#include "replay/ledger/ledger.h"
#include "replay/session/slabs/kept_ranges.h"
#include "replay/session/slabs/part_copies.h"
#include "statemachine/types.h"

namespace amem {

class CutSlab : NoCopies {
 public:
  // `home`: of the slab. `driver` must outlive it.
  CutSlab(Driver& driver, const KeptRanges::Home& home) : driver_(driver), home_(home) {}

  // kUnsupported: a peer or a network card holds the slab, or a part is shared or mapped twice.
  [[nodiscard]] static Status CanBeCut(const State& state, const Allocation& whole, const Slab& slab);
  Status Prepare(const Slab& slab, PartCopies& copies, Ledger& ledger) REQUIRES(ledger);
  Status MapApart(Ledger& ledger) REQUIRES(ledger);
  // The events hold only once all of them are recorded; nobody sees the state in between. NCCL keeps the ranges of the parts,
  // so `kept` gets them. If the driver does not take the slab back, only its memory is lost.
  void Record(KeptRanges& kept, Ledger& ledger) REQUIRES(ledger);
  [[nodiscard]] std::size_t parts() const { return parts_.size(); }

 private:
  struct Part {
    Address place;
    Bytes bytes = 0;
    bool mapped = false, reserved = false;
    OwnedHandle handle;
  };
  void GiveBackWhole(const KeptRanges& kept, Ledger& ledger) REQUIRES(ledger);

  Driver& driver_;
  const KeptRanges::Home home_;
  std::vector<AccessDescriptor> access_;  // of the slab, and so of its parts
  std::map<AllocationId, Part> parts_;
};

}  // namespace amem
