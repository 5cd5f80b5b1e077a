// Requests from outside, the whole path: jobs of real processes on the stand-ins, libamem_nccl.so in them, and amem-replay that
// asks them.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <regex>
#include <thread>

#include "journal/journal.h"
#include "tests/guards.h"
#include "tests/scenarios/job.h"

namespace amem {
namespace {

using job::Job;
using job::Rank;
using nlohmann::json;
using Words = std::vector<std::string>;

constexpr int kRanks = 3;

class Requests : public ::testing::Test {
 protected:
  void Start(const Words& commands, Job& job) {
    job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job.environment["JOB_STOP"] = job.directory() / "stop";
    job.Start(kRanks, commands);
  }
  void Start(const Words& commands) { Start(commands, job_); }

  Rank Tool(const Words& words, const job::Environment& also = {}) {
    Words command = {AMEM_REPLAY};
    command.insert(command.end(), words.begin(), words.end());
    job::Environment environment{{"AMEM_JOURNAL_DIR", job_.journals()}};
    for (const auto& [name, value] : also) environment[name] = value;
    return job::RunProgram(command, environment, job_.directory());
  }
  json Ask(const Words& words) {
    Words all = words;
    all.emplace_back("--json");
    const Rank ran = Tool(all);
    EXPECT_EQ(ran.status, 0) << ran.out << ran.err;
    const json answer = json::parse(ran.out, nullptr, false);
    return test::Each(answer.is_object() ? answer.value("ranks", json::array()) : json::array());
  }
  std::string Pid(int rank) { return std::to_string(job_.processes()[static_cast<std::size_t>(rank)]); }

