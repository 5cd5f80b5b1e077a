// What NCCL's calls meet while communicators are suspended.
#pragma once

#include "ncclpatch/nccl/communicators.h"

namespace amem::nccl {

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
