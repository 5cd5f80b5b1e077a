// What the backup promises: every byte is back whatever was zero, host memory is kept and bounded, failures leave nothing
// behind.
#include "replay/cycle/backup.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <future>
#include <new>

#include "journal/base/no_memory.h"
#include "replay/driver/host_memory.h"
#include "tests/replay/cycle/contents.h"

namespace amem {
namespace {

using test::Contents;
using test::Eventually;
using test::kGpu0;
using test::kGpu1;
using test::kKiB;
using test::kMiB;
using test::kPage;
#ifdef AMEM_SANITIZED
constexpr int kRounds = 3;
#else
constexpr int kRounds = 12;
#endif

TEST_F(Contents, random_contents_come_back_to_the_last_bit_cycle_after_cycle) {
  std::mt19937_64 random(7);
  for (const Bytes chunk : {4 * kKiB, 28 * kKiB, 256 * kKiB}) {
    test::LoneBackup backup(*sim_, {.chunk = chunk, .scan = 16 * chunk, .batch = 4 * chunk});
    for (const Bytes pages : {1, 2, 15, 16, 17, 31, 33, 100, 512}) Add(pages * kPage, pages % 2 == 0 ? kGpu1 : kGpu0);
    for (int round = 0; round < kRounds; ++round) {
      Scribble(random);
      Cycle(backup, true);
      if (HasFatalFailure()) return;
    }
    for (Block& one : blocks_) Down(one);
    blocks_.clear();
  }
}

TEST_F(Contents, only_what_is_not_zero_is_copied) {
  Block& first = Add(64 * kPage);
  Add(64 * kPage);
  Write(first, 0, std::byte{1});                  // first byte of all
  Write(first, 17 * kPage + 4095, std::byte{1});  // last of a page
  Write(first, 64 * kPage - 1, std::byte{0x80});  // last of all
  test::LoneBackup backup(*sim_);
  Cycle(backup);
  const BackupStatistics seen = backup.Statistics();
  EXPECT_EQ(seen.bytes_total, 128 * kPage);
  EXPECT_EQ(seen.bytes_saved, 3 * kPage);
  EXPECT_EQ(seen.bytes_zero, 125 * kPage);
  EXPECT_EQ(seen.unscanned, "");
}

TEST_F(Contents, a_last_unit_that_is_part_only_comes_back) {
  Block& block = Add(35 * kPage);  // one unit of 128 KiB and three pages
  Write(block, 34 * kPage + 5, std::byte{9});
  test::LoneBackup backup(*sim_);
  Cycle(backup);
  EXPECT_EQ(backup.Statistics().bytes_saved, kPage);
}

TEST_F(Contents, what_is_all_zero_needs_no_host_memory_and_is_cleared) {
  Add(32 * kPage);
  Add(32 * kPage, kGpu1);
  test::LoneBackup backup(*sim_);
  Cycle(backup);
  EXPECT_EQ(backup.pinned_bytes(), 0U);
  EXPECT_EQ(backup.Statistics().bytes_saved, 0U);
}

TEST_F(Contents, what_has_no_zero_spills_over_many_pinned_buffers) {
  Block& block = Add(3 * kMiB);
  for (Bytes i = 0; i < block.item.bytes; i += 1) Write(block, i, static_cast<std::byte>(i % 251 + 1));
  test::LoneBackup backup(*sim_, {.chunk = 7 * kPage});
  Cycle(backup);
  EXPECT_EQ(backup.Statistics().bytes_saved, 3 * kMiB);
  EXPECT_GE(backup.pinned_bytes(), 3 * kMiB);
  EXPECT_LT(backup.pinned_bytes(), 3 * kMiB + 7 * kPage);
}

TEST_F(Contents, pinned_memory_is_used_again_in_the_next_cycle) {
  std::mt19937_64 random(3);
  Add(128 * kPage);
  Write(blocks_[0], 0, std::byte{1});
  test::LoneBackup backup(*sim_, {.chunk = 64 * kKiB});
  for (Bytes i = 0; i < 20 * kPage; ++i) Write(blocks_[0], i, std::byte{1});
  Cycle(backup);
  const Bytes pinned = backup.pinned_bytes();
  const std::uint64_t calls = sim_->Calls("AllocatePinned");
  for (int i = 0; i < kRounds; ++i) Cycle(backup);
  EXPECT_EQ(backup.pinned_bytes(), pinned);
  EXPECT_EQ(sim_->Calls("AllocatePinned"), calls);
  EXPECT_EQ(backup.Statistics().pinned_in_save, 0U);
}

TEST_F(Contents, a_byte_that_has_not_come_back_as_it_was_is_found_and_named) {
  Block& block = Add(64 * kPage);
  Write(block, 5, std::byte{1});
  Write(block, 17 * kPage, std::byte{2});
  Write(block, 18 * kPage + 4095, std::byte{3});
  test::LoneBackup backup(*sim_);
  ASSERT_TRUE(backup.Save(Items()).ok() && backup.Finish().ok());
  Recreate();
  ASSERT_TRUE(backup.Restore(Items()).ok() && backup.Finish().ok());
  EXPECT_TRUE(backup.Compare(Items()).ok());
  for (const Bytes wrong : {Bytes{0}, Bytes{5}, kPage, 17 * kPage, 18 * kPage + 4095, 19 * kPage, 64 * kPage - 1}) {
    At(block)[wrong] ^= std::byte{0x40};
    const Status differs = backup.Compare(Items());
    EXPECT_EQ(differs.code(), Code::kBroken);
    EXPECT_TRUE(differs.message().ends_with(fmt::format("they differ at byte {}", wrong))) << differs.message();
    At(block)[wrong] ^= std::byte{0x40};
  }
  EXPECT_TRUE(backup.Compare(Items()).ok());
}

TEST_F(Contents, items_come_back_in_any_order_and_portions) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 12; ++i) Add(40 * kPage, i % 3 == 0 ? kGpu1 : kGpu0);
  Scribble(random);
  test::LoneBackup backup(*sim_, {.chunk = 64 * kKiB});
  auto items = Items();
  ASSERT_TRUE(backup.Save(std::span(items).first(5)).ok());
  ASSERT_TRUE(backup.Save(std::span(items).subspan(5)).ok());
  ASSERT_TRUE(backup.Finish().ok());
  Recreate();
  std::shuffle(items.begin(), items.end(), random);
  for (std::size_t i = 0; i < items.size(); i += 4) {
    ASSERT_TRUE(backup.Restore(std::span(items).subspan(i, 4)).ok());
  }
  ASSERT_TRUE(backup.Finish().ok());
  ExpectAllBack();
}

