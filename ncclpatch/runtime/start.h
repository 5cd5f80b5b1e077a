// Starts a session inside NCCL's process.
#pragma once

#include <memory>

#include "ncclpatch/runtime/options.h"
#include "replay/peers/requests.h"
#include "replay/session/session.h"

namespace amem {

// Opens the journal, the driver (the libcuda that NCCL opened) and the peers. A failure's message says which failed, and what
// to do. `requests` answers what is asked from outside, and outlives the session.
Result<std::unique_ptr<Session>> StartSession(const Options& options, control::RequestServer& requests);

}  // namespace amem
