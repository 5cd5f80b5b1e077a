// What the commands that ask a living job have in common: which job a command line means, its options, and how it ends.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "replay/control/job_control.h"
#include "replay/tool/command.h"

namespace amem::tool {

// The processes of a job on this host, of this user.
struct FoundJob {
  std::vector<control::RankPlace> ranks;  // the sessions whose processes live
  std::size_t elsewhere = 0;              // ranks that the launcher counts beside these: on other hosts, or not started
};

// `names`: the pid of a rank, or of a process from which ranks descend (a launcher); a directory of journals; the launcher's id
// of the job (SLURM_JOB_ID, TORCHELASTIC_RUN_ID, RAY_JOB_ID); none: the only living job. Or several pids of ranks, which then
// are all that is meant, and what is certain to be of one job with them. kNotFound: there is none. kRefused: it may be one of
// several, or is perhaps not all of its job, or one number means a rank of one and is the launcher's id of another; the message
// lists what there is.
//
// Who is asked for something must have been named, by itself or by a rank that is certainly of the same job (Ties::kCertain):
// two programs that were started in the same second are two jobs. What only looks may guess (kProbable).
Result<FoundJob> FindJob(const std::vector<std::string>& names, Ties ties);

struct RequestOptions {
  std::vector<std::string> job;
  std::uint32_t deadline_s = 60;
  std::optional<std::uint64_t> at_step;                 // of a pause
  bool tags = false;                                    // likewise: the program's as well
  bool at_safepoint = false, between_launches = false;  // likewise: where
  bool json = false;
};
void AddWhere(Arguments& arguments, RequestOptions& options);  // --at-safepoint, --between-launches
std::string WhatIsWrong(const RequestOptions& options);        // empty: nothing
control::Where WhereOf(const RequestOptions& options);
void AddRequest(Arguments& arguments, RequestOptions& options, const char* deadline);

// Complains in one line for each of the message's, and returns the exit code: kCannotRead where the job cannot be asked,
// kViolationFound where it was asked and did not do it.
Exit ComplainOf(const Status& why, Exit code);

}  // namespace amem::tool
