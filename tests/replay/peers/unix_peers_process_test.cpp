// Peers in real processes: deaths, stopped processes, forked children, limits of a process.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

#include "tests/journal/base/no_descriptors.h"
#include "tests/replay/peers/peers_fixture.h"

namespace amem {
namespace {

using namespace test;
using std::chrono::milliseconds;

// Results of a child, for the parent to look at.
struct Report {
  std::array<char, 1000> text{};
  int code = -1;
  std::uint64_t culprit = 0;
  std::int64_t took_ms = 0;
};

template <class T>
class SharedMemory {
 public:
  SharedMemory() : at_(static_cast<T*>(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    new (at_) T();
  }
  ~SharedMemory() { ::munmap(at_, sizeof(T)); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  T* operator->() const { return at_; }
  T& operator*() const { return *at_; }

 private:
  T* at_;
};

struct Desk {  // what the processes of one test share
  std::array<Token, 8> tokens{};
  std::array<Report, 8> reports;
};

class ProcessTest : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kTimeout = 20'000;

  // In a child: a rank that shares memory with the rank before it (and the first with the last), once all have started.
  std::unique_ptr<Rank> JoinRing(int rank, int count, std::uint32_t timeout_ms = kTimeout) {
    auto self = std::make_unique<Rank>(directory_, rank, timeout_ms);
    if (!self->peers) ::_exit(90);
    desk_->tokens[static_cast<std::size_t>(rank)] = self->session.Export(AllocationId{1});
    Meet(0, rank, count);
    const auto from = static_cast<std::size_t>((rank + count - 1) % count);
    if (!self->peers->Import(desk_->tokens[from], AllocationId{10})) ::_exit(91);
    self->session.Add(desk_->tokens[from].session);
    Meet(1, rank, count);
    return self;
  }
  // A barrier over the children, apart from what is tested. Each comes to it twice; no stage can take what is another's.
  void Meet(int stage, int rank, int count) {
    if (rank == 0) {
      for (int i = 1; i < count; ++i) come_[stage].Await();
      go_[stage].Pass(count - 1);
    } else {
      come_[stage].Pass();
      go_[stage].Await();
    }
  }
  // The work of a process of rank 1 that owns an allocation, and whose token is on the desk once `ready_` is passed.
  int OwnUntilKilled() {
    Rank self(directory_, 1);
    desk_->tokens[1] = self.session.Export(AllocationId{1});
    ready_.Pass();
    never_.Await();
    return 0;
  }
  void Note(int rank, const Status& status, SessionId culprit = {}, std::chrono::steady_clock::time_point begun = {}) {
    Report& report = desk_->reports[static_cast<std::size_t>(rank)];
    report.code = static_cast<int>(status.code());
    report.culprit = culprit.value;
    report.took_ms = std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - begun).count();
    std::snprintf(report.text.data(), report.text.size(), "%s", status.message().c_str());
  }
  void ExpectLost(int rank, int whom, const char* what) {
    const Report& report = desk_->reports[static_cast<std::size_t>(rank)];
    const std::string text = report.text.data();
    EXPECT_EQ(report.code, static_cast<int>(Code::kPeerLost)) << text;
    EXPECT_NE(text.find("rank " + std::to_string(whom) + " (pid "), std::string::npos) << text;
    EXPECT_NE(text.find(what), std::string::npos) << text;
    EXPECT_LT(report.took_ms, 5000) << text;
  }

  TemporaryDirectory directory_;
  SharedMemory<Desk> desk_;
  Baton come_[2], go_[2], ready_, never_;
};

TEST_F(ProcessTest, a_killed_peer_is_lost_at_once_and_its_references_drop) {
  Baton exported;
  Child importer([&] {
    exported.Await();
    Rank self(directory_, 1);
    if (!self.peers->Import(desk_->tokens[0], AllocationId{5})) return 1;
    ready_.Pass();
    never_.Await();
    return 2;
  });
  Rank owner(directory_, 0);
  desk_->tokens[0] = owner.session.Export(AllocationId{1});
  exported.Pass();
  ready_.Await();
  EXPECT_EQ(owner.session.references(), 1u);
  importer.Kill(SIGKILL);
  ASSERT_TRUE(owner.session.WaitUntilLost(1));
  EXPECT_EQ(owner.session.lost()[0].second, "died");
  EXPECT_EQ(owner.session.lost()[0].first.rank, 1);
  const auto seen = owner.session.AwaitFacts<ProcessSeen>(1);
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0].session, Identity(1).session);
  EXPECT_EQ(seen[0].state, "zombie") << "nobody has waited for it";
  EXPECT_EQ(seen[0].exit_code, 128 + SIGKILL);
  EXPECT_EQ(owner.session.references(), 0u);
}

