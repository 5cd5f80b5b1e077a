#include "tests/replay/report/report_job.h"

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "journal/journal.h"
#include "statemachine/apply.h"
#include "statemachine/plan.h"
#include "statemachine/state.h"

namespace amem::test {
namespace {

constexpr Bytes kMiB = Bytes{1} << 20;
constexpr std::uint64_t kMicrosecond = 1'000, kMillisecond = 1'000'000, kSecond = 1'000'000'000;
constexpr std::uint64_t kBoot_ns = 5'417 * kSecond;

class Rank {
 public:
  Rank(int rank, const Sink& sink, std::uint32_t seed)
      : rank_(rank), sink_(sink), chance_(seed + static_cast<std::uint32_t>(rank)) {}

  Status Then(EventBody body, std::uint64_t after_ns, std::uint32_t thread = 0) {
    now_ns += after_ns / 2 + Below(after_ns + 1);
    const Event event{SequenceNumber{state.last.value + 1}, now_ns, 20'000 + 40 * static_cast<std::uint32_t>(rank_) + thread,
                      std::move(body)};
    AMEM_TRY(Apply(state, event).Within("rank " + std::to_string(rank_)));
    sink_(rank_, event);
    return {};
  }

  Status Open() {
    AMEM_TRY(Then(SessionOpened{.session = ReportJobSession(rank_),
                                .host = "gpu-node-07",
                                .pid = 20'000 + 40 * rank_,
                                .boot_id = "5e1d2c4b-0001",
                                .amem_version = "0.1.0",
                                .driver_version = "580.159.04",
                                .nccl_version = "2.28.9",
                                .gpu_uuids = Devices(),
                                .group = 0,
                                .rank = rank_,
                                .realtime_ns = 1'763'712'000 * kSecond + kBoot_ns,
                                .monotonic_ns = kBoot_ns,
                                .layout = "direct",
                                .content = "preserve"},
                  0));
    AMEM_TRY(Then(
        LibraryAttached{
            .path = "/opt/nccl/libnccl.so.2", .build_id = "9f31c0de77aa", .way = "patched", .nccl_version = "2.28.9"},
        kMillisecond));
    for (const char* name :
         {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemExportToShareableHandle"}) {
      AMEM_TRY(Then(DriverSymbolBound{name, 12080, true}, 3 * kMicrosecond));
    }
    for (int i = 0; i < 12; ++i) {
      AMEM_TRY(Then(HostAllocated{Address{0x7fd567a00000 + 0x200000 * static_cast<std::uint64_t>(i)},
                                  i % 3 == 0 ? 1 * kMiB : 64 * 1024, 0, false},
                    40 * kMicrosecond));
    }
    return {};
  }

  Status Place(AllocationId id, Bytes bytes) {
    const Address address{0x7f4000000000 + id.value * 0x1000000};
    AMEM_TRY(Then(RangeReserved{.address = address, .bytes = bytes, .alignment = 2 * kMiB, .site = SiteOf(id.value, 1)},
                  4 * kMicrosecond));
    AMEM_TRY(Then(Mapped{.address = address, .bytes = bytes, .allocation = id}, 2 * kMicrosecond));
    return Then(AccessSet{.address = address, .bytes = bytes, .access = {{Here(), 3}}}, 90 * kMicrosecond);
  }

  Status Create(Bytes bytes, AllocationId* made) {
    *made = AllocationId{state.next_allocation};
    AMEM_TRY(Then(AllocationCreated{.allocation = *made,
                                    .bytes = bytes,
                                    .properties = Properties(rank_),
                                    .handle = DriverHandle{0x22be0000 + made->value * 16},
                                    .site = SiteOf(made->value, 0)},
                  12 * kMicrosecond));
    return Place(*made, bytes);
  }

  Status Churn() {  // small things of the driver's pools, between pauses
    const Address address{0x302000000 + 0x100000 * Below(64)};
    if (state.async.contains(address)) return Then(AsyncFreed{address}, 200 * kMicrosecond);
    return Then(AsyncAllocated{address, (1 + Below(24)) * 128 * 1024}, 200 * kMicrosecond);
  }

  [[nodiscard]] static std::vector<GpuName> Devices() {
    std::vector<GpuName> uuids;
    for (int device = 0; device < 8; ++device) uuids.push_back("GPU-3f2a41" + std::to_string(10 + device));
    return uuids;
  }
  [[nodiscard]] static AllocationProperties Properties(int device) {
    return {.handle_types = 1, .location = {LocationType::kDevice, device}, .gpu_direct_rdma = 1};
  }
  [[nodiscard]] Location Here() const { return {LocationType::kDevice, rank_}; }
  std::uint64_t Below(std::uint64_t n) { return n == 0 ? 0 : chance_() % n; }

  State state;
  std::uint64_t now_ns = kBoot_ns;

 private:
  static CallSite SiteOf(std::uint64_t id, int depth) {
    static constexpr std::uint64_t kSites[][5] = {{0x10a515, 0x10de6c, 0x10f113, 0x9b0e7, 0x9ccce},
                                                  {0x10a515, 0x10de6c, 0x10e20e, 0x9b0e7, 0x9ccce},
                                                  {0x60d40, 0x62e81, 0x61686, 0xdd243, 0x8325f},
                                                  {0x60d40, 0x63184, 0x611bb, 0xdd243, 0x8325f},
                                                  {0x10b853, 0x10b9f4, 0x10c232, 0xa1c2c, 0x78017}};
    CallSite site;
    std::copy_n(kSites[id % 5], 5, site.frames.begin());
    site.frames[0] += 0x23 * static_cast<std::uint64_t>(depth);
    return site;
  }

  int rank_;
  const Sink& sink_;
  std::mt19937 chance_;
};

class Job {
 public:
  Job(const ReportJob& job, const Sink& sink) : job_(job) {
    for (int rank = 0; rank < job.ranks; ++rank) ranks_.push_back(std::make_unique<Rank>(rank, sink, job.seed * 1000));
  }

