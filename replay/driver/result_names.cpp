#include "replay/driver/result_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "replay/driver/driver.h"

namespace amem {
namespace {

struct KnownError {
  int result;
  std::string_view name, description;
};
constexpr std::array kKnown = {
    KnownError{0, "CUDA_SUCCESS", "no error"},
    KnownError{1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    KnownError{2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    KnownError{3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    KnownError{4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    KnownError{100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    KnownError{101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    KnownError{201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    KnownError{304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    KnownError{400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    KnownError{401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    KnownError{500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    KnownError{600, "CUDA_ERROR_NOT_READY", "device not ready"},
    KnownError{700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    KnownError{712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    KnownError{713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    KnownError{719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    KnownError{800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    KnownError{801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    KnownError{900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    KnownError{999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const KnownError* Find(int result) {
  const auto at = std::ranges::find(kKnown, result, &KnownError::result);
  return at == kKnown.end() ? nullptr : &*at;
}

}  // namespace

std::string_view CudaErrorName(int result) {
  const KnownError* known = Find(result);
  return known ? known->name : std::string_view{};
}

std::string_view CudaErrorDescription(int result) {
  const KnownError* known = Find(result);
  return known ? known->description : std::string_view{};
}

Code CodeOfResult(int result) {
  if (result == cuda::kOutOfMemory) return Code::kOutOfMemory;
  if (result == cuda::kCaptureUnsupported) return Code::kRefused;
  return Code::kDriver;
}

std::string GpuUuid(std::span<const char, 16> bytes) {
  std::string text = "GPU-";
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(bytes[i]));
  }
  return text;
}

}  // namespace amem
