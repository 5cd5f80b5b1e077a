// The leader's counting of arrivals and votes, without sockets and with a clock of the test's own.
#include "replay/peers/vote_counter.h"

#include <gtest/gtest.h>

namespace amem {
namespace {

using std::chrono::milliseconds;

class VoteCounterTest : public ::testing::Test {
 protected:
  static PeerIdentity Who(unsigned n) {
    return {SessionId{n}, "a", static_cast<std::int32_t>(100 + n), 0, static_cast<std::int32_t>(n)};
  }
  static std::vector<PeerIdentity> Set(std::initializer_list<unsigned> members) {
    std::vector<PeerIdentity> set;
    for (unsigned n : members) set.push_back(Who(n));
    return set;
  }
  // A member's connection has its number.
  void Arrive(unsigned n, std::initializer_list<unsigned> set, CycleKind kind = CycleKind::kPause) {
    counter_.Arrived(n, Who(n), {kind, 1, Set(set), left_ms_}, now_);
  }
  std::uint32_t left_ms_ = 0;
  void Begin(std::initializer_list<unsigned> set) {
    for (unsigned n : set) Arrive(n, set);
    for (unsigned n : set) {
      const auto* begun = Said<BegunMessage>(n);
      ASSERT_NE(begun, nullptr);
      round_ = begun->round;
    }
    said_.clear();
  }
  void Vote(unsigned n, std::uint32_t index, Status status = {}, PhaseKind phase = PhaseKind::kPauseSave,
            std::uint32_t left_ms = 1000) {
    counter_.Voted(n, {round_, index, phase, left_ms, std::move(status)}, now_);
  }
  // The last thing said to a member, if it is a T.
  template <class T>
  const T* Said(unsigned n) {
    const auto at = said_.find(n);
    return at == said_.end() ? nullptr : std::get_if<T>(&at->second.back());
  }
  const amem::Decision* Decision(unsigned n, std::uint32_t index) {
    const auto* said = Said<DecisionMessage>(n);
    return said != nullptr && said->index == index ? &said->decision : nullptr;
  }

  std::map<std::uint64_t, std::vector<MessageBody>> said_;
  class Listener final : public VoteObserver {
   public:
    void Heard(const MemberHeard& said) override { heard.push_back(said); }
    std::string Late(const PeerIdentity& who, std::chrono::nanoseconds waited) override {
      late.emplace_back(who, waited);
      return who.session == SessionId{3} ? "is stopped" : "";
    }
    std::vector<MemberHeard> heard;
    std::vector<std::pair<PeerIdentity, std::chrono::nanoseconds>> late;
  };

