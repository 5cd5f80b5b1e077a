// Guards for driver memory that is being set up: a handle, and a range with that handle mapped. What was not kept goes back to
// the driver when the guard ends, so a call that fails half-way leaves nothing behind. A guard belongs to one thread; the
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
  DriverHandle Keep() { return std::exchange(handle_, {}); }  // the caller releases it

 private:
  Driver* driver_;
  DriverHandle handle_;
};

class MappedRegion {
 public:
  // Reserves a range, maps the whole handle there and gives `access` (none: nobody may touch it yet).
  static Result<MappedRegion> Map(Driver& driver, DriverHandle handle, Bytes bytes, Bytes alignment,
                                  std::span<const AccessDescriptor> access);
  // The same in a reserved range, which stays reserved.
  static Result<MappedRegion> MapAt(Driver& driver, Address address, DriverHandle handle, Bytes bytes,
                                    std::span<const AccessDescriptor> access);
  MappedRegion(MappedRegion&& other) noexcept;
  MappedRegion& operator=(MappedRegion&&) = delete;
  ~MappedRegion();

  [[nodiscard]] Address address() const { return address_; }
  Address Keep();  // the caller unmaps it and frees the range

 private:
  MappedRegion(Driver& driver, Address address, Bytes bytes, bool reserved)
      : driver_(&driver), address_(address), bytes_(bytes), reserved_(reserved) {}
  Status Fill(DriverHandle handle, std::span<const AccessDescriptor> access);

  Driver* driver_;
  Address address_;
  Bytes bytes_;
  bool reserved_, mapped_ = false;  // what to give back
};

}  // namespace amem
