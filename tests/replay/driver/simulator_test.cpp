// What the simulator promises: the driver's rules, memory that is really given back, one world for many processes, faults.
#include "replay/driver/simulator/simulator.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "replay/driver/simulator/world_table.h"
#include "tests/pass_descriptor.h"
#include "tests/replay/sizes.h"

namespace amem {
namespace {

using test::kMiB;
constexpr Bytes kPage = 2 * kMiB;
constexpr DeviceOrdinal kGpu0{0}, kGpu1{1};

AllocationProperties OnDevice(std::int32_t device) { return {.handle_types = 1, .location = {LocationType::kDevice, device}}; }
std::array<AccessDescriptor, 1> ReadWrite(std::int32_t device) {
  return {AccessDescriptor{{LocationType::kDevice, device}, 3}};
}
std::uint64_t* Words(Address address) { return reinterpret_cast<std::uint64_t*>(address.value); }

std::unique_ptr<Simulator> Make(SimulatorOptions options = {}) {
  auto made = Simulator::Open(std::move(options));
  EXPECT_TRUE(made.ok()) << made.status().message();
  return made.ok() ? *std::move(made) : nullptr;
}

// A mapped, accessible allocation.
struct Block {
  DriverHandle handle;
  Address address;
  Bytes bytes = 0;
};
Block MakeBlock(Simulator& sim, Bytes bytes = kPage, std::int32_t device = 0) {
  Block block{.bytes = bytes};
  const auto handle = sim.Create(bytes, OnDevice(device), 0);
  EXPECT_TRUE(handle.ok()) << handle.status().message();
  if (handle.ok()) block.handle = *handle;
  const auto address = sim.Reserve(bytes, 0, {}, 0);
  EXPECT_TRUE(address.ok()) << address.status().message();
  if (address.ok()) block.address = *address;
  EXPECT_TRUE(sim.Map(block.address, bytes, 0, block.handle, 0).ok());
  EXPECT_TRUE(sim.SetAccess(block.address, bytes, ReadWrite(device)).ok());
  return block;
}
void FreeBlock(Simulator& sim, const Block& block) {
  EXPECT_TRUE(sim.Unmap(block.address, block.bytes).ok());
  EXPECT_TRUE(sim.Release(block.handle).ok());
  EXPECT_TRUE(sim.FreeRange(block.address, block.bytes).ok());
}

#define EXPECT_RESULT(expr, result)                                             \
  do {                                                                          \
    const Status seen = (expr);                                                 \
    EXPECT_EQ(seen.driver_result(), result) << #expr << ": " << seen.message(); \
    EXPECT_FALSE(seen.ok()) << #expr;                                           \
  } while (false)

class World : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "amem-world-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  [[nodiscard]] SimulatorOptions Options(Bytes capacity = 64 * kMiB) const {
    return {.world = directory_ / "world", .devices = 2, .capacity_per_device = capacity};
  }
  std::filesystem::path directory_;
};

// Runs `body` in a child; its return value is the exit status. A child that does not return must be killed by the caller.
pid_t Spawn(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  return pid;
}
int Wait(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
int InChild(const std::function<int()>& body) { return Wait(Spawn(body)); }

void Tell(int socket) { EXPECT_EQ(write(socket, "x", 1), 1); }
void Listen(int socket) {
  char byte = 0;
  EXPECT_EQ(read(socket, &byte, 1), 1);
}

// ---- rules -----------------------------------------------------------------------------------------------------------------

TEST(Simulator, a_kernel_can_use_what_is_mapped_through_its_address) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim);
  Words(block.address)[7] = 42;
  EXPECT_EQ(Words(block.address)[7], 42U);
  FreeBlock(*sim, block);
  EXPECT_EQ(sim->Snapshot(), SimulatorSnapshot{});
  EXPECT_EQ(sim->BytesInUse(kGpu0), 0U);
}

TEST(Simulator, access_before_it_was_given_kills) {
#ifdef AMEM_SANITIZED
  GTEST_SKIP() << "the sanitizer's handler makes an exit of the signal";
#endif
  const auto touch = [](bool access) {
    const auto sim = Make();
    const auto handle = *sim->Create(kPage, OnDevice(0), 0);
    const auto address = *sim->Reserve(kPage, 0, {}, 0);
    if (!sim->Map(address, kPage, 0, handle, 0).ok()) return 1;
    if (access && !sim->SetAccess(address, kPage, ReadWrite(0)).ok()) return 2;
    *reinterpret_cast<volatile std::uint64_t*>(address.value) = 1;
    return 0;
  };
  EXPECT_EQ(InChild([&] { return touch(false); }), 128 + SIGSEGV);
  EXPECT_EQ(InChild([&] { return touch(true); }), 0);
}

TEST(Simulator, access_can_be_taken_back_and_given_for_reading_only) {
#ifdef AMEM_SANITIZED
  GTEST_SKIP() << "the sanitizer's handler makes an exit of the signal";
#endif
  const auto touch = [](std::uint32_t flags, bool write) {
    const auto sim = Make();
    const Block block = MakeBlock(*sim);
    const std::array access = {AccessDescriptor{{LocationType::kDevice, 0}, flags}};
    if (!sim->SetAccess(block.address, block.bytes, access).ok()) return 1;
    auto* word = reinterpret_cast<volatile std::uint64_t*>(block.address.value);
    if (write) *word = 1;
    return static_cast<int>(*word & 0);
  };
  EXPECT_EQ(InChild([&] { return touch(1, false); }), 0);
  EXPECT_EQ(InChild([&] { return touch(1, true); }), 128 + SIGSEGV);
  EXPECT_EQ(InChild([&] { return touch(0, false); }), 128 + SIGSEGV);
}

