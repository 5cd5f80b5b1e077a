#include "ncclpatch/runtime/border.h"

#include <spdlog/fmt/fmt.h>

#include <cstring>
#include <iterator>

#include "ncclpatch/runtime/log.h"

namespace amem {

Answers AnswersFor(Code code) {
  constexpr Answers kByCode[] = {{Code::kOk, kOk, CUDA_SUCCESS},
                                 {Code::kInvalid, kInvalidUsage, CUDA_ERROR_INVALID_VALUE},
                                 {Code::kNotFound, kInvalidUsage, CUDA_ERROR_NOT_FOUND},
                                 {Code::kOutOfMemory, kCudaError, CUDA_ERROR_OUT_OF_MEMORY},
                                 {Code::kDriver, kCudaError, CUDA_ERROR_UNKNOWN},
                                 {Code::kIo, kSystemError, CUDA_ERROR_OPERATING_SYSTEM},
                                 {Code::kCorrupt, kSystemError, CUDA_ERROR_UNKNOWN},
                                 {Code::kTimeout, kRemoteError, CUDA_ERROR_TIMEOUT},
                                 {Code::kPeerLost, kRemoteError, CUDA_ERROR_OPERATING_SYSTEM},
                                 {Code::kRefused, kInvalidUsage, CUDA_ERROR_ILLEGAL_STATE},
                                 {Code::kUnsupported, kInvalidUsage, CUDA_ERROR_NOT_SUPPORTED},
                                 {Code::kBroken, kInternalError, CUDA_ERROR_UNKNOWN},
                                 {Code::kNoDescriptors, kSystemError, CUDA_ERROR_OPERATING_SYSTEM}};
  static_assert(std::size(kByCode) == static_cast<std::size_t>(EnumeratorsOf(Code{}).last) + 1);
  return kByCode[static_cast<std::size_t>(code)];
}

std::string& LastError() {
  thread_local std::string text;
  return text;
}

int Fail(NcclResult result, const std::string& message) noexcept {
  try {
    LastError() = message;
  } catch (...) {
  }
  return result;
}

int FailAtBorder(const char* call, const Status& status) {
  const Status told = status.Within(call);
  log::Error(told.message());
  return Fail(AnswersFor(told.code()).nccl, told.message());
}

int CopyOut(const char* call, const std::string& text, char* buffer, std::size_t* length) noexcept {
  try {
    if (length == nullptr) return Fail(kInvalidArgument, std::string(call) + ": the pointer to the length is null");
    const std::size_t room = *length;
    *length = text.size() + 1;
    if (buffer == nullptr) return kOk;
    if (room < *length)
      return Fail(kInvalidArgument, fmt::format("{}: the buffer has {} bytes, {} are needed", call, room, *length));
    std::memcpy(buffer, text.c_str(), *length);
    return kOk;
  } catch (const std::exception& error) {
    return ThrownAtBorder(call, error.what());
  }
}

int ThrownAtBorder(const char* call, const char* what) noexcept {
  try {
    return Fail(kInternalError, std::string(call) + ": " + what);
  } catch (...) {
    return kInternalError;
  }
}

}  // namespace amem
