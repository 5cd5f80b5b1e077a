// The coordinator: what a session makes of the votes of its peers.
#include "replay/cycle/coordinator.h"

#include <algorithm>
#include <future>
#include <shared_mutex>
#include <thread>

#include "tests/replay/cycle/cycle_fixture.h"

namespace amem {
namespace {

using test::k2M, test::kMiB, test::kOther, test::kOwner, test::kSelf, test::ScriptedRound;

class CoordinatorTest : public test::CycleFixture {
 protected:
  Status Run(CycleKind kind) { return coordinator_.Run(kind, round_); }
  [[nodiscard]] Lifecycle Now() const { return ledger_.state().lifecycle; }
  [[nodiscard]] std::vector<PhaseKind> Heard() const {
    std::vector<PhaseKind> phases;
    for (const auto& vote : round_.heard) phases.push_back(vote.phase);
    return phases;
  }
  // Another member's vote against one phase, the first time that it is voted on.
  void OtherFails(PhaseKind where, const Status& why) {
    round_.vote = [=, failed = false](PhaseKind phase, const Status&, SessionId* culprit) mutable {
      if (phase != where || failed) return Status{};
      failed = true;
      *culprit = kOther;
      return why;
    };
  }
  // The member that counts the votes dies at this phase, and the one that is asked afterwards has ended its cycle in `settled`.
  void LeaderDiesAt(PhaseKind where, std::optional<Lifecycle> settled) {
    LeaderIsLostAt(where, {Code::kPeerLost, "rank 0 died"}, settled);
  }
  void LeaderIsLostAt(PhaseKind where, const Status& how, std::optional<Lifecycle> settled = {}) {
    round_.vote = [this, where, how, lost = false](PhaseKind phase, const Status&, SessionId* culprit) mutable {
      if (phase != where || lost) return Status{};
      lost = round_.leaderless = true;
      *culprit = kOther;
      return how;
    };
    round_.regather = [settled] { return Result<std::optional<Lifecycle>>(settled); };
  }

