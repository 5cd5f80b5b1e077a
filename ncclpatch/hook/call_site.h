// Where in libnccl a call came from.
#pragma once

#include "statemachine/types.h"

namespace amem {

// The innermost return addresses inside libnccl on this thread's stack, as offsets from its load address. `for_application`
// is set to whether one of them is in ncclMemAlloc, which allocates memory for the program, and `for_window` to whether one is
// in ncclCommWindowRegister, which maps what it allocates at a second address.
CallSite CaptureCallSite(bool* for_application = nullptr, bool* for_window = nullptr) noexcept;

}  // namespace amem
