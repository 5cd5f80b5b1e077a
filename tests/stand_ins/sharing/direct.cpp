// What one_shot.cpp needs of a runtime, by functions of the driver that the loader binds.
#include "tests/stand_ins/sharing/runtime.h"

namespace {
CUdeviceptr At(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }
}  // namespace

int cudaMalloc(void** pointer, size_t bytes) { return cuMemAlloc(reinterpret_cast<CUdeviceptr*>(pointer), bytes); }
int cudaFree(void* pointer) { return cuMemFree(At(pointer)); }
int cudaIpcGetMemHandle(CUipcMemHandle* handle, void* pointer) { return cuIpcGetMemHandle(handle, At(pointer)); }
int cudaIpcOpenMemHandle(void** pointer, CUipcMemHandle handle, unsigned flags) {
  return cuIpcOpenMemHandle(reinterpret_cast<CUdeviceptr*>(pointer), handle, flags);
}
int cudaIpcCloseMemHandle(void* pointer) { return cuIpcCloseMemHandle(At(pointer)); }
int cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long, int*) {
  CUdriverProcAddressQueryResult how{};
  return cuGetProcAddress(name, function, 13000, 0, &how);
}
