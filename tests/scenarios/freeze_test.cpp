// Jobs that are frozen and thawed from outside by the tool: real processes, the stand-ins for libcuda, NCCL and NVML.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <sstream>
#include <thread>

#include "journal/base/process_sight.h"
#include "replay/driver/driver.h"
#include "replay/driver/simulator/world.h"
#include "tests/scenarios/job.h"
#include "tests/stand_ins/checkpoint/world_checkpoint.h"

namespace amem {
namespace {

using job::Job;
using job::Rank;
using namespace std::chrono_literals;

constexpr Bytes kCapacity = Bytes{16384} << 20;
constexpr Bytes kPlain = Bytes{32} << 20;  // what a rank has that the driver must take
using ProcessState = checkpoint::ProcessState;

// A job that trains until it is told to stop, with a tool beside it.
class Frozen : public testing::Test {
 protected:
  void Start(int ranks, const std::vector<std::string>& more = {}, const std::vector<std::string>& after = {}) {
    ranks_ = ranks;
    job.environment.emplace("JOB_ONE_SHOT", AMEM_ONE_SHOT);
    job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job.environment["JOB_STOP"] = job.directory() / "stop";
    job.environment["JOB_STEPS"] = job.directory() / "steps";
    job.environment["JOB_HALT"] = job.directory() / "halt";
    std::vector<std::string> commands = {"cuda", "load", "init", "own", "reduce"};
    commands.insert(commands.end(), more.begin(), more.end());
    commands.push_back("train");
    commands.insert(commands.end(), after.begin(), after.end());
    commands.insert(commands.end(), {"barrier", "destroy"});
    job.Start(ranks, commands);
    for (int rank = 0; rank < ranks; ++rank) AwaitSteps(rank, 3);
    auto opened = SimulatorWorld::Open(job.directory() / "world", 4, kCapacity);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    world = *opened;
  }
  [[nodiscard]] long Steps(int rank) const {
    long steps = 0;
    std::ifstream(job.directory() / ("steps" + std::to_string(rank))) >> steps;
    return steps;
  }
  void AwaitSteps(int rank, long steps) const {
    for (int waited = 0; Steps(rank) < steps && waited < 30'000; waited += 5) std::this_thread::sleep_for(5ms);
    ASSERT_GE(Steps(rank), steps) << job.SoFar(rank).out << job.SoFar(rank).err;
  }
  // All ranks go on for some steps.
  void ExpectTraining() const {
    for (int rank = 0; rank < ranks_; ++rank) AwaitSteps(rank, Steps(rank) + 3);
  }
  void ExpectGoodEnd() {
    std::ofstream(job.directory() / "stop").close();
    for (const Rank& rank : job.Finish(60s)) {
      EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
      EXPECT_EQ(rank.Said("train"), rank.Said("reduce")) << rank.err;
    }
  }
  [[nodiscard]] Rank Tool(std::vector<std::string> command, const job::Environment& more = {}) const {
    command.insert(command.begin(), AMEM_REPLAY);
    job::Environment environment = {{"AMEM_JOURNAL_DIR", job.journals()},
                                    {"AMEM_SIM_WORLD", job.directory() / "world"},
                                    {"LD_LIBRARY_PATH", std::string(AMEM_STAND_INS) + ":" + AMEM_STAND_IN_NVML_FOLDER}};
    for (const auto& [name, value] : more) environment[name] = value;
    return job::RunProgram(command, environment, job.directory());
  }
  [[nodiscard]] std::string First() const { return std::to_string(job.processes().front()); }
  // "" if the command did what it was to do.
  [[nodiscard]] std::string Fails(const std::vector<std::string>& command, const job::Environment& more = {}) const {
    const Rank done = Tool(command, more);
    return done.status == 0 ? "" : done.out + done.err;
  }
  void ExpectOffTheGpus() const {
    for (int rank = 0; rank < ranks_; ++rank) EXPECT_EQ(world->InUse(rank), 0U) << "device " << rank;
  }
  void FreezeAndThaw(int times) {
    for (int cycle = 0; cycle < times; ++cycle) {
      EXPECT_EQ(Fails({"freeze", First()}), "");
      ExpectOffTheGpus();
      EXPECT_EQ(Fails({"thaw", First()}), "");
      ExpectTraining();
    }
  }
  [[nodiscard]] bool AllAre(ProcessState state) const {
    for (const pid_t pid : job.processes()) {
      if (checkpoint::StateOf(*world, pid) != state) return false;
    }
    return true;
  }

  Job job;
  std::shared_ptr<SimulatorWorld> world;
  int ranks_ = 0;
};

TEST_F(Frozen, job_of_four_leaves_its_gpus_and_comes_back) {
  Start(4);
  for (int cycle = 0; cycle < 3; ++cycle) {
    EXPECT_EQ(Fails({"freeze", First()}), "");
    ExpectOffTheGpus();
    EXPECT_TRUE(AllAre(ProcessState::kCheckpointed));
    const auto other = world->Attach();  // another process uses a whole GPU meanwhile
    ASSERT_TRUE(other.ok());
    EXPECT_TRUE(world->Add(*other, 1, kCapacity).has_value());
    const std::string full = Fails({"thaw", First()});
    EXPECT_NE(full.find("nothing was touched, the job stays frozen"), std::string::npos) << full;
    EXPECT_TRUE(AllAre(ProcessState::kCheckpointed));
    world->Detach(*other);
    EXPECT_EQ(Fails({"thaw", First()}), "");
    ExpectTraining();
  }
  ExpectGoodEnd();
}

TEST_F(Frozen, a_reader_finds_the_count_of_steps_at_any_time) {  // all that follows waits for this count
  Start(1);
  long last = Steps(0);
  for (int look = 0; look < 3000; ++look) {
    const long now = Steps(0);
    ASSERT_GE(now, last) << "at look " << look;
    last = now;
  }
  ExpectGoodEnd();
}

TEST_F(Frozen, a_resume_of_a_frozen_job_says_that_it_must_be_thawed) {
  Start(2);
  const Rank frozen = Tool({"freeze", First()});
  ASSERT_EQ(frozen.status, 0) << frozen.out << frozen.err;
  EXPECT_NE(frozen.err.find("the driver takes the rest"), std::string::npos) << frozen.err;
  const Rank refused = Tool({"resume", First(), "--deadline", "30"});
  EXPECT_EQ(refused.status, 2) << refused.out << refused.err;
  EXPECT_NE(refused.err.find("the job is frozen"), std::string::npos) << refused.err;
  EXPECT_NE(refused.err.find("amem thaw brings it back"), std::string::npos) << refused.err;
  EXPECT_TRUE(AllAre(ProcessState::kCheckpointed));
  EXPECT_NE(Tool({"ls", "--live", First()}).out.find("the job was frozen at"), std::string::npos);
  const std::string live = Tool({"ls", "--live", "--json", First()}).out;
  EXPECT_NE(live.find("\"freeze\": \"frozen\""), std::string::npos) << live;
  EXPECT_EQ(Fails({"thaw", First()}), "");
  EXPECT_EQ(Tool({"ls", "--live", First()}).out.find("frozen"), std::string::npos);
  EXPECT_EQ(Fails({"resume", First()}), "") << "nothing is paused";
  ExpectTraining();
  ExpectGoodEnd();
}

TEST_F(Frozen, json_follows_its_schema_and_tells_times_and_bytes) {
  Start(2);
  for (const char* command : {"freeze", "thaw"}) {
    const Rank done = Tool({command, First(), "--json"});
    EXPECT_EQ(done.status, 0) << done.out << done.err;
    EXPECT_EQ(done.err, "") << "a program gets one object";
    std::ofstream(job.directory() / "answer.json") << done.out;
    const Rank valid = job::RunProgram(
        {"/bin/sh", "-c", std::string(AMEM_FREEZE_SCHEMA) + " < '" + (job.directory() / "answer.json").string() + "'"}, {},
        job.directory());
    EXPECT_EQ(valid.status, 0) << valid.out << valid.err << done.out;
    EXPECT_NE(done.out.find("\"taken\": " + std::to_string(kPlain)), std::string::npos) << done.out;
  }
  ExpectGoodEnd();
}

// The times in a text, in their order.
std::vector<double> Milliseconds(const std::string& text) {
  std::vector<double> all;
  for (std::size_t end = text.find(" ms"); end != text.npos; end = text.find(" ms", end + 1))
    all.push_back(std::stod(text.substr(text.rfind(' ', end - 1))));
  return all;
}

TEST_F(Frozen, text_tells_how_long_all_took_and_each_step) {
  Start(2);
  for (const char* command : {"freeze", "thaw"}) {
    const Rank done = Tool({command, First()});
    const std::size_t line =
        done.out.find(": 2 processes in ");  // "frozen: 2 processes in 31 ms (pause 21 ms, lock 1 ms, ...)"
    ASSERT_NE(line, done.out.npos) << done.out << done.err;
    std::vector<double> times = Milliseconds(done.out.substr(line, done.out.find('\n', line) - line));
    ASSERT_GE(times.size(), 3U) << done.out;
    EXPECT_NEAR(times[0], std::accumulate(times.begin() + 1, times.end(), 0.0), 0.5 * static_cast<double>(times.size()))
        << done.out;  // each is rounded
  }
  ExpectGoodEnd();
}

TEST_F(Frozen, job_without_the_pause_of_amem_is_lost) {
  Start(2);
  const pid_t pid = job.processes().front();
  ASSERT_EQ(checkpoint::LockProcess(*world, pid, 5000), 0);
  ASSERT_EQ(checkpoint::CheckpointProcess(*world, pid), 0) << "as on GPUs, although memory is shared";
  EXPECT_EQ(checkpoint::RestoreProcess(*world, pid, {}), cuda::kNotSupported);
  EXPECT_EQ(checkpoint::StateOf(*world, pid), ProcessState::kFailed);
  const std::string refused = Fails({"freeze", First(), "--deadline", "3"});
  EXPECT_NE(refused.find("The job runs as before"), std::string::npos) << refused;
  for (const pid_t one : job.processes()) kill(one, SIGKILL);
}

// ---- memory that other libraries share -------------------------------------------------------------------------------------

struct Sharing {
  const char *how, *exported, *imported;
};
class OthersShare : public Frozen, public testing::WithParamInterface<Sharing> {};

TEST_P(OthersShare, and_a_freeze_is_refused_by_name_and_costs_nothing) {
  Start(2, {std::string("share=") + GetParam().how});
  const std::string refused = Fails({"freeze", First(), "--deadline", "30"});
  for (int rank = 0; rank < 2; ++rank) {
    const std::string what = rank == 0 ? GetParam().exported : GetParam().imported;
    const std::string told =
        "rank " + std::to_string(rank) + " (pid " + std::to_string(job.processes()[static_cast<std::size_t>(rank)]) +
        ") shares GPU memory with other processes past AMem, and the driver could not restore it: " + what +
        " by libone_shot.so (4 MiB in 1 piece)";
    EXPECT_NE(refused.find(told), std::string::npos) << told << "\n" << refused;
    EXPECT_NE(Tool({"state", (job.journals()).string(), "--rank", std::to_string(rank)})
                  .out.find("past AMem, through libone_shot.so: " + what + ", 1 piece"),
              std::string::npos);
  }
  EXPECT_NE(refused.find("nothing was touched"), std::string::npos) << refused;
  EXPECT_TRUE(AllAre(ProcessState::kRunning));
  ExpectTraining();
  ExpectGoodEnd();
}

TEST_P(OthersShare, no_more_and_the_job_is_frozen) {
  Start(2, {std::string("share=") + GetParam().how, "read shared", "1:unshare", "barrier", "0:unshare"});
  EXPECT_EQ(Fails({"freeze", First()}), "");
  EXPECT_EQ(Fails({"thaw", First()}), "");
  ExpectTraining();
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(job.SoFar(rank).Said("read shared"), "as shared");
  ExpectGoodEnd();
}

class WiderScope : public Frozen, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Is, WiderScope, testing::Values("shared", "all"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(WiderScope, memory_that_a_library_shares_by_cudaipc_leaves_with_the_job) {
  job.environment["AMEM_SCOPE"] = GetParam();
  Start(2, {"share=ipc", "read shared"}, {"read shared", "1:unshare", "barrier", "0:unshare"});
  FreezeAndThaw(3);
  std::ofstream(job.directory() / "stop").close();
  for (const Rank& rank : job.Finish(60s)) {
    EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
    EXPECT_EQ(rank.Said("read shared", 1), "as shared") << rank.out;
    EXPECT_EQ(rank.Said("unshare"), "0") << rank.out;
  }
}

// With look-ups by a runtime, and with calls that the loader binds.
class SharedHandles : public Frozen, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Of, SharedHandles, testing::Values(AMEM_ONE_SHOT, AMEM_ONE_SHOT_DIRECT), [](const auto& info) {
  return std::string(info.param == std::string(AMEM_ONE_SHOT) ? "runtime" : "driver");
});

TEST_P(SharedHandles, leave_with_the_job_in_scope_shared_and_alone_with_their_tag) {
  const std::string library = GetParam(), name = library.substr(library.rfind('/') + 1), tag = name.substr(0, name.find('.'));
  job.environment["AMEM_SCOPE"] = "shared";
  job.environment["JOB_ONE_SHOT"] = library;
  const std::string pause = "pause tag=" + tag, resume = "resume tag=" + tag;
  Start(2, {"share=handle", "read shared", pause, "barrier", "bytes", "barrier", resume, "read shared"},
        {"read shared", "1:unshare", "barrier", "0:unshare"});
  FreezeAndThaw(3);
  std::ofstream(job.directory() / "stop").close();
  const std::vector<Rank> ranks = job.Finish(60s);
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
    EXPECT_EQ(rank.Said("pause tag"), "0") << rank.out;
    EXPECT_EQ(rank.Said("resume tag"), "0") << rank.out;
    for (const int look : {0, 1, 2}) EXPECT_EQ(rank.Said("read shared", look), "as shared") << rank.out;
    EXPECT_EQ(rank.Said("unshare"), "0") << rank.out << rank.err;
  }
  EXPECT_EQ(ranks[0].Said("bytes"), ranks[1].Said("bytes")) << "what rank 0 shares was gone";
}

TEST_P(OthersShare, with_a_process_of_another_scope_fails_by_name_and_the_job_goes_on) {
  job.environment_of[0]["AMEM_SCOPE"] = "shared";
  Start(2, {std::string("share=") + GetParam().how});
  const Rank other = job.SoFar(1);
  EXPECT_NE(other.Said("share"), "0") << other.out;
  for (const std::string& part :
       {"by libone_shot.so: it is given a handle that AMem made in process " + First() + ", which has AMEM_SCOPE=shared",
        std::string("in this process AMEM_SCOPE is nccl"), std::string("set AMEM_SCOPE alike for all processes of the job")})
    EXPECT_NE(other.err.find(part), std::string::npos) << part << "\n" << other.err;
  EXPECT_NE(Tool({"log", job.journals().string(), "--rank", "1"}).out.find("a handle that AMem made in process " + First()),
            std::string::npos);
  ExpectTraining();
  ExpectGoodEnd();
}

INSTANTIATE_TEST_SUITE_P(By, OthersShare,
                         testing::Values(Sharing{"ipc", "cudaIpc export", "cudaIpc import"},
                                         Sharing{"handle", "cuMem handle export", "cuMem handle import"}),
                         [](const auto& info) { return std::string(info.param.how); });

TEST_F(Frozen, rank_that_does_not_come_costs_nobody_anything) {
  Start(2);
  std::ofstream(job.directory() / "halt1").close();
  while (StateOfProcess(job.processes()[1]) != "stopped") std::this_thread::sleep_for(1ms);
  const std::string late = Fails({"freeze", First(), "--deadline", "1"});
  EXPECT_NE(late.find("rank 1"), std::string::npos) << late;
  EXPECT_TRUE(AllAre(ProcessState::kRunning));
  kill(job.processes()[1], SIGCONT);
  ExpectTraining();
  EXPECT_EQ(Fails({"freeze", First()}), "") << "second try";
  EXPECT_EQ(Fails({"thaw", First()}), "");
  ExpectGoodEnd();
}

TEST_F(Frozen, refused_call_of_the_driver_is_undone) {
  Start(2);
  for (const char* fault : {"CheckpointLock,2,fail=600", "CheckpointTake,2,fail=999"}) {
    const std::string refused = Fails({"freeze", First()}, {{"STAND_IN_AT", fault}});
    EXPECT_NE(refused.find("the job runs as before"), std::string::npos) << refused;
    ExpectTraining();
    EXPECT_TRUE(AllAre(ProcessState::kRunning));
  }
  EXPECT_EQ(Fails({"freeze", First()}), "");
  const std::string refused = Fails({"thaw", First()}, {{"STAND_IN_AT", "CheckpointRestore,2,fail=2"}});
  EXPECT_NE(refused.find("stays frozen"), std::string::npos) << refused;
  ExpectOffTheGpus();
  EXPECT_EQ(Fails({"thaw", First()}), "");
  ExpectTraining();
  ExpectGoodEnd();
}

TEST_F(Frozen, journals_tell_of_the_freeze) {
  Start(2);
  EXPECT_EQ(Fails({"freeze", First()}), "");
  const Rank frozen = Tool({"why", "--json", job.journals()});
  EXPECT_NE(frozen.out.find("the job was frozen at"), std::string::npos) << frozen.out << frozen.err;
  EXPECT_EQ(Fails({"thaw", First()}), "");
  const Rank thawed = Tool({"why", "--json", job.journals()});
  EXPECT_EQ(thawed.out.find("frozen at"), std::string::npos) << thawed.out;
  ExpectTraining();
  const Rank log = Tool({"log", job.journals(), "--json"});
  EXPECT_NE(log.out.find("\"moved_gpus\""), std::string::npos) << "each rank writes an event when it resumes";
  ExpectGoodEnd();
}

TEST_F(Frozen, rank_that_dies_is_said_and_the_others_come_back) {
  Start(2);
  EXPECT_EQ(Fails({"freeze", First()}), "");
  kill(job.processes()[1], SIGKILL);
  std::this_thread::sleep_for(100ms);
  const Rank why = Tool({"why", "--json", job.journals()});
  EXPECT_NE(why.out.find("ended meanwhile, with what it had on GPUs: rank 1"), std::string::npos) << why.out << why.err;
  const std::string lost = Fails({"thaw", First(), "--deadline", "5"});
  EXPECT_NE(lost.find("rank 1"), std::string::npos) << lost;
  EXPECT_NE(lost.find("it has ended"), std::string::npos) << lost;
  EXPECT_EQ(checkpoint::StateOf(*world, job.processes()[0]), ProcessState::kRunning);
  kill(job.processes()[0], SIGKILL);
}

TEST_F(Frozen, job_comes_back_on_other_gpus) {
  Start(2);
  EXPECT_EQ(Fails({"freeze", First()}), "");
  EXPECT_EQ(Fails({"thaw", First(), "--gpus", "0=2,2=0"}), "");
  EXPECT_EQ(world->InUse(0), 0U);
  EXPECT_GT(world->InUse(2), kPlain);
  ExpectTraining();
  EXPECT_EQ(Fails({"freeze", First()}), "") << "and again from there";
  EXPECT_EQ(Fails({"thaw", First(), "--gpus", "2=0,0=2"}), "");
  EXPECT_GT(world->InUse(0), kPlain);
  EXPECT_EQ(world->InUse(2), 0U);
  ExpectGoodEnd();
}

// ---- the death of the tool -------------------------------------------------------------------------------------------------

class KilledTool : public Frozen {
 protected:
  // Kills `command` at moments around the messages that it sends to the ranks, from `first` on, and lets `then` go on. At every
  // one with AMEM_MATRIX_STRIDE=1, else at every sixth.
  void KillEverywhere(const std::string& command, const std::string& then, bool frozen_after, int first) {
    Start(2);
    const char* const set = std::getenv("AMEM_MATRIX_STRIDE");
    const int stride = set != nullptr ? std::max(1, std::atoi(set)) : 6;
    for (int moment = stride == 1 ? 1 : first;; moment += stride) {
      if (command == "thaw") {
        ASSERT_EQ(Fails({"freeze", First()}), "") << moment;
      }
      const Rank killed = Tool({command, First()},
                               {{"LD_PRELOAD", AMEM_KILL_AT_MESSAGE}, {"STAND_IN_KILL_AT_MESSAGE", std::to_string(moment)}});
      if (killed.status == 0) {
        EXPECT_GT(moment, 30);
        if (command == "freeze") {
          EXPECT_EQ(Fails({"thaw", First()}), "");
        }
        break;
      }
      ASSERT_EQ(killed.status, 256 + SIGKILL) << moment << killed.out << killed.err;
      const Rank went_on = Tool({command, First(), then});
      // Before the first rank was told there is nothing to go on with, and after the last one was told of the end.
      const bool nothing = went_on.status != 0 && went_on.err.find("unfinished") != std::string::npos;
      ASSERT_TRUE(went_on.status == 0 || nothing) << moment << went_on.out << went_on.err;
      const bool frozen = AllAre(ProcessState::kCheckpointed);
      if (!nothing) {
        ASSERT_EQ(frozen, frozen_after) << moment << went_on.out << went_on.err;
      }
      if (frozen) {
        ASSERT_EQ(Fails({"thaw", First()}), "") << moment;
      }
      ExpectTraining();
    }
    ExpectGoodEnd();
  }
};

// What is known of a job elsewhere is what its pack says: neither its processes nor its GPUs are here.
TEST_F(KilledTool, freeze_half_done_is_told_by_a_pack) {
  Start(2);
  const Rank killed = Tool({"freeze", First()}, {{"STAND_IN_AT", "CheckpointLock,2,KILL"}});
  ASSERT_EQ(killed.status, 256 + SIGKILL) << killed.out << killed.err;
  const std::string pack = job.directory() / "job.amem", anonymous = job.directory() / "anonymous.amem";
  ASSERT_EQ(Fails({"pack", job.journals(), "-o", pack}), "");
  ASSERT_EQ(Fails({"pack", job.journals(), "-o", anonymous, "--anonymous"}), "");
  const Rank why = Tool({"why", "--json", pack});
  EXPECT_NE(why.out.find("had not come to its end when this copy"), std::string::npos) << why.out << why.err;
  EXPECT_EQ(why.out.find("ended meanwhile"), std::string::npos) << why.out;
  const Rank log = Tool({"log", "--json", anonymous});
  EXPECT_NE(log.out.find("\"freeze_step\""), std::string::npos) << log.out;
  EXPECT_EQ(log.out.find("GPU-"), std::string::npos) << log.out;
  EXPECT_EQ(Fails({"freeze", First(), "--undo"}), "");
  ASSERT_EQ(Fails({"pack", job.journals(), "-o", pack}), "");
  EXPECT_EQ(Tool({"why", "--json", pack}).out.find("had not come to its end"), std::string::npos);
  ExpectGoodEnd();
}

TEST_F(KilledTool, freeze_is_continued) { KillEverywhere("freeze", "--continue", true, 1); }
TEST_F(KilledTool, freeze_is_undone) { KillEverywhere("freeze", "--undo", false, 2); }
TEST_F(KilledTool, thaw_is_continued) { KillEverywhere("thaw", "--continue", false, 3); }
TEST_F(KilledTool, thaw_is_undone) { KillEverywhere("thaw", "--undo", true, 6); }

}  // namespace
}  // namespace amem
