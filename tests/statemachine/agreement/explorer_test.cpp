// Every interleaving of a pause and of the resumes that follow, on the Step that ships; and each rule that is broken on purpose
// is found. Without a sanitizer this file is compiled with optimisation.
#include "tests/statemachine/agreement/explorer.h"

#include <gtest/gtest.h>

namespace amem::agreement::testing {
namespace {

#if defined(AMEM_SANITIZED)
constexpr bool kAll = false;  // a few ten thousand states
#else
constexpr bool kAll = true;
#endif

// At least so many states, so that nobody makes the world smaller without noticing.
template <int N>
typename Explorer<N>::Found Explore(const Settings& settings, std::size_t states_least) {
  auto found = Explorer<N>(settings).Run();
  EXPECT_EQ(found.wrong, "") << found.Text();
  EXPECT_GE(found.states, states_least);
  ::testing::Test::RecordProperty("states", static_cast<int>(found.states));
  return found;
}

const std::set<std::string> kEnds2{"dead paused", "dead running", "paused paused", "running running"};
const std::set<std::string> kEnds3{"dead paused paused", "dead running running", "paused paused paused",
                                   "running running running"};

TEST(Explorer, two_members_with_a_stop_a_kill_and_a_failure_all_run_or_all_are_paused) {
  EXPECT_EQ(Explore<2>({.stops = 1, .kills = 1, .failures = 1}, 9'000).endings, kEnds2);
}

TEST(Explorer, two_members_that_act_on_what_was_true_before) {
  if (kAll) {
    EXPECT_EQ(Explore<2>({.stops = 1, .kills = 1, .failures = 1, .stale = true}, 70'000).endings, kEnds2);
  } else {
    Explore<2>({.stops = 1, .stale = true}, 5'000);
  }
}

TEST(Explorer, two_members_through_two_rounds_on_one_board) {
  Explore<2>({.stops = 1, .calls = 2}, 10'000);
  if (kAll) Explore<2>({.stops = 1, .kills = 1, .failures = 1, .calls = 2}, 150'000);
}

TEST(Explorer, two_members_through_two_rounds_whose_set_changes) {
  if (kAll) {
    Explore<2>({.stops = 1, .set_changes = 1, .calls = 2, .stale = true}, 650'000);
  } else {
    Explore<2>({.set_changes = 1, .calls = 2}, 4'000);
  }
}

TEST(Explorer, three_members_with_a_stop_a_kill_and_a_failure_all_run_or_all_are_paused) {
  if (kAll) {
    EXPECT_EQ(Explore<3>({.stops = 1, .kills = 1, .failures = 1}, 300'000).endings, kEnds3);
  } else {
    Explore<3>({.failures = 1}, 10'000);
  }
}

TEST(Explorer, three_members_of_whom_one_is_killed_and_which_act_on_what_was_true_before) {
  if (kAll) Explore<3>({.kills = 1, .stale = true}, 200'000);
}

#if defined(AMEM_BY_NIGHT) && !defined(AMEM_SANITIZED)  // some ten million states

TEST(Explorer, three_members_of_whom_one_fails_and_which_act_on_what_was_true_before) {
  Explore<3>({.failures = 1, .stale = true}, 1'000'000);
}

TEST(Explorer, three_members_of_whom_one_is_stopped_and_which_act_on_what_was_true_before) {
  Explore<3>({.stops = 1, .stale = true}, 800'000);
}

TEST(Explorer, four_members_with_a_stop_and_a_kill) { Explore<4>({.stops = 1, .kills = 1}, 1'500'000); }

TEST(Explorer, two_of_each_fault) {
  Explore<2>({.stops = 2, .kills = 1, .failures = 2, .set_changes = 1, .calls = 2}, 2'000'000);
  Explore<3>({.stops = 2, .kills = 2, .failures = 2}, 1'500'000);
}

TEST(Explorer, three_members_with_all_faults_that_act_on_what_was_true_before) {
  Explore<3>({.stops = 1, .kills = 1, .failures = 1, .stale = true}, 4'000'000);
}

#endif

// Nobody needs a deadline: whatever is stopped goes on in the end.
TEST(Explorer, without_deadlines_nobody_waits_for_ever) {
  Explore<2>({.stops = 1, .kills = 1, .failures = 1, .set_changes = 1, .lates = false}, 1'000);
  Explore<2>({.stops = 1, .failures = 1, .calls = 2, .lates = false}, 1'000);
  Explore<3>({.kills = 1, .failures = 1, .lates = false}, 1'000);
}

TEST(Explorer, what_was_written_over_a_vote_fails_the_round_and_harms_nobody) {
  Explore<2>({.stops = 1, .failures = 1, .scribbles = 1}, 1'000);
}

// Of decisions that are written over no agreement can be made any more; but nobody loses contents, or waits for ever.
TEST(Explorer, what_was_written_over_a_decision_loses_nothing) {
  Explore<2>({.stops = 1, .failures = 1, .wipes = 1}, 10'000);
  if (kAll) Explore<2>({.wipes = 3}, 1'000);
}

TEST(Explorer, without_a_fault_and_in_time_a_pause_pauses_all) {
  const std::set<std::string> paused{"paused paused paused"};
  EXPECT_EQ(Explore<3>({.lates = false}, 30).endings, paused);
}

// From each way in which all can be paused, half-undone ones included.
template <int N>
void AllResume(const Settings& before) {
  const auto pauses = Explorer<N>(before).Run();
  ASSERT_EQ(pauses.wrong, "");
  ASSERT_GT(pauses.all_paused.size(), 1U);
  const std::set<std::string> running =
      N == 2 ? std::set<std::string>{"running running"} : std::set<std::string>{"running running running"};
  for (const State<N>& paused : pauses.all_paused) {
    State<N> now = paused;
    now.stops = now.kills = now.failures = 0;
    for (auto& member : now.members) member.calls = 1;
    const auto found = Explorer<N>({.lates = false}).Run(now);
    ASSERT_EQ(found.wrong, "") << found.Text();
    ASSERT_EQ(found.endings, running);
  }
}

TEST(Explorer, after_every_pause_a_resume_without_a_fault_brings_all_back) {
  AllResume<2>({.stops = 1, .failures = 1});
  if (kAll) AllResume<3>({.stops = 1, .failures = 1});
}

// ---- rules that are broken on purpose

struct Broken {
  Breach breach;
  Settings settings;
  std::string found;  // a part of what is wrong then
};

TEST(Breaches, each_is_found) {
  const std::string not_there = "is not there", old = "runs with old memory", no_copy = "without a copy of its contents",
                    not_idle = "saves while the device of";
  const std::string without_its = "runs without its memory", refused = "is refused an import although nothing has failed";
  const std::vector<Broken> all{
      {Breach::kSaveBeforeIdle, {.stops = 1}, not_idle},
      {Breach::kReleaseBeforeSaved, {.failures = 1}, "runs without what it imported"},
      {Breach::kVoteBeforeRestore, {.failures = 1}, not_there},
      {Breach::kVoteBeforeMake, {.failures = 1}, refused},
      {Breach::kBindBeforeJoined, {.failures = 1}, "binds memory before all have added their devices"},
      {Breach::kNoUndo, {.kills = 1, .lates = false}, without_its},
      {Breach::kRunsAfterFailedUndo, {.stops = 1}, without_its},
      {Breach::kDecisionChanges, {.stops = 1, .stale = true}, not_idle},
      {Breach::kOwnDecision, {.stops = 1}, not_idle},
      {Breach::kDeathNotCounted, {.kills = 1, .lates = false}, "waits for ever"},
      {Breach::kStoppedTakenForDead, {.stops = 1}, refused},
      {Breach::kAbsentTakenForYes, {.stops = 1}, not_idle},
      {Breach::kFailureTakenForYes, {.failures = 1}, not_idle},
      {Breach::kVotesOfLastRound, {.stops = 1, .calls = 2}, not_idle},
      {Breach::kLaterRoundNotSeen, {.set_changes = 2, .lates = false}, "waits for ever"},
      {Breach::kUndoTrustsImports, {.failures = 1}, old},
      {Breach::kCopyDroppedTooEarly, {.failures = 1}, no_copy},
      {Breach::kDamageTakenForYes, {.failures = 1, .scribbles = 1}, not_idle},
  };
  for (const Broken& broken : all) {
    Settings settings = broken.settings;
    EXPECT_EQ(Explorer<2>(settings).Run().wrong, "") << "the rule itself is right";
    settings.breach = broken.breach;
    const auto found = Explorer<2>(settings).Run();
    EXPECT_NE(found.wrong.find(broken.found), std::string::npos)
        << "breach " << static_cast<int>(broken.breach) << ": " << found.Text();
    EXPECT_FALSE(found.path.empty());
  }
}

}  // namespace
}  // namespace amem::agreement::testing
