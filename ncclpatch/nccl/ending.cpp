// The ends of communicators, and questions about those that NCCL makes in the background.
#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"
#include "ncclpatch/nccl/launches.h"

namespace amem::nccl {
namespace {

// A communicator that is not suspended and for which suspended ones may have to wait.
std::optional<Communicator> HoldingOthersBack(const ncclComm* comm) noexcept {
  std::optional<Communicator> found = registry::AnySuspended() ? Find(comm) : std::nullopt;
  return found && found->suspended ? std::nullopt : found;
}

// It has ended on all ranks of the host, because NCCL makes them wait for each other, so they can pause now. NCCL's answer
// stays.
void LetOthersGo(const Communicator& ended, const char* call) noexcept {
  Group& group = t_state.groups[ended.place];
  if (group.is_open())
    group.Add(Effect::kMayPause);
  else if (SuspendServer* server = TheSuspendServer(); server != nullptr)
    server->CarryOutSuspends(call);
}

// Takes the address away first, because NCCL may give it to another communicator as soon as this one is freed.
template <class Call>
int EndOne(std::size_t place, ncclComm* comm, const char* how, const Call& call) {
  if (t_state.is_inside() || comm == nullptr) return call();
  const CommunicatorId id = registry::Detach(comm);
  launches::LetHeldLeave(id);
  const int result = Followed(id, nullptr, call);
  Group& group = t_state.groups[place];
  const bool in_group = group.is_open();
  group.Add(Effect::kEnds);
  if (Accepted(result) && (in_group || result != kSuccess)) launches::EndsLater(id, in_group);
  if (Accepted(result))
    registry::End(id, how);
  else if (id)
    registry::Bind(id, comm);
  t_state.call.comm = nullptr;
  return result;
}

struct Destroy : redirects::Around<Destroy, "ncclCommDestroy"> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm* comm) {
    const auto held_back = t_state.is_inside() ? std::nullopt : HoldingOthersBack(comm);
    const auto end = [&]() noexcept { return EndOne(place, comm, "destroyed", pass); };
    const int result = t_state.is_inside() ? end() : launches::Pass(kName, comm, end);
    if (held_back && Accepted(result)) LetOthersGo(*held_back, kName);
    return result;
  }
};

struct Abort : redirects::Around<Abort, "ncclCommAbort"> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm* comm) {
    t_state.groups[place].Add(Effect::kAborts);
    return EndOne(place, comm, "aborted", pass);
  }
};

// Others may wait for a finalize; a revoke must not wait for anybody.
template <replacements::Text Name, Stage stage, class... Flags>
struct Change : redirects::Around<Change<Name, stage, Flags...>, Name> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm* comm, Flags...) {
    if (t_state.is_inside()) return pass();
    if (stage == Stage::kRevoked) t_state.groups[place].Add(Effect::kAborts);
    const auto change = [&]() noexcept {
      const int result = Followed({}, comm, pass);
      if (Accepted(result)) registry::MarkStage(comm, stage);
      return result;
    };
    return stage == Stage::kRevoked ? change() : launches::Pass(Name.data, comm, change);
  }
};
using Finalize = Change<"ncclCommFinalize", Stage::kFinalized>;
using Revoke = Change<"ncclCommRevoke", Stage::kRevoked, int>;

// The program asks this until a nonblocking communicator is made, and NCCL itself at the beginning of each call.
struct GetAsyncError : redirects::Around<GetAsyncError, "ncclCommGetAsyncError"> {
  static int With(std::size_t, const redirects::Pass& pass, ncclComm* comm, int* error) {
    const std::uint64_t begun = launches::Begun(comm);
    const int result = pass();
    if (result == kSuccess && error != nullptr && *error == kSuccess) launches::Finished(comm, begun);
    if (registry::AnyUnready() && result == kSuccess && error != nullptr && *error == kSuccess && !t_state.is_inside())
      AskWhetherReady(registry::IdOf(comm), comm);
    return result;
  }
};

}  // namespace

redirects::Table EndingCalls() { return redirects::MakeTable<Destroy, Abort, Finalize, Revoke, GetAsyncError>(); }

}  // namespace amem::nccl
