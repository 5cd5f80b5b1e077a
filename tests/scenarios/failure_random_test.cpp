// Random jobs with one random failure each, in one process: sessions on the simulator, peers in memory, simulated time. Then
// the launcher ends what is left, in one of several ways, and the diagnosis of all journals must name the rank that was at
// fault, in at least 995 of 1000 jobs, and must never call such a job healthy. AMEM_FAILURE_RANDOM=NUMBER runs so many jobs; by
// day a part of a thousand, at night several thousands. AMEM_FAILURE_SEED=NUMBER runs one job alone, and prints its journals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <utility>

#include "journal/base/clock.h"
#include "journal/journal.h"
#include "replay/diagnosis/diagnosis.h"
#include "tests/journal/memory_journal.h"
#include "tests/replay/job/memory_reader.h"
#include "tests/scenarios/baton.h"
#include "tests/scenarios/death.h"
#include "tests/scenarios/start_session.h"

#ifdef AMEM_THREAD_SANITIZED
// A rank that dies in the middle of a call still holds the locks of that call. A real process would take them with it.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions();
const char* __tsan_default_suppressions() { return "deadlock:amem::LocalNetwork::Kill\n"; }
#endif

namespace amem::test {
namespace {

constexpr Bytes kDoomedPage = 4096;
constexpr int kDoomedRanks = 8;  // at most
constexpr std::uint32_t kDoomedTimeout = 200;

struct DoomedRank {
  std::unique_ptr<Simulator> simulator;
  std::unique_ptr<Session> session;
  std::vector<Event> events;
  bool alive = true, silent = false, closed = false;
  std::uint64_t calls_left = 0;  // until it dies in a driver call; 0: it does not
  std::uint64_t steps_left = 0;  // until it dies where it talks to peers
  // From which of its driver calls on they fail with that result; 0: none.
  std::uint64_t fails_from = 0, calls = 0;
  int result = 0;
};

class DoomedJob {
 public:
  DoomedJob(std::uint64_t seed, Baton& baton) : random_(seed), baton_(baton), network_(&baton) {
    ranks_.resize(static_cast<std::size_t>(2 + Pick(kDoomedRanks - 1)));
    memory_ = *SimulatorWorld::InMemory(kDoomedRanks, Bytes{4} << 20);
    const bool slab = Pick(2) == 0;
    for (std::size_t i = 0; i < ranks_.size(); ++i) Start(i, slab);
    Share();
  }

  // False: the failure did not come to pass, as when the job made fewer calls than that.
  bool Run() {
    for (int i = Pick(4); i > 0; --i) {
      Cycle(true, -1);
      Cycle(false, -1);
    }
    culprit = Pick(static_cast<int>(ranks_.size()));
    const bool happened = Fail();
    if (happened) TearDown();
    return happened;
  }
  Verdict Look() {
    std::vector<SessionStory> journals;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      const DoomedRank& r = ranks_[i];
      const SessionStatus status = r.closed ? SessionStatus::kClosed : r.alive ? SessionStatus::kLive : SessionStatus::kCrashed;
      MemoryReader reader(r.events, SessionId{i + 1}, status);
      auto history = ReadStory(reader);
      EXPECT_TRUE(history.ok()) << history.status().message();
      if (history.ok()) journals.push_back(*std::move(history));
    }
    return Diagnose(journals);
  }
  void Print() const {
    for (std::size_t i = 0; i < ranks_.size(); ++i)
      for (const Event& event : ranks_[i].events)
        std::printf("rank %zu %4lu %12lu  %s\n", i, event.seq.value, event.time_ns, ToText(event.body).c_str());
  }
  int culprit = -1;
  std::string what;

