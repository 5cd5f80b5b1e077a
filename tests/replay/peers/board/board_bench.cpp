// How long a ballot takes between processes, and what processor time it costs: whole rounds in which nobody has anything to do.
//
// board_bench [RANKS=4] [ROUNDS=1000]
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "replay/peers/board/participant.h"

using namespace amem;
using namespace amem::board;

namespace {

class NoWork final : public RoundHooks {
 public:
  Status Do(agreement::Work, Deadline, const std::function<bool()>&) override { return {}; }
  bool HasEnded(SessionId) override { return false; }
  bool SetHasChanged() override { return false; }
  std::string NameOf(SessionId session) override { return std::to_string(session.value); }
  std::string SeenOf(SessionId, std::chrono::milliseconds) override { return {}; }
  void OnVote(agreement::Ballot, const Status&) override {}
  void OnWait(agreement::Ballot, const BoardReading&) override {}
  void OnDecision(agreement::Ballot, const BoardReading&, const Status&) override {}
};

// False: a round failed.
bool TakeRounds(Board& board, std::size_t seat, int rounds) {
  NoWork hooks;
  for (int i = 0; i < rounds; ++i) {
    CallOnBoard call{.kind = i % 2 == 0 ? CycleKind::kPause : CycleKind::kResume, .until = In(std::chrono::minutes(1))};
    const auto outcome = TakePart(board, seat, call, hooks);
    if (!outcome || outcome->failed) return false;
  }
  return true;
}

double Seconds(const timeval& time) { return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6; }
// Of the children that have been waited for.
double ProcessorSeconds() {
  rusage used{};
  ::getrusage(RUSAGE_CHILDREN, &used);
  return Seconds(used.ru_utime) + Seconds(used.ru_stime);
}

}  // namespace

int main(int count, char** arguments) {
  const int ranks = count > 1 ? std::atoi(arguments[1]) : 4, rounds = count > 2 ? std::atoi(arguments[2]) : 1000;
  std::vector<SessionId> members;
  for (int i = 0; i < ranks; ++i) members.push_back(SessionId{static_cast<std::uint64_t>(i + 1)});
  auto board = Board::Make("", members);
  if (!board) return 2;
  void* shared = ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* ready = new (shared) std::atomic<int>(0);
  for (int rank = 0; rank < ranks; ++rank) {
    if (::fork() != 0) continue;
    for (++*ready; *ready <= ranks;) ::usleep(1000);
    ::_exit(TakeRounds(*board, static_cast<std::size_t>(rank), rounds) ? 0 : 1);
  }
  while (*ready < ranks) ::usleep(1000);
  const double before = ProcessorSeconds();  // a shell that became this program had children, too
  const auto began = Now();
  ++*ready;
  bool ok = true;
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    ::wait(&status);
    ok = ok && status == 0;
  }
  const double took = std::chrono::duration<double>(Now() - began).count();
  const double ballots = 4.0 * rounds;
  std::printf("%d processes: a ballot takes %.1f us, and %.1f us of processor time of all together\n", ranks,
              took * 1e6 / ballots, (ProcessorSeconds() - before) * 1e6 / ballots);
  return ok ? 0 : 1;
}