  Status Run() {
    for (auto& rank : ranks_) AMEM_TRY(rank->Open());
    AMEM_TRY(Allocate());
    std::uint64_t cycle = 0, last_length = 0;
    while (true) {
      const std::uint64_t before = ranks_[0]->state.last.value;
      const bool enough = before + last_length * 3 / 2 > job_.events && cycle >= 2;
      if (job_.cycles > 0 ? std::cmp_equal(cycle, job_.cycles) : enough) break;
      if (job_.cycles == 0) AMEM_TRY(Work(8 + ranks_[0]->Below(12)));
      if (job_.cycles > 0) Wait(4);
      AMEM_TRY(Cycle(CycleKind::kPause, ++cycle, false));
      Wait(20);
      AMEM_TRY(Cycle(CycleKind::kResume, cycle, false));
      last_length = ranks_[0]->state.last.value - before;
    }
    if (job_.fail) {
      AMEM_TRY(Work(10));
      AMEM_TRY(Cycle(CycleKind::kPause, ++cycle, false));
      Wait(15);
      AMEM_TRY(Cycle(CycleKind::kResume, cycle, true));
    } else if (job_.cycles == 0) {
      while (ranks_[0]->state.last.value + 300 < job_.events) AMEM_TRY(Work(8));
    }
    Wait(1);
    if (job_.die) AMEM_TRY(Die());
    for (auto& rank : ranks_) AMEM_TRY(rank->Then(SessionClosed{"exit"}, 20 * kMillisecond));
    return {};
  }

 private:
  Status Die() {
    const SessionId dead = ReportJobSession(static_cast<int>(ranks_.size()) - 1);
    ranks_.pop_back();
    for (auto& rank : ranks_) rank->now_ns += 20 * kSecond;
    AMEM_TRY(At(0).Then(ProcessSeen{.session = dead, .pid = 4711, .state = "gone", .where = "", .answer = "silent"}, 0));
    AMEM_TRY(At(0).Then(PeerLost{dead, kPeerDied}, kMillisecond));
    return {};
  }

  Rank& At(std::size_t rank) { return *ranks_[rank]; }

  void Wait(std::uint64_t seconds) {
    std::uint64_t latest = 0;
    for (auto& rank : ranks_) latest = std::max(latest, rank->now_ns);
    const std::uint64_t length = (seconds * 3 / 4 + At(0).Below(seconds / 2 + 1)) * kSecond;
    for (auto& rank : ranks_) rank->now_ns = latest + length;
  }

  Status Allocate() {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      for (std::size_t peer = 0; peer < ranks_.size(); ++peer) {
        if (peer == r) continue;
        AMEM_TRY(At(r).Then(PeerConnected{ReportJobSession(static_cast<int>(peer)), "gpu-node-07",
                                          20'000 + 40 * static_cast<int>(peer), 0, static_cast<int>(peer)},
                            50 * kMicrosecond, 3));
      }
    }
    // Two of 2 MiB for each of 10 MiB; two thirds are shared: most with the neighbours of the ring, some with others.
    for (int i = 0; i < job_.allocations; ++i) {
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        AllocationId made;
        const Bytes bytes = (i % 3 == 2 ? 10 : 2) * kMiB;
        AMEM_TRY(At(r).Create(bytes, &made));
        if (i % 3 == 0) continue;
        const std::size_t step = i % 7 == 0 ? 2 + At(r).Below(ranks_.size() - 2) : i % 2 == 0 ? 1 : ranks_.size() - 1;
        const std::size_t peer = (r + step) % ranks_.size();
        if (peer != r) AMEM_TRY(Share(r, made, bytes, peer));
      }
      if (i % 40 == 39) Wait(1);
    }
    return {};
  }

