// Verdicts on jobs as people find them: while they hang, after the launcher has ended the rest, and from the journals of those
// that are left.
#include <gtest/gtest.h>

#include <set>

#include "replay/diagnosis/verdict.h"
#include "tests/replay/diagnosis/scripted_cycles.h"

namespace amem {
namespace {

using test::CycleJob;
using test::History;
using test::JudgeAlone;
using test::kMiB;
using test::kSecond;
using test::Story;
using Action = Remedy::Action;

constexpr SessionStatus kAlive = SessionStatus::kLive, kGone = SessionStatus::kCrashed, kEndedWell = SessionStatus::kClosed,
                        kACopy = SessionStatus::kCopied;

// A rank that shares memory with the importer, beside the two of the job.
Story ThirdOf(CycleJob& job, std::uint64_t session = 0xca7, std::int32_t rank = 2) {
  Story third(session, rank, &job.clock);
  const AllocationId own = job.importer.Create(), held = third.NextId();
  job.importer.Then(PeerConnected{.peer = third.id(), .host = "alpha", .pid = 1000 + rank, .group = 7, .rank = rank});
  job.importer.Then(Exported{.allocation = own});
  job.importer.Then(ReferenceAdded{.allocation = own, .by = third.id(), .as = held});
  third.Then(PeerConnected{.peer = job.importer.id(), .host = "alpha", .pid = 1001, .group = 7, .rank = 1});
  third.Then(
      Imported{.allocation = held, .remote = {job.importer.id(), own}, .bytes = 2 * kMiB, .properties = Story::Properties()});
  return third;
}

void Vote(Story& story, PhaseKind phase, bool ok = true, Code code = {}, const std::string& message = {}) {
  story.Then(VoteCast{phase, ok, code, message});
}

// ---- hangs -----------------------------------------------------------------------------------------------------------------

// All have voted, and the one that counts the votes does not go on. Nothing tells who, but somebody is named.
TEST(EndOfJob, an_open_attempt_that_is_silent_is_never_healthy) {
  for (const bool votes : {false, true}) {
    CycleJob job;
    job.BeginAll(CycleKind::kPause);
    for (Story* story : {&job.owner, &job.importer}) {
      job.Work(*story, PhaseKind::kPauseArrive);
      if (votes) Vote(*story, PhaseKind::kPauseArrive);
    }
    const Verdict verdict = job.Live(3 * kSecond);
    EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
    EXPECT_EQ(verdict.rank, 1) << "it has the lowest number, and so it counts the votes";
    EXPECT_TRUE(job.Live(kSecond / 2).healthy());
  }
}

// Rank 1 did all its steps and was stopped before it voted.
TEST(EndOfJob, the_rank_that_did_not_vote_is_named) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  for (Story* story : {&job.owner, &job.importer}) {
    job.Work(*story, PhaseKind::kPauseArrive);
    Vote(*story, PhaseKind::kPauseArrive);
  }
  for (Story* story : {&job.owner, &job.importer}) job.Decide(*story, PhaseKind::kPauseArrive);
  job.Work(job.owner, PhaseKind::kPauseSave);
  job.Work(job.importer, PhaseKind::kPauseSave);
  Vote(job.importer, PhaseKind::kPauseSave);
  const Verdict verdict = job.Live(3 * kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
  EXPECT_EQ(verdict.rank, 0);
}

// The others know that the vote passed and have gone on; this one was stopped before it heard so.
TEST(EndOfJob, the_rank_that_is_behind_the_others_is_named) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  job.Work(job.owner, PhaseKind::kPauseArrive);
  job.Work(job.importer, PhaseKind::kPauseArrive);
  job.Decide(job.importer, PhaseKind::kPauseArrive);
  job.Work(job.importer, PhaseKind::kPauseSave);
  EXPECT_EQ(job.Live(3 * kSecond).rank, 0);
}

TEST(EndOfJob, a_stopped_process_is_named_and_is_to_be_continued) {
  for (const bool seen_now : {true, false}) {
    CycleJob job;
    job.BeginAll(CycleKind::kPause);
    job.Work(job.owner, PhaseKind::kPauseArrive);
    job.Work(job.importer, PhaseKind::kPauseArrive);
    if (!seen_now)
      job.importer.Then(ProcessSeen{.session = job.owner.id(), .pid = 1000, .state = "stopped", .answer = "silent"});
    std::vector<SessionStory> journals = job.Read(kAlive, kAlive, 3 * kSecond);
    if (seen_now) journals[0].process_now = "stopped";
    const Verdict verdict = Diagnose(journals);
    EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{0});
    EXPECT_EQ(verdict.remedy.action, Action::kContinueProcess);
    EXPECT_EQ(verdict.remedy.pid, 1000);
    EXPECT_HAS(ToText(verdict.remedy), "kill -CONT 1000");
    EXPECT_HAS(verdict.summary, "stopped");
  }
}