TEST(Simulator, memory_that_was_unmapped_cannot_be_touched_and_comes_back_with_its_bytes) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim);
  Words(block.address)[0] = 7;
  ASSERT_TRUE(sim->Unmap(block.address, block.bytes).ok());
  ASSERT_TRUE(sim->Map(block.address, block.bytes, 0, block.handle, 0).ok());
  ASSERT_TRUE(sim->SetAccess(block.address, block.bytes, ReadWrite(0)).ok());
  EXPECT_EQ(Words(block.address)[0], 7U);
}

TEST(Simulator, one_handle_mapped_twice_is_the_same_memory) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim);
  const Address other = *sim->Reserve(kPage, 0, {}, 0);
  ASSERT_TRUE(sim->Map(other, kPage, 0, block.handle, 0).ok());
  ASSERT_TRUE(sim->SetAccess(other, kPage, ReadWrite(1)).ok());
  Words(block.address)[3] = 99;
  EXPECT_EQ(Words(other)[3], 99U);
  EXPECT_EQ(sim->BytesInUse(kGpu0), kPage);
}

TEST(Simulator, memory_is_there_until_the_last_of_handle_mapping_and_descriptor_is_gone) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim);
  auto descriptor = sim->Export(block.handle);
  ASSERT_TRUE(descriptor.ok());
  ASSERT_TRUE(sim->Release(block.handle).ok());
  Words(block.address)[0] = 1;  // released while mapped: still there
  EXPECT_EQ(sim->BytesInUse(kGpu0), kPage);
  ASSERT_TRUE(sim->Unmap(block.address, block.bytes).ok());
  EXPECT_EQ(sim->BytesInUse(kGpu0), kPage) << "an exported descriptor is open";
  const auto imported = sim->Import(*descriptor);
  ASSERT_TRUE(imported.ok()) << imported.status().message();
  descriptor->Reset();
  EXPECT_EQ(sim->BytesInUse(kGpu0), kPage);
  ASSERT_TRUE(sim->Release(*imported).ok());
  EXPECT_EQ(sim->BytesInUse(kGpu0), 0U);
}

TEST(Simulator, memory_given_back_is_really_given_back) {
  const auto resident = [] {
    std::FILE* file = std::fopen("/proc/self/status", "r");
    std::array<char, 256> line{};
    unsigned long long kib = 0;
    while (std::fgets(line.data(), line.size(), file) != nullptr) {
      if (std::sscanf(line.data(), "RssShmem: %llu", &kib) == 1) break;
    }
    std::fclose(file);
    return kib * 1024;
  };
  const auto sim = Make();
  const auto before = resident();
  const Block block = MakeBlock(*sim, 16 * kMiB);
  std::memset(Words(block.address), 1, 16 * kMiB);
  EXPECT_GE(resident(), before + 16 * kMiB);
  FreeBlock(*sim, block);
  EXPECT_LT(resident(), before + kMiB);
}

TEST(Simulator, a_handle_is_mapped_whole) {
  const auto sim = Make();
  const auto handle = *sim->Create(4 * kPage, OnDevice(0), 0);
  const auto address = *sim->Reserve(8 * kPage, 0, {}, 0);
  EXPECT_RESULT(sim->Map(address, kPage, 0, handle, 0), cuda::kNotSupported);
  EXPECT_RESULT(sim->Map(address, kPage, kPage, handle, 0), cuda::kNotSupported);
  EXPECT_RESULT(sim->Map(address, 5 * kPage, 0, handle, 0), cuda::kNotSupported);
  EXPECT_TRUE(sim->Map(address, 4 * kPage, 0, handle, 0).ok());
}

TEST(Simulator, a_mapping_is_not_split) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim, 4 * kPage);
  EXPECT_RESULT(sim->Unmap(block.address, kPage), cuda::kInvalidValue);
  EXPECT_RESULT(sim->Unmap(block.address + kPage, 3 * kPage), cuda::kInvalidValue);
  EXPECT_RESULT(sim->SetAccess(block.address, kPage, ReadWrite(0)), cuda::kInvalidValue);
  EXPECT_RESULT(sim->FreeRange(block.address, 4 * kPage), cuda::kInvalidValue);
  EXPECT_TRUE(sim->Unmap(block.address, 4 * kPage).ok());
}

TEST(Simulator, neighbouring_mappings_can_be_changed_and_removed_together) {
  const auto sim = Make();
  const auto address = *sim->Reserve(3 * kPage, 0, {}, 0);
  std::vector<DriverHandle> handles;
  for (const Bytes i : {Bytes{0}, Bytes{1}, Bytes{2}}) {
    handles.push_back(*sim->Create(kPage, OnDevice(0), 0));
    ASSERT_TRUE(sim->Map(address + i * kPage, kPage, 0, handles.back(), 0).ok());
  }
  EXPECT_TRUE(sim->SetAccess(address, 3 * kPage, ReadWrite(1)).ok());
  EXPECT_TRUE(sim->Unmap(address + kPage, kPage).ok());
  EXPECT_TRUE(sim->SetAccess(address, 3 * kPage, ReadWrite(0)).ok()) << "a hole is passed over";
  EXPECT_RESULT(sim->SetAccess(address, 2 * kPage, ReadWrite(0)), cuda::kInvalidValue);
  EXPECT_TRUE(sim->Unmap(address, 3 * kPage).ok());
  EXPECT_TRUE(sim->Unmap(address, 3 * kPage).ok()) << "nothing is left to unmap";
  EXPECT_TRUE(sim->Snapshot().mappings.empty());
}

