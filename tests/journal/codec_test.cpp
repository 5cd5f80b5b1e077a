#include "journal/codec.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tests/journal/samples.h"
#include "tests/journal/temporary.h"

namespace amem::test {
namespace {

Event SampleEvent(std::size_t kind) {
  return {SequenceNumber{0x8000000000000001 + kind}, 0xfedcba9876543210 - kind, 0xffffff00 + static_cast<std::uint32_t>(kind),
          Sample(kind)};
}

TEST(Codec, samples_leave_no_field_at_its_default) {
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    const EventBody body = Sample(kind);
    EXPECT_EQ(body.index(), kind);
    EXPECT_TRUE(std::visit([](const auto& b) { return NothingIsDefault(b); }, body)) << KindName(kind);
  }
}

TEST(Codec, every_kind_comes_back_as_it_went) {
  Encoder encoder;
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    for (const EventBody& body : {Sample(kind), DefaultBody(kind)}) {
      Event event = SampleEvent(kind);
      event.body = body;
      const auto message = encoder.Encode(event);
      ASSERT_FALSE(message.empty());
      const auto back = DecodeEvent(message);
      ASSERT_TRUE(back.ok()) << KindName(kind) << ": " << back.status().message();
      EXPECT_EQ(*back, event) << Dump(*back) << "\n" << Dump(event);
    }
  }
}

TEST(Codec, an_encoder_remembers_nothing_of_the_event_before) {
  Encoder used;
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) (void)used.Encode(SampleEvent(kind));
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    Encoder fresh;
    const Event event{SequenceNumber{1}, 0, 0, DefaultBody(kind)};
    const auto a = used.Encode(event);
    const auto b = fresh.Encode(event);
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end())) << KindName(kind);
  }
}

