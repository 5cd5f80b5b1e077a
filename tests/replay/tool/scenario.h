// Whole jobs on the simulator that go well or wrong in a known way: processes with sockets, journals, shared memory, as ranks
// of a real job have them. What `amem-replay` says about them is known beforehand.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "statemachine/types.h"

namespace amem::test {

inline const std::vector<std::string> kScenarios = {
    "healthy",         "out_of_memory", "out_of_memory_in_create", "killed_in_pause",       "killed_while_paused", "never_came",
    "stuck_in_driver", "broken",        "healthy_in_slabs",        "out_of_memory_in_slabs"};

// Runs it with four ranks and leaves their journals in `directory`/journal. The failures of the ranks themselves are as
// expected; a failure here means that the scenario could not be played.
Status PlayScenario(const std::string& name, const std::filesystem::path& directory);

}  // namespace amem::test
