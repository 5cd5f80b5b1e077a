// Copies the contents of a part of a slab to a driver handle that will back this part alone. By way of the host, because this
// is rare.
#pragma once

#include <memory>
#include <utility>

#include "journal/base/no_copies.h"
#include "replay/driver/driver.h"
#include "replay/driver/mapped_region.h"
#include "replay/driver/unfinished_copies.h"
#include "replay/ledger/ledger.h"
#include "replay/session/session_options.h"

namespace amem {

class PartCopies : NoCopies {
 public:
  // Both must outlive it.
  PartCopies(const SessionOptions& options, Driver& driver) : options_(options), driver_(driver) {}

  // Nobody writes to the part: nobody can reach it, or nothing runs on its device. Waits for the copies.
  Status Copy(const Allocation& part, DriverHandle to, Ledger& ledger) REQUIRES(ledger);
  // Unpins the host memory of earlier copies that were late and have ended by now. Any thread.
  void FreeUnfinished() { unfinished_.Free(driver_, Now()); }

 private:
  const SessionOptions& options_;
  Driver& driver_;
  UnfinishedCopies<std::pair<std::unique_ptr<PinnedBuffer>, MappedRegion>> unfinished_;
};

}  // namespace amem
