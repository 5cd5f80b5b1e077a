// NCCL's own calls that AMem sees: one file a family, with a table; Tables() has them all, for redirects::Install.
//
// Rules for this folder: NCCL gets the program's call unchanged and the program NCCL's answer; what a call is about is noted
// beside it, and where that fails the communicator is unknown. Calls that NCCL makes of its own interface are not followed.
#pragma once

#include <span>

#include "ncclpatch/hook/redirects.h"
#include "ncclpatch/nccl/communicators.h"

namespace amem::nccl {

redirects::Table MakingCalls();
redirects::Table EndingCalls();
redirects::Table GroupCalls();
redirects::Table TouchingCalls();
std::span<const redirects::Table> Tables();

// What NCCL answered to a request for a communicator. `comm` is where it put the address.
void Settle(CommunicatorId id, ncclComm* comm, int result) noexcept;
// Asks NCCL for what it knows about a communicator that it may have finished by now.
void AskWhetherReady(CommunicatorId id, ncclComm* comm) noexcept;

}  // namespace amem::nccl