TEST(Codec, events_of_any_size_come_back) {
  Encoder encoder;
  for (const std::size_t size : {0, 1, 7, 8, 9, 16'000, 16'384, 20'000, 1'000'000}) {
    const Event event{SequenceNumber{1}, 2, 3, PassedThrough{"n", std::string(size, 'y'), -1}};
    const auto message = encoder.Encode(event);
    const auto back = DecodeEvent(message);
    ASSERT_TRUE(back.ok()) << size << ": " << back.status().message();
    EXPECT_TRUE(*back == event) << size;
    const Event small{SequenceNumber{2}, 0, 0, AllocationReleased{AllocationId{5}}};  // and then a small one again
    const auto small_back = DecodeEvent(encoder.Encode(small));
    ASSERT_TRUE(small_back.ok());
    EXPECT_EQ(*small_back, small);
  }
  const Event listed{SequenceNumber{1}, 2, 3, CycleBegun{CycleKind::kResume, 4, std::vector<SessionId>(100'000, SessionId{9})}};
  const auto back = DecodeEvent(encoder.Encode(listed));
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_TRUE(*back == listed);
}

TEST(Codec, an_event_that_no_message_can_hold_is_refused) {
  Encoder encoder;
  const Event event{SequenceNumber{1}, 0, 0, PassedThrough{"n", std::string(std::size_t{1} << 29, 'y'), 0}};
  EXPECT_TRUE(encoder.Encode(event).empty());
  const Event small{SequenceNumber{2}, 0, 0, AllocationReleased{AllocationId{5}}};
  const auto back = DecodeEvent(encoder.Encode(small));
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(*back, small);
}

TEST(Codec, small_events_are_small) {
  Encoder encoder;
  EXPECT_LE(encoder.Encode({SequenceNumber{1}, 1, 1, AllocationReleased{AllocationId{1}}}).size(), 56U);
  EXPECT_LE(encoder.Encode({SequenceNumber{1}, 1, 1, Mapped{Address{1}, 2, 3, AllocationId{4}, 5}}).size(), 96U);
}

// The root's first words: pointer, seq, time, thread and kind.
std::vector<std::byte> Encoded(const Event& event) {
  Encoder encoder;
  const auto message = encoder.Encode(event);
  return {message.begin(), message.end()};
}

TEST(Codec, a_kind_of_a_newer_version_is_named) {
  auto message = Encoded({SequenceNumber{1}, 1, 0, AllocationReleased{AllocationId{1}}});
  const std::uint16_t kind = 999;
  std::memcpy(message.data() + 8 + 16 + 4, &kind, sizeof kind);
  const auto back = DecodeEvent(message);
  ASSERT_FALSE(back.ok());
  EXPECT_EQ(back.status().code(), Code::kCorrupt);
  EXPECT_NE(back.status().message().find("kind 999"), std::string::npos) << back.status().message();
}

TEST(Codec, an_unknown_enum_is_named) {
  for (const EventBody& body :
       {EventBody{PhaseBegun{static_cast<PhaseKind>(77)}}, EventBody{CycleDone{static_cast<CycleKind>(77), 1, 1}},
        EventBody{StepBegun{{static_cast<StepKind>(77), {}, {}, 0, {}}}},
        EventBody{StepFailed{{}, static_cast<Code>(77), 0, ""}}}) {
    const auto back = DecodeEvent(Encoded({SequenceNumber{1}, 0, 0, body}));
    ASSERT_FALSE(back.ok());
    EXPECT_EQ(back.status().code(), Code::kCorrupt);
    EXPECT_NE(back.status().message().find("77"), std::string::npos) << back.status().message();
  }
}

TEST(Codec, a_location_type_of_a_newer_driver_is_kept) {
  const Event event{SequenceNumber{1}, 0, 0, AccessSet{Address{1}, 2, {{{static_cast<LocationType>(77), -5}, 3}}}};
  const auto back = DecodeEvent(Encoded(event));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(*back, event);
}

TEST(Codec, hostile_bytes_never_do_more_than_fail) {
  std::mt19937_64 random(20);
  std::size_t refused = 0;
  std::size_t tries = 0;
  const int rounds = kSanitized ? 12 : 200;
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
      auto message = Encoded(SampleEvent(kind));
      switch (round % 3) {
        case 0:  // some flipped bits
          for (int i = 0; i < 3; ++i) message[random() % message.size()] ^= std::byte{1} << (random() % 8);
          break;
        case 1:  // cut off
          message.resize(random() % (message.size() / 8) * 8);
          break;
        default:  // a pointer of any kind to anywhere
          const std::uint64_t word = random();
          std::memcpy(message.data() + random() % (message.size() / 8) * 8, &word, 8);
      }
      const auto back = DecodeEvent(message);
      ++tries;
      if (back.ok()) continue;
      ++refused;
      ASSERT_EQ(back.status().code(), Code::kCorrupt);
      ASSERT_FALSE(back.status().message().empty());
    }
  }
  EXPECT_GT(refused, tries / 4);
  for (std::size_t size = 0; size < 200; ++size) {
    std::vector<std::byte> noise(size);
    for (auto& b : noise) b = static_cast<std::byte>(random());
    (void)DecodeEvent(noise);
    (void)DecodeMeta(noise);
  }
}

// A list of 2^29 - 1 empty structs takes no byte: what it would cost to build must be refused.
TEST(Codec, a_list_that_is_larger_than_its_message_is_refused) {
  auto message = Encoded({SequenceNumber{1}, 0, 0, AccessSet{Address{1}, 2, {{{LocationType::kDevice, 1}, 3}}}});
  bool found = false;
  for (std::size_t at = 0; at + 8 <= message.size(); at += 8) {
    std::uint64_t word;
    std::memcpy(&word, message.data() + at, 8);
    if ((word & 3) != 1) continue;  // a list pointer
    word = (word & 0xffffffff) | (std::uint64_t{7} << 32) | (std::uint64_t{0} << 35);
    std::memcpy(message.data() + at, &word, 8);
    std::int32_t offset = static_cast<std::int32_t>(static_cast<std::uint32_t>(word)) >> 2;
    const std::uint64_t tag = std::uint64_t{(1U << 29) - 1} << 2;  // so many structs of no size
    std::memcpy(message.data() + at + 8 + offset * 8, &tag, 8);
    found = true;
  }
  ASSERT_TRUE(found);
  const auto back = DecodeEvent(message);
  ASSERT_FALSE(back.ok());
  EXPECT_EQ(back.status().code(), Code::kCorrupt) << back.status().message();
}

TEST(Codec, the_journals_own_record_comes_back) {
  Encoder encoder;
  const FileMeta meta{7, 3, SessionId{0xabcdef0123456789}, -4, 99, 7};
  const auto back = DecodeMeta(encoder.Encode(meta));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(*back, meta);
}

}  // namespace
}  // namespace amem::test