  ScriptedRound round_;
  CallGate gate_;
  PinnedSupply pinned_{*sim_, {}};
  Coordinator coordinator_{{ledger_, *sim_, peers_, pinned_}, gate_};
};

TEST_F(CoordinatorTest, the_processes_of_all_members_are_in_the_journal_of_each) {
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  const auto begun = All<CycleBegun>();
  ASSERT_EQ(begun.size(), 1U);
  EXPECT_EQ(begun[0].processes, (std::vector<CycleMember>{{kSelf, 0, 1, "host"}, {kOwner, 1, 2, "host"}}));
}

TEST_F(CoordinatorTest, a_cycle_that_fails_because_of_a_member_names_its_process) {
  round_.vote = [](PhaseKind phase, const Status&, SessionId* culprit) {
    if (phase != PhaseKind::kPauseSave) return Status{};
    *culprit = kOwner;
    return Status{Code::kPeerLost, "rank 1 died"};
  };
  EXPECT_FALSE(Run(CycleKind::kPause).ok());
  auto failed = All<CycleFailed>();
  ASSERT_EQ(failed.size(), 1U);
  EXPECT_EQ(failed[0].culprits, (std::vector<CycleMember>{{kOwner, 1, 2, "host"}}));
  round_.vote = [](PhaseKind phase, const Status&, SessionId* culprit) {
    if (phase != PhaseKind::kPauseSave) return Status{};
    *culprit = kSelf;
    return Status{Code::kTimeout, "too late"};
  };
  peers_.arrive = [] { return Result<std::unique_ptr<Round>>(std::make_unique<ScriptedRound>()); };
  ASSERT_TRUE(coordinator_.Arrive(CycleKind::kPause, In(std::chrono::minutes(1))));
  EXPECT_FALSE(Run(CycleKind::kPause).ok());
  failed = All<CycleFailed>();
  ASSERT_EQ(failed.size(), 2U);
  EXPECT_TRUE(failed[1].culprits.empty()) << "it was this session, and not the one of last time";
}

TEST_F(CoordinatorTest, a_cycle_that_does_not_begin_names_those_because_of_whom) {
  peers_.arrive = [] { return Result<std::unique_ptr<Round>>(Status{Code::kTimeout, "waited for rank 1 to come"}); };
  peers_.culprits = {{kOwner, "host", 2, 0, 1}};
  EXPECT_FALSE(coordinator_.Arrive(CycleKind::kPause, In(std::chrono::minutes(1))));
  const auto failed = All<CycleFailed>();
  ASSERT_EQ(failed.size(), 1U);
  EXPECT_EQ(failed[0].culprits, (std::vector<CycleMember>{{kOwner, 1, 2, "host"}}));
}

TEST_F(CoordinatorTest, votes_after_every_phase_and_reports_them) {
  Create();
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  EXPECT_EQ(Heard(),
            (std::vector{PhaseKind::kPauseArrive, PhaseKind::kPauseSave, PhaseKind::kPauseReleaseOwn, PhaseKind::kPauseGone}));
  const CycleReport report = coordinator_.Last(CycleKind::kPause);
  EXPECT_EQ(report.cycle, 1U);
  EXPECT_EQ(report.members, 2U);
  ASSERT_EQ(report.phases.size(), 4U);
  std::uint64_t sum = 0;
  for (const PhaseTime& phase : report.phases) {
    EXPECT_LE(phase.voted_at_ns, phase.decided_at_ns);
    EXPECT_EQ(phase.wait_ns, phase.decided_at_ns - phase.voted_at_ns);
    sum += phase.work_ns + phase.wait_ns;
  }
  EXPECT_LE(sum, report.total_ns);
  EXPECT_EQ(InUse(), 0U);
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(coordinator_.Last(CycleKind::kResume).phases.size(), 5U);
  EXPECT_EQ(InUse(), k2M);
}

TEST_F(CoordinatorTest, a_pause_that_fails_elsewhere_is_undone_here_and_names_the_reason) {
  const AllocationId id = Create();
  std::memset(Memory(id), 0x42, k2M);
  for (const PhaseKind where :
       {PhaseKind::kPauseArrive, PhaseKind::kPauseSave, PhaseKind::kPauseReleaseOwn, PhaseKind::kPauseGone}) {
    OtherFails(where, {Code::kDriver, "rank 2: unmap failed", cuda::kUnknown});
    const Status failed = Run(CycleKind::kPause);
    EXPECT_EQ(failed.code(), Code::kDriver);
    EXPECT_EQ(failed.message(), "rank 2: unmap failed; the session runs on as before");
    EXPECT_EQ(Now(), Lifecycle::kRunning);
    EXPECT_TRUE(All<CycleFailed>().back().undone);
    EXPECT_EQ(Memory(id)[k2M - 1], std::byte{0x42});
  }
}

TEST_F(CoordinatorTest, a_resume_that_fails_elsewhere_is_undone_here_and_can_be_tried_again) {
  const AllocationId id = Create();
  std::memset(Memory(id), 0x42, k2M);
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  for (const PhaseKind where : {PhaseKind::kResumeArrive, PhaseKind::kResumeCreateOwn, PhaseKind::kResumeImport,
                                PhaseKind::kResumeVerify, PhaseKind::kResumeOpen}) {
    OtherFails(where, {Code::kDriver, "rank 2: import failed"});
    EXPECT_EQ(Run(CycleKind::kResume).message(), "rank 2: import failed; the session stays paused, with its contents kept");
    EXPECT_EQ(Now(), Lifecycle::kPaused);
    EXPECT_EQ(InUse(), 0U);
  }
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(Memory(id)[0], std::byte{0x42});
}

TEST_F(CoordinatorTest, a_failing_call_is_this_sessions_vote_and_is_undone) {
  Create();
  ASSERT_TRUE(sim_->FailNext("Unmap", 1, cuda::kUnknown).ok());
  EXPECT_EQ(Run(CycleKind::kPause).driver_result(), cuda::kUnknown);
  const auto failed = std::ranges::find(round_.heard, PhaseKind::kPauseReleaseOwn, &ScriptedRound::Heard::phase);
  ASSERT_NE(failed, round_.heard.end());
  EXPECT_FALSE(failed->mine.ok());
  EXPECT_EQ(Now(), Lifecycle::kRunning);
}

TEST_F(CoordinatorTest, an_undo_that_fails_leaves_the_session_half_way_and_a_resume_mends_it) {
  const AllocationId id = Create();
  std::memset(Memory(id), 0x42, k2M);
  OtherFails(PhaseKind::kPauseGone, {Code::kDriver, "rank 2 failed"});
  ASSERT_TRUE(sim_->FailNext("Create", 1, cuda::kUnknown).ok());
  const Status failed = Run(CycleKind::kPause);
  EXPECT_EQ(failed.code(), Code::kBroken);
  EXPECT_NE(failed.message().find("undoing it failed too"), std::string::npos) << failed.message();
  EXPECT_FALSE(All<CycleFailed>().back().undone);
  EXPECT_EQ(Now(), Lifecycle::kPausing);
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(Memory(id)[0], std::byte{0x42});
}

TEST_F(CoordinatorTest, a_resume_after_a_failed_undo_does_without_a_peer_that_runs_and_misses_nothing) {
  const AllocationId id = Create();
  Record(Exported{id, 1});
  Record(ReferenceAdded{id, kOwner, AllocationId{1}});
  peers_.arrive = [] { return Result<std::unique_ptr<Round>>(std::make_unique<ScriptedRound>()); };
  const auto spares = [&](CycleKind kind) -> std::function<bool(SessionId)> {
    EXPECT_TRUE(coordinator_.Arrive(kind, In(std::chrono::minutes(1))).ok());
    return peers_.arrived_for.spares;
  };
  EXPECT_FALSE(spares(CycleKind::kPause)) << "runs";
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  EXPECT_FALSE(spares(CycleKind::kResume)) << "is paused";
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  OtherFails(PhaseKind::kPauseGone, {Code::kDriver, "rank 2 failed"});
  ASSERT_TRUE(sim_->FailNext("Create", 1, cuda::kUnknown).ok());
  ASSERT_EQ(Run(CycleKind::kPause).code(), Code::kBroken);
  const auto missing = spares(CycleKind::kResume);
  ASSERT_TRUE(missing);
  EXPECT_FALSE(missing(kOwner)) << "it imports what is not there";
  EXPECT_TRUE(missing(kOther)) << "it imports nothing";
  EXPECT_FALSE(spares(CycleKind::kPause));
}

// The first is gone, and only the backup has its contents; the second was not copied and stayed.
TEST_F(CoordinatorTest, a_pause_can_be_tried_again_after_one_whose_copies_failed_and_whose_undo_did) {
  const AllocationId first = Create(), second = Create();
  std::memset(Memory(first), 0x42, k2M);
  std::memset(Memory(second), 0x43, k2M);
  ASSERT_TRUE(sim_->FailNext("FinishCopies", 3, cuda::kUnknown).ok());
  ASSERT_TRUE(sim_->FailNext("Create", 1, cuda::kUnknown).ok());
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kBroken);
  EXPECT_EQ(Now(), Lifecycle::kPausing);
  const Status again = Run(CycleKind::kPause);
  ASSERT_TRUE(again.ok()) << again.message();
  EXPECT_EQ(InUse(), 0U);
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(Memory(first)[k2M - 1], std::byte{0x42});
  EXPECT_EQ(Memory(second)[k2M - 1], std::byte{0x43});
}

// The ledger is held by a driver call of another thread that hangs, so nobody can say what memory there is.
TEST_F(CoordinatorTest, memory_waits_for_the_copies_of_a_pause_that_failed_whether_or_not_the_ledger_can_be_had) {
  std::memset(Memory(Create()), 0x42, k2M);
  sim_->SetHook([](std::string_view call, std::uint64_t) { return call == "FinishCopies" ? cuda::kTimeout : 0; });
  ASSERT_FALSE(Run(CycleKind::kPause).ok());
  ASSERT_GT(sim_->QueuedCopies(DeviceOrdinal{0}), 0U);
  std::promise<void> held, asked;
  std::thread hangs([&] {
    const LedgerLock lock(ledger_);
    held.set_value();
    asked.get_future().wait();
  });
  held.get_future().wait();
  EXPECT_FALSE(coordinator_.AwaitCopies().ok());
  sim_->SetHook({});
  EXPECT_TRUE(coordinator_.AwaitCopies().ok());
  EXPECT_EQ(sim_->QueuedCopies(DeviceOrdinal{0}), 0U);
  asked.set_value();
  hangs.join();
}

// Memory that is mapped nowhere is copied through a mapping that is made for it.
TEST_F(CoordinatorTest, an_address_range_that_the_driver_does_not_take_back_at_once_is_given_back_later) {
  Create(k2M, false);
  const std::size_t ranges = sim_->Snapshot().ranges.size();
  ASSERT_TRUE(sim_->FailNext("FreeRange", 1, cuda::kUnknown).ok());
  EXPECT_EQ(Run(CycleKind::kPause).driver_result(), cuda::kUnknown);
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  EXPECT_EQ(sim_->Snapshot().ranges.size(), ranges);
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(sim_->Snapshot().ranges.size(), ranges);
}

TEST_F(CoordinatorTest, a_peer_that_cannot_undo_keeps_this_session_from_going_on) {
  Create();
  round_.vote = [](PhaseKind phase, const Status&, SessionId* culprit) {
    if (phase != PhaseKind::kPauseGone && phase != PhaseKind::kResumeCreateOwn) return Status{};
    *culprit = kOther;
    return Status{Code::kDriver, "rank 2 failed"};
  };
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kBroken);
  EXPECT_EQ(Now(), Lifecycle::kPausing);
}