TEST_F(Contents, parts_of_one_allocation_are_told_apart_by_offset) {
  Block& block = Add(8 * kPage);
  Write(block, 0, std::byte{1});
  Write(block, 4 * kPage, std::byte{2});
  test::LoneBackup backup(*sim_);
  const std::array<Backup::Item, 2> parts = {
      Backup::Item{block.item.allocation, kGpu0, block.item.address, 4 * kPage, 0},
      Backup::Item{block.item.allocation, kGpu0, block.item.address + 4 * kPage, 4 * kPage, 4 * kPage}};
  ASSERT_TRUE(backup.Save(parts).ok());
  ASSERT_TRUE(backup.Finish().ok());
  Recreate();
  ASSERT_TRUE(backup.Restore(parts).ok());
  ASSERT_TRUE(backup.Finish().ok());
  ExpectAllBack();
}

TEST_F(Contents, they_come_back_at_another_address_too) {
  Block& block = Add(8 * kPage);
  Write(block, 5 * kPage, std::byte{5});
  test::LoneBackup backup(*sim_);
  ASSERT_TRUE(backup.Save(Items()).ok());
  ASSERT_TRUE(backup.Finish().ok());
  const auto elsewhere = sim_->Reserve(8 * kPage, 0, {}, 0);
  ASSERT_TRUE(elsewhere.ok());
  Down(block);
  block.item.address = *elsewhere;
  Up(block);
  ASSERT_TRUE(backup.Restore(Items()).ok());
  ASSERT_TRUE(backup.Finish().ok());
  ExpectAllBack();
}

TEST_F(Contents, an_item_that_was_not_saved_is_refused_before_anything_is_queued) {
  Block& block = Add(8 * kPage);
  test::LoneBackup backup(*sim_);
  ASSERT_TRUE(backup.Save(Items()).ok());
  ASSERT_TRUE(backup.Finish().ok());
  Add(8 * kPage);
  EXPECT_EQ(backup.Restore(Items()).code(), Code::kNotFound);
  Backup::Item longer = block.item;
  longer.bytes += kPage;
  EXPECT_EQ(backup.Restore(std::span(&longer, 1)).code(), Code::kNotFound);
  EXPECT_EQ(sim_->QueuedCopies(kGpu0), 0U);
  EXPECT_TRUE(backup.Has(block.item.allocation));
  EXPECT_FALSE(backup.Has(blocks_[1].item.allocation));
}

// ---- failures --------------------------------------------------------------------------------------------------------------

TEST_F(Contents, a_skipped_finish_is_seen) {
  Block& block = Add(8 * kPage);
  Write(block, 1, std::byte{1});
  test::LoneBackup backup(*sim_);
  EXPECT_EQ(backup.AwaitSaved(block.item.allocation).code(), Code::kInvalid);  // nothing is being saved
  ASSERT_TRUE(backup.Save(Items()).ok());
  EXPECT_EQ(backup.Restore(Items()).code(), Code::kInvalid);  // nothing is saved yet
  Down(block);                                                // too early: the copy is still queued
  const Status finished = backup.Finish();
  EXPECT_FALSE(finished.ok());
  EXPECT_EQ(finished.driver_result(), 700) << finished.message();
  EXPECT_EQ(backup.Restore(Items()).code(), Code::kInvalid);  // what was not copied is not offered
}

