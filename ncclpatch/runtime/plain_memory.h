// What amem_alloc hands out where AMem is switched off, or cannot start: plain memory of the driver.
#pragma once

#include "statemachine/types.h"

namespace amem::plain_memory {

// From any thread. Both leave the thread's current context as it was.
Result<void*> Allocate(Bytes bytes, DeviceOrdinal device);
bool Free(void* address);  // false: it was not allocated here

}  // namespace amem::plain_memory
