// The coordinator: what a session makes of the votes of another member.
#include "replay/cycle/coordinator.h"

#include <algorithm>
#include <future>
#include <shared_mutex>
#include <thread>

#include "replay/cycle/cycle_journal.h"
#include "tests/replay/cycle/cycle_fixture.h"

namespace amem {
namespace {

using agreement::Ballot;
using test::k2M, test::kMiB, test::kOther, test::kOwner, test::kSelf;

class CoordinatorTest : public test::CycleFixture {
 protected:
  Status Run(CycleKind kind, const CycleOptions& options = {}) { return coordinator_.Cycle(kind, options); }
  [[nodiscard]] Lifecycle Now() const { return ledger_.state().lifecycle; }
  // The owner's vote against one ballot, the first time.
  void OtherFails(Ballot where, const Status& why) {
    set_.votes = [=, failed = false](Ballot ballot) mutable {
      if (ballot != where || failed) return Status{};
      failed = true;
      return why;
    };
  }
  // Returns once a thread holds the ledger, as a driver call that hangs does, until LetGo.
  void HoldLedger() {
    goes_on_ = {};
    std::promise<void> held;
    hangs_ = std::thread([&held, goes_on = goes_on_.get_future(), this]() mutable {
      const LedgerLock lock(ledger_);
      held.set_value();
      goes_on.wait();
    });
    held.get_future().wait();
  }
  void LetGo() {
    goes_on_.set_value();
    hangs_.join();
  }
  // The first vote against anything that is journaled here.
  [[nodiscard]] std::optional<VoteCast> OwnFailure() const {
    for (const VoteCast& vote : All<VoteCast>())
      if (!vote.ok) return vote;
    return {};
  }

  test::ScriptedSet& set_ = peers_.set;
  CallGate gate_;
  PinnedSupply pinned_{*sim_, {}};
  Coordinator coordinator_{{ledger_, *sim_, peers_, pinned_, Deadlines(std::chrono::milliseconds(800))}, gate_};

