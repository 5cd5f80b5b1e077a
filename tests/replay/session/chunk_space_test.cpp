// How chunks are cut into parts.
#include "replay/session/pools/chunk_space.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace amem {
namespace {

constexpr Bytes kOneMiB = Bytes{1} << 20, kGranularity = 2 * kOneMiB;

ChunkSpace::Chunk ChunkOf(std::uint64_t number, Bytes bytes) { return {AllocationId{number}, Address{number << 40}, bytes}; }

TEST(ChunkSpace, the_smallest_free_place_that_fits_is_taken) {
  ChunkSpace space;
  EXPECT_FALSE(space.Take(512));
  const Address first = space.Add(ChunkOf(1, 32 * kOneMiB), 4 * kOneMiB), second = *space.Take(2 * kOneMiB),
                third = *space.Take(8 * kOneMiB);
  EXPECT_EQ(third, second + 2 * kOneMiB) << "parts lie one behind the other";
  EXPECT_FALSE(space.Give(second)->emptied);
  EXPECT_FALSE(space.Give(first + 512)) << "no part begins there";
  EXPECT_EQ(*space.Take(kOneMiB), second) << "not at the large end";
  EXPECT_EQ(space.PartAt(third), (ChunkSpace::Part{AllocationId{1}, 6 * kOneMiB, 8 * kOneMiB}));
  EXPECT_FALSE(space.PartAt(third + 512));
}

TEST(ChunkSpace, a_whole_chunk_is_one_part_of_just_its_size) {
  ChunkSpace space(true);
  const Address first = space.Add(ChunkOf(1, 4 * kOneMiB), 3 * kOneMiB + 5),
                second = space.Add(ChunkOf(2, 2 * kOneMiB), 2 * kOneMiB);
  EXPECT_FALSE(space.Take(512)) << "nothing is cut";
  EXPECT_EQ(space.PartAt(first), (ChunkSpace::Part{AllocationId{1}, 0, 3 * kOneMiB + 5}));
  EXPECT_EQ(space.held(), 6 * kOneMiB);
  EXPECT_EQ(space.taken(), 5 * kOneMiB + 5);
  EXPECT_EQ(space.Give(first)->emptied, ChunkOf(1, 4 * kOneMiB));
  EXPECT_FALSE(space.Give(first));
  EXPECT_EQ(space.Give(second)->emptied, ChunkOf(2, 2 * kOneMiB));
  EXPECT_EQ(space.held() + space.taken(), 0U);
}

TEST(ChunkSpace, sizes_are_rounded_to_512_bytes_and_nothing_is_a_part_too) {
  ChunkSpace space;
  const Address nothing = space.Add(ChunkOf(1, 32 * kOneMiB), 0), one = *space.Take(1), two = *space.Take(513);
  EXPECT_EQ(one, nothing + 512);
  EXPECT_EQ(two, one + 512);
  EXPECT_EQ(space.taken(), 2048U);
  EXPECT_EQ(space.Give(two)->part.bytes, 1024U);
}

TEST(ChunkSpace, what_is_free_is_joined_but_not_across_chunks) {
  ChunkSpace space;
  const Address a = space.Add({AllocationId{1}, Address{32 * kOneMiB}, 32 * kOneMiB}, 16 * kOneMiB),
                b = *space.Take(16 * kOneMiB);
  const Address c = space.Add({AllocationId{2}, Address{64 * kOneMiB}, 32 * kOneMiB}, 16 * kOneMiB),
                d = *space.Take(16 * kOneMiB);
  EXPECT_FALSE(space.Give(b)->emptied);
  EXPECT_FALSE(space.Give(c)->emptied);
  EXPECT_FALSE(space.Take(32 * kOneMiB)) << "the two halves are different memory";
  EXPECT_EQ(space.Give(a)->emptied, (ChunkSpace::Chunk{AllocationId{1}, Address{32 * kOneMiB}, 32 * kOneMiB}));
  EXPECT_EQ(space.held(), 32 * kOneMiB);
  EXPECT_EQ(*space.Take(16 * kOneMiB), c) << "an emptied chunk is not known any more";
  EXPECT_FALSE(space.Give(d)->emptied);
  EXPECT_EQ(space.Give(c)->emptied->allocation, AllocationId{2});
  EXPECT_EQ(space.held() + space.taken(), 0U);
}

TEST(ChunkSpace, what_is_free_in_the_next_chunk_is_not_joined_either) {
  ChunkSpace space;
  const Address a = space.Add({AllocationId{1}, Address{32 * kOneMiB}, 32 * kOneMiB}, 16 * kOneMiB),
                b = *space.Take(16 * kOneMiB);
  const Address c = space.Add({AllocationId{2}, Address{64 * kOneMiB}, 32 * kOneMiB}, 16 * kOneMiB),
                d = *space.Take(16 * kOneMiB);
  EXPECT_FALSE(space.Give(c)->emptied);
  EXPECT_FALSE(space.Give(b)->emptied) << "a is still taken";
  EXPECT_FALSE(space.Take(32 * kOneMiB));
  EXPECT_EQ(space.PartAt(a)->chunk, AllocationId{1});
  EXPECT_EQ(space.PartAt(d)->chunk, AllocationId{2});
}

TEST(ChunkSpace, chunks_grow_with_what_is_held_and_shrink_where_memory_is_short) {
  ChunkSpace space;
  EXPECT_EQ(space.ChunkFor(20 * kOneMiB, kGranularity), 32 * kOneMiB);
  EXPECT_EQ(space.ChunkFor(100 * kOneMiB, kGranularity), 100 * kOneMiB);
  EXPECT_EQ(space.ChunkFor(128 * kOneMiB + 1, kGranularity), 130 * kOneMiB) << "a chunk of its own";
  std::uint64_t chunks = 0;
  while (space.held() < Bytes{24} << 30) {
    if (!space.Take(20 * kOneMiB)) space.Add(ChunkOf(++chunks, *space.ChunkFor(20 * kOneMiB, kGranularity)), 20 * kOneMiB);
  }
  EXPECT_LE(chunks, 40U) << "24 GiB in segments of 20 MiB";
  EXPECT_LE(space.held() - space.taken(), space.held() / 16);
  EXPECT_EQ(space.ChunkFor(20 * kOneMiB, kGranularity), 1024 * kOneMiB);
  EXPECT_EQ(space.ChunkFor(20 * kOneMiB, kGranularity, 1), 512 * kOneMiB);
  EXPECT_EQ(space.ChunkFor(20 * kOneMiB, kGranularity, 6), 20 * kOneMiB);
  EXPECT_FALSE(space.ChunkFor(20 * kOneMiB, kGranularity, 7));
  EXPECT_FALSE(space.ChunkFor(200 * kOneMiB, kGranularity, 1));
}

// Against a list of what is taken: no two parts overlap, every part lies in one chunk, and in the end nothing is left.
TEST(ChunkSpace, any_order_of_taking_and_giving_keeps_parts_apart) {
  std::mt19937_64 random(42);
  ChunkSpace space;
  std::map<Address, Bytes> taken;
  std::map<Address, Bytes> chunks;
  std::uint64_t number = 0;
  for (int i = 0; i < 20'000; ++i) {
    const Status checked = space.Check();
    ASSERT_TRUE(checked.ok()) << checked.message();
    if (taken.empty() || random() % 2 == 0) {
      const Bytes bytes = random() % 8 == 0 ? random() % (200 * kOneMiB) : random() % (4 * kOneMiB);
      auto address = space.Take(bytes);
      if (!address) {
        const ChunkSpace::Chunk chunk = ChunkOf(++number, *space.ChunkFor(bytes, kGranularity));
        chunks[chunk.address] = chunk.bytes;
        address = space.Add(chunk, bytes);
        ASSERT_EQ(*address, chunk.address) << "and not in another hole, or a chunk that nothing lies in would never go";
      }
      ASSERT_TRUE(address);
      const Bytes rounded = ChunkSpace::Rounded(bytes);
      const auto next = taken.lower_bound(*address);
      ASSERT_TRUE(next == taken.end() || *address + rounded <= next->first);
      ASSERT_TRUE(next == taken.begin() || std::prev(next)->first + std::prev(next)->second <= *address);
      const auto chunk = std::prev(chunks.upper_bound(*address));
      ASSERT_LE((*address + rounded).value, chunk->first.value + chunk->second);
      taken[*address] = rounded;
      continue;
    }
    auto one = taken.begin();
    std::advance(one, static_cast<std::ptrdiff_t>(random() % taken.size()));
    const auto given = space.Give(one->first);
    ASSERT_TRUE(given);
    ASSERT_EQ(given->part.bytes, one->second);
    taken.erase(one);
    if (given->emptied) {
      ASSERT_EQ(chunks.erase(given->emptied->address), 1U);
    }
  }
  for (const auto& [address, bytes] : taken) ASSERT_TRUE(space.Give(address));
  EXPECT_EQ(space.held() + space.taken(), 0U);
  EXPECT_TRUE(space.chunks().empty());
}

}  // namespace
}  // namespace amem
