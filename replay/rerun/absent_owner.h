// Stands for the sessions whose journals a rerun was not given: memory that others import from them is made up when it is first
// asked for.
#pragma once

#include <map>

#include "replay/driver/driver.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

class AbsentOwner {
 public:
  AbsentOwner() = default;
  // `driver` must outlive it. With `own_device`, all memory is made on that driver's first device, whatever the journal says.
  AbsentOwner(Driver& driver, bool own_device) : driver_(&driver), own_device_(own_device) {}

  Result<UniqueFd> Export(const RemoteAllocation& remote, const Allocation& as_imported) {
    DriverHandle& handle = handles_[remote];
    if (!handle) {
      AllocationProperties properties = as_imported.properties;
      properties.handle_types = 1;
      if (own_device_ && properties.location.type == LocationType::kDevice) properties.location.id = 0;
      AMEM_ASSIGN(const auto created, driver_->Create(as_imported.bytes, properties, 0));
      handle = created;
    }
    return driver_->Export(handle);
  }

 private:
  Driver* driver_ = nullptr;
  bool own_device_ = false;
  std::map<RemoteAllocation, DriverHandle> handles_;
};

}  // namespace amem
