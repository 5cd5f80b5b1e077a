// Names of CUresult values and GPUs, without CUDA: for the simulator's messages and for readers of journals.
#pragma once

#include <span>
#include <string>

#include "statemachine/types.h"

namespace amem {

// As cuGetErrorName and cuGetErrorString have it: "CUDA_ERROR_INVALID_VALUE" and "invalid argument".
struct CudaError {
  int result;
  const char *name, *description;
};
const CudaError* FindCudaError(int result);  // null: unknown
std::string CudaErrorText(int result);  // "CUDA_ERROR_INVALID_VALUE (1, invalid argument)"; "CUresult 12345" if it is unknown

// kOutOfMemory for CUDA_ERROR_OUT_OF_MEMORY, kRefused for a running stream capture (900), otherwise kDriver.
Code CodeOfResult(int result);
// As nvidia-smi prints it: "GPU-" and the bytes of a CUuuid.
std::string GpuUuid(std::span<const char, 16> bytes);

}  // namespace amem
