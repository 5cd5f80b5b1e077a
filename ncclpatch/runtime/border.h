// The border to C: results become numbers, reasons become amem_last_error(), and no exception passes.
#pragma once

#include <spdlog/fmt/fmt.h>

#include <exception>

#include "ncclpatch/runtime/last_error.h"
#include "ncclpatch/runtime/log.h"
#include "statemachine/types.h"

namespace amem {

// Runs `body`, which returns a Status, on behalf of a C function of this name.
template <class Body>
int AtBorder(const char* call, const Body& body) noexcept {
  try {
    const Status status = body();
    if (status.ok()) return kOk;
    const Status told = status.Within(call);
    log::Error(told.message());
    return Fail(ToNccl(told.code()), told.message());
  } catch (const std::exception& error) {
    return Fail(kInternalError, fmt::format("{}: {}", call, error.what()));
  } catch (...) {
    return Fail(kInternalError, fmt::format("{}: an exception of unknown type", call));
  }
}

}  // namespace amem
