// Calls around memory that are made less often, and the CUDA runtime's, where there is one.
#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <string>

#include "tests/gpu/walk/walk.h"

namespace amem::walk {
namespace {

void Fills(CUdeviceptr memory, std::size_t bytes) {
  SAY("fill D16", CALL(cuMemsetD16, memory, 0x1234, bytes / 2));
  SAY("fill D32", CALL(cuMemsetD32, memory, 0x12345678, bytes / 4));
  SAY("fill D8 in a stream", CALL(cuMemsetD8Async, memory, 5, bytes, nullptr));
  SAY("fill D32 in a stream", CALL(cuMemsetD32Async, memory, 5, bytes / 4, nullptr));
  SAY("fill rows", CALL(cuMemsetD2D8, memory, 1024, 7, 512, 4));
  SAY("cuStreamSynchronize", CALL(cuStreamSynchronize, nullptr));
}

void Copies(CUdeviceptr memory, CUdeviceptr other, std::size_t bytes) {
  std::array<unsigned char, 4096> host{};
  SAY("copy to it", CALL(cuMemcpyHtoD, memory, host.data(), host.size()));
  SAY("copy to it in a stream", CALL(cuMemcpyHtoDAsync, memory, host.data(), host.size(), nullptr));
  SAY("copy from it in a stream", CALL(cuMemcpyDtoHAsync, host.data(), memory, host.size(), nullptr));
  SAY("copy within the device", CALL(cuMemcpyDtoDAsync, memory, other, bytes, nullptr));
  SAY("copy across its end", CALL(cuMemcpyHtoD, memory + bytes + (std::size_t{4} << 20), host.data(), host.size()));
  SAY("copy as unified in a stream", CALL(cuMemcpyAsync, memory, other, bytes, nullptr));
  CUDA_MEMCPY2D plane{};
  plane.srcMemoryType = plane.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  plane.srcDevice = other;
  plane.dstDevice = memory;
  plane.srcPitch = plane.dstPitch = 1024;
  plane.WidthInBytes = 512;
  plane.Height = 4;
  SAY("copy rows", CALL(cuMemcpy2D, &plane));
  SAY("copy rows in a stream", CALL(cuMemcpy2DAsync, &plane, nullptr));
  CUcontext context = nullptr;
  CALL(cuCtxGetCurrent, &context);
  SAY("copy between contexts", CALL(cuMemcpyPeer, memory, context, other, context, bytes));
  // As of CUDA 13.0: several at once.
  CUdeviceptr to[] = {memory, memory + 8192}, from[] = {other, other + 8192};
  std::size_t sizes[] = {4096, 4096}, first[] = {0};
  CUmemcpyAttributes how{};
  how.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  CUstream stream = nullptr;
  SAY("cuStreamCreate", CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
  SAY("copy a batch", CALL(cuMemcpyBatchAsync, to, from, sizes, 2, &how, first, 1, stream));
  SAY("cuStreamSynchronize", CALL(cuStreamSynchronize, stream));
  SAY("cuStreamDestroy", CALL(cuStreamDestroy, stream));
}

void Others(CUdeviceptr memory, std::size_t bytes) {
  int descriptor = -1;
  const CUresult made =
      CALL(cuMemGetHandleForAddressRange, &descriptor, memory, 2 * kMiB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  SAY("dma-buf", made, descriptor >= 0 ? "a descriptor" : "none");
  if (made == CUDA_SUCCESS) close(descriptor);
  SAY("dma-buf of an odd part",
      CALL(cuMemGetHandleForAddressRange, &descriptor, memory + 1, 100, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
  const CUmemLocation here{CU_MEM_LOCATION_TYPE_DEVICE, 0};
  SAY("advise", CALL(cuMemAdvise, memory, bytes, CU_MEM_ADVISE_SET_READ_MOSTLY, here));
  SAY("prefetch", CALL(cuMemPrefetchAsync, memory, bytes, here, 0, nullptr));
  int read_mostly = 0;
  SAY("range attribute",
      CALL(cuMemRangeGetAttribute, &read_mostly, sizeof read_mostly, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, bytes));
  void* mapped = nullptr;
  CUdeviceptr of_host = 0;
  SAY("page-locked memory", CALL(cuMemHostAlloc, &mapped, 4096, CU_MEMHOSTALLOC_PORTABLE));
  SAY("its device pointer", CALL(cuMemHostGetDevicePointer, &of_host, mapped, 0));
  SAY("free as device memory", CALL(cuMemFree, Number(mapped)));
  SAY("free it", CALL(cuMemFreeHost, mapped));
  SAY("free device memory as page-locked", CALL(cuMemFreeHost, Pointer(memory)));
  CUdeviceptr managed = 0;
  const CUresult took = CALL(cuMemAllocManaged, &managed, 4 * kMiB, CU_MEM_ATTACH_GLOBAL);
  SAY("managed memory", took);
  if (took == CUDA_SUCCESS) {
    SAY("fill it", CALL(cuMemsetD8, managed, 1, 4 * kMiB));
    SAY("free it", CALL(cuMemFree, managed));
  }
  CUmemoryPool pool = nullptr;
  CUdevice device = 0;
  // As all before CUDA 13 have it, which takes another argument.
  auto* const device_of = reinterpret_cast<CUresult (*)(CUdevice*)>(Driver::OfVersion("cuCtxGetDevice", 3020));
  SAY("cuCtxGetDevice", device_of(&device), std::to_string(device));
  SAY("default pool", CALL(cuDeviceGetDefaultMemPool, &pool, device));
  SAY("write a value", CALL(cuStreamWriteValue32, nullptr, memory, 7, 0));
  SAY("wait for a value", CALL(cuStreamWaitValue32, nullptr, memory, 7, CU_STREAM_WAIT_VALUE_EQ));
}

template <class F>
F* Of(void* library, const char* name) {
  return reinterpret_cast<F*>(dlsym(library, name));
}
CUresult AsResult(int result) { return static_cast<CUresult>(result); }

}  // namespace

void More() {
  for (const std::size_t bytes : {std::size_t{65536}, 8 * kMiB}) {
    Chapter("of " + std::to_string(bytes));
    CUdeviceptr memory = 0, other = 0;
    SAY("cuMemAlloc", CALL(cuMemAlloc, &memory, bytes));
    SAY("cuMemAlloc", CALL(cuMemAlloc, &other, bytes));
    Fills(memory, bytes);
    Copies(memory, other, bytes);
    Others(memory, bytes);
    SAY("cuMemFree", CALL(cuMemFree, memory));
    SAY("cuMemFree", CALL(cuMemFree, other));
  }
}

// The runtime gets the driver's functions by itself.
void ByRuntime() {
  Chapter("runtime");
  void* runtime = nullptr;
  for (const char* name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so"})
    if (runtime == nullptr) runtime = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  SayText(runtime == nullptr ? "there is none" : "there is one");
  if (runtime == nullptr) return;
  auto* const alloc = Of<int(void**, std::size_t)>(runtime, "cudaMalloc");
  auto* const free = Of<int(void*)>(runtime, "cudaFree");
  auto* const get = Of<int(CUipcMemHandle*, void*)>(runtime, "cudaIpcGetMemHandle");
  auto* const open = Of<int(void**, CUipcMemHandle, unsigned)>(runtime, "cudaIpcOpenMemHandle");
  auto* const close_handle = Of<int(void*)>(runtime, "cudaIpcCloseMemHandle");
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{100}, kMiB, 2 * kMiB, 20 * kMiB, std::size_t{0} - 5}) {
    void* memory = nullptr;
    const int made = alloc(&memory, bytes);
    SAY("cudaMalloc " + std::to_string(bytes), AsResult(made));
    if (made != 0 || memory == nullptr) continue;
    Know("c", Number(memory), bytes);
    SayRange(std::to_string(bytes), Number(memory) + bytes / 2);
    CUipcMemHandle handle{};
    void* own = nullptr;
    SAY("cudaIpcGetMemHandle", AsResult(get(&handle, memory)));
    SAY("cudaIpcOpenMemHandle here", AsResult(open(&own, handle, 1)));
    SAY("cudaIpcCloseMemHandle", AsResult(close_handle(memory)));
    SAY("cudaFree", AsResult(free(memory)));
    SAY("cudaFree twice", AsResult(free(memory)));
    Forget(Number(memory));
  }
  SAY("cudaFree of null", AsResult(free(nullptr)));
}

}  // namespace amem::walk
