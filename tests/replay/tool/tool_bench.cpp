// How fast and how large amem-replay is on the journals of a large job:
//   replay_tool_bench [RANKS] [EVENTS-PER-RANK]     (8 and 125 000)
//
// The journals have the shape of the reference workload: 1 772 allocations a rank, two thirds shared with the next rank, and
// pauses and resumes of all of them until the number of events is reached.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "journal/journal.h"
#include "statemachine/apply.h"
#include "statemachine/plan.h"

namespace amem {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr Bytes kMiB = Bytes{1} << 20;
constexpr int kAllocations = 1772, kShared = 1184;

double Seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "replay_tool_bench: %s\n", status.message().c_str());
  std::exit(1);
}

SessionId SessionOf(int rank) { return SessionId{0xbe0000 + static_cast<std::uint64_t>(rank)}; }

// One rank's events, folded and appended one by one.
class Rank {
 public:
  Rank(const fs::path& directory, int rank, int ranks) : rank_(rank), ranks_(ranks) {
    JournalOptions options;
    options.directory = directory;
    auto writer = JournalWriter::Open(options, SessionOf(rank));
    Require(writer.status());
    writer_ = *std::move(writer);
  }

  void Write(std::uint64_t events) {
    Then(SessionOpened{.session = SessionOf(rank_),
                       .host = "bench",
                       .pid = 1000 + rank_,
                       .boot_id = "bench",
                       .amem_version = "0",
                       .driver_version = "bench",
                       .nccl_version = "2.28.9",
                       .gpu_uuids = {"GPU-" + std::to_string(rank_)},
                       .rank = rank_,
                       .realtime_ns = 1'700'000'000'000'000'000,
                       .monotonic_ns = 1,
                       .layout = "direct",
                       .content = "preserve"});
    Allocate();
    while (state_.last.value + 1 < events) {
      Cycle(CycleKind::kPause, state_.cycles + 1, PlanPause(state_));
      Cycle(CycleKind::kResume, state_.cycles, PlanResume(state_));
    }
    Then(SessionClosed{"exit"});
    Require(writer_->Close());
  }
  [[nodiscard]] std::uint64_t events() const { return state_.last.value; }

 private:
  void Then(EventBody body) {
    time_ns_ += 900;
    const Event event{SequenceNumber{state_.last.value + 1}, time_ns_, 4711, std::move(body)};
    Require(Apply(state_, event));
    Require(writer_->Append(event));
  }
  void Place(AllocationId id, Bytes bytes) {
    const Address address{0x7f0000000000 + (next_place_ += 16 * kMiB)};
    Then(RangeReserved{.address = address, .bytes = bytes, .alignment = 2 * kMiB, .site = site_});
    Then(Mapped{.address = address, .bytes = bytes, .allocation = id});
    Then(AccessSet{.address = address, .bytes = bytes, .access = {{{LocationType::kDevice, 0}, 3}}});
  }
  // What the next rank calls an allocation of this one: the order is the same everywhere.
  void Allocate() {
    const SessionId next = SessionOf((rank_ + 1) % ranks_), previous = SessionOf((rank_ + ranks_ - 1) % ranks_);
    Then(PeerConnected{.peer = next, .host = "bench", .pid = 1000 + (rank_ + 1) % ranks_, .rank = (rank_ + 1) % ranks_});
    for (int i = 0; i < kAllocations; ++i) {
      const Bytes bytes = (i % 3 == 0 ? 10 : 2) * kMiB;
      site_ = CallSite{{0x46b1c0 + static_cast<std::uint64_t>(i % 40) * 0x40, 0x4471f2, 0x12345}};
      const AllocationProperties properties{.handle_types = 1, .location = {LocationType::kDevice, 0}};
      const AllocationId own{state_.next_allocation};
      Then(AllocationCreated{
          .allocation = own, .bytes = bytes, .properties = properties, .handle = DriverHandle{1}, .site = site_});
      Place(own, bytes);
      if (i >= kShared) continue;
      const AllocationId imported{state_.next_allocation};
      Then(Exported{.allocation = own});
      Then(ReferenceAdded{.allocation = own, .by = next, .as = imported});
      Then(Imported{.allocation = imported,
                    .remote = {previous, own},
                    .bytes = bytes,
                    .properties = properties,
                    .handle = DriverHandle{2},
                    .site = site_});
      Place(imported, bytes);
    }
  }
  void Cycle(CycleKind kind, std::uint64_t number, const Plan& plan) {
    std::vector<SessionId> members;
    for (int rank = 0; rank < ranks_; ++rank) members.push_back(SessionOf(rank));
    Then(CycleBegun{kind, number, members});
    for (const PlannedPhase& phase : plan.phases) {
      Then(PhaseBegun{phase.phase});
      for (const Step& step : phase.steps) {
        Then(StepBegun{step});
        Then(StepDone{step});
      }
      Then(PhaseDecided{phase.phase, true, {}, {}});
    }
    Then(CycleDone{kind, number, 1'000'000});
  }