  Listener listener_;
  VoteCounter counter_{[this](std::uint64_t to, MessageBody body) { said_[to].push_back(std::move(body)); }, &listener_};
  VoteCounter::Time now_{std::chrono::seconds(1000)};
  std::uint64_t round_ = 0;
};

TEST_F(VoteCounterTest, begins_when_all_of_everybodys_sets_have_come) {
  Arrive(1, {1, 2});
  Arrive(2, {1, 2, 3});
  EXPECT_TRUE(said_.empty());
  Arrive(3, {2, 3});
  for (unsigned n : {1u, 2u, 3u}) {
    const auto* begun = Said<BegunMessage>(n);
    ASSERT_NE(begun, nullptr);
    EXPECT_EQ(begun->members, Set({1, 2, 3}));
  }
}

TEST_F(VoteCounterTest, a_set_said_again_replaces_the_first) {
  Arrive(1, {1, 2, 3});
  Arrive(2, {1, 2});
  Arrive(1, {1, 2});  // 3 is gone
  ASSERT_NE(Said<BegunMessage>(1), nullptr);
  EXPECT_EQ(Said<BegunMessage>(1)->members, Set({1, 2}));
}

TEST_F(VoteCounterTest, pause_and_resume_at_once_are_refused_to_both) {
  Arrive(1, {1, 2});
  Arrive(2, {1, 2}, CycleKind::kResume);
  for (unsigned n : {1u, 2u}) {
    const auto* failure = Said<FailureMessage>(n);
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->status.code(), Code::kInvalid);
    EXPECT_NE(failure->status.message().find("rank 2"), std::string::npos);
    EXPECT_NE(failure->status.message().find("rank 1"), std::string::npos);
  }
  Begin({1, 2});  // nothing is left of it
}

TEST_F(VoteCounterTest, withdrawing_tells_who_was_missing) {
  Arrive(1, {1, 2, 3});
  Arrive(3, {1, 2, 3});
  counter_.Withdrew(1, now_);
  ASSERT_NE(Said<WithdrawnMessage>(1), nullptr);
  EXPECT_EQ(Said<WithdrawnMessage>(1)->missing, Set({2}));
  Arrive(2, {1, 2, 3});
  EXPECT_EQ(Said<BegunMessage>(2), nullptr);
  Arrive(1, {1, 2, 3});
  EXPECT_NE(Said<BegunMessage>(2), nullptr);
}

// The third and the second share memory without the first, and meet elsewhere.
TEST_F(VoteCounterTest, who_waits_for_nobody_any_more_begins_when_the_one_that_waited_for_others_withdraws_or_closes) {
  for (const bool closes : {false, true}) {
    Arrive(1, {1, 2, 3});
    Arrive(3, {1, 2, 3});
    Arrive(1, {1});
    EXPECT_EQ(Said<BegunMessage>(1), nullptr) << "the third may be told of it first";
    closes ? counter_.Closed(3, "has closed", now_) : counter_.Withdrew(3, now_);
    const auto* begun = Said<BegunMessage>(1);
    ASSERT_NE(begun, nullptr) << closes;
    EXPECT_EQ(begun->members, Set({1}));
    counter_.Closed(1, "has closed", now_);
    said_.clear();
  }
}

TEST_F(VoteCounterTest, those_who_gave_up_together_are_not_missed_by_each_other) {
  Arrive(1, {1, 2, 3});
  Arrive(3, {1, 2, 3});
  counter_.Withdrew(1, now_);
  counter_.Withdrew(3, now_);
  EXPECT_EQ(Said<WithdrawnMessage>(3)->missing, Set({2}));
  Arrive(3, {1, 2, 3});  // a new gathering, where the first is missed again
  counter_.Withdrew(3, now_);
  EXPECT_EQ(Said<WithdrawnMessage>(3)->missing, Set({1, 2}));
}

TEST_F(VoteCounterTest, withdrawing_in_the_moment_of_beginning_is_too_late) {
  Begin({1, 2});
  counter_.Withdrew(1, now_);
  EXPECT_TRUE(said_.empty());
  Vote(2, 1);
  Vote(1, 1);
  EXPECT_NE(Decision(1, 1), nullptr);
}

TEST_F(VoteCounterTest, all_ok_passes) {
  Begin({1, 2, 3});
  Vote(1, 1);
  Vote(3, 1);
  EXPECT_TRUE(said_.empty());
  Vote(2, 1);
  for (unsigned n : {1u, 2u, 3u}) {
    ASSERT_NE(Decision(n, 1), nullptr);
    EXPECT_TRUE(Decision(n, 1)->status.ok());
    EXPECT_EQ(Decision(n, 1)->culprit, SessionId{});
  }
  EXPECT_EQ(counter_.NextDeadline(), std::nullopt);
}

TEST_F(VoteCounterTest, one_failure_is_everybodys_once_all_have_voted_and_voting_goes_on) {
  Begin({1, 2, 3});
  Vote(2, 1, {Code::kOutOfMemory, "no memory", 2});
  Vote(1, 1);
  EXPECT_TRUE(said_.empty());  // the third is still at work
  Vote(3, 1, {Code::kDriver, "later", 1});
  for (unsigned n : {1u, 2u, 3u}) {
    ASSERT_NE(Decision(n, 1), nullptr);
    EXPECT_EQ(Decision(n, 1)->culprit, SessionId{2});
    EXPECT_EQ(Decision(n, 1)->status, FailedVote(Who(2), PhaseKind::kPauseSave, {Code::kOutOfMemory, "no memory", 2}));
    EXPECT_EQ(Decision(n, 1)->status.driver_result(), 2);
  }
  for (unsigned n : {1u, 2u, 3u}) Vote(n, 2);
  for (unsigned n : {1u, 2u, 3u}) EXPECT_TRUE(Decision(n, 2)->status.ok());
}

TEST_F(VoteCounterTest, a_vote_about_the_loss_of_another_blames_that_one_and_says_who_noticed) {
  Begin({1, 2, 3});
  const Status lost = Status{Code::kPeerLost, "import from rank 3: it died"}.ReportedBy(SessionId{3});
  counter_.Voted(2, {round_, 1, PhaseKind::kResumeImport, 1000, lost, lost.reported_by()}, now_);
  Vote(1, 1, {}, PhaseKind::kResumeImport);
  counter_.Closed(3, "died", now_);
  for (unsigned n : {1u, 2u}) {
    ASSERT_NE(Decision(n, 1), nullptr);
    EXPECT_EQ(Decision(n, 1)->culprit, SessionId{3});
    EXPECT_EQ(Decision(n, 1)->status, FailedVote(Who(2), PhaseKind::kResumeImport, lost));
  }
}

TEST_F(VoteCounterTest, whom_an_owner_refused_is_to_blame_itself) {
  Begin({1, 2});
  counter_.Voted(2, {round_, 1, PhaseKind::kResumeImport, 1000, {Code::kRefused, "no such reference"}, SessionId{1}}, now_);
  Vote(1, 1, {}, PhaseKind::kResumeImport);
  EXPECT_EQ(Decision(1, 1)->culprit, SessionId{2});
}

// It has begun nothing that it would have to undo, unless it voted against a later phase.
TEST_F(VoteCounterTest, who_voted_against_an_arrival_and_leaves_is_not_missed_by_those_who_undo) {
  for (const PhaseKind phase : {PhaseKind::kPauseArrive, PhaseKind::kPauseSave}) {
    Begin({1, 2, 3});
    for (const unsigned n : {1U, 2U, 3U}) Vote(n, 1, n == 2 ? Status{Code::kRefused, "busy"} : Status{}, phase);
    counter_.Left(2, round_);
    for (const unsigned n : {1U, 3U}) Vote(n, 2);
    ASSERT_NE(Decision(1, 2), nullptr);
    EXPECT_EQ(Decision(1, 2)->status.code(), phase == PhaseKind::kPauseArrive ? Code::kOk : Code::kPeerLost);
    for (const unsigned n : {1U, 3U}) counter_.Left(n, round_);
  }
}

TEST_F(VoteCounterTest, who_leaves_before_its_vote_is_counted_is_missed) {
  for (const bool refused_before : {false, true}) {
    Begin({1, 2});
    if (refused_before) {
      Vote(1, 1, {}, PhaseKind::kPauseArrive);
      Vote(2, 1, {Code::kRefused, "busy"}, PhaseKind::kPauseArrive);
    }
    Vote(2, refused_before ? 2 : 1, {Code::kRefused, "busy"});
    counter_.Left(2, round_);
    Vote(1, refused_before ? 2 : 1);
    ASSERT_NE(Said<DecisionMessage>(1), nullptr);
    EXPECT_EQ(Said<DecisionMessage>(1)->decision.status.code(), Code::kPeerLost);
    counter_.Left(1, round_);
  }
}

TEST_F(VoteCounterTest, a_death_is_decided_at_once_and_told_once) {
  Begin({1, 2, 3});
  Vote(1, 1);
  counter_.Closed(3, "died", now_);
  ASSERT_NE(Decision(1, 1), nullptr);
  EXPECT_EQ(Decision(1, 1)->status.code(), Code::kPeerLost);
  EXPECT_EQ(Decision(1, 1)->culprit, SessionId{3});
  EXPECT_NE(Decision(1, 1)->status.message().find("rank 3 (pid 103 on host a) died"), std::string::npos)
      << Decision(1, 1)->status.message();
  EXPECT_EQ(said_.count(2), 0u);  // it has not asked yet
  Vote(2, 1);
  EXPECT_EQ(Decision(2, 1)->culprit, SessionId{3});  // the same decision
  Vote(1, 2);
  Vote(2, 2);
  EXPECT_TRUE(Decision(1, 2)->status.ok());  // the survivors undo together
}

TEST_F(VoteCounterTest, a_death_between_votes_fails_the_next) {
  Begin({1, 2});
  counter_.Closed(2, "died", now_);
  EXPECT_TRUE(said_.empty());
  Vote(1, 1);
  ASSERT_NE(Decision(1, 1), nullptr);
  EXPECT_EQ(Decision(1, 1)->status.code(), Code::kPeerLost);
}

TEST_F(VoteCounterTest, a_death_after_voting_counts_too) {
  Begin({1, 2, 3});
  Vote(3, 1);
  counter_.Closed(3, "died", now_);
  EXPECT_EQ(counter_.NextDeadline(), std::nullopt);
  Vote(1, 1);
  ASSERT_NE(Decision(1, 1), nullptr);
  EXPECT_EQ(Decision(1, 1)->culprit, SessionId{3});
}

TEST_F(VoteCounterTest, who_came_first_and_has_the_least_time_left_says_how_long_the_round_may_take) {
  left_ms_ = 5000;
  Arrive(1, {1, 2, 3});
  now_ += milliseconds(3000);
  Arrive(2, {1, 2, 3});
  left_ms_ = 0;  // it does not say
  Arrive(3, {1, 2, 3});
  for (const unsigned n : {1U, 2U, 3U}) {
    ASSERT_NE(Said<BegunMessage>(n), nullptr);
    EXPECT_EQ(Said<BegunMessage>(n)->left_ms, 2000U);
  }
}

TEST_F(VoteCounterTest, the_deadline_names_who_did_not_vote_and_the_late_hear_the_same) {
  Begin({1, 2, 3});
  Vote(1, 1, {}, PhaseKind::kPauseSave, 5000);
  now_ += milliseconds(100);
  Vote(2, 1, {}, PhaseKind::kPauseSave, 1000);  // the most impatient
  ASSERT_TRUE(counter_.NextDeadline());
  EXPECT_EQ(*counter_.NextDeadline(), now_ + milliseconds(1000));
  now_ += milliseconds(999);
  counter_.Tick(now_);
  EXPECT_TRUE(said_.empty());
  now_ += milliseconds(1);
  counter_.Tick(now_);
  for (unsigned n : {1u, 2u}) {
    ASSERT_NE(Decision(n, 1), nullptr);
    EXPECT_EQ(Decision(n, 1)->status.code(), Code::kTimeout);
    EXPECT_EQ(Decision(n, 1)->culprit, SessionId{3});
    EXPECT_NE(Decision(n, 1)->status.message().find("waited 1100 ms for rank 3"), std::string::npos)
        << Decision(n, 1)->status.message();
  }
  Vote(3, 1);
  ASSERT_NE(Decision(3, 1), nullptr);
  EXPECT_EQ(Decision(3, 1)->status.code(), Code::kTimeout);
}

// Its process was stopped, with the thread that counts. When both go on, the vote may be read before the clock.
TEST_F(VoteCounterTest, nothing_passes_after_the_deadline_though_the_last_vote_is_heard_first) {
  Begin({1, 2, 3});
  Vote(2, 1);
  Vote(3, 1);
  now_ += milliseconds(1000);
  Vote(1, 1);
  for (unsigned n : {1u, 2u, 3u}) {
    ASSERT_NE(Decision(n, 1), nullptr);
    EXPECT_EQ(Decision(n, 1)->status.code(), Code::kTimeout);
    EXPECT_EQ(Decision(n, 1)->culprit, SessionId{1});
    EXPECT_FALSE(Decision(n, 1)->against);
  }
}

TEST_F(VoteCounterTest, a_decision_names_all_that_have_not_voted) {
  Begin({1, 2, 3, 4, 5});
  counter_.Closed(5, "died", now_);
  Vote(1, 1);
  Vote(2, 1, {Code::kTimeout, "the copies are late"});
  ASSERT_NE(Decision(1, 1), nullptr) << "a death is told at once";
  EXPECT_EQ(Decision(1, 1)->absent, (std::vector{SessionId{2}, SessionId{3}, SessionId{4}, SessionId{5}}));
  EXPECT_FALSE(Decision(1, 1)->against);
  Vote(1, 2);
  Vote(2, 2, {Code::kTimeout, "the copies are late"});
  now_ += milliseconds(1000);
  counter_.Tick(now_);
  ASSERT_NE(Decision(1, 2), nullptr);
  EXPECT_EQ(Decision(1, 2)->absent, (std::vector{SessionId{3}, SessionId{4}, SessionId{5}}));
  EXPECT_TRUE(Decision(1, 2)->against) << "a member that failed by a deadline has failed";
}

TEST_F(VoteCounterTest, who_was_late_is_not_waited_for_until_it_has_caught_up) {
  Begin({1, 2, 3});
  Vote(1, 1);
  Vote(2, 1);
  now_ += milliseconds(1000);
  counter_.Tick(now_);
  ASSERT_NE(Decision(1, 1), nullptr);
  Vote(1, 2);
  EXPECT_EQ(Decision(1, 2), nullptr);
  Vote(2, 2);  // undoing goes on at once
  ASSERT_NE(Decision(1, 2), nullptr);
  EXPECT_EQ(Decision(1, 2)->status.code(), Code::kTimeout);
  Vote(3, 1);
  Vote(3, 2);
  EXPECT_EQ(Decision(3, 2)->status.code(), Code::kTimeout);
  Vote(3, 3);
  Vote(1, 3);
  EXPECT_EQ(Decision(1, 3), nullptr);
  Vote(2, 3);
  EXPECT_TRUE(Decision(1, 3)->status.ok());
}

TEST_F(VoteCounterTest, a_failure_explains_more_than_the_deadline) {
  Begin({1, 2, 3});
  Vote(1, 1);
  Vote(2, 1, {Code::kDriver, "why", 1});
  now_ += milliseconds(1000);
  counter_.Tick(now_);
  EXPECT_EQ(Decision(1, 1)->status.code(), Code::kDriver);
}

TEST_F(VoteCounterTest, voting_on_different_phases_is_invalid) {
  Begin({1, 2});
  Vote(1, 1, {}, PhaseKind::kPauseSave);
  Vote(2, 1, {}, PhaseKind::kPauseGone);
  EXPECT_EQ(Decision(1, 1)->status.code(), Code::kInvalid);
}

TEST_F(VoteCounterTest, withdrawing_from_a_round_fails_those_who_vote) {
  Begin({1, 2, 3});
  Vote(1, 1);
  counter_.Left(2, round_);
  ASSERT_NE(Decision(1, 1), nullptr);
  EXPECT_EQ(Decision(1, 1)->status.code(), Code::kPeerLost);
  EXPECT_NE(Decision(1, 1)->status.message().find("withdrew"), std::string::npos);
}

TEST_F(VoteCounterTest, a_round_that_all_have_left_is_forgotten) {
  for (int i = 0; i < 5; ++i) {
    Begin({1, 2});
    EXPECT_FALSE(counter_.idle());
    counter_.Left(1, round_);
    counter_.Closed(2, "died", now_);
    EXPECT_TRUE(counter_.idle());
  }
}

TEST_F(VoteCounterTest, votes_in_rounds_that_are_not_are_refused) {
  Vote(1, 1);
  ASSERT_NE(Said<FailureMessage>(1), nullptr);
  Begin({1, 2});
  Vote(1, 7);
  EXPECT_NE(Said<FailureMessage>(1), nullptr);
  Vote(1, 0);
  EXPECT_NE(Said<FailureMessage>(1), nullptr);
}

TEST_F(VoteCounterTest, a_vote_of_a_round_that_has_ended_is_refused_and_does_not_count_in_the_next) {
  Begin({1, 2});
  const std::uint64_t ended = round_;
  counter_.Left(1, ended);
  counter_.Left(2, ended);
  Begin({1, 2});
  ASSERT_NE(round_, ended);
  counter_.Voted(2, {ended, 1, PhaseKind::kPauseSave, 1000, {}}, now_);
  const auto* refused = Said<FailureMessage>(2);
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->status.code(), Code::kInvalid);
  Vote(1, 1);
  EXPECT_EQ(Decision(1, 1), nullptr) << "only one of two has voted";
  Vote(2, 1);
  ASSERT_NE(Decision(1, 1), nullptr);
  EXPECT_TRUE(Decision(1, 1)->status.ok());
}

