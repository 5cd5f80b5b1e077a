// Sessions as processes: who lives, and whole pauses and resumes over real pages, with members that are stopped and killed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "replay/peers/board/participant.h"
#include "replay/peers/board/session_page.h"

namespace amem::board {
namespace {

using agreement::Ballot;
using agreement::Ending;
using agreement::Work;
using Is = ProcessLife::Is;
using std::chrono::milliseconds;

// Memory that parent and children share.
template <class T>
class Common {
 public:
  Common() : at_(new (::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) T) {}
  ~Common() { ::munmap(at_, sizeof(T)); }
  Common(const Common&) = delete;
  Common& operator=(const Common&) = delete;
  T* operator->() const { return at_; }
  T& operator*() const { return *at_; }

 private:
  T* const at_;
};

class Child {
 public:
  explicit Child(const std::function<void()>& work) : pid_(::fork()) {
    if (pid_ != 0) return;
    work();
    ::_exit(0);
  }
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  Child& operator=(Child&&) = delete;
  [[nodiscard]] pid_t pid() const { return pid_; }
  void Signal(int signal) const { ::kill(pid_, signal); }
  [[nodiscard]] std::chrono::microseconds ProcessorTime() const {
    clockid_t clock{};
    timespec time{};
    ::clock_getcpuclockid(pid_, &clock);
    ::clock_gettime(clock, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::microseconds(time.tv_nsec / 1000);
  }

 private:
  pid_t pid_;
};

pid_t ChildOf(pid_t parent) {
  std::ifstream children("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) + "/children");
  pid_t child = 0;
  children >> child;
  return child;
}

bool Await(const std::function<bool()>& what, milliseconds most = milliseconds(20'000)) {
  for (const Deadline until = In(most); !what(); ::usleep(1000))
    if (Passed(until)) return false;
  return true;
}

// ---- who lives

class LifeTest : public ::testing::Test {
 protected:
  LifeTest() {
    auto peer = PeerPage::Open(page_.fd(), kSession);
    EXPECT_TRUE(peer) << peer.status().message();
    peer_ = std::make_unique<PeerPage>(*std::move(peer));
  }
  // A session whose service thread holds the lock while its main thread does something else.
  Child Session(const std::function<void(const std::function<void()>& end_thread)>& then) {
    Child child([&] {
      std::atomic<bool> end = false;
      std::atomic<int> holds = 0;
      std::thread service([&] {
        const auto life = LifeHolder::Hold(page_.life());
        holds = life ? 1 : -1;
        while (!end) ::usleep(1000);
      });
      while (holds == 0) ::usleep(1000);
      then([&] {
        end = true;
        service.join();
      });
      ::pause();
    });
    EXPECT_TRUE(Await([&] { return !peer_->Life().IsUnknown(); }));
    return child;
  }
  bool Ends() {
    return Await([&] { return peer_->Life().HasEnded(); });
  }

  static constexpr SessionId kSession{7};
  SessionPage page_ = *SessionPage::Make(kSession);
  std::unique_ptr<PeerPage> peer_;
};

TEST_F(LifeTest, a_killed_session_has_ended) {
  const Child child = Session([](const auto&) {});
  EXPECT_TRUE(peer_->Life().IsAlive());
  child.Signal(SIGKILL);
  EXPECT_TRUE(Ends());
}

// As of a process that is killed for want of memory, after its memory has been taken.
TEST_F(LifeTest, of_a_killed_session_whose_lock_the_kernel_could_not_mark_a_pidfd_says_so) {
  const Child child([&] {
    const auto life = LifeHolder::Hold(page_.life());
    robust_list_head none{{&none.list}, 0, nullptr};
    ::syscall(SYS_set_robust_list, &none, sizeof none);
    ::pause();
  });
  const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, child.pid(), 0)));
  if (!pidfd) GTEST_SKIP() << "this kernel has no pidfds";
  ASSERT_TRUE(Await([&] { return peer_->Life().IsAlive(); }));
  EXPECT_TRUE(peer_->Life(pidfd.get()).IsAlive());
  ::usleep(50'000);  // it takes its list away after it has the lock
  child.Signal(SIGKILL);
  EXPECT_TRUE(Await([&] { return peer_->Life(pidfd.get()).HasEnded(); }));
  EXPECT_EQ(peer_->Life(pidfd.get()).why, "pidfd");
}

TEST_F(LifeTest, a_session_that_exits_has_ended) {
  const Child child = Session([](const auto&) { ::_exit(3); });
  EXPECT_TRUE(Ends());
}

// As where the system promises no more memory than it has: touching a page for which there is none would end the process.
TEST_F(LifeTest, without_host_memory_what_a_page_says_stays_and_no_board_is_made) {
  auto peer = PeerPage::Open(page_.fd(), kSession);
  ASSERT_TRUE(page_.Publish({.rank = 7}).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 1),
                            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSPC),
                            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
    ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) ::_exit(1);
    if (page_.Publish({.rank = 8}).code() != Code::kOutOfMemory) ::_exit(2);
    if (Board::Make("", {kSession}).status().code() != Code::kOutOfMemory) ::_exit(3);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(peer->Facts()->rank, 7);
}

TEST_F(LifeTest, a_session_that_execs_has_ended) {
  const Child child = Session([](const auto&) { ::execl("/bin/sleep", "sleep", "100", nullptr); });
  EXPECT_TRUE(Ends());
}

TEST_F(LifeTest, a_forked_child_that_lives_on_does_not_keep_its_session) {
  Common<std::atomic<pid_t>> left;
  const Child child = Session([&](const auto&) {
    const pid_t forked = ::fork();
    if (forked == 0) {
      ::pause();
      ::_exit(0);
    }
    *left = forked;
  });
  ASSERT_TRUE(Await([&] { return *left != 0; }));
  EXPECT_TRUE(peer_->Life().IsAlive());
  child.Signal(SIGKILL);
  EXPECT_TRUE(Ends());
  EXPECT_EQ(::kill(*left, 0), 0) << "the child lives";
  ::kill(*left, SIGKILL);
}

TEST_F(LifeTest, a_stopped_session_lives) {
  const Child child = Session([](const auto&) {});
  child.Signal(SIGSTOP);
  ::usleep(50'000);
  EXPECT_TRUE(peer_->Life().IsAlive());
  child.Signal(SIGKILL);
  EXPECT_TRUE(Ends()) << "also if it is killed while it is stopped";
}

TEST_F(LifeTest, a_session_that_lets_go_in_order_has_ended) {
  const Child child = Session([](const auto& end_thread) { end_thread(); });
  EXPECT_TRUE(Ends());
}

TEST_F(LifeTest, a_session_of_another_pid_namespace_is_seen_as_well) {
  Common<std::atomic<int>> made;
  Child outer([&] {
    if (::unshare(CLONE_NEWPID) != 0) {
      *made = -1;
      ::pause();
    }
    if (::fork() == 0) {  // process 1 of its namespace
      const auto life = LifeHolder::Hold(page_.life());
      *made = ::getpid();
      while (true) ::pause();
    }
    ::pause();
  });
  ASSERT_TRUE(Await([&] { return *made != 0; }));
  if (*made < 0) GTEST_SKIP() << "this user may not make a pid namespace";
  EXPECT_EQ(*made, 1);
  EXPECT_TRUE(peer_->Life().IsAlive());
  const auto inner = ChildOf(outer.pid());
  ASSERT_GT(inner, 1);
  ::kill(inner, SIGKILL);
  EXPECT_TRUE(Ends());
}

TEST_F(LifeTest, a_page_that_was_written_over_says_nothing_and_a_pidfd_does) {
  Common<std::atomic<int>> go;
  Child child([&] {
    auto life = LifeHolder::Hold(page_.life());
    std::memset(static_cast<void*>(&page_.life()), 0xc3, sizeof(LifeWords));
    *go = 1;
    ::pause();
  });
  ASSERT_TRUE(Await([&] { return *go != 0; }));
  const ProcessLife life = peer_->Life();
  EXPECT_EQ(life.is, Is::kUnknown);
  EXPECT_EQ(life.why, "its page has been written over");
  const UniqueFd self(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (self) {
    EXPECT_EQ(peer_->Life(self.get()).is, Is::kAlive);
  }
  child.Signal(SIGKILL);
  ::usleep(20'000);
  EXPECT_EQ(peer_->Life().is, Is::kUnknown) << "no end is made up";
}

// ---- whole rounds

constexpr int kMost = 4;
enum class Held : int { kLive, kReleased, kEmpty };

// What a test sees of its members.
struct Member {
  std::atomic<int> call{0};  // calls that it has ended
  std::atomic<int> running{1};
  std::atomic<Held> own{Held::kLive};
  std::atomic<int> made{0};                        // how often
  std::array<std::atomic<int>, kMost> imported{};  // of each other the `made` that it had; -1 nothing
  std::atomic<bool> dead{false};                   // its lock said so to the parent
  std::atomic<Ballot> failed{};
  std::array<char, 600> said{};   // the last failure's message
  std::array<char, 200> wrong{};  // a rule that it saw broken
};
struct Stage {
  std::array<Member, kMost> members;
  std::atomic<int> calls{0};                               // that members are to make
  std::atomic<int> board{-1};                              // the parent's descriptor of the board to use
  std::atomic<int> until_ms{0}, round_ms{0}, failures{0};  // of 1000 driver steps
};

// The pages of N sessions, and what the children do with them.
class Job {
 public:
  explicit Job(int members, unsigned seed = 1) : seed_(seed) {
    for (int i = 0; i < members; ++i) {
      sessions_.push_back(SessionId{static_cast<std::uint64_t>(100 + i)});
      pages_.push_back(*SessionPage::Make(sessions_.back()));
    }
    for (int i = 0; i < members; ++i)
      for (int k = 0; k < members; ++k) stage_->members[i].imported[k] = 0;
    UseBoard(sessions_);
  }
  void UseBoard(const std::vector<SessionId>& sessions) {
    boards_.push_back(std::make_unique<Board>(*Board::Make("", sessions)));
    in_use_ = sessions;
    stage_->board = boards_.back()->fd();
  }
  // Cast in that round of the board in use.
  [[nodiscard]] std::ptrdiff_t Votes(Ballot ballot, RoundNumber round = 1) const {
    const BoardReading reading = boards_.back()->Read(round, [](std::size_t) { return false; });
    return std::ranges::count_if(reading.seats, [&](const auto& seat) {
      return seat.votes[static_cast<std::size_t>(ballot)] != agreement::Vote::kNone;
    });
  }
  void WipeBoard() const {
    const std::array<char, 256> zeros{};
    EXPECT_EQ(::pwrite(boards_.back()->fd(), zeros.data(), zeros.size(), 0), static_cast<ssize_t>(zeros.size()));
  }
  void Begin(const std::function<void()>& before = [] {}) {
    for (int i = 0; i < static_cast<int>(sessions_.size()); ++i) {
      children_.emplace_back([this, i, before] {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        before();
        BeMember(i);
      });
    }
    for (int i = 0; i < members(); ++i) EXPECT_TRUE(Await([&] { return Life(i).IsAlive(); }));
  }
  [[nodiscard]] int members() const { return static_cast<int>(sessions_.size()); }
  [[nodiscard]] Stage& stage() const { return *stage_; }
  [[nodiscard]] const Child& child(int i) const { return children_[i]; }
  [[nodiscard]] const std::vector<SessionId>& sessions() const { return sessions_; }
  [[nodiscard]] ProcessLife Life(int i) const { return PeerPage::Open(pages_[i].fd(), sessions_[i])->Life(); }
  [[nodiscard]] bool Lives(int i) const { return !Life(i).HasEnded(); }

  // All that live make a call: a pause, or a resume if they are paused.
  void Call(milliseconds until) {
    stage_->until_ms = static_cast<int>(until.count());
    ++stage_->calls;
  }
  [[nodiscard]] bool AllEnded() const {
    for (int i = 0; i < members(); ++i)
      if (Lives(i) && stage_->members[i].call < stage_->calls) return false;
    return true;
  }
  // 1: all that live run; 0: all are paused; -1: neither.
  [[nodiscard]] int AllRun() const {
    int run = 0, live = 0;
    for (int i = 0; i < members(); ++i) {
      if (!Lives(i)) continue;
      ++live;
      run += stage_->members[i].running;
    }
    return run == live ? 1 : run == 0 ? 0 : -1;
  }
  [[nodiscard]] std::string Wrong() const {
    for (const Member& member : stage_->members)
      if (member.wrong[0] != 0) return member.wrong.data();
    return {};
  }

 private:
  class Hooks final : public RoundHooks {
   public:
    Hooks(const Job& job, int self, std::mt19937& random) : job_(job), self_(self), random_(random) {
      for (int i = 0; i < job.members(); ++i) peers_.push_back(*PeerPage::Open(job.pages_[i].fd(), job.sessions_[i]));
    }
    Status Do(Work work, Deadline, const std::function<bool()>& is_overtaken) override {
      Member& m = job_.stage_->members[self_];
      const auto step = [&](auto act) {
        if (is_overtaken()) return false;
        ::usleep(static_cast<unsigned>(random_() % 1500));
        act();
        return true;
      };
      const bool fails = static_cast<int>(random_() % 1000) < job_.stage_->failures;
      if (fails) return {Code::kDriver, "a driver call failed", 2};
      switch (work) {
        case Work::kQuiesce:
        case Work::kSave:
          step([] {});
          break;
        case Work::kRelease:
          for (int k = 0; k < job_.members(); ++k)
            if (!step([&] { m.imported[k] = -1; })) return {};
          step([&] { m.own = Held::kReleased; });
          break;
        case Work::kMake:
          if (m.own != Held::kReleased) break;
          step([&] {
            ++m.made;
            m.own = Held::kEmpty;
          });
          break;
        case Work::kImport:
          for (int k = 0; k < job_.members(); ++k) {
            if (k == self_) continue;
            bool refused = false;
            const bool did = step([&] {
              const Member& owner = job_.stage_->members[k];
              refused = owner.own == Held::kReleased && !HasEnded(job_.sessions_[k]);
              m.imported[k] = owner.made.load();
            });
            if (!did) return {};
            if (refused) return {Code::kRefused, "its owner has released it"};
          }
          break;
        case Work::kRestore:
          step([&] { m.own = Held::kLive; });
          break;
      }
      return {};
    }
    bool HasEnded(SessionId session) override { return peers_[session.value - 100].Life().HasEnded(); }
    bool SetHasChanged() override { return false; }
    std::string NameOf(SessionId session) override { return "rank " + std::to_string(session.value - 100); }
    std::string SeenOf(SessionId, std::chrono::milliseconds) override { return "was seen"; }
    void OnVote(Ballot, const Status&) override {}
    void OnWait(Ballot, const BoardReading&) override {}
    void OnDecision(Ballot, const BoardReading&, const Status&) override {}

   private:
    const Job& job_;
    const int self_;
    std::mt19937& random_;
    std::vector<PeerPage> peers_;
  };

  void BeMember(int self) {
    std::thread([this, self] {
      const auto life = LifeHolder::Hold(pages_[self].life());
      while (true) ::pause();
    }).detach();
    std::mt19937 random(seed_ * 16 + static_cast<unsigned>(self));
    Hooks hooks(*this, self, random);
    Member& me = stage_->members[self];
    while (true) {
      while (me.call >= stage_->calls) ::usleep(500);
      ::usleep(static_cast<unsigned>(random() % 2000));
      OneCall(self, hooks);
      if (me.running == 1) CheckThatItMayRun(self);
      ++me.call;
    }
  }
  void OneCall(int self, Hooks& hooks) {
    Member& me = stage_->members[self];
    // The parent made the board, perhaps after this process was forked.
    const UniqueFd fd(
        ::open(("/proc/" + std::to_string(::getppid()) + "/fd/" + std::to_string(stage_->board)).c_str(), O_RDWR | O_CLOEXEC));
    std::vector<SessionId> set;
    for (int i = 0; i < members(); ++i)
      if (!hooks.HasEnded(sessions_[i])) set.push_back(sessions_[i]);
    auto opened = Board::Open(fd.get(), "", set);
    // Somebody may have ended since the parent made it, and is a member of that set all the same.
    auto board = opened ? std::move(opened) : Board::Open(fd.get(), "", sessions_);
    if (!board) return Fail(me, board.status().message());
    const bool paused = me.running == 0;
    const auto time = milliseconds(stage_->until_ms);
    CallOnBoard call{.kind = paused ? CycleKind::kResume : CycleKind::kPause,
                     .until = In(time),
                     .again = time / 8,
                     .round = std::max(time / 4, milliseconds(stage_->round_ms)),
                     .undo = time * 3 / 4,
                     .patient = paused};
    while (true) {
      const auto outcome = TakePart(*board, *board->SeatOf(sessions_[self]), call, hooks);
      if (!outcome) return Fail(me, outcome.status().message());
      if (outcome->again) continue;
      std::strncpy(me.said.data(), outcome->status.message().c_str(), me.said.size() - 1);
      if (outcome->failed) me.failed = *outcome->failed;
      me.running = outcome->ending == Ending::kRunning ? 1 : 0;
      return;
    }
  }
  static void Fail(Member& member, const std::string& why) {
    std::strncpy(member.wrong.data(), why.c_str(), member.wrong.size() - 1);
  }
  void CheckThatItMayRun(int self) {
    Member& me = stage_->members[self];
    if (me.own != Held::kLive) Fail(me, "a member runs without its memory");
    for (int k = 0; k < members(); ++k) {
      if (k == self || !Lives(k)) continue;
      const Member& other = stage_->members[k];
      const bool there = other.own == Held::kLive && me.imported[k] == other.made;
      if (!there && Lives(k))
        Fail(me, "rank " + std::to_string(self) + " runs without what it imported of rank " + std::to_string(k));
    }
  }

  const unsigned seed_;
  const Common<Stage> stage_;
  std::vector<SessionId> sessions_, in_use_;
  std::vector<SessionPage> pages_;
  std::vector<std::unique_ptr<Board>> boards_;
  std::vector<Child> children_;
};

constexpr milliseconds kLong{30'000};  // nothing here is to take that long

TEST(Rounds, four_processes_pause_and_resume) {
  Job job(4);
  job.Begin();
  for (int cycle = 0; cycle < 5; ++cycle) {
    job.Call(kLong);
    ASSERT_TRUE(Await([&] { return job.AllEnded(); }));
    ASSERT_EQ(job.AllRun(), 0);
    job.Call(kLong);
    ASSERT_TRUE(Await([&] { return job.AllEnded(); }));
    ASSERT_EQ(job.AllRun(), 1);
  }
  EXPECT_EQ(job.Wrong(), "");
}

TEST(Rounds, a_rank_that_is_stopped_holds_nobody_up_and_is_named) {
  Job job(3);
  job.Begin();
  job.child(1).Signal(SIGSTOP);
  job.Call(milliseconds(1500));
  ASSERT_TRUE(Await([&] { return job.stage().members[0].call == 1 && job.stage().members[2].call == 1; }));
  EXPECT_EQ(job.stage().members[0].running, 1);
  EXPECT_EQ(job.stage().members[2].running, 1);
  for (const int rank : {0, 2}) {
    const std::string said = job.stage().members[static_cast<std::size_t>(rank)].said.data();
    EXPECT_NE(said.find(" ms for rank 1 to come, of whom rank 1 was seen: "), std::string::npos) << said;
  }
  job.child(1).Signal(SIGCONT);
  ASSERT_TRUE(Await([&] { return job.AllEnded(); }));
  EXPECT_EQ(job.AllRun(), 1);
  job.Call(kLong);
  ASSERT_TRUE(Await([&] { return job.AllEnded(); }));
  EXPECT_EQ(job.AllRun(), 0);
  EXPECT_EQ(job.Wrong(), "");
}

// A patient resume waits for a stopped rank as long as it takes, and for a killed one not at all.
class PatientTest : public ::testing::Test {
 protected:
  PatientTest() {
    job_.Begin();
    job_.Call(kLong);
    EXPECT_TRUE(Await([&] { return job_.AllEnded(); }));
    job_.child(2).Signal(SIGSTOP);
  }
  ~PatientTest() override { EXPECT_EQ(job_.Wrong(), ""); }
  Job job_{3};
};

TEST_F(PatientTest, a_resume_waits_for_a_rank_that_lives_and_without_processor_time) {
  job_.stage().round_ms = 20'000;
  job_.Call(milliseconds(50));
  ASSERT_TRUE(Await([&] { return job_.Votes(Ballot::kCome, 2) == 2; }));
  ::usleep(300'000);
  const auto before = job_.child(0).ProcessorTime();
  ::usleep(1'000'000);
  EXPECT_LT((job_.child(0).ProcessorTime() - before).count(), 15'000) << "microseconds, of a second";
  EXPECT_EQ(job_.stage().members[0].call, 1) << "it waits, whatever the deadline";
  job_.child(2).Signal(SIGCONT);
  ASSERT_TRUE(Await([&] { return job_.AllEnded(); }));
  EXPECT_EQ(job_.AllRun(), 1) << job_.stage().members[0].said.data();
}

TEST_F(PatientTest, a_resume_does_not_wait_for_one_that_has_ended) {
  job_.Call(milliseconds(50));
  ASSERT_TRUE(Await([&] { return job_.Votes(Ballot::kCome, 2) == 2; }));
  job_.child(2).Signal(SIGKILL);
  ASSERT_TRUE(Await([&] { return job_.AllEnded(); }));
  EXPECT_EQ(job_.AllRun(), 0);
  EXPECT_STREQ(job_.stage().members[0].said.data(), "rank 2 has ended (resume, ballot \"come\")");
  job_.UseBoard({job_.sessions()[0], job_.sessions()[1]});
  job_.Call(kLong);
  ASSERT_TRUE(Await([&] { return job_.AllEnded(); }));
  EXPECT_EQ(job_.AllRun(), 1);
}

// A rank whose driver fails says why, and all hear it from the board.
TEST(Rounds, a_failure_is_told_to_all_with_its_reason) {
  Job job(2);
  job.stage().failures = 1000;
  job.Begin();
  job.Call(kLong);
  ASSERT_TRUE(Await([&] { return job.AllEnded(); }));
  EXPECT_EQ(job.AllRun(), 1);
  const std::string said = job.stage().members[0].said.data();
  EXPECT_NE(said.find(" failed (pause, ballot \"idle\"): a driver call failed"), std::string::npos) << said;
  EXPECT_STREQ(job.stage().members[1].said.data(), said.c_str());
}

TEST(Rounds, a_board_that_is_written_over_fails_the_round_by_name_and_all_run) {
  Job job(3);
  job.Begin();
  job.child(1).Signal(SIGSTOP);
  job.Call(kLong);
  ASSERT_TRUE(Await([&] { return job.Votes(Ballot::kCome) == 2; }));
  job.WipeBoard();
  job.child(1).Signal(SIGCONT);
  ASSERT_TRUE(Await([&] { return job.AllEnded(); }));
  EXPECT_EQ(job.AllRun(), 1);
  for (const std::size_t rank : {0U, 2U}) {
    const std::string said = job.stage().members[rank].said.data();
    EXPECT_NE(said.find("has been written over"), std::string::npos) << said;
  }
  job.UseBoard(job.sessions());
  job.Call(kLong);
  ASSERT_TRUE(Await([&] { return job.AllEnded(); }));
  EXPECT_EQ(job.AllRun(), 0);
}

// As a kernel before 5.3, or a container's rules.
void DenyPidfds() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(filter), filter};
  ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) ::_exit(1);
  if (::syscall(SYS_pidfd_open, ::getpid(), 0) >= 0) ::_exit(1);
}

TEST(Rounds, a_kernel_without_pidfds_sees_who_has_ended_as_well) {
  Job job(3);
  job.Begin(&DenyPidfds);
  job.child(1).Signal(SIGSTOP);
  job.Call(kLong);
  ::usleep(50'000);
  job.child(1).Signal(SIGKILL);
  ASSERT_TRUE(Await([&] { return job.AllEnded(); }));
  EXPECT_EQ(job.AllRun(), 1);
  EXPECT_STREQ(job.stage().members[0].said.data(), "rank 1 has ended (pause, ballot \"come\")");
}

// ---- random faults

class Trial {
 public:
  explicit Trial(unsigned seed) : random_(seed), job_(2 + static_cast<int>(seed % 3), seed) {}

  std::string Run() {
    const bool kills = random_() % 3 == 0;
    job_.stage().failures = random_() % 3 == 0 ? 30 : 0;
    job_.Begin();
    for (int cycle = 0; cycle < 3; ++cycle) {
      job_.Call(milliseconds(20 + random_() % 80));
      const std::string wrong = Disturb(kills && cycle == static_cast<int>(random_() % 3));
      if (!wrong.empty()) return wrong;
      if (killed_) break;
    }
    job_.stage().failures = 0;
    std::vector<SessionId> left;
    for (int i = 0; i < job_.members(); ++i)
      if (job_.Lives(i)) left.push_back(job_.sessions()[i]);
    if (left.size() < static_cast<std::size_t>(job_.members())) job_.UseBoard(left);
    if (left.empty() || job_.AllRun() == 1) return {};
    job_.Call(kLong);
    const std::string wrong = Ended();
    return !wrong.empty() ? wrong : job_.AllRun() == 1 ? "" : "a resume without a fault does not bring all back";
  }

 private:
  // Stops members and lets them go on, while they are in a call.
  std::string Disturb(bool kill) {
    const Deadline until = In(milliseconds(random_() % 150));
    while (!Passed(until) && !job_.AllEnded()) {
      ::usleep(static_cast<unsigned>(random_() % 10'000));
      const int who = static_cast<int>(random_() % static_cast<unsigned>(job_.members()));
      job_.child(who).Signal(random_() % 2 == 0 ? SIGSTOP : SIGCONT);
      if (!kill || killed_ || random_() % 4 != 0) continue;
      job_.child(who).Signal(SIGKILL);
      killed_ = true;
    }
    for (int i = 0; i < job_.members(); ++i) job_.child(i).Signal(SIGCONT);
    return Ended();
  }
  std::string Ended() {
    if (killed_) Await([&] { return !AllLive(); });
    if (!Await([&] { return job_.AllEnded(); })) return "a member waits for ever";
    if (const std::string wrong = job_.Wrong(); !wrong.empty()) return wrong;
    return job_.AllRun() < 0 ? "some run, and others are paused" : "";
  }
  [[nodiscard]] bool AllLive() const {
    for (int i = 0; i < job_.members(); ++i)
      if (!job_.Lives(i)) return false;
    return true;
  }

  std::mt19937 random_;
  Job job_;
  bool killed_ = false;
};

unsigned Setting(const char* name, unsigned otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
}

// AMEM_BOARD_TRIALS, AMEM_BOARD_SEED: as many, from there.
TEST(Rounds, under_random_stops_kills_and_failures_all_run_or_all_are_paused) {
#if defined(AMEM_BY_NIGHT)
  constexpr unsigned kTrials = 200;
#else
  constexpr unsigned kTrials = 12;
#endif
  const unsigned first = Setting("AMEM_BOARD_SEED", 1);
  for (unsigned seed = first; seed < first + Setting("AMEM_BOARD_TRIALS", kTrials); ++seed)
    ASSERT_EQ(Trial(seed).Run(), "") << "AMEM_BOARD_SEED=" << seed;
}

}  // namespace
}  // namespace amem::board