TEST_F(ProcessTest, a_killed_owner_is_lost_for_its_importer) {
  Child owner([&] {
    Rank self(directory_, 0);
    desk_->tokens[0] = self.session.Export(AllocationId{1});
    ready_.Pass();
    never_.Await();
    return 2;
  });
  ready_.Await();
  Rank importer(directory_, 1);
  ASSERT_TRUE(importer.peers->Import(desk_->tokens[0], AllocationId{5}));
  owner.Kill(SIGKILL);
  ASSERT_TRUE(importer.session.WaitUntilLost(1));
  EXPECT_EQ(importer.session.lost()[0].second, "died");
  const Status again = importer.Reimport(desk_->tokens[0].session, {{AllocationId{1}, AllocationId{5}}}).status();
  EXPECT_EQ(again.code(), Code::kPeerLost);
  EXPECT_NE(again.message().find("rank 0 (pid "), std::string::npos) << again.message();
  importer.peers->DropReference({desk_->tokens[0].session, AllocationId{1}}, AllocationId{5});  // no failure
}

// By fork, and by a way that calls nothing that was registered for forks.
struct Forking {
  const char* name;
  pid_t (*fork)();
};
class ForkedChildTest : public ProcessTest, public testing::WithParamInterface<Forking> {};
INSTANTIATE_TEST_SUITE_P(, ForkedChildTest,
                         testing::Values(Forking{"fork", ::fork},
                                         Forking{"clone",
                                                 [] { return static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0)); }}),
                         [](const auto& forking) { return forking.param.name; });

TEST_P(ForkedChildTest, that_holds_the_sockets_does_not_hide_the_death_of_its_parent) {
  Child owner([&] {
    Rank self(directory_, 0);
    desk_->tokens[0] = self.session.Export(AllocationId{1});
    ready_.Pass();
    go_[0].Await();
    if (GetParam().fork() == 0) {
      never_.Await();
      ::_exit(0);
    }
    ready_.Pass();
    never_.Await();
    return 2;
  });
  ready_.Await();
  Rank importer(directory_, 1);
  ASSERT_TRUE(importer.peers->Import(desk_->tokens[0], AllocationId{5}));
  go_[0].Pass();
  ready_.Await();
  owner.Kill(SIGKILL);
  EXPECT_TRUE(importer.session.WaitUntilLost(1, milliseconds(3000)));
  const Status status = importer.peers->Import(desk_->tokens[0], AllocationId{6}).status();
  EXPECT_EQ(status.code(), Code::kPeerLost) << status.message();
  importer.session.Add(desk_->tokens[0].session);
  const auto round = importer.Arrive(CycleKind::kPause, 1);
  EXPECT_TRUE(round) << "the living pause without it: " << round.status().message();
  never_.Pass();
}

int CountListeners() {
  int listening = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    int accepts = 0;
    socklen_t size = sizeof(accepts);
    listening += ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) == 0 && accepts != 0 ? 1 : 0;
  }
  return listening;
}

