// How long an import, an import again and a call take between processes: medians, in microseconds. With a number of ranks, from
// 2 to 128, it measures the calls of so many alone; all ranks of one host agree together, so their number is the whole
// question. A call is a pause or a resume in which nobody has anything to do, four ballots each: finding the set, coming, and
// three votes. A vote is a quarter of it.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "tests/replay/peers/call_on_board.h"

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

double ProcessorSeconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

void BenchCalls(const TemporaryDirectory& directory, Desk* desk, int ranks) {
  const int calls = 2 * (2000 / ranks);
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
      int failed = 0;
      const auto call = [&](int i) {
        const CycleKind kind = i % 2 == 0 ? CycleKind::kPause : CycleKind::kResume;
        if (!CallOnBoards(*self.peers, kind, std::chrono::seconds(60)).status.ok()) ++failed;
      };
      call(0);
      call(1);
      const double before = ProcessorSeconds();
      const double took = MedianOf(calls, call);
      const double busy = (ProcessorSeconds() - before) / calls * 1e6;
      if (failed > 0) std::printf("rank %d: %d calls failed\n", rank, failed);
      if (rank == 1)
        std::printf("vote of %d processes %.1f us, a call %.1f us, of which this process worked %.1f us\n", ranks, took / 4,
                    took, busy);
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
  BenchCalls(directory, desk, ranks);
  return 0;
}