TEST(Simulator, nothing_is_mapped_over_another_or_outside_of_a_range) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim, 2 * kPage);
  const auto handle = *sim->Create(kPage, OnDevice(0), 0);
  EXPECT_RESULT(sim->Map(block.address + kPage, kPage, 0, handle, 0), cuda::kInvalidValue);
  EXPECT_RESULT(sim->Map(block.address + 2 * kPage, kPage, 0, handle, 0), cuda::kInvalidValue);
  EXPECT_RESULT(sim->Map(block.address + 17, kPage, 0, handle, 0), cuda::kInvalidValue);
}

TEST(Simulator, what_nobody_has_is_refused) {
  const auto sim = Make({.devices = 2});
  const DriverHandle nobody{12345};
  const auto address = *sim->Reserve(kPage, 0, {}, 0);
  EXPECT_RESULT(sim->Release(nobody), cuda::kInvalidValue);
  EXPECT_RESULT(sim->Map(address, kPage, 0, nobody, 0), cuda::kInvalidValue);
  EXPECT_RESULT(sim->Export(nobody).status(), cuda::kInvalidValue);
  EXPECT_RESULT(sim->Unmap(address + kPage, kPage), cuda::kInvalidValue);
  EXPECT_RESULT(sim->SetAccess(address, kPage, ReadWrite(0)), cuda::kInvalidValue);
  EXPECT_RESULT(sim->FreeRange(address + kPage, kPage), cuda::kInvalidValue);
  EXPECT_RESULT(sim->FreeRange(address, 2 * kPage), cuda::kInvalidValue);
  EXPECT_RESULT(sim->Create(kPage, OnDevice(2), 0).status(), cuda::kInvalidDevice);
  EXPECT_RESULT(sim->Memory(DeviceOrdinal{2}).status(), cuda::kInvalidDevice);
  const auto handle = *sim->Create(kPage, OnDevice(0), 0);
  ASSERT_TRUE(sim->Release(handle).ok());
  EXPECT_RESULT(sim->Release(handle), cuda::kInvalidValue);
}

TEST(Simulator, sizes_that_are_no_multiple_of_the_granularity_are_refused) {
  const auto sim = Make();
  EXPECT_EQ(*sim->Granularity(OnDevice(0)), kPage);
  EXPECT_RESULT(sim->Create(kPage + 4096, OnDevice(0), 0).status(), cuda::kInvalidValue);
  EXPECT_RESULT(sim->Create(0, OnDevice(0), 0).status(), cuda::kInvalidValue);
  EXPECT_RESULT(sim->Reserve(4096, 0, {}, 0).status(), cuda::kInvalidValue);
  EXPECT_RESULT(sim->Reserve(kPage, 3 * kPage, {}, 0).status(), cuda::kInvalidValue);
}

TEST(Simulator, a_range_is_aligned_as_asked_and_at_the_hint_if_that_is_free) {
  const auto sim = Make();
  const auto aligned = *sim->Reserve(kPage, 512 * kMiB, {}, 0);
  EXPECT_EQ(aligned.value % (512 * kMiB), 0U);
  const auto range = *sim->Reserve(4 * kPage, 0, {}, 0);
  ASSERT_TRUE(sim->FreeRange(range, 4 * kPage).ok());
  EXPECT_EQ(*sim->Reserve(4 * kPage, 0, range, 0), range);
  const auto elsewhere = sim->Reserve(4 * kPage, 0, range, 0);
  ASSERT_TRUE(elsewhere.ok());
  EXPECT_NE(*elsewhere, range);
}

TEST(Simulator, a_foreign_descriptor_is_refused_at_import) {
  const auto sim = Make();
  const UniqueFd memfd(memfd_create("amem-sim:1:2:3", MFD_CLOEXEC));
  EXPECT_RESULT(sim->Import(memfd).status(), cuda::kUnknown);
  const UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_RESULT(sim->Import(null).status(), cuda::kUnknown);
  EXPECT_RESULT(sim->Import(UniqueFd{}).status(), cuda::kUnknown);
  const auto other_world = Make();
  const auto handle = *other_world->Create(kPage, OnDevice(0), 0);
  const auto descriptor = other_world->Export(handle);
  EXPECT_RESULT(sim->Import(*descriptor).status(), cuda::kUnknown);
}

TEST(Simulator, what_was_not_created_for_sharing_is_not_exported) {
  const auto sim = Make();
  AllocationProperties properties = OnDevice(0);
  properties.handle_types = 0;
  EXPECT_RESULT(sim->Export(*sim->Create(kPage, properties, 0)).status(), cuda::kInvalidValue);
}

TEST(Simulator, an_imported_handle_has_the_properties_it_was_created_with) {
  const auto world = *SimulatorWorld::InMemory(2, 64 * kMiB);
  const auto owner = Make({.in_memory = world}), peer = Make({.in_memory = world, .visible = {1, 0}});
  AllocationProperties properties = OnDevice(1);
  properties.gpu_direct_rdma = 1;
  properties.usage = 5;
  const auto handle = *peer->Import(*owner->Export(*owner->Create(kPage, properties, 0)));
  EXPECT_RESULT(peer->Export(handle).status(), cuda::kInvalidValue);
  properties.handle_types = 0;  // imported
  properties.location.id = 0;   // the owner's device 1 is the peer's device 0
  EXPECT_EQ(*peer->PropertiesOf(handle), properties);
}

