// What the commands that ask a living job have in common.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "replay/control/job_control.h"
#include "replay/tool/command.h"
#include "replay/tool/control/find_job.h"

namespace amem::tool {

struct RequestOptions {
  std::vector<std::string> job;
  std::uint32_t deadline_s = 60;
  bool json = false;
};
void AddRequest(Arguments& arguments, RequestOptions& options, const char* deadline);

// Complains in one line for each of the message's, and returns the exit code: kCannotRead where the job cannot be asked,
// kViolationFound where it was asked and did not do it.
Exit ComplainOf(const Status& why, Exit code);

// The ranks with what they do; with --json an object of the schema `control`. `done`: what was done, a sentence.
void PrintRanks(Output& out, const std::vector<control::RankLook>& ranks, const FoundJob& job, const std::string& done,
                double seconds, bool json);

}  // namespace amem::tool
