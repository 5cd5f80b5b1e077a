// Kernel and graph launches by NCCL: refused while memory is paused, because a kernel would touch addresses without memory.
#include <spdlog/fmt/fmt.h>

#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/runtime/log.h"

namespace amem::intercept {
namespace {

constinit log::Limited g_refused_launches;

template <class Function, class... A>
CUresult Launch(const char* call, Function* real, A... arguments) {
  Session* session = Runtime::Get().started();
  if (session == nullptr) return real(arguments...);
  const auto entered = session->EnterLaunch();
  if (entered.owns_lock()) [[likely]]
    return real(arguments...);
  g_refused_launches.Error(
      fmt::format("{} by NCCL is refused (CUDA_ERROR_ILLEGAL_STATE): memory is paused; call ncclResume first", call));
  return CUDA_ERROR_ILLEGAL_STATE;
}

struct LaunchKernel {
  static constexpr const char *kName = "cuLaunchKernel", *kExported = kName;
  using Function = CUresult(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**,
                            void**);
  template <class... A>
  static CUresult Call(Function* real, A... arguments) {
    return Launch(kName, real, arguments...);
  }
};

struct LaunchKernelEx {
  static constexpr const char *kName = "cuLaunchKernelEx", *kExported = kName;
  using Function = CUresult(const CUlaunchConfig*, CUfunction, void**, void**);
  template <class... A>
  static CUresult Call(Function* real, A... arguments) {
    return Launch(kName, real, arguments...);
  }
};

struct LaunchCooperativeKernel {
  static constexpr const char *kName = "cuLaunchCooperativeKernel", *kExported = kName;
  using Function = CUresult(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**);
  template <class... A>
  static CUresult Call(Function* real, A... arguments) {
    return Launch(kName, real, arguments...);
  }
};

struct GraphLaunch {
  static constexpr const char *kName = "cuGraphLaunch", *kExported = kName;
  using Function = CUresult(CUgraphExec, CUstream);
  template <class... A>
  static CUresult Call(Function* real, A... arguments) {
    return Launch(kName, real, arguments...);
  }
};

}  // namespace

std::span<const replacements::Replacement> LaunchReplacements() {
  return replacements::Table<LaunchKernel, LaunchKernelEx, LaunchCooperativeKernel, GraphLaunch>();
}
}  // namespace amem::intercept
