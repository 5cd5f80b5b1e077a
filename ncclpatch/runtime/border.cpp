#include "ncclpatch/runtime/border.h"

#include <string>

#include "ncclpatch/runtime/log.h"

namespace amem {

int FailAtBorder(const char* call, const Status& status) {
  const Status told = status.Within(call);
  log::Error(told.message());
  return Fail(ToNccl(told.code()), told.message());
}

int ThrownAtBorder(const char* call, const char* what) noexcept {
  try {
    return Fail(kInternalError, std::string(call) + ": " + what);
  } catch (...) {
    return kInternalError;
  }
}

}  // namespace amem
