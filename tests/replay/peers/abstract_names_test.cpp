// Ranks that have no directory in common, as containers with a /tmp each: they find each other by abstract sockets.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>

#include "tests/replay/peers/call_on_board.h"

namespace amem {
namespace {

using namespace test;

// A rank with a directory of its own. Ids must be unlike any other's on this host.
struct Alone {
  explicit Alone(std::int32_t rank, SessionId session_id, const std::filesystem::path& sockets = {})
      : identity(Identity(rank)), session(session_id) {
    identity.session = session_id;
    UnixPeersOptions options{sockets.empty() ? directory.sockets() : sockets, {}, {}};
    options.abstract_names = true;
    options.report = [this](const std::string& message) { said = message; };
    auto started = UnixPeers::Start(identity, options, session);
    if (started) peers = *std::move(started);
    if (!started) problem = started.status();
  }
  TemporaryDirectory directory;
  PeerIdentity identity;
  FakeSession session;
  std::string said;
  std::unique_ptr<UnixPeers> peers;
  Status problem;
};

class AbstractNames : public ::testing::Test {
 protected:
  static SessionId Random() {
    const Secret secret = *RandomSecret();
    SessionId id;
    std::memcpy(&id.value, secret.data(), sizeof id.value);
    return id;
  }
  // In a child: an owner with a /tmp of its own, until it is told to go.
  int Own(const SessionId id, Token& token, const Baton& ready, const Baton& go, bool in_order, bool removed) {
    Alone self(0, id, removed ? common_.sockets() : std::filesystem::path());
    if (!self.peers || !self.said.empty()) return 1;
    token = self.session.Export(AllocationId{1});
    ready.Pass();
    go.Await();
    if (!in_order) ::raise(SIGKILL);
    self.peers->Stop();
    ready.Pass();
    go.Await();  // as a process does that has much to do before it ends
    return 0;
  }
  // `removed`: they share a directory, until somebody removes it.
  void HowItEnded(bool in_order, bool removed, const char* expected) {
    auto* token =
        static_cast<Token*>(::mmap(nullptr, sizeof(Token), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    Baton ready, go;
    const SessionId id = Random();
    Child owner([&] { return Own(id, *token, ready, go, in_order, removed); });
    ready.Await();
    Alone importer(1, Random(), removed ? common_.sockets() : std::filesystem::path());
    ASSERT_TRUE(importer.peers) << importer.problem.message();
    const auto shared = importer.peers->Import(*token, AllocationId{5});
    ASSERT_TRUE(shared.ok()) << shared.status().message();
    importer.session.Add(id);
    importer.session.forget_lost = true;
    if (removed) common_.RemoveSockets();
    go.Pass();
    ASSERT_TRUE(importer.session.WaitUntilLost(1));
    EXPECT_EQ(importer.session.lost()[0].second, expected);
    const Status alone = CallOnBoards(*importer.peers, CycleKind::kPause, std::chrono::seconds(20)).status;
    EXPECT_TRUE(alone.ok()) << "it is known to have ended: " << alone.message();
    go.Pass();
    EXPECT_EQ(owner.Wait(), in_order ? 0 : 1000 + SIGKILL);
    ::munmap(token, sizeof(Token));
  }
  TemporaryDirectory common_;
};

TEST_F(AbstractNames, ranks_with_a_tmp_each_share_and_pause) {
  Alone a(0, Random()), b(1, Random());
  ASSERT_TRUE(a.peers && b.peers);
  const auto shared = b.peers->Import(a.session.Export(AllocationId{1}), AllocationId{5});
  ASSERT_TRUE(shared.ok()) << shared.status().message();
  b.session.Add(a.identity.session);
  Status other;
  std::thread calls([&] { other = CallOnBoards(*b.peers, CycleKind::kPause, std::chrono::seconds(20)).status; });
  const Status paused = CallOnBoards(*a.peers, CycleKind::kPause, std::chrono::seconds(20)).status;
  calls.join();
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_TRUE(other.ok()) << other.message();
}

TEST_F(AbstractNames, a_rank_without_a_socket_directory_is_found_and_says_so_once) {
  const TemporaryDirectory directory;
  const auto squatted = directory.path() / "sockets";
  std::filesystem::create_directory(squatted);
  ::chmod(squatted.c_str(), 0777);
  Alone a(0, Random(), squatted), b(1, Random());
  ASSERT_TRUE(a.peers) << a.problem.message();
  EXPECT_NE(a.said.find("open to other users"), std::string::npos) << a.said;
  EXPECT_NE(a.said.find("abstract socket"), std::string::npos) << a.said;
  EXPECT_EQ(b.said, "");
  EXPECT_TRUE(b.peers->Import(a.session.Export(AllocationId{1}), AllocationId{5}).ok());
  EXPECT_TRUE(a.peers->Import(b.session.Export(AllocationId{2}), AllocationId{6}).ok());
}

TEST_F(AbstractNames, a_death_elsewhere_is_told_as_a_death) { HowItEnded(false, false, kPeerDied); }
TEST_F(AbstractNames, an_end_in_order_elsewhere_is_told_as_one) { HowItEnded(true, false, "has closed"); }
TEST_F(AbstractNames, a_death_after_the_directory_was_removed_is_told_as_a_death) { HowItEnded(false, true, kPeerDied); }
TEST_F(AbstractNames, an_end_in_order_after_the_directory_was_removed_is_told_as_one) { HowItEnded(true, true, "has closed"); }

TEST_F(AbstractNames, a_rank_that_cannot_be_reached_is_told_with_what_to_do) {
  Alone a(0, Random());
  const auto lost = a.peers->Import(Token{Random(), AllocationId{1}, {}, 0}, AllocationId{5});
  EXPECT_EQ(lost.status().code(), Code::kPeerLost);
  EXPECT_NE(lost.status().message().find("AMEM_SOCKET_DIR"), std::string::npos) << lost.status().message();
}

}  // namespace
}  // namespace amem