TEST(Simulator, a_device_holds_what_it_has_and_host_memory_does_not_count) {
  const auto sim = Make({.devices = 2, .capacity_per_device = 4 * kPage});
  const auto first = *sim->Create(3 * kPage, OnDevice(0), 0);
  const auto refused = sim->Create(2 * kPage, OnDevice(0), 0);
  EXPECT_RESULT(refused.status(), cuda::kOutOfMemory);
  EXPECT_EQ(refused.status().code(), Code::kOutOfMemory);
  EXPECT_TRUE(sim->Create(4 * kPage, OnDevice(1), 0).ok());
  EXPECT_TRUE(sim->Create(8 * kPage, {.handle_types = 1, .location = {LocationType::kHostNuma, 0}}, 0).ok());
  EXPECT_EQ(sim->Memory(kGpu0)->free, kPage);
  EXPECT_EQ(sim->Memory(kGpu0)->total, 4 * kPage);
  ASSERT_TRUE(sim->Release(first).ok());
  EXPECT_TRUE(sim->Create(4 * kPage, OnDevice(0), 0).ok());
}

TEST(Simulator, retain_gives_the_mapped_handle_once_more_even_after_its_release) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim);
  EXPECT_EQ(*sim->Retain(block.address + 4096), block.handle);
  ASSERT_TRUE(sim->Release(block.handle).ok());
  ASSERT_TRUE(sim->Release(block.handle).ok());
  EXPECT_FALSE(sim->Release(block.handle).ok());
  EXPECT_EQ(*sim->Retain(block.address), block.handle);
  ASSERT_TRUE(sim->Unmap(block.address, block.bytes).ok());
  EXPECT_EQ(sim->BytesInUse(kGpu0), kPage);
  ASSERT_TRUE(sim->Release(block.handle).ok());
  EXPECT_EQ(sim->BytesInUse(kGpu0), 0U);
}

TEST(Simulator, a_failure_says_what_was_tried_on_what_and_why) {
  const auto sim = Make();
  const Status status = sim->Unmap(Address{0x200000}, kPage);
  EXPECT_EQ(status.code(), Code::kDriver);
  for (const char* part : {"cuMemUnmap", "0x200000", "2097152", "CUDA_ERROR_INVALID_VALUE", "this range was not reserved"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << part << " is missing in: " << status.message();
  }
}

TEST(Simulator, a_snapshot_lists_handles_ranges_and_mappings) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim);
  const SimulatorSnapshot snapshot = sim->Snapshot();
  ASSERT_EQ(snapshot.handles.size(), 1U);
  EXPECT_EQ(snapshot.handles[0].handle, block.handle);
  EXPECT_EQ(snapshot.handles[0].mappings, 1U);
  ASSERT_EQ(snapshot.ranges.size(), 1U);
  EXPECT_EQ(snapshot.ranges[0], (Extent{block.address, kPage}));
  ASSERT_EQ(snapshot.mappings.size(), 1U);
  EXPECT_EQ(snapshot.mappings[0].handle, block.handle);
  ASSERT_EQ(snapshot.mappings[0].access.size(), 1U);
  EXPECT_EQ(snapshot.mappings[0].access[0], (AccessDescriptor{{LocationType::kDevice, 0}, 3}));
}

// ---- contents --------------------------------------------------------------------------------------------------------------

TEST(SimulatedCopies, nothing_is_copied_before_it_is_finished) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim, 4 * kPage);
  auto pinned = *sim->AllocatePinned(4 * kPage);
  std::memset(pinned->data(), 0, 4 * kPage);
  Words(block.address)[1] = 5;
  ASSERT_TRUE(sim->CopyToHost(kGpu0, pinned->data(), block.address, 4 * kPage).ok());
  EXPECT_EQ(pinned->data()[8], std::byte{0});
  EXPECT_EQ(sim->QueuedCopies(kGpu0), 1U);
  ASSERT_TRUE(sim->FinishCopies(kGpu0, In(std::chrono::minutes(1))).ok());
  EXPECT_EQ(pinned->data()[8], std::byte{5});
  pinned->data()[8] = std::byte{6};
  ASSERT_TRUE(sim->CopyToDevice(kGpu0, block.address, pinned->data(), 4 * kPage).ok());
  ASSERT_TRUE(sim->FinishCopies(kGpu0, In(std::chrono::minutes(1))).ok());
  EXPECT_EQ(Words(block.address)[1], 6U);
  ASSERT_TRUE(sim->Clear(kGpu0, block.address + 8, 1).ok());
  ASSERT_TRUE(sim->FinishCopies(kGpu0, In(std::chrono::minutes(1))).ok());
  EXPECT_EQ(Words(block.address)[1], 0U);
}

