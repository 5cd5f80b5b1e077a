// The VMM calls of the stand-in, and multicast objects on them.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>

#include "tests/stand_ins/cuda/stand_in.h"

using amem::Address;
using amem::DeviceOrdinal;
using amem::DriverHandle;
using amem::LocationType;
using amem::stand_in::At;
using amem::stand_in::Result;

CUDA_CALL CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp* prop,
                               unsigned long long flags) {
  STARTED_OR_RETURN(stand_in);
  if (handle == nullptr || prop == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto made = stand_in->simulator->Create(bytes, amem::stand_in::FromCuda(*prop), flags);
  if (made.ok()) *handle = made->value;
  return Result(made.status());
}

CUDA_CALL CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  STARTED_OR_RETURN(stand_in);
  return Result(stand_in->simulator->Release(DriverHandle{handle}));
}

CUDA_CALL CUresult cuMemAddressReserve(CUdeviceptr* pointer, std::size_t bytes, std::size_t alignment, CUdeviceptr hint,
                                       unsigned long long flags) {
  STARTED_OR_RETURN(stand_in);
  if (pointer == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto made = stand_in->simulator->Reserve(bytes, alignment, At(hint), flags);
  if (made.ok()) *pointer = made->value;
  return Result(made.status());
}

CUDA_CALL CUresult cuMemAddressFree(CUdeviceptr pointer, std::size_t bytes) {
  STARTED_OR_RETURN(stand_in);
  if (amem::stand_in::LegacyAt(*stand_in, pointer, nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return Result(stand_in->simulator->FreeRange(At(pointer), bytes));
}

CUDA_CALL CUresult cuMemMap(CUdeviceptr pointer, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                            unsigned long long flags) {
  STARTED_OR_RETURN(stand_in);
  const auto whole = stand_in->simulator->PropertiesOf(DriverHandle{handle});
  const auto granularity = whole.ok() ? stand_in->simulator->Granularity(*whole) : amem::Result<amem::Bytes>(whole.status());
  if (granularity.ok() && offset == 0 && bytes % *granularity != 0) return CUDA_ERROR_NOT_SUPPORTED;  // as measured
  return Result(stand_in->simulator->Map(At(pointer), bytes, offset, DriverHandle{handle}, flags));
}

CUDA_CALL CUresult cuMemUnmap(CUdeviceptr pointer, std::size_t bytes) {
  STARTED_OR_RETURN(stand_in);
  if (const char* fault = std::getenv("STAND_IN_FAULT"); fault != nullptr && std::strcmp(fault, "hang-unmap") == 0)
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  if (amem::stand_in::LegacyAt(*stand_in, pointer, nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return Result(stand_in->simulator->Unmap(At(pointer), bytes));
}

CUDA_CALL CUresult cuMemSetAccess(CUdeviceptr pointer, std::size_t bytes, const CUmemAccessDesc* access, std::size_t count) {
  STARTED_OR_RETURN(stand_in);
  if (access == nullptr || amem::stand_in::LegacyAt(*stand_in, pointer, nullptr)) return CUDA_ERROR_INVALID_VALUE;
  std::vector<amem::AccessDescriptor> list;
  for (std::size_t i = 0; i < count; ++i) {
    list.push_back({{static_cast<LocationType>(access[i].location.type), access[i].location.id},
                    static_cast<std::uint32_t>(access[i].flags)});
  }
  return Result(stand_in->simulator->SetAccess(At(pointer), bytes, list));
}

CUDA_CALL CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr pointer) {
  STARTED_OR_RETURN(stand_in);
  if (flags == nullptr || location == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const bool legacy = amem::stand_in::LegacyAt(*stand_in, pointer, nullptr);  // of which the driver names no access
  const auto mapping = stand_in->simulator->MappingAt(At(pointer));
  if (!legacy && !mapping.ok()) return CUDA_ERROR_INVALID_VALUE;
  *flags = 0;
  if (legacy) return CUDA_SUCCESS;
  for (const amem::AccessDescriptor& one : mapping->access) {
    if (one.location == amem::Location{static_cast<LocationType>(location->type), location->id}) *flags = one.flags;
  }
  return CUDA_SUCCESS;
}

namespace {

struct FabricHandle {
  pid_t process;
  int descriptor;
  char unused[56];
};
static_assert(sizeof(FabricHandle) == CU_IPC_HANDLE_SIZE);

bool IsDescriptorOrFabric(CUmemAllocationHandleType type) {
  return type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || type == CU_MEM_HANDLE_TYPE_FABRIC;
}
int OpenFabric(const void* shareable) {
  const auto* handle = static_cast<const FabricHandle*>(shareable);
  const std::string path = "/proc/" + std::to_string(handle->process) + "/fd/" + std::to_string(handle->descriptor);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

}  // namespace

CUDA_CALL CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                                CUmemAllocationHandleType type, unsigned long long flags) {
  STARTED_OR_RETURN(stand_in);
  if (shareable == nullptr || !IsDescriptorOrFabric(type) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  auto descriptor = stand_in->simulator->ExportAs(DriverHandle{handle}, static_cast<std::uint32_t>(type));
  if (descriptor.ok() && type == CU_MEM_HANDLE_TYPE_FABRIC)
    new (shareable) FabricHandle{getpid(), descriptor->Release(), {}};  // stays open
  else if (descriptor.ok())
    *static_cast<int*>(shareable) = descriptor->Release();
  return Result(descriptor.status());
}

CUDA_CALL CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                                  CUmemAllocationHandleType type) {
  STARTED_OR_RETURN(stand_in);
  if (handle == nullptr || !IsDescriptorOrFabric(type)) return CUDA_ERROR_INVALID_VALUE;
  const bool fabric = type == CU_MEM_HANDLE_TYPE_FABRIC;
  amem::UniqueFd descriptor(fabric ? OpenFabric(shareable) : static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)));
  const auto imported = stand_in->simulator->Import(descriptor);
  if (!fabric) static_cast<void>(descriptor.Release());  // is the caller's
  if (imported.ok()) *handle = imported->value;
  return Result(imported.status());
}

CUDA_CALL CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  STARTED_OR_RETURN(stand_in);
  if (amem::stand_in::LegacyAt(*stand_in, reinterpret_cast<CUdeviceptr>(address), nullptr)) return CUDA_ERROR_INVALID_VALUE;
  const auto retained = stand_in->simulator->Retain(Address{reinterpret_cast<std::uint64_t>(address)});
  if (retained.ok()) *handle = retained->value;
  return Result(retained.status());
}

CUDA_CALL CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle) {
  STARTED_OR_RETURN(stand_in);
  const auto properties = stand_in->simulator->PropertiesOf(DriverHandle{handle});
  if (properties.ok()) *prop = amem::stand_in::ToCuda(*properties);
  return Result(properties.status());
}

CUDA_CALL CUresult cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* prop,
                                                 CUmemAllocationGranularity_flags) {
  STARTED_OR_RETURN(stand_in);
  if (granularity == nullptr || prop == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto found = stand_in->simulator->Granularity(amem::stand_in::FromCuda(*prop));
  if (found.ok()) *granularity = *found;
  return Result(found.status());
}

CUDA_CALL CUresult cuMemGetHandleForAddressRange(void* handle, CUdeviceptr pointer, std::size_t bytes,
                                                 CUmemRangeHandleType type, unsigned long long) {
  STARTED_OR_RETURN(stand_in);
  constexpr std::size_t kPage = 4096;
  if (handle == nullptr || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || (pointer | bytes) % kPage != 0)
    return CUDA_ERROR_INVALID_VALUE;
  const auto retained = stand_in->simulator->Retain(At(pointer));
  if (!retained.ok()) return Result(retained.status());
  auto descriptor = stand_in->simulator->Export(*retained);
  static_cast<void>(stand_in->simulator->Release(*retained));
  if (descriptor.ok()) *static_cast<int*>(handle) = descriptor->Release();
  return Result(descriptor.status());
}

// ---- multicast: stores to an object do not reach the memory that is bound to it; the rest is as simulator.h says
// --------------

CUDA_CALL CUresult cuMulticastCreate(CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp* prop) {
  STARTED_OR_RETURN(stand_in);
  if (handle == nullptr || prop == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto made = stand_in->simulator->CreateMulticast(
      {prop->size, prop->numDevices, static_cast<std::uint32_t>(prop->handleTypes), prop->flags});
  if (made.ok()) *handle = made->value;
  return Result(made.status());
}

CUDA_CALL CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  STARTED_OR_RETURN(stand_in);
  return Result(stand_in->simulator->AddDevice(DriverHandle{handle}, DeviceOrdinal{device}));
}

CUDA_CALL CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, std::size_t offset,
                                      CUmemGenericAllocationHandle memory, std::size_t memory_offset, std::size_t bytes,
                                      unsigned long long flags) {
  STARTED_OR_RETURN(stand_in);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return Result(stand_in->simulator->BindMemory(DriverHandle{handle}, offset, DriverHandle{memory}, memory_offset, bytes));
}

CUDA_CALL CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, std::size_t offset, CUdeviceptr pointer,
                                       std::size_t bytes, unsigned long long flags) {
  STARTED_OR_RETURN(stand_in);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return Result(stand_in->simulator->BindAddress(DriverHandle{handle}, offset, At(pointer), bytes));
}

CUDA_CALL CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, std::size_t offset,
                                     std::size_t bytes) {
  STARTED_OR_RETURN(stand_in);
  return Result(stand_in->simulator->Unbind(DriverHandle{handle}, DeviceOrdinal{device}, offset, bytes));
}

// The recommended granularity is larger than the least, as on hardware.
CUDA_CALL CUresult cuMulticastGetGranularity(std::size_t* granularity, const CUmulticastObjectProp* prop,
                                             CUmulticastGranularity_flags option) {
  STARTED_OR_RETURN(stand_in);
  if (granularity == nullptr || prop == nullptr || prop->numDevices == 0) return CUDA_ERROR_INVALID_VALUE;
  const auto found = stand_in->simulator->MulticastGranularity();
  if (found.ok()) *granularity = option == CU_MULTICAST_GRANULARITY_RECOMMENDED ? 4 * *found : *found;
  return Result(found.status());
}
