// The most frequent failures of a session's calls: "free range 0x7f00: it was not reserved by NCCL".
#pragma once

#include <string>
#include <string_view>

#include "replay/driver/driver.h"
#include "statemachine/types.h"

namespace amem {

inline Status WrongCall(std::string_view call, const std::string& subject, std::string_view why, Code code = Code::kInvalid) {
  return {code, std::string(call).append(" ").append(subject).append(": ").append(why), cuda::kInvalidValue};
}
// The address or handle is the driver's: pass the call through. NCCL gets this answer if that is not possible.
inline Status NotOurs(std::string_view call, const std::string& subject, std::string_view why) {
  return WrongCall(call, subject, why, Code::kNotFound);
}

}  // namespace amem
