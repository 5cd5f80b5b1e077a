// NCCL's kernel and graph launches: refused while memory is paused, because a kernel would touch addresses without memory.
#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

template <Text Name, class F>
struct Launch {
  static constexpr const char *kName = Name.data, *kExported = kName;
  using Function = F;
  template <class... A>
  static CUresult Call(Function* real, A... arguments) {
    return ThroughTheGate(
        kName, [](Touch touch, A...) { return !BesideAPause(touch.session); }, real, arguments...);
  }
};

using LaunchKernel = Launch<"cuLaunchKernel", CUresult(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                                       unsigned, CUstream, void**, void**)>;
using LaunchKernelEx = Launch<"cuLaunchKernelEx", CUresult(const CUlaunchConfig*, CUfunction, void**, void**)>;
using LaunchCooperativeKernel = Launch<"cuLaunchCooperativeKernel", CUresult(CUfunction, unsigned, unsigned, unsigned, unsigned,
                                                                             unsigned, unsigned, unsigned, CUstream, void**)>;
using LaunchCooperativeKernelMultiDevice =
    Launch<"cuLaunchCooperativeKernelMultiDevice", CUresult(CUDA_LAUNCH_PARAMS*, unsigned, unsigned)>;
using GraphLaunch = Launch<"cuGraphLaunch", CUresult(CUgraphExec, CUstream)>;

}  // namespace

std::span<const replacements::Replacement> LaunchReplacements() {
  return replacements::Table<LaunchKernel, LaunchKernelEx, LaunchCooperativeKernel, LaunchCooperativeKernelMultiDevice,
                             GraphLaunch>();
}

}  // namespace amem::intercept
