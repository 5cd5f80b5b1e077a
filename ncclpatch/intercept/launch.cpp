// NCCL's kernel and graph launches: refused while memory is paused, because a kernel would touch addresses without memory.
#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

constexpr auto kLaunch = [](Touch touch, auto...) { return !BesideAPause(touch.session); };

// cuda.h calls it deprecated, which is an error where it is named.
using LaunchMultiDevice =
    Gated<kLaunch, CUresult(CUDA_LAUNCH_PARAMS*, unsigned, unsigned), "cuLaunchCooperativeKernelMultiDevice">;

}  // namespace

std::span<const replacements::Replacement> LaunchReplacements() {
  return replacements::Table<AMEM_GATED(kLaunch, cuLaunchKernel), AMEM_GATED(kLaunch, cuLaunchKernelEx),
                             AMEM_GATED(kLaunch, cuLaunchCooperativeKernel), LaunchMultiDevice,
                             AMEM_GATED(kLaunch, cuGraphLaunch)>();
}

}  // namespace amem::intercept