 private:
  std::thread hangs_;
  std::promise<void> goes_on_;
};

constexpr const char* kOwnerFailed = "rank 1 (pid 2 on host host) failed in phase ";

TEST_F(CoordinatorTest, the_processes_of_all_members_are_in_the_journal_of_each) {
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  const auto begun = All<CycleBegun>();
  ASSERT_EQ(begun.size(), 1U);
  EXPECT_EQ(begun[0].processes, (std::vector<CycleMember>{{kSelf, 0, 1, "host"}, {kOwner, 1, 2, "host"}}));
}

TEST_F(CoordinatorTest, a_cycle_that_fails_because_of_a_member_names_its_process) {
  OtherFails(Ballot::kSaved, {Code::kDriver, "a call failed"});
  EXPECT_FALSE(Run(CycleKind::kPause).ok());
  auto failed = All<CycleFailed>();
  ASSERT_EQ(failed.size(), 1U);
  EXPECT_EQ(failed[0].culprits, (std::vector<CycleMember>{{kOwner, 1, 2, "host"}}));
  Create();
  ASSERT_TRUE(sim_->FailNext("Unmap", 1, cuda::kUnknown).ok());
  EXPECT_FALSE(Run(CycleKind::kPause).ok());
  failed = All<CycleFailed>();
  ASSERT_EQ(failed.size(), 2U);
  EXPECT_TRUE(failed[1].culprits.empty()) << "it was this session, and not the one of last time";
}

TEST_F(CoordinatorTest, a_cycle_that_does_not_begin_names_those_because_of_whom) {
  set_.silent_at = Ballot::kCome;
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kTimeout);
  const auto failed = All<CycleFailed>();
  ASSERT_EQ(failed.size(), 1U);
  EXPECT_EQ(failed[0].culprits, (std::vector<CycleMember>{{kOwner, 1, 2, "host"}}));
  EXPECT_TRUE(failed[0].undone);
  EXPECT_EQ(Now(), Lifecycle::kRunning);
}

TEST_F(CoordinatorTest, a_resume_waits_on_beside_a_session_that_runs_and_of_which_only_pages_from_before_say_that_it_shares) {
  Create();
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  set_.silent_at = Ballot::kCome;
  EXPECT_EQ(Run(CycleKind::kResume, {.patient = true}).code(), Code::kTimeout) << "it runs, and so will not come";
  set_.shares_now = false;
  set_.said = [this] { set_.silent_at = {}; };
  const Status resumed = Run(CycleKind::kResume, {.patient = true});
  EXPECT_TRUE(resumed.ok()) << resumed.message();
  EXPECT_EQ(Now(), Lifecycle::kRunning);
}

TEST_F(CoordinatorTest, votes_on_every_ballot_and_reports_the_phases) {
  Create();
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  EXPECT_EQ(set_.asked, (std::vector{Ballot::kCome, Ballot::kIdle, Ballot::kSaved, Ballot::kGone}));
  const CycleReport report = coordinator_.Last(CycleKind::kPause);
  EXPECT_EQ(report.cycle, 1U);
  EXPECT_EQ(report.members, 2U);
  ASSERT_EQ(report.phases.size(), 3U);
  std::uint64_t sum = 0;
  for (const PhaseTime& phase : report.phases) {
    EXPECT_LE(phase.voted_at_ns, phase.decided_at_ns);
    EXPECT_EQ(phase.wait_ns, phase.decided_at_ns - phase.voted_at_ns);
    sum += phase.work_ns + phase.wait_ns;
  }
  EXPECT_LE(sum, report.total_ns);
  EXPECT_EQ(InUse(), 0U);
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(coordinator_.Last(CycleKind::kResume).phases.size(), 3U);
  EXPECT_EQ(InUse(), k2M);
}

TEST_F(CoordinatorTest, a_pause_that_fails_elsewhere_is_undone_here_and_names_the_reason) {
  const AllocationId id = Create();
  std::memset(Memory(id), 0x42, k2M);
  for (const Ballot where : {Ballot::kIdle, Ballot::kSaved, Ballot::kGone}) {
    OtherFails(where, {Code::kDriver, "unmap failed", cuda::kUnknown});
    const Status failed = Run(CycleKind::kPause);
    EXPECT_EQ(failed.code(), Code::kDriver);
    EXPECT_EQ(failed.message().find(kOwnerFailed), 0U) << failed.message();
    EXPECT_TRUE(failed.message().ends_with(": unmap failed; the session runs on as before")) << failed.message();
    EXPECT_EQ(Now(), Lifecycle::kRunning);
    EXPECT_TRUE(All<CycleFailed>().back().undone);
    EXPECT_EQ(Memory(id)[k2M - 1], std::byte{0x42});
  }
}

TEST_F(CoordinatorTest, a_resume_that_fails_elsewhere_is_undone_here_and_can_be_tried_again) {
  const AllocationId id = Create();
  std::memset(Memory(id), 0x42, k2M);
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  for (const Ballot where : {Ballot::kMade, Ballot::kJoined, Ballot::kOpen}) {
    OtherFails(where, {Code::kDriver, "import failed"});
    const Status failed = Run(CycleKind::kResume);
    EXPECT_TRUE(failed.message().ends_with(": import failed; the session stays paused, with its contents kept"))
        << failed.message();
    EXPECT_EQ(Now(), Lifecycle::kPaused);
    EXPECT_EQ(InUse(), 0U);
  }
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(Memory(id)[0], std::byte{0x42});
}

// The gate is open then, and the program makes memory at any time.
TEST_F(CoordinatorTest, memory_is_made_while_a_pause_that_failed_elsewhere_before_it_began_here_is_recorded) {
  set_.ahead = Ballot::kIdle;
  int made = 0;
  set_.named = [&] {
    ++made;
    std::async(std::launch::async, [this] {
      const std::shared_lock call(gate_);
      Create(k2M, false);
    }).get();
  };
  const Status failed = Run(CycleKind::kPause);
  EXPECT_TRUE(failed.message().ends_with(": a call failed; the session runs on as before")) << failed.message();
  EXPECT_GT(made, 0);
  EXPECT_TRUE(ledger_.state().broken.empty()) << ledger_.state().broken;
  ASSERT_EQ(All<CycleBegun>().size(), 1U);
  ASSERT_EQ(All<PhaseDecided>().size(), 1U);
  EXPECT_EQ(All<PhaseDecided>()[0].phase, PhaseKind::kPauseArrive);
  ASSERT_EQ(All<CycleFailed>().size(), 1U);
  EXPECT_EQ(All<CycleFailed>()[0].culprits, (std::vector<CycleMember>{{kOwner, 1, 2, "host"}}));
  EXPECT_TRUE(All<CycleFailed>()[0].undone);
  EXPECT_TRUE(All<VoteCast>().empty());
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  set_.ahead = {};
  set_.named = [] {};
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  EXPECT_EQ(InUse(), 0U);
  set_.ahead = Ballot::kMade;
  EXPECT_FALSE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(Now(), Lifecycle::kPaused);
  EXPECT_EQ(All<CycleFailed>().back().kind, CycleKind::kResume);
  set_.ahead = {};
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
}

// Of whichever name it is that there is no memory for.
TEST_F(CoordinatorTest, a_call_that_failed_elsewhere_fails_here_also_without_memory_to_name_anybody) {
  const AllocationId id = Create();
  std::memset(Memory(id), 0x42, k2M);
  const auto fails_each_time = [&](CycleKind kind) {
    const Lifecycle before = Now();
    for (int spared = 0, asked = 1; asked > spared; ++spared) {
      asked = 0;
      set_.named = [&] {
        if (asked++ == spared) throw std::bad_alloc();
      };
      if (!set_.ahead) OtherFails(kind == CycleKind::kPause ? Ballot::kGone : Ballot::kMade, {Code::kDriver, "a call failed"});
      const Status failed = Run(kind);
      ASSERT_NE(failed.code(), Code::kOk) << spared;
      ASSERT_EQ(Now(), before) << spared;
      ASSERT_EQ(ledger_.state().broken, "") << spared;
    }
    set_.named = [] {};
  };
  set_.ahead = Ballot::kIdle;
  ASSERT_NO_FATAL_FAILURE(fails_each_time(CycleKind::kPause));
  set_.ahead = {};
  ASSERT_NO_FATAL_FAILURE(fails_each_time(CycleKind::kPause));
  EXPECT_EQ(Memory(id)[k2M - 1], std::byte{0x42});
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  ASSERT_NO_FATAL_FAILURE(fails_each_time(CycleKind::kResume));
  EXPECT_EQ(InUse(), 0U);
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(Memory(id)[k2M - 1], std::byte{0x42});
}

TEST_F(CoordinatorTest, a_resume_without_memory_for_the_news_of_a_death_releases_what_it_made_and_breaks_nothing) {
  const AllocationId id = Create();
  std::memset(Memory(id), 0x42, k2M);
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  set_.ends_at = Ballot::kMade;
  int asked = 0;
  peers_.await_loss = [&, awaits = peers_.await_loss](SessionId lost) {
    if (asked++ == 0) throw std::bad_alloc();
    return awaits(lost);
  };
  EXPECT_EQ(Run(CycleKind::kResume).code(), Code::kPeerLost);
  EXPECT_GT(asked, 1);
  EXPECT_EQ(ledger_.state().broken, "");
  EXPECT_EQ(Now(), Lifecycle::kPaused);
  EXPECT_EQ(InUse(), 0U);
}

TEST_F(CoordinatorTest, a_failing_call_is_this_sessions_vote_and_is_undone) {
  Create();
  ASSERT_TRUE(sim_->FailNext("Unmap", 1, cuda::kUnknown).ok());
  EXPECT_EQ(Run(CycleKind::kPause).driver_result(), cuda::kUnknown);
  const auto failed = OwnFailure();
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->phase, PhaseKind::kPauseReleaseOwn);
  EXPECT_EQ(Now(), Lifecycle::kRunning);
}