  Status Share(std::size_t owner, AllocationId id, Bytes bytes, std::size_t importer) {
    AMEM_TRY(At(owner).Then(Exported{id}, 30 * kMicrosecond, 2));
    const AllocationId as{At(importer).state.next_allocation};
    AMEM_TRY(At(owner).Then(ReferenceAdded{id, ReportJobSession(static_cast<int>(importer)), as}, 200 * kMicrosecond, 3));
    At(importer).now_ns = std::max(At(importer).now_ns, At(owner).now_ns);
    AMEM_TRY(At(importer).Then(Imported{.allocation = as,
                                        .remote = {ReportJobSession(static_cast<int>(owner)), id},
                                        .bytes = bytes,
                                        .properties = Rank::Properties(static_cast<int>(owner))},
                               300 * kMicrosecond));
    return At(importer).Place(as, bytes);
  }

  Status Work(std::uint64_t seconds) {
    Wait(2);
    for (auto& rank : ranks_) {
      for (int i = 0; i < 40; ++i) AMEM_TRY(rank->Churn());
    }
    Wait(seconds);
    return {};
  }

  static std::uint64_t Typical(StepKind kind) {
    switch (kind) {
      case StepKind::kQuiesce:
        return 4 * kMillisecond;
      case StepKind::kScan:
        return 9 * kMillisecond;
      case StepKind::kSave:
        return 30 * kMicrosecond;
      case StepKind::kUnmap:
        return 38 * kMicrosecond;
      case StepKind::kReleaseImport:
        return 30 * kMicrosecond;
      case StepKind::kReleaseOwn:
        return 75 * kMicrosecond;
      case StepKind::kCreate:
        return 15 * kMicrosecond;
      case StepKind::kSetAccess:
        return 110 * kMicrosecond;
      case StepKind::kImport:
        return 240 * kMicrosecond;
      case StepKind::kBeginRestore:
      case StepKind::kRestore:
        return 40 * kMicrosecond;
      default:
        return kMicrosecond;
    }
  }

  Status TakeStep(Rank& rank, const Step& step) {
    AMEM_TRY(rank.Then(StepBegun{step}, kMicrosecond / 2));
    return rank.Then(StepDone{step}, Typical(step.kind));
  }

  // All votes are known when the last rank has voted.
  Status Decide(PhaseKind phase, bool passed, SessionId culprit, const std::string& message) {
    std::uint64_t latest = 0;
    for (std::size_t r = 0; r < ranks_.size() && job_.votes; ++r) {
      const bool ok = passed || culprit != ReportJobSession(static_cast<int>(r));
      AMEM_TRY(At(r).Then(VoteCast{.phase = phase, .ok = ok, .code = ok ? Code::kOk : Code::kOutOfMemory}, 8 * kMicrosecond));
    }
    for (auto& rank : ranks_) latest = std::max(latest, rank->now_ns);
    for (auto& rank : ranks_) {
      rank->now_ns = latest;
      AMEM_TRY(rank->Then(PhaseDecided{phase, passed, culprit, message}, 120 * kMicrosecond));
    }
    return {};
  }

  Status Cycle(CycleKind kind, std::uint64_t number, bool fail) {
    std::vector<SessionId> members;
    std::vector<Plan> plans;
    std::uint64_t latest = 0;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      members.push_back(ReportJobSession(static_cast<int>(r)));
      At(r).now_ns += At(r).Below(180) * kMillisecond;
      AMEM_TRY(
          At(r).Then(PhaseBegun{kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive}, kMillisecond));
      latest = std::max(latest, At(r).now_ns);
    }
    std::vector<std::uint64_t> begun;
    for (auto& rank : ranks_) {
      rank->now_ns = latest;
      AMEM_TRY(rank->Then(CycleBegun{kind, number, members}, 100 * kMicrosecond));
      begun.push_back(rank->now_ns);
      plans.push_back(kind == CycleKind::kPause ? PlanPause(rank->state) : PlanResume(rank->state));
    }
    for (std::size_t p = 0; p < plans[0].phases.size(); ++p) {
      const PhaseKind phase = plans[0].phases[p].phase;
      if (fail && phase == PhaseKind::kResumeCreateOwn) return FailCreate(plans, p, number);
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        AMEM_TRY(At(r).Then(PhaseBegun{phase}, 20 * kMicrosecond));
        for (const Step& step : plans[r].phases[p].steps) AMEM_TRY(TakeStep(At(r), step));
      }
      AMEM_TRY(Decide(phase, true, {}, ""));
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      AMEM_TRY(At(r).Then(CycleDone{kind, number, At(r).now_ns - begun[r]}, 10 * kMicrosecond));
    return {};
  }