TEST_F(Contents, each_failing_call_is_reported_and_a_later_try_succeeds) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 4; ++i) Add(40 * kPage, i % 2 == 0 ? kGpu0 : kGpu1);
  for (Block& block : blocks_) Write(block, 3, std::byte{1});
  Scribble(random);
  for (const char* call : {"FindNonZero", "AllocatePinned", "Gather", "FinishCopies"}) {
    for (const std::uint64_t nth : {1, 2}) {
      test::LoneBackup backup(*sim_, {.chunk = 2 * kPage});
      ASSERT_TRUE(sim_->FailNext(call, nth, cuda::kOutOfMemory).ok());
      Status saved = backup.Save(Items());
      const Status finished = backup.Finish();
      if (saved.ok()) saved = finished;
      EXPECT_EQ(saved.code(), Code::kOutOfMemory) << call << ": " << saved.message();
      EXPECT_EQ(saved.driver_result(), cuda::kOutOfMemory);
      EXPECT_EQ(backup.Restore(Items()).code(), Code::kInvalid) << call;
      EXPECT_TRUE(backup.Save(Items()).ok());
      backup.ForgetAll();
      EXPECT_EQ(sim_->QueuedCopies(kGpu0) + sim_->QueuedCopies(kGpu1), 0U);
      Cycle(backup);
      if (HasFatalFailure()) return;
    }
  }
}

// As in a pause that failed in the middle and could not be undone: what is gone has its only copy here when the pause is tried
// again.
TEST_F(Contents, what_was_saved_before_a_save_that_failed_stays_saved_and_the_next_save_adds_to_it) {
  std::mt19937_64 random(8);
  for (int i = 0; i < 4; ++i) Add(40 * kPage, i % 2 == 0 ? kGpu0 : kGpu1);
  for (Block& block : blocks_) Write(block, 3, std::byte{1});
  Scribble(random);
  const auto items = Items();
  const std::span first = std::span(items).first(2), rest = std::span(items).subspan(2);
  for (const bool finished : {false, true}) {  // the first two, before the failure; else only waited for
    for (const char* call : {"FindNonZero", "AllocatePinned", "Gather", "FinishCopies"}) {
      test::LoneBackup backup(*sim_, {.chunk = 2 * kPage});
      ASSERT_TRUE(backup.Save(first).ok());
      if (finished) {
        ASSERT_TRUE(backup.Finish().ok());
      }
      for (const Backup::Item& item : first) ASSERT_TRUE(backup.AwaitSaved(item.allocation).ok());
      ASSERT_TRUE(sim_->FailNext(call, 1, cuda::kOutOfMemory).ok());
      Status saved = backup.Save(rest);
      const Status copied = backup.Finish();
      ASSERT_FALSE(saved.ok() && copied.ok()) << call;
      EXPECT_EQ(backup.Restore(rest).code(), Code::kInvalid) << call;
      for (const auto* block : {&blocks_[0], &blocks_[1]}) std::memset(At(*block), 0xAB, block->item.bytes);
      saved = backup.Restore(first);
      EXPECT_TRUE(saved.ok()) << call << ": " << saved.message();
      EXPECT_TRUE(backup.Finish().ok());
      saved = backup.Save(rest);
      EXPECT_TRUE(saved.ok()) << call << ": " << saved.message();
      EXPECT_TRUE(backup.Finish().ok());
      EXPECT_TRUE(backup.Saved()) << call;
      Recreate();
      saved = backup.Restore(items);
      ASSERT_TRUE(saved.ok()) << call << ": " << saved.message();
      ASSERT_TRUE(backup.Finish().ok());
      ExpectAllBack();
      if (HasFailure()) return;
    }
  }
}

TEST_F(Contents, saves_that_fail_again_and_again_take_no_more_host_memory_than_one_that_succeeds) {
  for (int i = 0; i < 3; ++i) Add(40 * kPage);
  for (Block& block : blocks_)
    for (Bytes at = 0; at < block.item.bytes; at += kPage) Write(block, at, std::byte{1});
  test::LoneBackup backup(*sim_, {.chunk = 2 * kPage});
  const auto items = Items();
  ASSERT_TRUE(backup.Save(std::span(items).first(1)).ok());
  ASSERT_TRUE(backup.AwaitSaved(items.front().allocation).ok());
  int tries = 0;
  for (Status saved{Code::kDriver, ""}; !saved.ok(); ++tries) {
    ASSERT_LT(tries, 20) << saved.message();
    ASSERT_TRUE(sim_->FailNext("AllocatePinned", 18, cuda::kOutOfMemory).ok());  // in the second unit of an item
    saved = backup.Save(std::span(items).subspan(1));
    static_cast<void>(backup.Finish());
  }
  EXPECT_GT(tries, 1);
  sim_->ForgetPlannedFailures();
  EXPECT_LE(backup.pinned_bytes(), (3 * 40 + 2) * kPage);
  Recreate();
  ASSERT_TRUE(backup.Restore(items).ok());
  ASSERT_TRUE(backup.Finish().ok());
  ExpectAllBack();
}

// Its memory is released right after.
TEST_F(Contents, what_is_saved_again_and_again_takes_the_host_memory_of_once) {
  Block& block = Add(64 * kPage);
  for (Bytes i = 0; i < block.item.bytes; i += kPage) Write(block, i, std::byte{1});
  test::LoneBackup backup(*sim_, {.chunk = 16 * kPage});
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(backup.Save(Items()).ok());
    ASSERT_TRUE(backup.Finish().ok());
    EXPECT_EQ(backup.pinned_bytes(), 64 * kPage) << "after " << i;
  }
}

