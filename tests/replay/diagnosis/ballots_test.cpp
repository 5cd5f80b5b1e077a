// Verdicts that come from what a board showed: who came, who voted, and because of whom a ballot failed.
#include <gtest/gtest.h>

#include <chrono>

#include "replay/diagnosis/verdict.h"
#include "tests/replay/diagnosis/scripted_cycles.h"

namespace amem {
namespace {

using agreement::Ballot;
using agreement::Cause;
using test::CycleJob;
using test::JudgeAlone;
using test::kSecond;
using test::Story;
using Action = Remedy::Action;

struct BoardJob : CycleJob {
  std::uint32_t round = 1;

  SeatShown Seat(const Story& story, bool voted, std::uint64_t at_ns = 0) {
    const bool first = story.id() == owner.id();
    return {.session = story.id(),
            .rank = first ? 0 : 1,
            .pid = first ? 1000 : 1001,
            .vote = voted ? agreement::Vote::kYes : agreement::Vote::kNone,
            .voted_ns = voted ? (at_ns != 0 ? at_ns : clock) : 0};
  }
  // `missing` did not vote, as `reader` saw it; the other one did at `voted_ns`.
  BallotShown Missing(const Story& missing, CycleKind kind, Ballot ballot, Cause cause, std::uint64_t voted_ns) {
    const Story& other = missing.id() == owner.id() ? importer : owner;
    return {.kind = kind,
            .cycle = 1,
            .board = 77,
            .round = round,
            .ballot = ballot,
            .cause = cause,
            .by = cause == Cause::kUndecided ? SessionId{} : other.id(),
            .culprits = {missing.id()},
            .members = 2,
            .yes = 1,
            .first_ns = voted_ns,
            .seats = {Seat(missing, false), Seat(other, true, voted_ns)},
            .message = cause == Cause::kUndecided ? "" : "no vote came",
            .code = cause == Cause::kUndecided ? Code::kOk : Code::kTimeout};
  }
  void GiveUpAlone(Story& story, CycleKind kind, const Story& because_of) {
    story.Then(CycleFailed{.kind = kind,
                           .cycle = 1,
                           .message = "no vote came",
                           .code = Code::kTimeout,
                           .culprits = {{.session = because_of.id(), .rank = because_of.id() == owner.id() ? 0 : 1}}});
  }
  // It comes, waits for the other one for that time, and gives up.
  void WaitInVain(Story& story, const Story& for_whom, CycleKind kind, std::uint64_t ns) {
    Arrive(story, kind);
    const std::uint64_t came = clock;
    clock += ns;
    story.Then(Missing(for_whom, kind, Ballot::kCome, Cause::kLate, came));
    GiveUpAlone(story, kind, for_whom);
    ++round;
  }
};

// The commonest failure there is: one rank calls when the others have given up, and waits in vain itself.
TEST(OnBoard, a_rank_that_calls_after_the_others_deadline_is_the_only_one_named) {
  for (const bool rank_0_is_late : {true, false}) {
    BoardJob job;
    Story &late = rank_0_is_late ? job.owner : job.importer, &waits = rank_0_is_late ? job.importer : job.owner;
    job.WaitInVain(waits, late, CycleKind::kPause, 5 * kSecond);
    job.WaitInVain(late, waits, CycleKind::kPause, 5 * kSecond);
    const Verdict verdict = job.Live(kSecond);
    EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{rank_0_is_late ? 0 : 1}) << verdict.summary;
    EXPECT_HAS(verdict.headline, "joined pause 1 too late");
    EXPECT_EQ(verdict.remedy.action, Action::kCallInTime);
    EXPECT_HAS(verdict.summary, "for 5.0 s since");
  }
}

// Both tried once more, and the other one did not come.
TEST(OnBoard, of_several_tries_the_last_counts_for_who_did_not_come) {
  BoardJob job;
  job.WaitInVain(job.owner, job.importer, CycleKind::kPause, kSecond);
  job.WaitInVain(job.importer, job.owner, CycleKind::kPause, kSecond);
  job.WaitInVain(job.owner, job.importer, CycleKind::kPause, 2 * kSecond);
  const Verdict verdict = job.Live(kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
  EXPECT_HAS(verdict.summary, "for 2.0 s since");
}

// Deadlines differ: the one with the shorter gives up first, and neither is it accused, nor is there a silence of nothing.
TEST(OnBoard, who_gave_up_first_is_not_accused_and_no_silence_lasts_0_us) {
  BoardJob job;
  for (Story* story : {&job.owner, &job.importer}) std::get<SessionOpened>(story->events()[0].body).timeout_ms = 700;
  std::get<SessionOpened>(job.importer.events()[0].body).timeout_ms = 3000;
  job.WaitInVain(job.owner, job.importer, CycleKind::kPause, 7 * kSecond / 10);
  job.WaitInVain(job.importer, job.owner, CycleKind::kPause, 3 * kSecond);
  const Verdict verdict = job.Live(kSecond);
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1}) << verdict.summary;
  EXPECT_HAS(verdict.summary, "AMEM_TIMEOUT_MS differs: 700 on rank 0, 3000 on rank 1.");
  EXPECT_FALSE(test::Has(verdict.summary, " 0 us")) << verdict.summary;
}

