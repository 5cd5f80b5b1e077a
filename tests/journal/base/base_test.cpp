// What every room stands on: descriptors, files, the fork check, threads without signals, clocks and the hash.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/errand.h"
#include "journal/base/file.h"
#include "journal/base/fork_guard.h"
#include "journal/base/thread.h"
#include "journal/base/unique_fd.h"
#include "statemachine/fnv1a.h"
#include "tests/journal/temporary.h"

namespace amem {
namespace {

TEST(NoMemory, is_a_failure_like_any_other_where_nobody_would_catch_it) {
  EXPECT_EQ(OrNoMemory([]() -> Status { throw std::bad_alloc(); }).code(), Code::kIo);
  EXPECT_EQ(*OrNoMemory([]() -> Result<int> { return 7; }), 7);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  EXPECT_EQ(Errand<Status>([]() -> Status { throw std::bad_alloc(); }).Wait(until)->message(), NoMemory().message());
}

bool IsOpen(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }
UniqueFd OpenNull() { return UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)); }

TEST(UniqueFd, closes_its_descriptor_once_and_only_when_it_still_owns_it) {
  int number = -1;
  {
    const UniqueFd fd = OpenNull();
    number = fd.get();
    EXPECT_TRUE(fd);
    EXPECT_TRUE(IsOpen(number));
  }
  EXPECT_FALSE(IsOpen(number));
  int released = -1;
  {
    UniqueFd fd = OpenNull();
    released = fd.Release();
    EXPECT_FALSE(fd);
  }
  EXPECT_TRUE(IsOpen(released));
  ::close(released);
}

TEST(UniqueFd, a_move_closes_what_the_target_owned_and_leaves_the_source_empty) {
  UniqueFd from = OpenNull(), to = OpenNull();
  const int moved = from.get(), replaced = to.get();
  to = std::move(from);
  EXPECT_EQ(to.get(), moved);
  EXPECT_TRUE(IsOpen(moved));
  EXPECT_FALSE(IsOpen(replaced));
  EXPECT_FALSE(from);  // NOLINT(bugprone-use-after-move): that it is empty is the claim
  UniqueFd& same = to;
  to = std::move(same);
  EXPECT_TRUE(IsOpen(moved)) << "moved onto itself";
}

TEST(File, is_closed_with_its_owner_and_not_before) {
  const test::TemporaryDirectory directory;
  int number = -1;
  {
    auto opened = File::Open(directory.path() / "a", O_RDWR | O_CREAT | O_EXCL);
    ASSERT_TRUE(opened);
    number = opened->fd();
    const File moved = *std::move(opened);
    EXPECT_EQ(moved.fd(), number);
    EXPECT_TRUE(IsOpen(number));
    EXPECT_NE(::fcntl(number, F_GETFD) & FD_CLOEXEC, 0) << "a child of the host must not inherit it";
  }
  EXPECT_FALSE(IsOpen(number));
}

TEST(File, reads_what_was_written_up_to_the_end_of_the_file) {
  const test::TemporaryDirectory directory;
  const auto file = File::Open(directory.path() / "a", O_RDWR | O_CREAT | O_EXCL);
  ASSERT_TRUE(file);
  ASSERT_TRUE(file->Write("0123456789").ok());
  EXPECT_EQ(*file->Size(), Bytes{10});
  std::string into(8, '.');
  EXPECT_EQ(*file->ReadAt(6, std::as_writable_bytes(std::span(into))), 4U);
  EXPECT_EQ(into, "6789....");
  EXPECT_EQ(ReadSmallFile(directory.path() / "a", 3), "012");
  EXPECT_EQ(ReadSmallFile(directory.path() / "missing"), "");
}

