#include "ncclpatch/runtime/plain_memory.h"

#include <cuda.h>
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "ncclpatch/runtime/contexts.h"

namespace amem::plain_memory {
namespace {

struct Plain {
  std::mutex mutex;
  std::map<void*, CUcontext> taken;
};

Plain& ThePlain() {
  static auto* const plain = new Plain;  // never destroyed: tensors are freed at exit
  return *plain;
}

CUresult RetainPrimaryContext(int device, CUcontext& context) {  // for ever
  CUdevice handle = 0;
  CUresult result = AMEM_DRIVER(cuInit)(0);
  if (result == CUDA_SUCCESS) result = AMEM_DRIVER(cuDeviceGet)(&handle, device);
  return result == CUDA_SUCCESS ? AMEM_DRIVER(cuDevicePrimaryCtxRetain)(&context, handle) : result;
}

}  // namespace

Result<void*> Allocate(Bytes bytes, DeviceOrdinal device) {
  if (AMEM_DRIVER(cuInit) == nullptr)
    return Status{Code::kUnsupported, "allocate memory: libcuda.so.1 is not there; this host may have no GPU"};
  CUcontext context = nullptr;
  CUdeviceptr address = 0;
  CUresult result = RetainPrimaryContext(device.value, context);
  if (result == CUDA_SUCCESS)
    result = InContext(context, [&] { return AMEM_DRIVER(cuMemAlloc)(&address, std::max<Bytes>(bytes, 1)); });
  if (result != CUDA_SUCCESS)
    return Status{
        result == CUDA_ERROR_OUT_OF_MEMORY ? Code::kOutOfMemory : Code::kDriver,
        fmt::format("cuMemAlloc {} bytes on device {}: the driver answered {}", bytes, device.value, static_cast<int>(result)),
        static_cast<int>(result)};
  void* const memory = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  Plain& plain = ThePlain();
  const std::lock_guard lock(plain.mutex);
  plain.taken[memory] = context;
  return memory;
}

bool Free(void* address) {
  CUcontext context = nullptr;
  {
    Plain& plain = ThePlain();
    const std::lock_guard lock(plain.mutex);
    const auto found = plain.taken.find(address);
    if (found == plain.taken.end()) return false;
    context = found->second;
    plain.taken.erase(found);
  }
  InContext(context, [&] { return AMEM_DRIVER(cuMemFree)(reinterpret_cast<CUdeviceptr>(address)); });
  return true;
}

}  // namespace amem::plain_memory
