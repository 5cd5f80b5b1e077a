#include "ncclpatch/runtime/last_error.h"

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

}  // namespace amem