TEST_F(CoordinatorTest, a_pause_whose_undo_fails_ends_paused_and_a_resume_mends_it) {
  const AllocationId id = Create();
  std::memset(Memory(id), 0x42, k2M);
  OtherFails(Ballot::kGone, {Code::kDriver, "a call failed"});
  ASSERT_TRUE(sim_->FailNext("Create", 1, cuda::kUnknown).ok());
  const Status failed = Run(CycleKind::kPause);
  EXPECT_EQ(failed.code(), Code::kBroken);
  EXPECT_NE(failed.message().find("undoing it failed too"), std::string::npos) << failed.message();
  EXPECT_FALSE(All<CycleFailed>().back().undone);
  EXPECT_TRUE(All<CycleFailed>().back().paused);
  EXPECT_EQ(Now(), Lifecycle::kPaused);
  EXPECT_EQ(InUse(), 0U);
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(Memory(id)[0], std::byte{0x42});
}

// The first is gone, and only the backup has its contents; the second was not copied and stayed.
TEST_F(CoordinatorTest, a_pause_can_be_tried_again_after_one_whose_copies_failed_and_whose_undo_did) {
  const AllocationId first = Create(), second = Create();
  std::memset(Memory(first), 0x42, k2M);
  std::memset(Memory(second), 0x43, k2M);
  ASSERT_TRUE(sim_->FailNext("FinishCopies", 3, cuda::kUnknown).ok());
  ASSERT_TRUE(sim_->FailNext("Create", 1, cuda::kUnknown).ok());
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kBroken);
  const Status again = Run(CycleKind::kPause);
  ASSERT_TRUE(again.ok()) << again.message();
  EXPECT_EQ(InUse(), 0U);
  ASSERT_TRUE(Run(CycleKind::kResume).ok());
  EXPECT_EQ(Memory(first)[k2M - 1], std::byte{0x42});
  EXPECT_EQ(Memory(second)[k2M - 1], std::byte{0x43});
}

