// A libcuda.so.1 of host memory, just enough for the GPU programs to run where there is no GPU: so that their processes,
// barriers, checks and reports are tested before anybody pays for a GPU. It enforces nothing; the simulator does that.
//
// AMEM_FAKE_GPUS devices (default 4). Memory in use is counted for all processes of a job in the file AMEM_FAKE_STATE.
#include <cuda.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr std::int64_t kDeviceBytes = std::int64_t{64} << 30;

std::atomic<std::int64_t>* Used() {
  static std::atomic<std::int64_t>* const used = [] {
    const char* path = getenv("AMEM_FAKE_STATE");
    const int fd = path != nullptr ? open(path, O_RDWR | O_CREAT, 0600) : memfd_create("amem-fake", 0);
    if (fd < 0 || ftruncate(fd, 4096) != 0) abort();
    return static_cast<std::atomic<std::int64_t>*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  }();
  return used;
}

thread_local int current_device = -1;

struct Handle {
  int fd;
  std::size_t bytes;
  int device;
  bool own;
};

std::mutex mutex;
std::map<CUdeviceptr, std::size_t> allocated;

int Devices() {
  const char* text = getenv("AMEM_FAKE_GPUS");
  return text != nullptr ? atoi(text) : 4;
}

}  // namespace

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int* count) {
  *count = Devices();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal < Devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORT CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  strncpy(name, "stand-in GPU", static_cast<std::size_t>(size));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult result, const char** name) {
  *name = result == CUDA_SUCCESS ? "CUDA_SUCCESS" : "CUDA_ERROR_OF_THE_STAND_IN";
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<std::intptr_t>(device) + 1);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  current_device = static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device;
  return current_device >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
EXPORT CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }
EXPORT CUresult cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total) {
  if (current_device < 0) return CUDA_ERROR_INVALID_CONTEXT;
  *total = static_cast<std::size_t>(kDeviceBytes);
  *free_bytes = static_cast<std::size_t>(kDeviceBytes - Used()[current_device].load());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || current_device < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(memory);
  Used()[current_device].fetch_add(static_cast<std::int64_t>(bytes));
  const std::lock_guard lock(mutex);
  allocated[*address] = bytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
  const std::lock_guard lock(mutex);
  const auto found = allocated.find(address);
  if (found == allocated.end()) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(address), found->second);
  Used()[current_device].fetch_sub(static_cast<std::int64_t>(found->second));
  allocated.erase(found);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
  *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return *memory == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
EXPORT CUresult cuMemFreeHost(void*) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t bytes, CUstream) {
  memcpy(reinterpret_cast<void*>(to), from, bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes, CUstream) {
  memcpy(to, reinterpret_cast<void*>(from), bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream) {
  memset(reinterpret_cast<void*>(to), value, bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned) {
  *stream = reinterpret_cast<CUstream>(1);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamDestroy_v2(CUstream) { return CUDA_SUCCESS; }
EXPORT CUresult cuStreamQuery(CUstream) {
  // A collective that never ends, for the test of the deadline.
  const char* fault = getenv("AMEM_FAKE_FAULT");
  return fault != nullptr && strcmp(fault, "hang") == 0 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* out, std::size_t bytes, const CUmemAllocationProp* properties,
                            unsigned long long) {
  const int fd = memfd_create("amem-fake-memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = reinterpret_cast<CUmemGenericAllocationHandle>(new Handle{fd, bytes, properties->location.id, true});
  Used()[properties->location.id].fetch_add(static_cast<std::int64_t>(bytes));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  auto* memory = reinterpret_cast<Handle*>(handle);
  if (memory->own) Used()[memory->device].fetch_sub(static_cast<std::int64_t>(memory->bytes));
  close(memory->fd);
  delete memory;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = reinterpret_cast<CUdeviceptr>(range);
  return range == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr address, std::size_t bytes) {
  return munmap(reinterpret_cast<void*>(address), bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemMap(CUdeviceptr address, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long) {
  const void* at = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                        reinterpret_cast<Handle*>(handle)->fd, static_cast<off_t>(offset));
  return at == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  const void* at =
      mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return at == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc*, std::size_t) {
  return mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS
                                                                                        : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                                             unsigned long long) {
  const int copy = dup(reinterpret_cast<Handle*>(handle)->fd);
  memcpy(out, &copy, sizeof copy);
  return copy >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}
EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* os_handle, CUmemAllocationHandleType) {
  const int copy = dup(static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle)));
  struct stat about {};
  if (copy < 0 || fstat(copy, &about) != 0) return CUDA_ERROR_INVALID_VALUE;
  *out = reinterpret_cast<CUmemGenericAllocationHandle>(new Handle{copy, static_cast<std::size_t>(about.st_size), 0, false});
  return CUDA_SUCCESS;
}