TEST(SimulatedCopies, a_copy_goes_over_neighbouring_mappings_from_any_byte) {
  const auto sim = Make();
  const auto address = *sim->Reserve(2 * kPage, 0, {}, 0);
  for (const Bytes i : {Bytes{0}, Bytes{1}}) {
    ASSERT_TRUE(sim->Map(address + i * kPage, kPage, 0, *sim->Create(kPage, OnDevice(0), 0), 0).ok());
  }
  ASSERT_TRUE(sim->SetAccess(address, 2 * kPage, ReadWrite(0)).ok());
  auto pinned = *sim->AllocatePinned(64);
  for (int i = 0; i < 64; ++i) pinned->data()[i] = static_cast<std::byte>(i + 1);
  ASSERT_TRUE(sim->CopyToDevice(kGpu0, Address{address.value + kPage - 31}, pinned->data(), 64).ok());
  ASSERT_TRUE(sim->FinishCopies(kGpu0, In(std::chrono::minutes(1))).ok());
  const auto* seen = reinterpret_cast<const std::byte*>(address.value + kPage - 31);
  EXPECT_EQ(std::memcmp(seen, pinned->data(), 64), 0);
}

TEST(SimulatedCopies, what_was_unmapped_before_its_copy_was_finished_fails_there) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim);
  const auto pinned = *sim->AllocatePinned(kPage);
  ASSERT_TRUE(sim->CopyToHost(kGpu0, pinned->data(), block.address, kPage).ok());
  FreeBlock(*sim, block);
  EXPECT_RESULT(sim->FinishCopies(kGpu0, In(std::chrono::minutes(1))), 700);
}

TEST(SimulatedCopies, need_access_for_the_device_and_pinned_memory) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim);
  auto pinned = *sim->AllocatePinned(kPage);
  std::vector<std::byte> pageable(kPage);
  EXPECT_RESULT(sim->CopyToHost(kGpu1, pinned->data(), block.address, kPage), cuda::kInvalidValue);
  EXPECT_RESULT(sim->CopyToHost(kGpu0, pageable.data(), block.address, kPage), cuda::kInvalidValue);
  EXPECT_RESULT(sim->CopyToHost(kGpu0, pinned->data() + 1, block.address, kPage), cuda::kInvalidValue);
  EXPECT_RESULT(sim->Clear(kGpu0, block.address, 2 * kPage), cuda::kInvalidValue);
  const std::array read_only = {AccessDescriptor{{LocationType::kDevice, 0}, 1}};
  ASSERT_TRUE(sim->SetAccess(block.address, kPage, read_only).ok());
  EXPECT_TRUE(sim->CopyToHost(kGpu0, pinned->data(), block.address, kPage).ok());
  EXPECT_RESULT(sim->CopyToDevice(kGpu0, block.address, pinned->data(), kPage), cuda::kInvalidValue);
}

TEST(SimulatedCopies, pinned_memory_may_outlive_the_simulator) {
  auto sim = Make();
  auto pinned = *sim->AllocatePinned(64);
  sim.reset();
  pinned->data()[63] = std::byte{1};
  EXPECT_EQ(pinned->size(), 64U);
}

TEST(SimulatedCopies, synchronize_is_refused_while_a_capture_runs) {
  const auto sim = Make();
  sim->SetCapturing(true);
  EXPECT_RESULT(sim->Synchronize(kGpu0, In(std::chrono::minutes(1))), cuda::kCaptureUnsupported);
  EXPECT_EQ(sim->Synchronize(kGpu0, In(std::chrono::minutes(1))).code(), Code::kRefused);
  sim->SetCapturing(false);
  EXPECT_TRUE(sim->Synchronize(kGpu0, In(std::chrono::minutes(1))).ok());
}

// ---- faults ----------------------------------------------------------------------------------------------------------------

TEST(SimulatedFaults, the_nth_call_fails_and_does_nothing) {
  const auto sim = Make();
  ASSERT_TRUE(sim->FailNext("Create", 2, cuda::kOutOfMemory).ok());
  EXPECT_TRUE(sim->Create(kPage, OnDevice(0), 0).ok());
  EXPECT_RESULT(sim->Create(kPage, OnDevice(0), 0).status(), cuda::kOutOfMemory);
  EXPECT_TRUE(sim->Create(kPage, OnDevice(0), 0).ok());
  EXPECT_EQ(sim->Snapshot().handles.size(), 2U);
  EXPECT_EQ(sim->Calls("Create"), 3U);
  EXPECT_EQ(sim->FailNext("Creat", 1, 1).code(), Code::kInvalid);
}

