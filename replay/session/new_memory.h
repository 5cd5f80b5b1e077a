// Memory of AMem's own choosing: what it makes for cuMemAlloc and for pools.
#pragma once

#include <cstdint>

#include "replay/driver/driver.h"
#include "replay/driver/mapped_region.h"
#include "statemachine/types.h"

namespace amem {

// Reachable for network cards, as cuMemAlloc memory is, where the device can do that.
inline constexpr std::uint8_t kWithAndWithoutRdma[] = {1, 0};

// Of memory on a device that can be exported.
AllocationProperties PropertiesOn(DeviceOrdinal device, std::uint8_t rdma);
AccessDescriptor ReadWrite(DeviceOrdinal device);

Result<Bytes> Rounded(Driver& driver, Bytes bytes, const AllocationProperties& properties);  // up, to the granularity

struct NewMemory {
  OwnedHandle handle;
  AllocationProperties properties;
  Bytes bytes;
};
// At least `bytes`, with a handle of its own.
Result<NewMemory> CreateMemory(Driver& driver, Bytes bytes, DeviceOrdinal device);

}  // namespace amem
