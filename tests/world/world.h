// One world: ranks that live for a while by a seed, and a conductor that has them pause and resume together.
#pragma once

#include "tests/world/settings.h"

namespace amem::world {

// Of threads of this process. Returns when all has been given back; what is wrong ends the process (findings.h).
void RunThreads(const Settings& settings);

// Of processes, each of which is `program` with `--rank`. False: one of them has found something, and has said it.
bool RunProcesses(Settings settings, const char* program);
// What such a process does; `settings` are those of the world.
void RunAsProcess(const Settings& settings, int rank);

}  // namespace amem::world
