// cuGetProcAddress: where NCCL, and the CUDA runtime inside it, get every other function of the driver.
#include <string_view>

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

bool IsAboutMemory(std::string_view name) {
  for (const std::string_view prefix : {"cuMem", "cuMulticast", "cuIpc", "cuLaunch", "cuLogicalEndpoint", "cuPointerSet",
                                        "cuStreamBatch", "cuStreamWrite", "cuStreamWait"})
    if (name.starts_with(prefix)) return true;
  return false;
}

void Substitute(const char* symbol, int cuda_version, CUresult result, void** function) {
  if (result != CUDA_SUCCESS || symbol == nullptr || function == nullptr || *function == nullptr) return;
  bool replaced = false;
  *function = replacements::Bind(symbol, cuda_version, *function, &replaced);
  if (replaced || IsAboutMemory(symbol)) Runtime::Get().Note(DriverSymbolBound{symbol, cuda_version, replaced});
}

struct GetProcAddress {
  static constexpr const char *kName = "cuGetProcAddress", *kExported = "cuGetProcAddress_v2";
  static constexpr int kSince = 12000;
  using Function = CUresult(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  static CUresult Call(Function* real, const char* symbol, void** function, int version, cuuint64_t flags,
                       CUdriverProcAddressQueryResult* found) {
    const CUresult result = real(symbol, function, version, flags, found);
    Substitute(symbol, version, result, function);
    return result;
  }
};

struct GetProcAddressV1 {
  static constexpr const char *kName = "cuGetProcAddress", *kExported = "cuGetProcAddress";
  static constexpr int kSince = 11030, kBefore = 12000;
  using Function = CUresult(const char*, void**, int, cuuint64_t);
  static CUresult Call(Function* real, const char* symbol, void** function, int version, cuuint64_t flags) {
    const CUresult result = real(symbol, function, version, flags);
    Substitute(symbol, version, result, function);
    return result;
  }
};

}  // namespace

std::span<const replacements::Replacement> GetProcAddressReplacements() {
  return replacements::Table<GetProcAddress, GetProcAddressV1>();
}
}  // namespace amem::intercept
