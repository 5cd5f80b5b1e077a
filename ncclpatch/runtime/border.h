// The border to C: results become numbers, reasons become amem_last_error(), and no exception passes.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <exception>
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

// The answers for a class of failure in NCCL's interface, and in the driver's.
struct Answers {
  Code code;
  NcclResult nccl;
  CUresult driver;
};
Answers AnswersFor(Code code);

// This thread's.
std::string& LastError();
// Sets this thread's last error, and returns `result`.
int Fail(NcclResult result, const std::string& message) noexcept;

// Logs a C function's failure, sets this thread's last error, and returns the number.
int FailAtBorder(const char* call, const Status& status);
int ThrownAtBorder(const char* call, const char* what) noexcept;

// Hands out a C function's text. *length: before, the size of `buffer`; after, the size needed, with the NUL. `buffer` null:
// only that. Too small, or `length` null: kInvalidArgument.
int CopyOut(const char* call, const std::string& text, char* buffer, std::size_t* length) noexcept;

// Runs `body`, which returns a Status, for a C function of this name.
template <class Body>
int AtBorder(const char* call, const Body& body) noexcept {
  try {
    const Status status = body();
    return status.ok() ? kOk : FailAtBorder(call, status);
  } catch (const std::exception& error) {
    return ThrownAtBorder(call, error.what());
  } catch (...) {
    return ThrownAtBorder(call, "an exception of unknown type");
  }
}

}  // namespace amem