TEST_F(ProcessTest, a_forked_child_does_not_hold_the_sockets_that_its_parent_listens_on) {
  const int before = CountListeners();
  Child process([&] {
    const Rank self(directory_, 0);
    if (CountListeners() <= before) return 1;
    Child child([&] { return CountListeners() == before ? 0 : 3; });
    return child.Wait() == 0 && CountListeners() > before ? 0 : 2;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(ProcessTest, a_forked_child_that_cleans_up_does_not_disturb_its_parent) {
  Child process([&] {
    auto owner = std::make_unique<Rank>(directory_, 0);
    Rank importer(directory_, 1);
    if (!importer.ImportFrom(*owner, AllocationId{1}, AllocationId{5})) return 1;
    const pid_t child = ::fork();
    if (child == 0) {
      owner->peers.reset();
      importer.peers->Stop();
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (status != 0) return 2;
    if (!importer.ImportFrom(*owner, AllocationId{2}, AllocationId{6})) return 3;
    return owner->session.lost().empty() && importer.session.lost().empty() ? 0 : 4;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(ProcessTest, a_stopped_owner_is_a_timeout_that_names_it) {
  Child owner([&] {
    Rank self(directory_, 0);
    desk_->tokens[0] = self.session.Export(AllocationId{1});
    ready_.Pass();
    never_.Await();
    return 0;
  });
  ready_.Await();
  {
    Rank importer(directory_, 1, 300);
    ASSERT_TRUE(importer.peers->Import(desk_->tokens[0], AllocationId{5}));
    importer.session.Add(desk_->tokens[0].session);
    owner.StopRunning();
    const Status status = importer.peers->Import(desk_->tokens[0], AllocationId{6}).status();
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_NE(status.message().find("import of allocation 1 from rank 0 (pid "), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("no answer in "), std::string::npos) << status.message();
    const Status round = importer.Arrive(CycleKind::kPause, 1).status();
    EXPECT_EQ(round.code(), Code::kTimeout);
    EXPECT_NE(round.message().find("rank 0 (pid "), std::string::npos) << round.message();
    EXPECT_NE(round.message().find(" ms"), std::string::npos) << round.message();
    owner.Kill(SIGCONT);
    // What came too late is not taken for the answer to this one.
    EXPECT_TRUE(importer.peers->Import(desk_->tokens[0], AllocationId{7}));
  }
  never_.Pass();
  EXPECT_EQ(owner.Wait(), 0);
}

TEST_F(ProcessTest, too_few_descriptors_are_an_error_that_says_so) {
  const unsigned count = 100;
  Child owner([&] {
    Rank self(directory_, 0);
    desk_->tokens[0] = self.session.Export(AllocationId{1});
    ready_.Pass();
    never_.Await();
    return 0;
  });
  ready_.Await();
  {
    Rank importer(directory_, 1);
    std::vector<ShareRequest> requests;
    for (unsigned i = 0; i < count; ++i) {
      ASSERT_TRUE(importer.peers->Import(desk_->tokens[0], AllocationId{500 + i}));
      requests.push_back({AllocationId{1}, AllocationId{500 + i}});
    }
    rlimit before{};
    ::getrlimit(RLIMIT_NOFILE, &before);
    const rlimit tight{OpenDescriptors() + 50, before.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &tight);
    auto again = importer.Reimport(desk_->tokens[0].session, requests);
    ::setrlimit(RLIMIT_NOFILE, &before);
    ASSERT_FALSE(again);
    EXPECT_EQ(again.status().code(), Code::kNoDescriptors);
    EXPECT_NE(again.status().message().find("ulimit -n"), std::string::npos) << again.status().message();
    EXPECT_TRUE(importer.Reimport(desk_->tokens[0].session, requests));  // when there is room
  }
  never_.Pass();
  EXPECT_EQ(owner.Wait(), 0);
}

// It cannot take their connections, and would leave them waiting until their deadline.
TEST_F(ProcessTest, one_without_descriptors_tells_those_that_ask_it) {
  Child poor([&] {
    Rank self(directory_, 0);
    desk_->tokens[0] = self.session.Export(AllocationId{1});
    ready_.Pass();
    come_[0].Await();                                  // memory is shared
    const std::size_t open = DescriptorsAtRest() - 1;  // what was handed over is closed a moment after the importer has it
    const rlimit none{open, open};
    ::setrlimit(RLIMIT_NOFILE, &none);
    while (::dup(STDERR_FILENO) >= 0) {
    }
    go_[0].Pass();
    never_.Await();
    return 0;
  });
  ready_.Await();
  {
    Rank other(directory_, 1, 8'000);
    ASSERT_TRUE(other.peers->Import(desk_->tokens[0], AllocationId{500}));
    other.session.Add(desk_->tokens[0].session);
    come_[0].Pass();
    go_[0].Await();
    const auto begun = std::chrono::steady_clock::now();
    const auto round = other.Arrive(CycleKind::kPause, 1);
    EXPECT_EQ(round.status().code(), Code::kNoDescriptors) << round.status().message();
    EXPECT_NE(round.status().message().find("rank 0"), std::string::npos) << round.status().message();
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(6)) << "before the deadline";
    ASSERT_EQ(other.culprits.size(), 1U);
    EXPECT_EQ(other.culprits[0].rank, 0);
  }
  never_.Pass();
  EXPECT_EQ(poor.Wait(), 0);
}

// The owner finds the hello and the end of that connection when it goes on. Both are alive, and share memory the other way.
TEST_F(ProcessTest, a_first_import_that_gave_up_on_a_stopped_owner_loses_neither_of_them) {
  Child owner([&] {
    Rank self(directory_, 0);
    desk_->tokens[0] = self.session.Export(AllocationId{1});
    ready_.Pass();
    come_[0].Await();
    if (!self.peers->Import(desk_->tokens[1], AllocationId{100})) return 1;
    self.session.Add(Identity(1).session);
    ready_.Pass();
    come_[0].Await();  // it was stopped, and the importer's connection has ended
    if (self.session.WaitUntilLost(1, milliseconds(200))) return 2;
    const auto round = self.Arrive(CycleKind::kPause, 1);
    Note(0, round.status());
    never_.Await();
    return round ? 0 : 3;
  });
  ready_.Await();
  Rank importer(directory_, 1, 300 * kFew);
  desk_->tokens[1] = importer.session.Export(AllocationId{1});
  come_[0].Pass();
  ready_.Await();
  owner.StopRunning();
  EXPECT_EQ(importer.peers->Import(desk_->tokens[0], AllocationId{5}).status().code(), Code::kTimeout);
  owner.Kill(SIGCONT);
  const auto again = importer.ImportPatiently(desk_->tokens[0], AllocationId{6});
  EXPECT_TRUE(again) << again.status().message();
  importer.session.Add(Identity(0).session);
  importer.deadlines = Deadlines(milliseconds(kTimeout));
  come_[0].Pass();
  const auto round = importer.Arrive(CycleKind::kPause, 1);
  EXPECT_TRUE(round) << round.status().message();
  EXPECT_TRUE(importer.session.lost().empty());
  never_.Pass();
  EXPECT_EQ(owner.Wait(), 0) << desk_->reports[0].text.data();
}

// Ends the connections of this process, and no listener.
void BreakConnections() {
  for (int fd = 3; fd < 1024; ++fd) {
    int accepts = 1;
    socklen_t size = sizeof(accepts);
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) == 0 && accepts == 0) (void)::shutdown(fd, SHUT_RDWR);
  }
}

TEST_F(ProcessTest, a_connection_that_breaks_between_the_living_is_made_anew_and_no_reference_is_lost) {
  Baton owns;
  Child importer([&] {
    owns.Await();
    Rank self(directory_, 1);
    for (const unsigned as : {5U, 6U})
      if (!self.peers->Import(desk_->tokens[0], AllocationId{as})) return 1;
    BreakConnections();
    self.peers->DropReference({Identity(0).session, AllocationId{1}}, AllocationId{5});
    const auto again = self.Reimport(Identity(0).session, {{AllocationId{1}, AllocationId{6}}});
    Note(1, again.status());
    if (!again) return 2;
    BreakConnections();
    self.peers->DropReference({Identity(0).session, AllocationId{1}}, AllocationId{6});
    if (!self.Arrive(CycleKind::kPause, 1)) return 3;  // alone: the owner knows that nothing is shared
    ready_.Pass();
    never_.Await();
    return self.session.lost().empty() ? 0 : 4;
  });
  Rank owner(directory_, 0);
  desk_->tokens[0] = owner.session.Export(AllocationId{1});
  owns.Pass();
  ready_.Await();
  EXPECT_TRUE(owner.session.WaitForReferences(0)) << desk_->reports[1].text.data();
  EXPECT_EQ(owner.session.drops, 2);
  EXPECT_TRUE(owner.session.lost().empty());
  never_.Pass();
  EXPECT_EQ(importer.Wait(), 0) << desk_->reports[1].text.data();
  EXPECT_TRUE(owner.session.WaitUntilLost(1)) << "it has closed, with no connection left";
}

TEST_F(ProcessTest, a_process_without_descriptors_takes_no_living_peer_for_dead) {
  Child other([&] { return OwnUntilKilled(); });
  Rank self(directory_, 0, 300 * kFew);
  ready_.Await();
  ASSERT_TRUE(self.peers->Import(desk_->tokens[1], AllocationId{5}));
  self.session.Add(Identity(1).session);
  {
    const NoDescriptors none;
    EXPECT_FALSE(self.peers->AwaitLoss(Identity(1).session, milliseconds(50)));
    const auto round = self.Arrive(CycleKind::kPause, 1);
    EXPECT_EQ(round.status().code(), Code::kNoDescriptors) << round.status().message();
  }
  EXPECT_TRUE(self.session.lost().empty());
  other.StopRunning();
  {
    const NoDescriptors none;
    const auto round = self.Arrive(CycleKind::kPause, 2);
    EXPECT_FALSE(round) << "alone, without a peer that lives";
  }
  EXPECT_TRUE(self.session.lost().empty());
  other.Kill(SIGKILL);
  other.Wait();
  EXPECT_TRUE(self.session.WaitUntilLost(1)) << "its death is known by what was open before";
}

TEST_F(ProcessTest, a_death_during_a_want_of_descriptors_is_known_when_there_are_some_again) {
  Child other([&] { return OwnUntilKilled(); });
  Rank self(directory_, 0);
  ready_.Await();
  ASSERT_TRUE(self.peers->Import(desk_->tokens[1], AllocationId{5}));
  {
    const NoDescriptors none;
    other.Kill(SIGKILL);
    EXPECT_TRUE(self.session.WaitUntilLost(1));
  }
  EXPECT_EQ(self.session.lost()[0].second, "died");
}

// ---- rounds ----------------------------------------------------------------------------------------------------------------

TEST_F(ProcessTest, a_member_killed_while_others_wait_for_it_is_named_at_once) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 3; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      auto self = JoinRing(rank, 3);
      if (rank == 1) {
        ready_.Pass();
        never_.Await();
      }
      const auto begun = std::chrono::steady_clock::now();
      auto round = self->Arrive(CycleKind::kPause, 1);
      Note(rank, round.status(), {}, begun);
      return 0;
    }));
  }
  ready_.Await();
  std::this_thread::sleep_for(milliseconds(200));
  children[1]->Kill(SIGKILL);
  EXPECT_EQ(children[0]->Wait(), 0);
  EXPECT_EQ(children[2]->Wait(), 0);
  ExpectLost(0, 1, "died");
  ExpectLost(2, 1, "died");
}

