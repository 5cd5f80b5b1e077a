// Memory of cuMemAlloc in slabs: a pause and a resume cost what they cost for cuMem, and IPC handles lead to the same bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/replay/session/session_process.h"

namespace amem {
namespace {

using test::k2M, test::kDevice, test::kMiB, test::Process;

SessionOptions InSlabs() {
  SessionOptions options;
  options.layout = Layout::kSlab;
  options.slab_bytes = 64 * kMiB;
  return options;
}

class LegacySlabTest : public test::TwoProcesses {
 protected:
  LegacySlabTest() : TwoProcesses(InSlabs(), 512 * kMiB) {}
  void TearDown() override {
    for (const Process* p : {&a, &b}) {
      const State state = p->session->CopyState();
      EXPECT_TRUE(state.broken.empty()) << state.broken;
      EXPECT_TRUE(CheckInvariants(state).ok()) << CheckInvariants(state).message();
    }
    TwoProcesses::TearDown();
  }
  static std::byte* Memory(Address address) { return reinterpret_cast<std::byte*>(address.value); }
  Address Allocate(Bytes bytes) const {
    const auto address = a.session->legacy().Allocate(bytes, kDevice, {});
    EXPECT_TRUE(address.ok()) << address.status().message();
    return *address;
  }
  Address Open(Address address) const {
    const auto handle = a.session->legacy().Export(address);
    EXPECT_TRUE(handle.ok()) << handle.status().message();
    const auto opened = b.session->legacy().Import(*handle, kDevice, {});
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    return *opened;
  }
  [[nodiscard]] std::uint64_t DriverCalls() const {
    std::uint64_t sum = 0;
    for (const Process* p : {&a, &b}) {
      for (const char* call : {"Create", "Release", "Map", "Unmap", "SetAccess", "Export", "Import"})
        sum += p->simulator->Calls(call);
    }
    return sum;
  }
  struct Cost {
    std::uint64_t pause = 0, resume = 0;
  };
  Cost OneCycle() const {
    const std::uint64_t before = DriverCalls();
    Both(&Session::Pause);
    EXPECT_EQ(a.InUse(), 0U);
    const std::uint64_t paused = DriverCalls();
    Both(&Session::Resume);
    return {paused - before, DriverCalls() - paused};
  }
};

constexpr int kSmall = 300, kMiddle = 20, kLarge = 4;

TEST_F(LegacySlabTest, a_cycle_makes_no_more_driver_calls_than_for_cuMem_and_brings_the_same_bytes) {
  std::vector<std::pair<Address, Bytes>> own;
  for (int i = 0; i < kSmall; ++i) own.emplace_back(Allocate(8 + i * 8), 8 + i * 8);
  for (int i = 0; i < kMiddle; ++i) own.emplace_back(Allocate(k2M), k2M);
  for (int i = 0; i < kLarge; ++i) own.emplace_back(Allocate(5 * k2M - 100), 5 * k2M - 100);
  std::vector<std::pair<Address, Address>> shared;
  for (std::size_t i = 0; i < own.size(); i += 3) shared.emplace_back(own[i].first, Open(own[i].first));
  std::vector<std::vector<std::byte>> before;
  for (std::size_t i = 0; i < own.size(); ++i) {
    const auto [address, bytes] = own[i];
    for (Bytes at = 0; at < bytes; at += 97) Memory(address)[at] = static_cast<std::byte>(i + at / 97);
    before.emplace_back(Memory(address), Memory(address) + bytes);
  }
  const Cost legacy = OneCycle();
  for (std::size_t i = 0; i < own.size(); ++i)
    ASSERT_EQ(std::memcmp(Memory(own[i].first), before[i].data(), own[i].second), 0) << i;
  for (const auto& [mine, theirs] : shared) {  // the same memory again
    Memory(theirs)[3] = std::byte{0x33};
    ASSERT_EQ(Memory(mine)[3], std::byte{0x33});
  }
  for (const auto& [mine, theirs] : shared) EXPECT_TRUE(b.session->legacy().Close(theirs).ok());
  for (const auto& [address, bytes] : own) EXPECT_TRUE(a.session->legacy().Free(address).ok());
  EXPECT_EQ(a.InUse(), 0U);
  for (const Process* p : {&a, &b}) EXPECT_EQ(p->simulator->Snapshot(), SimulatorSnapshot{});

  // As much memory by cuMem: the small ones were in one block.
  std::vector<AllocationId> cu_mem;
  for (int i = 0; i < 1 + kMiddle; ++i) cu_mem.push_back(a.Create());
  for (int i = 0; i < kLarge; ++i) cu_mem.push_back(a.Create(5 * k2M));
  for (std::size_t i = 0; i < cu_mem.size(); ++i) {
    const Bytes bytes = i < 1 + kMiddle ? k2M : 5 * k2M;
    a.Place(cu_mem[i], bytes);
    if (i % 3 == 0) b.Place(Pass(cu_mem[i]), bytes);
  }
  const Cost by_cu_mem = OneCycle();
  EXPECT_GT(by_cu_mem.pause, 0U);
  EXPECT_LE(2 * legacy.pause, 3 * by_cu_mem.pause);
  EXPECT_LE(2 * legacy.resume, 3 * by_cu_mem.resume);
}

TEST_F(LegacySlabTest, a_handle_that_is_opened_twice_is_at_one_address_until_it_is_closed_twice) {
  const Address mine = Allocate(100);
  const Address theirs = Open(mine);
  EXPECT_EQ(Open(mine), theirs);
  Memory(mine)[5] = std::byte{5};
  EXPECT_TRUE(b.session->legacy().Close(theirs).ok());
  EXPECT_EQ(Memory(theirs)[5], std::byte{5});
  OneCycle();
  EXPECT_EQ(Memory(theirs)[5], std::byte{5});
  EXPECT_TRUE(b.session->legacy().Close(theirs).ok());
  EXPECT_EQ(b.session->legacy().Close(theirs).code(), Code::kNotFound);
  EXPECT_EQ(b.simulator->Snapshot(), SimulatorSnapshot{});
}

TEST_F(LegacySlabTest, handles_of_one_block_are_opened_and_closed_each_by_itself) {
  const Address first = Allocate(100), second = Allocate(100);
  const Address their_first = Open(first), their_second = Open(second);
  EXPECT_EQ(their_second.value - their_first.value, second.value - first.value);
  EXPECT_TRUE(b.session->legacy().Close(their_first).ok());
  Memory(second)[7] = std::byte{7};
  EXPECT_EQ(Memory(their_second)[7], std::byte{7});
  OneCycle();
  EXPECT_EQ(Memory(their_second)[7], std::byte{7});
  EXPECT_TRUE(b.session->legacy().Close(their_second).ok());
}

TEST_F(LegacySlabTest, a_block_that_was_freed_while_running_stays_until_the_peer_closes_it) {
  const Address mine = Allocate(4 * k2M), other = Allocate(4 * k2M);
  const Address theirs = Open(mine);
  Memory(mine)[9] = std::byte{9};
  EXPECT_TRUE(a.session->legacy().Free(mine).ok());
  EXPECT_NE(Allocate(4 * k2M), mine) << "a peer may still write there";
  OneCycle();
  EXPECT_EQ(Memory(theirs)[9], std::byte{9});
  EXPECT_TRUE(b.session->legacy().Close(theirs).ok());
  EXPECT_EQ(Allocate(4 * k2M), mine);
  EXPECT_EQ(Memory(mine)[9], std::byte{0}) << "a stale flag in a buffer is a wrong result";
  EXPECT_TRUE(a.session->legacy().Free(other).ok());
}

TEST_F(LegacySlabTest, a_second_device_reaches_what_is_in_the_slabs_of_the_first) {
  constexpr DeviceOrdinal kOther{1};
  const Address here = Allocate(8);
  ASSERT_TRUE(a.session->legacy().Allocate(8, kOther, {}).ok());
  const auto mapping = a.simulator->MappingAt(here);
  ASSERT_TRUE(mapping.ok());
  EXPECT_GT(mapping->bytes, k2M) << "a slab";
  EXPECT_EQ(mapping->access.size(), 2U);
}

TEST_F(LegacySlabTest, devices_that_cannot_reach_each_other_have_memory_each) {
  constexpr DeviceOrdinal kOther{1};
  a.simulator->SetApart();
  for (const Bytes bytes : {Bytes{4096}, k2M, 64 * kMiB, 64 * kMiB}) {  // a small one, in a slab, and with a handle of its own
    for (const DeviceOrdinal device : {kDevice, kOther}) {
      const auto address = a.session->legacy().Allocate(bytes, device, {});
      ASSERT_TRUE(address.ok()) << device.value << ", " << bytes << ": " << address.status().message();
      std::memset(Memory(*address), 0x11 + device.value, bytes);
      ASSERT_TRUE(a.session->Pause().ok());
      EXPECT_EQ(a.InUse(), 0U);
      ASSERT_TRUE(a.session->Resume().ok());
      EXPECT_EQ(Memory(*address)[bytes - 1], static_cast<std::byte>(0x11 + device.value));
    }
  }
}

TEST_F(LegacySlabTest, a_second_device_reaches_what_is_made_after_it_was_seen) {
  const AccessDescriptor other{{LocationType::kDevice, 1}, 3};
  ASSERT_TRUE(a.session->legacy().Allocate(k2M, DeviceOrdinal{1}, {}).ok());
  for (const Bytes bytes : {k2M, 64 * kMiB}) {
    const Address address = Allocate(bytes);
    const auto mapping = a.simulator->MappingAt(address);
    ASSERT_TRUE(mapping.ok()) << mapping.status().message();
    EXPECT_NE(std::ranges::find(mapping->access, other), mapping->access.end()) << bytes;
  }
}

TEST_F(LegacySlabTest, where_the_driver_has_no_slab_left_a_block_has_a_handle_of_its_own) {
  const auto hog = b.simulator->Create(511 * kMiB / k2M * k2M - 6 * k2M, Process::On(kDevice), 0);
  ASSERT_TRUE(hog.ok());
  const Address large = Allocate(3 * k2M), larger = Allocate(3 * k2M);
  Memory(large)[0] = Memory(larger)[k2M] = std::byte{1};
  EXPECT_TRUE(b.simulator->Release(*hog).ok());
}

TEST_F(LegacySlabTest, a_driver_error_while_a_block_or_an_import_is_made_leaves_nothing_behind) {
  for (const char* call : {"Create", "Reserve", "Map", "SetAccess"}) {
    // The slab fails, and then the handle of its own.
    ASSERT_TRUE(a.simulator->FailNext(call, 1, cuda::kUnknown).ok());
    ASSERT_TRUE(a.simulator->FailNext(call, 2, cuda::kUnknown).ok());
    ASSERT_TRUE(a.simulator->FailNext(call, 3, cuda::kUnknown).ok());
    ASSERT_TRUE(a.simulator->FailNext(call, 4, cuda::kUnknown).ok());
    EXPECT_EQ(a.session->legacy().Allocate(8, kDevice, {}).status().driver_result(), cuda::kUnknown) << call;
    a.simulator->ForgetPlannedFailures();
    EXPECT_EQ(a.simulator->Snapshot(), SimulatorSnapshot{}) << call;
  }
  const auto handle = a.session->legacy().Export(Allocate(8));
  for (const char* call : {"Import", "Reserve", "Map"}) {
    ASSERT_TRUE(b.simulator->FailNext(call, 1, cuda::kUnknown).ok());
    EXPECT_EQ(b.session->legacy().Import(*handle, kDevice, {}).status().driver_result(), cuda::kUnknown) << call;
    EXPECT_EQ(b.simulator->Snapshot(), SimulatorSnapshot{}) << call;
  }
  ASSERT_TRUE(b.simulator->FailNext("SetAccess", 1, cuda::kUnknown).ok());
  EXPECT_EQ(b.session->legacy().Import(*handle, kDevice, {}).status().driver_result(), cuda::kUnknown);
  EXPECT_EQ(b.simulator->Snapshot(), SimulatorSnapshot{});
  EXPECT_TRUE(b.session->CopyState().allocations.empty());
}

}  // namespace
}  // namespace amem
