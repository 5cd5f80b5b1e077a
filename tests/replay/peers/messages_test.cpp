#include "replay/peers/messages.h"

#include <gtest/gtest.h>

#include <random>

namespace amem {
namespace {

PeerIdentity Who(unsigned n) {
  return {SessionId{n}, "host" + std::to_string(n), static_cast<std::int32_t>(n), -5, static_cast<std::int32_t>(n) - 1};
}

const control::Order kOrder{7, control::Ask::kResume, control::Stage::kNccl, true, 99, 4711, SessionId{12}};
control::RankStatus Stands() {
  return {11,
          12,
          control::OwnPause::kPausing,
          control::Phase::kFailed,
          control::Stage::kTags,
          13,
          14,
          15,
          {Code::kTimeout, "late"},
          16,
          17,
          kOrder,
          18};
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
      {6, SharedMessage{{{4096, properties, {}, MemoryTag::kUserReleased},
                         {1, {}, SharedPart{AllocationId{7}, {4, 5, 6}, 8192}, {}, {9, true}, "cache", PoolPolicy::kDiscard}}}},
      {7, DroppedMessage{{{AllocationId{1}, AllocationId{2}}}}},
      {8, AwaitingMessage{}},
      {9, OrderMessage{kOrder}},
      {10, AskStatusMessage{}},
      {11, RankStatusMessage{Stands()}},
      {12, NoteMessage{Frozen{5, 9, 77, "a -> b"}}},
      {13, AskBoardMessage{"weights", {SessionId{3}, SessionId{4}}, 99}},
      {14, BoardMessage{}},
  };
}

TEST(PeerMessages, each_kind_has_an_example_here) { EXPECT_EQ(OneOfEach().size(), std::variant_size_v<MessageVariant>); }

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

template <class Kind>
Kind Back() {
  for (const auto& message : OneOfEach())
    if (std::holds_alternative<Kind>(message.body)) return std::get<Kind>(DecodeMessage(*EncodeMessage(message))->body);
  return {};
}
void ExpectSame(const std::vector<ShareRequest>& found, const std::vector<std::pair<std::uint64_t, std::uint64_t>>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].allocation.value, expected[i].first);
    EXPECT_EQ(found[i].as.value, expected[i].second);
  }
}

TEST(PeerMessages, fields_of_acquaintance_are_where_they_belong) {
  const auto hello = Back<HelloMessage>();
  EXPECT_EQ(hello.version, 3U);
  EXPECT_EQ(hello.least_version, 2U);
  EXPECT_EQ(hello.purpose, Purpose::kRound);
  EXPECT_EQ(hello.self, Who(4));
  EXPECT_EQ(hello.to, SessionId{9});
  const auto welcome = Back<WelcomeMessage>();
  EXPECT_EQ(welcome.version, 1U);
  EXPECT_EQ(welcome.self, Who(4));
  EXPECT_EQ(Back<FailureMessage>().status, (Status{Code::kDriver, "what", 304}));
}

TEST(PeerMessages, fields_of_shared_memory_are_where_they_belong) {
  const auto import = Back<ImportMessage>();
  EXPECT_EQ(import.as, AllocationId{9});
  EXPECT_EQ(import.token.session, SessionId{5});
  EXPECT_EQ(import.token.allocation, AllocationId{6});
  EXPECT_EQ(import.token.secret, (Secret{1, 2, 3}));
  EXPECT_EQ(import.token.offset, 8U);
  ExpectSame(Back<ReimportMessage>().references, {{1, 2}, {3, 4}});
  ExpectSame(Back<DroppedMessage>().references, {{1, 2}});
  const auto shared = Back<SharedMessage>();
  ASSERT_EQ(shared.items.size(), 2U);
  EXPECT_EQ(shared.items[0].bytes, 4096U);
  EXPECT_EQ(shared.items[0].tag, MemoryTag::kUserReleased);
  EXPECT_EQ(shared.items[0].properties, (AllocationProperties{1, 9, {LocationType::kHostNuma, 2}, 1, 1, 77, 5}));
  EXPECT_FALSE(shared.items[0].part.has_value());
  EXPECT_EQ(shared.items[0].incarnation.number, 0U);
  EXPECT_FALSE(shared.items[0].incarnation.stands_in);
  EXPECT_EQ(shared.items[1].incarnation.number, 9U);
  EXPECT_TRUE(shared.items[1].incarnation.stands_in);
  EXPECT_EQ(shared.items[0].pool, "");
  EXPECT_EQ(shared.items[1].pool, "cache");
  EXPECT_EQ(shared.items[1].pool_policy, PoolPolicy::kDiscard);
  ASSERT_TRUE(shared.items[1].part.has_value());
  EXPECT_EQ(shared.items[1].part->slab, AllocationId{7});
  EXPECT_EQ(shared.items[1].part->secret, (Secret{4, 5, 6}));
  EXPECT_EQ(shared.items[1].part->offset, 8192U);
}

