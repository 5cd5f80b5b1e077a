// Groups: NCCL collects calls from ncclGroupStart on and makes them at ncclGroupEnd.
#include <utility>
#include <vector>

#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"

namespace amem::nccl {
namespace {

void SettleAll(const std::vector<Pending>& pending, int result) noexcept {
  const bool made = result == kSuccess || result == kInProgress;
  for (const Pending& one : pending) Settle(one.id, !made ? nullptr : one.written != nullptr ? one.written : *one.out, result);
}

template <class Call>
int EndGroup(std::size_t place, const Call& call) {
  Group& group = t_state.groups[place];
  if (t_state.inside || group.depth == 0) return call();
  if (--group.depth > 0) return call();
  const Group ended = std::exchange(group, Group{});
  int result = kSuccess;
  {
    const Following following(ended.several ? CommunicatorId{} : ended.id, ended.several ? nullptr : ended.comm);
    result = call();
  }
  t_state.comm = nullptr;
  if (ended.pending != nullptr) {
    SettleAll(*ended.pending, result);
    delete ended.pending;
  }
  SuspendServer* server = ended.settles ? TheSuspendServer() : nullptr;
  const int settled = server == nullptr ? kSuccess : server->Settle("ncclGroupEnd");
  return result == kSuccess ? settled : result;
}

struct GroupStart {
  static constexpr const char* kName = "ncclGroupStart";
  using Function = int();
  template <class Real>
  static int Call(std::size_t place, Real real) {
    const int result = real();
    if (!t_state.inside && result == kSuccess) ++t_state.groups[place].depth;
    return result;
  }
};

struct GroupEnd {
  static constexpr const char* kName = "ncclGroupEnd";
  using Function = int();
  template <class Real>
  static int Call(std::size_t place, Real real) {
    return EndGroup(place, [&] { return real(); });
  }
};

struct GroupSimulateEnd {  // ends the group too
  static constexpr const char* kName = "ncclGroupSimulateEnd";
  using Function = int(void*);
  template <class Real>
  static int Call(std::size_t place, Real real, void* information) {
    return EndGroup(place, [&] { return real(information); });
  }
};

}  // namespace

redirects::Table GroupCalls() { return redirects::MakeTable<GroupStart, GroupEnd, GroupSimulateEnd>(); }

}  // namespace amem::nccl