TEST_F(CoordinatorTest, a_peer_that_died_or_is_late_does_not_keep_this_session_from_undoing) {
  Create();
  for (const Code code : {Code::kPeerLost, Code::kTimeout}) {
    round_.vote = [code](PhaseKind phase, const Status&, SessionId* culprit) {
      if (phase != PhaseKind::kPauseGone && phase != PhaseKind::kResumeCreateOwn) return Status{};
      *culprit = kOther;
      return Status{code, "rank 2 is gone"};
    };
    EXPECT_EQ(Run(CycleKind::kPause).code(), code);
    EXPECT_EQ(Now(), Lifecycle::kRunning);
  }
}

// What it has made anew is empty until then.
TEST_F(CoordinatorTest, memory_of_an_owner_that_is_late_in_an_undo_is_not_used_before_it_has_restored_it) {
  const AllocationId import = Import();
  peers_.await_loss = [](SessionId) { return false; };
  const auto late_in = [&](PhaseKind first, PhaseKind last) {
    round_.vote = [=](PhaseKind phase, const Status&, SessionId* culprit) {
      *culprit = kOwner;
      if (phase == PhaseKind::kPauseGone) return Status{Code::kDriver, "rank 1 failed"};
      return phase < first || phase > last ? Status{} : Status{Code::kTimeout, "rank 1 is late"};
    };
  };
  late_in(PhaseKind::kResumeImport, PhaseKind::kResumeOpen);
  const Status failed = Run(CycleKind::kPause);
  EXPECT_EQ(failed.code(), Code::kBroken);
  EXPECT_NE(failed.message().find("rank 1 (pid 2 on host host), whose memory is imported here, has not said"),
            std::string::npos)
      << failed.message();
  EXPECT_EQ(Now(), Lifecycle::kPausing);
  ASSERT_EQ(round_.heard.back().phase, PhaseKind::kResumeOpen);
  EXPECT_FALSE(round_.heard.back().mine.ok()) << "the others must not go on either";
  round_.vote = {};
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_TRUE(Resident(import));

  late_in(PhaseKind::kResumeCreateOwn, PhaseKind::kResumeCreateOwn);
  EXPECT_EQ(Run(CycleKind::kPause).message(), "rank 1 failed; the session runs on as before")
      << "it came in time for its contents";
  late_in(PhaseKind::kResumeVerify, PhaseKind::kResumeOpen);
  EXPECT_EQ(Run(CycleKind::kPause).message(), "rank 1 failed; the session runs on as before") << "it had restored them";
}

