// How communicators are made: from a unique id, all of a process at once, and from another communicator.
#include <span>
#include <type_traits>
#include <vector>

#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"
#include "ncclpatch/nccl/launches.h"
#include "ncclpatch/nccl/names.h"

namespace amem::nccl {
namespace {

constexpr const char* kMaking = "the making of a communicator";

Communicator Asked(std::size_t place, const char* how, std::int32_t rank, std::int32_t ranks) {
  return {.place = place, .how = how, .rank = rank, .ranks = ranks};
}

// As ncclGetVersion says it; 0: unknown.
int VersionAt(std::size_t place) {
  using Function = int(int*);
  auto* const function = reinterpret_cast<Function*>(redirects::Real(place, "ncclGetVersion"));
  int version = 0;
  return function != nullptr && function(&version) == kSuccess ? version : 0;
}

void AddPending(Group& group, const Pending& pending) noexcept {
  group.subject.Add(pending.id);
  try {
    if (group.pending == nullptr) group.pending = new std::vector<Pending>();
    group.pending->push_back(pending);
  } catch (...) {
    registry::End(pending.id, "failed");  // nobody would see its end
  }
}

// While the process is paused because all were suspended, there is no memory for another communicator. Where the job is stopped
// between launches there is none either, and no program expects a refusal; so this is asked behind the gate, where that stop is
// over.
int MakeWay(Communicator asked, CommunicatorId id) noexcept {
  SuspendServer* server = t_state.is_inside() ? nullptr : TheSuspendServer();
  asked.id = id;
  return server == nullptr ? kSuccess : server->BeforeMaking(asked);
}

template <class Call>
int Making(CommunicatorId id, const Call& call) {
  return Followed(id, nullptr, call, Inside::kMaking);
}

// One communicator. In a group NCCL only notes the request, and the result is known at the group's end. If NCCL writes the
// address at once, the program may move it, so `out` is read at the end only if nothing was written.
// `counts`: on what the making counts as a launch, because all its ranks take part. `part`: as which it was counted.
template <class Call>
int MakeOne(const Communicator& asked, ncclComm** out, const Call& call, std::span<const launches::Launched> counts = {},
            const registry::CountedPart& part = {}) {
  if (t_state.is_inside() || out == nullptr) return call();
  const CommunicatorId id = registry::Begin(asked);
  const ncclComm* const before = *out;
  Group& group = t_state.groups[asked.place];
  if (group.is_open() && id) {
    const int way = launches::Pass(kMaking, nullptr, [&]() noexcept { return MakeWay(asked, id); });
    if (way != kSuccess) return registry::End(id, "failed"), way;
    const int result = Making(id, call);
    if (!Accepted(result)) return RecordAnswer(id, nullptr, result), result;
    for (const launches::Launched& one : counts) Collect(asked.place, one);
    AddPending(group, {id, out, *out == before ? nullptr : *out, part});
    return result;
  }
  bool passed = false;  // not: the parent has ended at the gate
  const int result = launches::Launch(kMaking, counts, [&]() noexcept {
    passed = true;
    const int way = MakeWay(asked, id);
    const int answer = way == kSuccess ? Making(id, call) : way;
    RecordAnswer(id, Accepted(answer) ? *out : nullptr, answer);
    return answer;
  });
  if (!passed) registry::End(id, "failed");
  return result;
}

// `shape`: as which launch on the parent the call counts.
template <class Call>
int MakeFrom(ncclComm* parent, const names::Part& part, launches::Shape shape, Communicator asked, ncclComm** out,
             const Call& call) {
  if (t_state.is_inside()) return call();
  if (const int answer = RefusalOf(asked.how, parent)) return answer;
  asked.parent = registry::IdOf(parent);
  const registry::CountedPart counted = registry::CountNextPart(parent, part);
  asked.name = counted.name;
  const launches::Launched one{
      .counted = parent == nullptr ? nullptr : launches::FindCounted(parent), .shape = shape, .on_stream = false};
  bool called = false;
  const auto make = [&]() noexcept {
    called = true;
    return call();
  };
  const int result = MakeOne(asked, out, make, {&one, one.counted != nullptr ? std::size_t{1} : std::size_t{0}}, counted);
  if (!called || IsOfArguments(result)) registry::RetractPart(counted);
  return result;
}

template <replacements::Text Name, class... More>
struct Init : redirects::Around<Init<Name, More...>, Name> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm** comm, int ranks, UniqueId unique, int rank,
                  More...) {
    Communicator asked = Asked(place, "init", rank, ranks);
    asked.name = names::OfUniqueId(unique, VersionAt(place));
    return MakeOne(asked, comm, pass);
  }
};
using InitRank = Init<"ncclCommInitRank">;
using InitRankConfig = Init<"ncclCommInitRankConfig", Config*>;

