// NCCL's calls that AMem sees: one file for each family, with a table; Tables() has all, for redirects::Install.
//
// Rules: NCCL gets the program's call unchanged, and the program NCCL's answer. What a call is about is noted beside it; if
// that fails, the communicator is unknown. NCCL's calls of its own interface are not followed.
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

// Records NCCL's answer to a request for a communicator, whose address is at `comm`.
void RecordAnswer(CommunicatorId id, ncclComm* comm, int result) noexcept;
// Asks NCCL about a communicator that may be finished by now.
void AskWhetherReady(CommunicatorId id, ncclComm* comm) noexcept;

// ---- what calls meet while communicators are suspended

// Serves ncclCommSuspend and ncclCommResume. Methods return the call's answer; 0: the call goes on.
class SuspendServer {
 public:
  virtual ~SuspendServer() = default;
  // A call with a suspended communicator.
  virtual int Refuse(const char* call, CommunicatorId id) noexcept = 0;
  // The program asks NCCL for another communicator, which the registry already has, so not all are suspended any more.
  virtual int BeforeMaking(const Communicator& asked) noexcept = 0;
  // A group ends in which communicators were resumed: before NCCL launches what else the group asked for.
  virtual int CarryOutResumes(const char* call) noexcept = 0;
  // NCCL's part of the group has failed as well, because the resume had failed: that is the reason for the program.
  virtual void ResumeFailedFirst() noexcept = 0;
  // A group ended in which communicators were suspended, or a communicator ended that was not suspended.
  virtual int CarryOutSuspends(const char* call) noexcept = 0;
  // A group failed in which communicators were suspended: they are not.
  virtual void UndoSuspends() noexcept = 0;
};
// Null: nothing is refused. Must outlive all calls.
void SetSuspendServer(SuspendServer* server);
SuspendServer* TheSuspendServer();

// The answer of a call with this communicator in place of NCCL's; 0: it goes on. One load while none is suspended.
int RefusalOfSuspended(const char* call, const ncclComm* comm) noexcept;
inline int RefusalOf(const char* call, const ncclComm* comm) noexcept {
  return registry::AnySuspended() ? RefusalOfSuspended(call, comm) : 0;
}

}  // namespace amem::nccl
