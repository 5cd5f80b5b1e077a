// A libcuda.so.1 that exports only part of the driver's functions, and gets the others from another libcuda, by dlsym: a layer
// between programs and the driver, as some clusters have. PARTIAL_CUDA: the path of that other.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdlib>
#include <string>

#undef cuGetProcAddress

#define PARTIAL extern "C" __attribute__((visibility("default")))

namespace {

void* Find(const std::string& name) {
  static void* const other = dlopen(std::getenv("PARTIAL_CUDA"), RTLD_NOW | RTLD_LOCAL);
  for (const char* variant : {"_v4", "_v3", "_v2", ""})
    if (void* found = dlsym(other, (name + variant).c_str())) return found;
  return nullptr;
}

}  // namespace

PARTIAL CUresult cuInit(unsigned flags) { return reinterpret_cast<decltype(cuInit)*>(Find("cuInit"))(flags); }
PARTIAL CUresult cuDriverGetVersion(int* version) {
  return reinterpret_cast<decltype(cuDriverGetVersion)*>(Find("cuDriverGetVersion"))(version);
}
PARTIAL CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* how) {
  *function = Find(name);
  if (how != nullptr) *how = *function != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
