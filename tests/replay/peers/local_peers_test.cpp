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

  LocalNetwork network_;
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

}  // namespace
}  // namespace amem
