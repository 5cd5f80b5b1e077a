// libone_shot.so, a library that shares device memory between ranks and is no NCCL: memory of cudaMalloc by cudaIpc, as the
// custom all-reduce of inference engines, and memory of cuMemCreate by descriptors, as PyTorch's symmetric memory, whose driver
// functions come from the runtime's cudaGetDriverEntryPoint. It imports the runtime, and nothing of libcuda.
//
// one_shot_share gives what another rank needs: 64 bytes. A descriptor is sent by the name that it has in /proc.
#include <cuda.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "tests/stand_ins/sharing/runtime.h"

#define ONE_SHOT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kBytes = size_t{4} << 20;

template <class F>
F* Driver(const char* name) {
  void* found = nullptr;
  return cudaGetDriverEntryPoint(name, &found, 0, nullptr) == 0 ? reinterpret_cast<F*>(found) : nullptr;
}

struct Shared {
  unsigned char* memory = nullptr;
  bool imported = false, by_handle = false;
  CUmemGenericAllocationHandle handle = 0;
  int descriptor = -1;
} g_shared;

int MapHandle(int device) {
  CUdeviceptr address = 0;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  int result = Driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve")(&address, kBytes, 0, 0, 0);
  if (result == 0) result = Driver<decltype(cuMemMap)>("cuMemMap")(address, kBytes, 0, g_shared.handle, 0);
  if (result == 0) result = Driver<decltype(cuMemSetAccess)>("cuMemSetAccess")(address, kBytes, &access, 1);
  g_shared.memory = reinterpret_cast<unsigned char*>(address);
  return result;
}

}  // namespace

ONE_SHOT int one_shot_share(int device, int by_handle, CUipcMemHandle* token) {
  g_shared = {};
  g_shared.by_handle = by_handle != 0;
  if (by_handle == 0) {
    void* memory = nullptr;
    if (const int result = cudaMalloc(&memory, kBytes); result != 0) return result;
    g_shared.memory = static_cast<unsigned char*>(memory);
    return cudaIpcGetMemHandle(token, memory);
  }
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  int result = Driver<decltype(cuMemCreate)>("cuMemCreate")(&g_shared.handle, kBytes, &properties, 0);
  if (result == 0) result = MapHandle(device);
  if (result == 0)
    result = Driver<decltype(cuMemExportToShareableHandle)>("cuMemExportToShareableHandle")(
        &g_shared.descriptor, g_shared.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  std::snprintf(token->reserved, sizeof token->reserved, "/proc/%d/fd/%d", getpid(), g_shared.descriptor);
  return result;
}

ONE_SHOT int one_shot_open(int device, int by_handle, const CUipcMemHandle* token) {
  g_shared = {};
  g_shared.imported = true;
  g_shared.by_handle = by_handle != 0;
  if (by_handle == 0) {
    void* memory = nullptr;
    const int result = cudaIpcOpenMemHandle(&memory, *token, 1);
    g_shared.memory = static_cast<unsigned char*>(memory);
    return result;
  }
  const int descriptor = open(token->reserved, O_RDWR | O_CLOEXEC);
  int result = Driver<decltype(cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle")(
      &g_shared.handle, reinterpret_cast<void*>(static_cast<std::int64_t>(descriptor)),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  close(descriptor);
  return result != 0 ? result : MapHandle(device);
}

// The exporter closes its descriptor when the others have opened it.
ONE_SHOT int one_shot_all_have_it() { return g_shared.descriptor < 0 ? 0 : close(g_shared.descriptor); }

ONE_SHOT unsigned char* one_shot_memory(size_t* bytes) {
  *bytes = kBytes;
  return g_shared.memory;
}

ONE_SHOT int one_shot_free() {
  if (!g_shared.by_handle) return g_shared.imported ? cudaIpcCloseMemHandle(g_shared.memory) : cudaFree(g_shared.memory);
  const auto address = reinterpret_cast<CUdeviceptr>(g_shared.memory);
  int result = Driver<decltype(cuMemRelease)>("cuMemRelease")(g_shared.handle);
  if (result == 0) result = Driver<decltype(cuMemUnmap)>("cuMemUnmap")(address, kBytes);
  if (result == 0) result = Driver<decltype(cuMemAddressFree)>("cuMemAddressFree")(address, kBytes);
  return result;
}