// All have come, and none is counted: one was stopped between the two.
TEST(EndOfJob, a_rank_that_stopped_while_it_arrived_is_named_and_not_the_one_that_waited) {
  CycleJob job;
  job.Arrive(job.importer, CycleKind::kPause);
  job.Arrive(job.owner, CycleKind::kPause);
  job.importer.Then(MemberHeard{job.importer.id(), CycleKind::kPause, PhaseKind::kPauseArrive});
  job.clock += 2 * kSecond;
  job.importer.Then(ProcessSeen{.session = job.owner.id(), .pid = 1000, .state = "stopped"});
  job.importer.Then(CycleFailed{CycleKind::kPause, 1, true, "waited 2000 ms for rank 0 to come", Code::kTimeout});
  const Verdict verdict = job.Judge(kAlive, kAlive, 2 * kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
  EXPECT_EQ(verdict.rank, 0);
  EXPECT_EQ(verdict.remedy.action, Action::kContinueProcess);
  EXPECT_EQ(verdict.wall_ns % kSecond != 0, true) << "its time is known";
}

// ---- teardown --------------------------------------------------------------------------------------------------------------

// "rank 1 never called resume", and then the launcher killed all, while they waited or after they had given up.
TEST(EndOfJob, teardown_does_not_hide_a_rank_that_never_came) {
  for (const bool gave_up : {false, true}) {
    for (const bool witnessed : {false, true}) {
      CycleJob job;
      job.Pause();
      job.clock += 10 * kSecond;
      job.Arrive(job.owner, CycleKind::kResume);
      job.clock += 3 * kSecond;
      if (gave_up)
        job.owner.Then(CycleFailed{CycleKind::kResume, 1, true, "waited 3000 ms for rank 1 to come", Code::kTimeout});
      job.clock += kSecond;
      if (witnessed) job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
      const Verdict verdict = job.Judge(kGone, kGone);
      EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << gave_up << witnessed << ": " << verdict.summary;
      EXPECT_EQ(verdict.rank, 1);
      EXPECT_EQ(verdict.remedy.action, Action::kCallOnEveryRank);
    }
  }
}

// A waiter that is killed first, by the launcher, is not the cause either.
TEST(EndOfJob, teardown_of_a_waiting_rank_does_not_hide_the_one_that_it_waited_for) {
  CycleJob job;
  Story third = ThirdOf(job);
  job.Arrive(job.owner, CycleKind::kPause);
  job.Arrive(third, CycleKind::kPause);
  third.Then(PeerConnected{.peer = job.owner.id(), .host = "alpha", .pid = 1000, .group = 7, .rank = 0});
  job.clock += 4 * kSecond;
  third.Then(PeerLost{job.owner.id(), kPeerDied});
  std::vector<SessionStory> journals = job.Read(kGone, kGone);
  journals.push_back(History(third, kGone));
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
}

// But a rank that dies while it is waited for, and that the others outlive, is the cause.
TEST(EndOfJob, a_death_that_the_others_outlive_is_the_cause) {
  for (const bool gave_up : {true, false}) {
    CycleJob job;
    job.Pause();
    job.Arrive(job.owner, CycleKind::kResume);
    job.clock += 4 * kSecond;
    job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
    if (gave_up) job.owner.Then(CycleFailed{CycleKind::kResume, 1, true, "rank 1 has died", Code::kPeerLost});
    const Verdict verdict = job.Judge(kAlive, kGone, 10 * kSecond);
    EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
    EXPECT_EQ(verdict.rank, 1);
  }
}

// It had not joined, and was running; the others were told of its death at once.
TEST(EndOfJob, a_rank_that_was_killed_while_the_others_waited_for_it_is_the_cause) {
  CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 1 died while it was waited for", Code::kPeerLost});
  job.clock += 3 * kSecond;
  for (const SessionStatus of_owner : {kAlive, kGone}) {
    const Verdict verdict = job.Judge(of_owner, kGone);
    EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
    EXPECT_EQ(verdict.remedy.action, Action::kFindReasonOfDeath);
  }
}

// The same, by a connection that was not known to be its yet, so that there is no PeerLost.
TEST(EndOfJob, a_rank_that_was_gone_when_it_was_asked_to_come_is_the_cause) {
  for (const SessionStatus of_owner : {kAlive, kGone}) {
    CycleJob job;
    job.Arrive(job.owner, CycleKind::kPause);
    job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 1 died while it was waited for", Code::kPeerLost});
    job.clock += 3 * kSecond;
    job.owner.Then(PassedThrough{.name = "cuMemGetInfo"});
    const Verdict verdict = job.Judge(of_owner, kGone);
    EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
    EXPECT_EQ(verdict.remedy.action, Action::kFindReasonOfDeath);
  }
}

// ---- one journal alone -----------------------------------------------------------------------------------------------------

// Rank 1 waits for rank 0, which is asked after half a second, and again and again, and never comes.
TEST(EndOfJob, the_journal_of_a_rank_that_never_came_tells_so_alone) {
  for (const bool long_enough : {true, false}) {
    CycleJob job;
    job.Pause();
    MemberHeard asks{.member = job.importer.id(), .kind = CycleKind::kResume, .phase = PhaseKind::kResumeArrive};
    asks.rank = 1;
    asks.pid = 1001;
    asks.asks = true;
    job.owner.Then(asks);
    if (long_enough) {
      job.clock += kSecond;
      job.owner.Then(asks);
    }
    const std::vector<SessionStory> alone = {History(job.owner, kGone)};
    const Verdict verdict = Diagnose(alone);
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{0});
    if (!long_enough) {  // it ended while it was waited for, and nobody had waited for long
      EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
      continue;
    }
    EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
    EXPECT_EQ(verdict.remedy.action, Action::kCallOnEveryRank);
    EXPECT_HAS(verdict.summary, "Rank 1 ");
    EXPECT_HAS(verdict.headline, "Rank 0 did not join resume 1");
  }
}

