// Contexts of the driver, for AMem's own calls.
#include <array>
#include <atomic>

#include "ncclpatch/runtime/runtime.h"

namespace amem {
namespace {

constinit std::array<std::atomic<CUcontext>, 64> g_primary{};  // as far as known, by device

}  // namespace

CUcontext CurrentContext() {
  static const auto get = AMEM_DRIVER(cuCtxGetCurrent);
  CUcontext context = nullptr;
  return get == nullptr || get(&context) != CUDA_SUCCESS ? nullptr : context;
}

CUcontext PrimaryContext(DeviceOrdinal device) {
  static const auto state = AMEM_DRIVER(cuDevicePrimaryCtxGetState);
  static const auto retain = AMEM_DRIVER(cuDevicePrimaryCtxRetain);
  static const auto release = AMEM_DRIVER(cuDevicePrimaryCtxRelease);
  const auto index = static_cast<std::size_t>(device.value);
  if (index >= g_primary.size()) return nullptr;
  CUcontext context = g_primary[index].load(std::memory_order_relaxed);
  unsigned flags = 0;
  int active = 0;
  if (context != nullptr || state == nullptr || retain == nullptr || release == nullptr ||
      state(device.value, &flags, &active) != CUDA_SUCCESS || active == 0 || retain(&context, device.value) != CUDA_SUCCESS)
    return context;
  release(device.value);
  g_primary[index].store(context, std::memory_order_relaxed);
  return context;
}

void ForgetPrimaryContext(DeviceOrdinal device) {
  if (const auto index = static_cast<std::size_t>(device.value); index < g_primary.size()) g_primary[index].store(nullptr);
}

}  // namespace amem
