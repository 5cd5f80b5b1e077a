// Multicast objects of the CUDA driver, for AMEM_NVLS=release.
#include <fmt/format.h>

#include "replay/driver/cuda/core.h"

namespace amem {
namespace {

CUmulticastObjectProp ToCuda(const MulticastProperties& properties) {
  CUmulticastObjectProp prop{};
  prop.numDevices = properties.devices;
  prop.size = properties.bytes;
  prop.handleTypes = properties.handle_types;
  prop.flags = properties.flags;
  return prop;
}

std::string OfBinding(const char* call, DriverHandle multicast, Bytes offset, Bytes bytes) {
  return fmt::format("{} {} bytes at {} of {}", call, bytes, offset, OfHandle(multicast));
}

}  // namespace

Result<DriverHandle> CudaDriver::CreateMulticast(const MulticastProperties& properties) {
  const CUmulticastObjectProp prop = ToCuda(properties);
  CUmemGenericAllocationHandle handle = 0;
  AMEM_TRY(core_->Call(
      [&] { return fmt::format("cuMulticastCreate {} bytes for {} devices", properties.bytes, properties.devices); },
      core_->calls.multicast_create, &handle, &prop));
  return DriverHandle{handle};
}

Status CudaDriver::AddDevice(DriverHandle multicast, DeviceOrdinal device) {
  const auto tried = [&] { return fmt::format("cuMulticastAddDevice device {} to {}", device.value, OfHandle(multicast)); };
  CUdevice found = 0;
  AMEM_TRY(core_->Call(tried, core_->calls.device_get, &found, device.value));
  return core_->Call(tried, core_->calls.multicast_add_device, multicast.value, found);
}

Status CudaDriver::BindMemory(DriverHandle multicast, Bytes offset, DriverHandle memory, Bytes memory_offset, Bytes bytes) {
  return core_->Call([&] { return OfBinding("cuMulticastBindMem", multicast, offset, bytes); },
                     core_->calls.multicast_bind_memory, multicast.value, offset, memory.value, memory_offset, bytes, 0);
}

Status CudaDriver::BindAddress(DriverHandle multicast, Bytes offset, Address address, Bytes bytes) {
  return core_->Call([&] { return OfBinding("cuMulticastBindAddr", multicast, offset, bytes); },
                     core_->calls.multicast_bind_address, multicast.value, offset, address.value, bytes, 0);
}

Status CudaDriver::Unbind(DriverHandle multicast, DeviceOrdinal device, Bytes offset, Bytes bytes) {
  const auto tried = [&] { return OfBinding("cuMulticastUnbind", multicast, offset, bytes); };
  CUdevice found = 0;
  AMEM_TRY(core_->Call(tried, core_->calls.device_get, &found, device.value));
  return core_->Call(tried, core_->calls.multicast_unbind, multicast.value, found, offset, bytes);
}

Result<Bytes> CudaDriver::MulticastGranularity() {
  const CUmulticastObjectProp prop = ToCuda({Bytes{2} << 20, 2, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0});
  std::size_t granularity = 0;
  AMEM_TRY(core_->Call([] { return "cuMulticastGetGranularity"; }, core_->calls.multicast_granularity, &granularity, &prop,
                       CU_MULTICAST_GRANULARITY_MINIMUM));
  return Bytes{granularity};
}

}  // namespace amem