// Its leader was stopped for so long that it gathered with others, who do not vote here.
TEST_F(CoordinatorTest, memory_of_an_owner_that_leaves_an_undo_and_lives_is_not_used) {
  Import();
  const auto leaves_in = [&](PhaseKind when, bool lives) {
    round_.left.clear();
    peers_.await_loss = [this, lives](SessionId who) {
      if (!lives) Record(PeerLost{who, kPeerDied});
      return !lives;
    };
    round_.vote = [=, this](PhaseKind phase, const Status&, SessionId* culprit) {
      *culprit = kOwner;
      if (phase == PhaseKind::kPauseGone) return Status{Code::kDriver, "rank 1 failed"};
      if (phase != when) return Status{};
      round_.left = {kOwner};
      return Status{Code::kPeerLost, "rank 1 withdrew"};
    };
  };
  leaves_in(PhaseKind::kResumeVerify, true);
  EXPECT_EQ(Run(CycleKind::kPause).message(), "rank 1 failed; the session runs on as before") << "it had restored them";
  for (const PhaseKind when : {PhaseKind::kResumeCreateOwn, PhaseKind::kResumeImport}) {
    leaves_in(when, true);
    const Status failed = Run(CycleKind::kPause);
    EXPECT_EQ(failed.code(), Code::kBroken);
    EXPECT_NE(failed.message().find("rank 1 (pid 2 on host host), whose memory is imported here, has not said"),
              std::string::npos)
        << failed.message();
    EXPECT_FALSE(round_.heard.back().mine.ok()) << "the others must not go on either";
    EXPECT_EQ(peers_.patience.count(), 0) << "the others wait for that vote";
    round_.vote = {};
    round_.left.clear();
    ASSERT_TRUE(Run(CycleKind::kResume).ok());
  }
  leaves_in(PhaseKind::kResumeImport, false);
  EXPECT_EQ(Run(CycleKind::kPause).message(), "rank 1 failed; the session runs on as before") << "it died";
}

