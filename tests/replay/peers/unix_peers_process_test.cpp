// Peers in real processes: deaths, stopped processes, forked children, limits of a process.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

#include "replay/peers/messages.h"
#include "replay/peers/unix/socket.h"
#include "tests/in_thread.h"
#include "tests/journal/base/no_descriptors.h"
#include "tests/replay/peers/call_on_board.h"

namespace amem {
namespace {

using namespace test;
using std::chrono::milliseconds;

// Results of a child, for the parent to look at.
struct Report {
  std::array<char, 1000> text{};
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
  void Note(int rank, const Status& status) {
    Report& report = desk_->reports[static_cast<std::size_t>(rank)];
    std::snprintf(report.text.data(), report.text.size(), "%s", status.message().c_str());
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
  const auto paused = CallOnBoards(*importer.peers, CycleKind::kPause, milliseconds(kTimeout));
  EXPECT_TRUE(paused.status.ok()) << "the living pause without it: " << paused.status.message();
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
    importer.session.Add(Identity(0).session);
    const Status late = CallOnBoards(*importer.peers, CycleKind::kPause, milliseconds(300 * kFew)).status;
    EXPECT_EQ(late.code(), Code::kTimeout);
    EXPECT_NE(late.message().find("rank 0 (pid "), std::string::npos) << late.message();
    EXPECT_NE(late.message().find(" ms"), std::string::npos) << late.message();
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
    for (int calls = 0; calls < 2; ++calls) {
      while (::dup(STDERR_FILENO) >= 0) {
      }
      go_[0].Pass();
      if (calls == 0) come_[0].Await();
    }
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
    const Status refused = CallOnBoards(*other.peers, CycleKind::kPause, milliseconds(8000)).status;
    EXPECT_EQ(refused.code(), Code::kNoDescriptors) << refused.message();
    EXPECT_NE(refused.message().find("rank 0"), std::string::npos) << refused.message();
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(6)) << "before the deadline";
    EXPECT_EQ(refused.reported_by(), Identity(0).session);
    come_[0].Pass();
    go_[0].Await();  // what was free meanwhile is taken
    const Status again = CallOnBoards(*other.peers, CycleKind::kPause, milliseconds(8000)).status;
    EXPECT_EQ(again.code(), Code::kNoDescriptors) << "it answers once: " << again.message();
  }
  never_.Pass();
  EXPECT_EQ(poor.Wait(), 0);
}

// Visits of a rank whose process, this one, has no descriptor left: it can only refuse them.
class RefusedVisits : public ProcessTest {
 protected:
  static constexpr std::size_t kVisits = 15;

  RefusedVisits() : self_(directory_, 0) {
    for (std::size_t i = 0; i < kVisits; ++i) sockets_.emplace_back(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    (void)DescriptorsAtRest();
    none_.emplace();
  }

  bool IsAnswered(std::size_t visit, milliseconds patience) {
    sockaddr_un at{AF_UNIX, {}};
    const std::string path = directory_.sockets() / SocketName(Identity(0).session);
    path.copy(at.sun_path, sizeof at.sun_path - 1);
    EXPECT_EQ(::connect(sockets_[visit].get(), reinterpret_cast<const sockaddr*>(&at), sizeof at), 0) << path;
    const auto begun = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() < begun + patience)
      if (ReceivePacket(sockets_[visit].get(), bytes_, false).state == Packet::State::kMessage) return true;
    return false;
  }
  static UniqueFd Steal() { return UniqueFd(::dup(STDERR_FILENO)); }

