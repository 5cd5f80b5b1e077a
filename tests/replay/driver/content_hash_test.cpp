// What the hash of contents promises: any change of a unit is seen, and the kernel's own source gives what its twin on the CPU
// gives. The kernel runs here with contexts of one thread in the places of a warp's lanes.
#include "replay/driver/content_hash.h"

#include <gtest/gtest.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "replay/driver/driver.h"
#include "tests/replay/driver/hash_unit.h"

// ---- the kernels' source, for lanes that take turns ------------------------------------------------------------------------

namespace amem::lanes {

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct Index {
  unsigned x = 0;
};
inline Index threadIdx, blockIdx, gridDim{1};

// Lanes that take turns on one thread: each goes on until it shows the others something, and reads when all have. Threads of
// their own would wait for each other for a minute where many processes run.
class Warp {
 public:
  std::uint64_t Exchange(unsigned lane, std::uint64_t value, unsigned with) {
    shown_[lane] = value;
    AwaitOthers(lane);
    const std::uint64_t other = shown_[with];
    AwaitOthers(lane);
    return other;
  }
  bool Any(unsigned lane, bool value) {
    shown_[lane] = value ? 1 : 0;
    AwaitOthers(lane);
    const bool any = std::ranges::any_of(shown_, [](std::uint64_t one) { return one != 0; });
    AwaitOthers(lane);
    return any;
  }
  void Run(const std::function<void(unsigned lane)>& work) {
    work_ = &work;
    running_ = this;
    unsigned done = 0;
    for (Lane& lane : lanes_) {
      ::getcontext(&lane.context);
      lane.context.uc_stack.ss_sp = lane.stack.data();
      lane.context.uc_stack.ss_size = lane.stack.size();
      lane.context.uc_link = &between_;
      ::makecontext(&lane.context, &Warp::Begin, 0);
    }
    while (done < kHashLanes) {
      done = 0;
      for (now_ = 0; now_ < kHashLanes; ++now_) {
        if (!lanes_[now_].done) ::swapcontext(&between_, &lanes_[now_].context);
        done += lanes_[now_].done ? 1 : 0;
      }
    }
  }

 private:
  struct Lane {
    std::vector<std::byte> stack = std::vector<std::byte>(std::size_t{256} << 10);
    ucontext_t context{};
    bool done = false;
  };
  static void Begin() {
    const unsigned lane = running_->now_;
    (*running_->work_)(lane);
    running_->lanes_[lane].done = true;
  }
  void AwaitOthers(unsigned lane) {
    const Index index = threadIdx;
    ::swapcontext(&lanes_[lane].context, &between_);
    threadIdx = index;
  }

  static inline Warp* running_ = nullptr;
  std::array<std::uint64_t, kHashLanes> shown_{};
  std::array<Lane, kHashLanes> lanes_;
  ucontext_t between_{};
  const std::function<void(unsigned)>* work_ = nullptr;
  unsigned now_ = 0;
};
inline Warp* warp = nullptr;

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned apart) {
  return static_cast<T>(warp->Exchange(threadIdx.x % kHashLanes, value, threadIdx.x % kHashLanes ^ apart));
}
inline bool __any_sync(unsigned, bool value) { return warp->Any(threadIdx.x % kHashLanes, value); }
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, const T& value) {
  *at = value;
}

}  // namespace amem::lanes

#define __device__ [[maybe_unused]]
#define __global__
#define __launch_bounds__(...)
using namespace amem::lanes;  // NOLINT(google-build-using-namespace): the source has CUDA's names at the top level
#include "replay/driver/cuda/nonzero_kernels.cu"
#undef __device__
#undef __global__
#undef __launch_bounds__

