// How a simulated call fails: with a CUresult, the CUDA driver's words, and the broken rule.
#pragma once

#include <string>
#include <string_view>

#include "statemachine/types.h"

namespace amem {

// "cuMemMap ...: CUDA_ERROR_INVALID_VALUE (1, invalid argument) from the simulator: why"; the code is CodeOfResult's.
Status SimulatedFailure(int result, std::string_view tried, std::string_view why);

// "open FILE: no such file", of errno.
std::string Errno(const std::string& tried);

// fail(result, why) for a call described by `tried()`, which is called only on failure.
template <class Tried>
auto Failing(Tried tried) {
  return [tried](int result, std::string_view why) { return SimulatedFailure(result, tried(), why); };
}

}  // namespace amem
