// How much memory the host can still give a process.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "statemachine/types.h"

namespace amem {

struct HostRoom {
  Bytes bytes = 0;
  std::string limited_by;  // "what the host has available (MemAvailable)", "the memory limit of the cgroup /sys/fs/cgroup/job"
};

// The least of what the system has available and of what the process's control groups (version 1 or 2) leave; nullopt: nothing
// of this can be known. Reads some small files. `process`: its number, or "self". `root`: of a test's own /proc and /sys.
std::optional<HostRoom> HostMemoryAvailable(const std::filesystem::path& root = "/", const std::string& process = "self");

// Whether `bytes` can be taken and some is left. A process that touches more than there is gets no error: it is killed.
bool HostHasRoom(Bytes bytes, const std::filesystem::path& root = "/");

}  // namespace amem
