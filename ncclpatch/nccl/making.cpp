// How communicators are made: from a unique id, all of a process at once, and from another communicator.
#include <unistd.h>

#include <atomic>
#include <span>
#include <vector>

#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"
#include "ncclpatch/nccl/launches.h"

namespace amem::nccl {
namespace {

Communicator Asked(std::size_t place, const char* how, std::int32_t rank, std::int32_t ranks) {
  return {.place = place, .how = how, .rank = rank, .ranks = ranks};
}

void Expect(Communicator& asked, const UniqueId& unique) {
  const ExpectedHashes hashes = HashesOf(unique);
  for (std::size_t i = 0; i < hashes.size(); ++i) asked.expected_complements[i] = ~hashes[i];
  asked.clock = agreement::ClockOf(hashes.back()).value;
}

void AddPending(Group& group, const Pending& pending) noexcept {
  if (group.comm == nullptr && !group.id)
    group.id = pending.id;
  else
    group.several = true;
  try {
    if (group.pending == nullptr) group.pending = new std::vector<Pending>();
    group.pending->push_back(pending);
  } catch (...) {
    registry::End(pending.id, "failed");  // nobody would see its end
  }
}

// While the process is paused because all were suspended, there is no memory for another communicator.
int MakeWay(Communicator asked, CommunicatorId id) noexcept {
  SuspendServer* server = t_state.inside ? nullptr : TheSuspendServer();
  asked.id = id;
  return server == nullptr ? kSuccess : server->BeforeMaking(asked);
}

constexpr std::uint64_t kNoPart = ~std::uint64_t{0}, kRanksLeave = kNoPart - 1;

template <class Call>
int Making(CommunicatorId id, const Call& call) {
  const bool before = std::exchange(t_state.making, true);
  const int result = Followed(id, nullptr, call);
  t_state.making = before;
  return result;
}

// One communicator. In a group NCCL only notes the request, and the result is known at the group's end. If NCCL writes the
// address at once, the program may move it, so `out` is read at the end only if nothing was written.
// `counts`: on what the making counts as a launch, because all its ranks take part.
template <class Call>
int MakeOne(const Communicator& asked, ncclComm** out, const Call& call, std::span<const launches::Launched> counts = {}) {
  if (t_state.inside || out == nullptr) return call();
  const CommunicatorId id = registry::Begin(asked);
  if (const int answer = MakeWay(asked, id)) return registry::End(id, "failed"), answer;
  const ncclComm* const before = *out;
  Group& group = t_state.groups[asked.place];
  if (group.depth > 0 && id) {
    const int result = Making(id, call);
    if (!Accepted(result)) return Settle(id, nullptr, result), result;
    for (const launches::Launched& one : counts) Collect(asked.place, one);
    AddPending(group, {id, out, *out == before ? nullptr : *out});
    return result;
  }
  return launches::Launch("the making of a communicator", counts, [&]() noexcept {
    const int result = Making(id, call);
    Settle(id, Accepted(result) ? *out : nullptr, result);
    return result;
  });
}

// `which`: what its ranks have in common, and no other part that is asked for at the same time.
template <class Call>
int MakeFrom(ncclComm* parent, std::uint64_t which, Communicator asked, ncclComm** out, const Call& call) {
  if (const int answer = t_state.inside ? kSuccess : RefusalOf(asked.how, parent)) return answer;
  asked.parent = registry::IdOf(parent);
  if (which != kNoPart && !t_state.inside) asked.clock = registry::ClockOfPart(parent, which);
  const bool counts = which != kNoPart && which != kRanksLeave;
  const launches::Launched one{.counted = parent == nullptr ? nullptr : launches::FindCounted(parent),
                               .shape = counts ? launches::Shape::kCollective : launches::Shape::kNothing,
                               .on_stream = false};
  return MakeOne(asked, out, call, {&one, one.counted != nullptr ? std::size_t{1} : std::size_t{0}});
}

template <replacements::Text Name, class... More>
struct Init : redirects::Around<Init<Name, More...>, Name> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm** comm, int ranks, UniqueId unique, int rank,
                  More...) {
    Communicator asked = Asked(place, "init", rank, ranks);
    Expect(asked, unique);
    return MakeOne(asked, comm, pass);
  }
};
using InitRank = Init<"ncclCommInitRank">;
using InitRankConfig = Init<"ncclCommInitRankConfig", Config*>;

struct InitRankScalable : redirects::Around<InitRankScalable, "ncclCommInitRankScalable"> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm** comm, int ranks, int rank, int ids,
                  UniqueId* unique, Config*) {
    Communicator asked = Asked(place, "init", rank, ranks);
    if (unique != nullptr && ids > 0) Expect(asked, unique[0]);  // NCCL uses the first
    return MakeOne(asked, comm, pass);
  }
};

// All of a process at once. Allocations meanwhile are for an unknown one, unless there is only one.
struct InitAll : redirects::Around<InitAll, "ncclCommInitAll"> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm** comms, int count, const int* /*devices*/) {
    if (t_state.inside || comms == nullptr || count < 1) return pass();
    std::vector<CommunicatorId> ids;
    static std::atomic<std::uint32_t> made{0};
    const std::uint64_t which = (std::uint64_t{++made} << 32U) + static_cast<std::uint32_t>(::getpid());
    try {
      for (int rank = 0; rank < count; ++rank) {
        Communicator asked = Asked(place, "init all", rank, count);
        asked.clock = agreement::ClockOf(~which).value;  // all its ranks are in this process
        ids.push_back(registry::Begin(asked));
      }
    } catch (...) {
    }
    int result = kSuccess;
    for (const CommunicatorId id : ids) result = result == kSuccess ? MakeWay(Asked(place, "init all", -1, count), id) : result;
    const auto make = [&]() noexcept {
      if (result == kSuccess) result = Making(count == 1 && !ids.empty() ? ids.front() : CommunicatorId{}, pass);
      for (std::size_t i = 0; i < ids.size(); ++i) Settle(ids[i], result == kSuccess ? comms[i] : nullptr, result);
      return result;
    };
    return launches::Pass(kName, nullptr, make);
  }
};

template <replacements::Text Name, replacements::Text How, class Which, class... Flags>
struct Part : redirects::Around<Part<Name, How, Which, Flags...>, Name> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm* parent, Which which, int, ncclComm** comm, Config*,
                  Flags...) {
    std::uint64_t part = kRanksLeave;  // who leaves does not call; of a split there is one for each color
    if constexpr (std::is_same_v<Which, int>) part = static_cast<std::uint32_t>(which);
    return MakeFrom(parent, part, Asked(place, How.data, -1, 0), comm, pass);
  }
};
using Split = Part<"ncclCommSplit", "split", int>;           // by color and key
using Shrink = Part<"ncclCommShrink", "shrink", int*, int>;  // without the ranks of a list

// A joining rank has no parent; a staying one passes no rank.
struct Grow : redirects::Around<Grow, "ncclCommGrow"> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm* parent, int ranks, const UniqueId*, int rank,
                  ncclComm** comm, Config*) {
    return MakeFrom(parent, kNoPart, Asked(place, "grow", rank, ranks), comm, pass);
  }
};

}  // namespace

redirects::Table MakingCalls() {
  return redirects::MakeTable<InitRank, InitRankConfig, InitRankScalable, InitAll, Split, Shrink, Grow>();
}

}  // namespace amem::nccl