// It was late for the first question, and is asked by one that still waits after this one has given up.
TEST(EndOfJob, a_rank_that_came_is_not_called_absent_because_it_was_asked) {
  CycleJob job;
  Story third = ThirdOf(job);
  MemberHeard asks{.member = third.id(), .kind = CycleKind::kPause, .phase = PhaseKind::kPauseArrive, .asks = true};
  job.owner.Then(asks);  // it is late
  job.Arrive(job.owner, CycleKind::kPause);
  job.clock += kSecond / 2;
  job.owner.Then(asks);
  job.clock += 2 * kSecond;
  CycleFailed failed{CycleKind::kPause, 1, true, "waited 3000 ms for rank 1 to come", Code::kTimeout};
  failed.culprits = {{job.importer.id(), 1, 1001, "alpha"}};
  job.owner.Then(failed);
  job.clock += kSecond / 2;
  job.owner.Then(asks);
  const std::vector<SessionStory> alone = {History(job.owner, kGone)};
  const Verdict verdict = Diagnose(alone);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1}) << "neither itself, nor the one that asked";
}

// The one whose end is recorded as the reason is named, also where nothing was shared with it.
TEST(EndOfJob, a_member_that_one_journal_was_told_of_is_named_by_it_alone) {
  CycleJob job;
  const SessionId stranger{0x9999};
  job.Arrive(job.owner, CycleKind::kPause);
  job.owner.Then(
      CycleBegun{CycleKind::kPause, 1, {job.importer.id(), job.owner.id(), stranger}, {{stranger, 9, 1009, "alpha"}}});
  job.Work(job.owner, PhaseKind::kPauseArrive);
  job.owner.Then(PhaseDecided{PhaseKind::kPauseArrive, false, stranger, "rank 9 died in phase pause: arrive", Code::kPeerLost});
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 9 died", Code::kPeerLost});
  const std::vector<SessionStory> alone = {History(job.owner, kGone)};
  const Verdict verdict = Diagnose(alone);
  EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{9});
  EXPECT_EQ(verdict.remedy.action, Action::kFindReasonOfDeath);
}

TEST(EndOfJob, a_rank_that_cannot_answer_is_named_by_the_one_that_it_told) {
  CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  CycleFailed failed{CycleKind::kPause, 1, true, "rank 1 has no descriptor left", Code::kNoDescriptors};
  failed.culprits = {{job.importer.id(), 1, 1001, "alpha"}};
  job.owner.Then(failed);
  const std::vector<SessionStory> alone = {History(job.owner, kAlive, job.clock)};
  const Verdict verdict = Diagnose(alone);
  EXPECT_EQ(verdict.kind, VerdictKind::kRefused) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
  EXPECT_EQ(verdict.remedy.action, Action::kRaiseDescriptors);
}

