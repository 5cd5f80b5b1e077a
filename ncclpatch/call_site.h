// Where in libnccl a call came from.
#pragma once

#include "statemachine/types.h"

namespace amem {

// The innermost return addresses inside libnccl on this thread's stack, as offsets from its load address. `users`: whether
// one of them is in ncclMemAlloc, so that the program gets what is allocated.
CallSite CaptureCallSite(bool* users = nullptr) noexcept;

}  // namespace amem