TEST(OnBoard, one_journal_tells_who_did_not_come_and_who_waited) {
  BoardJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  const std::uint64_t came = job.clock;
  BallotShown shown = job.Missing(job.importer, CycleKind::kPause, Ballot::kCome, Cause::kLate, came);
  shown.members = 3;
  shown.yes = 2;
  shown.seats.push_back({.session = SessionId{0xca7}, .rank = 2, .pid = 1002, .vote = agreement::Vote::kYes, .voted_ns = came});
  job.clock += 5 * kSecond;
  job.owner.Then(shown);
  job.GiveUpAlone(job.owner, CycleKind::kPause, job.importer);
  const Verdict verdict = JudgeAlone(job.owner, SessionStatus::kLive, job.clock);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
  EXPECT_HAS(verdict.summary, "Ranks 0 and 2 waited for 5.0 s");
}

TEST(OnBoard, the_rank_that_did_not_vote_in_time_is_named_with_the_phase_from_one_journal_alone) {
  BoardJob job;
  job.BeginAll(CycleKind::kPause);
  job.PhaseOfAll(PhaseKind::kPauseArrive);
  job.Work(job.owner, PhaseKind::kPauseSave);
  job.owner.Then(VoteCast{PhaseKind::kPauseSave});
  const std::uint64_t voted = job.clock;
  job.clock += 5 * kSecond;
  job.owner.Then(job.Missing(job.importer, CycleKind::kPause, Ballot::kSaved, Cause::kLate, voted));
  job.owner.Then(PhaseDecided{PhaseKind::kPauseSave, false, job.importer.id(), "no vote came", Code::kTimeout});
  job.GiveUpAlone(job.owner, CycleKind::kPause, job.importer);
  const Verdict verdict = JudgeAlone(job.owner, SessionStatus::kLive, job.clock);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
  EXPECT_EQ(verdict.phase, PhaseKind::kPauseSave);
}

// It left as soon as it had failed, and the other one reads its vote after it has noticed that.
TEST(OnBoard, a_rank_that_leaves_after_its_own_failure_failed_and_did_not_just_leave) {
  BoardJob job;
  job.Pause();
  job.BeginAll(CycleKind::kResume);
  job.Work(job.owner, PhaseKind::kResumeArrive);
  const std::uint64_t voted = job.clock;
  job.owner.Then(PeerLost{.peer = job.importer.id(), .reason = "has closed"});
  BallotShown shown = job.Missing(job.importer, CycleKind::kResume, Ballot::kMade, Cause::kVotedNo, voted);
  shown.seats[0].vote = agreement::Vote::kNo;
  shown.seats[0].voted_ns = voted;
  shown.message = "rank 1 failed: out of memory";
  shown.code = Code::kOutOfMemory;
  job.owner.Then(shown);
  job.owner.Then(PhaseDecided{PhaseKind::kResumeCreateOwn, false, job.importer.id(), shown.message, Code::kOutOfMemory});
  job.owner.Then(CycleFailed{.kind = CycleKind::kResume,
                             .cycle = 1,
                             .message = shown.message,
                             .code = Code::kOutOfMemory,
                             .culprits = {{.session = job.importer.id(), .rank = 1}}});
  const Verdict verdict = JudgeAlone(job.owner, SessionStatus::kLive, job.clock);
  EXPECT_EQ(verdict.kind, VerdictKind::kOutOfMemory) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
  EXPECT_EQ(verdict.phase, PhaseKind::kResumeCreateOwn);
  EXPECT_EQ(verdict.remedy.action, Action::kFreeMemory);
}

