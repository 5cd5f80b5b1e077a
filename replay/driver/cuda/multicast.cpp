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

// For calls that this driver may lack.
template <class Call, class... Arguments>
CUresult CallIfThere(Call* call, Arguments... arguments) {
  return call == nullptr ? CUDA_ERROR_NOT_SUPPORTED : call(arguments...);
}

}  // namespace

Result<DriverHandle> CudaDriver::CreateMulticast(const MulticastProperties& properties) {
  AMEM_TRY(core_->Initialise());
  const RelaxedCapture relaxed(core_->calls);
  const CUmulticastObjectProp prop = ToCuda(properties);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = CallIfThere(core_->calls.multicast_create, &handle, &prop);
  if (result == CUDA_SUCCESS) return DriverHandle{handle};
  return core_->Failure(result, fmt::format("cuMulticastCreate {} bytes for {} devices", properties.bytes, properties.devices));
}

Status CudaDriver::AddDevice(DriverHandle multicast, DeviceOrdinal device) {
  AMEM_TRY(core_->Initialise());
  const RelaxedCapture relaxed(core_->calls);
  CUdevice found = 0;
  CUresult result = core_->calls.device_get(&found, device.value);
  if (result == CUDA_SUCCESS) result = CallIfThere(core_->calls.multicast_add_device, multicast.value, found);
  if (result == CUDA_SUCCESS) return {};
  return core_->Failure(result, fmt::format("cuMulticastAddDevice device {} to {}", device.value, OfHandle(multicast)));
}

Status CudaDriver::BindMemory(DriverHandle multicast, Bytes offset, DriverHandle memory, Bytes memory_offset, Bytes bytes) {
  AMEM_TRY(core_->Initialise());
  const RelaxedCapture relaxed(core_->calls);
  const CUresult result = CallIfThere(core_->calls.multicast_bind_memory, multicast.value, std::size_t{offset}, memory.value,
                                      std::size_t{memory_offset}, std::size_t{bytes}, 0ULL);
  return result == CUDA_SUCCESS ? Status{} : core_->Failure(result, OfBinding("cuMulticastBindMem", multicast, offset, bytes));
}

Status CudaDriver::BindAddress(DriverHandle multicast, Bytes offset, Address address, Bytes bytes) {
  AMEM_TRY(core_->Initialise());
  const RelaxedCapture relaxed(core_->calls);
  const CUresult result = CallIfThere(core_->calls.multicast_bind_address, multicast.value, std::size_t{offset},
                                      CUdeviceptr{address.value}, std::size_t{bytes}, 0ULL);
  return result == CUDA_SUCCESS ? Status{} : core_->Failure(result, OfBinding("cuMulticastBindAddr", multicast, offset, bytes));
}

Status CudaDriver::Unbind(DriverHandle multicast, DeviceOrdinal device, Bytes offset, Bytes bytes) {
  AMEM_TRY(core_->Initialise());
  const RelaxedCapture relaxed(core_->calls);
  CUdevice found = 0;
  CUresult result = core_->calls.device_get(&found, device.value);
  if (result == CUDA_SUCCESS)
    result = CallIfThere(core_->calls.multicast_unbind, multicast.value, found, std::size_t{offset}, std::size_t{bytes});
  return result == CUDA_SUCCESS ? Status{} : core_->Failure(result, OfBinding("cuMulticastUnbind", multicast, offset, bytes));
}

Result<Bytes> CudaDriver::MulticastGranularity() {
  AMEM_TRY(core_->Initialise());
  const RelaxedCapture relaxed(core_->calls);
  const CUmulticastObjectProp prop = ToCuda({Bytes{2} << 20, 2, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0});
  std::size_t granularity = 0;
  const CUresult result =
      CallIfThere(core_->calls.multicast_granularity, &granularity, &prop, CU_MULTICAST_GRANULARITY_MINIMUM);
  if (result == CUDA_SUCCESS) return Bytes{granularity};
  return core_->Failure(result, "cuMulticastGetGranularity");
}

}  // namespace amem
