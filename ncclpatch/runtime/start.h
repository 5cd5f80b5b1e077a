// What it takes to start a session inside NCCL's process.
#pragma once

#include <memory>

#include "ncclpatch/runtime/options.h"
#include "replay/session/session.h"

namespace amem {

// Journal, driver (through the libcuda that NCCL opened) and peers. The message says which of them failed, and what to do.
Result<std::unique_ptr<Session>> StartSession(const Options& options);

}  // namespace amem