TEST(OnBoard, for_whom_a_hanging_job_waits_is_read_and_records_of_the_wait_are_no_progress) {
  BoardJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  const std::uint64_t came = job.clock;
  for (const std::uint64_t after : {100, 200, 400, 800}) {
    job.clock = came + after * 1'000'000;
    job.owner.Then(job.Missing(job.importer, CycleKind::kPause, Ballot::kCome, Cause::kUndecided, came));
  }
  for (const bool alone : {true, false}) {
    const Verdict verdict =
        alone ? JudgeAlone(job.owner, SessionStatus::kLive, job.clock + kSecond / 2) : job.Live(kSecond / 2);
    EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
    EXPECT_TRUE(verdict.live);
    EXPECT_HAS(verdict.headline, "did not join pause 1");
  }
}

TEST(OnBoard, a_hanging_job_waits_for_those_with_the_fewest_votes) {
  BoardJob job;
  job.BeginAll(CycleKind::kPause);
  job.PhaseOfAll(PhaseKind::kPauseArrive);
  job.Work(job.owner, PhaseKind::kPauseSave);
  job.Work(job.importer, PhaseKind::kPauseSave);
  job.owner.Then(VoteCast{PhaseKind::kPauseSave});
  const std::uint64_t voted = job.clock;
  job.clock += kSecond / 10;
  job.owner.Then(job.Missing(job.importer, CycleKind::kPause, Ballot::kSaved, Cause::kUndecided, voted));
  const Verdict verdict = job.Live(2 * kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
  const Verdict alone = JudgeAlone(job.owner, SessionStatus::kLive, job.clock + 2 * kSecond);
  EXPECT_EQ(alone.kind, VerdictKind::kStalled) << alone.summary;
  EXPECT_EQ(alone.ranks, std::vector<std::int32_t>{1});
  EXPECT_EQ(alone.phase, PhaseKind::kPauseSave);
}

// The end is in the reading, whether or not a connection was lost.
TEST(OnBoard, an_end_that_the_board_shows_is_an_end) {
  BoardJob job;
  job.BeginAll(CycleKind::kPause);
  job.Work(job.owner, PhaseKind::kPauseArrive);
  BallotShown shown = job.Missing(job.importer, CycleKind::kPause, Ballot::kIdle, Cause::kEnded, job.clock);
  shown.seats[0].end = "died";
  shown.seats[0].end_seen = "lock";
  shown.message = "rank 1 died";
  shown.code = Code::kPeerLost;
  job.owner.Then(shown);
  job.owner.Then(PhaseDecided{PhaseKind::kPauseArrive, false, job.importer.id(), "rank 1 died", Code::kPeerLost});
  job.owner.Then(CycleFailed{.kind = CycleKind::kPause,
                             .cycle = 1,
                             .message = "rank 1 died",
                             .code = Code::kPeerLost,
                             .culprits = {{.session = job.importer.id(), .rank = 1}}});
  const Verdict alone = JudgeAlone(job.owner, SessionStatus::kLive, job.clock);
  EXPECT_EQ(alone.kind, VerdictKind::kDied) << alone.summary;
  EXPECT_EQ(alone.ranks, std::vector<std::int32_t>{1});
  EXPECT_EQ(job.Judge(SessionStatus::kLive, SessionStatus::kCrashed).ranks, std::vector<std::int32_t>{1});
}

BallotShown AllVoted(BoardJob& job, Ballot ballot) {
  BallotShown shown = job.Missing(job.importer, CycleKind::kPause, ballot, Cause::kAllVoted, job.clock);
  shown.culprits.clear();
  shown.seats[0].vote = agreement::Vote::kYes;
  shown.yes = 2;
  shown.message = "";
  shown.code = Code::kOk;
  return shown;
}

// It reads that its set has changed while it waits for the others to come, and is to come again.
void FindSetChanged(BoardJob& job) {
  job.Arrive(job.owner, CycleKind::kPause);
  BallotShown shown = job.Missing(job.importer, CycleKind::kPause, Ballot::kCome, Cause::kSetChanged, job.clock);
  shown.code = Code::kRefused;
  shown.culprits.clear();
  job.owner.Then(shown);
}

TEST(OnBoard, a_set_that_changed_is_no_failure) {
  BoardJob job;
  FindSetChanged(job);
  EXPECT_TRUE(job.Live(kSecond / 2).healthy());
}

TEST(OnBoard, a_call_that_fails_after_its_set_had_changed_has_failed) {
  for (const Code code : {Code::kInvalid, Code::kRefused}) {
    BoardJob job;
    FindSetChanged(job);
    job.owner.Then(CycleFailed{.kind = CycleKind::kPause, .cycle = 1, .message = "not so", .code = code});
    for (const Verdict& verdict : {job.Live(kSecond / 2), JudgeAlone(job.owner, SessionStatus::kLive)}) {
      EXPECT_EQ(verdict.kind, VerdictKind::kRefused) << verdict.summary;
      EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{0});
      EXPECT_HAS(verdict.summary, "Not so");
    }
  }
}

