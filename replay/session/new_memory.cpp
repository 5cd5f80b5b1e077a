#include "replay/session/new_memory.h"

namespace amem {

AllocationProperties PropertiesOn(DeviceOrdinal device, std::uint8_t rdma) {
  AllocationProperties properties;
  properties.handle_types = 1;
  properties.location = {LocationType::kDevice, device.value};
  properties.gpu_direct_rdma = rdma;
  return properties;
}

AccessDescriptor ReadWrite(DeviceOrdinal device) { return {{LocationType::kDevice, device.value}, 3}; }

Result<Bytes> Rounded(Driver& driver, Bytes bytes, const AllocationProperties& properties) {
  const auto granularity = driver.Granularity(properties);
  if (!granularity.ok()) return granularity.status();
  return (bytes + *granularity - 1) / *granularity * *granularity;
}

Result<NewMemory> CreateMemory(Driver& driver, Bytes bytes, DeviceOrdinal device) {
  Status failure;
  for (const std::uint8_t rdma : kWithAndWithoutRdma) {
    const AllocationProperties properties = PropertiesOn(device, rdma);
    const auto size = Rounded(driver, bytes, properties);
    failure = size.status();
    if (!size.ok()) continue;
    const Bytes rounded = *size;
    const auto handle = driver.Create(rounded, properties, 0);
    if (handle.ok()) return NewMemory{OwnedHandle(driver, *handle), properties, rounded};
    failure = handle.status();
    if (failure.code() == Code::kOutOfMemory) break;
  }
  return failure;
}

}  // namespace amem