  // Until every rank has come to so many safe points, or has printed that.
  bool Until(const std::function<bool()>& so) {
    for (int waited = 0; waited < 3000; ++waited) {
      if (so()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }
  bool UntilSteps(std::uint64_t steps) {
    return Until([&] {
      const auto sessions = ListSessions(job_.journals());
      if (!sessions.ok() || sessions->size() < kRanks) return false;
      const Rank ran = Tool({"ls", "--live", "--json"});
      const json answer = json::parse(ran.out, nullptr, false);
      if (ran.status != 0 || !answer.is_object() || answer["ranks"].size() < kRanks) return false;
      for (const json& rank : answer["ranks"])
        if (rank["safepoints"] < steps) return false;
      return true;
    });
  }
  bool UntilSaid(const std::string& text) {
    return Until([&] {
      for (int rank = 0; rank < kRanks; ++rank)
        if (job_.SoFar(rank).out.find(text) == std::string::npos) return false;
      return true;
    });
  }
  // Ends the steps of a job at the next one.
  static void Stop(const Job& job) { std::ofstream(job.directory() / "stop").close(); }
  void AllEndWell(const std::string& said = "steps") {
    Stop(job_);
    const auto ranks = job_.Finish(std::chrono::milliseconds(60'000));
    for (const Rank& rank : ranks) {
      EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
      EXPECT_TRUE(rank.Said(said).starts_with("sum ")) << rank.out << rank.err;
    }
  }

  Job job_;
};

TEST_F(Requests, what_a_pause_leaves_on_the_gpus_is_said_by_name_before_there_is_one) {
  job_.environment["AMEM_SCOPE"] = "all";
  Start({"cuda", "load", "init", "1:pass through=4194304", "1:pass through=2097152", "barrier", "steps=100000,4", "barrier",
         "destroy"});
  ASSERT_TRUE(UntilSteps(5));
  for (const char* const command : {"look", "pause", "resume"}) {
    if (command != std::string("look")) {
      EXPECT_EQ(Ask({command, Pid(0)}).size(), kRanks);
    }
    for (const json& rank : Ask({"ls", "--live", Pid(0)})) {
      json left = json::array();
      for (const json& one : rank["stays"])
        if (one["what"] == "cuMemAllocAsync") left.push_back(one);
      const json all = {{{"what", "cuMemAllocAsync"}, {"pieces", 2}, {"bytes", 6291456}}};
      EXPECT_EQ(left, rank["rank"] == 1 ? all : json::array()) << rank;
    }
  }
  const std::string live = Tool({"ls", "--live", Pid(0)}).out;
  EXPECT_NE(live.find("6 MiB (cuMemAllocAsync, 2 pieces)"), std::string::npos) << live;
  AllEndWell();
}

// --at-step names one of them, the same on all hosts.
TEST_F(Requests, safe_points_are_counted_from_one) {
  Start({"cuda", "load", "init", "barrier", "steps=7,2", "sleep=8000", "barrier"});
  ASSERT_TRUE(UntilSaid("steps: sum"));
  const json ranks = Ask({"ls", "--live", Pid(0)});
  EXPECT_EQ(ranks.size(), kRanks);
  for (const json& rank : ranks) EXPECT_EQ(rank["safepoints"], 7) << rank;
  for (const pid_t rank : job_.processes()) ::kill(rank, SIGKILL);
  job_.Finish(std::chrono::milliseconds(60'000));
}

// A pause of the ranks that are found would wait for the others until the deadline.
TEST_F(Requests, a_rank_whose_neighbours_have_their_journals_elsewhere_is_not_asked_without_them) {
  job_.environment_of[2]["AMEM_JOURNAL_DIR"] = job_.directory() / "elsewhere";
  Start({"cuda", "load", "init", "reduce", "barrier", "steps=100000,4", "barrier", "destroy"});
  ASSERT_TRUE(UntilSaid("barrier: 0"));
  const Rank refused = Tool({"pause", "--deadline", "5"});
  EXPECT_EQ(refused.status, 2) << refused.out << refused.err;
  EXPECT_NE(refused.err.find("name a directory above all journals"), std::string::npos) << refused.err;
  for (const char* const command : {"pause", "resume"}) {
    const Rank ran = Tool({command, job_.directory()});
    EXPECT_EQ(ran.status, 0) << ran.out << ran.err;
  }
  AllEndWell();
}

TEST_F(Requests, a_job_is_paused_at_one_step_with_its_tags_and_goes_on_with_the_same_sums) {
  Start({"cuda", "load", "init", "tags", "barrier", "steps=100000,4", "read tags", "barrier", "destroy"});
  ASSERT_TRUE(UntilSteps(5));
  for (int i = 0; i < 3; ++i) {
    const json paused = Ask({"pause", Pid(i), "--all"});
    ASSERT_EQ(paused.size(), kRanks);
    for (const json& rank : paused) {
      EXPECT_EQ(rank["phase"], "paused") << rank;
      EXPECT_EQ(rank["safepoints"], paused[0]["safepoints"]) << rank;
      EXPECT_GT(rank["freed_bytes"], 20 << 20) << rank;
    }
    const Rank again = Tool({"pause", Pid(1)});
    EXPECT_EQ(again.status, 0) << again.err;
    EXPECT_TRUE(again.out.starts_with("3 ranks are paused already; nothing was changed\n")) << again.out;
    const std::string listed = Tool({"ls", Pid(0)}).out;
    EXPECT_NE(listed.find("SAFE POINT  PAUSED BY  PROGRAM"), std::string::npos) << listed;
    EXPECT_NE(listed.find("  job_rank cuda  "), std::string::npos) << listed;
    EXPECT_NE(listed.find(" request "), std::string::npos) << listed;
    const json status = Ask({"ls", "--live", Pid(0)});
    for (const json& rank : status) EXPECT_EQ(rank["safepoints"], paused[0]["safepoints"]) << "it stands still";
    for (const json& rank : Ask({"resume", Pid(0)})) EXPECT_EQ(rank["phase"], "running") << rank;
    const Rank running = Tool({"resume", Pid(0)});
    EXPECT_EQ(running.status, 0) << running.err;
    EXPECT_TRUE(running.out.starts_with("3 ranks are running already; nothing was changed\nrank 0 (pid ")) << running.out;
    EXPECT_NE(running.out.find("runs, and has made "), std::string::npos) << running.out;
  }
  const std::string live = Tool({"ls", "--live", Pid(0)}).out;
  EXPECT_NE(live.find("; holds "), std::string::npos) << live;
  Stop(job_);
  const auto ranks = job_.Finish(std::chrono::milliseconds(60'000));
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.status, 0) << rank.err;
    EXPECT_TRUE(rank.Said("steps").starts_with("sum ")) << rank.out << rank.err;
    EXPECT_EQ(rank.Said("read tags"), "as written") << rank.err;
  }
  const std::string begun = Tool({"log", job_.journals(), "--rank", "1", "--kind", "cycle-begun", "--json"}).out;
  const std::regex kept(R"("keeps":true)");
  EXPECT_EQ(std::distance(std::sregex_iterator(begun.begin(), begun.end(), kept), {}), 6)
      << "both tags, three times: " << begun;
  const Rank log = Tool({"log", job_.journals(), "--rank", "1", "--kind", "request-seen,safepoint-reached,request-ended"});
  EXPECT_NE(log.out.find("request seen: request 1, pause, by pid "), std::string::npos) << log.out << log.err;
  EXPECT_NE(log.out.find("request 2 to resume done"), std::string::npos) << log.out << log.err;
  const std::string ended = Tool({"ls", job_.journals()}).out;
  EXPECT_NE(ended.find("  job_rank cuda  "), std::string::npos) << "a program has its name when it has ended, too: " << ended;
  EXPECT_EQ(Tool({"why", job_.journals()}).status, 0);
  EXPECT_EQ(Tool({"verify", job_.journals()}).status, 0) << Tool({"verify", job_.journals()}).out;
  const Rank traced = Tool({"report", "--perfetto", job_.journals(), "-o", "-"});
  EXPECT_NE(traced.out.find("\"safe point "), std::string::npos);
}

TEST_F(Requests, a_job_is_found_by_what_people_know_of_it) {
  job_.environment["TORCHELASTIC_RUN_ID"] = "run-77";
  job_.environment["WORLD_SIZE"] = "5";
  Start({"cuda", "load", "init", "steps=100000,4", "barrier"});
  ASSERT_TRUE(UntilSteps(2));
  const auto session = ListSessions(job_.journals())->front().string();
  for (const std::string& name : {Pid(1), std::to_string(::getpid()), std::string("run-77"), job_.journals().string(), session,
                                  session + "/", session + "/.", session + "/tail"})
    EXPECT_EQ(Ask({"ls", "--live", name}).size(), kRanks) << name;
  EXPECT_NE(Tool({"ls", "--live"}).out.find("The launcher counts 2 more ranks"), std::string::npos);
  for (const char* nobody : {"4194999", "run-78", "/nowhere"}) {
    const Rank none = Tool({"pause", nobody});
    EXPECT_EQ(none.status, 2);
    EXPECT_NE(none.err.find(nobody), std::string::npos) << none.err;
  }
  for (const char* command : {"ls --live", "pause", "resume", "park", "freeze", "thaw"}) {
    Words words = {command, ""};  // a script's variable that is not set
    if (words[0] == "ls --live") words = {"ls", "--live", ""};
    const Rank nameless = Tool(words);
    EXPECT_EQ(nameless.status, 1) << command << ": " << nameless.out << nameless.err;
    EXPECT_NE(nameless.err.find("an empty name names nothing"), std::string::npos) << nameless.err;
  }
  Job other;
  other.environment["AMEM_JOURNAL_DIR"] = job_.journals();
  other.environment["TORCHELASTIC_RUN_ID"] = "run-79";
  Start({"cuda", "load", "init", "steps=100000,4", "barrier"}, other);
  ASSERT_TRUE(Until([&] { return ListSessions(job_.journals())->size() == 2 * kRanks; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const Rank both = Tool({"pause"});
  EXPECT_EQ(both.status, 2);
  EXPECT_NE(both.err.find("there are 2 living jobs"), std::string::npos) << both.err;
  EXPECT_EQ(Ask({"ls", "--live", "run-79"}).size(), kRanks);
  const auto all = ListSessions(job_.journals());
  for (const auto& one : *all) EXPECT_EQ(Ask({"ls", "--live", one.string()}).size(), kRanks) << "and not the other job's";
  Stop(other);
  other.Finish(std::chrono::milliseconds(60'000));
  AllEndWell();
}

// What of a job's journals says that somebody asked it for something.
class Named : public Requests {
 protected:
  bool NobodyWasAsked() {
    const Rank log = Tool({"log", job_.journals(), "--kind", "session-opened,request-seen,cycle-begun"});
    EXPECT_NE(log.out.find("session opened: "), std::string::npos) << "the journals can be read: " << log.out << log.err;
    return log.out.find("to pause") == std::string::npos && log.out.find("begun") == std::string::npos;
  }
  void IsRefused(const Words& command, const std::string& reason, const Words& listed) {
    const Rank refused = Tool(command);
    EXPECT_EQ(refused.status, 2) << refused.out << refused.err;
    EXPECT_NE(refused.err.find(reason), std::string::npos) << refused.err;
    for (const std::string& pid : listed) EXPECT_NE(refused.err.find(pid), std::string::npos) << refused.err;
    EXPECT_TRUE(NobodyWasAsked());
  }
  static std::uint64_t StepsOf(const json& ranks, const std::string& pid) {
    for (const json& rank : ranks)
      if (std::to_string(rank["pid"].get<int>()) == pid) return rank["safepoints"];
    return 0;
  }
};

TEST_F(Named, two_programs_that_one_shell_started_in_the_same_second_are_asked_by_their_own_pids) {
  Job other;
  for (Job* program : {&job_, &other}) {
    for (const auto& [name, value] : job::Environment{{"AMEM_JOURNAL_DIR", job_.journals()},
                                                      {"LSB_JOBID", "5"},
                                                      {"LD_PRELOAD", AMEM_LIBRARY_FILE},
                                                      {"JOB_STOP", program->directory() / "stop"}})
      program->environment[name] = value;
    program->environment_of[0]["RANK"] = "";
  }
  for (Job* program : {&job_, &other}) program->Start(1, {"cuda", "load", "init", "steps=100000,4"});
  const std::string mine = Pid(0), others = std::to_string(other.processes()[0]);
  ASSERT_TRUE(Until([&] {
    const json answer = json::parse(Tool({"ls", "--live", "--json"}).out, nullptr, false);
    const json ranks = answer.is_object() ? answer.value("ranks", json::array()) : json::array();
    return StepsOf(ranks, mine) > 2 && StepsOf(ranks, others) > 2;
  }));
  // A report that was unpacked has journals of processes that lived then.
  const std::filesystem::path pack = job_.directory() / "report.amem";
  ASSERT_EQ(Tool({"pack", job_.journals(), "-o", pack}).status, 0);
  const std::filesystem::path report = job_.directory() / "report";
  const Rank unpacked = Tool({"pack", "-x", pack, "-o", report});
  ASSERT_EQ(unpacked.status, 0) << unpacked.err;
  IsRefused({"pause", report}, "no process under", {});
  IsRefused({"pause"}, "there are 2 living jobs", {mine, others});
  IsRefused({"freeze"}, "there are 2 living jobs", {mine, others});
  IsRefused({"pause", std::to_string(::getpid())}, "there are 2 living jobs", {mine, others});
  IsRefused({"pause", "5"}, "there are 2 living jobs", {mine, others});
  IsRefused({"pause", mine, "4194999"}, "4194999 is the pid of no living rank, and nobody was asked", {mine, others});
  const json paused = Ask({"pause", mine});
  ASSERT_EQ(paused.size(), 1u) << paused;
  EXPECT_EQ(std::to_string(paused[0]["pid"].get<int>()), mine);
  const std::uint64_t then = StepsOf(Ask({"ls", "--live"}), others);
  EXPECT_TRUE(Until([&] {
    return StepsOf(Ask({"ls", "--live"}), others) > then + 2;
  })) << "the other program stands still, too";
  EXPECT_EQ(Ask({"resume", mine}).size(), 1u);
  const json both = Ask({"pause", mine, others});
  ASSERT_EQ(both.size(), 2u) << both;
  for (const json& rank : both) EXPECT_EQ(rank["phase"], "paused") << rank;
  EXPECT_EQ(Ask({"resume", others, mine}).size(), 2u);
  Stop(job_);
  Stop(other);
  for (Job* program : {&job_, &other})
    for (const Rank& rank : program->Finish(std::chrono::milliseconds(60'000)))
      EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
}

// Slurm's ids are numbers, too.
TEST_F(Named, a_number_that_is_a_rank_and_the_id_of_another_job_is_refused_and_both_are_listed) {
  Job other;
  for (Job* program : {&job_, &other}) {
    for (const auto& [name, value] : job::Environment{{"AMEM_JOURNAL_DIR", job_.journals()},
                                                      {"LD_PRELOAD", AMEM_LIBRARY_FILE},
                                                      {"JOB_STOP", program->directory() / "stop"}})
      program->environment[name] = value;
    program->environment_of[0]["RANK"] = "";
  }
  job_.Start(1, {"cuda", "load", "init", "steps=100000,4"});
  const std::string mine = Pid(0);
  other.environment["SLURM_JOB_ID"] = mine;
  other.Start(1, {"cuda", "load", "init", "steps=100000,4"});
  const std::string others = std::to_string(other.processes()[0]);
  ASSERT_TRUE(Until([&] {
    const json answer = json::parse(Tool({"ls", "--live", others, "--json"}).out, nullptr, false);
    return StepsOf(answer.is_object() ? answer.value("ranks", json::array()) : json::array(), others) > 2;
  }));
  ASSERT_TRUE(Until([&] { return ListSessions(job_.journals())->size() == 2; }));
  for (const char* command : {"pause", "resume", "park", "freeze", "thaw"})
    IsRefused({command, mine}, mine + " is the pid of a rank, and what a launcher calls another job", {mine, "pid " + others});
  std::string of_others;
  for (const json& rank : Ask({"ls", "--live", others}))  // which may guess that the two are one job
    if (std::to_string(rank["pid"].get<int>()) == others) of_others = rank["directory"];
  ASSERT_FALSE(of_others.empty());
  const auto sessions = ListSessions(job_.journals());
  ASSERT_TRUE(sessions.ok());
  for (const auto& session : test::Each(*sessions)) {
    const std::string& meant = session == of_others ? others : mine;
    for (const Words& command : {Words{"pause", session}, Words{"resume", session}}) {
      const json ranks = Ask(command);
      ASSERT_EQ(ranks.size(), 1U) << ranks;
      EXPECT_EQ(std::to_string(ranks[0]["pid"].get<int>()), meant);
    }
  }
  Stop(job_);
  Stop(other);
  for (Job* program : {&job_, &other})
    for (const Rank& rank : program->Finish(std::chrono::milliseconds(60'000)))
      EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
}

TEST_F(Named, ranks_that_have_not_met_are_one_job_by_one_launch_or_by_their_pids) {
  job_.environment["WORLD_SIZE"] = std::to_string(kRanks);
  Start({"cuda", "load", "malloc", "barrier", "sleep=20000"});
  ASSERT_TRUE(UntilSaid("barrier:"));
  const Words all = {Pid(0), Pid(1), Pid(2)};
  IsRefused({"pause", Pid(0)}, "is of a job of 3 ranks, and its other ranks cannot be identified yet", all);
  IsRefused({"freeze", Pid(0)}, "its other ranks cannot be identified yet", all);
  IsRefused({"pause", job_.journals()}, "there are 3 living jobs", all);
  const Rank named = Tool({"pause", all[0], all[1], all[2], "--at-safepoint", "--deadline", "1"});
  EXPECT_EQ(named.status, 3) << "all were asked, and came to no safe point: " << named.err;
  for (const pid_t rank : job_.processes()) ::kill(rank, SIGKILL);
  job_.Finish(std::chrono::milliseconds(60'000));
  Job launched;
  launched.environment["TORCHELASTIC_RUN_ID"] = "none";
  launched.environment["TORCHELASTIC_RESTART_COUNT"] = "0";
  launched.environment["AMEM_JOURNAL_DIR"] = job_.journals();
  Start({"cuda", "load", "malloc", "barrier", "sleep=20000"}, launched);
  const std::string rank = std::to_string(launched.processes()[1]);
  ASSERT_TRUE(Until([&] { return Tool({"ls", "--live", rank}).status == 0 && Ask({"ls", "--live", rank}).size() == kRanks; }));
  const Rank asked = Tool({"pause", rank, "--at-safepoint", "--deadline", "1"});
  EXPECT_EQ(asked.status, 3) << asked.err;
  for (int i = 0; i < kRanks; ++i) EXPECT_NE(asked.err.find("rank " + std::to_string(i)), std::string::npos) << asked.err;
  for (const pid_t one : launched.processes()) ::kill(one, SIGKILL);
}

// As of `docker run IMAGE torchrun`: the ranks' parent is pid 1, which elsewhere is the parent of whatever lost its own.
TEST_F(Named, ranks_whose_parent_is_pid_1_are_one_job_if_that_is_torchrun) {
  job::Environment environment = job_.environment;
  environment.merge(
      job::Environment{{"WORLD", "1"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "none"}, {"PRELOAD", AMEM_LIBRARY_FILE}});
  const char* script = R"sh(
    for RANK in 0 1; do export RANK; LD_PRELOAD=$PRELOAD "$1" cuda load malloc sleep=60000 >/dev/null & done
    for i in $(seq 400); do [ "$("$2" ls --live | grep -c '^rank ')" -ge 2 ] && break; sleep 0.05; done
    "$2" pause $! --at-safepoint --deadline 1 > "$3" 2>&1; echo "status $?" >> "$3"; kill %1 %2)sh";
  for (const char* name : {"torchrun", "supervisor"}) {
    const auto program = job_.directory() / name, said = job_.directory() / (std::string(name) + ".said");
    std::ofstream(program) << script;
    environment["AMEM_JOURNAL_DIR"] = job_.directory() / (std::string(name) + ".journals");
    job::RunProgram({"/usr/bin/unshare", "-rpf", "--mount-proc", "/bin/bash", program, AMEM_JOB_RANK, AMEM_REPLAY, said},
                    environment, job_.directory());
    std::ifstream in(said);
    const std::string text(std::istreambuf_iterator<char>(in), {});
    const bool one_job = std::string(name) == "torchrun";
    EXPECT_NE(text.find(one_job ? "status 3" : "its other ranks cannot be identified yet"), std::string::npos)
        << name << ": " << text;
  }
}

// As in a container: the launcher is pid 1 of a pid namespace of its own, and the rank has a number that outside is another
// process's, or nobody's.
TEST_F(Named, a_launcher_may_be_pid_1_and_a_pid_means_a_process_of_this_namespace) {
  job::Environment environment = job_.environment;
  environment["RANK"] = "0";
  environment["WORLD"] = "1";
  const std::filesystem::path scratch = job_.directory() / "container";
  std::filesystem::create_directory(scratch);
  environment["JOB_STOP"] = job_.directory() / "stop";
  environment["PRELOAD"] = AMEM_LIBRARY_FILE;
  const std::string script = R"(
    LD_PRELOAD=$PRELOAD "$0" cuda load 'only safe points' & echo $! > inner
    for i in $(seq 400); do "$1" ls --live 1 > status 2>&1 && break; sleep 0.05; done
    "$1" pause 1 > paused 2>&1 && "$1" ls --live 1 > status && "$1" resume 1 > resumed 2>&1 && touch ready
    wait)";
  std::thread container([&] {
    static_cast<void>(
        job::RunProgram({"/bin/sh", "-c", "cd '" + job_.directory().string() + "' && exec \"$@\"", "sh", "/usr/bin/unshare",
                         "-rpf", "--mount-proc", "/bin/sh", "-c", script, AMEM_JOB_RANK, AMEM_REPLAY},
                        environment, scratch));
  });
  const auto text = [&](const char* file) {
    std::ifstream in(job_.directory() / file);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const bool ready = Until([&] { return std::filesystem::exists(job_.directory() / "ready"); });
  EXPECT_TRUE(ready) << text("status") << text("paused") << text("resumed");
  EXPECT_NE(text("status").find("is paused"), std::string::npos) << text("status");
  const Rank stranger = Tool({"pause", text("inner").substr(0, text("inner").find('\n'))});
  EXPECT_EQ(stranger.status, 2) << stranger.out;
  EXPECT_NE(stranger.err.find("is no rank or launcher of a living job"), std::string::npos) << stranger.err;
  EXPECT_EQ(Tool({"log", job_.journals(), "--kind", "request-seen"}).out.find("request 3"), std::string::npos);
  Stop(job_);
  container.join();
}

// A container that is gone: its rank was killed with it, and no process of that number is anywhere.
TEST_F(Named, a_rank_of_a_pid_namespace_that_is_gone_is_no_living_job) {
  job::Environment gone = job_.environment;
  gone["RANK"] = "0";
  gone["WORLD"] = "1";
  gone["PRELOAD"] = AMEM_LIBRARY_FILE;
  job::RunProgram({"/usr/bin/unshare", "-rpf", "--mount-proc", "/bin/sh", "-c",
                   "LD_PRELOAD=$PRELOAD \"$0\" cuda load malloc do=KILL; exit 0", AMEM_JOB_RANK},
                  gone, job_.directory());
  const auto sessions = ListSessions(job_.journals());
  ASSERT_TRUE(sessions.ok() && sessions->size() == 1);
  Start({"cuda", "load", "init", "steps=100000,4", "barrier"});
  ASSERT_TRUE(Until([&] {
    return Tool({"ls", "--live", Pid(0)}).status == 0 && Ask({"ls", "--live", Pid(0)}).size() == kRanks;
  }));
  for (const char* const command : {"pause", "resume"}) {
    const Rank ran = Tool({command});
    EXPECT_EQ(ran.status, 0) << ran.out << ran.err;
  }
  const Rank named = Tool({"pause", sessions->front().string()});
  EXPECT_EQ(named.status, 2) << named.out << named.err;
  AllEndWell();
}

TEST_F(Requests, a_program_without_safe_points_is_asked_at_its_next_own_pause) {
  Start({"cuda", "load", "init", "reduce", "barrier", "sleep=700", "pause", "sleep=300", "resume", "reduce", "barrier"});
  ASSERT_TRUE(UntilSaid("reduce:"));
  const json paused = Ask({"pause", "--at-safepoint", "--deadline", "30"});
  for (const json& rank : paused) EXPECT_TRUE(rank["paused_by_program"]) << rank;
  std::this_thread::sleep_for(std::chrono::milliseconds(900));
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(job_.SoFar(rank).Said("resume"), "(not run)") << "the outside holds it";
  Ask({"resume"});
  const auto ranks = job_.Finish(std::chrono::milliseconds(60'000));
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.status, 0) << rank.err;
    EXPECT_EQ(rank.Said("resume"), "0");
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0));
  }
}

TEST_F(Requests, a_rank_that_does_not_come_is_named_and_the_job_runs_on) {
  Start({"cuda", "load", "init", "reduce", "barrier", "1:sleep=2500", "steps=60,2", "barrier"});
  ASSERT_TRUE(UntilSaid("barrier:"));
  const Rank late = Tool({"pause", "--at-safepoint", "--deadline", "1"});
  EXPECT_EQ(late.status, 3) << late.out << late.err;
  EXPECT_NE(late.err.find("not all ranks came to safe point 1 within 1.0 s, and nothing was paused"), std::string::npos)
      << late.err;
  EXPECT_NE(late.err.find("rank 1: runs, and has not called amem.safepoint()"), std::string::npos) << late.err;
  EXPECT_NE(late.err.find("last in its journal:"), std::string::npos) << late.err;
  AllEndWell();
}

TEST_F(Requests, a_failed_pause_is_told_with_its_reason_and_a_second_try_works) {
  Start({"cuda", "load", "init", "tags", "barrier", "1:at=Unmap,1,fail=999", "steps=100000,4", "read tags", "barrier"});
  ASSERT_TRUE(UntilSteps(5));
  const Rank failed = Tool({"pause", "--tags"});
  EXPECT_EQ(failed.status, 3) << failed.out << failed.err;
  EXPECT_NE(failed.err.find("rank "), std::string::npos) << failed.err;
  EXPECT_NE(failed.err.find("999"), std::string::npos) << failed.err;
  for (const json& rank : Ask({"pause", "--tags"})) EXPECT_EQ(rank["phase"], "paused") << rank;
  Ask({"resume"});
  AllEndWell();
}

TEST_F(Requests, a_job_whose_pause_could_not_be_undone_is_not_called_paused) {
  job_.environment["AMEM_TIMEOUT_MS"] = "500";
  Start({"cuda", "load", "init", "reduce", "barrier", "1:at=Unmap|Map|SetAccess,2,fail-all=999", "steps=100000,4"});
  ASSERT_TRUE(UntilSteps(5));
  const Rank failed = Tool({"pause"});
  EXPECT_EQ(failed.status, 3) << failed.out << failed.err;
  const Rank again = Tool({"pause"});  // which waits until what the first left under way has ended
  EXPECT_EQ(again.status, 3) << again.out << again.err;
  EXPECT_NE(again.err.find("rank 1: pause of tag nccl"), std::string::npos) << again.out << again.err;
  EXPECT_EQ(again.out, "");
  for (const pid_t rank : job_.processes()) ::kill(rank, SIGKILL);
  job_.Finish(std::chrono::milliseconds(60'000));
}

TEST_F(Requests, a_resume_that_fails_at_one_tag_loses_nothing_of_one_that_was_back_and_discards) {
  Start({"cuda", "load", "init", "tags", "barrier", "1:at=Create,2,fail=2", "steps=100000,4", "read tags", "barrier"});
  ASSERT_TRUE(UntilSteps(5));
  Ask({"pause", "--tags"});
  const Rank failed = Tool({"resume"});
  EXPECT_EQ(failed.status, 3) << failed.out << failed.err;
  EXPECT_NE(failed.err.find("tag workspace was paused again"), std::string::npos) << failed.err;
  Ask({"resume"});
  Stop(job_);
  for (const Rank& rank : job_.Finish(std::chrono::milliseconds(60'000)))
    EXPECT_EQ(rank.Said("read tags"), "as written") << rank.err;
}

TEST_F(Requests, a_tag_that_the_program_is_pausing_stays_paused_after_a_request) {
  Start({"cuda", "load", "init", "tags", "barrier", "at=Copy,1,sleep=1500", "pause weights later", "steps=100000,4",
         "bring weights back", "read tags", "barrier"});
  ASSERT_TRUE(UntilSteps(2));
  for (const json& rank : Ask({"pause", "--tags"})) EXPECT_EQ(rank["phase"], "paused") << rank;
  Ask({"resume"});
  Stop(job_);
  for (const Rank& rank : job_.Finish(std::chrono::milliseconds(60'000))) {
    EXPECT_EQ(rank.Said("bring weights back"), "was paused") << rank.err;
    EXPECT_EQ(rank.Said("read tags"), "as written") << rank.err;
  }
}

// The tool is killed before and after each message that it sends, of a pause and of a resume; in each case the job runs on as a
// whole or is paused as a whole, and another tool resumes it. Some of them by day, all with AMEM_MATRIX_STRIDE=1.
TEST_F(Requests, a_tool_that_is_killed_at_any_message_leaves_the_job_whole) {
  Start({"cuda", "load", "init", "tags", "barrier", "steps=1000000,2", "read tags", "barrier"});
  ASSERT_TRUE(UntilSteps(5));
  const char* const set = std::getenv("AMEM_MATRIX_STRIDE");
  const int stride = set != nullptr ? std::max(1, std::atoi(set)) : 4;
  for (const Words& command : {Words{"pause", "--tags"}, Words{"resume"}}) {
    int killed = 0;
    for (int moment = 1;; moment += stride == 1 ? 1 : stride + killed % 2) {
      if (command.front() == "resume") Ask({"pause", "--tags"});
      const Rank ran =
          Tool(command, {{"LD_PRELOAD", AMEM_KILL_AT_MESSAGE}, {"STAND_IN_KILL_AT_MESSAGE", std::to_string(moment)}});
      if (ran.status == 0) break;
      ASSERT_EQ(ran.status, 256 + SIGKILL) << command.front() << " " << moment << ": " << ran.out << ran.err;
      ++killed;
      const Rank resumed = Tool({"resume", "--deadline", "30"});
      ASSERT_EQ(resumed.status, 0) << command.front() << " " << moment << ": " << resumed.out << resumed.err;
      const json then = Ask({"ls", "--live"});
      ASSERT_TRUE(Until([&] {
        const json now = Ask({"ls", "--live"});
        for (std::size_t rank = 0; rank < kRanks; ++rank)
          if (now[rank]["phase"] != "running" || now[rank]["safepoints"] < then[rank]["safepoints"].get<std::uint64_t>() + 2)
            return false;
        return true;
      })) << command.front()
          << " " << moment;
    }
    EXPECT_GE(killed, 5) << command.front();
    Ask({"resume"});
  }
  AllEndWell("steps");
}

TEST_F(Requests, a_rank_that_dies_while_paused_does_not_keep_the_others) {
  Start({"cuda", "load", "init", "reduce", "barrier", "steps=100000,4"});
  ASSERT_TRUE(UntilSteps(5));
  Ask({"pause"});
  ::kill(job_.processes()[2], SIGKILL);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const Rank resumed = Tool({"resume"});
  EXPECT_EQ(resumed.status, 0) << resumed.err;
  for (const json& rank : Ask({"ls", "--live"})) EXPECT_EQ(rank["phase"], "running") << rank;
}

TEST_F(Requests, safe_points_cost_little_and_do_nothing_where_nobody_can_ask) {
  job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const Words commands = {"cuda", "load", "time safepoints", "init", "time safepoints", "fork safepoints", "time safepoints"};
  for (const char* enable : {"1", "0"}) {
    job_.environment["AMEM_ENABLE"] = enable;
    const Rank rank = job_.Run(1, commands).front();
    EXPECT_EQ(rank.status, 0) << rank.err;
    for (int nth = 0; nth < 3; ++nth) {
      EXPECT_LT(std::stod(rank.Said("time safepoints", nth)), 1000.0) << "nanoseconds, on a machine that may be busy";
      RecordProperty(std::string("ns_enabled_") + enable + "_" + std::to_string(nth), rank.Said("time safepoints", nth));
    }
    EXPECT_EQ(rank.Said("fork safepoints"), "0");
  }
}

TEST_F(Requests, a_rank_whose_socket_cannot_be_reached_is_refused_and_nobody_is_asked) {
  job_.environment["AMEM_SOCKET_DIR"] = job_.directory() / "sockets";
  Start({"cuda", "load", "init", "steps=100000,4", "barrier"});
  ASSERT_TRUE(UntilSteps(1)) << "a tool that does not know the directory finds them by their abstract names";
  const std::string before = Tool({"log", job_.journals(), "--kind", "request-seen"}).out;
  const Rank refused = job::RunProgram({"/usr/bin/unshare", "-rn", AMEM_REPLAY, "pause"},
                                       {{"AMEM_JOURNAL_DIR", job_.journals()}, {"AMEM_SOCKET_DIR", job_.directory() / "none"}},
                                       job_.directory());
  if (refused.err.find("unshare") != std::string::npos)
    GTEST_SKIP() << "no network namespace can be made here: " << refused.err;
  EXPECT_EQ(refused.status, 2) << refused.out;
  EXPECT_NE(refused.err.find("takes no requests"), std::string::npos) << refused.err;
  EXPECT_EQ(Tool({"log", job_.journals(), "--kind", "request-seen"}).out, before);
  AllEndWell();
}

TEST_F(Requests, a_program_with_safe_points_is_visible_before_it_has_used_NCCL_or_a_tag) {
  Start({"cuda", "load", "only safe points"});
  ASSERT_TRUE(UntilSteps(3));
  for (const json& rank : Ask({"pause", Pid(0), Pid(1), Pid(2)})) EXPECT_EQ(rank["phase"], "paused") << rank;
  for (const json& rank : Ask({"resume", Pid(0), Pid(1), Pid(2)})) EXPECT_EQ(rank["phase"], "running") << rank;
  Stop(job_);
  for (const Rank& rank : job_.Finish(std::chrono::milliseconds(60'000))) EXPECT_EQ(rank.status, 0) << rank.out << rank.err;
}

}  // namespace
}  // namespace amem
