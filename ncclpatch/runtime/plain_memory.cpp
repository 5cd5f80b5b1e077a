#include "ncclpatch/runtime/plain_memory.h"

#include <cuda.h>
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "ncclpatch/hook/hook.h"

namespace amem::plain_memory {
namespace {

#define AMEM_PLAIN_CALLS(X)                                       \
  X(init, "cuInit", cuInit)                                       \
  X(get, "cuDeviceGet", cuDeviceGet)                              \
  X(retain, "cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain) \
  X(push, "cuCtxPushCurrent_v2", cuCtxPushCurrent)                \
  X(pop, "cuCtxPopCurrent_v2", cuCtxPopCurrent)                   \
  X(alloc, "cuMemAlloc_v2", cuMemAlloc)                           \
  X(free, "cuMemFree_v2", cuMemFree)

struct PlainDriver {
#define AMEM_PLAIN_MEMBER(member, name, type) decltype(&type) member = nullptr;
  AMEM_PLAIN_CALLS(AMEM_PLAIN_MEMBER)
  bool complete = false;
};

const PlainDriver& TheDriver() {
  static const PlainDriver driver = [] {
    PlainDriver found;
    found.complete = true;
#define AMEM_PLAIN_FIND(member, name, type)                                   \
  found.member = reinterpret_cast<decltype(&type)>(hook::DriverSymbol(name)); \
  found.complete = found.complete && found.member != nullptr;
    AMEM_PLAIN_CALLS(AMEM_PLAIN_FIND)
    return found;
  }();
  return driver;
}

struct Plain {
  std::mutex mutex;
  std::map<void*, CUcontext> taken;
};

Plain& ThePlain() {
  static auto* const plain = new Plain;  // never destroyed: tensors are freed at exit
  return *plain;
}

CUresult PrimaryContext(const PlainDriver& cu, int device, CUcontext& context) {  // retained for ever
  CUdevice handle = 0;
  CUresult result = cu.init(0);
  if (result == CUDA_SUCCESS) result = cu.get(&handle, device);
  return result == CUDA_SUCCESS ? cu.retain(&context, handle) : result;
}

template <class Body>
CUresult Within(const PlainDriver& cu, CUcontext context, const Body& body) {
  CUresult result = cu.push(context);
  if (result != CUDA_SUCCESS) return result;
  result = body();
  CUcontext popped = nullptr;
  cu.pop(&popped);
  return result;
}

}  // namespace

Result<void*> Allocate(Bytes bytes, DeviceOrdinal device) {
  const PlainDriver& cu = TheDriver();
  if (!cu.complete) return Status{Code::kUnsupported, "allocate memory: libcuda.so.1 is not there; this host may have no GPU"};
  CUcontext context = nullptr;
  CUdeviceptr address = 0;
  CUresult result = PrimaryContext(cu, device.value, context);
  if (result == CUDA_SUCCESS) result = Within(cu, context, [&] { return cu.alloc(&address, std::max<Bytes>(bytes, 1)); });
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
  const PlainDriver& cu = TheDriver();
  Within(cu, context, [&] { return cu.free(reinterpret_cast<CUdeviceptr>(address)); });
  return true;
}

}  // namespace amem::plain_memory
