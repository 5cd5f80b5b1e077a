// Names and descriptions of the CUresult values that the simulator answers with.
#pragma once

#include <string>
#include <string_view>

#include "statemachine/types.h"

namespace amem {

// "CUDA_ERROR_INVALID_VALUE" and "invalid argument"; empty for a value that the simulator does not know.
std::string_view CudaErrorName(int result);
std::string_view CudaErrorDescription(int result);

// The failure of one simulated call: "cuMemMap ...: CUDA_ERROR_INVALID_VALUE (1, invalid argument) from the simulator: why".
// Code::kOutOfMemory for CUDA_ERROR_OUT_OF_MEMORY, kRefused for a running capture (900), kDriver otherwise.
Status SimulatedFailure(int result, std::string_view tried, std::string_view why);

// Why a call was refused before it looked at anything, on the simulator that the process `owner` opened.
std::string_view WhyNotEntered(std::int32_t owner);

}  // namespace amem