TEST_F(ProcessTest, a_paused_peer_that_dies_long_after_a_resume_has_begun_ends_it_at_once_and_is_named) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 2; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      auto self = JoinRing(rank, 2, 300 * kFew);
      self->session.lifecycle = Lifecycle::kPaused;
      ready_.Pass();
      if (rank == 1) never_.Await();
      auto round = self->Arrive(CycleKind::kResume, 1);
      Note(rank, round.status(), {}, std::chrono::steady_clock::now());
      return 0;
    }));
  }
  for (int i = 0; i < 2; ++i) ready_.Await();
  std::this_thread::sleep_for(milliseconds(1200 * kFew));
  const auto killed = std::chrono::steady_clock::now();
  children[1]->Kill(SIGKILL);
  EXPECT_EQ(children[0]->Wait(), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(10)) << "it would wait for ever";
  ExpectLost(0, 1, "died");
}

// It lives, and it was paused: it will come when it is allowed to run again.
TEST_F(ProcessTest, a_resume_waits_for_a_paused_peer_that_is_stopped) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 2; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      auto self = JoinRing(rank, 2, 300 * kFew);
      self->session.lifecycle = Lifecycle::kPaused;
      ready_.Pass();
      if (rank == 0) ::raise(SIGSTOP);  // it counts arrivals
      const auto round = self->Arrive(CycleKind::kResume, 1);
      Note(rank, round.status());
      if (!round.ok() || !(*round)->Vote(PhaseKind::kResumeArrive, {}).status.ok()) return 1;
      const auto seen = self->session.Facts<ProcessSeen>();
      const bool told = std::ranges::any_of(seen, [](const ProcessSeen& s) { return s.state == "stopped"; });
      return rank == 0 || told ? 0 : 2;
    }));
  }
  for (int i = 0; i < 2; ++i) ready_.Await();
  std::this_thread::sleep_for(milliseconds(1500 * kFew));
  children[0]->Kill(SIGCONT);
  for (std::size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(children[rank]->Wait(), 0) << desk_->reports[rank].text.data();
}

