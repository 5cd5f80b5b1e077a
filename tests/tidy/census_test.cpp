// The census (tests/census.cpp) finds what a test leaves, and nothing else.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "journal/base/mutex.h"

namespace {

// Run by the tests below in a process of their own.
TEST(Left, DISABLED_open) { ASSERT_GE(::open("/dev/null", O_RDONLY | O_CLOEXEC), 0); }
TEST(Left, DISABLED_running) {
  std::thread([] { std::this_thread::sleep_for(std::chrono::minutes(1)); }).detach();
}
TEST(Left, DISABLED_mapped) {
  const int fd = ::memfd_create("a board", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(fd, 4096), 0);
  ASSERT_NE(::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0), MAP_FAILED);
  ::close(fd);
}
TEST(Left, DISABLED_locked) {
  static amem::Mutex mutex{amem::LockRank::kLedger};
  mutex.lock();
}
TEST(Left, DISABLED_nothing) {
  amem::Mutex mutex{amem::LockRank::kLedger};
  const amem::MutexLock lock(mutex);
  ::close(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  std::thread([] {}).join();
}

struct Ran {
  int code = 0;
  std::string output;
};
Ran RunAlone(const std::string& test) {
  // Where this runs as a part of all tests, the other process is no part.
  const std::string command = "env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX AMEM_CENSUS_MS=200 /proc/" +
                              std::to_string(::getpid()) +
                              "/exe --gtest_also_run_disabled_tests --gtest_filter=Left.DISABLED_" + test + " 2>&1";
  Ran ran;
  std::FILE* const pipe = ::popen(command.c_str(), "re");
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) ran.output += static_cast<char>(c);
  ran.code = WEXITSTATUS(::pclose(pipe));
  return ran;
}

TEST(Census, a_descriptor_that_is_left_open_fails_its_test_and_is_named) {
  const Ran ran = RunAlone("open");
  EXPECT_EQ(ran.code, 1) << ran.output;
  EXPECT_NE(ran.output.find("is left open: /dev/null"), std::string::npos) << ran.output;
}

TEST(Census, a_thread_that_is_left_running_fails_its_test) {
  const Ran ran = RunAlone("running");
  EXPECT_EQ(ran.code, 1) << ran.output;
  EXPECT_NE(ran.output.find(" is left running"), std::string::npos) << ran.output;
}

TEST(Census, shared_memory_that_is_left_mapped_fails_its_test_and_is_named) {
  const Ran ran = RunAlone("mapped");
  EXPECT_EQ(ran.code, 1) << ran.output;
  EXPECT_NE(ran.output.find("/memfd:a board"), std::string::npos) << ran.output;
}

// Only builds that check the order of locks know which are held.
TEST(Census, a_lock_that_is_left_held_fails_its_test_and_is_named) {
  const Ran ran = RunAlone("locked");
  EXPECT_EQ(ran.code, amem::lock_order::kChecked ? 1 : 0) << ran.output;
  EXPECT_EQ(ran.output.find("\"ledger\"") != std::string::npos, amem::lock_order::kChecked) << ran.output;
}

TEST(Census, what_was_closed_and_joined_is_not_found) {
  const Ran ran = RunAlone("nothing");
  EXPECT_EQ(ran.code, 0) << ran.output;
}

}  // namespace
