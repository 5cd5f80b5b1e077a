// A libcudart.so.13 that looks up the driver as the real one does: it opens libcuda.so.1, asks dlsym for cuGetProcAddress_v2,
// and gets every other function through that, at its first call. It has what the stand-in library that shares memory needs.
#include <cuda.h>
#include <dlfcn.h>

#define RUNTIME_CALL extern "C" __attribute__((visibility("default")))

namespace {

template <class F>
F* Driver(const char* name) {
  static const auto get = reinterpret_cast<decltype(cuGetProcAddress)*>(
      dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), "cuGetProcAddress_v2"));
  void* found = nullptr;
  CUdriverProcAddressQueryResult how{};
  return get(name, &found, 13000, 0, &how) == CUDA_SUCCESS ? reinterpret_cast<F*>(found) : nullptr;
}

CUdeviceptr At(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

}  // namespace

RUNTIME_CALL int cudaMalloc(void** pointer, size_t bytes) {
  static const auto allocate = Driver<decltype(cuMemAlloc)>("cuMemAlloc");
  if (bytes == 0) return *pointer = nullptr, 0;
  return allocate(reinterpret_cast<CUdeviceptr*>(pointer), bytes);
}
RUNTIME_CALL int cudaFree(void* pointer) {
  static const auto free = Driver<decltype(cuMemFree)>("cuMemFree");
  return free(At(pointer));
}
RUNTIME_CALL int cudaIpcGetMemHandle(CUipcMemHandle* handle, void* pointer) {
  static const auto get = Driver<decltype(cuIpcGetMemHandle)>("cuIpcGetMemHandle");
  return get(handle, At(pointer));
}
RUNTIME_CALL int cudaIpcOpenMemHandle(void** pointer, CUipcMemHandle handle, unsigned flags) {
  static const auto open = Driver<decltype(cuIpcOpenMemHandle)>("cuIpcOpenMemHandle");
  return open(reinterpret_cast<CUdeviceptr*>(pointer), handle, flags);
}
RUNTIME_CALL int cudaIpcCloseMemHandle(void* pointer) {
  static const auto close = Driver<decltype(cuIpcCloseMemHandle)>("cuIpcCloseMemHandle");
  return close(At(pointer));
}
RUNTIME_CALL int cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long, int*) {
  *function = reinterpret_cast<void*>(Driver<void()>(name));
  return *function == nullptr ? 1 : 0;
}
