// Kernel and graph launches by NCCL: refused while memory is paused, because a kernel would touch addresses without memory.
#include <spdlog/fmt/fmt.h>

#include <tuple>

#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/runtime/log.h"

namespace amem::intercept {
namespace {

constinit log::Limited g_refused_launches;

// The stream that a launch submits to.
inline CUstream StreamOf(CUstream stream) { return stream; }
inline CUstream StreamOf(const CUlaunchConfig* config) { return config == nullptr ? nullptr : config->hStream; }

// `kStream`: the position of the argument that has the stream.
template <Text Name, class F, std::size_t kStream>
struct Launch {
  static constexpr const char *kName = Name.data, *kExported = kName;
  using Function = F;
  template <class... A>
  static CUresult Call(Function* real, A... arguments) {
    Session* session = Runtime::Get().started();
    if (session == nullptr) return real(arguments...);
    const auto entered = session->EnterLaunch(kName, StreamOf(std::get<kStream>(std::tie(arguments...))));
    if (entered.owns_lock()) [[likely]]
      return real(arguments...);
    g_refused_launches.Error(
        fmt::format("{} by NCCL is refused (CUDA_ERROR_ILLEGAL_STATE): memory is paused; call ncclResume first", kName));
    return CUDA_ERROR_ILLEGAL_STATE;
  }
};

using LaunchKernel =
    Launch<"cuLaunchKernel",
           CUresult(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**),
           8>;
using LaunchKernelEx = Launch<"cuLaunchKernelEx", CUresult(const CUlaunchConfig*, CUfunction, void**, void**), 0>;
using LaunchCooperativeKernel =
    Launch<"cuLaunchCooperativeKernel",
           CUresult(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**), 8>;
using GraphLaunch = Launch<"cuGraphLaunch", CUresult(CUgraphExec, CUstream), 1>;

}  // namespace

std::span<const replacements::Replacement> LaunchReplacements() {
  return replacements::Table<LaunchKernel, LaunchKernelEx, LaunchCooperativeKernel, GraphLaunch>();
}

}  // namespace amem::intercept
