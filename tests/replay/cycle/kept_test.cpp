// What is kept of contents from one cycle to the next: what is unchanged does not travel, no change is missed, host memory is
// no more than without, and what is kept goes before anything fails for want of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>

#include "tests/replay/cycle/contents.h"
#include "tests/replay/cycle/plain_driver.h"

namespace amem {
namespace {

using test::Eventually;
using test::kGpu0;
using test::kGpu1;
using test::kKiB;
using test::kPage;

constexpr Bytes kUnit = kUnitBytes;

class Kept : public test::Contents {
 protected:
  static void Fill(Block& block, std::uint64_t seed, Bytes from = 0, Bytes bytes = ~Bytes{0}) {
    std::mt19937_64 random(seed);
    bytes = std::min(bytes, block.item.bytes - from);
    for (Bytes i = from; i < from + bytes; i += sizeof(std::uint64_t)) {
      const std::uint64_t word = random() | 0x0101010101010101;  // no byte is zero
      std::memcpy(&block.expected[i], &word, sizeof word);
    }
    std::memcpy(At(block) + from, &block.expected[from], bytes);
  }
  // A whole cycle, whose end keeps a copy. What its Save copied, and what it called unchanged.
  struct Seen {
    Bytes saved = 0, unchanged = 0, zero = 0;
    friend bool operator==(const Seen&, const Seen&) = default;
    friend std::ostream& operator<<(std::ostream& out, const Seen& s) {
      return out << s.saved << " saved, " << s.unchanged << " unchanged, " << s.zero << " zero";
    }
  };
  Seen KeepingCycle(Backup& backup, ScanMode mode = ScanMode::kIdle) {
    const Status saved = backup.Save(Items(), mode);
    EXPECT_TRUE(saved.ok()) << saved.message();
    EXPECT_TRUE(backup.Finish().ok());
    Recreate();
    const Status restored = backup.Restore(Items());
    EXPECT_TRUE(restored.ok()) << restored.message();
    EXPECT_TRUE(backup.Finish().ok());
    ExpectAllBack();
    backup.RetainCopy();
    const BackupStatistics s = backup.Statistics();
    EXPECT_EQ(s.bytes_total, s.bytes_saved + s.bytes_unchanged + s.bytes_zero);
    EXPECT_EQ(s.held_bytes, 0U);
    return {s.bytes_saved, s.bytes_unchanged, s.bytes_zero};
  }
};

// ---- what travels ----------------------------------------------------------------------------------------------------------

TEST_F(Kept, what_is_unchanged_does_not_travel) {
  Fill(Add(8 * kUnit), 1);
  Fill(Add(3 * kUnit, kGpu1), 2);
  Add(2 * kUnit);  // zero
  test::LoneBackup backup(*sim_, {.chunk = 256 * kKiB});
  EXPECT_EQ(KeepingCycle(backup), (Seen{11 * kUnit, 0, 2 * kUnit}));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(KeepingCycle(backup), (Seen{0, 11 * kUnit, 2 * kUnit}));
}

TEST_F(Kept, only_units_that_changed_travel) {
  Block& block = Add(16 * kUnit);
  Fill(block, 1);
  for (const double dense : {0.9, 2.0}) {
    test::LoneBackup backup(*sim_, {.chunk = 256 * kKiB, .dense = dense});
    KeepingCycle(backup);
    Write(block, 5 * kUnit + 77, std::byte{0});
    EXPECT_EQ(KeepingCycle(backup), (Seen{kUnit, 15 * kUnit, 0}));
    Write(block, 0, std::byte{2});
    Write(block, 16 * kUnit - 1, std::byte{2});
    EXPECT_EQ(KeepingCycle(backup), (Seen{2 * kUnit, 14 * kUnit, 0}));
    EXPECT_EQ(KeepingCycle(backup), (Seen{0, 16 * kUnit, 0}));
    Fill(block, 7);
    EXPECT_EQ(KeepingCycle(backup), (Seen{16 * kUnit, 0, 0}));
    Fill(block, 1);
  }
}

// One copy less that has to begin is worth two units.
TEST_F(Kept, up_to_two_unchanged_units_between_two_that_changed_travel_with_them) {
  Block& block = Add(12 * kUnit);
  Fill(block, 1);
  test::LoneBackup backup(*sim_, {.dense = 0.9});
  KeepingCycle(backup);
  for (const Bytes unit : {0, 3, 7}) Write(block, unit * kUnit, std::byte{0});
  EXPECT_EQ(KeepingCycle(backup), (Seen{5 * kUnit, 7 * kUnit, 0}));
}

// Wherever in host memory they go, and where they have moved to because they have grown.
TEST_F(Kept, sparse_units_travel_in_one_call_however_many_have_changed) {
  Block& block = Add(64 * kUnit);
  for (Bytes unit = 0; unit < 64; ++unit) Fill(block, unit, unit * kUnit + kPage, 2 * kPage);
  test::LoneBackup backup(*sim_, {.chunk = 128 * kKiB});
  KeepingCycle(backup);
  for (const Bytes apart : {32, 8, 2}) {
    for (const bool grow : {false, true}) {
      const std::uint64_t gathers = sim_->Calls("Gather"), scatters = sim_->Calls("Scatter");
      for (Bytes unit = 1; unit < 64; unit += apart) Fill(block, apart, unit * kUnit + kPage, (grow ? apart : 1) * kPage / 2);
      EXPECT_GE(KeepingCycle(backup).saved, 64 / apart * 2 * kPage);
      EXPECT_EQ(sim_->Calls("Gather") - gathers, 1U) << apart << ", " << grow;
      EXPECT_EQ(sim_->Calls("Scatter") - scatters, 1U) << apart << ", " << grow;
    }
  }
}

TEST_F(Kept, memory_that_becomes_zero_or_stops_to_be_is_seen) {
  Block& block = Add(4 * kUnit);
  Fill(block, 1);
  test::LoneBackup backup(*sim_, {.chunk = 128 * kKiB});
  KeepingCycle(backup);
  for (Bytes i = kUnit; i < 2 * kUnit; ++i) Write(block, i, std::byte{});
  EXPECT_EQ(KeepingCycle(backup), (Seen{0, 3 * kUnit, kUnit}));
  Write(block, kUnit + 9, std::byte{9});
  EXPECT_EQ(KeepingCycle(backup), (Seen{kPage, 3 * kUnit, kUnit - kPage}));
  EXPECT_EQ(KeepingCycle(backup), (Seen{0, 3 * kUnit + kPage, kUnit - kPage}));
}

// A tag's parts come and go, so its chunk is saved in other extents each time.
TEST_F(Kept, a_copy_of_little_use_rests_and_one_that_others_took_does_not) {
  Block& block = Add(8 * kUnit);
  Fill(block, 1);
  test::LoneBackup backup(*sim_, {.chunk = 256 * kKiB, .without_copy = 2});
  KeepingCycle(backup);
  backup.Trim(0);
  KeepingCycle(backup);  // nothing was left of the copy
  EXPECT_EQ(KeepingCycle(backup), (Seen{0, 8 * kUnit, 0}));
  Fill(block, 2, 0, 6 * kUnit);
  EXPECT_EQ(KeepingCycle(backup), (Seen{6 * kUnit, 2 * kUnit, 0}));
  EXPECT_GT(backup.Statistics().kept_bytes, 0U) << "a quarter was unchanged";
  Fill(block, 3, 0, 7 * kUnit);
  EXPECT_EQ(KeepingCycle(backup), (Seen{7 * kUnit, kUnit, 0}));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(KeepingCycle(backup), (Seen{8 * kUnit, 0, 0})) << "it rests";
  EXPECT_EQ(KeepingCycle(backup), (Seen{0, 8 * kUnit, 0}));
}

class Hashes : public test::PlainDriver {
 public:
  explicit Hashes(Simulator& sim) : PlainDriver(sim), looks_(sim) {}
  Result<NonZero> FindNonZero(DeviceOrdinal d, std::span<const Extent> e, const ContentKey* key, Deadline until) override {
    hashed += key != nullptr ? 1 : 0;
    auto found = looks_.FindNonZero(d, e, key, until);
    if (cut_to_16_bits && found)
      for (ContentHash& hash : found->hashes) hash = {hash.first & 0xffff, 0};
    return found;
  }
  int hashed = 0;
  bool cut_to_16_bits = false;