  const int rank_, ranks_;
  std::unique_ptr<JournalWriter> writer_;
  State state_;
  std::uint64_t time_ns_ = 1'000'000'000 + static_cast<std::uint64_t>(rank_), next_place_ = 0;
  CallSite site_;
};

struct Used {
  double seconds = 0;
  long peak_mib = 0;
  int status = 0;
};

// Runs the tool with its output thrown away.
Used Tool(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  static char name[] = AMEM_REPLAY;
  argv.push_back(name);
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const auto began = Clock::now();
  const pid_t pid = ::fork();
  if (pid == 0) {
    const int nowhere = ::open("/dev/null", O_WRONLY);
    ::dup2(nowhere, STDOUT_FILENO);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  int status = 0;
  rusage usage{};
  ::wait4(pid, &status, 0, &usage);
  return {Seconds(Clock::now() - began), usage.ru_maxrss / 1024, WIFEXITED(status) ? WEXITSTATUS(status) : -1};
}

void Report(const char* what, const Used& used, std::uint64_t events) {
  std::printf("%-28s %6.2f s  %6.2f M events/s  %5ld MiB  exit %d\n", what, used.seconds,
              static_cast<double>(events) / 1e6 / used.seconds, used.peak_mib, used.status);
}

int Main(int ranks, std::uint64_t events) {
  std::string pattern = fs::temp_directory_path() / "amem-tool-bench-XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) return 1;
  const fs::path directory = pattern;
  const fs::path journals = directory / "journal";
  std::uint64_t all = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    Rank writer(journals, rank, ranks);
    writer.Write(events);
    all += writer.events();
  }
  std::printf("%d ranks, %llu events\n", ranks, static_cast<unsigned long long>(all));
  Report("why", Tool({"why", journals}), all);
  Report("log", Tool({"log", journals}), all);
  Report("verify", Tool({"verify", journals}), all);
  Report("replay", Tool({"replay", journals}), all);
  Report("report --perfetto", Tool({"report", "--perfetto", journals, "-o", directory / "trace.json"}), all);
  Report("pack", Tool({"pack", journals, "-o", directory / "job.amem"}), all);
  std::printf("%-28s %.1f MiB (journals %.1f MiB)\n", "packed",
              static_cast<double>(fs::file_size(directory / "job.amem")) / 1048576, [&] {
                double sum = 0;
                for (const auto& entry : fs::recursive_directory_iterator(journals))
                  if (entry.is_regular_file()) sum += static_cast<double>(entry.file_size()) / 1048576;
                return sum;
              }());
  Report("why job.amem", Tool({"why", directory / "job.amem"}), all);
  fs::remove_all(directory);
  return 0;
}

}  // namespace
}  // namespace amem

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 8;
  const long events = argc > 2 ? std::atol(argv[2]) : 125'000;
  if (ranks < 2 || events < 1) {
    std::fprintf(stderr, "usage: replay_tool_bench [RANKS] [EVENTS-PER-RANK]\n");
    return 1;
  }
  return amem::Main(ranks, static_cast<std::uint64_t>(events));
}