  Status FailCreate(const std::vector<Plan>& plans, std::size_t p, std::uint64_t number) {
    const std::size_t victim = std::min<std::size_t>(2, ranks_.size() - 1);
    const PhaseKind phase = plans[0].phases[p].phase;
    std::string why;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      AMEM_TRY(At(r).Then(PhaseBegun{phase}, 20 * kMicrosecond));
      const auto& steps = plans[r].phases[p].steps;
      std::size_t left = r == victim ? steps.size() * 3 / 5 : steps.size();
      for (const Step& step : steps) {
        if (left == 0 && step.kind == StepKind::kCreate) {
          why = ToText(step) + ": cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2) with 6 MiB of 143 771 MiB free on device " +
                std::to_string(r) + "; free memory there and resume again";
          AMEM_TRY(At(r).Then(StepBegun{step}, kMicrosecond));
          AMEM_TRY(At(r).Then(StepFailed{step, Code::kOutOfMemory, 2, why}, 30 * kMillisecond));
          break;
        }
        AMEM_TRY(TakeStep(At(r), step));
        left -= left > 0 ? 1 : 0;
      }
    }
    const std::string told =
        "rank " + std::to_string(victim) + " (pid " + std::to_string(20'000 + 40 * victim) + " on gpu-node-07): " + why;
    AMEM_TRY(Decide(phase, false, ReportJobSession(static_cast<int>(victim)), told));
    return Undo(number, told);
  }

  Status Undo(std::uint64_t number, const std::string& told) {
    for (std::size_t p = 1; p < PlanPause(At(0).state).phases.size(); ++p) {  // all but the arrival
      for (auto& rank : ranks_) {
        const PlannedPhase planned = PlanPause(rank->state).phases[p];
        AMEM_TRY(rank->Then(PhaseBegun{planned.phase}, 20 * kMicrosecond));
        for (const Step& step : planned.steps) AMEM_TRY(TakeStep(*rank, step));
      }
      AMEM_TRY(Decide(PlanPause(At(0).state).phases[p].phase, true, {}, ""));
    }
    for (auto& rank : ranks_)
      AMEM_TRY(
          rank->Then(CycleFailed{CycleKind::kResume, number, true, told + "; the session stays paused, with its contents kept"},
                     20 * kMicrosecond));
    return {};
  }

  const ReportJob& job_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// The same moment on another host: its clocks are ahead, and its journal says how they stand to the wall clock.
Event OnHostOf(int rank, Event event) {
  const std::uint64_t ahead_ns = static_cast<std::uint64_t>(rank) * 1000 * kSecond;
  event.time_ns += ahead_ns;
  if (auto* opened = std::get_if<SessionOpened>(&event.body)) {
    opened->host = "node-" + std::to_string(rank);
    opened->boot_id += "-" + opened->host;
    opened->monotonic_ns += ahead_ns;
  }
  return event;
}

}  // namespace

SessionId ReportJobSession(int rank) { return SessionId{0xa3e0c0de00000100 + static_cast<std::uint64_t>(rank)}; }

Status MakeReportJob(const ReportJob& job, const Sink& sink) { return Job(job, sink).Run(); }

Status WriteReportJob(const ReportJob& job, const std::filesystem::path& directory) {
  std::vector<std::unique_ptr<JournalWriter>> writers;
  JournalOptions options;
  options.directory = directory;
  if (job.ranks > 16) options.tail_bytes = Bytes{1} << 20;  // reserved by each
  for (int rank = 0; rank < job.ranks; ++rank) {
    auto writer = JournalWriter::Open(options, ReportJobSession(rank));
    if (!writer) return writer.status();
    writers.push_back(*std::move(writer));
  }
  Status failed;
  AMEM_TRY(MakeReportJob(job, [&](int rank, const Event& event) {
    if (failed.ok()) failed = writers[static_cast<std::size_t>(rank)]->Append(job.hosts ? OnHostOf(rank, event) : event);
  }));
  AMEM_TRY(failed);
  for (const auto& writer : writers) {
    const bool dies = job.die && writer == writers.back();
    AMEM_TRY(dies ? writer->Flush() : writer->Close());
  }
  return {};
}

}  // namespace amem::test