TEST_F(CoordinatorTest, a_check_that_has_failed_is_why_later_pauses_are_refused) {
  broken_ = true;
  EXPECT_TRUE(Latched(ledger_, Status{}).ok());
  EXPECT_FALSE(Latched(ledger_, {Code::kInvalid, "no such step"}).ok());
  EXPECT_TRUE(ledger_.state().broken.empty());
  EXPECT_EQ(Latched(ledger_, {Code::kInvalid, "check failed at call.cpp:1: stage == 2"}).code(), Code::kInvalid);
  EXPECT_EQ(ledger_.state().broken, "check failed at call.cpp:1: stage == 2");
  const Status refused = Run(CycleKind::kPause);
  EXPECT_EQ(refused.code(), Code::kBroken);
  EXPECT_NE(refused.message().find("check failed at call.cpp:1: stage == 2"), std::string::npos) << refused.message();
}

TEST_F(CoordinatorTest, a_check_that_fails_while_the_ledger_is_held_is_why_later_pauses_are_refused) {
  broken_ = true;
  HoldLedger();
  EXPECT_EQ(Latched(ledger_, {Code::kInvalid, "check failed at call.cpp:1: stage == 2"}).code(), Code::kInvalid);
  LetGo();
  const Status refused = Run(CycleKind::kPause);
  EXPECT_EQ(refused.code(), Code::kBroken);
  EXPECT_NE(refused.message().find("check failed at call.cpp:1: stage == 2"), std::string::npos) << refused.message();
}

// The ledger is held by a driver call of another thread that hangs, so nobody can say what memory there is.
TEST_F(CoordinatorTest, memory_waits_for_the_copies_of_a_pause_that_failed_whether_or_not_the_ledger_can_be_had) {
  std::memset(Memory(Create()), 0x42, k2M);
  sim_->SetHook([](std::string_view call, std::uint64_t) { return call == "FinishCopies" ? cuda::kTimeout : 0; });
  ASSERT_FALSE(Run(CycleKind::kPause).ok());
  ASSERT_GT(sim_->QueuedCopies(DeviceOrdinal{0}), 0U);
  HoldLedger();
  EXPECT_FALSE(coordinator_.AwaitCopies().ok());
  sim_->SetHook({});
  EXPECT_TRUE(coordinator_.AwaitCopies().ok());
  EXPECT_EQ(sim_->QueuedCopies(DeviceOrdinal{0}), 0U);
  LetGo();
}

// All others run on, and so does this session, whose calls wait for the ledger first.
TEST_F(CoordinatorTest, a_pause_that_failed_while_the_ledger_was_held_has_ended_for_whoever_has_it_next) {
  Create();
  Coordinator hasty({ledger_, *sim_, peers_, pinned_, Deadlines(std::chrono::milliseconds(200))}, gate_);
  set_.votes = [&](Ballot ballot) -> Status {
    if (ballot != Ballot::kSaved) return {};
    HoldLedger();
    return {Code::kDriver, "a call failed"};
  };
  bool runs = false;
  const Status failed =
      hasty.Cycle(CycleKind::kPause, {}, {.gate_opens = [&] { runs = ledger_.Progress().first == Lifecycle::kRunning; }});
  EXPECT_TRUE(failed.message().ends_with("the session runs on as before")) << failed.message();
  EXPECT_TRUE(runs);
  LetGo();
  Create();
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  ASSERT_EQ(All<CycleFailed>().size(), 1U);
  EXPECT_TRUE(All<CycleFailed>()[0].undone);
}