// Its connection ends before its journal's last word is written.
TEST(EndOfJob, a_rank_that_left_while_it_was_waited_for_is_the_cause_although_it_closed_later) {
  std::set<std::uint64_t> times;
  for (const std::uint64_t later : {std::uint64_t{0}, std::uint64_t{5 * kSecond}}) {
    CycleJob job;
    job.Arrive(job.owner, CycleKind::kPause);
    CycleFailed failed{CycleKind::kPause, 1, true, "rank 1 has closed while it was waited for", Code::kPeerLost};
    failed.culprits = {{job.importer.id(), 1, 1001, "alpha"}};
    job.owner.Then(failed);
    job.clock += later;
    job.importer.Then(SessionClosed{.reason = "exit", .exit_code = 1});
    const Verdict verdict = job.Judge(kAlive, SessionStatus::kClosed, 2 * kSecond);
    EXPECT_EQ(verdict.kind, VerdictKind::kLeft) << verdict.summary;
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
    ASSERT_FALSE(verdict.causes.empty());
    times.insert(verdict.causes.front().wall_ns);
  }
  EXPECT_EQ(times.size(), 1U) << "it is dated by the one that missed it";
}

// Ctrl-C ends one process after the other, each in order. One that had left long before that is the first.
TEST(EndOfJob, of_a_job_that_was_ended_the_rank_that_left_before_is_named_by_one_journal_alone) {
  for (const bool before : {true, false}) {
    CycleJob job;
    job.Pause();
    job.Resume();
    job.owner.Then(PeerLost{job.importer.id(), "has closed"});
    if (before) job.clock += kSecond / 2;
    job.owner.Then(SessionClosed{.reason = "exit", .exit_code = 130});
    const std::vector<SessionStory> alone = {History(job.owner, SessionStatus::kClosed)};
    EXPECT_EQ(Diagnose(alone).ranks, std::vector<std::int32_t>{before ? 1 : 0}) << Diagnose(alone).summary;
  }
}

// A look while it lived says why it hung; a later one only that the launcher has ended it.
TEST(EndOfJob, a_rank_that_was_stopped_is_to_be_continued_also_when_its_end_was_seen) {
  CycleJob job;
  job.Pause();
  job.Arrive(job.owner, CycleKind::kResume);
  job.clock += 3 * kSecond;
  job.owner.Then(ProcessSeen{.session = job.importer.id(), .pid = 1001, .state = "stopped"});
  job.owner.Then(CycleFailed{CycleKind::kResume, 1, true, "waited 3000 ms for rank 1 to come", Code::kTimeout});
  job.clock += kSecond;
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  job.owner.Then(ProcessSeen{.session = job.importer.id(), .pid = 1001, .state = "zombie", .exit_code = 137});
  const Verdict verdict = job.Judge(kGone, kGone);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
  EXPECT_EQ(verdict.remedy.action, Action::kContinueProcess);
}

TEST(EndOfJob, a_stopped_rank_needs_no_second_to_be_noticed) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  std::vector<SessionStory> journals = job.Read(kAlive, kAlive, kSecond / 10);
  journals[0].process_now = "stopped";
  EXPECT_EQ(Diagnose(journals).remedy.action, Action::kContinueProcess);
}

// Rank 1 died while all were idle, and rank 0 saw it. Rank 2 had been silent for longer when all were killed.
TEST(EndOfJob, an_unwitnessed_death_does_not_beat_a_witnessed_one_by_its_last_event) {
  for (const bool paused : {false, true}) {
    CycleJob job;
    Story third = ThirdOf(job);
    if (paused) {
      for (Story* story : {&job.owner, &job.importer, &third}) {
        job.Arrive(*story, CycleKind::kPause);
        story->Then(CycleBegun{CycleKind::kPause, 1, {job.importer.id(), third.id(), job.owner.id()}});
      }
      for (const PhaseKind phase :
           {PhaseKind::kPauseArrive, PhaseKind::kPauseSave, PhaseKind::kPauseReleaseOwn, PhaseKind::kPauseGone}) {
        for (Story* story : {&third, &job.owner, &job.importer}) job.Work(*story, phase);
        for (Story* story : {&third, &job.owner, &job.importer}) job.Decide(*story, phase);
      }
      for (Story* story : {&third, &job.owner, &job.importer}) story->Then(CycleDone{CycleKind::kPause, 1, 1000});
    }
    job.clock += 20 * kSecond;
    job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
    job.clock += 5 * kSecond;
    job.owner.Then(HostAllocated{.address = Address{0x5000}, .bytes = kMiB});
    std::vector<SessionStory> journals = job.Read(kGone, kGone);
    journals.push_back(History(third, kGone));
    const Verdict verdict = Diagnose(journals);
    EXPECT_EQ(verdict.kind, paused ? VerdictKind::kDied : VerdictKind::kEnded) << verdict.summary;
    EXPECT_EQ(verdict.rank, 1) << verdict.summary;
  }
}

