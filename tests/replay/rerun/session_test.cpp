// One session of a rerun, given what the executor recorded: the same steps, with the same results.
#include "replay/rerun/session.h"

#include "tests/replay/cycle/cycle_fixture.h"
#include "tests/replay/cycle/lone_backup.h"
#include "tests/replay/job/scripted_pool.h"

namespace amem {
namespace {

using test::k2M, test::kMiB, test::kOwner;

class RerunSessionTest : public test::CycleFixture {
 protected:
  Status RunPhases(const Plan& plan) {
    for (const PlannedPhase& phase : plan.phases) AMEM_TRY(executor_.Run(phase));
    return {};
  }
  void Pause() {
    Record(CycleBegun{CycleKind::kPause, 1, {}});
    ASSERT_TRUE(RunPhases(PlanPause(ledger_.state())).ok());
    Record(CycleDone{CycleKind::kPause, 1, 1});
  }
  Status Resume() {
    Record(CycleBegun{CycleKind::kResume, 1, {}});
    AMEM_TRY(RunPhases(PlanResume(ledger_.state())));
    Record(CycleDone{CycleKind::kResume, 1, 1});
    return {};
  }

  // A replay of all that was recorded, on a simulated host of its own.
  struct Replay {
    Simulator* driver = nullptr;
    std::unique_ptr<RerunSession> session;
    RerunSession::Outcome last;
    bool reproduced = false;
  };
  Replay NewReplay() {
    rerun_world_ = *SimulatorWorld::InMemory(2, 512 * kMiB);
    auto driver = *Simulator::Open({.in_memory = rerun_world_, .visible = {0}, .physical = false});
    owners_driver_ = *Simulator::Open({.in_memory = rerun_world_, .visible = {1}, .physical = false});
    absent_owner_ = AbsentOwner(*owners_driver_);
    Replay replay;
    replay.driver = driver.get();
    replay.session = std::make_unique<RerunSession>(
        std::move(driver),
        [this](const RemoteAllocation& remote, const Allocation& a) { return absent_owner_.Export(remote, a); });
    return replay;
  }
  // Until the first event whose result differs, or the end.
  void Take(Replay& replay, std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      replay.last = replay.session->Take(events_[i]);
      replay.reproduced = replay.reproduced || replay.last.reproduced;
      if (!replay.last.mismatch.ok()) return;
    }
  }
  // Of the resume.
  std::size_t ResumeBegins() const {
    std::size_t i = 0;
    while (!std::holds_alternative<CycleDone>(events_[i].body)) ++i;
    return i + 1;
  }

