// NCCL's own suspend, served by AMem: ncclCommSuspend, ncclCommResume and ncclCommMemStats.
//
// A communicator that is suspended is marked. Once all of the process are that NCCL could still use, the process pauses,
// together with its peers, and the first that is resumed resumes it; the others stay marked until they are resumed, too. Until
// then success means that the memory will be released with the others'. Results are NCCL's: suspending twice, or resuming what
// is not suspended, is 5, a null pointer or an unknown flag 4. Inside a group the process pauses or resumes at the end of the
// group. A pause or resume that fails fails the call, or the end of the group, and the communicators of that call are marked as
// before.
//
// A program reaches them as redirects of a libnccl that has such functions, and otherwise as exports of libamem_nccl.so.
#pragma once

#include <array>
#include <cstdint>

#include "ncclpatch/hook/redirects.h"
#include "ncclpatch/nccl/calls.h"

struct ncclComm;

// Exported. Unless AMem serves them in this process, they lead to the function that the caller would have reached without AMem,
// and without one return 5 (ncclInvalidUsage).
extern "C" {
int ncclCommSuspend(ncclComm* comm, int flags);
int ncclCommResume(ncclComm* comm);
int ncclCommMemStats(ncclComm* comm, int stat, std::uint64_t* value);
}

namespace amem::suspend {

inline constexpr std::array kNames = {"ncclCommSuspend", "ncclCommResume", "ncclCommMemStats"};

// For redirects::Install, where they are served, and what NCCL's other calls are then asked of.
redirects::Table Calls();
nccl::SuspendServer* TheServer();

}  // namespace amem::suspend