TEST_F(Contents, an_allocation_that_was_waited_for_has_been_copied) {
  const Block& first = Add(kMiB);
  Write(blocks_.front(), 5 * kPage, std::byte{5});
  test::LoneBackup backup(*sim_, {});
  ASSERT_TRUE(backup.Save(Items()).ok());
  ASSERT_GT(sim_->QueuedCopies(kGpu0), 0U);
  EXPECT_TRUE(backup.AwaitSaved(first.item.allocation).ok());
  EXPECT_EQ(sim_->QueuedCopies(kGpu0), 0U);
  EXPECT_TRUE(backup.Finish().ok());
}

TEST_F(Contents, a_failed_restore_keeps_the_contents_for_another_try) {
  std::mt19937_64 random(6);
  for (int i = 0; i < 4; ++i) Add(40 * kPage, i % 2 == 0 ? kGpu0 : kGpu1);
  for (Block& block : blocks_) Write(block, 3, std::byte{1});
  Scribble(random);
  test::LoneBackup backup(*sim_, {.chunk = 2 * kPage});
  ASSERT_TRUE(backup.Save(Items()).ok());
  ASSERT_TRUE(backup.Finish().ok());
  for (const char* call : {"ClearAll", "Scatter", "FinishCopies"}) {
    for (const std::uint64_t nth : {1, 2}) {
      Recreate();
      ASSERT_TRUE(sim_->FailNext(call, nth, cuda::kUnknown).ok());
      Status restored = backup.Restore(Items());
      const Status finished = backup.Finish();
      if (restored.ok()) restored = finished;
      EXPECT_EQ(restored.driver_result(), cuda::kUnknown) << call << ": " << restored.message();
      Recreate();
      ASSERT_TRUE(backup.Restore(Items()).ok());
      ASSERT_TRUE(backup.Finish().ok());
      ExpectAllBack();
    }
  }
}

TEST_F(Contents, a_finish_that_failed_is_waited_for_again_before_host_memory_is_used_again) {
  Block& block = Add(8 * kPage);
  Write(block, 1, std::byte{1});
  test::LoneBackup backup(*sim_);
  ASSERT_TRUE(backup.Save(Items()).ok());
  ASSERT_TRUE(sim_->FailNext("FinishCopies", 1, cuda::kUnknown).ok());
  EXPECT_FALSE(backup.Finish().ok());
  EXPECT_GT(sim_->QueuedCopies(kGpu0), 0U);
  backup.ForgetAll();
  EXPECT_EQ(sim_->QueuedCopies(kGpu0), 0U);
}

TEST_F(Contents, memory_that_is_not_mapped_is_refused) {
  Block& block = Add(8 * kPage);
  Write(block, 1, std::byte{1});
  test::LoneBackup backup(*sim_);
  Down(block);
  EXPECT_EQ(backup.Save(Items()).driver_result(), cuda::kInvalidValue);
  backup.ForgetAll();
  Up(block);
  ASSERT_TRUE(backup.Save(Items()).ok());
  ASSERT_TRUE(backup.Finish().ok());
  Down(block);
  EXPECT_EQ(backup.Restore(Items()).driver_result(), cuda::kInvalidValue);
  Up(block);
}

TEST_F(Contents, a_driver_that_cannot_look_copies_whole_and_says_so) {
  std::mt19937_64 random(8);
  for (int i = 0; i < 3; ++i) Add(40 * kPage, i == 1 ? kGpu1 : kGpu0);
  Scribble(random);
  test::PlainDriver plain(*sim_);
  test::LoneBackup backup(plain, {.chunk = 64 * kKiB});
  Cycle(backup);
  EXPECT_EQ(backup.Statistics().bytes_saved, 120 * kPage);
  EXPECT_NE(backup.Statistics().unscanned, "");
}

// ---- preparing -------------------------------------------------------------------------------------------------------------

TEST_F(Contents, a_prepared_save_pins_nothing) {
  Block& block = Add(1 * kMiB);
  for (Bytes i = 0; i < block.item.bytes; i += kPage) Write(block, i, std::byte{1});
  test::LoneBackup backup(*sim_, {.chunk = 256 * kKiB});
  backup.Prepare(1 * kMiB);
  ASSERT_TRUE(Eventually([&] { return backup.pinned_bytes() == 1 * kMiB; }));
  const std::uint64_t calls = sim_->Calls("AllocatePinned");
  Cycle(backup);
  EXPECT_EQ(sim_->Calls("AllocatePinned"), calls);
  EXPECT_EQ(backup.Statistics().pinned_in_save, 0U);
}