TEST_F(VoteCounterTest, a_vote_of_a_round_that_has_begun_elsewhere_is_refused) {
  Begin({1, 2});
  const std::uint64_t first = round_;
  Begin({3, 4});
  counter_.Voted(3, {first, 1, PhaseKind::kPauseSave, 1000, {}}, now_);
  ASSERT_NE(Said<FailureMessage>(3), nullptr);
  counter_.Voted(1, {first, 1, PhaseKind::kPauseSave, 1000, {}}, now_);
  EXPECT_EQ(Decision(1, 1), nullptr);
}

TEST_F(VoteCounterTest, a_member_that_closes_while_others_gather_is_waited_for_again) {
  Arrive(1, {1, 2});
  counter_.Closed(1, "died", now_);
  Arrive(2, {1, 2});
  EXPECT_TRUE(said_.empty()) << "the round began without a member";
  Arrive(1, {1, 2});
  EXPECT_NE(Said<BegunMessage>(1), nullptr);
  EXPECT_NE(Said<BegunMessage>(2), nullptr);
}

TEST_F(VoteCounterTest, the_observer_hears_each_arrival_once_and_each_vote_that_counts) {
  Arrive(1, {1, 2, 3});
  Arrive(1, {1, 2});  // another set, not another arrival
  Arrive(2, {1, 2});
  round_ = Said<BegunMessage>(1)->round;
  Vote(1, 1);
  Vote(2, 1, {Code::kDriver, "no"});
  Vote(2, 3);  // ahead of its time
  const std::vector<MemberHeard> expected{{SessionId{1}, CycleKind::kPause, PhaseKind::kPauseArrive, false, true, 1, 101},
                                          {SessionId{2}, CycleKind::kPause, PhaseKind::kPauseArrive, false, true, 2, 102},
                                          {SessionId{1}, CycleKind::kPause, PhaseKind::kPauseSave, true, true, 1, 101},
                                          {SessionId{2}, CycleKind::kPause, PhaseKind::kPauseSave, true, false, 2, 102}};
  EXPECT_EQ(listener_.heard, expected);
  EXPECT_TRUE(listener_.late.empty());
}