// Its own deadline has passed when it goes on, and it has asked nobody.
TEST_F(ProcessTest, a_resume_waits_for_the_others_though_its_own_process_was_stopped_in_it) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 2; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      auto self = JoinRing(rank, 2, 300 * kFew);
      self->session.lifecycle = Lifecycle::kPaused;
      std::atomic<bool> once = false;
      if (rank == 1)
        self->session.BeforeNeighbours([&](Deadline) {
          if (!once.exchange(true)) ::raise(SIGSTOP);
        });
      ready_.Pass();
      const auto round = self->Arrive(CycleKind::kResume, 1);
      Note(rank, round.status());
      return round && (*round)->Vote(PhaseKind::kResumeArrive, {}).status.ok() ? 0 : 1;
    }));
  }
  for (int i = 0; i < 2; ++i) ready_.Await();
  std::this_thread::sleep_for(milliseconds(900 * kFew));
  children[1]->Kill(SIGCONT);
  for (std::size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(children[rank]->Wait(), 0) << desk_->reports[rank].text.data();
}

// Each look counts the patient one anew; its journal must not grow with the hours.
TEST_F(ProcessTest, who_waits_patiently_has_come_once) {
  Child paused([&] {
    Rank self(directory_, 1);
    self.session.lifecycle = Lifecycle::kPaused;
    desk_->tokens[1] = self.session.Export(AllocationId{1});
    ready_.Pass();
    come_[0].Await();
    return self.Arrive(CycleKind::kResume, 1) ? 0 : 1;
  });
  Rank leader(directory_, 0, 100 * kFew);
  leader.session.lifecycle = Lifecycle::kPaused;
  ready_.Await();
  ASSERT_TRUE(leader.ImportPatiently(desk_->tokens[1], AllocationId{5}));
  leader.session.Add(Identity(1).session);
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(600 * kFew));
    come_[0].Pass();
  });
  const auto round = leader.Arrive(CycleKind::kResume, 1);
  later.join();
  EXPECT_TRUE(round) << round.status().message();
  EXPECT_EQ(paused.Wait(), 0);
  const auto come = leader.session.AwaitFacts<MemberHeard>(2);
  EXPECT_EQ(std::ranges::count(come, leader.identity.session, &MemberHeard::member), 1);
  EXPECT_EQ(std::ranges::count(come, Identity(1).session, &MemberHeard::member), 1);
}