TEST_F(Contents, preparing_keeps_to_its_limit_and_a_save_does_not) {
  Block& block = Add(1 * kMiB);
  for (Bytes i = 0; i < block.item.bytes; i += kPage) Write(block, i, std::byte{1});
  test::LoneBackup backup(*sim_, {.chunk = 64 * kKiB, .prepare_limit = 128 * kKiB});
  backup.Prepare(1 * kMiB);
  ASSERT_TRUE(Eventually([&] { return backup.pinned_bytes() >= 128 * kKiB; }));
  backup.StopPreparing();
  EXPECT_EQ(backup.pinned_bytes(), 128 * kKiB);
  Cycle(backup);
  EXPECT_EQ(backup.pinned_bytes(), 1 * kMiB);
  EXPECT_EQ(backup.Statistics().pinned_in_save, 1 * kMiB - 128 * kKiB);
}

TEST_F(Contents, preparing_is_for_all_tags_together_and_for_nccl_each_to_its_limit) {
  PinnedSupply supply(*sim_, {.chunk = 64 * kKiB, .nccl_limit = 128 * kKiB, .pools_limit = 256 * kKiB});
  const auto pinned = [&] { return supply.Count().pinned_bytes; };
  supply.Want(PoolId{1}, 64 * kKiB);
  supply.Want(PoolId{2}, 128 * kKiB);
  EXPECT_TRUE(Eventually([&] { return pinned() == 192 * kKiB; })) << pinned();
  supply.Want({}, 1 * kMiB);
  EXPECT_TRUE(Eventually([&] { return pinned() == 320 * kKiB; })) << pinned();
  supply.Want(PoolId{1}, 1 * kMiB);
  EXPECT_TRUE(Eventually([&] { return pinned() == 384 * kKiB; })) << pinned();
  EXPECT_TRUE(supply.StopPreparing());
  EXPECT_EQ(pinned(), 384 * kKiB);
}

// What pins ahead may hang behind a GPU that does.
TEST_F(Contents, who_takes_a_buffer_gives_up_at_its_deadline_while_another_thread_pins) {
  PinnedSupply supply(*sim_, {.chunk = 64 * kKiB});
  std::atomic<bool> hangs{false}, returns{false};
  sim_->SetHook([&](std::string_view call, std::uint64_t) {
    if (call != "AllocatePinned") return 0;
    hangs = true;
    returns.wait(false);
    return 0;
  });
  supply.Want({}, 64 * kKiB);
  ASSERT_TRUE(Eventually([&] { return hangs.load(); }));
  const auto late = supply.Take(In(std::chrono::milliseconds(50)));
  EXPECT_EQ(late.status().driver_result(), cuda::kTimeout);
  EXPECT_NE(late.status().message().find("a call of the driver that pins ahead has not returned"), std::string::npos)
      << late.status().message();
  returns = true;
  returns.notify_all();
  EXPECT_TRUE(supply.Take(In(std::chrono::seconds(20))).ok());
  sim_->SetHook({});
}

// A claim that outlives the failure would be counted by all other processes of the host.
TEST_F(Contents, host_memory_that_could_not_be_had_is_claimed_no_longer) {
  const auto claims = std::filesystem::temp_directory_path() / fmt::format("amem-claims-{}", ::getpid());
  PinnedSupply supply(*sim_, {.chunk = 64 * kKiB, .claims = claims});
  sim_->SetHook([](std::string_view call, std::uint64_t) -> int {
    if (call == "AllocatePinned") throw std::bad_alloc();
    return 0;
  });
  supply.Want({}, 64 * kKiB);
  EXPECT_TRUE(Eventually([&] { return supply.Count().not_prepared == NoMemory().message(); })) << supply.Count().not_prepared;
  const auto taken = supply.Take(In(std::chrono::seconds(20)));
  EXPECT_TRUE(taken.status().message().ends_with(NoMemory().message())) << taken.status().message();
  sim_->SetHook({});
  constexpr Bytes kReserve = 256 * kMiB;
  HostClaims other(claims, [] { return HostRoom{kReserve + 64 * kKiB, "a test"}; });
  const Status fits = other.Claim(64 * kKiB);
  EXPECT_TRUE(fits.ok()) << fits.message();
  std::filesystem::remove(claims);
}

TEST_F(Contents, what_was_pinned_for_a_save_that_is_abandoned_goes_back_and_no_more) {
  Block& block = Add(1 * kMiB);
  for (Bytes i = 0; i < block.item.bytes; i += kPage) Write(block, i, std::byte{1});
  test::LoneBackup backup(*sim_, {.chunk = 64 * kKiB, .prepare_limit = 128 * kKiB});
  backup.Prepare(1 * kMiB);
  ASSERT_TRUE(Eventually([&] { return backup.pinned_bytes() >= 128 * kKiB; }));
  backup.StopPreparing();
  ASSERT_TRUE(backup.Save(Items()).ok());
  ASSERT_TRUE(backup.Finish().ok());
  EXPECT_EQ(backup.pinned_bytes(), 1 * kMiB);
  backup.Abandon();
  EXPECT_EQ(backup.pinned_bytes(), 128 * kKiB);
}

TEST_F(Contents, a_backup_that_ends_has_waited_for_its_copies) {
  Block& block = Add(1 * kMiB);
  Write(block, 1, std::byte{1});
  PinnedSupply supply(*sim_, {});
  {
    Backup backup(*sim_, supply, {});
    ASSERT_TRUE(backup.Save(Items()).ok());
    ASSERT_GT(sim_->QueuedCopies(kGpu0), 0U);
  }
  EXPECT_EQ(sim_->QueuedCopies(kGpu0), 0U) << "they use memory that others are given now";
}

