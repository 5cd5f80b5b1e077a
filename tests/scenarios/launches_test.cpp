// Jobs that nobody changed, stopped between launches: real processes on the stand-ins, libamem_nccl.so in them, and amem-replay
// that asks them at random moments. Each rank checks all its results itself.
#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
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

// Of each kind of stop that must not work; 200 in all by night. AMEM_STOPS_IN_VAIN=N: another number.
int StopsInVain() {
  const char* const number = std::getenv("AMEM_STOPS_IN_VAIN");
#ifdef AMEM_BY_NIGHT
  return number == nullptr ? 80 : std::atoi(number);
#else
  return number == nullptr ? 1 : std::atoi(number);
#endif
}

// A process that stops all threads of another one, as a debugger does, until the object's end.
class Debugger {
 public:
  explicit Debugger(pid_t traced) {
    int stopped[2];
    if (::pipe(stopped) != 0) return;
    tracer_ = ::fork();
    if (tracer_ == 0) {
      static_cast<void>(::prctl(PR_SET_NAME, "debugger"));
      const char says = StopAll(traced) ? 'y' : 'n';
      static_cast<void>(::write(stopped[1], &says, 1));
      for (;;) ::pause();
    }
    ::close(stopped[1]);
    char says = 'n';
    works_ = ::read(stopped[0], &says, 1) == 1 && says == 'y';
    ::close(stopped[0]);
  }
  ~Debugger() {
    ::kill(tracer_, SIGKILL);  // what it traces runs on
    ::waitpid(tracer_, nullptr, 0);
  }
  Debugger(const Debugger&) = delete;
  Debugger& operator=(const Debugger&) = delete;
  [[nodiscard]] bool works() const { return works_; }

 private:
  static bool StopAll(pid_t process) {
    bool all = true;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task")) {
      const pid_t thread = std::atoi(entry.path().filename().c_str());
      all = all && ::ptrace(PTRACE_SEIZE, thread, 0, 0) == 0 && ::ptrace(PTRACE_INTERRUPT, thread, 0, 0) == 0 &&
            ::waitpid(thread, nullptr, __WALL) == thread;
    }
    return all;
  }

  pid_t tracer_ = -1;
  bool works_ = false;
};

