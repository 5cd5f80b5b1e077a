// Jobs that nobody changed, stopped between launches: real processes on the stand-ins, libamem_nccl.so in them, and amem-replay
// that asks them at random moments. Each rank checks all its results itself.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tests/scenarios/job.h"

namespace amem {
namespace {
namespace unmodified {

using job::Job;
using job::Rank;
using nlohmann::json;
using Words = std::vector<std::string>;
using std::chrono::milliseconds;

constexpr int kWorld = 4;

class Unmodified : public ::testing::Test {
 protected:
  void Start(const std::string& kind) {
    job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job_.environment["JOB_STOP"] = job_.directory() / "stop";
    job_.Start(kWorld, {"cuda", "load", "kind=" + kind});
  }
  Rank Tool(const Words& words) {
    Words command = {AMEM_REPLAY};
    command.insert(command.end(), words.begin(), words.end());
    return job::RunProgram(command, {{"AMEM_JOURNAL_DIR", job_.journals()}}, job_.directory());
  }
  std::vector<json> Live() {
    const Rank ran = Tool({"ls", "--live", "--json"});
    const json answer = json::parse(ran.out, nullptr, false);
    return answer.is_object() ? answer["ranks"].get<std::vector<json>>() : std::vector<json>();
  }
  int StepOf(int rank) {
    const std::string out = job_.SoFar(rank).out;
    const auto at = out.rfind("at ");
    return at == std::string::npos ? -1 : std::atoi(out.c_str() + at + 3);
  }
  bool UntilStep(int step) {
    for (int waited = 0; waited < 3000; ++waited) {
      bool all = true;
      for (int rank = 0; rank < kWorld; ++rank) all = all && StepOf(rank) >= step;
      if (all) return true;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return false;
  }
  void AllEndWell() {
    std::ofstream(job_.directory() / "stop").close();
    for (const Rank& rank : job_.Finish(milliseconds(60'000))) {
      EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
      EXPECT_TRUE(rank.Said("kind").starts_with("steps")) << rank.out << rank.err;
    }
  }
  std::string Pid(int rank) { return std::to_string(job_.processes()[static_cast<std::size_t>(rank)]); }

  Job job_;
};

class Kinds : public Unmodified, public ::testing::WithParamInterface<const char*> {};

TEST_P(Kinds, is_paused_and_parked_at_random_moments_and_its_results_are_right) {
  Start(GetParam() + std::string(",3"));
  ASSERT_TRUE(UntilStep(8)) << job_.SoFar(0).out << job_.SoFar(0).err;
  std::mt19937 random(static_cast<unsigned>(::getpid()));
  for (int i = 0; i < 4; ++i) {
    std::this_thread::sleep_for(milliseconds(random() % 60));
    const bool parks = i % 2 == 1;
    const Rank stopped = Tool(parks ? Words{"park", Pid(i % kWorld), "--deadline", "20"}
                                    : Words{"pause", Pid(i % kWorld), "--between-launches", "--deadline", "20"});
    ASSERT_EQ(stopped.status, 0) << stopped.out << stopped.err;
    std::vector<int> before;
    for (int rank = 0; rank < kWorld; ++rank) before.push_back(StepOf(rank));
    for (const json& rank : Live()) {
      EXPECT_EQ(rank["phase"], "paused") << rank;
      EXPECT_EQ(rank["parked"], parks) << rank;
      EXPECT_EQ(rank["safepoints"], 0) << rank;
      if (!parks) {
        EXPECT_GT(rank["freed_bytes"], 1 << 20) << rank;
      }
    }
    for (int rank = 0; rank < kWorld; ++rank)
      EXPECT_EQ(StepOf(rank), before[static_cast<std::size_t>(rank)]) << "rank " << rank << " goes on while it is stopped";
    const Rank resumed = Tool({"resume", Pid(0)});
    ASSERT_EQ(resumed.status, 0) << resumed.out << resumed.err;
    ASSERT_TRUE(UntilStep(StepOf(0) + 8)) << job_.SoFar(0).out << job_.SoFar(0).err;
  }
  AllEndWell();
}

INSTANTIATE_TEST_SUITE_P(Of, Kinds,
                         ::testing::Values("data parallel", "overlapping", "pipeline", "all to all", "sleeper", "barriers",
                                           "makes", "threads"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace(name, ' ', '_');
                           return name;
                         });

TEST_F(Unmodified, a_rank_that_is_away_is_named_at_the_deadline_nothing_has_changed_and_a_later_pause_succeeds) {
  Start("away,1");
  ASSERT_TRUE(UntilStep(32)) << job_.SoFar(0).out << job_.SoFar(0).err;
  std::this_thread::sleep_for(milliseconds(400));  // rank 1 sleeps by now, and the others wait for it in NCCL
  const Rank refused = Tool({"pause", "--between-launches", "--deadline", "1"});
  EXPECT_EQ(refused.status, 3) << refused.out << refused.err;
  EXPECT_NE(refused.err.find("rank 1 has made "), std::string::npos) << refused.err;
  EXPECT_NE(refused.err.find(" launches on communicator 0x"), std::string::npos) << refused.err;
  for (const json& rank : Live()) EXPECT_EQ(rank["phase"], "running") << rank;
  const Rank paused = Tool({"pause", "--between-launches", "--deadline", "20"});
  EXPECT_EQ(paused.status, 0) << paused.err;
  EXPECT_EQ(Tool({"resume"}).status, 0);
  AllEndWell();
}

TEST_F(Unmodified, ranks_whose_programs_do_not_match_are_named_with_what_they_launched) {
  Start("mismatched,1");
  ASSERT_TRUE(UntilStep(8));
  std::this_thread::sleep_for(milliseconds(500));
  const Rank refused = Tool({"park", "--deadline", "1"});
  EXPECT_EQ(refused.status, 3) << refused.out << refused.err;
  EXPECT_NE(refused.err.find("inside ncclAllReduce"), std::string::npos) << refused.err;
  for (const json& rank : Live()) EXPECT_EQ(rank["phase"], "running") << rank;
}

TEST_F(Unmodified, a_rank_that_was_stopped_is_named_and_the_others_run_on_with_it) {
  Start("data parallel,1");
  ASSERT_TRUE(UntilStep(8));
  ::kill(job_.processes()[2], SIGSTOP);
  const Rank refused = Tool({"park", "--deadline", "2"});
  ::kill(job_.processes()[2], SIGCONT);
  EXPECT_NE(refused.status, 0) << refused.out;
  EXPECT_TRUE(refused.err.find("rank 2") != std::string::npos) << refused.err;
  ASSERT_TRUE(UntilStep(StepOf(0) + 16));
  AllEndWell();
}

TEST_F(Unmodified, a_tool_that_dies_lets_all_run_on) {
  Start("sleeper,1");
  ASSERT_TRUE(UntilStep(8));
  for (int i = 0; i < 3; ++i) {
    const Rank killed =
        job::RunProgram({"/usr/bin/timeout", "-s", "KILL", "0.0" + std::to_string(2 + 3 * i), AMEM_REPLAY, "park"},
                        {{"AMEM_JOURNAL_DIR", job_.journals()}}, job_.directory());
    if (killed.status == 0) {
      EXPECT_EQ(Tool({"resume"}).status, 0);
    }
    const Rank later = Tool({"park", "--deadline", "20"});  // as soon as what the dead tool has left has come to its end
    ASSERT_EQ(later.status, 0) << later.err;
    ASSERT_EQ(Tool({"resume"}).status, 0);
    ASSERT_TRUE(UntilStep(StepOf(0) + 8));
  }
  AllEndWell();
}

TEST_F(Unmodified, one_that_pauses_by_itself_stays_paused_when_it_is_let_go_and_resumes_by_itself) {
  job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job_.Start(kWorld, {"cuda", "load", "init", "reduce", "pause", "barrier", "sleep=1500", "resume", "reduce", "barrier"});
  const auto said = [&](const std::string& what) {
    for (int waited = 0; waited < 2000; ++waited) {
      bool all = true;
      for (int rank = 0; rank < kWorld; ++rank) all = all && job_.SoFar(rank).Said(what) != "(not run)";
      if (all) return true;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return false;
  };
  ASSERT_TRUE(said("barrier"));
  const Rank stopped = Tool({"pause", "--between-launches"});
  ASSERT_EQ(stopped.status, 0) << stopped.out << stopped.err;
  for (const json& rank : Live()) EXPECT_TRUE(rank["paused_by_program"]) << rank;
  ASSERT_EQ(Tool({"resume"}).status, 0);
  for (const Rank& rank : job_.Finish(milliseconds(60'000))) {
    EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
    EXPECT_EQ(rank.Said("resume"), "0") << rank.out;
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0));
  }
}

TEST_F(Unmodified, one_that_makes_no_safe_point_is_not_paused_at_one) {
  Start("data parallel,1");
  ASSERT_TRUE(UntilStep(8));
  const std::string live = Tool({"ls", "--live"}).out;
  EXPECT_NE(live.find("it can be stopped between launches"), std::string::npos) << live;
  const Rank refused = Tool({"pause", "--deadline", "1"});
  EXPECT_EQ(refused.status, 3) << refused.out;
  EXPECT_NE(refused.err.find("has made no safe point"), std::string::npos) << refused.err;
  AllEndWell();
}

}  // namespace unmodified
}  // namespace
}  // namespace amem
