// How much memory the host can still give this process.
#pragma once

#include <filesystem>
#include <optional>

#include "statemachine/types.h"

namespace amem {

// The least of what the system has available and of what the process's control groups (version 1 or 2) leave; nullopt: nothing
// of this can be known. Reads some small files. `root`: of a test's own /proc and /sys.
std::optional<Bytes> HostMemoryAvailable(const std::filesystem::path& root = "/");

// Whether `bytes` can be taken and some is left. A process that touches more than there is gets no error: it is killed.
bool HostHasRoom(Bytes bytes, const std::filesystem::path& root = "/");

}  // namespace amem