// It could not find the other one again in time.
TEST(OnBoard, who_does_not_come_after_a_set_has_changed_is_named) {
  BoardJob job;
  FindSetChanged(job);
  job.clock += 5 * kSecond;
  job.GiveUpAlone(job.owner, CycleKind::kPause, job.importer);
  for (const Verdict& verdict : {job.Live(kSecond / 2), JudgeAlone(job.owner, SessionStatus::kLive)}) {
    EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
  }
}

TEST(OnBoard, a_call_that_fails_while_it_waits_for_the_others_has_failed) {
  BoardJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  job.clock += kSecond / 10;
  job.owner.Then(job.Missing(job.importer, CycleKind::kPause, Ballot::kCome, Cause::kUndecided, job.clock));
  job.owner.Then(CycleFailed{.kind = CycleKind::kPause, .cycle = 1, .message = "written over", .code = Code::kCorrupt});
  for (const Verdict& verdict : {job.Live(kSecond / 2), JudgeAlone(job.owner, SessionStatus::kLive)}) {
    EXPECT_FALSE(verdict.healthy());
    EXPECT_HAS(verdict.summary, "Written over");
  }
}

TEST(OnBoard, who_is_waited_for_once_a_set_has_changed_is_named) {
  BoardJob job;
  FindSetChanged(job);
  for (const Verdict& verdict : {job.Live(3 * kSecond), JudgeAlone(job.owner, SessionStatus::kLive, job.clock + 3 * kSecond)}) {
    EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
    EXPECT_TRUE(verdict.live);
  }
}

// All have come, as both have read, and one of them has not begun.
TEST(OnBoard, who_has_come_and_does_not_begin_stalls) {
  for (const bool one_begins : {true, false}) {
    BoardJob job;
    for (Story* story : {&job.owner, &job.importer}) job.Arrive(*story, CycleKind::kPause);
    for (Story* story : {&job.owner, &job.importer}) story->Then(AllVoted(job, Ballot::kCome));
    if (one_begins) {
      job.Begin(job.owner, CycleKind::kPause);
      job.Work(job.owner, PhaseKind::kPauseArrive);
      job.owner.Then(VoteCast{PhaseKind::kPauseArrive});
    }
    const Verdict verdict = job.Live(3 * kSecond);
    EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
    if (one_begins) {
      EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
    }
  }
}