TEST_F(ProcessTest, who_died_before_is_no_member_and_costs_no_second_call) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 3; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      auto self = JoinRing(rank, 3);
      if (rank == 1) ::raise(SIGKILL);
      std::this_thread::sleep_for(milliseconds(20));
      auto round = self->Arrive(CycleKind::kPause, 1);  // while it is dying, or after
      Note(rank, round.status());
      if (!round.ok() || (*round)->Members().size() != 2) return 1;
      if (!(*round)->Vote(PhaseKind::kPauseArrive, {}).status.ok()) return 2;
      return self->session.WaitUntilLost(1) ? 0 : 3;
    }));
  }
  for (const int rank : {0, 2}) {
    EXPECT_EQ(children[static_cast<std::size_t>(rank)]->Wait(), 0)
        << desk_->reports[static_cast<std::size_t>(rank)].text.data();
  }
}

TEST_F(ProcessTest, a_loss_that_somebody_else_saw_is_noticed_here) {
  Child other([&] { return OwnUntilKilled(); });
  Rank self(directory_, 0);
  ready_.Await();
  ASSERT_TRUE(self.peers->Import(desk_->tokens[1], AllocationId{5}));
  EXPECT_FALSE(self.peers->AwaitLoss(Identity(1).session, kLossPatience));
  other.Kill(SIGKILL);
  EXPECT_TRUE(self.peers->AwaitLoss(Identity(1).session, kLossPatience));
  EXPECT_EQ(self.session.lost().size(), 1u);
  EXPECT_TRUE(self.peers->AwaitLoss(Identity(7).session, kLossPatience));  // nobody that anything was shared with
}

TEST_F(ProcessTest, a_peer_says_where_it_is_in_its_cycles_and_is_not_waited_for) {
  Child other([&] { return OwnUntilKilled(); });
  Rank self(directory_, 0);
  ready_.Await();
  ASSERT_TRUE(self.peers->Import(desk_->tokens[1], AllocationId{5}));
  EXPECT_EQ(self.peers->ProgressOf(Identity(1).session, "").cycle, 1U);
  other.StopRunning();
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(self.peers->ProgressOf(Identity(1).session, "").cycle, 0U);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
  other.Kill(SIGKILL);
  EXPECT_TRUE(self.peers->AwaitLoss(Identity(1).session, kLossPatience));
  EXPECT_EQ(self.peers->ProgressOf(Identity(1).session, "").cycle, 0U);
}

TEST_F(ProcessTest, a_death_is_known_though_somebody_removed_all_sockets) {
  Child other([&] { return OwnUntilKilled(); });
  Rank self(directory_, 0);
  self.session.forget_lost = true;
  ready_.Await();
  ASSERT_TRUE(self.peers->Import(desk_->tokens[1], AllocationId{5}));
  self.session.Add(Identity(1).session);
  directory_.RemoveSockets();
  other.StopRunning();
  EXPECT_EQ(self.Arrive(CycleKind::kPause, 1).status().code(), Code::kRefused) << "it lives";
  EXPECT_TRUE(self.session.lost().empty());
  other.Kill(SIGKILL);
  other.Wait();
  const auto alone = self.Arrive(CycleKind::kPause, 1);
  ASSERT_TRUE(alone) << alone.status().message();
  EXPECT_EQ((*alone)->Members().size(), 1U);
  EXPECT_TRUE(self.session.WaitUntilLost(1));
}

class VictimTest : public ProcessTest, public ::testing::WithParamInterface<int> {};

