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

// ---- what calls meet while communicators are suspended

// Whoever serves ncclCommSuspend and ncclCommResume. Its methods return what the call answers; 0: the call goes on.
class SuspendServer {
 public:
  virtual ~SuspendServer() = default;
  // A call with a suspended communicator.
  virtual int Refuse(const char* call, CommunicatorId id) noexcept = 0;
  // NCCL is asked for a communicator, which the registry has already, so that from now on not all are suspended.
  virtual int BeforeMaking(const Communicator& asked) noexcept = 0;
  // A group has ended in which communicators were suspended or resumed, or one has ended that was not suspended.
  virtual int Settle(const char* call) noexcept = 0;
};
// Null: nobody, and nothing is refused. Must outlive all calls.
void SetSuspendServer(SuspendServer* server);
SuspendServer* TheSuspendServer();

// What a call with this communicator answers in place of NCCL; 0: it goes on. A load while none is suspended.
int RefusalOf(const char* call, const ncclComm* comm) noexcept;

}  // namespace amem::nccl
