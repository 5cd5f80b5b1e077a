// The most frequent failures of a session's calls.
#pragma once

#include <string>
#include <utility>

#include "replay/driver/driver.h"
#include "statemachine/types.h"

namespace amem {

// The address or handle is the driver's: pass the call through. NCCL gets this answer if that is not possible.
inline Status NotOurs(std::string message) { return {Code::kNotFound, std::move(message), cuda::kInvalidValue}; }
inline Status WrongCall(std::string message) { return {Code::kInvalid, std::move(message), cuda::kInvalidValue}; }

}  // namespace amem
