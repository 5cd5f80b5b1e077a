// A simulator, some memory on it and what that memory must hold: for tests of backups.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "replay/driver/simulator/simulator.h"
#include "tests/replay/cycle/lone_backup.h"
#include "tests/replay/cycle/plain_driver.h"

namespace amem::test {

inline constexpr Bytes kPage = 4096, kKiB = 1024, kMiB = kKiB * 1024;
inline constexpr DeviceOrdinal kGpu0{0}, kGpu1{1};

inline bool Eventually(const auto& holds) {
  for (int i = 0; i < 5000; ++i) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

class Contents : public testing::Test {
 protected:
  struct Block {
    Backup::Item item;
    DriverHandle handle;
    std::vector<std::byte> expected;
  };

  void SetUp() override {
    auto made = Simulator::Open({.devices = 2, .granularity = kPage});
    ASSERT_TRUE(made.ok()) << made.status().message();
    sim_ = *std::move(made);
  }

  Block& Add(Bytes bytes, DeviceOrdinal device = kGpu0) {
    Block block;
    block.item = {AllocationId{blocks_.size() + 1}, device, {}, bytes};
    const auto address = sim_->Reserve(bytes, 0, {}, 0);
    EXPECT_TRUE(address.ok());
    block.item.address = *address;
    block.expected.resize(bytes);
    blocks_.push_back(std::move(block));
    Up(blocks_.back());
    return blocks_.back();
  }
  void Up(Block& block) {
    const Location location{LocationType::kDevice, block.item.device.value};
    const auto handle = sim_->Create(block.item.bytes, {.location = location}, 0);
    ASSERT_TRUE(handle.ok()) << handle.status().message();
    block.handle = *handle;
    ASSERT_TRUE(sim_->Map(block.item.address, block.item.bytes, 0, block.handle, 0).ok());
    const AccessDescriptor access{location, 3};
    ASSERT_TRUE(sim_->SetAccess(block.item.address, block.item.bytes, std::span(&access, 1)).ok());
  }
  void Down(Block& block) {
    EXPECT_TRUE(sim_->Unmap(block.item.address, block.item.bytes).ok());
    EXPECT_TRUE(sim_->Release(block.handle).ok());
  }
  // All memory is given back, made anew and filled with something else.
  void Recreate() {
    for (Block& block : blocks_) Down(block);
    for (Block& block : blocks_) {
      Up(block);
      std::memset(At(block), 0xAB, block.item.bytes);
    }
  }
  static std::byte* At(const Block& block) { return reinterpret_cast<std::byte*>(block.item.address.value); }
  static void Write(Block& block, Bytes offset, std::byte value) {
    At(block)[offset] = value;
    block.expected[offset] = value;
  }
  [[nodiscard]] std::vector<Backup::Item> Items() const {
    std::vector<Backup::Item> items;
    for (const Block& block : blocks_) items.push_back(block.item);
    return items;
  }
  void ExpectAllBack() {
    for (const Block& block : blocks_) {
      EXPECT_EQ(std::memcmp(At(block), block.expected.data(), block.item.bytes), 0)
          << "allocation " << block.item.allocation.value;
    }
  }
  void Cycle(Backup& backup, bool compare = false) {
    const Status saved = backup.Save(Items());
    ASSERT_TRUE(saved.ok()) << saved.message();
    ASSERT_TRUE(backup.Finish().ok());
    Recreate();
    const Status restored = backup.Restore(Items());
    ASSERT_TRUE(restored.ok()) << restored.message();
    ASSERT_TRUE(backup.Finish().ok());
    ExpectAllBack();
    const Status same = compare ? backup.Compare(Items()) : Status{};
    EXPECT_TRUE(same.ok()) << same.message();
    backup.ForgetAll();
  }
  // Bytes, pages and long runs in places that the seed decides.
  void Scribble(std::mt19937_64& random) {
    for (Block& block : blocks_) {
      for (std::uint64_t runs = random() % 6; runs > 0; --runs) {
        const Bytes first = random() % block.item.bytes;
        const Bytes most = random() % 3 == 0 ? 1 : random() % 2 == 0 ? kPage : 64 * kKiB;
        for (Bytes i = first; i < std::min(block.item.bytes, first + most); ++i) {
          Write(block, i, static_cast<std::byte>(random() % 4));  // zeros too
        }
      }
    }
  }

  std::unique_ptr<Simulator> sim_;
  std::deque<Block> blocks_;
};

}  // namespace amem::test
