// Where in libnccl a call came from.
#pragma once

#include "statemachine/types.h"

namespace amem {

// The innermost return addresses inside libnccl on this thread's stack, as offsets from its load address.
CallSite CaptureCallSite() noexcept;

}  // namespace amem
