// The border to C: results become numbers, reasons become amem_last_error(), and no exception passes.
#pragma once

#include <exception>

#include "ncclpatch/runtime/last_error.h"
#include "statemachine/types.h"

namespace amem {

// Logs a failure of a C function of this name, keeps it as this thread's last error, and returns its number.
int FailAtBorder(const char* call, const Status& status);
int ThrownAtBorder(const char* call, const char* what) noexcept;

// Runs `body`, which returns a Status, on behalf of a C function of this name.
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