// It had hung in a step for seconds when somebody ended it.
TEST(EndOfJob, a_rank_that_was_ended_because_it_hung_is_told_as_one_that_hung) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  job.Work(job.owner, PhaseKind::kPauseArrive);
  job.WorkInto(job.importer, PhaseKind::kPauseArrive, StepKind::kQuiesce);
  job.clock += 10 * kSecond;
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  job.owner.Then(PhaseDecided{PhaseKind::kPauseArrive, false, job.importer.id(), "rank 1 died", Code::kPeerLost});
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 1 died", Code::kPeerLost});
  const Verdict verdict = job.Judge(kAlive, kGone);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
}

TEST(EndOfJob, a_failed_step_before_a_rank_left_is_the_cause) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  const Step step = job.WorkInto(job.importer, PhaseKind::kPauseArrive, StepKind::kQuiesce);
  job.importer.Then(StepFailed{step, Code::kDriver, 719, "quiesce device 0: it did not work"});
  job.Work(job.owner, PhaseKind::kPauseArrive);
  job.GiveUp(CycleKind::kPause, PhaseKind::kPauseArrive, job.importer.id(), "rank 1 failed");
  job.clock += kSecond;
  job.owner.Then(SessionClosed{.reason = "exit", .exit_code = 1});
  EXPECT_EQ(job.Judge(kEndedWell, kGone).kind, VerdictKind::kStepFailed);
}

// ---- leaving in order ------------------------------------------------------------------------------------------------------

TEST(EndOfJob, a_rank_that_left_while_paused_is_named_and_not_healthy) {
  CycleJob job;
  job.Pause();
  job.importer.Then(SessionClosed{.reason = "exit", .exit_code = 1});
  job.clock += 5 * kSecond;
  const Verdict verdict = job.Judge(kAlive, kEndedWell, 5 * kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kLeft) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.remedy.action, Action::kStayUntilResumed);
  EXPECT_EQ(verdict.headline, "Rank 1 exited with code 1, while it was paused");
  EXPECT_EQ(JudgeAlone(job.importer, kEndedWell).kind, VerdictKind::kLeft) << "its own journal alone tells";
}

TEST(EndOfJob, a_rank_without_an_exit_code_that_left_while_others_are_paused_is_not_healthy) {
  CycleJob job;
  job.Pause();
  job.importer.Then(SessionClosed{.reason = "exit"});
  EXPECT_EQ(job.Judge(kAlive, kEndedWell, 5 * kSecond).kind, VerdictKind::kLeft);
  EXPECT_EQ(job.Judge(kGone, kEndedWell).rank, 1);
}

// Exit code 0 is no excuse: its own journal does not tell whether the others ended as well as it did.
TEST(EndOfJob, a_journal_alone_that_closed_well_while_it_was_paused_is_not_healthy) {
  for (const bool owner : {true, false}) {
    CycleJob job;
    job.Pause();
    Story& story = owner ? job.owner : job.importer;
    story.Then(SessionClosed{.reason = "exit", .exit_code = 0});
    const Verdict verdict = JudgeAlone(story, kEndedWell);
    EXPECT_EQ(verdict.kind, VerdictKind::kLeft) << verdict.summary;
    EXPECT_EQ(verdict.rank, owner ? 0 : 1);
    EXPECT_EQ(verdict.remedy.action, Action::kStayUntilResumed);
  }
  CycleJob running;
  running.Pause();
  running.Resume();
  running.importer.Then(SessionClosed{.reason = "exit", .exit_code = 0});
  EXPECT_TRUE(JudgeAlone(running.importer, kEndedWell).healthy()) << "it was not paused any more";
}

TEST(EndOfJob, the_first_that_left_while_paused_is_named_when_the_others_follow) {
  CycleJob job;
  job.Pause();
  job.importer.Then(SessionClosed{.reason = "exit"});
  job.clock += 5 * kSecond;
  job.owner.Then(SessionClosed{.reason = "exit"});
  const Verdict verdict = job.Judge(kEndedWell, kEndedWell);
  EXPECT_EQ(verdict.kind, VerdictKind::kLeft) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
}