TEST_F(Contents, preparing_is_stopped_midway_and_goes_on_when_asked) {
  test::LoneBackup backup(*sim_, {.chunk = 64 * kKiB});
  ASSERT_TRUE(sim_->SetLatency("AllocatePinned", std::chrono::milliseconds(5)).ok());
  backup.Prepare(64 * kMiB);
  ASSERT_TRUE(Eventually([&] { return backup.pinned_bytes() > 0; }));
  backup.StopPreparing();
  const Bytes pinned = backup.pinned_bytes();
  EXPECT_LT(pinned, 64 * kMiB);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(backup.pinned_bytes(), pinned);
  ASSERT_TRUE(sim_->SetLatency("AllocatePinned", std::chrono::nanoseconds(0)).ok());
  backup.Prepare(pinned + 128 * kKiB);
  EXPECT_TRUE(Eventually([&] { return backup.pinned_bytes() == pinned + 128 * kKiB; }));
}

TEST_F(Contents, a_save_during_preparing_takes_what_is_there_and_preparing_rests) {
  Block& block = Add(512 * kKiB);
  for (Bytes i = 0; i < block.item.bytes; i += kPage) Write(block, i, std::byte{1});
  test::LoneBackup backup(*sim_, {.chunk = 64 * kKiB});
  ASSERT_TRUE(sim_->SetLatency("AllocatePinned", std::chrono::milliseconds(2)).ok());
  backup.Prepare(16 * kMiB);
  ASSERT_TRUE(backup.Save(Items()).ok());
  const Bytes pinned = backup.pinned_bytes();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_LE(backup.pinned_bytes(), pinned + 64 * kKiB);  // at most the piece that was under way
  ASSERT_TRUE(backup.Finish().ok());
  EXPECT_TRUE(Eventually([&] { return backup.pinned_bytes() > pinned + 128 * kKiB; }));  // and goes on
  Recreate();
  ASSERT_TRUE(backup.Restore(Items()).ok());
  ASSERT_TRUE(backup.Finish().ok());
  ExpectAllBack();
}

TEST_F(Contents, what_was_not_prepared_is_pinned_from_pages_that_several_threads_populate) {
  Block& block = Add(2 * kMiB);
  for (Bytes i = 0; i < block.item.bytes; i += kPage) Write(block, i, std::byte{1});
  test::PopulatingDriver driver(*sim_, std::chrono::milliseconds(5));
  test::LoneBackup backup(driver, {.chunk = 64 * kKiB});
  Cycle(backup);
  EXPECT_EQ(driver.populated(), 32U);
  EXPECT_EQ(driver.pinned_populated(), 32U);
  EXPECT_GT(driver.at_once(), 1U);
  EXPECT_EQ(backup.pinned_bytes(), 2 * kMiB);
}

TEST_F(Contents, pages_are_populated_ahead_while_nccl_is_busy_and_the_save_pins_them) {
  Block& block = Add(1 * kMiB);
  for (Bytes i = 0; i < block.item.bytes; i += kPage) Write(block, i, std::byte{1});
  test::PopulatingDriver driver(*sim_, std::chrono::milliseconds(0));
  test::LoneBackup backup(driver, {.chunk = 64 * kKiB, .quiet = std::chrono::hours(1)});
  backup.Prepare(1 * kMiB);
  ASSERT_TRUE(Eventually([&] { return driver.populated() == 16; }));
  EXPECT_EQ(driver.pinned_populated(), 0U);
  Cycle(backup);
  EXPECT_EQ(driver.populated(), 16U);
  EXPECT_EQ(driver.pinned_populated(), 16U);
  EXPECT_EQ(driver.at_once(), 1U) << "one thread, which gives way to all others";
  backup.StopPreparing();
}

TEST_F(Contents, pages_that_were_promised_to_a_save_that_ended_are_populated_no_more) {
  test::PopulatingDriver driver(*sim_, std::chrono::milliseconds(20));
  PinnedSupply supply(driver, {.chunk = 64 * kKiB});
  ASSERT_TRUE(supply.Promise(4 * kMiB).ok());
  ASSERT_TRUE(Eventually([&] { return driver.populated() > 0; }));
  supply.Unpromise(4 * kMiB);
  std::size_t before = 0;
  ASSERT_TRUE(Eventually([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return std::exchange(before, driver.populated()) == driver.populated();
  }));
  EXPECT_LT(driver.populated(), 64U);
}

// In which the program's own calls of the driver get their turn.
TEST_F(Contents, a_break_follows_each_piece_that_is_pinned_ahead) {
  test::LoneBackup backup(*sim_, {.chunk = 64 * kKiB});
  ASSERT_TRUE(sim_->SetLatency("AllocatePinned", std::chrono::milliseconds(1)).ok());
  const auto began = std::chrono::steady_clock::now();
  backup.Prepare(4 * kMiB);
  ASSERT_TRUE(Eventually([&] { return backup.pinned_bytes() == 4 * kMiB; }));
  EXPECT_GE(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(64 * 1 + 63 * 1));
}