TEST_P(VictimTest, killed_during_a_vote_is_named_at_once_by_all) {
  const int victim = GetParam();
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 4; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      auto self = JoinRing(rank, 4);
      auto round = self->Arrive(CycleKind::kPause, 1);
      if (!round) return 1;
      if (!(*round)->Vote(PhaseKind::kPauseArrive, {}).status.ok()) return 2;
      if (rank == victim) {
        ready_.Pass();
        never_.Await();
      }
      const auto begun = std::chrono::steady_clock::now();
      const Decision decision = (*round)->Vote(PhaseKind::kPauseSave, {});
      const Status& status = decision.status;
      Note(rank, status, decision.culprit, begun);
      // Without its leader a round cannot go on before there is another; then the survivors undo together.
      if ((*round)->Leaderless() != (victim == 0)) return 3;
      if (victim == 0) {
        if ((*round)->Vote(PhaseKind::kResumeOpen, {}).status.ok()) return 4;
        const auto gathered = (*round)->Regather();
        if (!gathered.ok() || gathered->has_value() || (*round)->Leaderless()) return 5;
        if ((*round)->Members().size() != 3) return 6;
      }
      return (*round)->Vote(PhaseKind::kResumeOpen, {}).status.ok() ? 0 : 7;
    }));
  }
  ready_.Await();
  std::this_thread::sleep_for(milliseconds(200));
  children[static_cast<std::size_t>(victim)]->Kill(SIGKILL);
  for (int rank = 0; rank < 4; ++rank) {
    if (rank == victim) continue;
    EXPECT_EQ(children[static_cast<std::size_t>(rank)]->Wait(), 0) << rank;
    ExpectLost(rank, victim, "died");
    EXPECT_EQ(desk_->reports[static_cast<std::size_t>(rank)].culprit, Identity(victim).session.value);
  }
}
INSTANTIATE_TEST_SUITE_P(Rank, VictimTest, ::testing::Values(0, 2),
                         [](const auto& rank) { return rank.param == 0 ? std::string("leader") : std::string("member"); });

// The leader cannot say it: it was killed, or is stopped.
class LostLeader : public ProcessTest, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(By, LostLeader, ::testing::Values(SIGKILL, SIGSTOP),
                         [](const auto& by) { return by.param == SIGKILL ? std::string("Kill") : std::string("Stop"); });

TEST_P(LostLeader, who_missed_the_last_decision_learns_how_the_others_ended) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 3; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      auto self = JoinRing(rank, 3, 500 * kFew);
      self->session.lifecycle = Lifecycle::kPausing;
      auto round = self->Arrive(CycleKind::kPause, 1);
      if (!round) return 1;
      if (rank == 1) self->session.lifecycle = Lifecycle::kPaused;  // it heard that the pause had passed
      ready_.Pass();
      if (rank != 2) {
        never_.Await();
        return 0;
      }
      (void)(*round)->Vote(PhaseKind::kPauseGone, {}).status;
      if (!(*round)->Leaderless()) return 2;
      const auto ended = (*round)->Regather();
      return ended.ok() && *ended == Lifecycle::kPaused && !(*round)->Leaderless() ? 0 : 3;
    }));
  }
  for (int rank = 0; rank < 3; ++rank) ready_.Await();  // all have arrived
  children[0]->Kill(GetParam());
  EXPECT_EQ(children[2]->Wait(), 0);
  children[0]->Kill(SIGKILL);
  never_.Pass();
  EXPECT_EQ(children[1]->Wait(), 0);
}

// If each undid for itself, one would import memory that another has not made anew.
TEST_F(ProcessTest, members_of_stopped_leaders_go_on_together_without_them) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 4; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      auto self = JoinRing(rank, 4, 500 * kFew);
      self->session.lifecycle = Lifecycle::kPausing;
      auto round = self->Arrive(CycleKind::kPause, 1);
      if (!round) return 1;
      for (int leader = 0; leader < 2; ++leader) {
        for (int others = 3 - leader; others > 0 && rank == leader; --others) ready_.Await();  // it began the round for all
        rank == leader ? (void)::raise(SIGSTOP) : ready_.Pass();
        Note(rank, (*round)->Vote(PhaseKind::kPauseSave, {}).status);
        if (rank == leader) return 0;
        if (!(*round)->Leaderless()) return 2;
        const auto gathered = (*round)->Regather();
        if (!gathered.ok() || gathered->has_value() || (*round)->Leaderless()) return 3;
        if ((*round)->Members().size() != 3U - static_cast<unsigned>(leader)) return 4;
      }
      const bool passed = (*round)->Vote(PhaseKind::kResumeCreateOwn, {}).status.ok();
      return passed && (*round)->Vote(PhaseKind::kResumeImport, {}).status.ok() ? 0 : 5;
    }));
  }
  for (const std::size_t rank : {2U, 3U}) {
    EXPECT_EQ(children[rank]->Wait(), 0) << rank << ": " << desk_->reports[rank].text.data();
    EXPECT_EQ(desk_->reports[rank].code, static_cast<int>(Code::kTimeout));
  }
  for (const std::size_t leader : {0U, 1U}) {
    children[leader]->Kill(SIGCONT);
    EXPECT_EQ(children[leader]->Wait(), 0);
    EXPECT_NE(desk_->reports[leader].code, static_cast<int>(Code::kOk)) << "the others have left its round";
  }
}

