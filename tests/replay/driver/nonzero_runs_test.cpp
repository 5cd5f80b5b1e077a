// From a bitmap of pages to runs of blocks, against a look at every block.
#include "replay/driver/cuda/nonzero_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace amem {
namespace {

constexpr Bytes kPage = 4096;

TEST(Runs, random_bitmaps_give_what_a_look_at_every_block_gives) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 3000; ++round) {
    const Bytes pages = 1 + random() % 200, block_pages = Bytes{1} << (random() % 6);
    const unsigned density = static_cast<unsigned>(random() % 5);
    std::vector<std::uint32_t> words((pages + 31) / 32);
    for (auto& word : words) {
      const auto a = static_cast<std::uint32_t>(random()), b = static_cast<std::uint32_t>(random());
      word = density == 0 ? 0 : density == 1 ? ~0U : density == 2 ? a : density == 3 ? (a & b) : (a | b);  // past the end too
    }
    const Extent extent{Address{0x10000}, pages * kPage};
    std::vector<Extent> expected;
    for (Bytes first = 0; first < pages; first += block_pages) {
      const Bytes end = std::min(pages, first + block_pages);
      bool any = false;
      for (Bytes page = first; page < end; ++page) any = any || ((words[page / 32] >> (page % 32)) & 1U) != 0;
      if (!any) continue;
      if (!expected.empty() && expected.back().address + expected.back().bytes == extent.address + first * kPage) {
        expected.back().bytes += (end - first) * kPage;
      } else {
        expected.push_back({extent.address + first * kPage, (end - first) * kPage});
      }
    }
    NonZero found;
    AppendRuns(extent, words, block_pages * kPage, found);
    ASSERT_EQ(found.runs, expected) << "pages " << pages << ", block " << block_pages;
    ASSERT_EQ(found.counts, std::vector<std::size_t>{expected.size()});
  }
}

TEST(Runs, an_extent_without_pages_has_none) {
  NonZero found;
  AppendRuns({Address{4096}, 0}, {}, kPage, found);
  EXPECT_TRUE(found.runs.empty());
  EXPECT_EQ(found.counts, std::vector<std::size_t>{0});
}

}  // namespace
}  // namespace amem
