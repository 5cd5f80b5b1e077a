// Where there is no libFuzzer: the same targets on their seeds, and on some thousand mutations of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

std::vector<Bytes> Seeds() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(AMEM_FUZZ_SEEDS)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<Bytes> seeds{{}};
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return seeds;
}

TEST(Fuzz, seeds_and_mutations) {
#ifdef AMEM_SANITIZED
  constexpr int kMutations = 2'000;
#else
  constexpr int kMutations = 10'000;
#endif
  const auto seeds = Seeds();
  ASSERT_GT(seeds.size(), 1U) << "no seeds in " AMEM_FUZZ_SEEDS;
  for (const Bytes& seed : seeds) EXPECT_EQ(LLVMFuzzerTestOneInput(seed.data(), seed.size()), 0);
  std::mt19937_64 random(1);
  const auto pick = [&](std::size_t below) { return static_cast<std::size_t>(random() % std::max<std::size_t>(below, 1)); };
  const auto enough = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  for (int i = 0; i < kMutations && std::chrono::steady_clock::now() < enough; ++i) {
    Bytes bytes = seeds[pick(seeds.size())];
    for (std::size_t changes = 1 + pick(4); changes > 0; --changes) {
      if (bytes.empty() || pick(8) == 0) bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(pick(bytes.size())), 8, 0);
      const std::size_t at = pick(bytes.size());
      switch (pick(4)) {
        case 0:
          bytes[at] ^= static_cast<std::uint8_t>(1U << pick(8));
          break;
        case 1:
          bytes[at] = static_cast<std::uint8_t>(random());
          break;
        case 2:
          bytes.resize(at);
          break;
        default: {
          const Bytes& other = seeds[pick(seeds.size())];
          const std::size_t from = pick(other.size());
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), other.begin() + static_cast<std::ptrdiff_t>(from),
                       other.end());
        }
      }
    }
    EXPECT_EQ(LLVMFuzzerTestOneInput(bytes.data(), bytes.size()), 0);
  }
}

}  // namespace