  test::LoneBackup backup_{*sim_};
  Executor executor_{ledger_, *sim_, peers_, backup_};
  std::shared_ptr<SimulatorWorld> rerun_world_;
  std::unique_ptr<Simulator> owners_driver_;
  AbsentOwner absent_owner_;
};

TEST_F(RerunSessionTest, a_pause_and_a_resume_are_done_again_and_end_in_the_same_state) {
  Create();
  Create(k2M, false);
  Import();
  Pause();
  ASSERT_TRUE(Resume().ok());
  Replay replay = NewReplay();
  Take(replay, 0, events_.size());
  EXPECT_TRUE(replay.last.mismatch.ok()) << replay.last.what << ": " << replay.last.mismatch.message();
  EXPECT_EQ(replay.session->recorded(), ledger_.state());
  EXPECT_TRUE(replay.session->Compare().ok());
  EXPECT_EQ(replay.session->counts().steps, All<StepBegun>().size());
  EXPECT_EQ(replay.session->counts().calls, replay.session->counts().steps + 4 + 1 + 4)
      << "what is mapped was created or imported, and a range was reserved, mapped and opened; the second was only created";
  EXPECT_EQ(replay.driver->BytesInUse(DeviceOrdinal{0}), 2 * k2M);
}

TEST_F(RerunSessionTest, memory_that_stands_in_for_a_lost_owners_is_a_small_piece_here_too) {
  Import(96 * kMiB);
  Pause();
  Record(PeerLost{kOwner, kPeerDied});
  ASSERT_TRUE(Resume().ok());
  Replay replay = NewReplay();
  Take(replay, 0, events_.size());
  EXPECT_TRUE(replay.last.mismatch.ok()) << replay.last.what << ": " << replay.last.mismatch.message();
  EXPECT_TRUE(replay.session->Compare().ok()) << replay.session->Compare().message();
  EXPECT_EQ(replay.driver->Snapshot().mappings.size(), 3U);
  EXPECT_EQ(replay.driver->BytesInUse(DeviceOrdinal{0}), 32 * kMiB);
}

TEST_F(RerunSessionTest, what_is_mapped_only_once_a_small_piece_stands_in_for_it_is_mapped_repeatedly_here_too) {
  const AllocationId orphan = Import(96 * kMiB);
  Pause();
  Record(PeerLost{kOwner, kPeerDied});
  ASSERT_TRUE(Resume().ok());
  Map(orphan, 96 * kMiB);
  Replay replay = NewReplay();
  Take(replay, 0, events_.size());
  EXPECT_TRUE(replay.last.mismatch.ok()) << replay.last.what << ": " << replay.last.mismatch.message();
  EXPECT_TRUE(replay.session->Compare().ok()) << replay.session->Compare().message();
  EXPECT_EQ(replay.driver->Snapshot().mappings.size(), 6U);
}

TEST_F(RerunSessionTest, a_piece_that_is_missing_under_a_mapping_is_a_difference) {
  const AllocationId orphan = Import(96 * kMiB);
  Pause();
  Record(PeerLost{kOwner, kPeerDied});
  ASSERT_TRUE(Resume().ok());
  Replay replay = NewReplay();
  Take(replay, 0, events_.size());
  ASSERT_TRUE(replay.driver->Unmap(PlaceOf(orphan) + 32 * kMiB, 32 * kMiB).ok());
  EXPECT_NE(replay.session->Compare().message().find("should be mapped, and is not"), std::string::npos);
}

TEST_F(RerunSessionTest, a_step_that_fails_only_in_the_replay_is_a_difference) {
  Create();
  Pause();
  ASSERT_TRUE(Resume().ok());
  for (const char* call : {"Memory", "Create", "Map", "SetAccess"}) {
    Replay replay = NewReplay();
    Take(replay, 0, ResumeBegins());
    ASSERT_TRUE(replay.last.mismatch.ok()) << replay.last.mismatch.message();
    ASSERT_TRUE(replay.driver->FailNext(call, 1, cuda::kUnknown).ok());
    Take(replay, ResumeBegins(), events_.size());
    EXPECT_FALSE(replay.last.mismatch.ok()) << call;
    EXPECT_EQ(replay.last.what.find("result of step \""), 0U) << replay.last.what;
  }
}

TEST_F(RerunSessionTest, a_device_without_room_fails_again_where_there_is_as_little_and_differs_where_there_is_more) {
  Create(64 * kMiB);
  Pause();
  const DriverHandle hog = *owner_->Create(480 * kMiB, {1, 0, {LocationType::kDevice, 0}, 0, 0, 0, 0}, 0);
  ASSERT_EQ(Resume().code(), Code::kOutOfMemory);
  ASSERT_TRUE(owner_->Release(hog).ok());
  for (const bool as_little : {true, false}) {
    Replay replay = NewReplay();
    Take(replay, 0, ResumeBegins());
    if (as_little) {
      ASSERT_TRUE(replay.session->LeaveOnly(DeviceOrdinal{0}, 32 * kMiB).ok());
    }
    Take(replay, ResumeBegins(), events_.size());
    EXPECT_EQ(replay.reproduced, as_little);
    EXPECT_EQ(replay.last.mismatch.ok(), as_little) << replay.last.mismatch.message();
    if (!as_little) {
      EXPECT_EQ(replay.last.mismatch.message(), "ok");
    }
  }
}

TEST_F(RerunSessionTest, verification_compares_the_driver_handles_with_the_state) {
  const AllocationId id = Create();
  Pause();
  ASSERT_TRUE(Resume().ok());
  Replay replay = NewReplay();
  std::size_t verify = ResumeBegins();
  const auto is_verify = [](const Event& event) {
    const auto* begun = std::get_if<StepBegun>(&event.body);
    return begun != nullptr && begun->step.kind == StepKind::kVerify;
  };
  while (!is_verify(events_[verify])) ++verify;
  Take(replay, 0, verify);
  ASSERT_TRUE(replay.last.mismatch.ok()) << replay.last.mismatch.message();
  State without = replay.session->recorded();
  without.allocations.at(id).resident = false;
  for (auto& [address, m] : without.mappings) m.present = m.accessible = false;
  replay.session->StartFrom(without);
  Take(replay, verify, verify + 2);
  EXPECT_NE(replay.last.mismatch.message().find("has a driver handle and should have none"), std::string::npos)
      << replay.last.mismatch.message();
}

// The steps of a plan as they are recorded: begun and done.
std::vector<EventBody> EventsOf(const Plan& plan, PoolId pool) {
  std::vector<EventBody> events;
  for (const PlannedPhase& phase : plan.phases) {
    events.emplace_back(PhaseBegun{.phase = phase.phase, .pool = pool});
    for (const Step& step : phase.steps) {
      events.emplace_back(StepBegun{.step = step, .pool = pool});
      events.emplace_back(StepDone{.step = step, .pool = pool});
    }
  }
  return events;
}

// NCCL and a pool resume at the same time. The pool is ahead by so many events, so that each step of one lies in each of the
// other's.
std::vector<Event> TwoResumes(std::size_t ahead) {
  std::uint64_t clock = 1'000'000'000;
  test::Story story(0x51ab, 0, &clock);
  test::ScriptedPool weights(story, "weights");
  weights.Chunk();
  story.Map(story.Create());
  weights.Run(CycleKind::kPause);
  story.Then(CycleBegun{.kind = CycleKind::kPause, .cycle = 1});
  for (const EventBody& body : EventsOf(PlanPause(test::FoldedState(story)), {})) story.Then(body);
  story.Then(CycleDone{.kind = CycleKind::kPause, .cycle = 1});
  story.Then(CycleBegun{.kind = CycleKind::kResume, .cycle = 1});
  weights.Begin(CycleKind::kResume);
  const State before = test::FoldedState(story);
  const auto nccl = EventsOf(PlanResume(before), {}), pool = EventsOf(PlanResume(before, weights.id()), weights.id());
  for (std::size_t i = 0; i < nccl.size() + ahead || i < pool.size(); ++i) {
    if (i < pool.size()) story.Then(pool[i]);
    if (i >= ahead && i - ahead < nccl.size()) story.Then(nccl[i - ahead]);
  }
  weights.Done(CycleKind::kResume);
  story.Then(CycleDone{.kind = CycleKind::kResume, .cycle = 1});
  return story.events();
}

TEST_F(RerunSessionTest, steps_of_nccl_and_of_a_pool_that_interleave_are_told_apart) {
  const std::vector<Event> of_the_ledger = events_;
  for (std::size_t ahead = 0; ahead < 20; ++ahead) {
    events_ = TwoResumes(ahead);
    Replay replay = NewReplay();
    for (std::size_t i = 0; i < events_.size(); ++i) {
      Take(replay, i, i + 1);
      ASSERT_TRUE(replay.last.mismatch.ok()) << ahead << ": " << replay.last.what << ": " << replay.last.mismatch.message();
      const Status same = replay.session->Compare();
      ASSERT_TRUE(same.ok()) << ahead << ", after event " << i + 1 << ": " << same.message();
    }
    EXPECT_EQ(replay.driver->BytesInUse(DeviceOrdinal{0}), 2 * k2M);
  }
  events_ = of_the_ledger;
}

TEST_F(RerunSessionTest, a_step_of_a_pool_that_fails_only_in_the_replay_is_a_difference) {
  const std::vector<Event> of_the_ledger = std::exchange(events_, TwoResumes(3));
  Replay replay = NewReplay();
  const std::size_t begins = static_cast<std::size_t>(
      std::ranges::find_if(events_,
                           [](const Event& e) {
                             const auto* begun = std::get_if<CycleBegun>(&e.body);
                             return begun != nullptr && begun->pool && begun->kind == CycleKind::kResume;
                           }) -
      events_.begin());
  Take(replay, 0, begins);
  ASSERT_TRUE(replay.last.mismatch.ok()) << replay.last.mismatch.message();
  ASSERT_TRUE(replay.driver->FailNext("Create", 1, cuda::kOutOfMemory).ok());
  Take(replay, begins, events_.size());
  EXPECT_FALSE(replay.last.mismatch.ok());
  EXPECT_NE(replay.last.what.find("create"), std::string::npos) << replay.last.what;
  events_ = of_the_ledger;
}

}  // namespace
}  // namespace amem
