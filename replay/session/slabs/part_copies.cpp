#include "replay/session/slabs/part_copies.h"

#include <span>

namespace amem {

Status PartCopies::Copy(const Allocation& part, DriverHandle to, Ledger& ledger) {
  const DeviceOrdinal device{part.properties.location.id};
  const AccessDescriptor access{part.properties.location, 3};
  AMEM_ASSIGN(auto region, MappedRegion::Map(driver_, to, part.bytes, 0, std::span(&access, 1)));
  FreeUnfinished();
  AMEM_ASSIGN(auto pinned, driver_.AllocatePinned(part.bytes));
  const Deadline until = In(options_.deadlines.call());
  Status copied = driver_.CopyToHost(device, pinned->data(), ledger.state().PlaceOf(part), part.bytes);
  if (copied.ok()) copied = driver_.FinishCopies(device, until);
  if (copied.ok()) copied = driver_.CopyToDevice(device, region.address(), pinned->data(), part.bytes);
  if (copied.ok()) copied = driver_.FinishCopies(device, until);
  // A copy that has not ended must not outlive the buffer and the mapping.
  if (!copied.ok() && !driver_.FinishCopies(device, until).ok())
    unfinished_.Add(device, std::pair(std::move(pinned), std::move(region)));
  return copied;
}

}  // namespace amem
