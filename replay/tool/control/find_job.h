// Which living job a command line means: its processes on this host, of this user.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "statemachine/types.h"

namespace amem::tool {

struct FoundJob {
  std::vector<std::filesystem::path> directories;  // of the sessions whose processes live
  std::size_t elsewhere = 0;  // ranks that the launcher counts beside these: on other hosts, or not started
};

// `what`: the pid of a rank, or of a process from which ranks descend (a launcher); a directory of journals; the launcher's id
// of the job (SLURM_JOB_ID, TORCHELASTIC_RUN_ID, RAY_JOB_ID); empty: the only living job. kNotFound: there is none.
// kRefused: it may be one of several, which the message lists.
Result<FoundJob> FindJob(const std::string& what);

inline constexpr const char* kJobHelp =
    "The pid of a rank or of its launcher, a directory of journals, or the launcher's id of the job; default: the only living "
    "job of this user on this host";

}  // namespace amem::tool
