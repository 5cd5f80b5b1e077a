#include "replay/driver.h"

namespace amem {

Result<NonZero> Driver::FindNonZero(DeviceOrdinal, std::span<const Extent> extents, Bytes) {
  NonZero found;
  found.runs.assign(extents.begin(), extents.end());
  found.counts.assign(extents.size(), 1);
  found.unscanned = "the " + Name() + " driver does not look at contents";
  return found;
}

Status Driver::Gather(DeviceOrdinal device, std::byte* to, std::span<const Extent> from) {
  for (const Extent& extent : from) {
    AMEM_TRY(CopyToHost(device, to, extent.address, extent.bytes));
    to += extent.bytes;
  }
  return {};
}

Status Driver::Scatter(DeviceOrdinal device, std::span<const Extent> to, const std::byte* from) {
  for (const Extent& extent : to) {
    AMEM_TRY(CopyToDevice(device, extent.address, from, extent.bytes));
    from += extent.bytes;
  }
  return {};
}

Status Driver::ClearAll(DeviceOrdinal device, std::span<const Extent> extents) {
  for (const Extent& extent : extents) AMEM_TRY(Clear(device, extent.address, extent.bytes));
  return {};
}

Result<std::uint64_t> Driver::Mark(DeviceOrdinal) { return std::uint64_t{0}; }
Status Driver::Await(DeviceOrdinal device, std::uint64_t) { return FinishCopies(device); }

}  // namespace amem
