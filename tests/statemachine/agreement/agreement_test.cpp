// What a member is told to do, view by view; that it leads to a right end is the explorer's.
#include "statemachine/agreement/agreement.h"

#include <gtest/gtest.h>

namespace amem::agreement {
namespace {

class StepTest : public ::testing::Test {
 protected:
  void AllVote(Ballot ballot, Vote vote = Vote::kYes) {
    for (Seat& seat : seats_) seat.votes[static_cast<std::size_t>(ballot)] = vote;
  }
  Vote& VoteOf(std::size_t seat, Ballot ballot) { return seats_[seat].votes[static_cast<std::size_t>(ballot)]; }
  Cause& Decision(Ballot ballot) { return decisions_[static_cast<std::size_t>(ballot)]; }
  Action Next(CycleKind kind = CycleKind::kPause) {
    const auto next = Step(ProgramOf(kind), member_, {seats_, 0, decisions_, set_changed_}, now_);
    member_ = next.member;
    return next.action;
  }
  // All have come, member 0 has done its work, and voted.
  void AtSaved() {
    AtSave();
    member_ = Finished(member_, true);
    ASSERT_EQ(Next(), Action(CastVote{Ballot::kSaved, true}));
    VoteOf(0, Ballot::kSaved) = Vote::kYes;
  }
  // All have come and are idle.
  void AtSave() {
    AllVote(Ballot::kCome);
    Decision(Ballot::kCome) = Cause::kAllVoted;
    ASSERT_EQ(Next(), Action(DoWork{Work::kQuiesce}));
    member_ = Finished(member_, true);
    AllVote(Ballot::kIdle);
    Decision(Ballot::kIdle) = Cause::kAllVoted;
    ASSERT_EQ(Next(), Action(DoWork{Work::kSave}));
  }

  std::array<Seat, 3> seats_{};
  std::array<Cause, kBallots> decisions_{};
  bool set_changed_ = false;
  Member member_{.until_ns = 100, .undo_ns = 50};
  std::uint64_t now_ = 10;
};

TEST_F(StepTest, a_member_votes_and_waits_until_its_deadline_for_whom_it_names) {
  EXPECT_EQ(Next(), Action(CastVote{Ballot::kCome, true}));
  VoteOf(0, Ballot::kCome) = Vote::kYes;
  EXPECT_EQ(Next(), Action(Wait{Ballot::kCome, 100}));
  now_ = 100;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kCome, Cause::kLate, 1}));
  EXPECT_EQ(Absent({seats_, 0, decisions_, false}, Ballot::kCome), (std::vector<std::size_t>{1, 2}));
}

TEST_F(StepTest, a_patient_member_has_no_deadline_for_come_and_comes_again_after_that_of_another) {
  member_.patient = true;
  VoteOf(0, Ballot::kCome) = Vote::kYes;
  now_ = 1'000;
  EXPECT_EQ(Next(CycleKind::kResume), Action(Wait{Ballot::kCome, {}}));
  Decision(Ballot::kCome) = Cause::kLate;
  const auto before = member_;
  EXPECT_EQ(std::get<End>(Next(CycleKind::kResume)).again, true);
  for (const Cause cause : {Cause::kEnded, Cause::kVotedNo, Cause::kDamaged}) {
    member_ = before;
    Decision(Ballot::kCome) = cause;
    EXPECT_EQ(std::get<End>(Next(CycleKind::kResume)).again, false) << ToText(cause);
  }
}

TEST_F(StepTest, whoever_has_time_left_comes_again_and_whoever_has_none_does_not) {
  VoteOf(0, Ballot::kCome) = Vote::kYes;
  Decision(Ballot::kCome) = Cause::kLate;
  const auto before = member_;
  EXPECT_EQ(Next(), Action(End{Ending::kRunning, true}));
  member_ = before;
  now_ = 100;
  EXPECT_EQ(Next(), Action(End{Ending::kRunning, false}));
}

TEST_F(StepTest, whoever_has_little_time_left_shares_the_failure_of_the_other) {
  member_.again_ns = 20;
  VoteOf(0, Ballot::kCome) = Vote::kYes;
  Decision(Ballot::kCome) = Cause::kLate;
  now_ = 80;
  EXPECT_EQ(Next(), Action(End{Ending::kRunning, false}));
}

TEST_F(StepTest, a_round_has_its_least_time_however_late_its_last_member_came) {
  member_.round_ns = 40;
  now_ = 90;
  AtSaved();
  EXPECT_EQ(Next(), Action(Wait{Ballot::kSaved, 130}));
}

TEST_F(StepTest, of_the_absent_one_that_never_came_is_to_blame) {
  VoteOf(0, Ballot::kCome) = Vote::kYes;
  seats_[1].gave_up = true;
  now_ = 100;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kCome, Cause::kLate, 2}));
  EXPECT_EQ(Absent({seats_, 0, decisions_, false}, Ballot::kCome), std::vector<std::size_t>{2});
  seats_[2].gave_up = true;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kCome, Cause::kLate, 1}));
  seats_[1].gave_up = false;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kCome, Cause::kLate, 1}));
}

TEST_F(StepTest, a_no_is_the_reason_whatever_else_is_wrong) {
  AtSaved();
  seats_[1].ended = true;
  now_ = 100;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kSaved, Cause::kEnded, 1}));
  VoteOf(2, Ballot::kSaved) = Vote::kDamaged;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kSaved, Cause::kDamaged, 2}));
  VoteOf(2, Ballot::kSaved) = Vote::kNo;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kSaved, Cause::kVotedNo, 2}));
}

