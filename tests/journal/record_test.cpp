#include "journal/record.h"

#include <gtest/gtest.h>

#include <random>

namespace amem {
namespace {

std::vector<std::byte> Noise(std::size_t n, unsigned seed = 1) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(n);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

TEST(Crc32c, has_the_published_value) {
  const std::string_view digits = "123456789";
  const auto bytes = std::as_bytes(std::span(digits));
  EXPECT_EQ(Crc32c(bytes), 0xe3069283U);
  EXPECT_EQ(Crc32cPortable(bytes), 0xe3069283U);
}

TEST(Crc32c, the_instruction_and_the_tables_agree) {
  const auto noise = Noise(600);
  for (std::size_t from = 0; from < 9; ++from) {
    for (std::size_t n = 0; n + from <= noise.size(); n += 7) {
      const auto part = std::span(noise).subspan(from, n);
      ASSERT_EQ(Crc32c(part), Crc32cPortable(part)) << from << " " << n;
    }
  }
}

std::vector<std::byte> Frame(std::uint64_t seq, std::span<const std::byte> payload) {
  std::vector<std::byte> frame(RecordBytes(payload.size()));
  WriteRecord(frame.data(), RecordType::kEvent, seq, payload);
  return frame;
}

TEST(Record, comes_back_and_no_changed_bit_goes_unnoticed) {
  const auto payload = Noise(77);
  auto frame = Frame(12, payload);
  const std::size_t used = sizeof(RecordHeader) + payload.size();
  const auto record = ReadRecord(frame);
  ASSERT_TRUE(record);
  EXPECT_EQ(record->seq, 12U);
  EXPECT_EQ(record->type, RecordType::kEvent);
  EXPECT_TRUE(std::equal(record->payload.begin(), record->payload.end(), payload.begin(), payload.end()));
  for (std::size_t bit = 0; bit < used * 8; ++bit) {
    frame[bit / 8] ^= std::byte{1} << bit % 8;
    EXPECT_FALSE(ReadRecord(frame)) << "bit " << bit;
    frame[bit / 8] ^= std::byte{1} << bit % 8;
  }
  for (std::size_t n = 0; n < used; ++n) EXPECT_FALSE(ReadRecord(std::span(frame).first(n))) << n << " bytes";
}

TEST(Record, whole_ones_are_found_in_any_rubbish) {
  auto bytes = Noise(1001);
  const auto append = [&](const std::vector<std::byte>& more) { bytes.insert(bytes.end(), more.begin(), more.end()); };
  append(Frame(1, Noise(10)));
  auto damaged = Frame(2, Noise(40));
  damaged[30] ^= std::byte{4};
  append(damaged);
  append(Noise(13));
  append(Frame(3, Noise(300)));
  const auto cut = Frame(4, Noise(500));
  bytes.insert(bytes.end(), cut.begin(), cut.begin() + 200);
  std::vector<std::uint64_t> found;
  const std::size_t rest = ScanRecords(bytes, [&](const Record& r) { found.push_back(r.seq); });
  EXPECT_EQ(found, (std::vector<std::uint64_t>{1, 3}));
  EXPECT_EQ(rest, 200U);
}

}  // namespace
}  // namespace amem
