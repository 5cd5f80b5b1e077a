#include "tests/stand_ins/peers/local_peers.h"

#include <gtest/gtest.h>

#include "tests/replay/peers/peers_fixture.h"

namespace amem {
namespace {

using namespace test;

class LocalPeersTest : public ::testing::Test {
 protected:
  struct Member {
    Member(LocalNetwork& network, std::int32_t rank, std::int64_t group = 0)
        : identity(Identity(rank, group)), session(identity.session), peers(network.Join(identity, session)) {}
    PeerIdentity identity;
    FakeSession session;
    std::unique_ptr<Peers> peers;
  };
  static void Share(Member& importer, Member& owner) {
    ASSERT_TRUE(importer.peers->Import(owner.session.Export(AllocationId{1}), AllocationId{5}));
    importer.session.Add(owner.identity.session);
  }

  LocalNetwork network_{300 * kFew};
  Member a_{network_, 0}, b_{network_, 1}, c_{network_, 2};
};

TEST_F(LocalPeersTest, shares_like_the_real_one) {
  const Token token = b_.session.Export(AllocationId{1}, 8192);
  auto shared = a_.peers->Import(token, AllocationId{5});
  ASSERT_TRUE(shared);
  EXPECT_EQ(shared->bytes, 8192u);
  EXPECT_EQ(b_.session.references(), 1u);
  EXPECT_EQ(b_.session.connected().size(), 1u);
  EXPECT_EQ(a_.session.connected().size(), 1u);
  EXPECT_TRUE(a_.peers->Reimport(b_.identity.session, {{AllocationId{1}, AllocationId{5}}}, In(std::chrono::seconds(20))));
  EXPECT_FALSE(a_.peers->Reimport(b_.identity.session, {{AllocationId{1}, AllocationId{6}}}, In(std::chrono::seconds(20))));
  a_.peers->DropReference({b_.identity.session, AllocationId{1}}, AllocationId{5});
  EXPECT_EQ(b_.session.references(), 0u);
  EXPECT_EQ(a_.peers->Import({SessionId{99}, AllocationId{1}, {}, 0}, AllocationId{7}).status().code(), Code::kPeerLost);
}

TEST_F(LocalPeersTest, the_killed_and_the_stopped_are_lost) {
  Share(a_, b_);
  Share(c_, a_);
  network_.Kill(b_.identity.session);
  ASSERT_EQ(a_.session.lost().size(), 1u);
  EXPECT_EQ(a_.session.lost()[0].second, "died");
  EXPECT_TRUE(c_.session.lost().empty());
  EXPECT_FALSE(b_.peers->Import(a_.session.Export(AllocationId{2}), AllocationId{8}));
  a_.peers->Stop();
  ASSERT_EQ(c_.session.lost().size(), 1u);
  EXPECT_EQ(c_.session.lost()[0].second, "has closed");
}

TEST_F(LocalPeersTest, rounds_have_the_same_rules) {
  Share(a_, b_);
  Share(b_, c_);
  std::vector<std::thread> threads;
  for (Member* member : {&a_, &b_, &c_}) {
    threads.emplace_back([this, member] {
      auto round = member->peers->Arrive({CycleKind::kPause, 1, In(std::chrono::seconds(20))});
      ASSERT_TRUE(round) << round.status().message();
      EXPECT_EQ((*round)->Members().size(), 3u);
      EXPECT_TRUE((*round)->Vote(PhaseKind::kPauseArrive, {}).status.ok());
      const Status mine = member == &b_ ? Status{Code::kDriver, "why"} : Status{};
      const Decision decision = (*round)->Vote(PhaseKind::kPauseSave, mine);
      EXPECT_EQ(decision.status.code(), Code::kDriver);
      EXPECT_EQ(decision.culprit, b_.identity.session);
      EXPECT_TRUE((*round)->Vote(PhaseKind::kResumeOpen, {}).status.ok());
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_F(LocalPeersTest, whoever_does_not_come_is_named) {
  Share(a_, b_);
  const Status status = a_.peers->Arrive({CycleKind::kPause, 1, In(std::chrono::seconds(20))}).status();
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_NE(status.message().find(ToText(b_.identity)), std::string::npos) << status.message();
  b_.peers->SetGroup(7);
  EXPECT_EQ(a_.peers->Arrive({CycleKind::kPause, 1, In(std::chrono::seconds(20))}).status().code(), Code::kRefused);
}

TEST_F(LocalPeersTest, leaving_early_fails_those_who_vote) {
  Share(a_, b_);
  std::thread other([this] { ASSERT_TRUE(b_.peers->Arrive({CycleKind::kPause, 1, In(std::chrono::seconds(20))})); });
  auto round = a_.peers->Arrive({CycleKind::kPause, 1, In(std::chrono::seconds(20))});
  ASSERT_TRUE(round);
  EXPECT_EQ((*round)->Vote(PhaseKind::kPauseArrive, {}).status.code(), Code::kPeerLost);
  other.join();
}

}  // namespace
}  // namespace amem
