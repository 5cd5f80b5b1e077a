#include "journal/base/process_sight.h"

#include <gtest/gtest.h>
#include <link.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <future>
#include <thread>

#include "journal/base/unique_fd.h"
#include "tests/in_thread.h"
#include "tests/journal/base/no_descriptors.h"

namespace amem {
namespace {

// A child that does `work` and is looked at meanwhile; killed at the end.
class Watched {
 public:
  explicit Watched(const std::function<int()>& work) : pid_(::fork()) {
    if (pid_ == 0) ::_exit(work());
    process_.Reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  }
  ~Watched() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] int process() const { return process_.get(); }
  [[nodiscard]] Sight See() const { return SeeProcess(pid_, process_.get()); }
  [[nodiscard]] Sight Await(const std::string& state) const {
    for (int i = 0; i < 5000 && See().state != state; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return See();
  }

 private:
  const pid_t pid_;
  UniqueFd process_;
};

int SleepOn() {
  while (true) ::sleep(1000);
}

TEST(SeeProcess, a_sleeping_process_is_told_from_a_stopped_one) {
  const Watched child(&SleepOn);
  EXPECT_EQ(child.Await("sleeping").state, "sleeping");
  ::kill(child.pid(), SIGSTOP);
  const Sight stopped = child.Await("stopped");
  EXPECT_EQ(stopped.state, "stopped");
  EXPECT_EQ(stopped.where, "");
  EXPECT_EQ(stopped.exit_code, -1);
  ::kill(child.pid(), SIGCONT);
  EXPECT_EQ(child.Await("sleeping").state, "sleeping");
}

TEST(SeeProcess, a_thread_of_it_is_seen_with_what_it_waits_for) {
  const Watched child(&SleepOn);
  const Sight process = child.Await("sleeping"), thread = SeeThread(child.pid(), child.pid(), child.process());
  EXPECT_EQ(thread.state, "sleeping");
  EXPECT_TRUE(thread.where.starts_with(process.where)) << thread.where << " of " << process.where;
  if (std::ifstream("/proc/self/stack").peek() != std::ifstream::traits_type::eof()) {
    EXPECT_NE(thread.where.find("sleep, "), std::string::npos) << thread.where;
  }
  EXPECT_EQ(SeeThread(child.pid(), ::getpid(), child.process()).state, "unknown") << "that thread is another process's";
  EXPECT_EQ(SeeThread(child.pid(), child.pid(), -1).state, "unknown");
}

TEST(SeeProcess, a_running_process_is_seen_running) {
  const Watched child([]() -> int {
    for (std::atomic<int> turns = 0;; ++turns) {
    }
  });
  EXPECT_EQ(child.Await("running").state, "running");
}

TEST(SeeProcess, what_has_ended_shows_its_exit_code_until_it_is_reaped) {
  const Watched exited([] { return 3; });
  EXPECT_EQ(exited.Await("zombie").exit_code, 3);
  const Watched killed(&SleepOn);
  ::kill(killed.pid(), SIGKILL);
  EXPECT_EQ(killed.Await("zombie").exit_code, 128 + SIGKILL);
  ::waitpid(killed.pid(), nullptr, 0);
  const Sight gone = killed.See();
  EXPECT_EQ(gone.state, "gone");
  EXPECT_EQ(gone.exit_code, -1);
}

// Root may look into every process, so another user asks; also where these tests are root's.
TEST(SeeProcess, what_has_ended_shows_its_exit_code_to_the_user_whose_it_was) {
  const Watched asks([] {
    constexpr unsigned kNobody = 65534;
    if (::geteuid() == 0 && (::setresgid(kNobody, kNobody, kNobody) != 0 || ::setresuid(kNobody, kNobody, kNobody) != 0))
      return 1;
    ::prctl(PR_SET_DUMPABLE, 1);  // as it is where the user did not change; without, its own /proc is root's
    const Watched exited([] { return 3; });
    return exited.Await("zombie").exit_code == 3 ? 0 : 2;
  });
  EXPECT_EQ(asks.Await("zombie").exit_code, 0);
}

TEST(SeeProcess, another_process_under_that_number_is_never_described) {
  const Watched child(&SleepOn);
  EXPECT_EQ(SeeProcess(::getpid(), child.process()).state, "unknown") << "the number is not that of the pidfd's process";
  EXPECT_EQ(SeeProcess(child.pid(), -1).state, "unknown") << "without a pidfd the number may be anybody's";
  EXPECT_EQ(SeeProcess(0, child.process()).state, "unknown") << "it lives in another pid namespace";
}

TEST(SeeOwnThreads, the_calling_one_comes_first_then_the_main_one_and_no_more_than_were_asked_for) {
  std::atomic<bool> end = false;
  std::atomic<int> named = 0;
  std::vector<std::thread> others;
  for (int i = 0; i < 3; ++i) {
    others.emplace_back([&] {
      ::pthread_setname_np(::pthread_self(), "seen-thread");
      ++named;
      while (!end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  while (named < 3) std::this_thread::yield();
  std::vector<ThreadSight> all, two;
  pid_t asking = 0;
  std::thread([&] {
    asking = static_cast<pid_t>(::syscall(SYS_gettid));
    all = SeeOwnThreads(100);
    two = SeeOwnThreads(2);
  }).join();
  end = true;
  for (std::thread& other : others) other.join();
  ASSERT_GE(all.size(), 5u);
  EXPECT_EQ(all[0].thread, asking);
  EXPECT_EQ(all[0].sight.state, "running");
  EXPECT_EQ(all[1].thread, ::getpid());
  EXPECT_EQ(std::ranges::count(all, "seen-thread", &ThreadSight::name), 3);
  EXPECT_EQ(two.size(), 2u);
}

TEST(OwnProgram, is_named_without_folders_options_and_code) {
  using namespace std::string_view_literals;
  EXPECT_EQ(ProgramIn("/usr/bin/python3\0-u\0/home/ann/train.py\0--token\0secret\0"sv), "python3 train.py");
  EXPECT_EQ(ProgramIn("python3\0-c\0key = 'secret'\0"sv), "python3 -c");
  EXPECT_EQ(ProgramIn("./bench\0"sv), "bench");
  EXPECT_EQ(ProgramIn(""sv), "");
  EXPECT_EQ(ProgramIn(std::string(100, 'x')).size(), 64u);
  EXPECT_EQ(OwnProgram().substr(0, 12), "journal_test") << "as long as it is a test of this program";
}

// A thread that hangs in dlopen holds the loader's lock, as this one does in the callback.
TEST(OwnStack, does_not_wait_for_the_lock_of_the_loader) {
  std::promise<void> held, release;
  std::shared_future<void> released = release.get_future().share();
  std::pair<std::promise<void>*, std::shared_future<void>*> shared{&held, &released};
  std::thread holder([&shared] {
    ::dl_iterate_phdr(
        [](dl_phdr_info*, std::size_t, void* argument) {
          auto& [is_held, until] = *static_cast<decltype(shared)*>(argument);
          is_held->set_value();
          until->wait();
          return 1;
        },
        &shared);
  });
  held.get_future().wait();
  auto stack = test::InThread([] { return OwnStack(64); });
  const bool came = stack.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  release.set_value();
  holder.join();
  EXPECT_TRUE(came);
  stack.wait();
}

TEST(OwnStack, names_the_program_and_is_bounded) {
  const std::vector<std::string> stack = OwnStack(64);
  ASSERT_GE(stack.size(), 3u);
  EXPECT_TRUE(std::ranges::any_of(stack, [](const std::string& frame) { return frame.starts_with("exe+0x"); })) << stack[0];
  EXPECT_EQ(OwnStack(2).size(), 2u);
}

TEST(ProcessStatTest, a_name_may_hold_what_separates_fields) {
  const Watched child([] {
    ::prctl(PR_SET_NAME, ") Z 1 (x");
    ::pause();
    return 0;
  });
  ASSERT_EQ(child.Await("sleeping").state, "sleeping");
  const auto stat = ReadProcessStat(child.pid());
  ASSERT_TRUE(stat);
  EXPECT_EQ(stat->name, ") Z 1 (x");
  EXPECT_EQ(stat->state, 'S');
  EXPECT_EQ(stat->parent, ::getpid());
  EXPECT_GE(stat->start_ticks, StartTicks(::getpid()));
  EXPECT_EQ(StartTicks(child.pid()), stat->start_ticks);
}

// ---- whether a process lives

using Is = ProcessLife::Is;

TEST(LifeOf, what_cannot_be_seen_has_not_ended_and_says_why) {
  const Watched child(&SleepOn);
  const ProcessIdentity who{child.pid(), StartTicks(child.pid())};
  ASSERT_NE(who.start_ticks, 0U);
  EXPECT_EQ(LifeOf(who).is, Is::kAlive);
  const test::NoDescriptors none;
  const ProcessLife unseen = LifeOf(who);
  EXPECT_EQ(unseen.is, Is::kUnknown);
  EXPECT_NE(unseen.why.find("/stat: Too many open files"), std::string::npos) << unseen.why;
  EXPECT_EQ(LifeOf(who, child.process()).is, Is::kAlive) << "a pidfd needs no other descriptor";
  ::kill(child.pid(), SIGKILL);
  ::siginfo_t ended{};
  ::waitid(P_PID, static_cast<id_t>(child.pid()), &ended, WEXITED | WNOWAIT);
  EXPECT_EQ(LifeOf(who).is, Is::kUnknown) << "its number is taken until it has been waited for";
  EXPECT_EQ(LifeOf(who, child.process()).is, Is::kEnded);
  ::waitpid(child.pid(), nullptr, 0);
  EXPECT_EQ(LifeOf(who).is, Is::kEnded) << "nobody has its number";
}

TEST(LifeOf, a_process_is_told_by_its_start_and_namespace) {
  const ProcessIdentity self = OwnProcess();
  EXPECT_EQ(LifeOf(self).is, Is::kAlive);
  EXPECT_EQ(LifeOf({self.pid, self.start_ticks}).is, Is::kAlive);
  EXPECT_EQ(LifeOf({self.pid, self.start_ticks + 1}).is, Is::kEnded) << "another process has its number";
  EXPECT_EQ(LifeOf({self.pid, self.start_ticks + 1, self.pid_namespace + 1}).is, Is::kUnknown);
  EXPECT_EQ(LifeOf({self.pid, 0}).is, Is::kUnknown) << "its start was not seen";
  EXPECT_EQ(LifeOf({}).is, Is::kUnknown);
  constexpr pid_t kNobody = 1 << 30;
  EXPECT_EQ(LifeOf({kNobody, 0}).is, Is::kEnded);
  const Watched ended([] { return 3; });
  const std::uint64_t start = ReadProcessStat(ended.pid())->start_ticks;
  ASSERT_EQ(ended.Await("zombie").exit_code, 3);
  EXPECT_EQ(LifeOf({ended.pid(), start}).is, Is::kEnded);
}

// As a program that leaves main by pthread_exit: the kernel shows its first thread as a zombie.
TEST(LifeOf, a_process_lives_on_when_its_first_thread_has_ended) {
  const Watched child([]() -> int {
    std::thread(&SleepOn).detach();
    ::syscall(SYS_exit, 0);  // this thread alone
    return 0;
  });
  const auto first = [&] {
    return ReadProcessStat("/proc/" + std::to_string(child.pid()) + "/task/" + std::to_string(child.pid()));
  };
  for (int i = 0; i < 5000 && !first()->ended(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_TRUE(first()->ended());
  EXPECT_EQ(child.Await("sleeping").state, "sleeping");
  EXPECT_NE(StartTicks(child.pid()), 0U);
  EXPECT_EQ(LifeOf({child.pid(), first()->start_ticks}).is, Is::kAlive);
  ::kill(child.pid(), SIGKILL);
  EXPECT_EQ(child.Await("zombie").state, "zombie");
}

TEST(ProcessStatTest, a_process_that_waits_for_its_parent_has_no_start) {
  const Watched child([] { return 3; });
  while (!ReadProcessStat(child.pid())->ended()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(StartTicks(child.pid()), 0U);
  constexpr pid_t kNobody = 1 << 30;
  EXPECT_FALSE(ReadProcessStat(kNobody));
  EXPECT_EQ(StartTicks(kNobody), 0U);
}

}  // namespace
}  // namespace amem
