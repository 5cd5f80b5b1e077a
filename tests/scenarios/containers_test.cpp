// Ranks in containers: each in a pid, mount, IPC and UTS namespace of its own, where all of them have the same pid. They share
// either the directory of the sockets, and no network, or the network, and no directory of sockets; with pidfds and without,
// and with locks that the kernel does not mark, as gVisor's. /proc is the host's, so that what a rank reads there about a pid
// is of another process, or a new one of its own, in which the pids of other ranks are not.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "tests/scenarios/rank_checks.h"
#include "tests/scenarios/rank_process.h"

namespace amem::test {
namespace {

constexpr std::uint64_t kFilled = 5;
constexpr int kRanks = 3, kVictim = 1;
constexpr int kOthers = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS;

enum class Common : std::uint8_t { kSocketDirectory, kNetwork };
struct Container {
  Common common;
  bool pidfds, own_proc = false, robust_locks = true;
};

std::string NameOf(const ::testing::TestParamInfo<Container>& info) {
  return std::string(info.param.common == Common::kNetwork ? "a_network" : "a_socket_directory") +
         (info.param.pidfds ? "" : "_without_pidfds") + (info.param.own_proc ? "_with_a_proc_of_its_own" : "") +
         (info.param.robust_locks ? "" : "_without_robust_locks");
}

// As a kernel before 5.3 (pidfd_open), gVisor (set_robust_list), or a container's rules.
bool Deny(std::uint32_t call) {
  sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{std::size(filter), filter};
  ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  return ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}
bool Apply(const Container& rules) {
  if (!rules.pidfds && !(Deny(SYS_pidfd_open) && ::syscall(SYS_pidfd_open, ::getpid(), 0) < 0)) return false;
  return rules.robust_locks || Deny(SYS_set_robust_list);  // of threads that are still to begin
}

// Ends as that child did.
[[noreturn]] void EndAs(pid_t child) {
  int status = 0;
  while (::waitpid(child, &status, 0) != child) {
  }
  if (WIFSIGNALED(status)) ::raise(WTERMSIG(status));  // which process 1 of a namespace does not obey
  ::_exit(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
}

// A child that ends with this process, which waits for it. Returns in the child.
void BecomeChild() {
  const pid_t child = ::fork();
  if (child < 0) ::_exit(7);
  if (child > 0) EndAs(child);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
}

// The rank is process 2, because process 1 obeys no signal of its own.
bool Enter(const Container& container, const std::filesystem::path& directory) {
  const bool network_too = container.common == Common::kSocketDirectory;
  if (::unshare(kOthers | (network_too ? CLONE_NEWNET : 0)) != 0) return false;
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
  const auto sockets = directory / "sockets";
  if (!network_too && ::mount("tmpfs", sockets.c_str(), "tmpfs", 0, "mode=700") != 0) return false;
  BecomeChild();
  if (container.own_proc && ::mount("proc", "/proc", "proc", 0, nullptr) != 0) return false;
  if (!Apply(container)) return false;
  BecomeChild();
  return true;
}

bool MayMakeContainers() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::unshare(kOthers | CLONE_NEWNET) == 0 ? 0 : 1);
  int status = 0;
  return ::waitpid(child, &status, 0) == child && status == 0;
}

pid_t ChildOf(pid_t parent) {
  std::ifstream children("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) + "/children");
  pid_t child = 0;
  children >> child;
  return child;
}

class Containers : public ::testing::TestWithParam<Container> {
 protected:
  void SetUp() override {
    if (!MayMakeContainers()) GTEST_SKIP() << "this user may not make namespaces";
    ASSERT_EQ(::unshare(CLONE_NEWNET), 0) << "other jobs with the same sessions have a network of their own";
  }
  [[nodiscard]] static RankProcessesIn Here() {
    return [](const std::filesystem::path& directory) { return Enter(GetParam(), directory); };
  }
  static pid_t ProcessOf(const RankProcesses& job, int rank) { return ChildOf(ChildOf(job.pid(rank))); }
  static void Cycle(RankProcesses& job, const std::string& when) {
    AllOk(job, {.op = Op::kPause}, "pause " + when);
    AllOk(job, {.op = Op::kResume}, "resume " + when);
    AllOk(job, {.op = Op::kCheck, .version = kFilled}, "check " + when);
  }
};

TEST_P(Containers, pause_and_resume_together) {
  RankProcesses job(kRanks, Layout::kDirect, kPatienceMs, false, false, LibraryScope::kNccl, Here());
  AllOk(job, {.op = Op::kFill, .version = kFilled}, "fill");
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_GT(ProcessOf(job, rank), 0);
  AllOk(job, {.op = Op::kPause}, "pause");
  // The simulator counts references by /proc, and keeps memory that processes out of its sight may have.
  for (int device = 0; device < kRanks && !GetParam().own_proc; ++device) ExpectInUse(job, device, 0, "paused");
  AllOk(job, {.op = Op::kResume}, "resume");
  AllOk(job, {.op = Op::kCheck, .version = kFilled}, "check");
  Cycle(job, "again");
}

TEST_P(Containers, go_on_without_one_that_is_killed_in_a_pause_and_name_it) {
  RankProcesses job(kRanks, Layout::kDirect, kPatienceMs, false, false, LibraryScope::kNccl, Here());
  AllOk(job, {.op = Op::kFill, .version = kFilled}, "fill");
  job.Do(kVictim, {.op = Op::kArm, .fault = Fault::kKillAtAppend, .nth = 5});
  const auto replies = job.All({.op = Op::kPause});
  ASSERT_FALSE(job.alive(kVictim)) << "it was to die in the pause";
  for (const int rank : {0, 2}) {
    const auto& reply = replies[static_cast<std::size_t>(rank)];
    ASSERT_TRUE(reply.has_value());
    // Where neither a pidfd nor a lock shows it, nobody listens on its socket any more.
    EXPECT_EQ(reply->code, Code::kPeerLost) << reply->text.data();
    EXPECT_EQ(reply->lifecycle, Lifecycle::kRunning) << reply->text.data();
    EXPECT_NE(std::string(reply->text.data()).find("rank 1 (pid"), std::string::npos) << reply->text.data();
  }
  AllOk(job, {.op = Op::kCheck, .version = kFilled}, "check after the death");
  Cycle(job, "without the dead");
}

TEST_P(Containers, are_late_and_not_dead_while_they_are_stopped) {
  constexpr std::uint32_t kTimeoutMs = 600 * kSlower;
  RankProcesses job(kRanks, Layout::kDirect, kTimeoutMs, false, false, LibraryScope::kNccl, Here());
  AllOk(job, {.op = Op::kFill, .version = kFilled}, "fill");
  const pid_t stopped = ProcessOf(job, kVictim);
  ASSERT_GT(stopped, 0);
  ::kill(stopped, SIGSTOP);
  for (int rank = 0; rank < kRanks; ++rank) job.Send(rank, {.op = Op::kPause});
  for (const int rank : {0, 2}) {
    const auto reply = job.Receive(rank);
    ASSERT_TRUE(reply.has_value());
    EXPECT_EQ(reply->code, Code::kTimeout) << reply->text.data();
    EXPECT_EQ(reply->lifecycle, Lifecycle::kRunning) << reply->text.data();
    EXPECT_NE(std::string(reply->text.data()).find("rank 1"), std::string::npos) << reply->text.data();
  }
  ::kill(stopped, SIGCONT);
  const auto reply = job.Receive(kVictim);
  ASSERT_TRUE(reply.has_value());
  EXPECT_FALSE(reply->ok()) << "the others had ended the pause without it";
  EXPECT_EQ(reply->lifecycle, Lifecycle::kRunning) << reply->text.data();
  AllOk(job, {.op = Op::kCheck, .version = kFilled}, "check after it");
  bool paused = false;
  for (int tries = 0; tries < 20 && !paused; ++tries) {  // a busy machine may need more than one
    paused = true;
    for (const auto& again : job.All({.op = Op::kPause})) paused = paused && again && again->ok();
  }
  EXPECT_TRUE(paused);
  AllOk(job, {.op = Op::kResume}, "resume");
  AllOk(job, {.op = Op::kCheck, .version = kFilled}, "check at the end");
}

INSTANTIATE_TEST_SUITE_P(That_share_only, Containers,
                         ::testing::Values(Container{Common::kSocketDirectory, true}, Container{Common::kNetwork, true},
                                           Container{Common::kSocketDirectory, false}, Container{Common::kNetwork, false},
                                           Container{Common::kSocketDirectory, true, true},
                                           Container{Common::kNetwork, false, true},
                                           Container{Common::kSocketDirectory, true, true, false},
                                           Container{Common::kSocketDirectory, false, false, false}),
                         NameOf);

}  // namespace
}  // namespace amem::test
