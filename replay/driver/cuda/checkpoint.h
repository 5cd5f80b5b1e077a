// The CUDA driver's process checkpoint (cuCheckpointProcess*), from the libcuda.so.1 of this machine.
#pragma once

#include <memory>

#include "replay/driver/checkpointer.h"

namespace amem {

// Loads and initialises libcuda.so.1, which makes no context and takes no GPU memory. kUnsupported: there is no driver, or it
// is older than 570; the message says which.
Result<std::unique_ptr<Checkpointer>> OpenCudaCheckpointer();

}  // namespace amem