TEST_F(ProcessTest, a_member_stopped_during_a_vote_is_a_timeout_for_all) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 3; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      auto self = JoinRing(rank, 3, 500 * kFew);
      auto round = self->Arrive(CycleKind::kPause, 1);
      if (!round) return 1;
      if (rank == 2) ::raise(SIGSTOP);
      const Decision decision = (*round)->Vote(PhaseKind::kPauseSave, {});
      const Status& status = decision.status;
      Note(rank, status, decision.culprit);
      // Rank 0 counts the votes. Both who waited have looked at the process that they waited for.
      const auto seen = self->session.AwaitFacts<ProcessSeen>(rank == 2 ? 0 : 1);
      const bool stopped = !seen.empty() && seen[0].session == Identity(2).session && seen[0].state == "stopped" &&
                           seen[0].waited_ns >= 400'000'000;
      const auto heard = self->session.AwaitFacts<MemberHeard>(rank == 0 ? 5 : 0);  // three arrivals, two votes
      ready_.Pass();
      never_.Await();
      if (rank < 2 && !stopped) return 2;
      return rank != 0 || heard.size() >= 5 ? 0 : 3;
    }));
  }
  ready_.Await();
  ready_.Await();
  children[2]->Kill(SIGCONT);
  ready_.Await();  // the late one hears the same
  never_.Pass(3);
  for (const auto& child : children) EXPECT_EQ(child->Wait(), 0);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(desk_->reports[rank].code, static_cast<int>(Code::kTimeout));
    EXPECT_EQ(desk_->reports[rank].culprit, Identity(2).session.value);
    EXPECT_STREQ(desk_->reports[rank].text.data(), desk_->reports[0].text.data());
    const std::string text = desk_->reports[rank].text.data();
    EXPECT_NE(text.find("ms for rank 2 (pid "), std::string::npos) << text;
    EXPECT_NE(text.find("is stopped (SIGSTOP?)"), std::string::npos) << text;
  }
}

TEST_F(ProcessTest, a_member_that_is_stopped_before_it_comes_is_named_as_stopped_by_all_that_wait) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 3; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      auto self = JoinRing(rank, 3, 600 * kFew);
      self->session.lifecycle = Lifecycle::kRunning;
      ready_.Pass();
      if (rank == 0) ::raise(SIGSTOP);  // it would count the arrivals
      if (rank == 0) return 0;
      ready_.Pass();
      const auto round = self->Arrive(CycleKind::kPause, 1);
      Note(rank, round.status());
      const auto seen = self->session.AwaitFacts<ProcessSeen>(1);
      const bool found = std::ranges::any_of(
          seen, [](const ProcessSeen& s) { return s.session == Identity(0).session && s.state == "stopped" && s.pid != 0; });
      never_.Await();
      const bool alone = self->culprits.size() == 1 && self->culprits[0].rank == 0;  // the other one has answered
      return found && alone ? 0 : 2;
    }));
  }
  for (int i = 0; i < 5; ++i) ready_.Await();
  std::this_thread::sleep_for(milliseconds(1500 * kFew));
  never_.Pass(2);
  for (std::size_t rank = 1; rank < 3; ++rank) {
    EXPECT_EQ(children[rank]->Wait(), 0);
    const std::string text = desk_->reports[rank].text.data();
    EXPECT_EQ(desk_->reports[rank].code, static_cast<int>(Code::kTimeout)) << text;
    EXPECT_NE(text.find("rank 0 (pid "), std::string::npos) << text;
    EXPECT_NE(text.find("is stopped (SIGSTOP?)"), std::string::npos) << text;
  }
  children[0]->Kill(SIGCONT);
  EXPECT_EQ(children[0]->Wait(), 0);
}

}  // namespace
}  // namespace amem
