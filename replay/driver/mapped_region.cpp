#include "replay/driver/mapped_region.h"

namespace amem {

Result<MappedRegion> MappedRegion::Map(Driver& driver, DriverHandle handle, Bytes bytes, Bytes alignment,
                                       std::span<const AccessDescriptor> access) {
  AMEM_ASSIGN(const auto range, driver.Reserve(bytes, alignment, {}, 0));
  MappedRegion region(driver, range, bytes, true);
  AMEM_TRY(region.Fill(handle, access));
  return region;
}

Result<MappedRegion> MappedRegion::MapAt(Driver& driver, Address address, DriverHandle handle, Bytes bytes,
                                         std::span<const AccessDescriptor> access) {
  MappedRegion region(driver, address, bytes, false);
  AMEM_TRY(region.Fill(handle, access));
  return region;
}

Status MappedRegion::Fill(DriverHandle handle, std::span<const AccessDescriptor> access) {
  AMEM_TRY(driver_->Map(address_, bytes_, 0, handle, 0));
  mapped_ = true;
  return access.empty() ? Status{} : driver_->SetAccess(address_, bytes_, access);
}

MappedRegion::MappedRegion(MappedRegion&& other) noexcept
    : driver_(other.driver_),
      address_(other.address_),
      bytes_(other.bytes_),
      reserved_(other.reserved_),
      mapped_(other.mapped_) {
  other.Keep();
}

MappedRegion::~MappedRegion() {
  if (mapped_ && !driver_->Unmap(address_, bytes_).ok()) return;  // a range with a mapping cannot be freed
  if (reserved_) static_cast<void>(driver_->FreeRange(address_, bytes_));
}

Address MappedRegion::Keep() {
  reserved_ = mapped_ = false;
  return address_;
}

}  // namespace amem