 private:
  int Pick(int below) { return static_cast<int>(random_() % static_cast<std::uint64_t>(below)); }
  DoomedRank& At(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  void Start(std::size_t i, bool slab) {
    DoomedRank& r = ranks_[i];
    SimulatorOptions simulated;
    simulated.in_memory = memory_;
    simulated.granularity = kDoomedPage;
    SessionOpened who = RankOf(static_cast<int>(i), SessionId{i + 1});
    who.pid = static_cast<std::int32_t>(i) + 100;
    who.realtime_ns = RealtimeNs();
    who.monotonic_ns = MonotonicNs();
    SessionOptions options;
    options.layout = slab ? Layout::kSlab : Layout::kDirect;
    options.slab_bytes = 32 * kDoomedPage;
    auto started = StartInMemory(simulated, who, options, std::make_unique<test::MemoryJournal>(r.events, r.silent), network_);
    r.simulator = std::move(started.simulator);
    r.session = std::move(started.session);
    r.simulator->SetHook([this, i](std::string_view, std::uint64_t) { return Driver(i); });
  }
  int Driver(std::size_t i) {
    DoomedRank& r = ranks_[i];
    if (r.calls_left > 0 && --r.calls_left == 0) Die(i);
    if (!r.alive) return DeadEnd();
    ++r.calls;
    return r.fails_from != 0 && r.calls >= r.fails_from ? r.result : 0;
  }
  void Step(int i) {
    DoomedRank& r = At(i);
    if (r.steps_left > 0 && --r.steps_left == 0) Die(static_cast<std::size_t>(i));
    if (!r.alive) DeadEnd();
  }
  void Die(std::size_t i) {
    DoomedRank& r = ranks_[i];
    if (!r.alive) return;
    r.alive = false;
    r.silent = true;
    network_.Kill(SessionId{i + 1});
  }
  void RemoveDead(std::size_t i) {
    ranks_[i].session.reset();
    ranks_[i].simulator.reset();
  }

  static void Ok(const Status& status, const char* call) { ASSERT_TRUE(status.ok()) << call << ": " << status.message(); }
  void Place(int rank, AllocationId id, Bytes bytes) {
    auto address = At(rank).session->nccl().Reserve(bytes, 0, {}, 0, {});
    Ok(address.status(), "reserve");
    Ok(At(rank).session->nccl().Map(*address, bytes, 0, id, 0), "map");
    const AccessDescriptor access{{LocationType::kDevice, rank}, 3};
    Ok(At(rank).session->nccl().SetAccess(*address, bytes, std::span(&access, 1)), "set access");
  }
  // A ring, and a few pairs besides.
  void Share() {
    const int ranks = static_cast<int>(ranks_.size());
    for (int rank = 0; rank < ranks; ++rank) ShareOne(rank, (rank + 1) % ranks);
    for (int i = Pick(4); i > 0; --i) ShareOne(Pick(ranks), Pick(ranks));
  }
  void ShareOne(int owner, int importer) {
    AllocationProperties properties;
    properties.handle_types = 1;
    properties.location = {LocationType::kDevice, owner};
    const Bytes bytes = kDoomedPage * static_cast<Bytes>(1 + Pick(6));
    auto id = At(owner).session->nccl().Create(bytes, properties, 0, {});
    ASSERT_TRUE(id.ok()) << id.status().message();
    Place(owner, *id, bytes);
    if (owner == importer) return;
    auto token = At(owner).session->sharing().Export(*id);
    ASSERT_TRUE(token.ok()) << token.status().message();
    auto imported = At(importer).session->sharing().Import(token->get(), {});
    ASSERT_TRUE(imported.ok()) << imported.status().message();
    Place(importer, *imported, bytes);
  }

  // All living ranks but one pause or resume; gives what each was told.
  std::map<int, Status> Cycle(bool pause, int absent) {
    std::map<int, Status> results;
    std::vector<std::function<void()>> work(ranks_.size());
    std::vector<int> delays(ranks_.size());
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      const int rank = static_cast<int>(i);
      delays[i] = Pick(3) == 0 ? Pick(50) : 0;
      if (rank == absent || !ranks_[i].alive || ranks_[i].closed) continue;
      Status& result = results[rank];
      work[i] = [this, rank, pause, &result] {
        result = UntilDeath([&] { return pause ? At(rank).session->Pause() : At(rank).session->ResumeInTime(); });
      };
    }
    baton_.Run(random_(), std::move(work), delays, [this](int rank) { Step(rank); });
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      ranks_[i].calls_left = ranks_[i].steps_left = 0;
      if (!ranks_[i].alive && ranks_[i].session) RemoveDead(i);
    }
    return results;
  }
  static bool AnyFailed(const std::map<int, Status>& results) {
    return std::ranges::any_of(results, [](const auto& result) { return !result.second.ok(); });
  }

