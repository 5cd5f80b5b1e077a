// What the CUresult values are called, without CUDA: for messages of the simulator and for readers of journals.
#pragma once

#include <string_view>

#include "statemachine/types.h"

namespace amem {

// "CUDA_ERROR_INVALID_VALUE" and "invalid argument", as cuGetErrorName and cuGetErrorString give them; empty for a value that
// is not in the list here.
std::string_view CudaErrorName(int result);
std::string_view CudaErrorDescription(int result);

// What a failed call means to AMem: kOutOfMemory for CUDA_ERROR_OUT_OF_MEMORY, kRefused for a stream capture that is running
// (900), kDriver for all others.
Code CodeOfResult(int result);

}  // namespace amem
