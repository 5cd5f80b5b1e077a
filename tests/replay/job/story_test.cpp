// The story of a session: what its pauses and resumes were, as its journal tells.
#include "replay/job/story/story.h"

#include <gtest/gtest.h>

#include <functional>

#include "replay/job/story/job_cycles.h"
#include "tests/replay/job/memory_reader.h"
#include "tests/replay/job/scripted_pool.h"

namespace amem {
namespace {

class StoryOfSession : public ::testing::Test {
 protected:
  SessionStory Told() {
    test::MemoryReader reader(script_.events(), script_.id(), SessionStatus::kClosed);
    Result<SessionStory> story = ReadStory(reader);
    EXPECT_TRUE(story.ok()) << story.status().message();
    return *std::move(story);
  }
  void FailToBegin() {
    script_.Then(PhaseBegun{PhaseKind::kPauseArrive});
    script_.Then(CycleFailed{CycleKind::kPause, 1, true, "no"});
  }
  void Begin() {
    script_.Then(PhaseBegun{PhaseKind::kPauseArrive});
    script_.Then(CycleBegun{CycleKind::kPause, 1, {script_.id()}});
    script_.Then(PhaseBegun{PhaseKind::kPauseArrive});
  }

  std::uint64_t clock_ = 1;
  test::Story script_{0x5, 7, &clock_};
};

// The first and the last attempts are kept, and all are counted.
TEST_F(StoryOfSession, of_thousands_of_pauses_is_bounded) {
  constexpr std::uint64_t kTimes = 2'000;
  for (std::uint64_t i = 0; i < kTimes; ++i) {
    if (i != kTimes / 4) FailToBegin();
    if (i != kTimes / 4) continue;
    script_.Then(CycleBegun{CycleKind::kPause, 1, {script_.id(), SessionId{9}}});
    script_.Then(CycleFailed{CycleKind::kPause, 1, true, "no"});
  }
  const SessionStory story = Told();
  EXPECT_EQ(story.forgotten.members, (std::set<SessionId>{script_.id(), SessionId{9}}));
  EXPECT_EQ(story.attempts.size(), kAttemptsKept);
  EXPECT_EQ(story.attempts.front().arrived.seq, SequenceNumber{2});
  EXPECT_EQ(story.attempts.back().ended.seq, script_.events().back().seq);
  EXPECT_EQ(story.forgotten.failures + story.attempts.size(), kTimes);
  EXPECT_EQ(story.AllAttempts().failures, kTimes);
}

TEST_F(StoryOfSession, an_attempt_goes_from_the_arrival_to_the_end) {
  Begin();
  const SequenceNumber voted = script_.Then(VoteCast{.phase = PhaseKind::kPauseArrive});
  script_.Then(PhaseDecided{PhaseKind::kPauseArrive, true});
  const SessionStory story = Told();
  ASSERT_EQ(story.attempts.size(), 1U);
  const Attempt& attempt = story.attempts[0];
  EXPECT_TRUE(attempt.open());
  EXPECT_EQ(attempt.came().seq, attempt.arrived.seq);
  EXPECT_EQ(attempt.last.seq, script_.events().back().seq);
  ASSERT_EQ(attempt.phases.size(), 1U);
  EXPECT_EQ(attempt.phases[0].worked.seq, voted);
  const auto phases = PhasesWithArrival(attempt);
  ASSERT_EQ(phases.size(), 2U);
  EXPECT_EQ(phases[0].begun.seq, attempt.arrived.seq);
  EXPECT_EQ(phases[0].decided.seq, attempt.begun.seq);
  EXPECT_EQ(NameOf(attempt), "pause 1");
}

TEST_F(StoryOfSession, who_was_heard_is_met_if_its_rank_or_pid_is_known) {
  for (const auto& [member, rank, pid] : {std::tuple(1U, 0, 0), {2U, -1, 0}, {3U, -1, 4711}, {4U, 3, 0}})
    script_.Then(MemberHeard{.member = SessionId{member}, .rank = rank, .pid = pid});
  std::vector<std::uint64_t> met;
  for (const auto& [member, known] : Told().met) met.push_back(member.value);
  EXPECT_EQ(met, (std::vector<std::uint64_t>{1, 3, 4}));
}

TEST(EventTimes, tells_when_an_event_was_and_of_old_ones_about_when) {
  EventTimes times;
  constexpr std::uint64_t kFirst = 10, kLast = 200'000;
  for (std::uint64_t seq = kFirst; seq <= kLast; ++seq) times.Add(SequenceNumber{seq}, 1000 * seq, 0);
  EXPECT_EQ(times.TimeOf(SequenceNumber{kFirst - 1}), std::nullopt);
  EXPECT_EQ(times.TimeOf(SequenceNumber{kLast}), 1000 * kLast);
  EXPECT_EQ(times.TimeOf(SequenceNumber{kLast - 30'000}), 1000 * (kLast - 30'000));
  const std::optional<std::uint64_t> old = times.TimeOf(SequenceNumber{50'001});
  ASSERT_TRUE(old);
  EXPECT_LE(*old, 1000 * 50'001U);
  EXPECT_GT(*old, 1000 * 49'900U);
}

// Who is behind does not count, and neither does what is not recorded.
TEST_F(StoryOfSession, last_contents_are_those_of_the_furthest) {
  const auto told = [&](std::uint64_t session, std::vector<Bytes> changed) {
    test::Story script(session, static_cast<std::int32_t>(session), &clock_);
    test::ScriptedPool weights(script, "weights");
    weights.Chunk();
    for (const Bytes bytes : changed) {
      weights.NextSave(bytes, 7, 1);
      weights.Run(CycleKind::kPause);
      weights.NextSave(0, 0, 0);
      weights.Run(CycleKind::kResume);
    }
    script.Then(CycleBegun{CycleKind::kPause, 1, {script.id()}});
    script.Then(CycleDone{.kind = CycleKind::kPause, .cycle = 1});
    test::MemoryReader reader(script.events(), script.id(), SessionStatus::kClosed);
    return *ReadStory(reader);
  };
  const std::vector<SessionStory> stories = {told(1, {100, 2}), told(2, {50}), told(3, {80, 3})};
  EXPECT_EQ(stories[0].pools.begin()->second.at(0).contents, (SavedContents{100, 7, 1}));
  EXPECT_FALSE(stories[0].attempts.back().contents);
  EXPECT_EQ(LastContents(stories), (std::vector<PauseContents>{{"weights", 2, 2, {5, 14, 2}}}));
  EXPECT_EQ(ToText(SavedContents{test::kMiB, 3 * test::kMiB / 2, 5}), "1 MiB copied, 1.5 MiB unchanged, 5 B zero");
}

TEST_F(StoryOfSession, a_decision_on_a_phase_that_it_did_not_take_stands_apart) {
  Begin();
  script_.Then(VoteCast{.phase = PhaseKind::kPauseArrive});
  script_.Then(PhaseDecided{PhaseKind::kPauseArrive, false, SessionId{9}, "no vote came"});
  const SequenceNumber late = script_.Then(VoteCast{.phase = PhaseKind::kPauseArrive});
  script_.Then(PhaseDecided{PhaseKind::kPauseArrive, true});
  const SessionStory story = Told();
  const Attempt& attempt = story.attempts.at(0);
  ASSERT_EQ(attempt.phases.size(), 1U);
  EXPECT_FALSE(attempt.phases[0].passed) << "the first decision counts";
  EXPECT_LT(attempt.phases[0].worked.seq, late) << "a vote behind the decision is no work of that phase";
  ASSERT_EQ(attempt.skipped.size(), 1U);
  EXPECT_TRUE(attempt.skipped[0].passed);
  EXPECT_EQ(attempt.decided->message, "no vote came");
}

TEST_F(StoryOfSession, votes_on_a_tag_are_none_on_the_pause_of_nccl_that_is_under_way) {
  test::ScriptedPool weights(script_, "weights");
  Begin();
  script_.Then(VoteCast{.phase = PhaseKind::kPauseArrive, .ok = false, .message = "no", .pool = weights.id()});
  script_.Then(PhaseDecided{.phase = PhaseKind::kPauseArrive, .passed = false, .message = "no", .pool = weights.id()});
  const SessionStory story = Told();
  const Attempt& attempt = story.attempts.at(0);
  EXPECT_FALSE(attempt.failed_vote);
  EXPECT_FALSE(attempt.decided);
  EXPECT_FALSE(attempt.phases.at(0).voted);
}

TEST(JobCycles, who_never_began_is_put_to_those_of_its_host_only) {
  const auto session = [](std::uint64_t id, const char* host) { return SessionOpened{.session = SessionId{id}, .host = host}; };
  const SessionOpened here = session(1, "here"), beside = session(2, "here"), away = session(3, "away");
  Attempt begun{.begun = {SequenceNumber{2}, 20}, .last = {SequenceNumber{9}, 90}, .members = {here.session, beside.session}};
  Attempt waiting{.arrived = {SequenceNumber{1}, 10}, .last = {SequenceNumber{2}, 80}};
  const std::vector<TimedStory> stories = {
      {&here, 0, 1, 90, {&begun, 1}}, {&beside, 0, 1, 90, {&waiting, 1}}, {&away, 0, 1, 90, {&waiting, 1}}};
  const std::vector<JobCycle> cycles = JoinAttempts(stories);
  ASSERT_EQ(cycles.size(), 2U);
  std::size_t alone = 0;
  for (const JobCycle& cycle : cycles) alone += cycle.parts == std::vector<std::pair<std::size_t, std::size_t>>{{2, 0}} ? 1 : 0;
  EXPECT_EQ(alone, 1U);
}

// One that tries again while another still waits in its first try.
TEST(JobCycles, a_session_is_in_each_of_them_once) {
  const SessionOpened waits{.session = SessionId{1}, .host = "here"}, tries{.session = SessionId{2}, .host = "here"};
  const Attempt long_one{.arrived = {SequenceNumber{1}, 10}, .last = {SequenceNumber{2}, 90}};
  const std::vector<Attempt> twice{{.arrived = {SequenceNumber{1}, 20}, .last = {SequenceNumber{2}, 30}},
                                   {.arrived = {SequenceNumber{3}, 40}, .last = {SequenceNumber{4}, 50}}};
  const std::vector<TimedStory> stories = {{&waits, 0, 1, 90, {&long_one, 1}}, {&tries, 0, 1, 90, twice}};
  const std::vector<JobCycle> cycles = JoinAttempts(stories);
  ASSERT_EQ(cycles.size(), 2U);
  EXPECT_EQ(cycles[0].parts, (std::vector<std::pair<std::size_t, std::size_t>>{{0, 0}, {1, 0}}));
  EXPECT_EQ(cycles[1].parts, (std::vector<std::pair<std::size_t, std::size_t>>{{1, 1}}));
}

}  // namespace
}  // namespace amem
