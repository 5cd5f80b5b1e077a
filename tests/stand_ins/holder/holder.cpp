// libholder.so, a library that gets hold of memory that others allocated: by functions of the driver and of libibverbs that it
// imports, as UCX does, or looks up, as NVSHMEM does.
#include <cuda.h>
#include <dlfcn.h>

#include <cstddef>

#define HOLDER extern "C" __attribute__((visibility("default")))

extern "C" void* ibv_reg_mr(void* domain, void* address, std::size_t bytes, int access);
extern "C" int ibv_dereg_mr(void* region);

HOLDER int holder_retain(CUmemGenericAllocationHandle* handle, void* address) {
  return cuMemRetainAllocationHandle(handle, address);
}
HOLDER int holder_release(CUmemGenericAllocationHandle handle) { return cuMemRelease(handle); }
// `way`: 0 the import, 1 by dlsym, 2 by dlvsym.
HOLDER void* holder_register(int way, void* address, std::size_t bytes) {
  auto* find = &ibv_reg_mr;
  void* const verbs = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (way == 1) find = reinterpret_cast<decltype(find)>(dlsym(verbs, "ibv_reg_mr"));
  if (way == 2) find = reinterpret_cast<decltype(find)>(dlvsym(verbs, "ibv_reg_mr", "IBVERBS_1.1"));
  return find == nullptr ? nullptr : find(nullptr, address, bytes, 1);
}
HOLDER int holder_deregister(void* region) { return ibv_dereg_mr(region); }