TEST(SimulatedFaults, every_call_can_be_made_to_fail) {
  const auto sim = Make();
  const Block block = MakeBlock(*sim);
  const auto pinned = *sim->AllocatePinned(kPage);
  const auto descriptor = *sim->Export(block.handle);
  const Extent extent{block.address, kPage};
  const auto extents = std::span(&extent, 1);
  const SimulatorSnapshot before = sim->Snapshot();
  std::string asked;
  sim->SetHook([&](std::string_view call, std::uint64_t) {
    asked = call;
    return cuda::kUnknown;
  });
  const std::vector<std::function<Status()>> calls = {
      [&] { return sim->Create(kPage, OnDevice(0), 0).status(); },
      [&] { return sim->Release(block.handle); },
      [&] { return sim->Reserve(kPage, 0, {}, 0).status(); },
      [&] { return sim->FreeRange(block.address, kPage); },
      [&] { return sim->Map(block.address, kPage, 0, block.handle, 0); },
      [&] { return sim->Unmap(block.address, kPage); },
      [&] { return sim->SetAccess(block.address, kPage, ReadWrite(1)); },
      [&] { return sim->Export(block.handle).status(); },
      [&] { return sim->Import(descriptor).status(); },
      [&] { return sim->Granularity(OnDevice(0)).status(); },
      [&] {
        return sim->CreateMulticast({kPage, 1, 1, 0}).status();
      },
      [&] { return sim->AddDevice(block.handle, kGpu0); },
      [&] { return sim->BindMemory(block.handle, 0, block.handle, 0, kPage); },
      [&] { return sim->BindAddress(block.handle, 0, block.address, kPage); },
      [&] { return sim->Unbind(block.handle, kGpu0, 0, kPage); },
      [&] { return sim->MulticastGranularity().status(); },
      [&] { return sim->Memory(kGpu0).status(); },
      [&] { return sim->DeviceCount().status(); },
      [&] { return sim->DeviceUuid(kGpu0).status(); },
      [&] { return sim->Synchronize(kGpu0, In(std::chrono::minutes(1))); },
      [&] { return sim->AllocatePinned(kPage).status(); },
      [&] { return sim->CopyToHost(kGpu0, pinned->data(), block.address, kPage); },
      [&] { return sim->CopyToDevice(kGpu0, block.address, pinned->data(), kPage); },
      [&] { return sim->Clear(kGpu0, block.address, kPage); },
      [&] { return sim->FinishCopies(kGpu0, In(std::chrono::minutes(1))); },
      [&] { return sim->FindNonZero(kGpu0, extents, nullptr, In(std::chrono::minutes(1))).status(); },
      [&] { return sim->Gather(kGpu0, extents); },
      [&] { return sim->Scatter(kGpu0, extents); },
      [&] { return sim->ClearAll(kGpu0, extents); },
      [&] { return sim->MomentOf(kGpu0, nullptr).status(); },
      [&] { return sim->Follow(kGpu0, StreamMoment()); },
      [&] { return sim->MakeStreamWaitForCopies(kGpu0, nullptr, In(std::chrono::minutes(1))); },
      [&] { return sim->AwaitMoment(kGpu0, StreamMoment(), In(std::chrono::minutes(1))); },
      [&] { return sim->OpenLane().status(); },
  };
  ASSERT_EQ(calls.size(), Simulator::kCalls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) {
    EXPECT_RESULT(calls[i](), cuda::kUnknown);
    EXPECT_EQ(asked, Simulator::kCalls[i]);
  }
  EXPECT_EQ(sim->Snapshot(), before);
  sim->SetHook(nullptr);
  EXPECT_TRUE(sim->Unmap(block.address, kPage).ok());
}

TEST(SimulatedFaults, a_hook_may_use_the_simulator_and_count) {
  const auto sim = Make();
  std::size_t handles = 99;
  sim->SetHook([&](std::string_view call, std::uint64_t count) {
    if (call == "Create" && count == 2) handles = sim->Snapshot().handles.size();
    return 0;
  });
  EXPECT_TRUE(sim->Create(kPage, OnDevice(0), 0).ok());
  EXPECT_TRUE(sim->Create(kPage, OnDevice(0), 0).ok());
  EXPECT_EQ(handles, 1U);
}

TEST(SimulatedFaults, a_call_takes_as_long_as_it_is_told) {
  const auto sim = Make();
  ASSERT_TRUE(sim->SetLatency("Release", std::chrono::milliseconds(5)).ok());
  const auto handle = *sim->Create(kPage, OnDevice(0), 0);
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_TRUE(sim->Release(handle).ok());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(5));
}

// ---- many threads, many sequences ------------------------------------------------------------------------------------------

TEST(Simulator, threads_do_not_disturb_each_other) {
  const auto sim = Make();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < 100; ++i) {
        const Block block = MakeBlock(*sim, kPage, t);
        Words(block.address)[0] = i;
        const auto again = *sim->Import(*sim->Export(block.handle));
        EXPECT_TRUE(sim->Release(again).ok());
        EXPECT_EQ(Words(block.address)[0], i);
        FreeBlock(*sim, block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sim->Snapshot(), SimulatorSnapshot{});
  for (std::int32_t device = 0; device < 4; ++device) EXPECT_EQ(sim->BytesInUse(DeviceOrdinal{device}), 0U);
}

