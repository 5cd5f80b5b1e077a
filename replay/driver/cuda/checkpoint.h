// The CUDA driver's process checkpoint (cuCheckpointProcess*), from the libcuda.so.1 of this machine.
#pragma once

#include <memory>

#include "replay/driver/checkpointer.h"

namespace amem {

// Loads libcuda.so.1 and initialises it, which makes no context and so takes no GPU memory. kUnsupported: there is no driver,
// or none that can do this (570 or newer can); the message says which it is.
Result<std::unique_ptr<Checkpointer>> OpenCudaCheckpointer();

}  // namespace amem