struct InitRankScalable : redirects::Around<InitRankScalable, "ncclCommInitRankScalable"> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm** comm, int ranks, int rank, int ids,
                  UniqueId* unique, Config*) {
    Communicator asked = Asked(place, "init", rank, ranks);
    if (unique != nullptr && ids > 0) asked.name = names::OfUniqueId(unique[0], VersionAt(place));  // NCCL uses the first
    return MakeOne(asked, comm, pass);
  }
};

// All of a process at once. Allocations meanwhile are for an unknown one, unless there is only one.
struct InitAll : redirects::Around<InitAll, "ncclCommInitAll"> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm** comms, int count, const int* /*devices*/) {
    if (t_state.is_inside() || comms == nullptr || count < 1) return pass();
    std::vector<CommunicatorId> ids;
    const std::uint64_t name = names::OfThisProcess();
    try {
      for (int rank = 0; rank < count; ++rank) {
        Communicator asked = Asked(place, "init all", rank, count);
        asked.name = name;
        ids.push_back(registry::Begin(asked));
      }
    } catch (...) {
    }
    const auto make = [&]() noexcept {
      int result = kSuccess;
      for (const CommunicatorId id : ids)
        result = result == kSuccess ? MakeWay(Asked(place, "init all", -1, count), id) : result;
      if (result == kSuccess) result = Making(count == 1 && !ids.empty() ? ids.front() : CommunicatorId{}, pass);
      for (std::size_t i = 0; i < ids.size(); ++i) RecordAnswer(ids[i], result == kSuccess ? comms[i] : nullptr, result);
      return result;
    };
    return launches::Pass(kName, nullptr, make);
  }
};

template <replacements::Text Name, replacements::Text How, class Which, class... Flags>
struct Part : redirects::Around<Part<Name, How, Which, Flags...>, Name> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm* parent, Which which, int number, ncclComm** comm,
                  Config*, Flags...) {
    const Communicator asked = Asked(place, How.data, -1, 0);
    if constexpr (std::is_same_v<Which, int>)
      return MakeFrom(parent, names::SplitBy(which), launches::Shape::kCollective, asked, comm, pass);
    else
      return MakeFrom(parent, names::ShrinkWithout(Listed(which, number)), launches::Shape::kNothing, asked, comm, pass);
  }

 private:
  static std::span<const int> Listed(const int* ranks, int number) {
    return {ranks, ranks == nullptr || number < 0 ? std::size_t{0} : static_cast<std::size_t>(number)};
  }
};
using Split = Part<"ncclCommSplit", "split", int>;           // by color and key
using Shrink = Part<"ncclCommShrink", "shrink", int*, int>;  // without the ranks of a list

// A joining rank has no parent; a staying one passes no rank.
struct Grow : redirects::Around<Grow, "ncclCommGrow"> {
  static int With(std::size_t place, const redirects::Pass& pass, ncclComm* parent, int ranks, const UniqueId*, int rank,
                  ncclComm** comm, Config*) {
    return MakeFrom(parent, {}, launches::Shape::kNothing, Asked(place, "grow", rank, ranks), comm, pass);
  }
};

}  // namespace

redirects::Table MakingCalls() {
  return redirects::MakeTable<InitRank, InitRankConfig, InitRankScalable, InitAll, Split, Shrink, Grow>();
}

}  // namespace amem::nccl