TEST(PeerMessages, fields_of_requests_and_boards_are_where_they_belong) {
  const auto board = Back<AskBoardMessage>();
  EXPECT_EQ(board.scope, "weights");
  EXPECT_EQ(board.members, (std::vector{SessionId{3}, SessionId{4}}));
  EXPECT_EQ(board.instead_of, 99U);
  EXPECT_EQ(Back<OrderMessage>().order, kOrder);
  EXPECT_EQ(Back<RankStatusMessage>().status, Stands());
  EXPECT_EQ(Back<NoteMessage>().event, EventBody(Frozen{5, 9, 77, "a -> b"}));
}

TEST(PeerMessages, a_tool_records_nothing_but_freezes) {
  EXPECT_TRUE(DecodeMessage(*EncodeMessage({1, NoteMessage{FreezeStep{.goal = "frozen", .step = "lock"}}})));
  EXPECT_EQ(DecodeMessage(*EncodeMessage({1, NoteMessage{SessionClosed{}}})).status().code(), Code::kCorrupt);
}

// As builds of protocol 5 wrote it with a schema of Cap'n Proto's. Those of different versions refuse each other by these two.
TEST(PeerMessages, a_greeting_and_a_refusal_of_protocol_5_are_understood) {
  const auto words = [](std::vector<std::uint64_t> all) {
    const auto bytes = std::as_bytes(std::span(all));
    return DecodeMessage(std::vector<std::byte>(bytes.begin(), bytes.end()));
  };
  const auto greeting = words({0xf00000000, 0x1000300000000, 7, 0, 0, 0x1000300000000, 0x500000005, 1, 9, 0x1000400000000, 4,
                               0xfffffffc00000004, ~std::uint64_t{4}, 1, 0x3200000001, 0x3474736f68});
  ASSERT_TRUE(greeting) << greeting.status().message();
  EXPECT_EQ(greeting->request, 7U);
  const auto& hello = std::get<HelloMessage>(greeting->body);
  EXPECT_EQ(hello.version, 5U);
  EXPECT_EQ(hello.least_version, 5U);
  EXPECT_EQ(hello.purpose, Purpose::kRound);
  EXPECT_EQ(hello.self, (PeerIdentity{SessionId{4}, "host4", 4, -5, 3, true}));
  EXPECT_EQ(hello.to, SessionId{9});
  const auto refusal = words({0x800000000, 0x1000300000000, 7, 2, 0, 0x1000100000000, 0x700000005, 0x1200000001, 0x78});
  ASSERT_TRUE(refusal) << refusal.status().message();
  EXPECT_EQ(std::get<FailureMessage>(refusal->body).status, (Status{Code::kIo, "x", 7}));
}

TEST(PeerMessages, lists_of_others_that_are_too_long_are_refused) {
  DroppedMessage dropped;
  dropped.references.resize(kDescriptorsMax + 1);
  auto bytes = *EncodeMessage({1, dropped});
  EXPECT_TRUE(DecodeMessage(bytes));
  bytes[24] = std::byte{4};  // the same as a reimport
  EXPECT_EQ(DecodeMessage(bytes).status().code(), Code::kCorrupt);
}

TEST(PeerMessages, of_a_set_that_is_too_large_nobody_is_left_behind) {
  AskBoardMessage ask;
  for (unsigned i = 0; i <= kMembersMax; ++i) ask.members.push_back(SessionId{i + 1});
  const auto refused = EncodeMessage({1, ask});
  EXPECT_EQ(refused.status().code(), Code::kInvalid);
  EXPECT_NE(refused.status().message().find("a list of 513 where at most 512 are allowed"), std::string::npos)
      << refused.status().message();
}

TEST(PeerMessages, the_longest_lists_fit) {
  AskBoardMessage ask;
  for (unsigned i = 1; i <= kMembersMax; ++i) ask.members.push_back(SessionId{i});
  auto bytes = EncodeMessage({1, ask});
  ASSERT_TRUE(bytes) << bytes.status().message();
  EXPECT_EQ(std::get<AskBoardMessage>(DecodeMessage(*bytes)->body).members.size(), kMembersMax);
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