TEST(Simulator, without_physical_memory_the_rules_are_the_same) {
  // The same seeded calls, legal or not, on both: every result must agree.
  std::array<std::unique_ptr<Simulator>, 2> sims;
  for (const std::size_t s : {0U, 1U}) sims[s] = Make({.capacity_per_device = 24 * kPage, .physical = s == 0});
  struct Names {
    std::vector<DriverHandle> handles = {DriverHandle{1}};
    std::vector<Address> ranges = {Address{4096}};
  };
  std::array<Names, 2> names;
  std::mt19937 random(7);
  const auto pick = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  std::array<int, 3> outcomes{};
  for (int i = 0; i < 3000; ++i) {
    const auto call = pick(7), h = pick(names[0].handles.size()), r = pick(names[0].ranges.size());
    const Bytes bytes = (1 + pick(2)) * kPage, at = pick(2) * kPage;
    std::array<int, 2> results{};
    for (const std::size_t s : {0U, 1U}) {
      Simulator& sim = *sims[s];
      Names& mine = names[s];
      Status status;
      switch (call) {
        case 0: {
          const auto made = sim.Create(bytes, OnDevice(0), 0);
          if (made.ok()) mine.handles.push_back(*made);
          status = made.status();
          break;
        }
        case 1:
          status = sim.Release(mine.handles[h]);
          break;
        case 2: {
          const auto made = sim.Reserve(4 * kPage, 0, {}, 0);
          if (made.ok()) mine.ranges.push_back(*made);
          status = made.status();
          break;
        }
        case 3:
          status = sim.FreeRange(mine.ranges[r], 4 * kPage);
          if (status.ok()) mine.ranges.erase(mine.ranges.begin() + static_cast<std::ptrdiff_t>(r));  // may be reserved again
          break;
        case 4:
          status = sim.Map(mine.ranges[r] + at, bytes, 0, mine.handles[h], 0);
          break;
        case 5:
          status = sim.Unmap(mine.ranges[r] + at, bytes);
          break;
        default:
          status = sim.SetAccess(mine.ranges[r] + at, bytes, ReadWrite(0));
          break;
      }
      results[s] = status.driver_result();
      if (s == 0) ++outcomes[static_cast<std::size_t>(status.driver_result() == 0 ? 0 : status.driver_result() == 2 ? 1 : 2)];
    }
    ASSERT_EQ(results[0], results[1]) << "call " << call << " at " << i;
  }
  for (const int count : outcomes) EXPECT_GT(count, 20) << "the sequence should see success, lack of memory and broken rules";
  EXPECT_EQ(sims[0]->BytesInUse(kGpu0), sims[1]->BytesInUse(kGpu0));
}

// ---- one world, many processes ---------------------------------------------------------------------------------------------

std::size_t MembersOf(const SimulatorWorld& world) {
  const SimulatorWorld::Guard guard(world.table());
  world.table().ReapTheDead();
  return static_cast<std::size_t>(std::ranges::count_if(world.table().members, [](const auto& one) { return one.pid != 0; }));
}

TEST_F(World, processes_share_memory_through_descriptors_and_the_account_through_the_world) {
  std::array<int, 2> sockets{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets.data()), 0);
  const pid_t peer = Spawn([&] {
    const auto sim = Make(Options());
    const UniqueFd descriptor = test::ReceiveDescriptor(sockets[1]);
    const auto handle = sim->Import(descriptor);
    const auto address = sim->Reserve(kPage, 0, {}, 0);
    if (!handle.ok() || !address.ok() || !sim->Map(*address, kPage, 0, *handle, 0).ok()) return 1;
    if (!sim->SetAccess(*address, kPage, ReadWrite(1)).ok()) return 2;
    Words(*address)[5] += 1;
    Tell(sockets[1]);
    Listen(sockets[1]);  // the owner has let go
    return sim->BytesInUse(kGpu0) == kPage && Words(*address)[5] == 42 ? 0 : 3;
  });
  const auto sim = Make(Options());
  const Block block = MakeBlock(*sim);
  Words(block.address)[5] = 41;
  {
    const auto descriptor = *sim->Export(block.handle);
    EXPECT_TRUE(test::SendDescriptor(sockets[0], descriptor.get()));
  }
  Listen(sockets[0]);
  EXPECT_EQ(Words(block.address)[5], 42U);
  FreeBlock(*sim, block);
  EXPECT_EQ(sim->BytesInUse(kGpu0), kPage) << "the peer still maps it";
  Tell(sockets[0]);
  EXPECT_EQ(Wait(peer), 0);
  EXPECT_EQ(sim->BytesInUse(kGpu0), 0U);
  close(sockets[0]);
  close(sockets[1]);
}

TEST_F(World, what_only_a_descriptor_in_flight_held_is_counted_again_when_it_arrives) {
  std::array<int, 2> sockets{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets.data()), 0);
  const auto sim = Make(Options());
  const Block block = MakeBlock(*sim);
  Words(block.address)[0] = 11;
  {
    const auto descriptor = *sim->Export(block.handle);
    EXPECT_TRUE(test::SendDescriptor(sockets[0], descriptor.get()));
  }
  FreeBlock(*sim, block);
  EXPECT_EQ(sim->BytesInUse(kGpu0), 0U);
  const auto filler = *sim->Create(kPage, OnDevice(0), 0);  // takes the old place in the table
  const UniqueFd arrived = test::ReceiveDescriptor(sockets[1]);
  const auto one = sim->Import(arrived), two = sim->Import(arrived);
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(sim->BytesInUse(kGpu0), 2 * kPage) << "once the filler, once the memory with its two handles";
  const Address address = *sim->Reserve(kPage, 0, {}, 0);
  ASSERT_TRUE(sim->Map(address, kPage, 0, *one, 0).ok());
  ASSERT_TRUE(sim->SetAccess(address, kPage, ReadWrite(0)).ok());
  EXPECT_EQ(Words(address)[0], 11U);
  EXPECT_TRUE(sim->Release(filler).ok());
  close(sockets[0]);
  close(sockets[1]);
}

