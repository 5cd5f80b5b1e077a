// What it costs to explain a large job. Its journals are simulated: no process ran and no GPU is needed.
//
//   large_job_bench DIR RANKS HOSTS EVENTS    about that many events of each rank; the hosts' clocks are minutes apart
//
// Writes the journals, unless DIR exists, and diagnoses them. The ranks of a host share memory, pause and resume over and over,
// with the steps that the real plans ask for. The last resume fails on the last rank but one, for want of device memory; the
// other hosts resume. Each host's journals are in DIR/host-N, for `amem-replay why DIR/host-*`.
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/diagnosis/diagnosis.h"
#include "replay/diagnosis/verdict.h"
#include "statemachine/apply.h"
#include "statemachine/plan.h"

namespace amem {
namespace {

constexpr Bytes kMiB = Bytes{1} << 20;
constexpr std::uint64_t kMinute = 60'000'000'000;

void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "large_job_bench: %s\n", status.message().c_str());
  std::exit(1);  // a program of its own
}

class LargeRank {
 public:
  LargeRank(const std::filesystem::path& directory, SessionId session, std::uint64_t& clock)
      : session_(session), clock_(clock) {
    JournalOptions options;
    options.directory = directory;
    options.snapshot_every = ~std::uint64_t{0};  // all events stay
    options.snapshot_bytes = Bytes{1} << 40;
    options.map_bytes = Bytes{16} << 30;
    options.keep_sessions = 1'000'000;
    options.keep_bytes = Bytes{1} << 50;
    auto writer = JournalWriter::Open(options, session);
    Require(writer.status());
    writer_ = *std::move(writer);
  }
  void Then(EventBody body) {
    clock_ += 1'000;
    const Event event{.seq = SequenceNumber{state_.last.value + 1}, .time_ns = clock_, .thread = 1, .body = std::move(body)};
    Require(Apply(state_, event));
    Require(writer_->Append(event));
  }
  void Phase(PhaseKind phase, bool pausing, bool fails) {
    const Plan plan = pausing ? PlanPause(state_) : PlanResume(state_);
    Then(PhaseBegun{phase});
    for (const PlannedPhase& planned : plan.phases) {
      if (planned.phase != phase) continue;
      for (const Step& step : planned.steps) {
        Then(StepBegun{step});
        if (fails) {
          Then(StepFailed{step, Code::kOutOfMemory, 2, "check memory: device 0 has 1 MiB free"});
          break;
        }
        Then(StepDone{step});
      }
    }
    Then(fails ? VoteCast{phase, false, Code::kOutOfMemory, "check memory: device 0 has 1 MiB free"} : VoteCast{phase});
  }
  Status Close() { return writer_->Close(); }
  void Crash() { writer_.reset(); }
  [[nodiscard]] SessionId session() const { return session_; }
  [[nodiscard]] std::uint64_t events() const { return state_.last.value; }

 private:
  SessionId session_;
  std::uint64_t& clock_;
  State state_;
  std::unique_ptr<JournalWriter> writer_;
};

