// The failures that the calls of a session answer most.
#pragma once

#include <string>
#include <utility>

#include "replay/driver/driver.h"
#include "statemachine/types.h"

namespace amem {

// The driver's, and to be passed through; NCCL gets this answer if there is nothing to pass through to.
inline Status NotOurs(std::string message) { return {Code::kNotFound, std::move(message), cuda::kInvalidValue}; }
inline Status WrongCall(std::string message) { return {Code::kInvalid, std::move(message), cuda::kInvalidValue}; }

}  // namespace amem
