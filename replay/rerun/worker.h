// The other end of rerun_process.h: what the process of one session does. Questions and answers are packets of JSON.
#pragma once

#include "replay/rerun/process.h"

namespace amem {

// Answers until the other end closes. `start` is the state after which the replay begins.
void ServeRerun(const RerunProcessOptions& options, State start, UniqueFd socket);

}  // namespace amem
