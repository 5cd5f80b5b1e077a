// Jobs that never heard of AMem, for job_rank.cpp: "kind=NAME,MS" until the file JOB_STOP exists. Each checks all results
// itself.
#pragma once

#include <string>

namespace job_kinds {

// `nccl`: the library. `what`: NAME,MS, the most that a step computes. Empty sums up to "steps N"; else what was wrong.
std::string Run(void* nccl, const std::string& what);

}  // namespace job_kinds
