#include "ncclpatch/nccl/calls.h"

#include <array>
#include <atomic>

#include "ncclpatch/nccl/attribution.h"

namespace amem::nccl {
namespace {

constinit std::atomic<SuspendServer*> g_server{nullptr};

// A number about a communicator; `otherwise` if NCCL does not tell.
std::int32_t Ask(std::size_t place, const char* call, ncclComm* comm, std::int32_t otherwise, bool* answered = nullptr) {
  using Function = int(const ncclComm*, int*);
  auto* const function = reinterpret_cast<Function*>(redirects::Real(place, call));
  int value = otherwise;
  const bool ok = function != nullptr && function(comm, &value) == kSuccess;
  if (answered != nullptr) *answered = ok || function == nullptr;
  return ok ? value : otherwise;
}

}  // namespace

void RecordAnswer(CommunicatorId id, ncclComm* comm, int result) noexcept {
  if (!id) return;
  if (!Accepted(result)) return registry::End(id, "failed");
  if (comm == nullptr && result == kInProgress) launches::WrittenLater();
  if (comm == nullptr) return registry::End(id, "left out");
  registry::Bind(id, comm);
  if (result == kSuccess) AskWhetherReady(id, comm);
}

void AskWhetherReady(CommunicatorId id, ncclComm* comm) noexcept {
  std::optional<Communicator> known = Find(comm);
  if (!known || known->id != id || known->stage != Stage::kMaking) return;
  const bool made =
      Followed(t_state.call.id, t_state.call.comm, [&] {  // NCCL's calls of its own interface are not the program's
        bool answered = false;
        known->rank = Ask(known->place, "ncclCommUserRank", comm, known->rank, &answered);
        if (!answered) return false;  // NCCL is still making it
        known->ranks = Ask(known->place, "ncclCommCount", comm, known->ranks);
        known->device.value = Ask(known->place, "ncclCommCuDevice", comm, known->device.value);
        return true;
      });
  if (!made) return;
  registry::MarkReady(*known);
}

void SetSuspendServer(SuspendServer* server) { g_server.store(server, std::memory_order_release); }
SuspendServer* TheSuspendServer() { return g_server.load(std::memory_order_acquire); }

int RefusalOfSuspended(const char* call, const ncclComm* comm) noexcept {
  SuspendServer* server = TheSuspendServer();
  const std::optional<Communicator> found = server == nullptr ? std::nullopt : Find(comm);
  return found && found->suspended ? server->Refuse(call, found->id) : 0;
}

std::span<const redirects::Table> Tables() {
  static const std::array all = {MakingCalls(), EndingCalls(), GroupCalls(), TouchingCalls()};
  return all;
}

}  // namespace amem::nccl