 private:
  Simulator& looks_;
};

// NCCL's contents: hashing all of them takes longer than copying the little that is not zero.
TEST_F(Kept, what_is_mostly_zero_is_not_hashed_where_copies_may_rest) {
  Fill(Add(16 * kUnit), 1, 0, 2 * kUnit);
  Block& block = Add(kUnit);
  Hashes driver(*sim_);
  test::LoneBackup resting(driver, {.chunk = 256 * kKiB, .without_copy = 2}), keeping(*sim_, {.chunk = 256 * kKiB});
  const Seen copied{2 * kUnit, 0, 15 * kUnit}, unchanged{0, 2 * kUnit, 15 * kUnit};
  EXPECT_EQ(KeepingCycle(keeping), copied);
  EXPECT_EQ(KeepingCycle(keeping), unchanged);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(KeepingCycle(resting), copied);
    EXPECT_EQ(driver.hashed, 1 + i / 2) << "every second time it is tried again";
    EXPECT_EQ(resting.Statistics().kept_bytes, 0U);
  }
  Fill(block, 2);
  EXPECT_EQ(KeepingCycle(resting), (Seen{3 * kUnit, 0, 14 * kUnit}));
  EXPECT_EQ(KeepingCycle(resting), (Seen{0, 3 * kUnit, 14 * kUnit})) << "more than an eighth is not zero";
}

TEST_F(Kept, items_may_be_cut_otherwise_than_before) {
  Block& block = Add(8 * kUnit);
  Fill(block, 1);
  test::LoneBackup backup(*sim_, {.chunk = 256 * kKiB});
  const auto cycle = [&](std::vector<std::pair<Bytes, Bytes>> cuts) {
    std::vector<Backup::Item> items;
    for (const auto& [from, bytes] : cuts)
      items.push_back({block.item.allocation, kGpu0, block.item.address + from, bytes, from});
    EXPECT_TRUE(backup.Save(items).ok() && backup.Finish().ok());
    Recreate();
    EXPECT_TRUE(backup.Restore(items).ok() && backup.Finish().ok());
    for (const auto& [from, bytes] : cuts)
      EXPECT_EQ(std::memcmp(At(block) + from, block.expected.data() + from, bytes), 0) << from;
    std::memcpy(At(block), block.expected.data(), block.item.bytes);
    backup.RetainCopy();
    return backup.Statistics().bytes_unchanged;
  };
  EXPECT_EQ(cycle({{0, 8 * kUnit}}), 0U);
  EXPECT_EQ(cycle({{0, 2 * kUnit}, {3 * kUnit, 4 * kUnit}}), 6 * kUnit);
  EXPECT_EQ(cycle({{0, 8 * kUnit}}), 6 * kUnit) << "what was not saved in between is not kept";
  EXPECT_EQ(cycle({{kUnit, 6 * kUnit}, {7 * kUnit, kUnit}}), 7 * kUnit);
  EXPECT_EQ(cycle({{kUnit + kPage, 4 * kUnit}}), 0U) << "no unit of it is one of before";
  EXPECT_EQ(cycle({{kUnit + kPage, 2 * kUnit + kPage}}), 2 * kUnit) << "the last one is shorter";
}

TEST_F(Kept, another_allocation_at_the_same_address_is_not_taken_for_the_one_before) {
  Block& block = Add(2 * kUnit);
  Fill(block, 1);
  test::LoneBackup backup(*sim_);
  KeepingCycle(backup);
  block.item.allocation = AllocationId{77};
  EXPECT_EQ(KeepingCycle(backup), (Seen{2 * kUnit, 0, 0}));
  EXPECT_EQ(KeepingCycle(backup), (Seen{0, 2 * kUnit, 0}));
}

TEST_F(Kept, what_a_driver_cannot_hash_is_not_kept) {
  Fill(Add(2 * kUnit), 1);
  test::PlainDriver plain(*sim_);
  test::LoneBackup backup(plain, {.chunk = 256 * kKiB});
  for (int i = 0; i < 2; ++i) EXPECT_EQ(KeepingCycle(backup), (Seen{2 * kUnit, 0, 0}));
  EXPECT_EQ(backup.Statistics().kept_bytes, 0U);
}

TEST_F(Kept, beside_the_program_contents_are_hashed_once_the_kernels_are_there) {
  Block& block = Add(4 * kUnit);
  Fill(block, 1);
  test::LoneBackup backup(*sim_, {.dense = 0.9});
  for (int i = 0; i < 2; ++i) EXPECT_EQ(KeepingCycle(backup, ScanMode::kBeside), (Seen{4 * kUnit, 0, 0}));
  EXPECT_EQ(sim_->Calls("FindNonZero"), 0U);
  EXPECT_EQ(sim_->Calls("Gather"), 0U);
  KeepingCycle(backup);
  Write(block, 0, std::byte{2});
  EXPECT_EQ(KeepingCycle(backup, ScanMode::kBeside), (Seen{kUnit, 3 * kUnit, 0}));
  EXPECT_EQ(sim_->Calls("Gather"), 0U);
}

// ---- no change is missed ---------------------------------------------------------------------------------------------------

// AMEM_CHANGES=10000000 by night; with AMEM_SEED others.
std::uint64_t Number(const char* name, std::uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

class Changing : public Kept {
 protected:
  void SetUp() override {
    Kept::SetUp();
    std::vector<Bytes> sizes{31, 32, 33, 64};
    while (sizes.size() < 400) sizes.push_back(1 + sizes.size() % 2);  // small units, so that many changes take little time
    for (const Bytes pages : sizes) {
      Block& block = Add(pages * kPage, pages % 2 == 0 ? kGpu1 : kGpu0);
      for (Bytes at = 0; at < block.item.bytes; at += kUnit)
        units_.push_back({&block, at, std::min(kUnit, block.item.bytes - at)});
    }
  }
  struct Unit {
    Block* block;
    Bytes at, bytes;
    [[nodiscard]] std::span<std::byte> contents() const { return std::span(block->expected).subspan(at, bytes); }
  };
  std::uint64_t Below(std::uint64_t n) { return random_() % n; }
  static constexpr std::uint64_t kSwap = 5;
  // False: it is as before, or may be.
  bool Change(std::uint64_t kind, const Unit& unit, const Unit& next) {
    const auto all = unit.contents();
    const auto page = all.subspan(Below(unit.bytes / kPage) * kPage, kPage);
    const auto swap = [](std::span<std::byte> one, std::span<std::byte> other) {
      if (one.size() != other.size() || std::memcmp(one.data(), other.data(), one.size()) == 0) return false;
      const std::vector<std::byte> before(one.begin(), one.end());
      std::memcpy(one.data(), other.data(), one.size());
      std::memcpy(other.data(), before.data(), one.size());
      return true;
    };
    switch (kind) {
      case 0:
        all[Below(all.size())] ^= std::byte{1} << Below(8);
        return true;
      case 1:
        all[Below(all.size())] ^= static_cast<std::byte>(1 + Below(255));
        return true;
      case 2:
        return Fill(*unit.block, random_(), unit.at, unit.bytes), true;
      case 3: {
        const bool zero = page.front() == std::byte{};
        std::memset(page.data(), 0, page.size());
        return !zero;
      }
      case 4:
        return swap(page, all.first(kPage));
      case kSwap:
        return swap(all, next.contents());
      default:
        return false;
    }
  }
  // Of so many changes, each of another unit or two in a cycle, those after which something was not as it was before. Stops at
  // `enough` of them. Cycles whose kept copy was given up, because its units had changed in size, do not count.
  std::size_t Missed(Backup& backup, std::size_t changes, std::size_t enough = ~std::size_t{0}) {
    std::size_t missed = 0;
    changes_ = 0;
    for (std::size_t cycle = 0; changes_ < changes && missed < enough; ++cycle) {
      std::size_t now = 0;
      for (std::size_t i = units_.size(); i > 1; --i) std::swap(units_[i - 1], units_[Below(i)]);
      for (std::size_t i = 0; i + 1 < units_.size(); ++i) {
        const std::uint64_t kind = Below(8);
        now += Change(kind, units_[i], units_[i + 1]) ? 1 : 0;
        i += kind == kSwap ? 1 : 0;
      }
      for (const Block& block : blocks_) std::memcpy(At(block), block.expected.data(), block.item.bytes);
      const bool saved = backup.Save(Items()).ok() && backup.Finish().ok();
      changes_ += backup.Statistics().bytes_unchanged > 0 ? now : 0;
      if (cycle % 50 == 0) Recreate();
      for (const Block& block : blocks_) std::memset(At(block), 0xAB, block.item.bytes);
      const bool back = saved && backup.Restore(Items()).ok() && backup.Finish().ok();
      const bool kept = cycle < 10 || changes_ > 0;
      EXPECT_TRUE(back && kept) << back;
      if (!back || !kept) return changes;
      backup.RetainCopy();
      for (const Block& block : blocks_) missed += std::memcmp(At(block), block.expected.data(), block.item.bytes) == 0 ? 0 : 1;
    }
    return missed;
  }

  std::size_t changes_ = 0;  // that Missed has made
  std::vector<Unit> units_;
  std::mt19937_64 random_{Number("AMEM_SEED", 31)};
};

TEST_F(Changing, no_change_is_missed) {
  for (const bool dense : {false, true}) {
    test::LoneBackup backup(*sim_, {.chunk = 128 * kKiB, .dense = dense ? 0.5 : 2});
    const std::size_t missed = Missed(backup, Number("AMEM_CHANGES", 2'000) / 2);
    EXPECT_EQ(missed, 0U);
    std::printf("%zu changes, %zu missed\n", changes_, missed);
  }
}

TEST_F(Changing, with_a_key_of_zeros_changes_are_missed) {
  test::LoneBackup backup(*sim_, {.key = std::make_shared<const ContentKey>()});
  EXPECT_GT(Missed(backup, 1'000), 0U);
}

TEST_F(Changing, with_a_hash_cut_to_16_bits_changes_are_missed) {
  auto key = std::make_shared<ContentKey>();
  std::mt19937_64 random(145);  // a key by which one of the first 158 is; of others one in 65 536 on average
  for (std::uint32_t& word : key->words) word = static_cast<std::uint32_t>(random());
  for (std::uint64_t& factor : std::span(&key->factors[0][0], sizeof key->factors / sizeof(std::uint64_t)))
    factor = random() % kHashPrime;
  Hashes driver(*sim_);
  driver.cut_to_16_bits = true;
  test::LoneBackup cut(driver, {.key = key}), whole(*sim_, {.key = key});
  EXPECT_GT(Missed(cut, 1'000'000, 1), 0U);
  EXPECT_EQ(Missed(whole, changes_), 0U);
}

TEST_F(Changing, what_the_hash_misses_a_comparison_of_bytes_finds) {
  test::LoneBackup backup(*sim_, {.compare = true, .key = std::make_shared<const ContentKey>()});
  for (Block& block : blocks_) Fill(block, 5);
  ASSERT_TRUE(backup.Save(Items()).ok() && backup.Finish().ok());
  ASSERT_TRUE(backup.Restore(Items()).ok() && backup.Finish().ok());
  backup.RetainCopy();
  EXPECT_TRUE(backup.Save(Items()).ok() && backup.Finish().ok());
  ASSERT_TRUE(backup.Restore(Items()).ok() && backup.Finish().ok());
  backup.RetainCopy();
  Write(blocks_[3], 5 * kPage + 8, std::byte{2});
  const Status found = backup.Save(Items());
  EXPECT_EQ(found.code(), Code::kBroken);
  EXPECT_NE(found.message().find("they differ at byte 20488, and their hash is the same"), std::string::npos)
      << found.message();
  backup.ForgetAll();
  EXPECT_TRUE(backup.Save(Items()).ok() && backup.Finish().ok());
}

// ---- host memory -----------------------------------------------------------------------------------------------------------

TEST_F(Kept, after_fifty_cycles_no_more_host_memory_is_pinned_than_contents_need) {
  std::mt19937_64 random(50);
  for (int i = 0; i < 6; ++i) Add(5 * kUnit);
  test::LoneBackup keeps(*sim_, {.chunk = 128 * kKiB}), forgets(*sim_, {.chunk = 128 * kKiB});
  Bytes most = 0;
  for (int i = 0; i < 50; ++i) {
    Scribble(random);
    ASSERT_TRUE(forgets.Save(Items()).ok() && forgets.Finish().ok());
    forgets.ForgetAll();
    most = std::max(most, forgets.pinned_bytes());
    KeepingCycle(keeps);
    if (HasFailure()) return;
  }
  EXPECT_LE(keeps.pinned_bytes(), most + most / 8 + 2 * 128 * kKiB);
}

// Each cycle as much is not zero, elsewhere.
TEST_F(Kept, contents_that_move_about_pin_what_they_take_after_fifty_cycles_as_after_two) {
  constexpr std::size_t kPages = 16 * kUnitPages;
  Block& block = Add(kPages * kPage);
  std::vector<std::size_t> pages(kPages);
  std::iota(pages.begin(), pages.end(), std::size_t{0});
  std::mt19937_64 random(50);
  test::LoneBackup backup(*sim_, {.chunk = 64 * kKiB});
  Bytes after_two = 0;
  for (int cycle = 1; cycle <= 50; ++cycle) {
    std::ranges::shuffle(pages, random);
    for (std::size_t i = 0; i < kPages; ++i) Fill(block, random(), pages[i] * kPage, 16);
    for (std::size_t i = kPages / 4; i < kPages; ++i)
      for (Bytes at = 0; at < 16; ++at) Write(block, pages[i] * kPage + at, std::byte{});
    EXPECT_EQ(KeepingCycle(backup).zero, (kPages - kPages / 4) * kPage);
    if (cycle == 2) after_two = backup.pinned_bytes();
  }
  EXPECT_EQ(backup.pinned_bytes(), after_two);
  EXPECT_LE(after_two, kPages / 4 * kPage + 64 * kKiB);
}

TEST_F(Kept, what_is_not_there_any_more_is_not_kept) {
  for (std::uint64_t i = 0; i < 4; ++i) Fill(Add(4 * kUnit), i);
  test::LoneBackup backup(*sim_, {.chunk = 128 * kKiB});
  KeepingCycle(backup);
  EXPECT_EQ(backup.Statistics().kept_bytes, 16 * kUnit);
  for (int i = 0; i < 3; ++i) {
    Down(blocks_.back());
    blocks_.pop_back();
  }
  EXPECT_EQ(KeepingCycle(backup), (Seen{0, 4 * kUnit, 0}));
  EXPECT_EQ(backup.Statistics().kept_bytes, 4 * kUnit);
}

// Two backups, as of two tags that are paused in turns.
class TwoTags : public Kept {
 protected:
  static constexpr Bytes kEach = 8 * kUnit;
  void SetUp() override {
    Kept::SetUp();
    Fill(Add(kEach), 1);
    Fill(Add(kEach), 2);
  }
  [[nodiscard]] Seen Cycle(Backup& backup, int which) {
    const std::span<const Backup::Item> own(&blocks_[which].item, 1);
    const Status saved = backup.Save(own);
    EXPECT_TRUE(saved.ok()) << saved.message();
    EXPECT_TRUE(backup.Finish().ok());
    std::memset(At(blocks_[which]), 0xAB, kEach);
    EXPECT_TRUE(backup.Restore(own).ok() && backup.Finish().ok());
    ExpectAllBack();
    backup.RetainCopy();
    const BackupStatistics s = backup.Statistics();
    return {s.bytes_saved, s.bytes_unchanged, s.bytes_zero};
  }
  static constexpr Seen kCopied{kEach, 0, 0}, kUnchanged{0, kEach, 0};
};

TEST_F(TwoTags, in_turns_pin_no_more_than_one_needs_where_no_more_was_wanted) {
  PinnedSupply supply(*sim_, {.chunk = 128 * kKiB});
  Backup one(*sim_, supply), two(*sim_, supply);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Cycle(one, 0), kCopied);
    EXPECT_EQ(Cycle(one, 0), kUnchanged);
    EXPECT_EQ(Cycle(two, 1), kCopied);
    EXPECT_EQ(supply.Count().pinned_bytes, kEach);
    EXPECT_EQ(one.Statistics().kept_bytes, 0U);
    EXPECT_EQ(two.Statistics().kept_bytes, kEach);
  }
}

TEST_F(TwoTags, keep_both_where_host_memory_was_wanted_for_both) {
  PinnedSupply supply(*sim_, {.chunk = 128 * kKiB});
  Backup one(*sim_, supply), two(*sim_, supply);
  supply.Want(PoolId{1}, kEach);
  supply.Want(PoolId{2}, kEach);
  static_cast<void>(Cycle(one, 0));
  static_cast<void>(Cycle(two, 1));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Cycle(one, 0), kUnchanged);
    EXPECT_EQ(Cycle(two, 1), kUnchanged);
  }
  EXPECT_TRUE(Eventually([&] { return supply.Count().pinned_bytes == 2 * kEach; }));
  EXPECT_TRUE(supply.StopPreparing());
}

TEST_F(TwoTags, a_copy_that_lost_a_part_of_its_memory_is_of_use_for_the_rest) {
  PinnedSupply supply(*sim_, {.chunk = 128 * kKiB});
  Backup one(*sim_, supply), two(*sim_, supply);
  EXPECT_EQ(Cycle(one, 0), kCopied);
  blocks_[1].item.bytes = 2 * kUnit;
  ASSERT_TRUE(two.Save(std::span(&blocks_[1].item, 1)).ok() && two.Finish().ok());
  EXPECT_EQ(one.Statistics().kept_bytes, kEach - 2 * kUnit);
  EXPECT_EQ(Cycle(one, 0), (Seen{2 * kUnit, kEach - 2 * kUnit, 0}));
  EXPECT_EQ(Cycle(one, 0), kUnchanged);
}

TEST_F(TwoTags, when_the_host_is_short_what_is_kept_goes_before_a_pause_fails) {
  const auto host = std::make_shared<SimulatedHost>(Bytes{1} << 40);
  auto made = Simulator::Open({.host = host, .devices = 2, .granularity = kPage});
  ASSERT_TRUE(made.ok());
  blocks_.clear();
  sim_ = *std::move(made);
  Fill(Add(kEach), 1);
  Fill(Add(kEach), 2);
  PinnedSupply supply(*sim_, {.chunk = 128 * kKiB});
  Backup one(*sim_, supply), two(*sim_, supply);
  supply.Want(PoolId{1}, 4 * kEach);  // so that memory is pinned before what is kept goes
  EXPECT_TRUE(supply.StopPreparing());
  supply.Trim(0);
  EXPECT_EQ(Cycle(one, 0), kCopied);
  host->left = 0;
  EXPECT_EQ(Cycle(two, 1), kCopied);
  EXPECT_EQ(one.Statistics().kept_bytes, 0U);
  EXPECT_EQ(Cycle(two, 1), kUnchanged);
  EXPECT_EQ(supply.Count().pinned_bytes, kEach);
  EXPECT_FALSE(host->exhausted);
}

TEST_F(Kept, trim_gives_back_what_is_kept) {
  Fill(Add(4 * kUnit), 1);
  test::LoneBackup backup(*sim_, {.chunk = 128 * kKiB});
  KeepingCycle(backup);
  backup.Trim(2 * kUnit);
  EXPECT_EQ(backup.pinned_bytes(), 2 * kUnit);
  EXPECT_EQ(KeepingCycle(backup), (Seen{2 * kUnit, 2 * kUnit, 0}));
  backup.Trim(0);
  EXPECT_EQ(backup.pinned_bytes(), 0U);
  EXPECT_EQ(KeepingCycle(backup), (Seen{4 * kUnit, 0, 0}));
}

// ---- failures --------------------------------------------------------------------------------------------------------------

// What a save that failed has written over parts of the copy is not believed afterwards.
TEST_F(Kept, after_a_save_that_failed_all_is_right) {
  std::mt19937_64 random(9);
  for (int i = 0; i < 3; ++i) Add(6 * kUnit, i == 1 ? kGpu1 : kGpu0);
  for (Block& block : blocks_) Fill(block, 3);
  test::LoneBackup backup(*sim_, {.chunk = 256 * kKiB});
  for (const char* call : {"FindNonZero", "AllocatePinned", "Gather", "FinishCopies"}) {
    for (const std::uint64_t nth : {1, 2, 3}) {
      KeepingCycle(backup);
      Scribble(random);
      ASSERT_TRUE(sim_->FailNext(call, nth, cuda::kUnknown).ok());
      const bool saved = backup.Save(Items()).ok();
      const bool finished = backup.Finish().ok();
      sim_->ForgetPlannedFailures();
      backup.Abandon();
      EXPECT_TRUE(!saved || !finished || nth > 1 || std::string_view(call) == "AllocatePinned") << call;
      Scribble(random);
      KeepingCycle(backup);
      if (HasFailure()) {
        ADD_FAILURE() << call << " " << nth;
        return;
      }
    }
  }
}

// As a lack of memory midway may leave it. Host memory must not be lost by it, nor the session.
TEST_F(Kept, a_room_that_no_row_has_goes_before_the_next_save) {
  PinnedSupply supply(*sim_, {.chunk = 128 * kKiB});
  ContentsTable table(supply, 0);
  const ContentItem item{AllocationId{1}, kGpu0, {}, kUnit};
  ASSERT_TRUE(table.MakeRoom({.pages = PagesOf(kUnit)}, table.Renew(item).units[0], Deadline::max()).ok());
  table.Find(item)->units[0].hashed = true;
  ASSERT_TRUE(table.memory().Take(2 * kUnit, Deadline::max()).ok());
  table.Retain();
  table.BeginSave();
  EXPECT_EQ(table.RetainedFor(std::span(&item, 1)), 0U);
  EXPECT_EQ(table.memory().used_bytes(), 0U);
  EXPECT_EQ(table.memory().held_bytes(), 0U);
  EXPECT_EQ(supply.Count().pinned_bytes, 3 * kUnit) << "it serves the next save";
}

TEST_F(Kept, after_a_save_that_found_no_room_host_memory_is_pinned_ahead_as_before) {
  const auto host = std::make_shared<SimulatedHost>(Bytes{0});
  auto made = Simulator::Open({.host = host, .devices = 2, .granularity = kPage});
  ASSERT_TRUE(made.ok());
  blocks_.clear();
  sim_ = *std::move(made);
  Fill(Add(4 * kUnit), 1);
  test::LoneBackup backup(*sim_, {.chunk = 128 * kKiB});
  EXPECT_FALSE(backup.Save(Items()).ok());
  ASSERT_FALSE(backup.Queued()) << "there is nothing to finish";
  host->left = Bytes{1} << 30;
  backup.Prepare(2 * kUnit);
  EXPECT_TRUE(Eventually([&] { return backup.pinned_bytes() == 2 * kUnit; }));
}

TEST_F(Kept, a_save_that_was_for_nothing_is_kept_where_it_pinned_nothing) {
  Block& block = Add(4 * kUnit);
  Fill(block, 1);
  test::LoneBackup backup(*sim_, {.chunk = 128 * kKiB});
  KeepingCycle(backup);
  Write(block, 0, std::byte{8});
  ASSERT_TRUE(backup.Save(Items()).ok() && backup.Finish().ok());
  backup.Abandon();
  EXPECT_EQ(KeepingCycle(backup), (Seen{0, 4 * kUnit, 0}));
  backup.Abandon();  // of a pause that failed before it saved
  EXPECT_EQ(KeepingCycle(backup), (Seen{0, 4 * kUnit, 0}));
}

// Others went on while its copies ended, so they need not be of what was hashed.
TEST_F(Kept, a_save_that_may_have_been_disturbed_is_not_kept) {
  Block& block = Add(4 * kUnit);
  Fill(block, 1);
  test::LoneBackup backup(*sim_, {.chunk = 128 * kKiB});
  KeepingCycle(backup);
  Write(block, 0, std::byte{8});
  ASSERT_TRUE(backup.Save(Items()).ok() && backup.Finish().ok());
  backup.Abandon(false);
  EXPECT_EQ(KeepingCycle(backup), (Seen{4 * kUnit, 0, 0}));
}

TEST_F(Kept, a_restore_that_is_tried_again_keeps_too) {
  Fill(Add(4 * kUnit), 1);
  test::LoneBackup backup(*sim_);
  ASSERT_TRUE(backup.Save(Items()).ok() && backup.Finish().ok());
  Recreate();
  ASSERT_TRUE(sim_->FailNext("Scatter", 1, cuda::kUnknown).ok());
  EXPECT_FALSE(backup.Restore(Items()).ok());
  static_cast<void>(backup.Finish());
  Recreate();
  ASSERT_TRUE(backup.Restore(Items()).ok() && backup.Finish().ok());
  ExpectAllBack();
  backup.RetainCopy();
  EXPECT_EQ(KeepingCycle(backup), (Seen{0, 4 * kUnit, 0}));
}

TEST_F(Kept, what_is_kept_is_no_contents_to_restore) {
  Block& block = Add(kUnit);
  Fill(block, 1);
  test::LoneBackup backup(*sim_);
  KeepingCycle(backup);
  EXPECT_FALSE(backup.Has(block.item.allocation));
  EXPECT_EQ(backup.Restore(Items()).code(), Code::kNotFound);
}

}  // namespace
}  // namespace amem