// The owner gathers for itself, too, and may come to the same phase a moment later.
TEST_F(CoordinatorTest, an_import_in_an_undo_waits_for_an_owner_that_is_not_in_step) {
  const AllocationId import = Import();
  peers_.await_loss = [](SessionId) { return false; };
  peers_.progress = [](SessionId) { return CycleProgress{Lifecycle::kRunning, 1}; };
  int asked = 0;
  peers_.reimport = [&, this](SessionId, const auto& requests) -> Result<std::vector<SharedAllocation>> {
    if (++asked % 5 != 0) return Status{Code::kNotFound, "allocation 1 has no memory yet"};
    return Share(requests);
  };
  const auto owner_votes = [&](bool votes) {
    round_.vote = [=, this](PhaseKind phase, const Status&, SessionId* culprit) {
      *culprit = kOwner;
      if (phase == PhaseKind::kPauseGone) return Status{Code::kDriver, "rank 1 failed"};
      return votes || phase < PhaseKind::kResumeCreateOwn ? Status{} : Status{Code::kTimeout, "rank 0 is silent"};
    };
  };
  owner_votes(false);
  EXPECT_EQ(Run(CycleKind::kPause).message(), "rank 1 failed; the session runs on as before");
  EXPECT_EQ(asked, 5);
  EXPECT_TRUE(Resident(import));
  owner_votes(true);
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kBroken) << "it has voted that it has all its memory";
  EXPECT_EQ(asked, 6);
}

// This session counted the votes, was stopped, and goes on when the others have ended their undo without it.
TEST_F(CoordinatorTest, an_owner_that_has_left_an_undo_and_runs_has_restored_its_memory) {
  Import();
  peers_.await_loss = [](SessionId) { return false; };
  peers_.progress = [](SessionId) { return CycleProgress{Lifecycle::kRunning, 1}; };
  round_.vote = [this](PhaseKind phase, const Status&, SessionId* culprit) {
    *culprit = kOwner;
    if (phase == PhaseKind::kPauseGone) return Status{Code::kDriver, "rank 1 failed"};
    if (phase != PhaseKind::kResumeImport) return Status{};
    round_.left = {kOwner};
    return Status{Code::kPeerLost, "rank 1 withdrew"};
  };
  EXPECT_EQ(Run(CycleKind::kPause).message(), "rank 1 failed; the session runs on as before");
}

TEST_F(CoordinatorTest, an_owner_that_is_late_before_anybody_released_memory_keeps_nobody_from_undoing) {
  Import();
  peers_.await_loss = [](SessionId) { return false; };
  const auto late_since = [&](PhaseKind since, bool leader) {
    round_.vote = [=, this](PhaseKind phase, const Status&, SessionId* culprit) {
      if (phase < since) return Status{};
      round_.leaderless = leader && phase == since;
      *culprit = kOwner;
      return Status{Code::kTimeout, "rank 1 is late"};
    };
  };
  for (const PhaseKind since : {PhaseKind::kPauseArrive, PhaseKind::kPauseSave}) {
    late_since(since, false);
    EXPECT_EQ(Run(CycleKind::kPause).message(), "rank 1 is late; the session runs on as before");
    EXPECT_EQ(Now(), Lifecycle::kRunning);
  }
  late_since(PhaseKind::kPauseSave, true);  // it may have told others that the vote has passed
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kBroken);
}

// Otherwise the next resume would be planned with imports from the dead.
TEST_F(CoordinatorTest, after_a_vote_that_a_member_died_the_journal_knows_of_the_loss) {
  Create();
  Record(PeerConnected{kOther, "host", 3, 0, 2});
  round_.vote = [](PhaseKind phase, const Status&, SessionId* culprit) {
    if (phase != PhaseKind::kPauseGone) return Status{};
    *culprit = kOther;
    return Status{Code::kPeerLost, "rank 2 died"};
  };
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kPeerLost);
  EXPECT_FALSE(ledger_.state().peers.at(kOther).connected);
}

// ---- the member that counts the votes dies
// ------------------------------------------------------------------------------------

TEST_F(CoordinatorTest, a_cycle_whose_last_vote_passed_for_another_member_has_passed) {
  Create();
  LeaderDiesAt(PhaseKind::kPauseGone, Lifecycle::kPaused);
  EXPECT_TRUE(Run(CycleKind::kPause).ok());
  EXPECT_EQ(Now(), Lifecycle::kPaused);
  LeaderDiesAt(PhaseKind::kResumeOpen, Lifecycle::kRunning);
  EXPECT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  EXPECT_EQ(round_.gathered, 2);
}