// Another set of the job pauses for the same time on a board; this one has recorded nothing of one.
TEST(OnBoard, a_board_of_another_set_tells_nothing_of_this_one) {
  for (const bool torn_down : {false, true}) {
    test::CycleJob waits;
    BoardJob other;
    other.owner = Story(0xcafe, 2, &other.clock);
    other.importer = Story(0xd00d, 3, &other.clock);
    other.Share();
    other.BeginAll(CycleKind::kPause);
    other.owner.Then(AllVoted(other, Ballot::kIdle));
    for (const PhaseKind phase :
         {PhaseKind::kPauseArrive, PhaseKind::kPauseSave, PhaseKind::kPauseReleaseOwn, PhaseKind::kPauseGone})
      other.PhaseOfAll(phase);
    waits.Arrive(waits.owner, CycleKind::kPause);
    if (torn_down) {
      waits.clock += 5 * kSecond;
      waits.Begin(waits.owner, CycleKind::kPause);  // without the other one, once that is ended as all are
    }
    other.clock = waits.clock;
    for (Story* story : {&other.owner, &other.importer}) story->Then(CycleDone{CycleKind::kPause, 1, 1000});
    const SessionStatus status = torn_down ? SessionStatus::kCrashed : SessionStatus::kLive;
    std::vector<SessionStory> journals = waits.Read(status, status, 3 * kSecond);
    for (SessionStory& story : other.Read(status, status, 3 * kSecond)) journals.push_back(std::move(story));
    const Verdict verdict = Diagnose(journals);
    EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
  }
}

// As a journal may have it that nobody wrote in good faith. Each culprit is looked for among all seats.
TEST(OnBoard, a_ballot_with_very_many_seats_is_read_in_a_moment) {
  constexpr std::uint64_t kSeats = 60'000;
  BoardJob job;
  for (int meeting = 0; meeting < 2; ++meeting) {
    job.Arrive(job.owner, CycleKind::kPause);
    BallotShown shown = job.Missing(job.importer, CycleKind::kPause, Ballot::kCome, Cause::kLate, job.clock);
    for (std::uint64_t i = kSeats; i > 0; --i) {
      const bool waits = i > kSeats / 2;
      shown.seats.push_back({.session = SessionId{i}, .vote = waits ? agreement::Vote::kYes : agreement::Vote::kNone});
      if (!waits) shown.culprits.push_back(SessionId{i});
    }
    shown.members = static_cast<std::uint32_t>(shown.seats.size());
    job.clock += 5 * kSecond;
    job.owner.Then(shown);
    job.GiveUpAlone(job.owner, CycleKind::kPause, job.importer);
    ++job.round;
  }
  const auto from = std::chrono::steady_clock::now();
  const Verdict verdict = JudgeAlone(job.owner, SessionStatus::kLive, job.clock);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived);
  EXPECT_LT(std::chrono::steady_clock::now() - from, std::chrono::seconds(10));
}

// Import is what its owner's driver refused.
TEST(OnBoard, the_owner_whose_driver_failed_to_hand_out_memory_is_named) {
  CycleJob job;
  job.Pause();
  job.BeginAll(CycleKind::kResume);
  job.PhaseOfAll(PhaseKind::kResumeArrive);
  job.PhaseOfAll(PhaseKind::kResumeCreateOwn);
  const Step step = job.WorkInto(job.importer, PhaseKind::kResumeImport, StepKind::kImport);
  job.importer.Then(StepFailed{
      .step = step, .code = Code::kDriver, .driver_result = 719, .message = "launch failed", .reported_by = job.owner.id()});
  for (Story* story : {&job.owner, &job.importer})
    job.Decide(*story, PhaseKind::kResumeImport, job.importer.id(), "rank 1 failed: launch failed");
  const Verdict verdict = job.Live(kSecond);
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{0}) << verdict.summary;
  EXPECT_EQ(verdict.kind, VerdictKind::kStepFailed);
  EXPECT_EQ(verdict.remedy.action, Action::kRestartProcess);
}

}  // namespace
}  // namespace amem