TEST_F(VoteCounterTest, what_is_seen_of_late_members_is_in_the_message_of_all) {
  Begin({1, 2, 3});
  Vote(1, 1);
  now_ += milliseconds(1500);
  counter_.Tick(now_);
  ASSERT_NE(Decision(1, 1), nullptr);
  EXPECT_EQ(
      Decision(1, 1)->status.message(),
      "waited 1500 ms for rank 2 (pid 102 on host a), rank 3 (pid 103 on host a) in phase pause: save of the pause: no vote "
      "came: rank 3 (pid 103 on host a) is stopped; look at what it is doing, or raise AMEM_TIMEOUT_MS");
  ASSERT_EQ(listener_.late.size(), 2u);
  EXPECT_EQ(listener_.late[0].first, Who(2));
  EXPECT_EQ(listener_.late[0].second, milliseconds(1500));
}

TEST(WhyLate, says_only_what_explains_it) {
  ProcessSeen seen;
  EXPECT_EQ(WhyLate(seen), "");
  seen.state = "running";
  seen.where = "in Python";
  EXPECT_EQ(WhyLate(seen), "");
  seen.where = "in the CUDA driver (ioctl on /dev/nvidia0)";
  EXPECT_EQ(WhyLate(seen), "is in the CUDA driver (ioctl on /dev/nvidia0)");
  seen.state = "uninterruptible";
  EXPECT_EQ(WhyLate(seen), "cannot be interrupted in the CUDA driver (ioctl on /dev/nvidia0)");
  seen.state = "gone";
  EXPECT_EQ(WhyLate(seen), "has ended");
  seen.state = "stopped";
  EXPECT_EQ(WhyLate(seen), "is stopped (SIGSTOP?); SIGCONT lets it go on");
}

TEST(AnswerOf, is_what_a_member_said_of_itself) {
  EXPECT_EQ(AnswerOf({CycleKind::kPause}, Lifecycle::kRunning), "running, has not called ncclPause");
  EXPECT_EQ(AnswerOf({CycleKind::kResume}, Lifecycle::kPaused), "paused, has not called ncclResume");
  EXPECT_EQ(AnswerOf({CycleKind::kPause}, Lifecycle::kPaused), "paused already");
  EXPECT_EQ(AnswerOf({CycleKind::kResume}, Lifecycle::kResuming), "in the middle of a resume");
  EXPECT_EQ(AnswerOf({CycleKind::kResume}, Lifecycle::kNew), "");
}

}  // namespace
}  // namespace amem
