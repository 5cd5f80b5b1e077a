// What packs may cost. A pack of a megabyte can hold journals that take hours to fold or gigabytes to draw, by accident or
// because somebody made it so.
#pragma once

#include <filesystem>
#include <span>

#include "replay/job/scratch_directory.h"

namespace amem::tool {

// From now on the process ends, with a message and kCannotRead, when it takes more than 256 MiB of memory or 10 s, each for
// every megabyte of the packs among `places`. Without a pack nothing is watched. `scratch` is removed then, too.
void KeepWithinBudget(std::span<const std::filesystem::path> places, ScratchDirectory& scratch);

}  // namespace amem::tool