class LargeHost {
 public:
  LargeHost(const std::filesystem::path& directory, int host, int ranks, int world) : clock_(kMinute * (host + 1)) {
    for (int i = 0; i < ranks; ++i) {
      const int rank = host * ranks + i;
      members_.push_back(SessionId{0x1000 + static_cast<std::uint64_t>(rank)});
      ranks_.push_back(std::make_unique<LargeRank>(directory / ("host-" + std::to_string(host)), members_.back(), clock_));
      ranks_.back()->Then(
          SessionOpened{.session = members_.back(),
                        .host = "host-" + std::to_string(host),
                        .pid = 1000 + i,
                        .boot_id = "boot-" + std::to_string(host),
                        .amem_version = "0.1.0",
                        .rank = rank,
                        .realtime_ns = 1'700'000'000'000'000'000 + static_cast<std::uint64_t>(host) * 10 * kMinute,
                        .monotonic_ns = clock_ + 1'000,
                        .layout = "direct",
                        .content = "preserve"});
    }
    for (int i = 0; i < ranks; ++i) {
      ranks_[i]->Then(CommunicatorBegun{CommunicatorId{1}, {}, "init", host * ranks + i, world});
      ranks_[i]->Then(CommunicatorReady{CommunicatorId{1}, 0xfeed, host * ranks + i, world, DeviceOrdinal{0}});
    }
    for (int i = 0; i < ranks; ++i) Share(i, (i + 1) % ranks);
  }
  // Until each has about so many events, less what the last resume takes.
  void Run(std::uint64_t events, bool fails) {
    while (ranks_.front()->events() + 200 < events) {
      Cycle(CycleKind::kPause, false);
      if (ranks_.front()->events() + 200 < events)
        Cycle(CycleKind::kResume, false);
      else
        break;
    }
    if (paused_) Cycle(CycleKind::kResume, fails);
    if (!paused_ && fails) {
      Cycle(CycleKind::kPause, false);
      Cycle(CycleKind::kResume, true);
    }
    for (auto& rank : ranks_) fails ? rank->Crash() : Require(rank->Close());
  }
  [[nodiscard]] std::uint64_t events() const {
    std::uint64_t events = 0;
    for (const auto& rank : ranks_) events += rank->events();
    return events;
  }

 private:
  // The owner has a few buffers, of which the importer maps one, and another the way back.
  void Share(int owner, int importer) {
    constexpr std::uint64_t kOwn = 8;
    const AllocationProperties properties{.handle_types = 1, .location = {LocationType::kDevice, 0}};
    for (std::uint64_t n = 1; n <= kOwn; ++n) {
      const Address at{0x7f0000000000 + n * 0x10000000};
      ranks_[owner]->Then(AllocationCreated{.allocation = AllocationId{n}, .bytes = 2 * kMiB, .properties = properties});
      ranks_[owner]->Then(RangeReserved{.address = at, .bytes = 2 * kMiB});
      ranks_[owner]->Then(Mapped{.address = at, .bytes = 2 * kMiB, .allocation = AllocationId{n}});
      ranks_[owner]->Then(AccessSet{.address = at, .bytes = 2 * kMiB, .access = {{{LocationType::kDevice, 0}, 3}}});
    }
    if (owner == importer) return;
    shares_.push_back({owner, importer});
    if (shares_.size() < ranks_.size()) return;
    for (const auto& [from, to] : shares_) {
      const AllocationId as{kOwn + 1};
      ranks_[from]->Then(Exported{.allocation = AllocationId{1}});
      ranks_[from]->Then(PeerConnected{.peer = members_[to], .host = "host", .pid = 1000 + to, .rank = -1});
      ranks_[from]->Then(ReferenceAdded{.allocation = AllocationId{1}, .by = members_[to], .as = as});
      ranks_[to]->Then(
          Imported{.allocation = as, .remote = {members_[from], AllocationId{1}}, .bytes = 2 * kMiB, .properties = properties});
      const Address at{0x7e0000000000};
      ranks_[to]->Then(RangeReserved{.address = at, .bytes = 2 * kMiB});
      ranks_[to]->Then(Mapped{.address = at, .bytes = 2 * kMiB, .allocation = as});
      ranks_[to]->Then(AccessSet{.address = at, .bytes = 2 * kMiB, .access = {{{LocationType::kDevice, 0}, 3}}});
    }
  }
  void Cycle(CycleKind kind, bool fails) {
    const bool pausing = kind == CycleKind::kPause;
    if (pausing) ++cycle_;
    for (auto& rank : ranks_) rank->Then(PhaseBegun{pausing ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive});
    for (auto& rank : ranks_) rank->Then(CycleBegun{kind, cycle_, members_});
    const std::vector<PhaseKind> phases =
        pausing
            ? std::vector{PhaseKind::kPauseArrive, PhaseKind::kPauseSave, PhaseKind::kPauseReleaseOwn, PhaseKind::kPauseGone}
            : std::vector{PhaseKind::kResumeArrive, PhaseKind::kResumeCreateOwn, PhaseKind::kResumeImport,
                          PhaseKind::kResumeVerify, PhaseKind::kResumeOpen};
    for (const PhaseKind phase : phases) {
      const SessionId culprit = fails && ranks_.size() > 1 ? members_[members_.size() - 2] : SessionId{};
      for (auto& rank : ranks_) rank->Phase(phase, pausing, rank->session() == culprit);
      const std::string why = culprit ? "rank failed: check memory: device 0 has 1 MiB free" : "";
      const Code code = culprit ? Code::kOutOfMemory : Code::kOk;
      for (auto& rank : ranks_) rank->Then(PhaseDecided{phase, !culprit, culprit, why, code, culprit ? 2 : 0});
      if (!culprit) continue;
      for (auto& rank : ranks_) rank->Then(CycleFailed{kind, cycle_, true, why, code, 2});
      return;
    }
    for (auto& rank : ranks_) rank->Then(CycleDone{kind, cycle_, 1'000'000});
    paused_ = pausing;
  }

