#include "tests/world/launches.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <thread>
#include <vector>

#include "replay/control/rank_link.h"
#include "tests/world/action.h"
#include "tests/world/findings.h"
#include "tests/world/rank.h"

namespace amem::world {
namespace {

namespace launches = nccl::launches;
using launches::Counted;
using launches::Launched;
using launches::Shape;

constexpr std::uint64_t kAhead = 6;  // launches by which a program runs ahead of the slowest rank, before it waits for results

std::uint64_t Mixed(std::uint64_t value) {
  value = (value ^ (value >> 31U)) * 0x7fb5d329728ea185U;
  return value ^ (value >> 27U);
}

// By rank; empty if `rank` is none of them: all, those of its parity, all but rank 0.
std::vector<int> MembersOf(const Settings& settings, std::size_t communicator, int rank) {
  std::vector<int> members;
  for (int one = 0; one < settings.ranks; ++one)
    if (communicator == 0 || (communicator == 1 && one % 2 == rank % 2) || (communicator == 2 && one > 0 && rank > 0))
      members.push_back(one);
  return members;
}

}  // namespace

// What a request from outside does to this rank's memory.
class Launches::OnRank final : public control::Actions {
 public:
  explicit OnRank(Rank& rank) : rank_(rank) {}
  Status PauseTags() override { return {}; }
  Status ResumeTags() override { return {}; }
  Status PauseNccl() override { return rank_.PauseBesideProgram(); }
  bool NcclIsAway() override { return rank_.session->StaysPaused(); }
  Status ResumeNccl() override { return rank_.ResumeAsAsked(); }
  Bytes Held() override {
    return rank_.session->Inspect([](const State& state) { return Measure(state).own_device_resident; });
  }
  void Note(EventBody event) override { rank_.session->records().Note(std::move(event)); }
  agreement::LaunchReading HoldLaunches(const agreement::LaunchOrder& order) override { return launches::Hold(order); }
  void LetLaunchesGo() override { launches::LetGo(); }
  Status AwaitLaunches() override { return rank_.session->devices().AwaitStreams(launches::Streams()); }
  std::string WhyLaunchesCannotBeHeld() override { return launches::Read().why_not; }
  Result<control::RankStatus> Ask(SessionId rank) override {
    return control::StatusOf(control::ToolSockets(rank_.settings.directory / "sockets"), rank);
  }

 private:
  Rank& rank_;
};

Launches::Launches(const Settings& settings, std::shared_ptr<Page> page, int rank)
    : settings_(settings), page_(std::move(page)), rank_(rank) {
  launches::NoteCapture(false);  // as NCCL asks before each launch
  for (std::size_t i = 0; i < kCommunicators; ++i) {
    const std::vector<int> members = MembersOf(settings, i, rank);
    const auto at = std::ranges::find(members, rank);
    if (at != members.end())
      together_[i] = Make(Mixed(settings.seed * 64 + i * kMostRanks + static_cast<std::size_t>(members.front())),
                          static_cast<int>(at - members.begin()), static_cast<int>(members.size()));
  }
  for (std::size_t i = 0; i < static_cast<std::size_t>(settings.threads); ++i)
    alone_[i] = Make(Mixed(settings.seed * 64 + 16 + i * kMostRanks + static_cast<std::size_t>(rank)), 0, 1);
}

Launches::~Launches() = default;

void Launches::Begin(Rank& rank) {
  actions_ = std::make_unique<OnRank>(rank);
  control_.Begin(SessionOf(rank_), *actions_, 0);
}

launches::Counted* Launches::Make(std::uint64_t clock, int rank, int ranks) {
  static std::uintptr_t last = 0;
  auto* const address = reinterpret_cast<ncclComm*>(last += 0x10000);
  nccl::Communicator known{.how = "init", .name = clock | 1U, .rank = rank, .ranks = ranks, .device = DeviceOrdinal{rank_}};
  known.id = nccl::registry::Begin(known);
  nccl::registry::Bind(known.id, address);
  nccl::registry::MarkReady(known);
  return launches::FindCounted(address);
}

// A program waits for results now and then, so that no rank is far ahead.
bool Launches::MayLaunch() const {
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(settings_.ranks); ++rank)
    if (!page_->dead[rank] && page_->at[rank] + kAhead < next_) return false;
  return true;
}

void Launches::Next(Worker& worker, const std::function<void()>& use) {
  if (worker.number != 0 || !MayLaunch()) return;
  const std::uint64_t chance = Mixed(settings_.seed * 977 + next_);
  const std::size_t communicator = chance % kCommunicators;
  Counted* const together = together_[communicator];
  page_->at[static_cast<std::size_t>(rank_)] = ++next_;
  if (together == nullptr) return;  // the others of it do
  std::vector<Launched> all;
  const auto add = [&](Shape shape, int peer) { all.push_back({together, shape, peer, worker.stream}); };
  const auto neighbour = [&](int by) { return (together->member.rank + by + together->member.ranks) % together->member.ranks; };
  switch (chance / kCommunicators % 4) {
    case 0:  // a ring: to the next, from the one before, in a group
      add(Shape::kSend, neighbour(1)), add(Shape::kReceive, neighbour(-1));
      break;
    case 1:  // all to all
      for (int peer = 0; peer < together->member.ranks; ++peer) add(Shape::kSend, peer), add(Shape::kReceive, peer);
      break;
    default:
      add(Shape::kCollective, -1);
  }
  const auto launch = [&] {
    ++page_->launched[static_cast<std::size_t>(rank_)][communicator];
    Submit(worker, communicator);
    use();
    return 0;
  };
  const bool passes_by = settings_.lose == "gate" && worker.Pick(3) == 0;  // it is neither counted nor held
  const int result = passes_by ? launch() : launches::Launch("a collective of the world", all, launch);
  if (result != 0) Found(fmt::format("a collective answered {}", result));
}

// A kernel: waits for all others, and takes a while.
void Launches::Submit(Worker& worker, std::size_t communicator) {
  const std::uint64_t number = page_->launched[static_cast<std::size_t>(rank_)][communicator];
  worker.stream->Submit([this, communicator, number, us = worker.Pick(400)] {
    const auto all_are_there = [&] {
      return std::ranges::all_of(MembersOf(settings_, communicator, rank_), [&](int member) {
        const auto rank = static_cast<std::size_t>(member);
        return page_->dead[rank] || page_->launched[rank][communicator] >= number;
      });
    };
    while (page_->stage == kRunning && !page_->found && !all_are_there())
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    std::this_thread::sleep_for(std::chrono::microseconds(us));
    page_->ended[static_cast<std::size_t>(rank_)][communicator] = number;
  });
}

void Launches::Alone(Worker& worker, void* stream, const std::function<void()>& submit) {
  const Launched one{alone_[static_cast<std::size_t>(worker.number)], Shape::kCollective, -1, stream};
  static_cast<void>(launches::Launch("a kernel of the world", {&one, 1}, [&] {
    submit();
    return 0;
  }));
}

void Collective(Worker& worker) {
  Rank& rank = worker.rank;
  if (rank.launches == nullptr || worker.stream->capturing()) return;
  Place* const place = worker.Any([](const Place& one) { return one.kind == Kind::kNccl && !one.memory->freed; });
  rank.launches->Next(worker, [&] {
    if (place != nullptr) UseAsKernel(worker, *worker.stream, *place, worker.Pick(2) == 0);
  });
}

}  // namespace amem::world
