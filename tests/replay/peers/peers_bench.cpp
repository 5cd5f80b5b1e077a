// How long an import, an import again and a vote take between processes: medians, in microseconds. With a number of ranks, from
// 2 to 128, it measures the arrival and the vote of so many alone; all ranks of one host vote together, so their number is the
// whole question.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "tests/replay/peers/peers_fixture.h"

using namespace amem;
using namespace amem::test;

namespace {

using Clock = std::chrono::steady_clock;

double Microseconds(Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); }

double Median(std::vector<double>& values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

template <class Work>
double MedianOf(int times, const Work& work) {
  std::vector<double> took;
  for (int i = 0; i < times; ++i) {
    const auto begun = Clock::now();
    work(i);
    took.push_back(Microseconds(Clock::now() - begun));
  }
  return Median(took);
}

constexpr int kMostRanks = 128;

struct Desk {
  Token token[kMostRanks];
};

void BenchSharing(const TemporaryDirectory& directory, Desk* desk) {
  Baton ready, done;
  const Child owner([&] {
    Rank self(directory, 0);
    desk->token[0] = self.session.Export(AllocationId{1});
    ready.Pass();
    done.Await();
    return 0;
  });
  ready.Await();
  {
    Rank importer(directory, 1);
    const double import = MedianOf(
        2000, [&](int i) { (void)importer.peers->Import(desk->token[0], AllocationId{static_cast<std::uint64_t>(i) + 10}); });
    std::vector<ShareRequest> requests;
    for (std::uint64_t i = 0; i < 750; ++i) requests.push_back({AllocationId{1}, AllocationId{i + 10}});
    const double again = MedianOf(20, [&](int) { (void)importer.Reimport(desk->token[0].session, requests); });
    std::printf("import %.1f us, import again %.2f us per descriptor (750 at once)\n", import, again / 750);
  }
  done.Pass();
}

void BenchRounds(const TemporaryDirectory& directory, Desk* desk, int ranks) {
  const int votes = 8000 / ranks, rounds = std::max(200 / ranks, 5);
  Baton come, go[2];
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < ranks; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      Rank self(directory, rank);
      desk->token[rank] = self.session.Export(AllocationId{1});
      come.Pass();
      go[0].Await();
      for (int other = 0; other < ranks; ++other) {
        if (other == rank) continue;
        (void)self.peers->Import(desk->token[other], AllocationId{static_cast<std::uint64_t>(other) + 100});
        self.session.Add(desk->token[other].session);
      }
      come.Pass();
      go[1].Await();
      std::unique_ptr<Round> round;
      const double arrive = MedianOf(rounds, [&](int) {
        round.reset();
        auto arrived = self.Arrive(CycleKind::kPause, 1);
        if (arrived) round = *std::move(arrived);
      });
      if (round == nullptr) return 1;
      const double vote = MedianOf(votes, [&](int) { (void)round->Vote(PhaseKind::kPauseSave, {}).status; });
      if (rank == 1) std::printf("vote of %d processes %.1f us, arrival with discovery %.1f us\n", ranks, vote, arrive);
      std::fflush(stdout);
      return 0;
    }));
  }
  for (int stage = 0; stage < 2; ++stage) {
    for (int rank = 0; rank < ranks; ++rank) come.Await();
    go[stage].Pass(ranks);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int ranks = count > 1 ? std::atoi(arguments[1]) : 4;
  if (ranks < 2 || ranks > kMostRanks) {
    std::fprintf(stderr, "usage: peers_bench [RANKS], from 2 to %d\n", kMostRanks);
    return 2;
  }
  const TemporaryDirectory directory;
  auto* desk = static_cast<Desk*>(::mmap(nullptr, sizeof(Desk), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (count == 1) BenchSharing(directory, desk);
  std::fflush(stdout);  // or each child would say it again
  BenchRounds(directory, desk, ranks);
  return 0;
}
