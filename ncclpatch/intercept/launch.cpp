// Kernel and graph launches by NCCL: refused while memory is paused, because a kernel would touch addresses without memory.
#include <tuple>

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

// The stream that a launch submits to.
inline CUstream StreamOf(CUstream stream) { return stream; }
inline CUstream StreamOf(const CUDA_LAUNCH_PARAMS* launches) { return launches == nullptr ? nullptr : launches->hStream; }
inline CUstream StreamOf(const CUlaunchConfig* config) { return config == nullptr ? nullptr : config->hStream; }

// `kStream`: the position of the argument that has the stream.
template <Text Name, class F, std::size_t kStream>
struct Launch {
  static constexpr const char *kName = Name.data, *kExported = kName;
  using Function = F;
  template <class... A>
  static CUresult Call(Function* real, A... arguments) {
    const CUstream stream = StreamOf(std::get<kStream>(std::tie(arguments...)));
    return ThroughTheGate(
        kName, stream, [](Touch, A...) { return true; }, real, arguments...);
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
using LaunchCooperativeKernelMultiDevice =
    Launch<"cuLaunchCooperativeKernelMultiDevice", CUresult(CUDA_LAUNCH_PARAMS*, unsigned, unsigned), 0>;
using GraphLaunch = Launch<"cuGraphLaunch", CUresult(CUgraphExec, CUstream), 1>;

}  // namespace

std::span<const replacements::Replacement> LaunchReplacements() {
  return replacements::Table<LaunchKernel, LaunchKernelEx, LaunchCooperativeKernel, LaunchCooperativeKernelMultiDevice,
                             GraphLaunch>();
}

}  // namespace amem::intercept
