// Which living job a command line means: its processes on this host, of this user.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "replay/control/rank_link.h"
#include "replay/job/jobs.h"
#include "statemachine/types.h"

namespace amem::tool {

struct FoundJob {
  std::vector<control::RankPlace> ranks;  // the sessions whose processes live
  std::size_t elsewhere = 0;              // ranks that the launcher counts beside these: on other hosts, or not started
};

// `names`: the pid of a rank, or of a process from which ranks descend (a launcher); a directory of journals; the launcher's id
// of the job (SLURM_JOB_ID, TORCHELASTIC_RUN_ID, RAY_JOB_ID); none: the only living job. Or several pids of ranks, which then
// are all that is meant, and what is certain to be of one job with them. kNotFound: there is none. kRefused: it may be one of
// several, or is perhaps not all of its job; the message lists what there is.
//
// Who is asked for something must have been named, by itself or by a rank that is certainly of the same job (Ties::kCertain):
// two programs that were started in the same second are two jobs. What only looks may guess (kProbable).
Result<FoundJob> FindJob(const std::vector<std::string>& names, Ties ties);

}  // namespace amem::tool
