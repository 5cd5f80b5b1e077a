// Sharing between sessions over Unix sockets: several sessions in one process.
#include "replay/peers/unix/unix_peers.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <random>

#include "replay/peers/messages.h"
#include "replay/peers/unix/socket.h"
#include "tests/in_thread.h"
#include "tests/replay/peers/call_on_board.h"

namespace amem {
namespace {

using namespace test;
using std::chrono::milliseconds;

class UnixPeersTest : public ::testing::Test {
 protected:
  TemporaryDirectory directory_;

  // A connection that has not said hello.
  UniqueFd Unauthenticated(SessionId to) const {
    auto at = OpenSocketDirectory(directory_.sockets());
    auto connected = ConnectTo(at->get(), to);
    return connected ? std::move(connected->socket) : UniqueFd();
  }
  static std::pair<Packet, std::vector<std::byte>> NextPacket(const UniqueFd& fd) {
    std::vector<std::byte> bytes(kMessageBytesMax);
    Packet packet;
    for (int i = 0; i < 5000 && packet.state == Packet::State::kNothing; ++i) {
      packet = ReceivePacket(fd.get(), bytes, false);
      std::this_thread::sleep_for(milliseconds(1));
    }
    bytes.resize(packet.bytes);
    return {std::move(packet), std::move(bytes)};
  }
  static HelloMessage HelloOfRank5(const Rank& to, Purpose purpose = {}) {
    HelloMessage hello{kPeerProtocol, kPeerProtocolLeast};
    hello.purpose = purpose;
    hello.self = Identity(5);
    hello.to = to.identity.session;
    return hello;
  }
  // What comes back when a greeting is refused; ok if it is not.
  static Status AnswerTo(const UniqueFd& fd, const HelloMessage& hello) {
    EXPECT_EQ(SendPacket(fd.get(), *EncodeMessage({1, hello}), {}), Sent::kDone);
    const auto [packet, bytes] = NextPacket(fd);
    EXPECT_EQ(packet.state, Packet::State::kMessage);
    const auto message = DecodeMessage(bytes);
    EXPECT_TRUE(message);
    const auto* failure = message ? std::get_if<FailureMessage>(&message->body) : nullptr;
    return failure == nullptr ? Status{} : failure->status;
  }
};

ino_t InodeOf(int fd) {
  struct stat info {};
  ::fstat(fd, &info);
  return info.st_ino;
}

TEST_F(UnixPeersTest, import_hands_over_the_memory_its_size_and_properties) {
  Rank owner(directory_, 0), importer(directory_, 1);
  ASSERT_TRUE(owner.peers && importer.peers) << owner.problem.message() << importer.problem.message();
  const Token token = owner.session.Export(AllocationId{7}, 12288);
  auto one = importer.peers->Import(token, AllocationId{70});
  auto two = importer.peers->Import(token, AllocationId{71});
  ASSERT_TRUE(one && two) << one.status().message();
  EXPECT_EQ(one->bytes, 12288u);
  EXPECT_EQ(one->properties.location, (Location{LocationType::kDevice, 3}));
  EXPECT_EQ(one->tag, MemoryTag::kUser);
  EXPECT_EQ(InodeOf(one->descriptor.get()), InodeOf(two->descriptor.get()));
  EXPECT_NE(::fcntl(one->descriptor.get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(owner.session.references(), 2u);
}

TEST_F(UnixPeersTest, both_sides_hear_of_each_other_once) {
  Rank owner(directory_, 0), importer(directory_, 1);
  for (unsigned i = 1; i <= 5; ++i) ASSERT_TRUE(importer.ImportFrom(owner, AllocationId{i}, AllocationId{10 + i}));
  for (unsigned i = 1; i <= 5; ++i) ASSERT_TRUE(owner.ImportFrom(importer, AllocationId{i}, AllocationId{10 + i}));
  ASSERT_EQ(owner.session.connected().size(), 1u);
  ASSERT_EQ(importer.session.connected().size(), 1u);
  EXPECT_EQ(owner.session.connected()[0], importer.identity);
  EXPECT_EQ(importer.session.connected()[0], owner.identity);
}

TEST_F(UnixPeersTest, a_wrong_secret_opens_nothing) {
  Rank owner(directory_, 0), importer(directory_, 1);
  Token token = owner.session.Export(AllocationId{7});
  token.secret[3] ^= 1;
  auto shared = importer.peers->Import(token, AllocationId{70});
  ASSERT_FALSE(shared);
  EXPECT_EQ(shared.status().code(), Code::kRefused);
  EXPECT_NE(shared.status().message().find("allocation 7 from rank 0 (pid "), std::string::npos) << shared.status().message();
  EXPECT_EQ(owner.session.references(), 0u);
}

TEST_F(UnixPeersTest, a_session_that_does_not_exist_is_lost_and_not_waited_for) {
  Rank importer(directory_, 1);
  auto shared = importer.peers->Import({SessionId{99}, AllocationId{1}, {}, 0}, AllocationId{70});
  EXPECT_EQ(shared.status().code(), Code::kPeerLost);
  EXPECT_NE(shared.status().message().find("session 0x63"), std::string::npos) << shared.status().message();
}

TEST_F(UnixPeersTest, another_user_is_turned_away_on_both_ends) {
  FakeSession mine(SessionId{1}), theirs(SessionId{2});
  PeerIdentity self = Identity(0);
  self.session = SessionId{1};
  auto owner = UnixPeers::Start(self, {directory_.sockets(), Deadlines(milliseconds(400)), ::geteuid() + 1}, mine);
  self.session = SessionId{2};
  auto importer = UnixPeers::Start(self, {directory_.sockets(), Deadlines(milliseconds(400)), {}}, theirs);
  ASSERT_TRUE(owner && importer);
  EXPECT_FALSE((*importer)->Import(mine.Export(AllocationId{1}), AllocationId{5}));  // the owner hangs up
  auto other_way = (*owner)->Import(theirs.Export(AllocationId{1}), AllocationId{5});
  EXPECT_EQ(other_way.status().code(), Code::kRefused);
  EXPECT_NE(other_way.status().message().find("its socket belongs to user"), std::string::npos)
      << other_way.status().message() << ": it does not even greet";
  EXPECT_EQ(mine.references() + theirs.references(), 0u);
}

TEST_F(UnixPeersTest, a_thousand_allocations_come_again_in_order) {
  Rank owner(directory_, 0), importer(directory_, 1);
  const unsigned count = 1000 / kFew;
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const rlimit raised{before.rlim_max, before.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &raised);
  std::vector<ShareRequest> requests;
  std::vector<ino_t> inodes;
  for (unsigned i = 1; i <= count; ++i) {
    auto shared = importer.ImportFrom(owner, AllocationId{i}, AllocationId{5000 + i});
    ASSERT_TRUE(shared) << shared.status().message();
    inodes.push_back(InodeOf(shared->descriptor.get()));
    requests.push_back({AllocationId{i}, AllocationId{5000 + i}});
  }
  std::ranges::reverse(requests);
  auto again = importer.Reimport(owner.identity.session, requests);
  ASSERT_TRUE(again) << again.status().message();
  ASSERT_EQ(again->size(), count);
  for (unsigned i = 0; i < count; ++i) EXPECT_EQ(InodeOf((*again)[i].descriptor.get()), inodes[count - 1 - i]);
}

TEST_F(UnixPeersTest, importing_again_is_all_or_an_error_and_leaks_nothing) {
  Rank owner(directory_, 0), importer(directory_, 1);
  std::vector<ShareRequest> requests;
  for (unsigned i = 1; i <= 600 / kFew; ++i) {
    ASSERT_TRUE(importer.ImportFrom(owner, AllocationId{i}, AllocationId{5000 + i}));
    requests.push_back({AllocationId{i}, AllocationId{5000 + i}});
  }
  requests[requests.size() / 3].as = AllocationId{4};  // not a reference of ours
  const std::size_t before = DescriptorsAtRest();
  for (int i = 0; i < 3; ++i) {
    auto again = importer.Reimport(owner.identity.session, requests);
    ASSERT_FALSE(again);
    EXPECT_EQ(again.status().code(), Code::kRefused);
  }
  EXPECT_EQ(DescriptorsAtRest(), before);
  EXPECT_TRUE(importer.ImportFrom(owner, AllocationId{9000}, AllocationId{9001}));  // the connection is still good
}

TEST_F(UnixPeersTest, drops_arrive_in_order_and_none_is_lost) {
  Rank owner(directory_, 0), importer(directory_, 1);
  const unsigned count = 2000 / kFew;
  for (unsigned i = 1; i <= count; ++i)
    ASSERT_TRUE(importer.ImportFrom(owner, AllocationId{i % 10 + 1}, AllocationId{i + 100}));
  EXPECT_EQ(owner.session.references(), count);
  for (unsigned i = 1; i <= count; ++i)
    importer.peers->DropReference({owner.identity.session, AllocationId{i % 10 + 1}}, AllocationId{i + 100});
  EXPECT_TRUE(owner.session.WaitForReferences(0)) << owner.session.references();
}

TEST_F(UnixPeersTest, drops_do_not_wait_for_an_owner_that_is_busy) {
  Rank owner(directory_, 0), importer(directory_, 1), other(directory_, 2);
  const unsigned count = 2000 / kFew;
  for (unsigned i = 1; i <= count; ++i)
    ASSERT_TRUE(importer.ImportFrom(owner, AllocationId{i % 10 + 1}, AllocationId{i + 100}));
  owner.session.import_takes = milliseconds(2000);
  const Token token = owner.session.Export(AllocationId{50});
  std::atomic<bool> imported = false;
  std::thread busy([&] {
    (void)other.peers->Import(token, AllocationId{3});
    imported = true;
  });
  std::this_thread::sleep_for(milliseconds(100));
  for (unsigned i = 1; i <= count; ++i)
    importer.peers->DropReference({owner.identity.session, AllocationId{i % 10 + 1}}, AllocationId{i + 100});
  EXPECT_FALSE(imported);
  busy.join();
  EXPECT_TRUE(owner.session.WaitForReferences(1)) << owner.session.references();
}

TEST_F(UnixPeersTest, a_drop_of_what_was_never_given_does_not_reach_the_owner) {
  Rank owner(directory_, 0), importer(directory_, 1), other(directory_, 2);
  ASSERT_TRUE(importer.ImportFrom(owner, AllocationId{1}, AllocationId{100}));
  ASSERT_TRUE(other.ImportFrom(owner, AllocationId{2}, AllocationId{200}));
  other.peers->DropReference({owner.identity.session, AllocationId{1}}, AllocationId{100});
  ASSERT_TRUE(other.ImportFrom(owner, AllocationId{3}, AllocationId{201}));  // behind the drop
  EXPECT_EQ(owner.session.drops, 0);
  EXPECT_EQ(owner.session.references(), 3u);
}

TEST_F(UnixPeersTest, an_import_that_took_too_long_leaves_no_reference) {
  Rank owner(directory_, 0), importer(directory_, 1, 100 * kFew);
  ASSERT_TRUE(importer.ImportFrom(owner, AllocationId{1}, AllocationId{100}));
  owner.session.import_takes = milliseconds(300 * kFew);
  auto late = importer.ImportFrom(owner, AllocationId{2}, AllocationId{101});
  ASSERT_FALSE(late);
  EXPECT_EQ(late.status().code(), Code::kTimeout);
  EXPECT_NE(late.status().message().find("rank 0 (pid "), std::string::npos) << late.status().message();
  EXPECT_NE(late.status().message().find(" ms"), std::string::npos) << late.status().message();
  std::this_thread::sleep_for(milliseconds(400 * kFew));
  EXPECT_TRUE(owner.session.WaitForReferences(1));
  owner.session.import_takes = milliseconds(0);
  const auto next = importer.peers->Import(owner.session.Export(AllocationId{3}, 12288), AllocationId{102});
  ASSERT_TRUE(next) << next.status().message();
  EXPECT_EQ(next->bytes, 12288U) << "the late answer is not this one's";
}

TEST_F(UnixPeersTest, importing_again_takes_no_late_answer_to_an_import_that_gave_up) {
  Rank owner(directory_, 0), importer(directory_, 1, 100 * kFew);
  const auto first = importer.ImportFrom(owner, AllocationId{1}, AllocationId{100});
  ASSERT_TRUE(first);
  owner.session.import_takes = milliseconds(200 * kFew);
  EXPECT_EQ(importer.ImportFrom(owner, AllocationId{2}, AllocationId{101}).status().code(), Code::kTimeout);
  std::this_thread::sleep_for(milliseconds(200 * kFew));
  const auto again = importer.Reimport(owner.identity.session, {{AllocationId{1}, AllocationId{100}}});
  ASSERT_TRUE(again) << again.status().message();
  ASSERT_EQ(again->size(), 1U);
  EXPECT_EQ(InodeOf(again->front().descriptor.get()), InodeOf(first->descriptor.get())) << "it is the other allocation's";
}

TEST_F(UnixPeersTest, threads_that_import_from_one_owner_take_turns_without_a_pause) {
  Rank owner(directory_, 0), importer(directory_, 1, 20'000 * kFew);
  ASSERT_TRUE(importer.ImportFrom(owner, AllocationId{1}, AllocationId{100}));
  owner.session.import_takes = milliseconds(50);
  const auto began = std::chrono::steady_clock::now();
  std::vector<std::future<bool>> imports;
  for (unsigned i = 1; i <= 3; ++i)
    imports.push_back(
        test::InThread([&, i] { return importer.ImportFrom(owner, AllocationId{i + 1}, AllocationId{100 + i}).ok(); }));
  for (std::future<bool>& one : imports) EXPECT_TRUE(one.get());
  EXPECT_LT(std::chrono::steady_clock::now() - began, milliseconds(10'000 * kFew)) << "whose turn it is was not told";
}

// The owner finds the hello, and the end of its connection, when its service has returned from another peer's driver call.
TEST_F(UnixPeersTest, a_first_import_that_gave_up_on_a_busy_owner_loses_neither_of_them) {
  Rank owner(directory_, 0), slow(directory_, 2), hasty(directory_, 1, 150 * kFew);
  ASSERT_TRUE(owner.ImportFrom(hasty, AllocationId{1}, AllocationId{100}));
  ASSERT_TRUE(slow.ImportFrom(owner, AllocationId{1}, AllocationId{100}));
  owner.session.import_takes = milliseconds(400 * kFew);
  auto busy = test::InThread([&] { return slow.ImportFrom(owner, AllocationId{2}, AllocationId{101}).ok(); });
  std::this_thread::sleep_for(milliseconds(50 * kFew));
  EXPECT_EQ(hasty.ImportFrom(owner, AllocationId{3}, AllocationId{102}).status().code(), Code::kTimeout);
  EXPECT_TRUE(busy.get());
  owner.session.import_takes = milliseconds(0);
  const auto again = hasty.ImportPatiently(owner.session.Export(AllocationId{4}), AllocationId{103});
  EXPECT_TRUE(again) << again.status().message();
  EXPECT_TRUE(owner.ImportFrom(hasty, AllocationId{2}, AllocationId{104}));
  EXPECT_TRUE(owner.session.lost().empty());
  EXPECT_TRUE(hasty.session.lost().empty());
}

TEST_F(UnixPeersTest, a_peer_that_stops_has_closed_and_its_references_are_gone) {
  Rank owner(directory_, 0);
  auto importer = std::make_unique<Rank>(directory_, 1);
  ASSERT_TRUE(importer->ImportFrom(owner, AllocationId{1}, AllocationId{100}));
  ASSERT_TRUE(owner.ImportFrom(*importer, AllocationId{1}, AllocationId{100}));
  importer->peers->Stop();
  ASSERT_TRUE(owner.session.WaitUntilLost(1));
  EXPECT_EQ(owner.session.lost()[0].second, "has closed");
  EXPECT_EQ(owner.session.references(), 0u);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(owner.session.lost().size(), 1u);  // once, though two connections closed
  auto again = owner.Reimport(importer->identity.session, {{AllocationId{1}, AllocationId{100}}});
  EXPECT_EQ(again.status().code(), Code::kPeerLost);
  EXPECT_EQ(importer->peers->Import(owner.session.Export(AllocationId{2}), AllocationId{9}).status().code(), Code::kPeerLost);
  EXPECT_TRUE(importer->session.lost().empty());  // no calls after Stop
}

TEST_F(UnixPeersTest, a_stop_wakes_whoever_waits) {
  Rank owner(directory_, 0), importer(directory_, 1);
  ASSERT_TRUE(importer.ImportFrom(owner, AllocationId{1}, AllocationId{100}));
  std::thread stopper([&] {
    std::this_thread::sleep_for(milliseconds(100));
    importer.peers->Stop();
  });
  const auto began = std::chrono::steady_clock::now();
  const auto outcome = CallOnBoards(*importer.peers, CycleKind::kPause, milliseconds(60'000));  // the owner never comes
  stopper.join();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20));
  EXPECT_EQ(outcome.status.code(), Code::kPeerLost) << outcome.status.message();
  EXPECT_EQ(outcome.culprit, importer.identity.session);
}

TEST_F(UnixPeersTest, silent_connections_delay_nobody_and_are_bounded) {
  Rank owner(directory_, 0), importer(directory_, 1);
  std::vector<UniqueFd> unauthenticated;
  for (int i = 0; i < 300; ++i) unauthenticated.push_back(Unauthenticated(owner.identity.session));
  const auto begun = std::chrono::steady_clock::now();
  ASSERT_TRUE(importer.ImportFrom(owner, AllocationId{1}, AllocationId{100}));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, milliseconds(4000)) << "one of them may be silent for 5 s";
  std::size_t hung_up = 0;
  for (const auto& fd : unauthenticated) {
    std::array<std::byte, 64> bytes;
    hung_up += ReceivePacket(fd.get(), bytes, false).state == Packet::State::kClosed ? 1u : 0u;
  }
  EXPECT_GE(hung_up, 200u);
  EXPECT_TRUE(owner.session.lost().empty());
}

// As a process that was stopped in between finds it, too: a peer whose connection were closed would take it for dead.
TEST_F(UnixPeersTest, a_hello_that_came_counts_however_late_it_is_read) {
  constexpr milliseconds kSilent{300};
  Rank owner(directory_, 0, 20'000, 0, kSilent), first(directory_, 1), second(directory_, 2);
  ASSERT_TRUE(first.ImportFrom(owner, AllocationId{1}, AllocationId{100}));
  ASSERT_TRUE(second.ImportFrom(owner, AllocationId{2}, AllocationId{100}));
  // While the service is in the first import, a connection and the second import come; it sees both at once.
  owner.session.import_takes = milliseconds(500);
  auto one = test::InThread([&] { return first.ImportFrom(owner, AllocationId{3}, AllocationId{101}).ok(); });
  std::this_thread::sleep_for(milliseconds(150));
  owner.session.import_takes = 2 * kSilent;  // longer than a connection may be silent
  const UniqueFd fd = Unauthenticated(owner.identity.session);
  const HelloMessage hello = HelloOfRank5(owner, Purpose::kRound);
  ASSERT_EQ(SendPacket(fd.get(), *EncodeMessage({1, hello}), {}), Sent::kDone);
  auto two = test::InThread([&] { return second.ImportFrom(owner, AllocationId{4}, AllocationId{101}).ok(); });
  EXPECT_TRUE(one.get());
  EXPECT_TRUE(two.get());
  const auto [packet, bytes] = NextPacket(fd);
  ASSERT_EQ(packet.state, Packet::State::kMessage) << ErrnoText(packet.error);
  const auto answer = DecodeMessage(bytes);
  ASSERT_TRUE(answer);
  EXPECT_NE(std::get_if<WelcomeMessage>(&answer->body), nullptr);
}

TEST_F(UnixPeersTest, garbage_ends_the_connection_and_nothing_else) {
  Rank owner(directory_, 0), importer(directory_, 1);
  ASSERT_TRUE(importer.ImportFrom(owner, AllocationId{1}, AllocationId{100}));
  std::mt19937_64 random(7);
  const HelloMessage hello = HelloOfRank5(owner);
  for (int i = 0; i < 300 / kFew; ++i) {
    const UniqueFd fd = Unauthenticated(owner.identity.session);
    ASSERT_TRUE(fd);
    std::vector<std::byte> bytes = *EncodeMessage({1, hello});
    if (i % 3 == 0) bytes.resize(random() % 4096);
    for (std::size_t flips = random() % 20 + 1; flips > 0 && !bytes.empty(); --flips)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    (void)SendPacket(fd.get(), bytes, std::array{0, 1, 2});  // with descriptors that nobody asked for
  }
  EXPECT_TRUE(importer.ImportFrom(owner, AllocationId{2}, AllocationId{101}));
  EXPECT_EQ(owner.session.references(), 2u);
}

TEST_F(UnixPeersTest, a_peer_that_does_not_take_its_answers_delays_nobody) {
  Rank owner(directory_, 0), importer(directory_, 1);
  const UniqueFd fd = Unauthenticated(owner.identity.session);
  const HelloMessage hello = HelloOfRank5(owner, Purpose::kRound);
  ASSERT_EQ(SendPacket(fd.get(), *EncodeMessage({1, hello}), {}), Sent::kDone);
  const auto question = *EncodeMessage({2, AskBoardMessage{}});
  for (int i = 0; i < 5000; ++i) (void)SendPacket(fd.get(), question, {});
  EXPECT_TRUE(importer.ImportFrom(owner, AllocationId{2}, AllocationId{101}));
}

TEST_F(UnixPeersTest, another_protocol_version_is_refused_in_words) {
  Rank owner(directory_, 0);
  HelloMessage hello{kPeerProtocol, kPeerProtocolLeast};
  hello.self = Identity(5);
  hello.to = owner.identity.session;
  for (const std::uint32_t version : {kPeerProtocolLeast - 1, kPeerProtocol + 1}) {
    const UniqueFd fd = Unauthenticated(owner.identity.session);
    hello.version = hello.least_version = version;
    const Status refused = AnswerTo(fd, hello);
    EXPECT_EQ(refused.code(), Code::kUnsupported);
    EXPECT_NE(refused.message().find(fmt::format("speaks {0} to {0}", version)), std::string::npos) << refused.message();
  }
}

TEST_F(UnixPeersTest, a_greeting_for_another_session_is_refused_and_ends_the_connection) {
  Rank owner(directory_, 0);
  HelloMessage hello{kPeerProtocol, kPeerProtocolLeast};
  hello.self = Identity(5);
  hello.to = Identity(3).session;  // whose socket this was, until its process died and another took the name
  for (const bool without_a_name : {false, true}) {
    if (without_a_name) {
      hello.to = owner.identity.session;
      hello.self.session = {};
    }
    const UniqueFd fd = Unauthenticated(owner.identity.session);
    const Status refused = AnswerTo(fd, hello);
    EXPECT_EQ(refused.code(), Code::kNotFound) << refused.message();
    EXPECT_EQ(refused.message(), "this is session " + Hex(owner.identity.session.value));
    EXPECT_EQ(NextPacket(fd).first.state, Packet::State::kClosed);
  }
  EXPECT_TRUE(owner.session.connected().empty());
}

// ---- the directory ---------------------------------------------------------------------------------------------------------

TEST_F(UnixPeersTest, the_directory_is_made_for_this_user_only) {
  const Rank rank(directory_, 0);
  struct stat info {};
  ASSERT_EQ(::stat(directory_.sockets().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST_F(UnixPeersTest, a_directory_that_others_can_enter_is_refused) {
  ASSERT_EQ(::mkdir(directory_.sockets().c_str(), 0700), 0);
  ASSERT_EQ(::chmod(directory_.sockets().c_str(), 0755), 0);
  const Rank rank(directory_, 0);
  EXPECT_EQ(rank.problem.code(), Code::kRefused);
  EXPECT_NE(rank.problem.message().find("chmod 700"), std::string::npos) << rank.problem.message();
}

TEST_F(UnixPeersTest, a_link_in_place_of_the_directory_is_refused) {
  ASSERT_EQ(::mkdir((directory_.path() / "elsewhere").c_str(), 0700), 0);
  ASSERT_EQ(::symlink("elsewhere", directory_.sockets().c_str()), 0);
  const Rank rank(directory_, 0);
  EXPECT_EQ(rank.problem.code(), Code::kIo);
}

TEST_F(UnixPeersTest, a_path_longer_than_a_socket_address_works) {
  std::filesystem::path deep = directory_.path();
  for (int i = 0; i < 10; ++i) deep /= std::string(30, 'd');
  FakeSession a(SessionId{1}), b(SessionId{2});
  auto one = UnixPeers::Start({SessionId{1}, "h", 1, 0, 0}, {deep, Deadlines(std::chrono::seconds(5)), {}}, a);
  auto two = UnixPeers::Start({SessionId{2}, "h", 1, 0, 1}, {deep, Deadlines(std::chrono::seconds(5)), {}}, b);
  ASSERT_TRUE(one && two) << one.status().message();
  EXPECT_TRUE((*two)->Import(a.Export(AllocationId{1}), AllocationId{5}));
}

TEST_F(UnixPeersTest, a_session_id_that_is_taken_is_an_error) {
  Rank first(directory_, 0);
  const Rank second(directory_, 0);
  EXPECT_FALSE(second.problem.ok());
  Rank importer(directory_, 1);
  EXPECT_TRUE(importer.ImportFrom(first, AllocationId{1}, AllocationId{5}));  // the first is unharmed
}

TEST_F(UnixPeersTest, sockets_of_the_dead_are_swept_and_those_of_the_living_stay) {
  const Rank living(directory_, 0);
  auto at = OpenSocketDirectory(directory_.sockets());
  { (void)ListenAt(at->get(), SessionId{0xdead}); }  // nobody listens any more, the name is left
  ASSERT_TRUE(SocketExists(at->get(), SessionId{0xdead}));
  const Rank next(directory_, 1);
  EXPECT_FALSE(SocketExists(at->get(), SessionId{0xdead}));
  EXPECT_TRUE(SocketExists(at->get(), living.identity.session));
}

TEST_F(UnixPeersTest, nothing_is_left_open_or_lying_about) {
  const std::size_t before = DescriptorsAtRest();
  for (int i = 0; i < 10; ++i) {
    Rank owner(directory_, 0), importer(directory_, 1);
    ASSERT_TRUE(importer.ImportFrom(owner, AllocationId{1}, AllocationId{5}));
  }
  EXPECT_EQ(DescriptorsAtRest(), before);
  EXPECT_TRUE(std::filesystem::is_empty(directory_.sockets()));
}

TEST_F(UnixPeersTest, a_session_may_import_from_itself) {
  Rank rank(directory_, 0);
  ASSERT_TRUE(rank.ImportFrom(rank, AllocationId{1}, AllocationId{5}));
  EXPECT_TRUE(rank.Reimport(rank.identity.session, {{AllocationId{1}, AllocationId{5}}}));
  rank.peers->DropReference({rank.identity.session, AllocationId{1}}, AllocationId{5});
  EXPECT_TRUE(rank.session.WaitForReferences(0));
  const auto assembly = rank.peers->Assemble(CycleKind::kPause, "");
  ASSERT_TRUE(assembly->Find(In(milliseconds(20'000))).ok());
  EXPECT_EQ(assembly->Members().size(), 1u);
}

// Who does not come is told who waits for it, and journals that when its journal is free.
TEST_F(UnixPeersTest, facts_wait_while_the_journal_is_in_use_and_nobody_waits_for_them) {
  Rank absent(directory_, 0), waiting(directory_, 1);
  ASSERT_TRUE(waiting.ImportFrom(absent, AllocationId{1}, AllocationId{100}));
  absent.session.lifecycle = Lifecycle::kRunning;
  absent.session.busy_journal = 20;
  const auto assembly = waiting.peers->Assemble(CycleKind::kPause, "");
  ASSERT_TRUE(assembly->Find(In(milliseconds(20'000))).ok());
  assembly->NotifyAbsent({absent.identity.session});
  const auto told = absent.session.AwaitFacts<MemberHeard>(1);
  ASSERT_FALSE(told.empty());
  EXPECT_TRUE(told[0].asks);
  EXPECT_EQ(told[0].member, waiting.identity.session);
  EXPECT_LE(absent.session.busy_journal.load(), 0);
}

}  // namespace
}  // namespace amem
