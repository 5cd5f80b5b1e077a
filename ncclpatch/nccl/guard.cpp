#include "ncclpatch/nccl/guard.h"

#include <atomic>

namespace amem::nccl {
namespace {

constinit std::atomic<SuspendServer*> g_server{nullptr};

}  // namespace

void SetSuspendServer(SuspendServer* server) { g_server.store(server, std::memory_order_release); }
SuspendServer* TheSuspendServer() { return g_server.load(std::memory_order_acquire); }

int RefusalOf(const char* call, const ncclComm* comm) noexcept {
  if (!registry::AnySuspended()) return 0;
  SuspendServer* server = TheSuspendServer();
  const std::optional<Communicator> found = server == nullptr ? std::nullopt : Find(comm);
  return found && found->suspended ? server->Refuse(call, found->id) : 0;
}

}  // namespace amem::nccl
