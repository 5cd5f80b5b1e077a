// The job that a command is to act on: its sessions on this host.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "statemachine/types.h"

namespace amem::tool {

inline constexpr const char* kJobHelp =
    "The job: the pid of a rank or of its launcher, or a directory of journals; without it the only job that lives";
Result<std::vector<std::filesystem::path>> FindJobHere(const std::string& job);

}  // namespace amem::tool