  std::uint64_t clock_;
  std::vector<SessionId> members_;
  std::vector<std::unique_ptr<LargeRank>> ranks_;
  std::vector<std::pair<int, int>> shares_;
  std::uint64_t cycle_ = 0;
  bool paused_ = false;
};

void WriteLargeJob(const std::filesystem::path& directory, int ranks, int hosts, std::uint64_t events_each) {
  std::uint64_t events = 0;
  for (int host = 0; host < hosts; ++host) {
    LargeHost one(directory, host, ranks / hosts, ranks);
    one.Run(events_each, host == hosts - 1);
    events += one.events();
  }
  std::printf("written: %llu events of %d ranks on %d hosts\n", static_cast<unsigned long long>(events), ranks, hosts);
}

double ProcessorSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

int ExplainLargeJob(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> sessions;
  for (const auto& host : std::filesystem::directory_iterator(directory)) {
    Result<std::vector<std::filesystem::path>> of_host = ListSessions(host.path());
    Require(of_host.status());
    sessions.insert(sessions.end(), of_host->begin(), of_host->end());
  }
  const double processor = ProcessorSeconds();
  const auto began = std::chrono::steady_clock::now();
  const Result<std::vector<Verdict>> verdicts = DiagnoseJobs(sessions);
  Require(verdicts.status());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const Verdict& first = verdicts->front();
  std::printf("%zu jobs; %llu events of %llu journals: %.1f s, %.1f s of processor time, %ld MB at most\n", verdicts->size(),
              static_cast<unsigned long long>(first.totals.events), static_cast<unsigned long long>(first.totals.journals),
              seconds, ProcessorSeconds() - processor, usage.ru_maxrss / 1024);
  std::printf("%s.\n%s\n%zu facts of evidence, %zu notes\n", first.headline.c_str(), first.summary.c_str(),
              first.evidence.size(), first.notes.size());
  return 0;
}

int RunLargeJob(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: large_job_bench DIR RANKS HOSTS EVENTS\n");
    return 1;
  }
  const int ranks = std::atoi(argv[2]), hosts = std::atoi(argv[3]);
  if (hosts < 1 || ranks < hosts || ranks % hosts != 0) {
    std::fprintf(stderr, "large_job_bench: each host has the same number of ranks, at least one\n");
    return 1;
  }
  if (!std::filesystem::exists(argv[1])) WriteLargeJob(argv[1], ranks, hosts, std::strtoull(argv[4], nullptr, 10));
  return ExplainLargeJob(argv[1]);
}

}  // namespace
}  // namespace amem

int main(int argc, char** argv) { return amem::RunLargeJob(argc, argv); }