  // Puts the failure into the next pause or resume, or beside one. True: it came to pass.
  bool Fail() {
    const bool pause = Pick(2) == 0;
    if (!pause) Cycle(true, -1);
    const std::string cycle = pause ? "pause" : "resume";
    switch (Pick(7)) {
      case 0:
        what = "dies in a driver call of a " + cycle;
        At(culprit).calls_left = static_cast<std::uint64_t>(1 + Pick(14));
        Cycle(pause, -1);
        return !At(culprit).alive;
      case 1:
        what = "dies in a " + cycle + " while it talks";
        At(culprit).steps_left = static_cast<std::uint64_t>(1 + Pick(10));
        Cycle(pause, -1);
        return !At(culprit).alive;
      case 2:
        what = "does not call in a " + cycle;
        return AnyFailed(Cycle(pause, culprit));
      case 3:
        return FailCalls(pause, cycle);
      case 4:
        return Hog();
      case 5:
        what = pause ? "dies while running" : "dies while paused";
        Die(static_cast<std::size_t>(culprit));
        RemoveDead(static_cast<std::size_t>(culprit));
        if (Pick(2) == 0) Cycle(pause, -1);  // the others go on without it
        return true;
      default:
        what = "leaves while paused";
        if (pause) Cycle(true, -1);
        Close(culprit);
        return true;
    }
  }
  bool FailCalls(bool pause, const std::string& cycle) {
    static constexpr std::array kResults = {cuda::kOutOfMemory, 1, 304, 700, 719, 999};
    DoomedRank& r = At(culprit);
    r.result = kResults[static_cast<std::size_t>(Pick(kResults.size()))];
    r.fails_from = r.calls + static_cast<std::uint64_t>(1 + Pick(14));
    what = "fails in a " + cycle + " with " + std::to_string(r.result);
    const bool failed = AnyFailed(Cycle(pause, -1));
    r.fails_from = 0;
    return failed;
  }
  // Another process takes the device of the culprit while the job is paused.
  bool Hog() {
    what = "has no device memory to resume with";
    if (At(culprit).session->CopyState().lifecycle != Lifecycle::kPaused) Cycle(true, -1);
    auto memory = At(culprit).simulator->Memory(DeviceOrdinal{culprit});
    if (!memory.ok()) return false;
    AllocationProperties properties;
    properties.location = {LocationType::kDevice, culprit};
    SimulatorOptions other;
    other.in_memory = memory_;
    other.granularity = kDoomedPage;
    hog_ = *Simulator::Open(other);
    if (!hog_->Create(memory->free, properties, 0).ok()) return false;
    return AnyFailed(Cycle(false, -1));
  }
  void Close(int rank) {
    EXPECT_TRUE(At(rank).session->Close("exit").ok());
    At(rank).closed = true;
    At(rank).session.reset();
  }

  // The launcher ends the others, in any order; or those that had an error exit; or somebody looks before that.
  void TearDown() {
    const int how = Pick(3);
    what += how == 0 ? ", the rest lives" : how == 1 ? ", the rest is killed" : ", the rest exits";
    if (how == 0) return;
    std::vector<int> order(ranks_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::shuffle(order.begin(), order.end(), random_);
    for (const int rank : order) {
      if (!At(rank).alive || At(rank).closed) continue;
      if (how == 2) {
        Close(rank);
      } else {
        Die(static_cast<std::size_t>(rank));
        RemoveDead(static_cast<std::size_t>(rank));
      }
    }
  }

  std::mt19937_64 random_;
  Baton& baton_;
  std::shared_ptr<SimulatorWorld> memory_;
  LocalNetwork network_;
  std::unique_ptr<Simulator> hog_;
  std::vector<DoomedRank> ranks_;
};

std::uint64_t NumberFrom(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Deaths that leave nothing undone behind are said to be over, and need no action; the rank is named all the same.
TEST(RandomFailures, the_rank_at_fault_is_named_and_no_such_job_is_healthy) {
#ifdef AMEM_SANITIZED
  constexpr std::uint64_t kJobs = 100;
#elif defined(AMEM_BY_NIGHT)
  constexpr std::uint64_t kJobs = 5000;
#else
  constexpr std::uint64_t kJobs = 250;
#endif
  const std::uint64_t one = NumberFrom("AMEM_FAILURE_SEED", 0);
  const std::uint64_t jobs = one != 0 ? 1 : NumberFrom("AMEM_FAILURE_RANDOM", kJobs);
  Baton baton(kDoomedRanks);
  std::uint64_t done = 0, right = 0, healthy = 0;
  std::map<std::string, std::string> wrong;  // an example of each sort
  std::map<std::string, int> times;
  for (std::uint64_t seed = one != 0 ? one : 1; done < jobs; ++seed) {
    ASSERT_LT(seed, one + 20 * jobs + 100) << "too few failures come to pass";
    DoomedJob job(seed, baton);
    if (!job.Run()) {
      if (one != 0) break;
      continue;
    }
    ASSERT_FALSE(::testing::Test::HasFailure()) << "AMEM_FAILURE_SEED=" << seed;
    ++done;
    if (one != 0) job.Print();
    const Verdict verdict = job.Look();
    const bool named = verdict.rank == job.culprit;
    right += named ? 1 : 0;
    healthy += verdict.healthy() ? 1 : 0;
    if (one != 0 || !named) {
      wrong[job.what] = "AMEM_FAILURE_SEED=" + std::to_string(seed) + ": rank " + std::to_string(job.culprit) + " " + job.what +
                        ", and what is said: " + std::string(ToText(verdict.kind)) + ", rank " + std::to_string(verdict.rank) +
                        ": " + verdict.headline;
      ++times[job.what];
    }
  }
  for (const auto& [what, example] : wrong) std::printf("%d times, such as %s\n", times[what], example.c_str());
  std::printf("%lu jobs with one failure: the rank is right in %lu, healthy are said to be %lu\n", done, right, healthy);
  EXPECT_EQ(healthy, 0U);
  EXPECT_GE(right * 1000, done * 995);
}

}  // namespace
}  // namespace amem::test
