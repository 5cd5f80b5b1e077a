// A made-up job of any size, as journals: ranks that make NCCL's allocations in the mix of a real trace, share them, pause and
// resume by the real plans, and (if asked) run out of memory on one rank in the last resume. For tests and pictures of what
// reads the journals of large jobs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "statemachine/event.h"
#include "statemachine/types.h"

namespace amem::test {

struct ReportJob {
  int ranks = 8;
  std::uint64_t events = 125'000;  // of each rank, about; no less than a few pauses need
  int allocations = 240;           // own ones of each rank
  bool fail = false;               // the last resume fails: no memory on rank 2 (or the last one)
  std::uint32_t seed = 1;
  int cycles = 0;      // pauses, and as many resumes; 0: as many as `events` give room for
  bool votes = true;   // votes are recorded; older builds did not
  bool die = false;    // the last rank ends without closing while it is idle, and another notices 20 s later
  bool hosts = false;  // as journals: each rank is of a host of its own, whose clock began at another time
};

// Every event, in its order within its rank; all of them fold.
using Sink = std::function<void(int rank, const Event& event)>;
Status MakeReportJob(const ReportJob& job, const Sink& sink);
SessionId ReportJobSession(int rank);

// The same as journals under `directory`, closed in order but for that of a rank that dies, which looks like a crash once the
// process that wrote it has ended.
Status WriteReportJob(const ReportJob& job, const std::filesystem::path& directory);

}  // namespace amem::test
