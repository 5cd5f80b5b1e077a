// NCCL's own suspend, served by AMem: ncclCommSuspend, ncclCommResume and ncclCommMemStats.
//
// A program reaches them as redirects of a libnccl that has such functions, and otherwise as exports of libamem_nccl.so.
#pragma once

#include <array>
#include <cstdint>

#include "ncclpatch/hook/redirects.h"

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

// For redirects::Install, where they are served.
redirects::Table Calls();

}  // namespace amem::suspend