// Rank 1 dies while it runs, the others pause without it, and are then killed one by one.
TEST(EndOfJob, the_first_death_wins_over_later_ones) {
  CycleJob job;
  Story third = ThirdOf(job);
  third.Then(PeerConnected{.peer = job.owner.id(), .host = "alpha", .pid = 1000, .group = 7, .rank = 0});
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  job.clock += 5 * kSecond;
  job.Arrive(job.owner, CycleKind::kPause);
  job.owner.Then(CycleBegun{CycleKind::kPause, 1, {job.owner.id()}});
  for (const PhaseKind phase :
       {PhaseKind::kPauseArrive, PhaseKind::kPauseSave, PhaseKind::kPauseReleaseOwn, PhaseKind::kPauseGone}) {
    job.Work(job.owner, phase);
    job.Decide(job.owner, phase);
  }
  job.owner.Then(CycleDone{CycleKind::kPause, 1, 1000});
  job.clock += 5 * kSecond;
  third.Then(PeerLost{job.owner.id(), kPeerDied});
  std::vector<SessionStory> journals = job.Read(kGone, kGone);
  journals.push_back(History(third, kGone));
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kEnded) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
}

TEST(EndOfJob, all_that_end_while_paused_without_an_error_are_healthy) {
  CycleJob job;
  job.Pause();
  for (Story* story : {&job.owner, &job.importer}) story->Then(SessionClosed{.reason = "exit", .exit_code = 0});
  EXPECT_TRUE(job.Judge(kEndedWell, kEndedWell).healthy());
}

// ---- journals that are missing ---------------------------------------------------------------------------------------------

TEST(EndOfJob, of_a_culprit_without_a_journal_the_kind_is_what_the_others_were_told) {
  struct Told {
    Code code;
    int driver_result;
    VerdictKind kind;
    Action action;
  };
  for (const Told& told : {Told{Code::kOutOfMemory, 2, VerdictKind::kOutOfMemory, Action::kFreeMemory},
                           Told{Code::kDriver, 719, VerdictKind::kStepFailed, Action::kRestartProcess},
                           Told{Code::kDriver, 214, VerdictKind::kStepFailed, Action::kExamineGpu},
                           Told{Code::kDriver, 702, VerdictKind::kStepFailed, Action::kAvoidDisplay},
                           Told{Code::kBroken, 0, VerdictKind::kBroken, Action::kRepairJournal},
                           Told{Code::kTimeout, 0, VerdictKind::kStalled, Action::kExamineProcess}}) {
    CycleJob job;
    job.Pause();
    job.BeginAll(CycleKind::kResume);
    job.PhaseOfAll(PhaseKind::kResumeArrive);
    job.Work(job.importer, PhaseKind::kResumeCreateOwn);
    job.importer.Then(PeerConnected{.peer = job.owner.id(), .host = "alpha", .pid = 1000, .group = 7, .rank = 0});
    job.importer.Then(PhaseDecided{PhaseKind::kResumeCreateOwn, false, job.owner.id(), "rank 0 failed: device 0 has 1 MiB free",
                                   told.code, told.driver_result});
    job.importer.Then(CycleFailed{CycleKind::kResume, 1, true, "rank 0 failed", told.code, told.driver_result});
    const Verdict verdict = JudgeAlone(job.importer, kAlive);
    EXPECT_EQ(verdict.kind, told.kind) << verdict.summary;
    EXPECT_EQ(verdict.rank, 0);
    EXPECT_EQ(verdict.remedy.action, told.action) << verdict.summary;
    EXPECT_HAS(verdict.summary, "1 MiB free");
    const char* const as_told = "reported: rank 0 failed: device 0 has 1 MiB free";  // cause and consequence at once
    EXPECT_EQ(std::ranges::count(verdict.evidence, as_told, &Evidence::text), 1);
  }
}

TEST(EndOfJob, of_a_dead_rank_without_a_journal_the_others_tell) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  job.Work(job.owner, PhaseKind::kPauseArrive);
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  job.owner.Then(ProcessSeen{.session = job.importer.id(), .pid = 1001, .state = "zombie", .exit_code = 137});
  job.Decide(job.owner, PhaseKind::kPauseArrive, job.importer.id(), "rank 1 died");
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 1 died", Code::kPeerLost});
  // Also when the survivor was killed afterwards: its own end is not the cause.
  for (const SessionStatus status : {kAlive, kGone}) {
    const Verdict verdict = JudgeAlone(job.owner, status);
    EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
    EXPECT_EQ(verdict.rank, 1);
    EXPECT_EQ(verdict.remedy.action, Action::kFindReasonOfDeath);
    EXPECT_HAS(verdict.summary, "signal 9");
  }
}

