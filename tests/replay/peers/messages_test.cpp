#include "replay/peers/messages.h"

#include <gtest/gtest.h>

#include <random>

namespace amem {
namespace {

PeerIdentity Who(unsigned n) {
  return {SessionId{n}, "host" + std::to_string(n), static_cast<std::int32_t>(n), -5, static_cast<std::int32_t>(n) - 1};
}

std::vector<Message> OneOfEach() {
  AllocationProperties properties{1, 9, {LocationType::kHostNuma, 2}, 1, 1, 77, 5};
  Token token{SessionId{5}, AllocationId{6}, {1, 2, 3}, 8};
  return {
      {1, HelloMessage{3, 2, Purpose::kRound, Who(4), SessionId{9}}},
      {2, WelcomeMessage{1, Who(4)}},
      {3, FailureMessage{{Code::kDriver, "what", 304}}},
      {4, ImportMessage{AllocationId{9}, token}},
      {5, ReimportMessage{{{AllocationId{1}, AllocationId{2}}, {AllocationId{3}, AllocationId{4}}}}},
      {6, SharedMessage{{{4096, properties, {}, MemoryTag::kUserReleased}, {1, {}}}}},
      {7, DroppedMessage{{{AllocationId{1}, AllocationId{2}}}}},
      {8, AskNeighboursMessage{}},
      {9, NeighbourhoodMessage{Who(1), {Who(2), Who(3)}, {Lifecycle::kPaused, 7}, Who(5)}},
      {10, ArriveMessage{CycleKind::kResume, 12, {Who(2), Who(3)}}},
      {11, BegunMessage{44, {Who(2)}}},
      {12, WithdrawMessage{}},
      {13, WithdrawnMessage{{Who(7)}}},
      {14, VoteMessage{44, 3, PhaseKind::kResumeOpen, 60000, {Code::kOutOfMemory, "no", 2}}},
      {15, DecisionMessage{44, 3, SessionId{8}, {}}},
      {16, LeaveMessage{44}},
  };
}

TEST(PeerMessages, each_kind_has_an_example_here) { EXPECT_EQ(OneOfEach().size(), std::variant_size_v<MessageBody>); }

TEST(PeerMessages, come_back_as_they_were) {
  for (const auto& message : OneOfEach()) {
    auto bytes = EncodeMessage(message);
    ASSERT_TRUE(bytes) << bytes.status().message();
    auto back = DecodeMessage(*bytes);
    ASSERT_TRUE(back) << back.status().message();
    EXPECT_EQ(back->request, message.request);
    ASSERT_EQ(back->body.index(), message.body.index());
    EXPECT_EQ(*EncodeMessage(*back), *bytes);  // every field, for what is not equal is not encoded equally
  }
}

TEST(PeerMessages, fields_are_where_they_belong) {
  auto vote = std::get<VoteMessage>(DecodeMessage(*EncodeMessage(OneOfEach()[13]))->body);
  EXPECT_EQ(vote.round, 44u);
  EXPECT_EQ(vote.index, 3u);
  EXPECT_EQ(vote.phase, PhaseKind::kResumeOpen);
  EXPECT_EQ(vote.timeout_ms, 60000u);
  EXPECT_EQ(vote.status, (Status{Code::kOutOfMemory, "no", 2}));
  auto shared = std::get<SharedMessage>(DecodeMessage(*EncodeMessage(OneOfEach()[5]))->body);
  EXPECT_EQ(shared.items[0].bytes, 4096u);
  EXPECT_EQ(shared.items[0].tag, MemoryTag::kUserReleased);
  EXPECT_EQ(shared.items[0].properties, (AllocationProperties{1, 9, {LocationType::kHostNuma, 2}, 1, 1, 77, 5}));
  auto neighbourhood = std::get<NeighbourhoodMessage>(DecodeMessage(*EncodeMessage(OneOfEach()[8]))->body);
  EXPECT_EQ(neighbourhood.self, Who(1));
  EXPECT_EQ(neighbourhood.neighbours, (std::vector{Who(2), Who(3)}));
  EXPECT_EQ(neighbourhood.lost, Who(5));
}

TEST(PeerMessages, the_longest_lists_fit) {
  BegunMessage begun;
  for (unsigned i = 1; i <= 2 * kMembersMax; ++i) begun.members.push_back(Who(i));
  for (auto& member : begun.members) member.host = std::string(5000, 'h');
  auto bytes = EncodeMessage({1, begun});
  ASSERT_TRUE(bytes) << bytes.status().message();
  EXPECT_EQ(std::get<BegunMessage>(DecodeMessage(*bytes)->body).members.size(), kMembersMax);
  DroppedMessage dropped;
  dropped.references.resize(kReferencesMax);
  EXPECT_TRUE(DecodeMessage(*EncodeMessage({1, dropped})));
  FailureMessage failure{{Code::kIo, std::string(1'000'000, 'x')}};
  EXPECT_TRUE(DecodeMessage(*EncodeMessage({1, failure})));
}

TEST(PeerMessages, hostile_bytes_are_an_error_or_a_message_and_never_more) {
  std::mt19937_64 random(11);
  const auto examples = OneOfEach();
#ifdef AMEM_SANITIZED
  const int rounds = 300;
#else
  const int rounds = 3000;
#endif
  for (int i = 0; i < rounds; ++i) {
    for (const auto& example : examples) {
      auto bytes = *EncodeMessage(example);
      for (std::size_t flips = random() % 6 + 1; flips > 0; --flips)
        bytes[random() % bytes.size()] = static_cast<std::byte>(random());
      if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 64));
      (void)DecodeMessage(bytes);
    }
  }
  for (std::size_t n : {0u, 1u, 7u, 8u, 9u})
    EXPECT_EQ(DecodeMessage(std::vector<std::byte>(n)).status().code(),
              n == 8 ? DecodeMessage(std::vector<std::byte>(8)).status().code() : Code::kCorrupt);
  EXPECT_EQ(DecodeMessage(std::vector<std::byte>(kMessageBytesMax + 8)).status().code(), Code::kCorrupt);
}

}  // namespace
}  // namespace amem
