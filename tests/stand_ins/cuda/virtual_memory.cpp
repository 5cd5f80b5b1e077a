// The VMM calls of the fake, and multicast objects on them.
#include "tests/stand_ins/cuda/fake.h"

using amem::Address;
using amem::DriverHandle;
using amem::LocationType;
using amem::fake::At;
using amem::fake::Multicast;
using amem::fake::Result;

FAKE_CUDA CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp* prop,
                               unsigned long long flags) {
  FAKE_OR_RETURN(fake);
  if (handle == nullptr || prop == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto made = fake->simulator->Create(bytes, amem::fake::FromCuda(*prop), flags);
  if (made.ok()) *handle = made->value;
  return Result(made.status());
}

FAKE_CUDA CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  FAKE_OR_RETURN(fake);
  return Result(fake->simulator->Release(DriverHandle{handle}));
}

FAKE_CUDA CUresult cuMemAddressReserve(CUdeviceptr* pointer, std::size_t bytes, std::size_t alignment, CUdeviceptr hint,
                                       unsigned long long flags) {
  FAKE_OR_RETURN(fake);
  if (pointer == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto made = fake->simulator->Reserve(bytes, alignment, At(hint), flags);
  if (made.ok()) *pointer = made->value;
  return Result(made.status());
}

FAKE_CUDA CUresult cuMemAddressFree(CUdeviceptr pointer, std::size_t bytes) {
  FAKE_OR_RETURN(fake);
  return Result(fake->simulator->FreeRange(At(pointer), bytes));
}

FAKE_CUDA CUresult cuMemMap(CUdeviceptr pointer, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                            unsigned long long flags) {
  FAKE_OR_RETURN(fake);
  return Result(fake->simulator->Map(At(pointer), bytes, offset, DriverHandle{handle}, flags));
}

FAKE_CUDA CUresult cuMemUnmap(CUdeviceptr pointer, std::size_t bytes) {
  FAKE_OR_RETURN(fake);
  return Result(fake->simulator->Unmap(At(pointer), bytes));
}

FAKE_CUDA CUresult cuMemSetAccess(CUdeviceptr pointer, std::size_t bytes, const CUmemAccessDesc* access, std::size_t count) {
  FAKE_OR_RETURN(fake);
  if (access == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::vector<amem::AccessDescriptor> list;
  for (std::size_t i = 0; i < count; ++i) {
    list.push_back({{static_cast<LocationType>(access[i].location.type), access[i].location.id},
                    static_cast<std::uint32_t>(access[i].flags)});
  }
  return Result(fake->simulator->SetAccess(At(pointer), bytes, list));
}

FAKE_CUDA CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr pointer) {
  FAKE_OR_RETURN(fake);
  const auto mapping = fake->simulator->MappingAt(At(pointer));
  if (!mapping.ok()) return CUDA_ERROR_INVALID_VALUE;
  *flags = 0;
  for (const amem::AccessDescriptor& one : mapping->access) {
    if (one.location == amem::Location{static_cast<LocationType>(location->type), location->id}) *flags = one.flags;
  }
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                                CUmemAllocationHandleType type, unsigned long long flags) {
  FAKE_OR_RETURN(fake);
  if (shareable == nullptr || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  auto descriptor = fake->simulator->Export(DriverHandle{handle});
  if (descriptor.ok()) *static_cast<int*>(shareable) = descriptor->Release();
  return Result(descriptor.status());
}

FAKE_CUDA CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                                  CUmemAllocationHandleType type) {
  FAKE_OR_RETURN(fake);
  if (handle == nullptr || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  amem::UniqueFd borrowed(static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)));
  const auto imported = fake->simulator->Import(borrowed);
  static_cast<void>(borrowed.Release());
  if (imported.ok()) *handle = imported->value;
  return Result(imported.status());
}

FAKE_CUDA CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  FAKE_OR_RETURN(fake);
  const auto retained = fake->simulator->Retain(Address{reinterpret_cast<std::uint64_t>(address)});
  if (retained.ok()) *handle = retained->value;
  return Result(retained.status());
}

FAKE_CUDA CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle) {
  FAKE_OR_RETURN(fake);
  const auto properties = fake->simulator->PropertiesOf(DriverHandle{handle});
  if (properties.ok()) *prop = amem::fake::ToCuda(*properties);
  return Result(properties.status());
}