// ---- several roots, and remedies by kind -----------------------------------------------------------------------------------

TEST(EndOfJob, two_devices_that_are_full_are_both_named) {
  CycleJob job;
  const AllocationId own = job.importer.Create();
  job.importer.Map(own);
  job.Pause();
  job.BeginAll(CycleKind::kResume);
  for (Story* story : {&job.owner, &job.importer}) {
    const Step step = job.WorkInto(*story, PhaseKind::kResumeArrive, StepKind::kCheckMemory);
    story->Then(StepFailed{step, Code::kOutOfMemory, 2, "check memory: device 0 has 1 MiB free"});
  }
  job.GiveUp(CycleKind::kResume, PhaseKind::kResumeArrive, job.owner.id(), "rank 0 failed");
  const Verdict verdict = job.Judge(kAlive, kAlive);
  EXPECT_EQ(verdict.kind, VerdictKind::kOutOfMemory) << verdict.summary;
  EXPECT_EQ(verdict.ranks, (std::vector<std::int32_t>{0, 1}));
  EXPECT_HAS(verdict.headline, "ranks 0 and 1");
  EXPECT_FALSE(test::Has(verdict.summary, "gave up because of it"));
}

Action RemedyFor(StepKind kind, PhaseKind phase, Code code, int driver_result) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  if (phase != PhaseKind::kPauseArrive) job.PhaseOfAll(PhaseKind::kPauseArrive);
  job.importer.Then(PhaseBegun{phase});
  const Step step{kind, {}, {}, kMiB, DeviceOrdinal{0}};
  job.importer.Then(StepBegun{step});
  job.importer.Then(StepFailed{step, code, driver_result, "it did not work"});
  job.Work(job.owner, phase);
  job.GiveUp(CycleKind::kPause, phase, job.importer.id(), "rank 1 failed");
  const Verdict verdict = job.Judge(kAlive, kAlive);
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1}) << verdict.summary;
  return verdict.remedy.action;
}

TEST(EndOfJob, remedies_are_by_kind_of_cause) {
  EXPECT_EQ(RemedyFor(StepKind::kScan, PhaseKind::kPauseSave, Code::kOutOfMemory, 2), Action::kFreeHostMemory);
  EXPECT_EQ(RemedyFor(StepKind::kImport, PhaseKind::kPauseSave, Code::kIo, 0), Action::kRaiseDescriptors);
  for (const int dead : {700, 719, 999}) {
    EXPECT_EQ(RemedyFor(StepKind::kQuiesce, PhaseKind::kPauseArrive, Code::kDriver, dead), Action::kRestartProcess);
  }
  EXPECT_EQ(RemedyFor(StepKind::kQuiesce, PhaseKind::kPauseArrive, Code::kBroken, 0), Action::kRepairJournal);
}

TEST(EndOfJob, groups_that_differ_are_named_and_not_called_absent) {
  for (const Code code : {Code::kRefused, Code::kOk}) {
    CycleJob job;
    Story third = ThirdOf(job);
    third.Then(GroupChanged{8});
    for (Story* story : {&job.owner, &job.importer, &third}) {
      job.Arrive(*story, CycleKind::kPause);
      story->Then(CycleFailed{CycleKind::kPause, 1, true, "the groups differ", code});
    }
    std::vector<SessionStory> journals = job.Read(kAlive, kAlive);
    journals.push_back(History(third, kAlive, job.clock));
    const Verdict verdict = Diagnose(journals);
    EXPECT_EQ(verdict.kind, VerdictKind::kRefused) << verdict.summary;
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{2});
    EXPECT_EQ(verdict.remedy.action, Action::kOneGroup);
    EXPECT_HAS(ToText(verdict.remedy), "AMEM_GROUPID");
  }
}

