// Guards for driver memory that is being set up: a handle, and a range with that handle mapped. What was not detached goes back
// to the driver when the guard ends, so a call that fails half-way leaves nothing behind. A guard belongs to one thread; the
// driver must outlive it.
#pragma once

#include <span>
#include <utility>

#include "replay/driver/driver.h"

namespace amem {

class OwnedHandle {
 public:
  OwnedHandle(Driver& driver, DriverHandle handle) : driver_(&driver), handle_(handle) {}
  OwnedHandle(OwnedHandle&& other) noexcept : driver_(other.driver_), handle_(std::exchange(other.handle_, {})) {}
  OwnedHandle& operator=(OwnedHandle&&) = delete;
  ~OwnedHandle() {
    if (handle_) static_cast<void>(driver_->Release(handle_));
  }

  [[nodiscard]] DriverHandle get() const { return handle_; }
  DriverHandle Detach() { return std::exchange(handle_, {}); }  // the caller releases it

 private:
  Driver* driver_;
  DriverHandle handle_;
};

class MappedRegion {
 public:
  // Reserves a range, maps the whole handle there and gives `access` (none: nobody may touch it yet).
  static Result<MappedRegion> Map(Driver& driver, DriverHandle handle, Bytes bytes, Bytes alignment,
                                  std::span<const AccessDescriptor> access) {
    AMEM_ASSIGN(const auto range, driver.Reserve(bytes, alignment, {}, 0));
    return Fill({driver, range, bytes, true}, handle, access);
  }
  // The same in a reserved range, which stays reserved.
  static Result<MappedRegion> MapAt(Driver& driver, Address address, DriverHandle handle, Bytes bytes,
                                    std::span<const AccessDescriptor> access) {
    return Fill({driver, address, bytes, false}, handle, access);
  }
  MappedRegion(MappedRegion&& other) noexcept
      : driver_(other.driver_),
        address_(other.address_),
        bytes_(other.bytes_),
        reserved_(std::exchange(other.reserved_, false)),
        mapped_(std::exchange(other.mapped_, false)) {}
  MappedRegion& operator=(MappedRegion&&) = delete;
  ~MappedRegion() {
    if (mapped_ && !driver_->Unmap(address_, bytes_).ok()) return;  // a range with a mapping cannot be freed
    if (reserved_) static_cast<void>(driver_->FreeRange(address_, bytes_));
  }

  [[nodiscard]] Address address() const { return address_; }
  Address Detach() {  // the caller unmaps it and frees the range
    reserved_ = mapped_ = false;
    return address_;
  }

 private:
  MappedRegion(Driver& driver, Address address, Bytes bytes, bool reserved)
      : driver_(&driver), address_(address), bytes_(bytes), reserved_(reserved) {}
  static Result<MappedRegion> Fill(MappedRegion region, DriverHandle handle, std::span<const AccessDescriptor> access) {
    AMEM_TRY(region.driver_->Map(region.address_, region.bytes_, 0, handle, 0));
    region.mapped_ = true;
    if (!access.empty()) AMEM_TRY(region.driver_->SetAccess(region.address_, region.bytes_, access));
    return region;
  }

  Driver* driver_;
  Address address_;
  Bytes bytes_;
  bool reserved_, mapped_ = false;  // what to give back
};

}  // namespace amem