  Rank self_;
  std::vector<UniqueFd> sockets_;
  std::vector<std::byte> bytes_ = std::vector<std::byte>(kMessageBytesMax);
  std::optional<NoDescriptors> none_;
};

TEST_F(RefusedVisits, leave_the_process_the_descriptor_that_it_answers_with) {
  int stolen = 0;
  for (std::size_t visit = 0; visit < kVisits; ++visit) {
    ASSERT_TRUE(IsAnswered(visit, std::chrono::seconds(10))) << visit;
    for (int i = 0; i < 2000; ++i) stolen += Steal() ? 1 : 0;
  }
  EXPECT_EQ(stolen, 0) << "it was free after the answer";
}

TEST_F(RefusedVisits, are_answered_again_once_a_descriptor_that_was_lost_can_be_had) {
  rlimit full{};
  ::getrlimit(RLIMIT_NOFILE, &full);
  const rlimit low{STDERR_FILENO + 1, full.rlim_max};  // so that not even a descriptor that was closed is to be had
  ::setrlimit(RLIMIT_NOFILE, &low);
  EXPECT_FALSE(IsAnswered(0, std::chrono::seconds(3)));
  ::shutdown(sockets_[0].get(), SHUT_RDWR);  // it is taken in for a moment
  ::setrlimit(RLIMIT_NOFILE, &full);
  const auto given_back = std::chrono::steady_clock::now();
  for (int in_vain = 0; in_vain < 5 && std::chrono::steady_clock::now() < given_back + std::chrono::seconds(10);) {
    in_vain = Steal() ? 0 : in_vain + 1;
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_TRUE(IsAnswered(1, std::chrono::seconds(10)));
}

// Descriptors may be had again soon, so that nobody is refused at once, whatever there was before.
TEST_F(RefusedVisits, are_taken_in_if_a_descriptor_comes_free_in_time) {
  ASSERT_TRUE(IsAnswered(0, std::chrono::seconds(10)));
  std::this_thread::sleep_for(milliseconds(1200));  // there may have been descriptors meanwhile
  auto visit = test::InThread([&] { return IsAnswered(1, std::chrono::seconds(2)); });
  std::this_thread::sleep_for(milliseconds(400));
  none_.reset();
  EXPECT_FALSE(visit.get()) << "it was refused";
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
    const Status paused = CallOnBoards(*self.peers, CycleKind::kPause, milliseconds(kTimeout)).status;
    Note(0, paused);
    never_.Await();
    return paused.ok() ? 0 : 3;
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
  come_[0].Pass();
  const Status paused = CallOnBoards(*importer.peers, CycleKind::kPause, milliseconds(kTimeout)).status;
  EXPECT_TRUE(paused.ok()) << paused.message();
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
    // Alone: it shares nothing any more.
    if (!CallOnBoards(*self.peers, CycleKind::kPause, milliseconds(kTimeout)).status.ok()) return 3;
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
    const Status refused = CallOnBoards(*self.peers, CycleKind::kPause, milliseconds(300 * kFew)).status;
    EXPECT_EQ(refused.code(), Code::kNoDescriptors) << refused.message();
  }
  EXPECT_TRUE(self.session.lost().empty());
  other.StopRunning();
  {
    const NoDescriptors none;
    EXPECT_FALSE(CallOnBoards(*self.peers, CycleKind::kPause, milliseconds(300 * kFew)).status.ok())
        << "alone, without a peer that lives";
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

TEST_F(ProcessTest, who_died_before_is_no_member_and_costs_no_second_call) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 3; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank] {
      auto self = JoinRing(rank, 3);
      if (rank == 1) ::raise(SIGKILL);
      never_.Await();  // it has died
      const Status paused = CallOnBoards(*self->peers, CycleKind::kPause, milliseconds(kTimeout)).status;
      Note(rank, paused);
      if (!paused.ok()) return 1;
      return self->session.WaitUntilLost(1) ? 0 : 3;
    }));
  }
  children[1]->Wait();
  never_.Pass(2);
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

TEST_F(ProcessTest, a_death_is_known_though_somebody_removed_all_sockets) {
  Child other([&] { return OwnUntilKilled(); });
  Rank self(directory_, 0);
  self.session.forget_lost = true;
  ready_.Await();
  ASSERT_TRUE(self.peers->Import(desk_->tokens[1], AllocationId{5}));
  self.session.Add(Identity(1).session);
  directory_.RemoveSockets();
  other.StopRunning();
  EXPECT_EQ(CallOnBoards(*self.peers, CycleKind::kPause, milliseconds(300 * kFew)).status.code(), Code::kTimeout) << "it lives";
  EXPECT_TRUE(self.session.lost().empty());
  other.Kill(SIGKILL);
  other.Wait();
  const Status alone = CallOnBoards(*self.peers, CycleKind::kPause, milliseconds(kTimeout)).status;
  EXPECT_TRUE(alone.ok()) << alone.message();
  EXPECT_TRUE(self.session.WaitUntilLost(1));
}

}  // namespace
}  // namespace amem
