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
template <Caller caller, Text Exported, int since, int before, class... More>
struct GetProcAddress : Named<"cuGetProcAddress", Exported> {
  static constexpr int kSince = since, kBefore = before;
  using Function = CUresult(const char*, void**, int, cuuint64_t, More...);
  static CUresult Call(Function* real, const char* symbol, void** function, int version, cuuint64_t flags, More... more) {
    const CUresult result = real(symbol, function, version, flags, more...);
    if (result != CUDA_SUCCESS || symbol == nullptr || function == nullptr || *function == nullptr) return result;
    bool replaced = false;
    *function = replacements::Bind(symbol, version, *function, &replaced, caller);
    if (caller == Caller::kNccl && (replaced || IsAboutMemory(symbol)))
      Runtime::Get().Note(DriverSymbolBound{symbol, version, replaced});
    return result;
  }
};

template <Caller caller>
std::span<const replacements::Replacement> LookUps() {
  return replacements::Table<
      GetProcAddress<caller, "cuGetProcAddress_v2", 12000, replacements::kNoBound, CUdriverProcAddressQueryResult*>,
      GetProcAddress<caller, "cuGetProcAddress", 11030, 12000>>();
}

}  // namespace

std::span<const replacements::Replacement> GetProcAddressReplacements(Caller caller) {
  return caller == Caller::kNccl ? LookUps<Caller::kNccl>() : LookUps<Caller::kOther>();
}
}  // namespace amem::intercept
