// cuGetProcAddress, by which NCCL and CUDA runtimes get every other driver function.
#include <algorithm>
#include <iterator>
#include <string_view>

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

// Names that take, give back, reach or name memory. tests/wheels/known_names.py has the same list, with what AMem does with
// each.
bool IsAboutMemory(std::string_view name) {
  constexpr std::string_view kFragments[] = {"Mem",      "Alloc", "Map",    "Unmap",  "Multicast",       "Ipc",   "Pointer",
                                             "Host",     "Reg",   "Unreg",  "Handle", "LogicalEndpoint", "Value", "Launch",
                                             "External", "Array", "Export", "Import", "Fabric"};
  return std::any_of(std::begin(kFragments), std::end(kFragments),
                     [&](std::string_view fragment) { return name.find(fragment) != std::string_view::npos; });
}

using replacements::Caller;

// Only NCCL's look-ups are journaled, because others look up all that the driver has.
void Substitute(Caller caller, const char* symbol, int cuda_version, CUresult result, void** function) {
  if (result != CUDA_SUCCESS || symbol == nullptr || function == nullptr || *function == nullptr) return;
  bool replaced = false;
  *function = replacements::Bind(symbol, cuda_version, *function, &replaced, caller);
  if (caller == Caller::kNccl && (replaced || IsAboutMemory(symbol)))
    Runtime::Get().Note(DriverSymbolBound{symbol, cuda_version, replaced});
}

template <Caller caller>
struct GetProcAddress : Instead<GetProcAddress<caller>, "cuGetProcAddress", "cuGetProcAddress_v2"> {
  static constexpr int kSince = 12000;
  static CUresult With(const Pass<>& pass, const char* symbol, void** function, int version, cuuint64_t,
                       CUdriverProcAddressQueryResult*) {
    const CUresult result = pass();
    Substitute(caller, symbol, version, result, function);
    return result;
  }
};

template <Caller caller>
struct GetProcAddressV1 : Instead<GetProcAddressV1<caller>, "cuGetProcAddress"> {
  static constexpr int kSince = 11030, kBefore = 12000;
  static CUresult With(const Pass<>& pass, const char* symbol, void** function, int version, cuuint64_t) {
    const CUresult result = pass();
    Substitute(caller, symbol, version, result, function);
    return result;
  }
};

template <Caller caller>
std::span<const replacements::Replacement> LookUps() {
  return replacements::Table<GetProcAddress<caller>, GetProcAddressV1<caller>>();
}

}  // namespace

std::span<const replacements::Replacement> GetProcAddressReplacements(Caller caller) {
  return caller == Caller::kNccl ? LookUps<Caller::kNccl>() : LookUps<Caller::kOther>();
}
}  // namespace amem::intercept
