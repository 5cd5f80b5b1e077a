#include "ncclpatch/runtime/border.h"

#include <spdlog/fmt/fmt.h>

#include <cstring>

#include "ncclpatch/runtime/log.h"

namespace amem {

NcclResult ToNccl(Code code) {
  switch (code) {
    case Code::kOk:
      return kOk;
    case Code::kOutOfMemory:
    case Code::kDriver:
      return kCudaError;
    case Code::kIo:
    case Code::kCorrupt:
    case Code::kNoDescriptors:
      return kSystemError;
    case Code::kBroken:
      return kInternalError;
    case Code::kInvalid:
    case Code::kNotFound:
    case Code::kRefused:
    case Code::kUnsupported:
      return kInvalidUsage;
    case Code::kTimeout:
    case Code::kPeerLost:
      return kRemoteError;
  }
  return kInternalError;
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
  return Fail(ToNccl(told.code()), told.message());
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