namespace amem {
namespace {

// AMEM_CHANGES=10000000; with AMEM_SEED others.
std::uint64_t Number(const char* name, std::uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::shared_ptr<const ContentKey> Key() {
  auto key = RandomContentKey();
  EXPECT_TRUE(key.ok());
  return *key;
}

using Page = std::array<std::byte, kPageBytes>;

class Hash : public testing::Test {
 protected:
  std::uint64_t Below(std::uint64_t n) { return random_() % n; }
  void Fill(std::span<std::byte> at) {
    for (std::size_t i = 0; i < at.size(); i += 8) {
      const std::uint64_t word = random_();
      std::memcpy(at.data() + i, &word, 8);
    }
  }
  // A unit of that many pages, some of them zero, and some with one byte that is not.
  std::vector<std::byte> Unit(unsigned pages) {
    std::vector<std::byte> unit(std::size_t{pages} * kPageBytes);
    for (unsigned page = 0; page < pages; ++page) {
      const auto at = std::span(unit).subspan(std::size_t{page} * kPageBytes, kPageBytes);
      if (Below(4) == 0) continue;
      if (Below(4) == 0) at[Below(kPageBytes)] = std::byte{1};
      if (Below(2) == 0) Fill(at);
    }
    return unit;
  }
  // What the kernels say of all extents: the one that hashes, and the one that does not.
  NonZero ByKernel(const ContentKey& key, const std::vector<std::vector<std::byte>*>& extents) {
    std::vector<sparse::TableExtent> table;
    std::uint32_t units = 0;
    for (const auto* extent : extents) {
      table.push_back(
          {reinterpret_cast<std::uint64_t>(extent->data()), units, static_cast<std::uint32_t>(extent->size() / kPageBytes)});
      units += static_cast<std::uint32_t>((extent->size() + kUnitBytes - 1) / kUnitBytes);
    }
    amem_sparse_key = key;
    NonZero found{std::vector<std::uint32_t>(units), std::vector<ContentHash>(units), {}};
    std::vector<std::uint32_t> pages(units);
    static_assert(sizeof(ContentHash) == 2 * sizeof(std::uint64_t));
    Warp one;
    warp = &one;
    one.Run([&](unsigned lane) {
      const auto count = static_cast<unsigned>(table.size());
      auto* const hashes = reinterpret_cast<unsigned long long*>(found.hashes.data());
      for (threadIdx.x = lane; threadIdx.x < sparse::kThreads;
           threadIdx.x += kHashLanes) {  // one warp of the block after the other
        amem_sparse_look(table.data(), count, units, found.pages.data(), hashes);
        amem_sparse_find(table.data(), count, units, pages.data());
      }
    });
    EXPECT_EQ(pages, found.pages);
    return found;
  }
  // False: what was swapped was alike.
  bool ChangeOne(std::span<std::byte> unit) {
    const auto swap = [&](Bytes each) {
      const auto a = unit.subspan(Below(unit.size() / each) * each, each),
                 b = unit.subspan(Below(unit.size() / each) * each, each);
      if (std::memcmp(a.data(), b.data(), each) == 0) return false;
      std::ranges::swap_ranges(a, b);
      return true;
    };
    switch (Below(6)) {
      case 0:
        unit[Below(unit.size())] ^= std::byte{1} << Below(8);
        return true;
      case 1:
        unit[Below(unit.size())] ^= static_cast<std::byte>(1 + Below(255));
        return true;
      case 2:
        Fill(unit.subspan(Below(unit.size() / kPageBytes) * kPageBytes, kPageBytes));
        return true;
      case 3:
        return swap(kPageBytes);
      case 4:
        return swap(16);
      default:
        return swap(4);
    }
  }
  // Of so many changes of a unit, those after which it has the hash of before.
  std::size_t Missed(const ContentKey& key, std::size_t changes) {
    std::size_t missed = 0;
    std::vector<std::byte> unit;
    for (std::size_t done = 0; done < changes;) {
      unit = Unit(static_cast<unsigned>(1 + Below(3)));
      ContentHash before = HashUnit(key, unit);
      for (int i = 0; i < 100; ++i) {
        if (!ChangeOne(unit)) continue;
        const ContentHash after = HashUnit(key, unit);
        missed += after == before ? 1 : 0;
        before = after;
        ++done;
      }
    }
    return missed;
  }

  std::mt19937_64 random_{Number("AMEM_SEED", 20261125)};
};

TEST_F(Hash, the_kernel_gives_what_its_twin_gives) {
  const auto key = Key();
  std::vector<std::vector<std::byte>> extents;
  for (const unsigned pages : {32U, 1U, 40U, 7U, 64U, 31U, 33U, 300U}) extents.push_back(Unit(pages));
  std::vector<std::vector<std::byte>*> all;
  for (auto& extent : extents) all.push_back(&extent);
  const NonZero found = ByKernel(*key, all);
  std::size_t unit = 0;
  for (const auto& extent : extents) {
    for (Bytes done = 0; done < extent.size(); done += kUnitBytes, ++unit) {
      std::uint32_t pages = 0;
      const auto contents = std::span(extent).subspan(done, std::min<Bytes>(kUnitBytes, extent.size() - done));
      EXPECT_EQ(HashUnit(*key, contents, &pages), found.hashes[unit]) << unit;
      EXPECT_EQ(pages, found.pages[unit]) << unit;
    }
  }
  EXPECT_EQ(unit, found.pages.size());
}

TEST_F(Hash, of_extreme_words_and_factors_the_kernel_gives_what_its_twin_gives) {
  ContentKey key;
  std::ranges::fill(key.words, 1);
  std::ranges::fill(std::span(&key.factors[0][0], (kUnitPages + 1) * kSumFactors), kHashPrime - 1);
  std::vector<std::byte> ones(kUnitBytes, std::byte{0xff}), minus_one(kUnitBytes);
  for (Bytes at = 0; at < kUnitBytes; at += 4) {
    const std::uint32_t word = 0xfffffffe;
    std::memcpy(minus_one.data() + at, &word, sizeof word);
  }
  const NonZero found = ByKernel(key, {&ones, &minus_one});
  EXPECT_EQ(HashUnit(key, ones), found.hashes[0]);
  EXPECT_EQ(HashUnit(key, minus_one), found.hashes[1]);
  EXPECT_LT(found.hashes[1].first, kHashPrime);
}

TEST_F(Hash, the_kernel_copies_each_piece_to_its_page_of_the_other_memory_and_back) {
  const std::vector<std::byte> contents = Unit(40);
  std::vector<std::byte> device = contents, host(64 * kPageBytes, std::byte{0xAB}), expected = host;
  std::vector<sparse::TablePiece> pieces;
  for (const auto [from, to, pages] : {std::array{0U, 63U, 1U}, std::array{1U, 40U, 16U}, std::array{20U, 3U, 7U}}) {
    pieces.push_back({reinterpret_cast<std::uint64_t>(device.data()) + Bytes{from} * kPageBytes, to, pages});
    std::memcpy(&expected[Bytes{to} * kPageBytes], &contents[Bytes{from} * kPageBytes], Bytes{pages} * kPageBytes);
  }
  const auto copy = [&](int gather) {
    for (threadIdx.x = 0; threadIdx.x < sparse::kThreads; ++threadIdx.x)
      amem_sparse_copy(pieces.data(), 3, reinterpret_cast<std::uint64_t>(host.data()), gather);
  };
  copy(1);
  EXPECT_EQ(host, expected);
  for (const std::size_t page : {0, 1, 16, 20, 26}) std::memset(&device[page * kPageBytes], 0xCD, kPageBytes);
  copy(0);
  EXPECT_EQ(device, contents);
}

TEST_F(Hash, no_random_change_is_missed) { EXPECT_EQ(Missed(*Key(), Number("AMEM_CHANGES", 20'000)), 0U); }

TEST_F(Hash, with_a_key_of_zeros_changes_are_missed) { EXPECT_GT(Missed(ContentKey{}, 1'000), 0U); }

TEST_F(Hash, cut_to_16_bits_it_is_the_same_for_different_contents_and_whole_it_is_not) {
  const auto key = Key();
  constexpr std::size_t kContents = 2'000;
  std::vector<std::uint64_t> whole, cut;
  Page page{};
  for (std::size_t i = 0; i < kContents; ++i) {
    Fill(page);
    const ContentHash hash = HashUnit(*key, page);
    whole.push_back(hash.first ^ hash.second);
    cut.push_back(hash.first & 0xffff);
  }
  const auto distinct = [](std::vector<std::uint64_t> values) {
    std::ranges::sort(values);
    values.erase(std::unique(values.begin(), values.end()), values.end());
    return values.size();
  };
  EXPECT_EQ(distinct(whole), kContents);
  EXPECT_LT(distinct(cut), kContents);
}

TEST_F(Hash, every_bit_and_every_page_counts_and_keys_differ) {
  const auto key = Key();
  Page page{};
  std::vector<std::byte> unit(kUnitBytes);
  std::vector<ContentHash> seen{HashUnit(*key, unit)};
  EXPECT_EQ(seen.front(), ContentHash{});
  for (unsigned bit = 0; bit < kPageBytes * 8; ++bit) {
    page[bit / 8] = std::byte{1} << bit % 8;
    seen.push_back(HashUnit(*key, page));
    page[bit / 8] = {};
  }
  for (unsigned at = 1; at < kUnitPages; ++at) {  // the first page's is among those above
    unit[at * kPageBytes] = std::byte{1};
    seen.push_back(HashUnit(*key, unit));
    unit[at * kPageBytes] = {};
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    for (std::size_t j = i > 64 ? i - 64 : 0; j < i; ++j) ASSERT_NE(seen[i], seen[j]) << i << " and " << j;
  }
  EXPECT_NE(HashUnit(*Key(), std::span(page).first<kPageBytes>()), seen[1]);
  page[0] = std::byte{1};
  EXPECT_NE(HashUnit(*Key(), page), HashUnit(*Key(), page));
}

}  // namespace
}  // namespace amem
