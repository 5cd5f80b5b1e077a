#include "ncclpatch/runtime/last_error.h"

namespace amem {

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