TEST_F(CoordinatorTest, a_cycle_that_another_member_gave_up_is_undone) {
  Create();
  LeaderDiesAt(PhaseKind::kPauseGone, Lifecycle::kRunning);
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kPeerLost);
  EXPECT_EQ(Now(), Lifecycle::kRunning);
}

// A vote before the last cannot have ended the cycle for anybody, whatever is said; this session still has steps to take.
TEST_F(CoordinatorTest, only_the_last_vote_can_have_passed_elsewhere) {
  Create();
  LeaderDiesAt(PhaseKind::kPauseSave, Lifecycle::kPaused);
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kPeerLost);
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  EXPECT_EQ(InUse(), k2M);
}

TEST_F(CoordinatorTest, a_session_that_voted_against_does_not_take_the_last_vote_for_passed) {
  Create();
  LeaderDiesAt(PhaseKind::kPauseGone, Lifecycle::kPaused);
  round_.vote = [this, leader_dies = round_.vote](PhaseKind phase, const Status& mine, SessionId* culprit) {
    if (phase == PhaseKind::kPauseReleaseOwn) Break("the disk is full");
    return leader_dies(phase, mine, culprit);
  };
  EXPECT_FALSE(Run(CycleKind::kPause).ok());
  const auto last = std::ranges::find(round_.heard, PhaseKind::kPauseGone, &ScriptedRound::Heard::phase);
  ASSERT_NE(last, round_.heard.end());
  EXPECT_EQ(last->mine.code(), Code::kBroken);
  EXPECT_EQ(Now(), Lifecycle::kRunning);
}

TEST_F(CoordinatorTest, members_that_gather_again_in_an_undo_vote_on_the_phase_once_more) {
  Create();
  int votes = 0;
  round_.vote = [&](PhaseKind phase, const Status&, SessionId* culprit) {
    if (phase == PhaseKind::kPauseGone) {
      *culprit = kOther;
      return Status{Code::kDriver, "rank 2 failed"};
    }
    if (phase != PhaseKind::kResumeCreateOwn || ++votes > 1) return Status{};
    round_.leaderless = true;
    *culprit = kOther;
    return Status{Code::kPeerLost, "rank 0 died"};
  };
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kDriver);
  EXPECT_EQ(votes, 2);
  EXPECT_EQ(Now(), Lifecycle::kRunning);
}

// It adds its device when it goes on. To bind memory to an object before all devices were added would wait for it in the
// driver.
TEST_F(CoordinatorTest, nothing_is_bound_to_a_new_multicast_object_while_a_leader_is_late) {
  const DriverHandle handle = *sim_->CreateMulticast({k2M, 1, 1, 0});
  const AllocationId object{ledger_.state().next_allocation};
  Record(MulticastCreated{object, k2M, 1, 1, 0, handle, MemoryTag::kMulticastReleased});
  {
    const LedgerLock lock(ledger_);
    ledger_.SetHandle(object, handle);
  }
  ASSERT_TRUE(sim_->AddDevice(handle, DeviceOrdinal{0}).ok());
  Record(MulticastDeviceAdded{object, DeviceOrdinal{0}});
  const AllocationId memory = Create();
  ASSERT_TRUE(sim_->BindMemory(handle, 0, HandleOf(memory), 0, k2M).ok());
  Record(MulticastBound{object, 0, memory, 0, k2M, {}});
  const Status late{Code::kTimeout, "rank 0 is stopped"};

  LeaderIsLostAt(PhaseKind::kPauseGone, {Code::kPeerLost, "rank 0 died"});
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kPeerLost) << "the plan of the undo knows of its loss";
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  LeaderIsLostAt(PhaseKind::kPauseGone, {Code::kPeerLost, "rank 0 ended its connections"});
  peers_.await_loss = [](SessionId) { return false; };
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kBroken);
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  LeaderIsLostAt(PhaseKind::kPauseGone, late);
  const Status failed = Run(CycleKind::kPause);
  EXPECT_NE(failed.message().find("a rank died, or was late, before it was sure"), std::string::npos) << failed.message();
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  LeaderIsLostAt(PhaseKind::kResumeCreateOwn, late);
  round_.vote = [fails = round_.vote](PhaseKind phase, const Status& mine, SessionId* culprit) {
    if (phase != PhaseKind::kPauseGone) return fails(phase, mine, culprit);
    *culprit = kOther;
    return Status{Code::kDriver, "rank 2 failed"};
  };
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kBroken);
}

