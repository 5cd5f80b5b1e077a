// What a C function of AMem's returns, and what amem_last_error() says about it.
#pragma once

#include <string>

#include "statemachine/types.h"

namespace amem {

enum NcclResult : int {  // ncclResult_t
  kOk = 0,
  kCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};

NcclResult ToNccl(Code code);

// Of this thread.
std::string& LastError();
// Keeps the message as this thread's last error, and returns `result`.
int Fail(NcclResult result, const std::string& message) noexcept;

}  // namespace amem
