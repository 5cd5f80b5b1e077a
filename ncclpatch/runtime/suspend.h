// NCCL's own suspend, served by AMem: ncclCommSuspend, ncclCommResume and ncclCommMemStats.
//
// A suspended communicator is marked. When all that NCCL could still use are marked, the process pauses with its peers; the
// first resume resumes the process, and the others stay marked until they are resumed too. Until the pause, success means:
// recorded, nothing freed yet. Results are NCCL's: suspending twice, or resuming what is not suspended, is 5, a null pointer or
// an unknown flag 4. At the end of a group its resumes come first, then what else it asked for, then its suspends. If one
// fails, the call, or the end of the group, fails, and its communicators are marked as before.
//
// Programs reach these as redirects if their libnccl has such functions, otherwise as exports of libamem_nccl.so.
#pragma once

#include <array>
#include <cstdint>

#include "ncclpatch/hook/redirects.h"
#include "ncclpatch/nccl/calls.h"

struct ncclComm;

// Exported. Unless AMem serves them here, they lead to the function that the caller would have reached without AMem, or return
// 5 (ncclInvalidUsage).
extern "C" {
int ncclCommSuspend(ncclComm* comm, int flags);
int ncclCommResume(ncclComm* comm);
int ncclCommMemStats(ncclComm* comm, int stat, std::uint64_t* value);
}

namespace amem::suspend {

inline constexpr std::array kNames = {"ncclCommSuspend", "ncclCommResume", "ncclCommMemStats"};

// For redirects::Install, if served; then NCCL's other calls are refused with suspended communicators.
redirects::Table Calls();
nccl::SuspendServer* TheServer();

}  // namespace amem::suspend
