// Where in libnccl a call came from.
#pragma once

#include "statemachine/types.h"

namespace amem {

// The innermost return addresses inside libnccl on this thread's stack, as offsets from its load address. `for_application`:
// one of them is in ncclMemAlloc, which allocates for the program; `for_window`: one is in ncclCommWindowRegister, which maps
// its allocation at a second address.
CallSite CaptureCallSite(bool* for_application = nullptr, bool* for_window = nullptr) noexcept;

}  // namespace amem