TEST(EndOfJob, an_arrival_that_failed_has_a_remedy_by_its_code) {
  const auto action = [](Code code) {
    CycleJob job;
    for (Story* story : {&job.owner, &job.importer}) {
      job.Arrive(*story, CycleKind::kPause);
      story->Then(CycleFailed{CycleKind::kPause, 1, true, "why", code});
    }
    return job.Judge(kAlive, kAlive).remedy.action;
  };
  EXPECT_EQ(action(Code::kIo), Action::kRaiseDescriptors);
  EXPECT_EQ(action(Code::kNoDescriptors), Action::kRaiseDescriptors);
  EXPECT_EQ(action(Code::kNotFound), Action::kReachPeer);
  EXPECT_EQ(action(Code::kInvalid), Action::kCallTheSame);
  EXPECT_EQ(action(Code::kUnsupported), Action::kSameSettings);
}

TEST(EndOfJob, a_launch_that_was_refused_while_paused_is_told) {
  CycleJob job;
  job.Pause();
  job.importer.Then(LaunchRefused{"cuLaunchKernelEx"});
  Verdict verdict = job.Judge(kAlive, kAlive);
  EXPECT_EQ(verdict.kind, VerdictKind::kLaunchRefused) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.remedy.action, Action::kResumeFirst);
  // The error was the end of the program.
  job.importer.Then(SessionClosed{.reason = "exit", .exit_code = 1});
  verdict = job.Judge(kAlive, kEndedWell, 5 * kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kLaunchRefused) << verdict.summary;
}

TEST(EndOfJob, a_job_that_is_kept_paused_from_outside_is_told_so) {
  CycleJob job;
  for (auto* story : {&job.owner, &job.importer}) {
    story->Then(RequestSeen{3, CycleKind::kPause, 77, 12, true});
    story->Then(SafepointReached{3, 12});
  }
  job.Pause();
  for (auto* story : {&job.owner, &job.importer}) story->Then(RequestEnded{3, CycleKind::kPause, Code::kOk, "", 4096});
  const Verdict kept = job.Judge(kAlive, kAlive);
  EXPECT_TRUE(kept.healthy()) << kept.summary;
  ASSERT_EQ(kept.notes.size(), 1U);
  EXPECT_HAS(kept.notes[0], "wait in safe point 12 since");
  EXPECT_HAS(kept.notes[0], "because request 3 from outside paused the job");
  job.Resume();
  for (auto* story : {&job.owner, &job.importer}) {
    story->Then(Frozen{1'000'000, 2'000'000, 4096, ""});
    story->Then(RequestEnded{4, CycleKind::kResume, Code::kOk, ""});
  }
  const Verdict thawed = job.Judge(kAlive, kAlive);
  ASSERT_EQ(thawed.notes.size(), 1U);
  EXPECT_HAS(thawed.notes[0], "have been frozen once (event ");
  EXPECT_HAS(thawed.notes[0], "was frozen by the driver for 1 ms");
  for (auto* story : {&job.owner, &job.importer}) story->Then(SafepointReached{5, 13});
  EXPECT_EQ(job.Judge(kAlive, kAlive).notes.size(), 1U) << "the next request has paused nothing yet";
}

// ---- copies ----------------------------------------------------------------------------------------------------------------

TEST(EndOfJob, a_copy_of_a_healthy_job_is_not_dead) {
  CycleJob job;
  job.Pause();
  const Verdict verdict = job.Judge(kACopy, kACopy);
  EXPECT_TRUE(verdict.healthy()) << verdict.summary;
  EXPECT_HAS(verdict.summary, "copies");
  EXPECT_HAS(verdict.summary, "2 paused");
}

TEST(EndOfJob, a_copy_of_a_job_that_hung_tells_so_as_of_the_copy) {
  CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  const Verdict verdict = job.Judge(kACopy, kACopy);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_HAS(verdict.summary, "when this copy was made");
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  std::vector<SessionStory> journals = job.Read(kACopy, kACopy);
  CountTheDying(journals);
  EXPECT_EQ(journals[1].findings.info.status, kGone) << "somebody saw it die";
}

// ---- the list of causes ----------------------------------------------------------------------------------------------------

TEST(EndOfJob, the_causes_are_listed_with_their_times_and_witnesses) {
  CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  job.clock += 2 * kSecond;
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "waited for rank 1", Code::kTimeout});
  job.clock += kSecond;
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  const Verdict verdict = job.Judge(kAlive, kGone, kSecond);
  ASSERT_GE(verdict.causes.size(), 2u);
  EXPECT_EQ(verdict.causes[0].kind, VerdictKind::kNeverArrived);
  EXPECT_EQ(verdict.causes[0].witness, job.owner.id());
  EXPECT_EQ(verdict.causes.back().kind, VerdictKind::kEnded);
  EXPECT_LT(verdict.causes[0].wall_ns, verdict.causes.back().wall_ns);
}

}  // namespace
}  // namespace amem