TEST_F(StepTest, a_member_that_voted_before_it_ended_counts) {
  AtSaved();
  AllVote(Ballot::kSaved);
  seats_[1].ended = true;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kSaved, Cause::kAllVoted, 0}));
}

// Who has not come yet will find a set, and so a board, without the member that has ended.
TEST_F(StepTest, come_fails_by_the_end_of_a_member_that_had_come) {
  VoteOf(0, Ballot::kCome) = VoteOf(2, Ballot::kCome) = Vote::kYes;
  EXPECT_EQ(Next(), Action(Wait{Ballot::kCome, 100}));
  seats_[2].ended = true;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kCome, Cause::kEnded, 2}));
  member_.patient = true;
  EXPECT_EQ(Next(CycleKind::kResume), Action(Decide{Ballot::kCome, Cause::kEnded, 2}));
}

TEST_F(StepTest, a_failed_ballot_breaks_off_the_work_before_it) {
  AtSave();
  Decision(Ballot::kSaved) = Cause::kLate;
  EXPECT_EQ(Next(), Action(End{Ending::kRunning}));
  EXPECT_EQ(member_.failed, Ballot::kSaved);
}

TEST_F(StepTest, after_a_failure_of_gone_it_undoes_in_time_of_its_own_and_without_the_dead) {
  AtSaved();
  Decision(Ballot::kSaved) = Cause::kAllVoted;
  ASSERT_EQ(Next(), Action(DoWork{Work::kRelease}));
  seats_[2].ended = true;
  Decision(Ballot::kGone) = Cause::kEnded;
  now_ = 100;
  ASSERT_EQ(Next(), Action(DoWork{Work::kMake}));
  EXPECT_EQ(member_.failed, Ballot::kGone);
  EXPECT_EQ(member_.until_ns, 150U);
  member_ = Finished(member_, true);
  ASSERT_EQ(Next(), Action(CastVote{Ballot::kMade, true}));
  VoteOf(0, Ballot::kMade) = Vote::kYes;
  EXPECT_EQ(Next(), Action(Wait{Ballot::kMade, 150}));
  VoteOf(1, Ballot::kMade) = Vote::kYes;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kMade, Cause::kAllVoted, 0}));
  Decision(Ballot::kMade) = Cause::kLate;
  EXPECT_EQ(Next(), Action(DoWork{Work::kRelease}));
  member_ = Finished(member_, true);
  EXPECT_EQ(Next(), Action(End{Ending::kPaused}));
  EXPECT_EQ(member_.failed, Ballot::kGone) << "the first failure is what the caller is told";
}

TEST_F(StepTest, work_that_failed_is_a_no_and_the_rest_of_that_part_is_not_done) {
  AllVote(Ballot::kCome);
  AllVote(Ballot::kMade);
  Decision(Ballot::kCome) = Decision(Ballot::kMade) = Cause::kAllVoted;
  member_.line = 3;  // of the resume: import
  ASSERT_EQ(Next(CycleKind::kResume), Action(DoWork{Work::kImport}));
  member_ = Finished(member_, false);
  EXPECT_EQ(Next(CycleKind::kResume), Action(CastVote{Ballot::kJoined, false}));
}

TEST_F(StepTest, nobody_saves_before_all_devices_are_idle) {
  AllVote(Ballot::kCome);
  Decision(Ballot::kCome) = Cause::kAllVoted;
  ASSERT_EQ(Next(), Action(DoWork{Work::kQuiesce}));
  member_ = Finished(member_, true);
  EXPECT_EQ(Next(), Action(CastVote{Ballot::kIdle, true}));
  VoteOf(0, Ballot::kIdle) = Vote::kYes;
  EXPECT_EQ(Next(), Action(Wait{Ballot::kIdle, 100}));
  VoteOf(1, Ballot::kIdle) = Vote::kNo;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kIdle, Cause::kVotedNo, 1}));
  Decision(Ballot::kIdle) = Cause::kVotedNo;
  EXPECT_EQ(Next(), Action(End{Ending::kRunning}));
}

TEST_F(StepTest, a_last_release_that_fails_ends_paused_all_the_same) {
  member_.line = 8;  // of the resume: the release
  member_.failed = Ballot::kOpen;
  ASSERT_EQ(Next(CycleKind::kResume), Action(DoWork{Work::kRelease}));
  member_ = Finished(member_, false);
  EXPECT_EQ(Next(CycleKind::kResume), Action(End{Ending::kPaused}));
}

TEST_F(StepTest, a_ballot_that_passed_without_this_member_is_damage) {
  AtSave();
  Decision(Ballot::kSaved) = Cause::kAllVoted;
  EXPECT_EQ(Next(), Action(End{Ending::kRunning})) << "it has saved nothing, so it must not release";
}

TEST_F(StepTest, a_change_of_the_set_fails_come_and_nothing_else) {
  set_changed_ = true;
  EXPECT_EQ(Next(), Action(Decide{Ballot::kCome, Cause::kSetChanged, 0}));
  AtSaved();
  EXPECT_EQ(Next(), Action(Wait{Ballot::kSaved, 100}));
}

}  // namespace
}  // namespace amem::agreement