TEST_F(World, the_memory_of_a_killed_process_returns) {
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(pipe(pipe_ends.data()), 0);
  const pid_t child = Spawn([&] {
    const auto sim = Make(Options());
    const Block block = MakeBlock(*sim, 60 * kMiB);
    (void)block;
    Tell(pipe_ends[1]);
    pause();
    return 0;
  });
  Listen(pipe_ends[0]);
  const auto sim = Make(Options());
  EXPECT_EQ(sim->BytesInUse(kGpu0), 60 * kMiB);
  EXPECT_RESULT(sim->Create(8 * kMiB, OnDevice(0), 0).status(), cuda::kOutOfMemory);
  kill(child, SIGKILL);
  while (sim->BytesInUse(kGpu0) != 0) usleep(1000);  // dead, though nobody has waited for it yet
  EXPECT_TRUE(sim->Create(8 * kMiB, OnDevice(0), 0).ok());
  EXPECT_EQ(Wait(child), 128 + SIGKILL);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST_F(World, a_process_killed_with_the_lock_leaves_the_world_usable) {
  const auto sim = Make(Options());
  const Block block = MakeBlock(*sim);
  EXPECT_EQ(InChild([&] {
              const auto other = Make(Options());
              (void)*other->Create(4 * kPage, OnDevice(0), 0);
              pthread_mutex_lock(&other->world()->table().mutex);  // like a process killed at that moment
              return raise(SIGKILL);
            }),
            128 + SIGKILL);
  EXPECT_EQ(sim->BytesInUse(kGpu0), kPage);
  EXPECT_EQ(MembersOf(*sim->world()), 1U);
  FreeBlock(*sim, block);
  EXPECT_EQ(sim->BytesInUse(kGpu0), 0U);
}

TEST_F(World, processes_killed_at_any_instant_leave_a_right_account) {
#ifdef AMEM_SANITIZED
  constexpr int kRounds = 3;
#else
  constexpr int kRounds = 30;
#endif
  const auto sim = Make(Options());
  const auto mine = *sim->Create(kPage, OnDevice(0), 0);
  std::mt19937 random(3);
  for (int round = 0; round < kRounds; ++round) {
    const pid_t child = Spawn([&] {
      const auto other = Make(Options());
      for (;;) {
        const auto handle = other->Create(kPage, OnDevice(0), 0);
        if (handle.ok()) (void)other->Release(*handle);
      }
      return 0;
    });
    usleep(std::uniform_int_distribution<unsigned>(500, 8000)(random));
    kill(child, SIGKILL);
    Wait(child);
    ASSERT_EQ(sim->BytesInUse(kGpu0), kPage) << "round " << round;
    ASSERT_EQ(MembersOf(*sim->world()), 1U);
  }
  EXPECT_TRUE(sim->Release(mine).ok());
  EXPECT_EQ(sim->BytesInUse(kGpu0), 0U);
}

TEST_F(World, every_process_must_give_the_same_devices) {
  const auto sim = Make(Options());
  SimulatorOptions other = Options();
  other.devices = 3;
  const auto refused = Simulator::Open(other);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kInvalid);
  EXPECT_NE(refused.status().message().find("2 devices"), std::string::npos) << refused.status().message();
}

TEST_F(World, a_file_that_is_no_world_is_refused) {
  std::FILE* file = std::fopen((directory_ / "world").c_str(), "w");
  std::fputs("hello", file);
  std::fclose(file);
  EXPECT_EQ(Simulator::Open(Options()).status().code(), Code::kCorrupt);
}

TEST_F(World, many_processes_can_make_it_at_once) {
  std::vector<pid_t> children;
  for (int i = 0; i < 8; ++i) {
    children.push_back(Spawn([&] {
      const auto made = Simulator::Open(Options());
      return made.ok() && (*made)->Create(kPage, OnDevice(0), 0).ok() ? 0 : 1;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(Wait(child), 0);
  EXPECT_EQ(Make(Options())->BytesInUse(kGpu0), 0U);
}

TEST_F(World, a_forked_child_cannot_use_it_and_does_not_take_it_away) {
  auto sim = Make(Options());
  const Block block = MakeBlock(*sim);
  EXPECT_EQ(InChild([&] {
              const int result = sim->Create(kPage, OnDevice(0), 0).status().driver_result();
              sim.reset();
              return result;
            }),
            cuda::kNotInitialized);
  EXPECT_EQ(sim->BytesInUse(kGpu0), kPage);
  Words(block.address)[0] = 1;
  FreeBlock(*sim, block);
}

TEST(SimulatedWorld, simulators_of_one_process_share_a_device) {
  const auto world = *SimulatorWorld::InMemory(1, 4 * kPage);
  auto one = Make({.in_memory = world});
  const auto two = Make({.in_memory = world});
  const auto handle = *one->Create(3 * kPage, OnDevice(0), 0);
  EXPECT_RESULT(two->Create(2 * kPage, OnDevice(0), 0).status(), cuda::kOutOfMemory);
  const auto imported = *two->Import(*one->Export(handle));
  one.reset();
  EXPECT_EQ(two->BytesInUse(kGpu0), 3 * kPage);
  EXPECT_TRUE(two->Release(imported).ok());
  EXPECT_EQ(two->BytesInUse(kGpu0), 0U);
}

TEST(SimulatedWorld, short_lives_are_quick) {
#ifdef AMEM_SANITIZED
  GTEST_SKIP() << "measures time";
#endif
  const auto processor = [] {
    timespec time{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  };
  const auto begin = processor();
  constexpr int kLives = 4000;
  for (int i = 0; i < kLives; ++i) {
    const auto sim = Make({.physical = false});
    for (int n = 0; n < 3; ++n) FreeBlock(*sim, MakeBlock(*sim));
  }
  const auto each = (processor() - begin) / kLives;
  RecordProperty("ns_per_life", std::to_string(std::chrono::nanoseconds(each).count()));
  EXPECT_LT(each, std::chrono::microseconds(1000))
      << "400 000 of them would take " << (each * 400000).count() / 1000000000 << " s";
}

}  // namespace
}  // namespace amem
