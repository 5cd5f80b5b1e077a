#include "ncclpatch/runtime/on_failure.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

namespace amem {
namespace {

namespace fs = std::filesystem;

class OnFailureTest : public ::testing::Test {
 protected:
  OnFailureTest() {
    char name[] = "/tmp/amem-on-failure-test-XXXXXX";
    directory_ = ::mkdtemp(name);
    fs::create_directory(directory_ / "journal");
  }
  ~OnFailureTest() override {
    siginfo_t one;
    for (int i = 0; i < 500 && ::waitid(P_ALL, 0, &one, WEXITED | WNOHANG | WNOWAIT) == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // the next test is to find none of this one's children
    std::error_code ignored;
    fs::remove_all(directory_, ignored);
  }
  fs::path Script(const std::string& name, const std::string& text) {
    const fs::path path = directory_ / name;
    std::ofstream(path) << "#!/bin/sh\n" << text;
    fs::permissions(path, fs::perms::owner_all);
    return path;
  }
  // Runs a command that writes to the file "told", and waits for that. It begins only after the call has come back.
  std::string Run(const std::string& command, const fs::path& replay, const char* const* environment = nullptr) {
    OnFailure on_failure;
    const fs::path go = directory_ / "go";
    EXPECT_EQ(::mkfifo(go.c_str(), 0600), 0);
    on_failure.Configure("read -r _ <" + go.string() + "; exec >" + (directory_ / "part").string() + "; " + command + "; mv " +
                             (directory_ / "part").string() + " " + told().string(),
                         replay, PackDirectory(directory_ / "journal"), environment);
    FailureReport report{"rank 2 did 'not' come", directory_ / "journal", {directory_ / "journal" / "0001"}, "pack-1"};
    EXPECT_EQ(on_failure.Run(report), "");
    std::ofstream(go) << "\n";  // opens once the command reads
    for (int i = 0; i < 1500 && !fs::exists(told()); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::ostringstream text;
    text << std::ifstream(told()).rdbuf();
    return text.str();
  }
  [[nodiscard]] fs::path told() const { return directory_ / "told"; }

  fs::path directory_;
};

constexpr const char* kPath = "PATH=/usr/local/bin:/usr/bin:/bin";

TEST_F(OnFailureTest, the_command_gets_the_pack_the_message_and_the_journal_and_no_preload) {
  const char* const environment[] = {kPath, "LD_PRELOAD=/no/such/libamem_nccl.so", "AMEM_ON_FAILURE=again", "KEPT=yes",
                                     nullptr};
  const fs::path replay = Script("replay", "[ \"$1\" = pack ] && [ \"$3\" = -o ] && echo \"$2 [$LD_PRELOAD]\" >\"$4\"\n");
  const std::string told =
      Run("echo \"$AMEM_FAILURE_PACK|$AMEM_FAILURE_MESSAGE|$AMEM_FAILURE_JOURNAL|$LD_PRELOAD|$AMEM_ON_FAILURE|$KEPT\"; cat "
          "\"$AMEM_FAILURE_PACK\"",
          replay, environment);
  const std::string journal = directory_ / "journal";
  EXPECT_EQ(told, journal + "-failures/pack-1.amem|rank 2 did 'not' come|" + journal + "|||yes\n" + journal + "/0001 []\n");
}

TEST_F(OnFailureTest, without_a_pack_the_command_gets_the_journals) {
  const char* const environment[] = {kPath, nullptr};
  const fs::path broken = Script("replay", "exit 1\n");
  EXPECT_EQ(Run("echo \"$AMEM_FAILURE_PACK\"", broken, environment), (directory_ / "journal").string() + "\n");
}

TEST_F(OnFailureTest, the_command_is_apart_from_the_jobs_process_group_and_is_reaped) {
  const char* const environment[] = {kPath, nullptr};
  const std::string told =
      Run("ps -o pgid= -p $$ 2>/dev/null || cut -d' ' -f5 /proc/$$/stat", Script("replay", "exit 1\n"), environment);
  EXPECT_NE(std::atoi(told.c_str()), ::getpgrp());
  int status = 0;
  for (int i = 0; i < 500 && ::waitpid(-1, &status, WNOHANG) == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(::waitpid(-1, &status, WNOHANG), -1) << "there are no children left, neither living nor dead";
}

TEST_F(OnFailureTest, no_more_than_sixteen_packs_are_kept) {
  const char* const environment[] = {kPath, nullptr};
  const fs::path packs = PackDirectory(directory_ / "journal");
  fs::create_directory(packs);
  for (int i = 0; i < 30; ++i) std::ofstream(packs / ("old-" + std::to_string(i) + ".amem")) << "x";
  (void)Run("true", Script("replay", "echo new >\"$4\"\n"), environment);
  EXPECT_EQ(std::distance(fs::directory_iterator(packs), fs::directory_iterator()), 16);
  EXPECT_TRUE(fs::exists(packs / "pack-1.amem"));
}

TEST_F(OnFailureTest, nothing_of_the_current_directory_is_run_or_loaded) {
  const fs::path before = fs::current_path(), here = directory_ / "here", honest = directory_ / "honest";
  for (const fs::path& folder : {here, honest}) {
    fs::create_directory(folder);
    const fs::path tool = Script(folder.filename() / "amem-replay", "echo \"${0%/*} [$LD_LIBRARY_PATH]\" >\"$4\"\n");
  }
  Script("here/sleep", "touch " + (directory_ / "caught").string() + "\n");
  fs::current_path(here);
  const std::string path = "PATH=:." + std::string(kPath).substr(5) + "::here:" + honest.string() + ":";
  const char* const environment[] = {path.c_str(), "LD_LIBRARY_PATH=:/opt/lib:lib:", nullptr};
  const std::string told = Run("cat \"$AMEM_FAILURE_PACK\"; echo \"$PATH\"", "amem-replay", environment);
  fs::current_path(before);
  EXPECT_EQ(told, honest.string() + " [/opt/lib]\n/usr/bin:/bin:" + honest.string() + "\n");
  EXPECT_FALSE(fs::exists(directory_ / "caught"));
}

TEST_F(OnFailureTest, a_relative_tool_is_the_one_that_was_meant_when_the_job_began) {
  const fs::path before = fs::current_path();
  for (const std::string name : {"first", "second"}) {
    fs::create_directory(directory_ / name);
    Script(name + "/tool", "echo " + name + " >\"$4\"\n");
  }
  const char* const environment[] = {kPath, nullptr};
  OnFailure on_failure;
  fs::current_path(directory_ / "first");
  on_failure.Configure("mv \"$AMEM_FAILURE_PACK\" " + told().string(), "./tool", PackDirectory(directory_ / "journal"),
                       environment);
  fs::current_path(directory_ / "second");
  EXPECT_EQ(on_failure.Run({"", directory_ / "journal", {directory_ / "journal" / "0001"}, "pack-1"}), "");
  for (int i = 0; i < 1500 && !fs::exists(told()); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  fs::current_path(before);
  std::ostringstream text;
  text << std::ifstream(told()).rdbuf();
  EXPECT_EQ(text.str(), "first\n");
}

TEST(OnFailure, without_a_command_nothing_is_run) {
  OnFailure on_failure;
  on_failure.Configure("", "", "/no/such/place", nullptr);
  EXPECT_EQ(on_failure.Run({"message", "/no/such/journal", {}, "name"}), "");
  int status = 0;
  EXPECT_EQ(::waitpid(-1, &status, WNOHANG), -1);
}

TEST(WhereToReadOn, ends_with_a_command_that_a_shell_takes) {
  EXPECT_EQ(WhereToReadOn("/tmp/amem-0/journal/00ff"),
            "; journal /tmp/amem-0/journal/00ff; to see why: amem-replay why /tmp/amem-0/journal");
  EXPECT_EQ(WhereToReadOn("/data/it's here/00ff"),
            "; journal /data/it's here/00ff; to see why: amem-replay why '/data/it'\\''s here'");
}

TEST(PackDirectory, lies_beside_the_journals) {
  EXPECT_EQ(PackDirectory("/tmp/amem-0/journal"), "/tmp/amem-0/journal-failures");
  EXPECT_EQ(PackDirectory("/tmp/amem-0/journal/"), "/tmp/amem-0/journal-failures");
}

}  // namespace
}  // namespace amem