class Unmodified : public ::testing::Test {
 protected:
  void Start(const std::string& kind) {
    job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job_.environment["JOB_STOP"] = job_.directory() / "stop";
    job_.environment["JOB_AWAY"] = job_.directory() / "away";
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
    return answer.is_object() && answer.contains("ranks") ? answer["ranks"].get<std::vector<json>>() : std::vector<json>();
  }
  int StepOf(int rank) {
    const std::string out = job_.SoFar(rank).out;
    const auto at = out.rfind("at ");
    return at == std::string::npos ? -1 : std::atoi(out.c_str() + at + 3);
  }
  static bool Becomes(const std::function<bool()>& so) {
    for (int waited = 0; waited < 3000; ++waited) {
      if (so()) return true;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return false;
  }
  bool UntilStep(int step) {
    return Becomes([&] {
      bool all = true;
      for (int rank = 0; rank < kWorld; ++rank) all = all && StepOf(rank) >= step;
      return all;
    });
  }
  void AllEndWell() {
    std::ofstream(job_.directory() / "stop").close();
    for (const Rank& rank : job_.Finish(milliseconds(60'000))) {
      EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
      EXPECT_TRUE(rank.Said("kind").starts_with("steps")) << rank.out << rank.err;
    }
  }
  // What is known of the ranks' memory and requests from outside, without what changes while they run. A moment after a request
  // has ended all run.
  json Standing() {
    json all;
    const auto runs = [](const json& rank) { return rank["phase"] == "running"; };
    for (int waited = 0; waited < 200 && (all.size() != kWorld || !std::ranges::all_of(all, runs)); ++waited) {
      std::this_thread::sleep_for(milliseconds(10));
      all = Live();
    }
    for (json& rank : all) {
      EXPECT_EQ(rank["phase"], "running") << rank;
      EXPECT_EQ(rank["freed_bytes"], 0) << rank;
      rank.erase("doing");
    }
    return all;
  }
  // A stop that must not work, for these reasons; nothing has changed after it.
  // Returns what the tool wrote.
  std::string StopInVain(bool parks, const Words& reasons, const std::string& deadline = "1") {
    const Rank refused =
        Tool(parks ? Words{"park", "--deadline", deadline} : Words{"pause", "--between-launches", "--deadline", deadline});
    EXPECT_EQ(refused.status, 3) << refused.out << refused.err;
    EXPECT_NE(refused.err.find("nothing was paused, and all run on"), std::string::npos) << refused.err;
    for (const std::string& reason : reasons)
      EXPECT_NE(refused.err.find(reason), std::string::npos) << reason << ": " << refused.err;
    return refused.err;
  }
  std::string Pid(int rank) { return std::to_string(job_.processes()[static_cast<std::size_t>(rank)]); }

  Job job_;
};

#ifdef AMEM_BY_NIGHT
constexpr int kStops = 4;
const auto kKinds =
    ::testing::Values("data parallel", "overlapping", "pipeline", "all to all", "sleeper", "barriers", "makes", "threads");
#else
constexpr int kStops = 2;
const auto kKinds = ::testing::Values("overlapping", "barriers");
#endif

class Kinds : public Unmodified, public ::testing::WithParamInterface<const char*> {};

TEST_P(Kinds, is_paused_and_parked_at_random_moments_and_its_results_are_right) {
  Start(GetParam() + std::string(",3"));
  ASSERT_TRUE(UntilStep(8)) << job_.SoFar(0).out << job_.SoFar(0).err;
  std::mt19937 random(static_cast<unsigned>(::getpid()));
  for (int i = 0; i < kStops; ++i) {
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

INSTANTIATE_TEST_SUITE_P(Of, Kinds, kKinds, [](const auto& info) {
  std::string name = info.param;
  std::ranges::replace(name, ' ', '_');
  return name;
});

TEST_F(Unmodified, a_rank_that_is_away_is_named_at_the_deadline_nothing_has_changed_and_a_later_pause_succeeds) {
  Start("away,1");
  ASSERT_TRUE(UntilStep(8)) << job_.SoFar(0).out << job_.SoFar(0).err;
  const json before = Standing();
  const auto away = [&] {
    const std::string out = job_.SoFar(1).out;
    return out.rfind("away") > out.rfind("at ");
  };
  for (int i = 0; i < StopsInVain(); ++i) {
    const std::filesystem::path file = job_.environment["JOB_AWAY"];
    std::ofstream(file).close();
    for (int waited = 0; waited < 2000 && !away(); ++waited) std::this_thread::sleep_for(milliseconds(5));
    ASSERT_TRUE(away());
    std::this_thread::sleep_for(milliseconds(50));  // the others wait for it in NCCL
    StopInVain(i % 2 == 0, {"rank 1 has made ", " launches on communicator 0x",
                            "rank 0 is inside ncclAllReduce on communicator 0x", "; its process is "});
    std::filesystem::remove(file);
    ASSERT_TRUE(UntilStep(StepOf(0) + 16)) << "after stop " << i;
    ASSERT_EQ(Standing(), before);
  }
  const Rank paused = Tool({"pause", "--between-launches", "--deadline", "20"});
  EXPECT_EQ(paused.status, 0) << paused.err;
  EXPECT_EQ(Tool({"resume"}).status, 0);
  AllEndWell();
}

// Such as PyTorch, which makes the communicator of two ranks when they first send each other something.
TEST_F(Unmodified, one_that_makes_a_communicator_while_the_job_is_stopped_waits_and_makes_it_after_the_resume) {
  Start("makes after a while,1");
  ASSERT_TRUE(UntilStep(8)) << job_.SoFar(0).out << job_.SoFar(0).err;
  const std::filesystem::path file = job_.environment["JOB_AWAY"];
  const auto have_said_last = [&](const std::string& what) {
    for (int rank = 0; rank < kWorld; ++rank)
      if (!job_.SoFar(rank).out.ends_with(what + "\n")) return false;
    return true;
  };
  for (const char* const call : {"a split", "one of its own", "one in a group"}) {
    SCOPED_TRACE(call);
    std::ofstream(file).close();
    ASSERT_TRUE(Becomes([&] { return have_said_last("away"); })) << job_.SoFar(0).out << job_.SoFar(0).err;
    const Rank paused = Tool({"pause", "--between-launches", "--deadline", "20"});
    EXPECT_EQ(paused.status, 0) << paused.out << paused.err;
    std::filesystem::remove(file);
    ASSERT_TRUE(Becomes([&] { return have_said_last("makes"); }));
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_TRUE(have_said_last("makes")) << "it waits: " << job_.SoFar(0).out << job_.SoFar(0).err;
    EXPECT_EQ(Tool({"resume"}).status, 0);
    ASSERT_TRUE(UntilStep(StepOf(0) + 8)) << job_.SoFar(0).out << job_.SoFar(0).err;
  }
  AllEndWell();
}

TEST_F(Unmodified, ranks_whose_programs_do_not_match_are_named_with_what_they_launched) {
  Start("mismatched,1");
  ASSERT_TRUE(UntilStep(8));
  std::this_thread::sleep_for(milliseconds(500));
  const json before = Standing();
  for (int i = 0; i < std::min(StopsInVain(), 40); ++i) {  // within the minute after which the stand-in gives up
    const std::string said = StopInVain(
        i % 2 == 0, {"rank 0 is inside ncclAllReduce on communicator 0x", "rank 3 is inside ncclAllReduce on communicator 0x"},
        i == 0 ? "2" : "1");
    // After a second, and a second time with the reasons at the end, where lines begin with the program's name.
    if (i == 0) {
      EXPECT_TRUE(said.starts_with("rank ")) << said;
      EXPECT_NE(("\n" + said).find("\nrank 3 is inside ncclAllReduce"), std::string::npos) << said;
    }
    ASSERT_EQ(Standing(), before);
  }
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

TEST_F(Unmodified, a_rank_in_a_debugger_is_named_with_it_and_all_run_on_when_it_goes) {
  Start("data parallel,1");
  ASSERT_TRUE(UntilStep(8));
  const json before = Standing();
  for (int i = 0; i < StopsInVain(); ++i) {
    const int rank = i % kWorld;
    {
      const Debugger debugger(job_.processes()[static_cast<std::size_t>(rank)]);
      if (!debugger.works()) GTEST_SKIP() << "this user may not trace";
      StopInVain(i % 2 == 0,
                 {"rank " + std::to_string(rank) +
                      " has not closed its launch gate; communicators with some ranks that have: 3 of communicator 0x",
                  "; its process is stopped by debugger (pid "});
    }
    ASSERT_TRUE(UntilStep(StepOf(0) + 16)) << "after stop " << i;
    ASSERT_EQ(Standing(), before);
  }
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

// Its program runs on, to a pause of its own for example, which waits for the resume.
class PausesByItself : public Unmodified {
 protected:
  // From the file `now` on rank 0 makes `pause`, while the job is stopped.
  void StopAndResume(const Words& commands, const std::string& now, const std::string& pause) {
    job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job_.environment["AMEM_TIMEOUT_MS"] = "10000";
    job_.Start(kWorld, commands);
    ASSERT_TRUE(Becomes([&] {
      for (int rank = 0; rank < kWorld; ++rank)
        if (job_.SoFar(rank).Said("barrier") != "0") return false;
      return true;
    }));
    ASSERT_EQ(Tool({"pause", "--between-launches"}).status, 0);
    std::ofstream(now).close();
    ASSERT_TRUE(Becomes([&] { return job_.SoFar(0).Said("await") == "0"; }));
    std::this_thread::sleep_for(milliseconds(50));
    EXPECT_EQ(job_.SoFar(0).Said(pause), "(not run)");
    const Rank resumed = Tool({"resume", "--deadline", "20"});
    EXPECT_EQ(resumed.status, 0) << resumed.out << resumed.err;
  }
};

// One rank is there before the job is resumed, the others are later.
TEST_F(PausesByItself, one_that_is_stopped_does_so_after_the_resume) {
  const std::string now = job_.directory() / "now", later = job_.directory() / "later";
  StopAndResume({"cuda", "load", "init", "reduce", "barrier", "0:await=" + now, "!0:await=" + later, "pause", "bytes", "resume",
                 "reduce", "barrier"},
                now, "pause");
  std::ofstream(later).close();
  for (const Rank& rank : job_.Finish(milliseconds(60'000))) {
    EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
    for (const char* const command : {"pause", "resume"}) EXPECT_EQ(rank.Said(command), "0") << rank.out << rank.err;
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0));
  }
}

// What ncclCommSuspend has paused then another communicator of the program brings back.
TEST_F(PausesByItself, one_that_suspends_its_communicators_has_suspended_them_itself) {
  const std::string now = job_.directory() / "now";
  StopAndResume({"cuda", "load", "init", "reduce", "barrier", "await=" + now, "suspend last", "bytes", "barrier", "init",
                 "resume first", "reduce", "barrier"},
                now, "suspend last");
  for (const Rank& rank : job_.Finish(milliseconds(60'000))) {
    EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
    EXPECT_EQ(rank.Said("suspend last"), "0") << rank.out << rank.err;
    EXPECT_EQ(rank.Said("bytes"), "0") << rank.out;
    EXPECT_EQ(rank.Said("init", 1), "0") << rank.out << rank.err;
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0));
  }
}

TEST_F(Unmodified, one_that_is_paused_between_launches_has_its_tags_until_it_is_resumed) {
  job_.environment["JOB_STOP"] = job_.directory() / "stop";
  job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job_.Start(kWorld, {"cuda", "load", "init", "tags", "reduce", "barrier", "read tags until the stop", "reduce"});
  ASSERT_TRUE(Becomes([&] {
    for (int rank = 0; rank < kWorld; ++rank)
      if (job_.SoFar(rank).Said("barrier") != "0") return false;
    return true;
  }));
  ASSERT_EQ(Tool({"pause", "--between-launches"}).status, 0);
  for (const char* const option : {"--tags", "--all"}) {
    const Rank refused = Tool({"pause", option});
    EXPECT_EQ(refused.status, 2) << refused.out << refused.err;
    EXPECT_NE(refused.err.find("is paused between two launches"), std::string::npos) << refused.err;
  }
  std::ofstream(job_.environment["JOB_STOP"]).close();
  ASSERT_TRUE(Becomes([&] { return job_.SoFar(0).Said("read tags until the stop") != "(not run)"; }));
  ASSERT_EQ(Tool({"resume"}).status, 0);
  for (const Rank& rank : job_.Finish(milliseconds(60'000))) {
    EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
    EXPECT_EQ(rank.Said("read tags until the stop"), "as written") << rank.out << rank.err;
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
  EXPECT_NE(refused.err.find("has not called amem.safepoint()"), std::string::npos) << refused.err;
  AllEndWell();
}

}  // namespace unmodified
}  // namespace
}  // namespace amem
