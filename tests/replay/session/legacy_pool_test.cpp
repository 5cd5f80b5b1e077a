// Where cuMemAlloc memory lies inside its blocks.
#include "replay/session/legacy_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

namespace amem {
namespace {

constexpr Bytes kPiece = LegacyPool::kAlignment;
constexpr DeviceOrdinal kFirst{0}, kSecond{1};

LegacyBlock Block(std::uint64_t address, DeviceOrdinal device = kFirst, Bytes bytes = LegacyPool::kBlockBytes) {
  return {Address{address}, bytes, AllocationId{address >> 24}, device};
}

TEST(LegacyPool, pieces_are_aligned_and_do_not_overlap) {
  LegacyPool pool;
  const LegacyBlock block = Block(0x1000000);
  const Address first = pool.AddBlock(block, 8);
  EXPECT_EQ(first, block.address);
  Address end = first + kPiece;
  for (const Bytes bytes : {Bytes{0}, Bytes{1}, kPiece, kPiece + 1, Bytes{2432}}) {
    const auto piece = pool.Take(bytes, kFirst);
    ASSERT_TRUE(piece.has_value());
    EXPECT_EQ(piece->second, end) << bytes;
    EXPECT_EQ(piece->second.value % kPiece, 0U);
    end = end + std::max<Bytes>((bytes + kPiece - 1) / kPiece, 1) * kPiece;
  }
}

TEST(LegacyPool, memory_of_another_device_is_never_given) {
  LegacyPool pool;
  pool.AddBlock(Block(0x1000000, kFirst), 8);
  EXPECT_FALSE(pool.Take(8, kSecond).has_value());
  pool.AddBlock(Block(0x2000000, kSecond), 8);
  EXPECT_EQ(pool.Take(8, kSecond)->first.device, kSecond);
  EXPECT_EQ(pool.Take(8, kSecond)->second, Address{0x2000000} + 2 * kPiece);
  EXPECT_EQ(pool.Take(8, kFirst)->second, Address{0x1000000} + kPiece);
}

TEST(LegacyPool, neighbours_that_are_free_become_one) {
  // The piece in the middle goes last, first, or between its neighbours: each order must leave one hole of three pieces.
  for (const auto& order : {std::array{1, 2, 3}, std::array{3, 2, 1}, std::array{1, 3, 2}, std::array{2, 1, 3}}) {
    LegacyPool pool;
    const LegacyBlock block = Block(0x1000000, kFirst, 5 * kPiece);
    pool.AddBlock(block, kPiece);
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(pool.Take(kPiece, kFirst).has_value());
    EXPECT_FALSE(pool.Take(1, kFirst).has_value()) << "the block is full";
    for (const int index : order) EXPECT_FALSE(pool.Give(block.address + static_cast<Bytes>(index) * kPiece).has_value());
    const auto whole = pool.Take(3 * kPiece, kFirst);
    ASSERT_TRUE(whole.has_value()) << order[0] << order[1] << order[2];
    EXPECT_EQ(whole->second, block.address + kPiece);
  }
}

TEST(LegacyPool, a_block_without_pieces_is_handed_back_and_forgotten) {
  LegacyPool pool;
  const LegacyBlock block = Block(0x1000000);
  const Address first = pool.AddBlock(block, 8);
  const Address second = pool.Take(8, kFirst)->second;
  EXPECT_FALSE(pool.Give(first).has_value());
  const auto empty = pool.Give(second);
  ASSERT_TRUE(empty.has_value());
  EXPECT_EQ(empty->allocation, block.allocation);
  EXPECT_TRUE(pool.blocks().empty());
  EXPECT_FALSE(pool.Take(8, kFirst).has_value());
}

TEST(LegacyPool, only_the_address_of_a_piece_can_be_given_back) {
  LegacyPool pool;
  const LegacyBlock block = Block(0x1000000);
  const Address piece = pool.AddBlock(block, 3 * kPiece);
  EXPECT_FALSE(pool.Give(piece + kPiece).has_value()) << "inside a piece";
  EXPECT_FALSE(pool.Give(block.address + block.bytes).has_value()) << "outside of every block";
  EXPECT_EQ(pool.blocks().size(), 1U);
  EXPECT_TRUE(pool.Give(piece).has_value());
  EXPECT_FALSE(pool.Give(piece).has_value()) << "twice";
}

TEST(LegacyPool, a_block_contains_its_own_addresses_only) {
  LegacyPool pool;
  const LegacyBlock low = Block(0x1000000), high = Block(0x2000000);
  pool.AddBlock(low, 8);
  pool.AddBlock(high, 8);
  EXPECT_FALSE(pool.BlockAt(Address{low.address.value - 1}).has_value());
  EXPECT_EQ(pool.BlockAt(low.address)->allocation, low.allocation);
  EXPECT_EQ(pool.BlockAt(low.address + (low.bytes - 1))->allocation, low.allocation);
  EXPECT_FALSE(pool.BlockAt(low.address + low.bytes).has_value());
  EXPECT_EQ(pool.BlockAt(high.address)->allocation, high.allocation);
}

TEST(LegacyPool, half_a_block_is_the_most_that_shares_one) {
  EXPECT_FALSE(LegacyPool::IsLarge(LegacyPool::kBlockBytes / 2));
  EXPECT_TRUE(LegacyPool::IsLarge(LegacyPool::kBlockBytes / 2 + 1));
}

}  // namespace
}  // namespace amem