TEST_F(Contents, pages_that_are_not_needed_go_back_when_host_memory_is_trimmed) {
  test::PopulatingDriver driver(*sim_, std::chrono::milliseconds(0));
  test::LoneBackup backup(driver, {.chunk = 64 * kKiB, .quiet = std::chrono::hours(1)});
  backup.Prepare(1 * kMiB);
  ASSERT_TRUE(Eventually([&] { return driver.populated() == 16; }));
  backup.Trim(0);
  EXPECT_EQ(driver.pages(), 0U);
  EXPECT_EQ(backup.pinned_bytes(), 0U);
}

// The GPU hangs in a call that pins ahead.
TEST_F(Contents, a_save_does_not_wait_for_ever_for_a_piece_that_is_being_pinned) {
  Block& block = Add(64 * kKiB);
  Write(block, 0, std::byte{1});
  test::LoneBackup backup(*sim_, {.chunk = 64 * kKiB});
  std::promise<void> inside, go_on;
  sim_->SetHook([&](std::string_view call, std::uint64_t) {
    if (call != "AllocatePinned") return 0;
    inside.set_value();
    go_on.get_future().wait();
    return 0;
  });
  backup.Prepare(64 * kKiB);
  inside.get_future().wait();
  const auto began = std::chrono::steady_clock::now();
  backup.SetUntil(In(std::chrono::milliseconds(50)));
  const Status failed = backup.Save(Items());
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5));
  EXPECT_EQ(failed.driver_result(), cuda::kTimeout);
  EXPECT_NE(failed.message().find("has not returned within "), std::string::npos) << failed.message();
  go_on.set_value();
  sim_->SetHook({});
  backup.ForgetAll();
  backup.SetUntil(In(std::chrono::minutes(1)));
  Cycle(backup);
}

TEST_F(Contents, preparing_that_fails_says_why_and_the_save_tries_itself) {
  Block& block = Add(64 * kKiB);
  Write(block, 0, std::byte{1});
  test::LoneBackup backup(*sim_, {.chunk = 64 * kKiB});
  ASSERT_TRUE(sim_->FailNext("AllocatePinned", 2, cuda::kOutOfMemory).ok());
  backup.Prepare(16 * kMiB);
  ASSERT_TRUE(Eventually([&] { return !backup.Statistics().not_prepared.empty(); }));
  EXPECT_EQ(backup.pinned_bytes(), 64 * kKiB);
  Cycle(backup);
}

TEST_F(Contents, trim_gives_back_what_holds_nothing_and_keeps_what_is_saved) {
  Block& block = Add(512 * kKiB);
  for (Bytes i = 0; i < 100 * kKiB; ++i) Write(block, i, std::byte{1});
  test::LoneBackup backup(*sim_, {.chunk = 64 * kKiB});
  backup.Prepare(1 * kMiB);
  ASSERT_TRUE(Eventually([&] { return backup.pinned_bytes() == 1 * kMiB; }));
  ASSERT_TRUE(backup.Save(Items()).ok());
  ASSERT_TRUE(backup.Finish().ok());
  backup.Trim(512 * kKiB);
  EXPECT_EQ(backup.pinned_bytes(), 512 * kKiB);
  backup.Trim(0);
  EXPECT_EQ(backup.pinned_bytes(), 128 * kKiB);
  Recreate();
  ASSERT_TRUE(backup.Restore(Items()).ok());
  ASSERT_TRUE(backup.Finish().ok());
  ExpectAllBack();
  backup.ForgetAll();
  backup.Trim(0);
  EXPECT_EQ(backup.pinned_bytes(), 0U);
  Cycle(backup);
}

// The GPU hangs while contents are compared: the copy ends later, and what it writes to must still be there.
TEST_F(Contents, a_comparison_that_fails_leaves_no_copy_without_its_buffer) {
  Block& block = Add(64 * kKiB);
  Write(block, 0, std::byte{1});
  test::LoneBackup backup(*sim_);
  ASSERT_TRUE(backup.Save(Items()).ok() && backup.Finish().ok());
  ASSERT_TRUE(backup.Restore(Items()).ok() && backup.Finish().ok());
  const Bytes pinned = sim_->PinnedBytes();
  for (const int failures : {1, 2, 2}) {
    int left = failures;
    sim_->SetHook(
        [&left](std::string_view call, std::uint64_t) { return call == "FinishCopies" && left-- > 0 ? cuda::kTimeout : 0; });
    EXPECT_FALSE(backup.Compare(Items()).ok());
    sim_->SetHook({});
    EXPECT_EQ(sim_->PinnedBytes() > pinned, failures == 2) << "the buffer waits for its copy";
    EXPECT_TRUE(backup.Compare(Items()).ok()) << failures;
    EXPECT_EQ(sim_->PinnedBytes(), pinned) << failures;
  }
}

