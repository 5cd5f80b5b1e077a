// How a call of the simulator fails: with a CUresult, and with the same words as the CUDA driver's, plus the broken rule.
#pragma once

#include <string_view>

#include "statemachine/types.h"

namespace amem {

// "cuMemMap ...: CUDA_ERROR_INVALID_VALUE (1, invalid argument) from the simulator: why"; the code is CodeOfResult's.
Status SimulatedFailure(int result, std::string_view tried, std::string_view why);

}  // namespace amem