// ---- what else can be in the way
// ----------------------------------------------------------------------------------------------

TEST_F(CoordinatorTest, an_owner_that_is_lost_during_an_undo_is_replaced_within_it) {
  const AllocationId import = Import();
  OtherFails(PhaseKind::kPauseGone, {Code::kDriver, "rank 2 failed"});
  peers_.reimport = [](SessionId, const auto&) { return Status{Code::kPeerLost, "rank 1 died"}; };
  EXPECT_EQ(Run(CycleKind::kPause).message(), "rank 2 failed; the session runs on as before");
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  EXPECT_TRUE(Resident(import));
  EXPECT_EQ(InUse(), k2M);  // on this session's own device
}

TEST_F(CoordinatorTest, an_owner_whose_loss_is_never_noticed_here_is_not_asked_for_ever) {
  Import();
  OtherFails(PhaseKind::kPauseGone, {Code::kDriver, "rank 2 failed"});
  int asked = 0;
  peers_.reimport = [&](SessionId, const auto&) {
    ++asked;
    return Status{Code::kPeerLost, "rank 1 died"};
  };
  peers_.await_loss = [](SessionId) { return true; };
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kBroken);
  EXPECT_EQ(asked, 2);
}

TEST_F(CoordinatorTest, a_vote_that_fails_because_an_owner_is_lost_says_which) {
  Import();
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  peers_.reimport = [](SessionId, const auto&) { return Status{Code::kPeerLost, "rank 1 died"}; };
  EXPECT_EQ(Run(CycleKind::kResume).code(), Code::kPeerLost);
  const auto vote = std::ranges::find(round_.heard, false, [](const ScriptedRound::Heard& heard) { return heard.mine.ok(); });
  ASSERT_NE(vote, round_.heard.end());
  EXPECT_EQ(vote->phase, PhaseKind::kResumeImport);
  EXPECT_EQ(vote->mine.reported_by(), kOwner);
}

TEST_F(CoordinatorTest, a_broken_session_votes_against_a_pause) {
  Create();
  Break("the disk is full");
  const Status refused = Run(CycleKind::kPause);
  EXPECT_EQ(refused.code(), Code::kBroken);
  EXPECT_EQ(refused.message().find("pause refused: this session is broken: the disk is full"), 0U) << refused.message();
  ASSERT_FALSE(round_.heard.empty());
  EXPECT_EQ(round_.heard.front().mine.code(), Code::kBroken);
  EXPECT_EQ(Now(), Lifecycle::kRunning);
}

TEST_F(CoordinatorTest, a_session_that_shares_memory_and_died_before_the_members_were_found_does_not_fail_the_pause) {
  const AllocationId id = Create();
  Record(PeerConnected{kOther, "host", 3, 0, 2});
  Record(Exported{id, 1});
  Record(ReferenceAdded{id, kOther, AllocationId{7}});
  EXPECT_TRUE(Run(CycleKind::kPause).ok()) << "its death is known to the peers, and was not told yet";
  EXPECT_TRUE(Run(CycleKind::kResume).ok());
}

TEST_F(CoordinatorTest, a_session_that_shares_memory_and_is_no_member_fails_the_pause) {
  const AllocationId id = Create();
  Record(PeerConnected{kOther, "host", 3, 0, 2});
  Record(Exported{id, 1});
  Record(ReferenceAdded{id, kOther, AllocationId{7}});  // after the members were found
  peers_.await_loss = [](SessionId) { return false; };
  const Status failed = Run(CycleKind::kPause);
  EXPECT_EQ(failed.code(), Code::kRefused);
  EXPECT_NE(failed.message().find("session 0x70 (pid 3) began to share allocation"), std::string::npos) << failed.message();
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  EXPECT_EQ(round_.heard.front().mine.code(), Code::kRefused) << "the others hear of it before anything is released";
  Record(ReferenceDropped{id, kOther, AllocationId{7}});
  EXPECT_TRUE(Run(CycleKind::kPause).ok());
}

TEST_F(CoordinatorTest, a_registered_import_is_a_reason_to_refuse_the_pause_of_all) {
  const AllocationId id = Import();
  const Address address = PlaceOf(id);
  Record(Registered{address, k2M, "ibv_reg_mr"});
  const Status failed = Run(CycleKind::kPause);
  EXPECT_EQ(failed.code(), Code::kRefused);
  EXPECT_NE(failed.message().find("imported from session 0x60 and registered with a network card"), std::string::npos)
      << failed.message();
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  EXPECT_EQ(round_.heard.front().mine.code(), Code::kRefused);
  Record(Deregistered{address, k2M});
  EXPECT_TRUE(Run(CycleKind::kPause).ok());
}