// A session that runs launches again, over memory that is not there.
TEST_F(CoordinatorTest, what_an_earlier_pause_has_left_released_is_not_forgotten_while_the_ledger_is_held) {
  const AllocationId first = Create(), second = Create();
  std::memset(Memory(first), 0x42, k2M);
  Coordinator hasty({ledger_, *sim_, peers_, pinned_, Deadlines(std::chrono::milliseconds(200))}, gate_);
  sim_->SetHook([unmapped = 0](std::string_view call, std::uint64_t) mutable {
    return call == "Create" || (call == "Unmap" && ++unmapped > 1) ? cuda::kUnknown : 0;
  });
  ASSERT_EQ(hasty.Cycle(CycleKind::kPause).code(), Code::kBroken);
  sim_->SetHook({});
  ASSERT_TRUE(!Resident(first) && Resident(second));
  ASSERT_EQ(Now(), Lifecycle::kPausing);
  set_.votes = [&](Ballot ballot) -> Status {
    if (ballot != Ballot::kSaved) return {};
    HoldLedger();
    return {Code::kDriver, "a call failed"};
  };
  std::optional<Lifecycle> ended;
  const Status failed = hasty.Cycle(CycleKind::kPause, {}, {.gate_opens = [&] { ended = ledger_.Progress().first; }});
  LetGo();
  EXPECT_EQ(failed.code(), Code::kBroken) << failed.message();
  EXPECT_EQ(ended, Lifecycle::kPausing);
  set_.votes = [](Ballot) { return Status{}; };
  ASSERT_TRUE(hasty.Cycle(CycleKind::kResume).ok());
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  EXPECT_EQ(Memory(first)[k2M - 1], std::byte{0x42});
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
  const AllocationId id = Create();
  std::memset(Memory(id), 0x42, k2M);
  for (const Ballot where : {Ballot::kMade, Ballot::kJoined, Ballot::kOpen}) {
    set_.votes = [where](Ballot ballot) {
      return ballot == Ballot::kGone || ballot == where ? Status{Code::kDriver, "a call failed"} : Status{};
    };
    EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kBroken);
    EXPECT_EQ(Now(), Lifecycle::kPaused);
    EXPECT_EQ(InUse(), 0U);
    set_.votes = [](Ballot) { return Status{}; };
    ASSERT_TRUE(Run(CycleKind::kResume).ok());
    EXPECT_EQ(Memory(id)[1], std::byte{0x42});
  }
}

TEST_F(CoordinatorTest, a_peer_that_is_late_in_an_undo_keeps_this_session_paused) {
  Create();
  set_.silent_at = Ballot::kGone;
  const Status failed = Run(CycleKind::kPause);
  EXPECT_EQ(failed.code(), Code::kBroken);
  EXPECT_NE(failed.message().find("rank 1 (pid 2 on host host)"), std::string::npos) << failed.message();
  EXPECT_EQ(Now(), Lifecycle::kPaused);
  set_.silent_at.reset();
  EXPECT_TRUE(Run(CycleKind::kResume).ok());
}

TEST_F(CoordinatorTest, a_peer_that_died_does_not_keep_this_session_from_undoing_and_the_journal_knows_of_the_loss) {
  Create();
  set_.ends_at = Ballot::kGone;
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kPeerLost);
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  EXPECT_FALSE(ledger_.state().peers.at(kOwner).connected) << "the next resume would be planned with imports from the dead";
}

// A member that died may not have added its device. To bind memory to an object before all devices were added would wait for it
// in the driver.
TEST_F(CoordinatorTest, nothing_is_bound_to_a_new_multicast_object_if_a_member_died_before_it_was_sure) {
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

  OtherFails(Ballot::kGone, {Code::kDriver, "a call failed"});
  set_.ends_at = Ballot::kJoined;
  const Status failed = Run(CycleKind::kPause);
  EXPECT_EQ(failed.code(), Code::kBroken);
  EXPECT_NE(failed.message().find("before it was sure that its device was added"), std::string::npos) << failed.message();
  EXPECT_EQ(Now(), Lifecycle::kPaused);
}

// ---- what else can be in the way
// ----------------------------------------------------------------------------------------------

TEST_F(CoordinatorTest, an_owner_that_is_lost_during_an_undo_is_replaced_within_it) {
  const AllocationId import = Import();
  OtherFails(Ballot::kGone, {Code::kDriver, "a call failed"});
  peers_.reimport = [](SessionId, const auto&) { return Status{Code::kPeerLost, "rank 1 died"}; };
  EXPECT_TRUE(Run(CycleKind::kPause).message().ends_with("the session runs on as before"));
  EXPECT_EQ(Now(), Lifecycle::kRunning);
  EXPECT_TRUE(Resident(import));
  EXPECT_EQ(InUse(), k2M);  // on this session's own device
}