TEST(File, only_a_regular_file_is_read_and_a_link_only_where_its_user_named_it) {
  const test::TemporaryDirectory directory;
  std::ofstream(directory.path() / "file") << "first\nsecond\n";
  std::filesystem::create_symlink(directory.path() / "file", directory.path() / "link");
  ASSERT_EQ(::mkfifo((directory.path() / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(FirstLineOf(directory.path() / "file"), "first");
  EXPECT_EQ(ReadSmallFile(directory.path() / "link"), "");
  EXPECT_TRUE(File::OpenToRead(directory.path() / "link", File::Links::kFollowed).ok());
  for (const char* other : {"pipe", ".", "/dev/null"})
    EXPECT_EQ(File::OpenToRead(directory.path() / other, File::Links::kFollowed).status().code(), Code::kInvalid) << other;
  EXPECT_EQ(ReadSmallFile(directory.path() / "pipe"), "") << "and waits for nobody";
}

TEST(File, whoever_may_not_read_is_not_told_to_make_it_writable) {
  for (const char* const doing : {"list sessions in", "read"}) {
    const std::string text = SystemFailure(doing, "/a/b", EACCES).message();
    EXPECT_EQ(text.find("writable"), std::string::npos) << text;
    EXPECT_NE(text.find("run this as that user"), std::string::npos) << text;
  }
  EXPECT_NE(SystemFailure("create", "/a/b", EACCES).message().find("make it writable"), std::string::npos);
}

TEST(File, says_what_failed_on_which_path_and_what_to_do) {
  const auto missing = File::Open("/nonexistent/file", O_RDONLY);
  EXPECT_EQ(missing.status().code(), Code::kNotFound);
  EXPECT_EQ(missing.status().message(), "open /nonexistent/file: No such file or directory (errno 2)");
  const Status full = SystemFailure("write", "/a/b", ENOSPC);
  EXPECT_EQ(full.code(), Code::kIo);
  EXPECT_NE(full.message().find("AMEM_JOURNAL_DIR"), std::string::npos) << full.message();
}

TEST(ForkGuard, tells_a_child_from_the_process_that_made_it_and_a_grandchild_too) {
  const ForkGuard guard;
  EXPECT_FALSE(guard.InChild());
  const pid_t child = fork();
  if (child == 0) {
    if (!guard.InChild()) _exit(1);
    const ForkGuard own;
    if (own.InChild()) _exit(2);
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(guard.InChild() && own.InChild() ? 0 : 3);
    int status = 0;
    waitpid(grandchild, &status, 0);
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 4);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_FALSE(guard.InChild()) << "the parent's page was wiped";
}

sigset_t MaskOfThisThread() {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return mask;
}

TEST(StartThread, blocks_every_signal_in_the_new_thread_and_leaves_the_callers_mask_alone) {
  sigset_t mine;
  sigemptyset(&mine);
  sigaddset(&mine, SIGUSR2);
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, &mine, &before);
  std::promise<std::pair<sigset_t, std::string>> seen;
  auto started = StartThread("amem-test", [&] {
    std::array<char, 16> name{};
    pthread_getname_np(pthread_self(), name.data(), name.size());
    // The name is given by the thread that started this one, perhaps a moment later.
    for (int i = 0; i < 1000 && std::strcmp(name.data(), "amem-test") != 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      pthread_getname_np(pthread_self(), name.data(), name.size());
    }
    seen.set_value({MaskOfThisThread(), name.data()});
  });
  ASSERT_TRUE(started) << started.status().message();
  const auto [mask, name] = seen.get_future().get();
  started->join();
  EXPECT_EQ(name, "amem-test");
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD, SIGALRM}) EXPECT_TRUE(sigismember(&mask, signal)) << signal;
  const sigset_t after = MaskOfThisThread();
  EXPECT_TRUE(sigismember(&after, SIGUSR2));
  EXPECT_FALSE(sigismember(&after, SIGINT));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TEST(Clock, is_the_steady_clock_and_the_date) {
  const auto steady = [] { return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()); };
  const std::uint64_t before = steady(), now = MonotonicNs(), after = steady();
  EXPECT_LE(before, now);
  EXPECT_LE(now, after);
  const auto seconds = static_cast<std::uint64_t>(::time(nullptr));
  EXPECT_NEAR(static_cast<double>(RealtimeNs() / 1'000'000'000), static_cast<double>(seconds), 2.0);
}

std::uint64_t HashOf(std::string_view text) {
  Fnv1a hash;
  hash.Add(std::as_bytes(std::span(text)));
  return hash.value();
}

TEST(Fnv1a, has_the_published_values) {
  EXPECT_EQ(HashOf(""), 0xcbf29ce484222325ULL);
  EXPECT_EQ(HashOf("a"), 0xaf63dc4c8601ec8cULL);
  EXPECT_EQ(HashOf("foobar"), 0x85944171f73967e8ULL);
}

TEST(Fnv1a, takes_a_word_as_its_bytes_from_the_lowest) {
  Fnv1a words, bytes;
  words.Add(std::uint64_t{0x6867666564636261ULL});
  bytes.Add(std::as_bytes(std::span(std::string_view("abcdefgh"))));
  EXPECT_EQ(words.value(), bytes.value());
  Fnv1a other(1);
  other.AddByte(0);
  EXPECT_EQ(other.value(), 0x100000001b3ULL);
}

}  // namespace
}  // namespace amem
