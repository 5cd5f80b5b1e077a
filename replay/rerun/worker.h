// The process of one session of a rerun: replays its journal as far as it is told. Questions and answers are packets of JSON.
#pragma once

#include "journal/base/unique_fd.h"
#include "replay/rerun/process_options.h"
#include "statemachine/state.h"

namespace amem {

// Answers until the other end closes. `start` is the state after which the replay begins.
void ServeRerun(const RerunProcessOptions& options, State start, UniqueFd socket);

}  // namespace amem