TEST_F(CoordinatorTest, an_owner_whose_loss_is_never_noticed_here_is_not_asked_for_ever) {
  Import();
  OtherFails(Ballot::kGone, {Code::kDriver, "a call failed"});
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
  const auto vote = OwnFailure();
  ASSERT_TRUE(vote);
  EXPECT_EQ(vote->phase, PhaseKind::kResumeImport);
  EXPECT_EQ(All<PhaseDecided>().back().culprit, kOwner);
}

// The call has found a set without it, and its loss has not been told yet.
TEST_F(CoordinatorTest, an_owner_that_died_before_the_members_were_found_is_replaced_by_the_resume) {
  const AllocationId import = Import(k2M, kOther);
  ASSERT_TRUE(Run(CycleKind::kPause).ok());
  Record(PeerConnected{kOther, "host", 3, 0, 2});
  set_.dead_strangers.insert(kOther);
  peers_.reimport = [](SessionId, const auto&) { return Status{Code::kPeerLost, "it died"}; };
  const Status resumed = Run(CycleKind::kResume);
  EXPECT_TRUE(resumed.ok()) << resumed.message();
  EXPECT_TRUE(Resident(import));
}

TEST_F(CoordinatorTest, a_broken_session_votes_against_a_pause) {
  Create();
  Break("the disk is full");
  const Status refused = Run(CycleKind::kPause);
  EXPECT_EQ(refused.code(), Code::kBroken);
  EXPECT_NE(refused.message().find("pause refused: this session is broken: the disk is full"), std::string::npos)
      << refused.message();
  EXPECT_EQ(set_.asked, (std::vector{Ballot::kCome})) << "the others hear of it before anything is released";
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
  EXPECT_EQ(OwnFailure()->code, Code::kRefused) << "the others hear of it before anything is released";
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
  EXPECT_EQ(OwnFailure()->code, Code::kRefused);
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

TEST(CallGate, who_waits_at_a_gate_that_could_not_be_closed_goes_on) {
  static CallGate gate;  // which outlives a thread that hangs
  std::shared_lock inside(gate);
  std::thread closes([] { EXPECT_FALSE(gate.Close(std::chrono::milliseconds(300)).ok()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::atomic<bool> asks{false};
  std::promise<void> entered;
  std::future<void> done = entered.get_future();
  std::thread([&asks, entered = std::move(entered)]() mutable {
    asks = true;
    { const std::shared_lock lock(gate); }
    entered.set_value();
  }).detach();
  closes.join();
  EXPECT_TRUE(asks) << "it did not wait for the gate";
  ASSERT_EQ(done.wait_for(std::chrono::seconds(5)), std::future_status::ready);
}

TEST_F(CoordinatorTest, each_vote_is_journaled_before_the_others_are_waited_for_also_in_an_undo) {
  Create();
  std::vector<PhaseKind> journaled;
  set_.votes = [&](Ballot ballot) {
    if (ballot != Ballot::kCome) journaled.push_back(All<VoteCast>().back().phase);
    return ballot == Ballot::kGone ? Status{Code::kDriver, "a call failed"} : Status{};
  };
  EXPECT_FALSE(Run(CycleKind::kPause).ok());
  EXPECT_EQ(journaled, (std::vector{PhaseKind::kPauseArrive, PhaseKind::kPauseSave, PhaseKind::kPauseGone,
                                    PhaseKind::kResumeCreateOwn, PhaseKind::kResumeImport, PhaseKind::kResumeVerify}));
  EXPECT_EQ(All<VoteCast>().size(), journaled.size());
}

TEST_F(CoordinatorTest, threads_are_journaled_once_at_a_deadline_and_only_there) {
  Create();
  OtherFails(Ballot::kSaved, {Code::kDriver, "a call failed"});
  EXPECT_FALSE(Run(CycleKind::kPause).ok());
  EXPECT_TRUE(All<ThreadSeen>().empty());
  set_.silent_at = Ballot::kCome;
  EXPECT_EQ(Run(CycleKind::kPause).code(), Code::kTimeout);
  const auto threads = All<ThreadSeen>();
  ASSERT_FALSE(threads.empty());
  EXPECT_EQ(threads[0].state, "running");
  EXPECT_FALSE(threads[0].stack.empty()) << "of the thread that waited";
  for (std::size_t i = 1; i < threads.size(); ++i) EXPECT_TRUE(threads[i].stack.empty());
}

}  // namespace
}  // namespace amem
