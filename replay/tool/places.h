// Places that are no directories of sessions, made into files.
#pragma once

#include <filesystem>
#include <span>

#include "replay/job/scratch_directory.h"

namespace amem::tool {

// What is on standard input, as a file in `scratch`. kInvalid: standard input is a terminal, or not what `pack` writes.
Result<std::filesystem::path> PackFromStandardInput(ScratchDirectory& scratch);

// What the journals take on disk; what cannot be looked at counts as nothing.
Bytes BytesOf(std::span<const std::filesystem::path> sessions);

}  // namespace amem::tool