// Pinning in a pause is slow. Buffers that the last pauses used stay, also where nobody had foreseen that they would be needed.
TEST_F(Contents, what_recent_pauses_used_is_not_given_back_and_pinned_again) {
  constexpr std::size_t kLittleBuffers = 16, kUsed = 120;  // of 4 MiB: 64 MiB always stay
  PinnedSupply supply(*sim_, {.chunk = 4 * kMiB});
  std::chrono::nanoseconds time = std::chrono::hours(1);
  const auto pause = [&](std::size_t buffers) {
    std::size_t pinned = 0;
    PinnedSupply::Buffers held;
    for (std::size_t i = 0; i < buffers; ++i) {
      auto taken = supply.Take(In(std::chrono::seconds(5)));
      EXPECT_TRUE(taken.ok()) << taken.status().message();
      if (!taken.ok()) break;
      pinned += taken->pinned_now ? 1 : 0;
      held.push_back(std::move(taken->buffer));
    }
    supply.GiveSpareBack(time);
    supply.Give(std::move(held));
    return pinned;
  };
  EXPECT_EQ(pause(kUsed), kUsed);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(pause(kUsed - kLittleBuffers - 8), 0);
    EXPECT_EQ(pause(kUsed), 0);
  }
  time = {};
  for (int i = 0; i < 40; ++i) EXPECT_EQ(pause(1), 0);
  EXPECT_EQ(supply.Count().pinned_bytes, kUsed * 4 * kMiB) << "pauses that follow each other at once have no time for it";
  time = std::chrono::hours(1);
  for (int i = 0; i < 40; ++i) EXPECT_EQ(pause(1), 0);  // shrunk for good
  EXPECT_LE(supply.Count().pinned_bytes, (kLittleBuffers + 2) * 4 * kMiB);
}

TEST_F(Contents, spare_memory_is_given_back_also_where_a_kept_copy_has_gaps) {
  PinnedSupply supply(*sim_, {.chunk = 4 * kMiB});
  const PinnedMemory owner(supply);
  PinnedSupply::Buffers idle, kept(8);  // eight serve others by now
  for (int i = 0; i < 64; ++i) idle.push_back(std::move(supply.Take(In(std::chrono::seconds(5)))->buffer));
  kept.push_back(std::move(idle.back()));
  idle.pop_back();
  supply.Give(std::move(idle));
  supply.Retain(owner, std::move(kept));
  for (int i = 0; i < 8; ++i) supply.GiveSpareBack(std::chrono::hours(1));
  EXPECT_LE(supply.Count().pinned_bytes, 17 * 4 * kMiB);
  for (auto& buffer : supply.Reclaim(owner)) buffer.reset();
}

// Two backups, as of two tags, and a GPU that hangs for a while.
TEST_F(Contents, memory_of_copies_that_have_not_ended_serves_nothing_else) {
  Block& block = Add(64 * kKiB);
  Write(block, 0, std::byte{1});
  PinnedSupply supply(*sim_, {.chunk = 64 * kKiB});
  Backup one(*sim_, supply), two(*sim_, supply);
  ASSERT_TRUE(one.Save(Items()).ok());
  sim_->SetHook([](std::string_view call, std::uint64_t) { return call == "FinishCopies" ? cuda::kTimeout : 0; });
  EXPECT_FALSE(one.Finish().ok());
  one.ForgetAll();
  ASSERT_TRUE(two.Save(Items()).ok());
  EXPECT_EQ(supply.Count().pinned_bytes, 128 * kKiB);
  EXPECT_EQ(one.Save(Items()).code(), Code::kInvalid);
  sim_->SetHook({});
  ASSERT_TRUE(two.Finish().ok());
  two.ForgetAll();
  Cycle(one);
  EXPECT_EQ(supply.Count().pinned_bytes, 128 * kKiB);
}

TEST_F(Contents, a_forked_child_prepares_nothing_and_ends_in_peace) {
#if defined(AMEM_SANITIZED)
  GTEST_SKIP() << "threads and fork do not go together there";
#endif
  auto backup = std::make_unique<test::LoneBackup>(*sim_, test::LoneOptions{.chunk = 64 * kKiB});
  ASSERT_TRUE(sim_->SetLatency("AllocatePinned", std::chrono::milliseconds(20)).ok());
  backup->Prepare(1 * kMiB);
  ASSERT_TRUE(Eventually([&] { return backup->pinned_bytes() > 0; }));
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    backup->Prepare(64 * kMiB);
    backup->StopPreparing();
    backup->Trim(0);
    backup.reset();
    _exit(7);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  EXPECT_TRUE(Eventually([&] { return backup->pinned_bytes() == 1 * kMiB; }));
}

TEST_F(Contents, expected_is_generous_before_the_first_save_and_close_after_it) {
  Block& block = Add(100 * kPage);
  for (Bytes i = 0; i < 10; ++i) Write(block, i * kPage, std::byte{1});
  test::LoneBackup backup(*sim_, {.chunk = kPage});
  EXPECT_EQ(backup.Expected(100 * kPage), 23 * kPage);
  EXPECT_EQ(backup.Expected(kPage / 2), kPage / 2);
  Cycle(backup);
  EXPECT_NEAR(static_cast<double>(backup.Expected(100 * kPage)), 12.0 * kPage, 2.0);
}

}  // namespace
}  // namespace amem