TEST_F(CoordinatorTest, an_import_that_another_library_holds_refuses_the_pause_in_that_librarys_name) {
  const AllocationId id = Import();
  const Address address = PlaceOf(id);
  Record(Registered{address, k2M, "cuMemRetainAllocationHandle", "libone.so"});
  const Status failed = Run(CycleKind::kPause);
  EXPECT_EQ(failed.code(), Code::kRefused);
  EXPECT_NE(failed.message().find("imported from session 0x60 and held by libone.so"), std::string::npos) << failed.message();
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  Record(Deregistered{address, k2M, "libone.so"});
  EXPECT_TRUE(Run(CycleKind::kPause).ok());
}

// A library that watches the driver's calls may let go of memory while AMem unmaps, on AMem's own thread.
TEST(CallGate, a_call_of_the_thread_that_closed_the_gate_does_not_wait_for_itself) {
  static CallGate gate;  // which outlives a thread that hangs
  std::promise<void> entered;
  std::future<void> done = entered.get_future();
  std::thread([entered = std::move(entered)]() mutable {
    EXPECT_TRUE(gate.Close(std::chrono::seconds(1)).ok());
    { const std::shared_lock inside(gate), again(gate); }
    gate.Open();
    { const std::shared_lock inside(gate); }
    entered.set_value();
  }).detach();
  ASSERT_EQ(done.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  EXPECT_TRUE(gate.Close(std::chrono::milliseconds(10)).ok()) << "nobody is inside";
  gate.Open();
}

TEST_F(CoordinatorTest, an_arrival_without_the_others_is_a_cycle_that_failed_and_left_nothing_to_undo) {
  peers_.arrive = [] { return Status{Code::kTimeout, "rank 1 has not called ncclPause"}; };
  EXPECT_EQ(coordinator_.Arrive(CycleKind::kPause, In(std::chrono::minutes(1))).status().code(), Code::kTimeout);
  ASSERT_EQ(All<CycleFailed>().size(), 1U);
  EXPECT_TRUE(All<CycleFailed>()[0].undone);
  EXPECT_EQ(Now(), Lifecycle::kRunning);
}

TEST_F(CoordinatorTest, each_vote_is_journaled_before_the_others_are_waited_for_also_in_an_undo) {
  Create();
  std::size_t before = 0;
  bool all_before = true;
  round_.vote = [&](PhaseKind phase, const Status&, SessionId* culprit) {
    const auto cast = All<VoteCast>();
    all_before = all_before && cast.size() == ++before && cast.back().phase == phase;
    if (phase != PhaseKind::kPauseSave) return Status{};
    *culprit = kOther;
    return Status{Code::kDriver, "rank 2 failed"};
  };
  ASSERT_TRUE(sim_->FailNext("Create", 1, cuda::kUnknown).ok());
  EXPECT_FALSE(Run(CycleKind::kPause).ok());
  EXPECT_TRUE(all_before);
  const auto cast = All<VoteCast>();
  EXPECT_EQ(cast.size(), round_.heard.size());
  EXPECT_GT(cast.size(), 2U) << "the undo votes, too";
  for (std::size_t i = 0; i < cast.size(); ++i) {
    EXPECT_EQ(cast[i].ok, round_.heard[i].mine.ok());
    EXPECT_EQ(cast[i].message, round_.heard[i].mine.message());
  }
}

TEST_F(CoordinatorTest, threads_are_journaled_once_at_a_deadline_and_only_there) {
  Create();
  OtherFails(PhaseKind::kPauseSave, {Code::kDriver, "rank 2 failed"});
  EXPECT_FALSE(Run(CycleKind::kPause).ok());
  EXPECT_TRUE(All<ThreadSeen>().empty());
  peers_.arrive = [] { return Result<std::unique_ptr<Round>>(Status{Code::kTimeout, "rank 2 did not come"}); };
  EXPECT_EQ(coordinator_.Arrive(CycleKind::kPause, In(std::chrono::minutes(1))).status().code(), Code::kTimeout);
  const auto threads = All<ThreadSeen>();
  ASSERT_FALSE(threads.empty());
  EXPECT_EQ(threads[0].state, "running");
  EXPECT_FALSE(threads[0].stack.empty()) << "of the thread that waited";
  for (std::size_t i = 1; i < threads.size(); ++i) EXPECT_TRUE(threads[i].stack.empty());
}

}  // namespace
}  // namespace amem
