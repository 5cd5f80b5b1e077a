// The driver, reached as NCCL reaches it, and buffers in NCCL's order of calls.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tests/stand_ins/nccl/nccl.h"

namespace stand_in {

namespace {

Result LoadDriver(Driver& driver) {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (library == nullptr) {
    std::fprintf(stderr, "stand-in NCCL: %s\n", dlerror());
    return kSystem;
  }
  const auto get = reinterpret_cast<decltype(&cuGetProcAddress)>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) return kSystem;
  bool complete = true;
  const auto bind = [&](const char* name, auto& function, int version = 12000) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status{};
    complete = get(name, &found, version, CU_GET_PROC_ADDRESS_DEFAULT, &status) == CUDA_SUCCESS && found != nullptr && complete;
    if (found == nullptr) std::fprintf(stderr, "stand-in NCCL: the driver has no %s\n", name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  bind("cuMemCreate", driver.create);
  bind("cuMemRelease", driver.release);
  bind("cuMemAddressReserve", driver.reserve);
  bind("cuMemAddressFree", driver.free_range);
  bind("cuMemMap", driver.map);
  bind("cuMemUnmap", driver.unmap);
  bind("cuMemSetAccess", driver.access);
  bind("cuMemExportToShareableHandle", driver.export_handle);
  bind("cuMemImportFromShareableHandle", driver.import_handle);
  bind("cuMemRetainAllocationHandle", driver.retain);
  bind("cuMemGetAddressRange", driver.range);
  bind("cuMemGetHandleForAddressRange", driver.range_handle);
  bind("cuPointerGetAttribute", driver.about);
  bind("cuMemGetAllocationGranularity", driver.granularity);
  bind("cuMemAlloc", driver.alloc);
  bind("cuMemFree", driver.free);
  bind("cuIpcGetMemHandle", driver.ipc_get);
  bind("cuIpcOpenMemHandle", driver.ipc_open);
  bind("cuIpcCloseMemHandle", driver.ipc_close);
  bind("cuCtxGetDevice", driver.device);
  bind("cuCtxGetCurrent", driver.context);
  bind("cuCtxSetCurrent", driver.set_context);
  bind("cuLaunchKernel", driver.launch);
  bind("cuMemsetD8Async", driver.clear);
  bind("cuStreamIsCapturing", driver.capturing);
  if (std::getenv("STAND_IN_NVLS") != nullptr) {
    bind("cuMulticastCreate", driver.multicast_create);
    bind("cuMulticastAddDevice", driver.multicast_add);
    bind("cuMulticastBindMem", driver.multicast_bind);
    bind("cuMulticastUnbind", driver.multicast_unbind);
  }
  return complete ? kSuccess : kSystem;
}

}  // namespace

Driver* TheDriver() {
  static Driver driver{};
  static const Result loaded = LoadDriver(driver);
  return loaded == kSuccess ? &driver : nullptr;
}

Result Check(const char* what, CUresult result) {
  if (result == CUDA_SUCCESS) return kSuccess;
  std::fprintf(stderr, "stand-in NCCL: %s answered %d\n", what, static_cast<int>(result));
  return kUnhandledCuda;
}

bool Legacy() {
  const char* text = std::getenv("NCCL_CUMEM_ENABLE");
  return text != nullptr && std::strcmp(text, "0") == 0;
}

Result MapAt(Driver& cu, CUdevice device, CUmemGenericAllocationHandle handle, size_t bytes, size_t alignment,
             CUdeviceptr& address) {
  CU(cu.reserve(&address, bytes, alignment, 0, 0));
  return MapThere(cu, device, handle, bytes, address);
}

Result MapThere(Driver& cu, CUdevice device, CUmemGenericAllocationHandle handle, size_t bytes, CUdeviceptr address) {
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CU(cu.map(address, bytes, 0, handle, 0));
  CU(cu.access(address, bytes, &access, 1));
  return kSuccess;
}

Result Create(Driver& cu, CUdevice device, size_t bytes, CUmemGenericAllocationHandle& handle) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  CU(cu.create(&handle, bytes, &properties, 0));
  return kSuccess;
}

Result Allocate(Driver& cu, CUdevice device, size_t bytes, Buffer& buffer) {
  buffer.bytes = bytes;
  if (Legacy()) {
    CU(cu.alloc(&buffer.address, bytes));
    return kSuccess;
  }
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  size_t granularity = 0;
  CU(cu.granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  buffer.bytes = (bytes + granularity - 1) / granularity * granularity;
  CUmemGenericAllocationHandle handle = 0;
  CU(cu.create(&handle, buffer.bytes, &properties, 0));
  return MapAt(cu, device, handle, buffer.bytes, granularity, buffer.address);
}

Result Free(Driver& cu, Buffer& buffer) {
  if (buffer.address == 0) return kSuccess;
  const CUdeviceptr address = std::exchange(buffer.address, 0);
  if (Legacy()) {
    if (buffer.imported) {
      CU(cu.ipc_close(address));
    } else {
      CU(cu.free(address));
    }
    return kSuccess;
  }
  CUmemGenericAllocationHandle handle = 0;
  size_t bytes = 0;
  CU(cu.retain(&handle, reinterpret_cast<void*>(address)));
  CU(cu.release(handle));
  CU(cu.range(nullptr, &bytes, address));
  CU(cu.unmap(address, bytes));
  CU(cu.release(handle));
  CU(cu.free_range(address, bytes));
  return kSuccess;
}

// Memory that other hosts may import.
EXPORT int stand_in_nccl_share_by_fabric() {
  Driver* cu = TheDriver();
  if (cu == nullptr) return kSystem;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  CUmemGenericAllocationHandle handle = 0;
  unsigned char fabric[64];
  CU(cu->create(&handle, size_t{2} << 20, &properties, 0));
  CU(cu->export_handle(fabric, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0));
  return kSuccess;
}

}  // namespace stand_in