FAKE_CUDA CUresult cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* prop,
                                                 CUmemAllocationGranularity_flags) {
  FAKE_OR_RETURN(fake);
  if (granularity == nullptr || prop == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto found = fake->simulator->Granularity(amem::fake::FromCuda(*prop));
  if (found.ok()) *granularity = *found;
  return Result(found.status());
}

FAKE_CUDA CUresult cuMemGetHandleForAddressRange(void* handle, CUdeviceptr pointer, std::size_t, CUmemRangeHandleType type,
                                                 unsigned long long) {
  FAKE_OR_RETURN(fake);
  if (handle == nullptr || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD) return CUDA_ERROR_INVALID_VALUE;
  const auto retained = fake->simulator->Retain(At(pointer));
  if (!retained.ok()) return Result(retained.status());
  auto descriptor = fake->simulator->Export(*retained);
  static_cast<void>(fake->simulator->Release(*retained));
  if (descriptor.ok()) *static_cast<int*>(handle) = descriptor->Release();
  return Result(descriptor.status());
}

// ---- multicast: bookkeeping only; what is written to the object does not reach what is bound to it -------------------------

namespace {

// The object behind a handle of this process; null: it is no multicast object. With the fake's mutex held.
Multicast* FindMulticast(amem::fake::Fake& fake, CUmemGenericAllocationHandle handle) {
  const auto properties = fake.simulator->PropertiesOf(DriverHandle{handle});
  if (!properties.ok() || properties->usage != amem::fake::kMulticastUsage) return nullptr;
  Multicast& multicast = fake.multicasts[handle];  // new here if it was imported
  multicast.devices = properties->reserved;
  return &multicast;
}

CUresult Bind(amem::fake::Fake& fake, CUmemGenericAllocationHandle handle, std::size_t offset, int device, std::size_t bytes) {
  const std::lock_guard lock(fake.mutex);
  Multicast* const multicast = FindMulticast(fake, handle);
  if (multicast == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (!multicast->added.contains(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (!multicast->bindings.emplace(std::pair{offset, device}, Multicast::Binding{bytes, device}).second) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

}  // namespace

FAKE_CUDA CUresult cuMulticastCreate(CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp* prop) {
  FAKE_OR_RETURN(fake);
  if (handle == nullptr || prop == nullptr || prop->numDevices == 0) return CUDA_ERROR_INVALID_VALUE;
  amem::AllocationProperties properties;
  properties.handle_types = static_cast<std::uint32_t>(prop->handleTypes);
  properties.location = {LocationType::kHost, 0};
  properties.usage = amem::fake::kMulticastUsage;
  properties.reserved = prop->numDevices;
  const auto made = fake->simulator->Create(prop->size, properties, 0);
  if (!made.ok()) return Result(made.status());
  *handle = made->value;
  const std::lock_guard lock(fake->mutex);
  fake->multicasts[*handle] = {.devices = prop->numDevices};
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  FAKE_OR_RETURN(fake);
  if (device < 0 || device >= fake->devices) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(fake->mutex);
  Multicast* const multicast = FindMulticast(*fake, handle);
  if (multicast == nullptr || multicast->added.size() >= multicast->devices) return CUDA_ERROR_INVALID_VALUE;
  return multicast->added.insert(device).second ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKE_CUDA CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, std::size_t offset,
                                      CUmemGenericAllocationHandle memory, std::size_t, std::size_t bytes, unsigned long long) {
  FAKE_OR_RETURN(fake);
  const auto properties = fake->simulator->PropertiesOf(DriverHandle{memory});
  if (!properties.ok()) return Result(properties.status());
  return Bind(*fake, handle, offset, properties->location.id, bytes);
}

FAKE_CUDA CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, std::size_t offset, CUdeviceptr pointer,
                                       std::size_t bytes, unsigned long long flags) {
  FAKE_OR_RETURN(fake);
  const auto retained = fake->simulator->Retain(At(pointer));
  if (!retained.ok()) return Result(retained.status());
  const CUresult result = cuMulticastBindMem(handle, offset, retained->value, 0, bytes, flags);
  static_cast<void>(fake->simulator->Release(*retained));
  return result;
}

FAKE_CUDA CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, std::size_t offset,
                                     std::size_t bytes) {
  FAKE_OR_RETURN(fake);
  const std::lock_guard lock(fake->mutex);
  Multicast* const multicast = FindMulticast(*fake, handle);
  if (multicast == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto at = multicast->bindings.find({offset, device});
  if (at == multicast->bindings.end() || at->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  multicast->bindings.erase(at);
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuMulticastGetGranularity(std::size_t* granularity, const CUmulticastObjectProp* prop,
                                             CUmulticastGranularity_flags) {
  FAKE_OR_RETURN(fake);
  if (granularity == nullptr || prop == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto found = fake->simulator->Granularity({.location = {LocationType::kDevice, 0}});
  if (found.ok()) *granularity = *found;
  return Result(found.status());
}
