// Plain driver memory, which amem_alloc hands out if AMem is switched off or cannot start.
#pragma once

#include "statemachine/types.h"

namespace amem::plain_memory {

// Any thread. The thread's current context does not change.
Result<void*> Allocate(Bytes bytes, DeviceOrdinal device);
bool Free(void* address);  // false: it was not allocated here

}  // namespace amem::plain_memory
