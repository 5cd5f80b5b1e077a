// Kernel and graph launches by NCCL: refused while memory is paused, because a kernel would touch addresses without memory.
#include <spdlog/fmt/fmt.h>

#include <type_traits>

#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/runtime/log.h"

namespace amem::intercept {
namespace {

constinit log::Limited g_refused_launches;

// The stream among the arguments of a call.
void* StreamIn() { return nullptr; }
template <class First, class... Rest>
void* StreamIn(First first, Rest... rest) {
  if constexpr (std::is_same_v<First, CUstream>) return first;
  if constexpr (std::is_same_v<First, const CUlaunchConfig*>) return first == nullptr ? nullptr : first->hStream;
  return StreamIn(rest...);
}

template <Text Name, class F>
struct Launch {
  static constexpr const char *kName = Name.data, *kExported = kName;
  using Function = F;
  template <class... A>
  static CUresult Call(Function* real, A... arguments) {
    Session* session = Runtime::Get().started();
    if (session == nullptr) return real(arguments...);
    const auto entered = session->EnterLaunch(kName, StreamIn(arguments...));
    if (entered.owns_lock()) [[likely]]
      return real(arguments...);
    g_refused_launches.Error(
        fmt::format("{} by NCCL is refused (CUDA_ERROR_ILLEGAL_STATE): memory is paused; call ncclResume first", kName));
    return CUDA_ERROR_ILLEGAL_STATE;
  }
};

using LaunchKernel = Launch<"cuLaunchKernel", CUresult(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                                       unsigned, CUstream, void**, void**)>;
using LaunchKernelEx = Launch<"cuLaunchKernelEx", CUresult(const CUlaunchConfig*, CUfunction, void**, void**)>;
using LaunchCooperativeKernel = Launch<"cuLaunchCooperativeKernel", CUresult(CUfunction, unsigned, unsigned, unsigned, unsigned,
                                                                             unsigned, unsigned, unsigned, CUstream, void**)>;
using GraphLaunch = Launch<"cuGraphLaunch", CUresult(CUgraphExec, CUstream)>;

}  // namespace

std::span<const replacements::Replacement> LaunchReplacements() {
  return replacements::Table<LaunchKernel, LaunchKernelEx, LaunchCooperativeKernel, GraphLaunch>();
}

}  // namespace amem::intercept
