// One contract, every implementation of the driver seam: the simulator, CudaDriver on the stand-in for libcuda, and - with
// AMEM_TEST_REAL_DRIVER=1 on a host with a GPU - CudaDriver on the real one, from which the simulator's rules were taken.
#include "replay/driver/cuda/cuda_driver.h"

#include <cuda.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "replay/driver/cuda/nonzero_kernels.h"
#include "replay/driver/cuda/nvml.h"
#include "replay/driver/mapped_region.h"
#include "replay/driver/simulator/simulator.h"
#include "tests/stand_ins/cuda/control.h"

namespace amem {
namespace {

constexpr DeviceOrdinal kGpu{0};
constexpr Bytes kSimulatedCapacity = Bytes{256} << 20;

enum class Kind : std::uint8_t { kSimulator, kFake, kReal };

void* FakeLibrary() {
  static void* const library = [] {
    setenv("AMEM_SIM_DEVICES", "2", 1);
    setenv("AMEM_SIM_CAPACITY_MIB", std::to_string(kSimulatedCapacity >> 20).c_str(), 1);
    void* opened = dlopen(AMEM_STAND_IN_CUDA, RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) ADD_FAILURE() << dlerror();
    return opened;
  }();
  return library;
}
Result<std::unique_ptr<CudaDriver>> LoadFake() {
  return CudaDriver::Load([](const char* name) { return dlsym(FakeLibrary(), name); });
}
void* RealLibrary() {
  static void* const library =
      std::getenv("AMEM_TEST_REAL_DRIVER") != nullptr ? dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) : nullptr;
  return library;
}

AllocationProperties OnDevice(std::int32_t device) { return {.handle_types = 1, .location = {LocationType::kDevice, device}}; }
std::array<AccessDescriptor, 1> Access(std::uint32_t flags = 3, std::int32_t device = 0) {
  return {AccessDescriptor{{LocationType::kDevice, device}, flags}};
}

#define EXPECT_RESULT(expr, result)                                             \
  do {                                                                          \
    const Status seen = (expr);                                                 \
    EXPECT_EQ(seen.driver_result(), result) << #expr << ": " << seen.message(); \
    EXPECT_FALSE(seen.ok()) << #expr;                                           \
  } while (false)
#define ASSERT_OK(expr)                                        \
  do {                                                         \
    const Status seen = (expr);                                \
    ASSERT_TRUE(seen.ok()) << #expr << ": " << seen.message(); \
  } while (false)

struct Block {
  DriverHandle handle;
  Address address;
  Bytes bytes = 0;
};

class Contract : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    switch (GetParam()) {
      case Kind::kSimulator: {
        auto made = Simulator::Open({.devices = 2, .capacity_per_device = kSimulatedCapacity});
        ASSERT_TRUE(made.ok());
        driver_ = *std::move(made);
        break;
      }
      case Kind::kFake: {
        auto made = LoadFake();
        ASSERT_TRUE(made.ok()) << made.status().message();
        driver_ = *std::move(made);
        break;
      }
      case Kind::kReal: {
        if (RealLibrary() == nullptr) GTEST_SKIP() << "needs AMEM_TEST_REAL_DRIVER=1 and a GPU";
        auto made = CudaDriver::LoadSystem();
        ASSERT_TRUE(made.ok()) << made.status().message();
        driver_ = *std::move(made);
        ASSERT_TRUE(driver_->Memory(kGpu).ok()) << driver_->Memory(kGpu).status().message();
        break;
      }
    }
    const auto granularity = driver_->Granularity(OnDevice(0));
    ASSERT_TRUE(granularity.ok()) << granularity.status().message();
    page_ = *granularity;
    free_before_ = driver_->Memory(kGpu)->free;
  }
  void TearDown() override {
    if (!driver_ || page_ == 0 || IsSkipped()) return;
    for (const Block& block : blocks_) FreeBlock(block);
    // The driver itself keeps some memory for its tables.
    const Bytes kept = GetParam() == Kind::kReal ? Bytes{32} << 20 : 0;
    EXPECT_LE(free_before_, driver_->Memory(kGpu)->free + kept) << "the test kept memory";
  }

  Block MakeBlock(Bytes pages = 1) {
    Block block{.bytes = pages * page_};
    const auto handle = driver_->Create(block.bytes, OnDevice(0), 0);
    EXPECT_TRUE(handle.ok()) << handle.status().message();
    if (handle.ok()) block.handle = *handle;
    const auto address = driver_->Reserve(block.bytes, 0, {}, 0);
    EXPECT_TRUE(address.ok()) << address.status().message();
    if (address.ok()) block.address = *address;
    const Status mapped = driver_->Map(block.address, block.bytes, 0, block.handle, 0);
    EXPECT_TRUE(mapped.ok()) << mapped.message();
    const Status access = driver_->SetAccess(block.address, block.bytes, Access());
    EXPECT_TRUE(access.ok()) << access.message();
    return block;
  }
  void FreeBlock(const Block& block) {
    const Status unmapped = driver_->Unmap(block.address, block.bytes);
    EXPECT_TRUE(unmapped.ok()) << unmapped.message();
    EXPECT_TRUE(driver_->Release(block.handle).ok());
    EXPECT_TRUE(driver_->FreeRange(block.address, block.bytes).ok());
  }
  // Freed when the test ends.
  Block Keep(Bytes pages = 1) {
    blocks_.push_back(MakeBlock(pages));
    return blocks_.back();
  }
  std::unique_ptr<PinnedBuffer> Pinned(Bytes bytes) {
    auto made = driver_->AllocatePinned(bytes);
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (made.ok()) std::memset((*made)->data(), 0, bytes);
    return made.ok() ? *std::move(made) : nullptr;
  }
  void Write(Address address, std::uint64_t value) {
    const auto pinned = Pinned(8);
    std::memcpy(pinned->data(), &value, 8);
    const Status queued = driver_->CopyToDevice(kGpu, address, pinned->data(), 8);
    EXPECT_TRUE(queued.ok()) << queued.message();
    EXPECT_TRUE(driver_->FinishCopies(kGpu, In(std::chrono::minutes(1))).ok());
  }
  std::uint64_t Read(Address address) {
    const auto pinned = Pinned(8);
    const Status queued = driver_->CopyToHost(kGpu, pinned->data(), address, 8);
    EXPECT_TRUE(queued.ok()) << queued.message();
    EXPECT_TRUE(driver_->FinishCopies(kGpu, In(std::chrono::minutes(1))).ok());
    std::uint64_t value = 0;
    std::memcpy(&value, pinned->data(), 8);
    return value;
  }
  [[nodiscard]] Bytes Used() {
    const Bytes free = driver_->Memory(kGpu)->free;
    return free < free_before_ ? free_before_ - free : 0;
  }

  std::unique_ptr<Driver> driver_;
  Bytes page_ = 0, free_before_ = 0;
  std::vector<Block> blocks_;
};

INSTANTIATE_TEST_SUITE_P(Of, Contract, testing::Values(Kind::kSimulator, Kind::kFake, Kind::kReal), [](const auto& instance) {
  return std::string(instance.param == Kind::kSimulator ? "simulator"
                     : instance.param == Kind::kFake    ? "fake_libcuda"
                                                        : "real_driver");
});

TEST_P(Contract, what_is_copied_in_comes_back) {
  const Block block = Keep(2);
  const auto pinned = Pinned(block.bytes);
  for (Bytes i = 0; i < block.bytes; ++i) pinned->data()[i] = static_cast<std::byte>(i * 31 + i / 4096);
  ASSERT_OK(driver_->CopyToDevice(kGpu, block.address, pinned->data(), block.bytes));
  ASSERT_OK(driver_->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  ASSERT_OK(driver_->Clear(kGpu, block.address + 100, 1000));
  const auto back = Pinned(block.bytes);
  ASSERT_OK(driver_->CopyToHost(kGpu, back->data(), block.address, block.bytes));
  ASSERT_OK(driver_->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  std::memset(pinned->data() + 100, 0, 1000);
  EXPECT_EQ(std::memcmp(pinned->data(), back->data(), block.bytes), 0);
}

TEST_P(Contract, contents_survive_being_unmapped) {
  const Block block = Keep();
  Write(block.address, 42);
  ASSERT_OK(driver_->Unmap(block.address, block.bytes));
  ASSERT_OK(driver_->Map(block.address, block.bytes, 0, block.handle, 0));
  ASSERT_OK(driver_->SetAccess(block.address, block.bytes, Access()));
  EXPECT_EQ(Read(block.address), 42U);
}

TEST_P(Contract, one_handle_mapped_twice_is_the_same_memory) {
  const Block block = Keep();
  const auto other = driver_->Reserve(page_, 0, {}, 0);
  ASSERT_TRUE(other.ok());
  ASSERT_OK(driver_->Map(*other, page_, 0, block.handle, 0));
  ASSERT_OK(driver_->SetAccess(*other, page_, Access()));
  Write(*other, 7);
  EXPECT_EQ(Read(block.address), 7U);
  ASSERT_OK(driver_->Unmap(*other, page_));
  ASSERT_OK(driver_->FreeRange(*other, page_));
}

TEST_P(Contract, a_handle_is_mapped_whole) {
  const auto handle = driver_->Create(4 * page_, OnDevice(0), 0);
  const auto range = driver_->Reserve(8 * page_, 0, {}, 0);
  ASSERT_TRUE(handle.ok() && range.ok());
  EXPECT_RESULT(driver_->Map(*range, page_, 0, *handle, 0), cuda::kNotSupported);
  EXPECT_RESULT(driver_->Map(*range, page_, page_, *handle, 0), cuda::kNotSupported);
  EXPECT_RESULT(driver_->Map(*range, 5 * page_, 0, *handle, 0), cuda::kNotSupported);
  EXPECT_RESULT(driver_->Map(*range, 4 * page_, page_, *handle, 0), cuda::kNotSupported);
  EXPECT_RESULT(driver_->Map(*range, 4 * page_, 0, *handle, 1), cuda::kInvalidValue);
  ASSERT_OK(driver_->FreeRange(*range, 8 * page_));
  ASSERT_OK(driver_->Release(*handle));
}

TEST_P(Contract, a_mapping_is_not_split) {
  const Block block = Keep(4);
  EXPECT_RESULT(driver_->Unmap(block.address, page_), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->Unmap(block.address + page_, 3 * page_), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->SetAccess(block.address, page_, Access()), cuda::kInvalidValue);
}

TEST_P(Contract, neighbouring_mappings_change_together) {
  const auto range = driver_->Reserve(3 * page_, 0, {}, 0);
  ASSERT_TRUE(range.ok());
  std::vector<DriverHandle> handles;
  for (Bytes i = 0; i < 3; ++i) {
    const auto handle = driver_->Create(page_, OnDevice(0), 0);
    ASSERT_TRUE(handle.ok());
    handles.push_back(*handle);
    ASSERT_OK(driver_->Map(*range + i * page_, page_, 0, *handle, 0));
  }
  ASSERT_OK(driver_->SetAccess(*range, 3 * page_, Access()));
  ASSERT_OK(driver_->Clear(kGpu, *range + page_ / 2, 2 * page_));
  ASSERT_OK(driver_->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  ASSERT_OK(driver_->Unmap(*range + page_, page_));
  ASSERT_OK(driver_->SetAccess(*range, 3 * page_, Access()));  // a hole is passed over
  EXPECT_RESULT(driver_->SetAccess(*range, 2 * page_, Access()), cuda::kInvalidValue);
  ASSERT_OK(driver_->Unmap(*range, 3 * page_));
  ASSERT_OK(driver_->Map(*range + page_, page_, 0, handles[1], 0));
  ASSERT_OK(driver_->Unmap(*range, 3 * page_));
  ASSERT_OK(driver_->Unmap(*range, 3 * page_));  // nothing is left
  for (const DriverHandle handle : handles) ASSERT_OK(driver_->Release(handle));
  ASSERT_OK(driver_->FreeRange(*range, 3 * page_));
}

TEST_P(Contract, nothing_is_mapped_over_another) {
  const Block block = Keep();
  const auto handle = driver_->Create(page_, OnDevice(0), 0);
  ASSERT_TRUE(handle.ok());
  EXPECT_RESULT(driver_->Map(block.address, page_, 0, *handle, 0), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->Map(block.address + 64, page_, 0, *handle, 0), cuda::kInvalidValue);
  EXPECT_EQ(Read(block.address), Read(block.address));
  ASSERT_OK(driver_->Release(*handle));
}

TEST_P(Contract, a_range_with_something_mapped_in_it_is_not_freed) {
  const Block block = Keep();
  EXPECT_RESULT(driver_->FreeRange(block.address, block.bytes), cuda::kInvalidValue);
  Write(block.address, 1);
}

TEST_P(Contract, what_is_not_there_is_refused) {
  const auto range = driver_->Reserve(2 * page_, 0, {}, 0);
  ASSERT_TRUE(range.ok());
  EXPECT_RESULT(driver_->SetAccess(*range, page_, Access()), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->Unmap(Address{page_}, page_), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->FreeRange(*range + page_, page_), cuda::kInvalidValue);
  ASSERT_OK(driver_->FreeRange(*range, 2 * page_));
  EXPECT_RESULT(driver_->FreeRange(*range, 2 * page_), cuda::kInvalidValue);
  const int devices = *driver_->DeviceCount();
  EXPECT_RESULT(driver_->Create(page_, OnDevice(devices), 0).status(), cuda::kInvalidDevice);
  EXPECT_RESULT(driver_->Memory(DeviceOrdinal{devices}).status(), cuda::kInvalidDevice);
  EXPECT_RESULT(driver_->DeviceUuid(DeviceOrdinal{devices}).status(), cuda::kInvalidDevice);
}

TEST_P(Contract, a_released_handle_is_nobodys) {
  const auto handle = driver_->Create(page_, OnDevice(0), 0);
  const auto range = driver_->Reserve(page_, 0, {}, 0);
  ASSERT_TRUE(handle.ok() && range.ok());
  ASSERT_OK(driver_->Release(*handle));
  EXPECT_RESULT(driver_->Release(*handle), cuda::kInvalidValue);
  if (GetParam() != Kind::kReal) {  // which crashes
    EXPECT_RESULT(driver_->Map(*range, page_, 0, *handle, 0), cuda::kInvalidValue);
    EXPECT_RESULT(driver_->Export(*handle).status(), cuda::kInvalidValue);
  }
  ASSERT_OK(driver_->FreeRange(*range, page_));
}

TEST_P(Contract, sizes_and_flags_are_checked) {
  EXPECT_RESULT(driver_->Create(page_ + 4096, OnDevice(0), 0).status(), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->Create(0, OnDevice(0), 0).status(), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->Create(page_, OnDevice(0), 1).status(), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->Reserve(0, 0, {}, 0).status(), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->Reserve(page_, 3 * page_, {}, 0).status(), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->Reserve(page_, 0, {}, 1).status(), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->Reserve(page_, 0, Address{page_ * 1000 + 4096}, 0).status(), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->Create(page_, {.handle_types = 1, .location = {}}, 0).status(), cuda::kInvalidValue);
  EXPECT_RESULT(driver_->Create(page_, {.type = 77, .handle_types = 1, .location = {LocationType::kDevice, 0}}, 0).status(),
                cuda::kInvalidValue);
}

TEST_P(Contract, a_reserve_smaller_than_the_granularity_is_refused) {
  EXPECT_RESULT(driver_->Reserve(4096, 0, {}, 0).status(), cuda::kInvalidValue);
}

TEST_P(Contract, released_memory_stays_while_it_is_mapped) {
  const Block block = MakeBlock(16);
  ASSERT_OK(driver_->Release(block.handle));
  Write(block.address, 9);
  EXPECT_EQ(Read(block.address), 9U);
  EXPECT_GE(Used(), block.bytes);
  ASSERT_OK(driver_->Unmap(block.address, block.bytes));
  EXPECT_LT(Used(), block.bytes);
  ASSERT_OK(driver_->FreeRange(block.address, block.bytes));
}

TEST_P(Contract, a_descriptor_holds_the_memory_and_leads_back_to_it) {
  const Block block = MakeBlock(16);
  Write(block.address, 77);
  auto descriptor = driver_->Export(block.handle);
  ASSERT_TRUE(descriptor.ok()) << descriptor.status().message();
  EXPECT_NE(fcntl(descriptor->get(), F_GETFD) & FD_CLOEXEC, 0);
  FreeBlock(block);
  EXPECT_GE(Used(), block.bytes) << "the descriptor is open";
  const auto one = driver_->Import(*descriptor), two = driver_->Import(*descriptor);
  ASSERT_TRUE(one.ok() && two.ok()) << one.status().message();
  descriptor->Reset();
  ASSERT_OK(driver_->Release(*two));
  EXPECT_GE(Used(), block.bytes) << "an import is there";
  const auto range = driver_->Reserve(block.bytes, 0, {}, 0);
  ASSERT_TRUE(range.ok());
  ASSERT_OK(driver_->Map(*range, block.bytes, 0, *one, 0));
  ASSERT_OK(driver_->SetAccess(*range, block.bytes, Access()));
  EXPECT_EQ(Read(*range), 77U);
  ASSERT_OK(driver_->Unmap(*range, block.bytes));
  ASSERT_OK(driver_->Release(*one));
  ASSERT_OK(driver_->FreeRange(*range, block.bytes));
  EXPECT_LT(Used(), block.bytes);
}

TEST_P(Contract, what_was_imported_cannot_be_exported_again) {
  const Block block = Keep();
  const auto descriptor = driver_->Export(block.handle);
  ASSERT_TRUE(descriptor.ok());
  const auto imported = driver_->Import(*descriptor);
  ASSERT_TRUE(imported.ok());
  EXPECT_RESULT(driver_->Export(*imported).status(), cuda::kInvalidValue);
  ASSERT_OK(driver_->Release(*imported));
}

TEST_P(Contract, a_foreign_descriptor_is_refused) {
  const UniqueFd memfd(memfd_create("not-gpu-memory", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(memfd.get(), static_cast<off_t>(page_)), 0);
  EXPECT_RESULT(driver_->Import(memfd).status(), cuda::kUnknown);
  EXPECT_RESULT(driver_->Import(UniqueFd{}).status(), cuda::kUnknown);
}

TEST_P(Contract, what_was_not_made_for_sharing_is_not_exported) {
  AllocationProperties properties = OnDevice(0);
  properties.handle_types = 0;
  const auto handle = driver_->Create(page_, properties, 0);
  ASSERT_TRUE(handle.ok());
  EXPECT_RESULT(driver_->Export(*handle).status(), cuda::kInvalidValue);
  ASSERT_OK(driver_->Release(*handle));
}

TEST_P(Contract, more_than_the_device_has_is_out_of_memory) {
  const Bytes total = driver_->Memory(kGpu)->total;
  const auto refused = driver_->Create((total / page_ + 1) * page_, OnDevice(0), 0);
  EXPECT_RESULT(refused.status(), cuda::kOutOfMemory);
  EXPECT_EQ(refused.status().code(), Code::kOutOfMemory);
}

TEST_P(Contract, a_range_is_aligned_as_asked_and_can_be_had_again) {
  const auto aligned = driver_->Reserve(page_, 64 * page_, {}, 0);
  ASSERT_TRUE(aligned.ok()) << aligned.status().message();
  EXPECT_EQ(aligned->value % (64 * page_), 0U);
  ASSERT_OK(driver_->FreeRange(*aligned, page_));
  const auto again = driver_->Reserve(page_, 0, *aligned, 0);
  ASSERT_TRUE(again.ok());
  if (GetParam() == Kind::kFake) {  // the driver of one H200 host does so too, that of another does not
    EXPECT_EQ(*again, *aligned);
  }
  const auto elsewhere = driver_->Reserve(page_, 0, *again, 0);
  ASSERT_TRUE(elsewhere.ok()) << elsewhere.status().message();
  EXPECT_NE(*elsewhere, *again);
  ASSERT_OK(driver_->FreeRange(*again, page_));
  ASSERT_OK(driver_->FreeRange(*elsewhere, page_));
}

TEST_P(Contract, neighbouring_ranges_count_as_one_for_a_mapping) {
  const auto both = driver_->Reserve(2 * page_, 0, {}, 0);
  ASSERT_TRUE(both.ok());
  ASSERT_OK(driver_->FreeRange(*both, 2 * page_));
  const auto first = driver_->Reserve(page_, 0, *both, 0), second = driver_->Reserve(page_, 0, *both + page_, 0);
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_EQ(*second, *first + page_);
  const auto handle = driver_->Create(2 * page_, OnDevice(0), 0);
  ASSERT_TRUE(handle.ok());
  ASSERT_OK(driver_->Map(*first, 2 * page_, 0, *handle, 0));
  ASSERT_OK(driver_->Unmap(*first, 2 * page_));
  ASSERT_OK(driver_->Release(*handle));
  ASSERT_OK(driver_->FreeRange(*first, page_));
  ASSERT_OK(driver_->FreeRange(*second, page_));
}

TEST_P(Contract, access_is_for_devices_that_are_there) {
  const Block block = Keep();
  const auto set = [&](LocationType type, std::int32_t id, std::uint32_t flags) {
    const std::array one = {AccessDescriptor{{type, id}, flags}};
    return driver_->SetAccess(block.address, block.bytes, one);
  };
  EXPECT_RESULT(set(LocationType::kDevice, 0, 2), cuda::kInvalidValue);
  EXPECT_RESULT(set(LocationType::kDevice, 99, 3), cuda::kInvalidValue);
  EXPECT_RESULT(set(LocationType::kInvalid, 0, 3), cuda::kInvalidValue);
  EXPECT_RESULT(set(LocationType::kHost, 0, 3), cuda::kNotSupported);
  EXPECT_RESULT(set(LocationType::kHostNuma, 0, 3), cuda::kNotSupported);
  EXPECT_RESULT(driver_->SetAccess(block.address, block.bytes, {}), cuda::kInvalidValue);
  ASSERT_OK(set(LocationType::kDevice, 0, 1));
  ASSERT_OK(set(LocationType::kDevice, 0, 0));
  const auto pinned = Pinned(8);
  if (GetParam() != Kind::kReal) {
    EXPECT_RESULT(driver_->CopyToHost(kGpu, pinned->data(), block.address, 8), cuda::kInvalidValue);
  }
}

TEST_P(Contract, host_memory_is_not_the_devices) {
  const AllocationProperties properties{.handle_types = 1, .location = {LocationType::kHostNuma, 0}};
  const auto handle = driver_->Create(16 * page_, properties, 0);
  ASSERT_TRUE(handle.ok()) << handle.status().message();
  EXPECT_LT(Used(), 16 * page_);
  ASSERT_OK(driver_->Release(*handle));
}

TEST_P(Contract, a_failure_has_the_call_the_arguments_and_the_drivers_words) {
  const Status status = driver_->Unmap(Address{page_ * 4}, page_);
  EXPECT_EQ(status.code(), Code::kDriver);
  for (const std::string& part : {std::string("cuMemUnmap"), Hex(page_ * 4), std::to_string(page_),
                                  std::string("CUDA_ERROR_INVALID_VALUE"), std::string("invalid argument")}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << part << " is missing in: " << status.message();
  }
}

TEST_P(Contract, devices_have_uuids_as_nvidia_smi_prints_them) {
  const auto count = driver_->DeviceCount();
  ASSERT_TRUE(count.ok());
  ASSERT_GE(*count, 1);
  const auto uuid = driver_->DeviceUuid(kGpu);
  ASSERT_TRUE(uuid.ok());
  EXPECT_EQ(uuid->size(), 40U);
  EXPECT_TRUE(uuid->starts_with("GPU-")) << *uuid;
  for (const std::size_t dash : {12U, 17U, 22U, 27U}) EXPECT_EQ((*uuid)[dash], '-') << *uuid;
  EXPECT_FALSE(driver_->Version().empty());
  EXPECT_TRUE(driver_->Synchronize(kGpu, In(std::chrono::minutes(1))).ok());
}

TEST_P(Contract, a_copy_to_what_is_not_mapped_fails) {
  const Block block = MakeBlock();
  FreeBlock(block);
  if (GetParam() == Kind::kReal) GTEST_SKIP() << "would leave the device's context unusable";
  const auto pinned = Pinned(8);
  EXPECT_RESULT(driver_->CopyToHost(kGpu, pinned->data(), block.address, 8), cuda::kInvalidValue);
}

TEST_P(Contract, lanes_copy_look_and_wait_apart_from_the_driver) {
  const Block block = Keep(2);
  auto opened = driver_->OpenLane();
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const std::unique_ptr<Copier> lane = *std::move(opened);
  auto pattern = Pinned(page_), back = Pinned(page_);
  std::memset(pattern->data(), 0x5a, page_);
  std::memset(back->data(), 0, page_);
  ASSERT_OK(lane->Clear(kGpu, block.address, block.bytes));
  ASSERT_OK(lane->CopyToDevice(kGpu, block.address + page_, pattern->data(), page_));
  ASSERT_OK(lane->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  const Extent all{block.address, block.bytes};
  const auto found = lane->FindNonZero(kGpu, std::span(&all, 1), nullptr, In(std::chrono::minutes(1)));
  ASSERT_TRUE(found.ok()) << found.status().message();
  if (found->unscanned.empty()) {
    for (Bytes at = 0; at < block.bytes; at += kUnitBytes)
      EXPECT_EQ(found->pages[at / kUnitBytes], at >= page_ && at < 2 * page_ ? ~0U : 0U) << at;
  }
  const auto moment = lane->MomentOf(kGpu, nullptr);
  ASSERT_TRUE(moment.ok()) << moment.status().message();
  ASSERT_OK(lane->Follow(kGpu, **moment));
  ASSERT_OK(lane->CopyToHost(kGpu, back->data(), block.address + page_, page_));
  const auto mark = lane->Mark(kGpu);
  ASSERT_TRUE(mark.ok());
  ASSERT_OK(lane->Await(kGpu, *mark, In(std::chrono::minutes(1))));
  ASSERT_OK(lane->MakeStreamWaitForCopies(kGpu, nullptr, In(std::chrono::minutes(1))));
  ASSERT_OK(driver_->AwaitMoment(kGpu, **moment, In(std::chrono::minutes(1))));
  ASSERT_OK(lane->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  EXPECT_EQ(std::memcmp(pattern->data(), back->data(), page_), 0);
}

// The host memory of a session serves all of its lanes.
TEST_P(Contract, a_lane_copies_to_and_from_memory_that_another_lane_pinned) {
  const Block block = Keep(2);
  const auto pins = driver_->OpenLane(), copies = driver_->OpenLane();
  ASSERT_TRUE(pins.ok() && copies.ok());
  auto pinned = (*pins)->AllocatePinned(block.bytes);
  ASSERT_TRUE(pinned.ok()) << pinned.status().message();
  std::memset((*pinned)->data(), 0x5a, block.bytes);
  const Extent all{block.address, block.bytes, (*pinned)->data()};
  ASSERT_OK((*copies)->CopyToDevice(kGpu, block.address, (*pinned)->data(), page_));
  ASSERT_OK((*copies)->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  ASSERT_OK((*copies)->Scatter(kGpu, std::span(&all, 1)));
  ASSERT_OK((*copies)->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  std::memset((*pinned)->data(), 0, block.bytes);
  ASSERT_OK((*copies)->Gather(kGpu, std::span(&all, 1)));
  ASSERT_OK((*copies)->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  const auto is_back = [&] {
    return std::all_of((*pinned)->data(), (*pinned)->data() + page_, [](std::byte b) { return b == std::byte{0x5a}; });
  };
  EXPECT_TRUE(is_back());
  std::memset((*pinned)->data(), 0, block.bytes);
  ASSERT_OK((*copies)->CopyToHost(kGpu, (*pinned)->data(), block.address + page_, page_));
  ASSERT_OK((*copies)->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  EXPECT_TRUE(is_back());
}

TEST_P(Contract, pinned_memory_may_outlive_the_driver) {
  const auto pinned = Pinned(4096);
  driver_.reset();
  pinned->data()[4095] = std::byte{1};
  EXPECT_EQ(pinned->size(), 4096U);
}

TEST_P(Contract, threads_do_not_disturb_each_other) {
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < 20; ++i) {
        const Block block = MakeBlock();
        Write(block.address, t * 1000 + i);
        EXPECT_EQ(Read(block.address), t * 1000 + i);
        FreeBlock(block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- CudaDriver beside the program's own use of CUDA ------------------------------------------------------------------------

class BesideCuda : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    library_ = GetParam() == Kind::kFake ? FakeLibrary() : RealLibrary();
    if (library_ == nullptr) GTEST_SKIP() << "needs AMEM_TEST_REAL_DRIVER=1 and a GPU";
    auto made = CudaDriver::Load([this](const char* name) { return dlsym(library_, name); });
    ASSERT_TRUE(made.ok()) << made.status().message();
    driver_ = *std::move(made);
    ASSERT_EQ(Find<decltype(&cuInit)>("cuInit")(0), CUDA_SUCCESS);
    ASSERT_EQ(Find<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain")(&context_, 0), CUDA_SUCCESS);
    ASSERT_EQ(Find<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent")(context_), CUDA_SUCCESS);
  }
  template <class F>
  F Find(const char* name) {
    const F found = reinterpret_cast<F>(dlsym(library_, name));
    EXPECT_NE(found, nullptr) << name;
    return found;
  }
  CUstream StartCapture(unsigned flags, CUstreamCaptureMode mode) {
    CUstream stream = nullptr;
    EXPECT_EQ(Find<decltype(&cuStreamCreate)>("cuStreamCreate")(&stream, flags), CUDA_SUCCESS);
    EXPECT_EQ(Find<decltype(&cuStreamBeginCapture)>("cuStreamBeginCapture_v2")(stream, mode), CUDA_SUCCESS);
    return stream;
  }
  CUresult EndCapture(CUstream stream) {
    CUgraph graph = nullptr;
    const CUresult ended = Find<decltype(&cuStreamEndCapture)>("cuStreamEndCapture")(stream, &graph);
    EXPECT_EQ(Find<decltype(&cuStreamDestroy)>("cuStreamDestroy_v2")(stream), CUDA_SUCCESS);
    return ended;
  }

  void* library_ = nullptr;
  CUcontext context_ = nullptr;
  std::unique_ptr<CudaDriver> driver_;
};

INSTANTIATE_TEST_SUITE_P(On, BesideCuda, testing::Values(Kind::kFake, Kind::kReal), [](const auto& instance) {
  return std::string(instance.param == Kind::kFake ? "fake_libcuda" : "real_driver");
});

TEST_P(BesideCuda, the_current_context_is_left_alone) {
  ASSERT_TRUE(driver_->Memory(kGpu).ok());
  ASSERT_TRUE(driver_->AllocatePinned(4096).ok());
  CUcontext current = nullptr;
  ASSERT_EQ(Find<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent")(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, context_);
  std::thread([&] {  // a thread without any
    EXPECT_TRUE(driver_->Memory(kGpu).ok());
    EXPECT_TRUE(driver_->Synchronize(kGpu, In(std::chrono::minutes(1))).ok());
    CUcontext none = context_;
    EXPECT_EQ(Find<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent")(&none), CUDA_SUCCESS);
    EXPECT_EQ(none, nullptr);
  })
      .join();
}

TEST_P(BesideCuda, page_locked_memory_outlives_the_context_that_was_current_when_it_was_made) {
  CUcontext own = nullptr;
  ASSERT_EQ((Find<CUresult (*)(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&own, 0, 0)), CUDA_SUCCESS);
  const auto lane = driver_->OpenLane();
  std::vector<std::unique_ptr<PinnedBuffer>> buffers;
  for (const Bytes bytes : {Bytes{4096}, Bytes{4} << 20})  // the driver's pages, and registered ones
    for (Copier* copier : {static_cast<Copier*>(driver_.get()), lane->get()}) {
      auto made = copier->AllocatePinned(bytes);
      ASSERT_TRUE(made.ok()) << made.status().message();
      buffers.push_back(*std::move(made));
    }
  if (GetParam() == Kind::kFake) {
    ASSERT_EQ(Find<decltype(&stand_in_cuda_pinned)>("stand_in_cuda_pinned")(own), 0U) << "it would go with that context";
  }
  ASSERT_EQ(Find<CUresult (*)(CUcontext)>("cuCtxDestroy_v2")(own), CUDA_SUCCESS);
  for (const auto& buffer : buffers) std::memset(buffer->data(), 0x5a, buffer->size());
}

// With the context goes what was queued there, and the event that tells of it.
TEST_P(BesideCuda, a_moment_of_a_stream_whose_context_is_gone_is_over) {
  CUcontext own = nullptr;
  ASSERT_EQ((Find<CUresult (*)(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&own, 0, 0)), CUDA_SUCCESS);
  CUstream stream = nullptr;
  ASSERT_EQ(Find<decltype(&cuStreamCreate)>("cuStreamCreate")(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  auto moment = driver_->MomentOf(kGpu, stream);
  ASSERT_TRUE(moment.ok()) << moment.status().message();
  ASSERT_OK(driver_->AwaitMoment(kGpu, **moment, In(std::chrono::minutes(1))));
  ASSERT_EQ(Find<CUresult (*)(CUcontext)>("cuCtxDestroy_v2")(own), CUDA_SUCCESS);
  ASSERT_OK(driver_->AwaitMoment(kGpu, **moment, In(std::chrono::minutes(1))));
  ASSERT_OK(driver_->Follow(kGpu, **moment));
  ASSERT_OK(driver_->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  moment->reset();
}

// Mappings in a millisecond that this thread makes and removes, until `over`.
double MapsInMs(const std::function<bool()>& over) {
  const auto began = std::chrono::steady_clock::now();
  std::size_t count = 0;
  for (; !over(); ++count) {
    void* const some = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(some, MAP_FAILED);
    munmap(some, 4096);
  }
  return static_cast<double>(count) /
         std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
}

// Pages are provided while the program starts up, which maps libraries and memory all the time.
TEST_P(BesideCuda, the_program_can_map_memory_while_pages_are_populated) {
  utsname system{};
  int major = 0, minor = 0;
  ASSERT_EQ(uname(&system), 0);
  ASSERT_EQ(std::sscanf(system.release, "%d.%d", &major, &minor), 2) << system.release;
  if (major < 6 || (major == 6 && minor < 4)) GTEST_SKIP() << "Linux " << system.release << " has no lock of a single mapping";
  double quiet = 0, beside = 0;
  for (int tries = 0; tries < 5 && beside * 20 <= quiet; ++tries) {  // others use this machine, too
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    quiet = MapsInMs([&] { return std::chrono::steady_clock::now() >= end; });
    std::atomic<bool> done = false;
    std::thread populating([&] {
      EXPECT_NE(driver_->Populate(Bytes{256} << 20), nullptr);
      done = true;
    });
    beside = MapsInMs([&] { return done.load(); });
    populating.join();
  }
  EXPECT_GT(beside * 20, quiet);
}

TEST_P(BesideCuda, a_capture_survives_every_call_but_synchronize) {
  const CUstream stream = StartCapture(CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_GLOBAL);
  const auto work = [&] {  // with a driver object of its own, so that context and stream are made during the capture
    auto fresh = CudaDriver::Load([this](const char* name) { return dlsym(library_, name); });
    ASSERT_TRUE(fresh.ok());
    Driver& driver = **fresh;
    const Bytes page = *driver.Granularity(OnDevice(0));
    const auto handle = driver.Create(page, OnDevice(0), 0);
    const auto range = driver.Reserve(page, 0, {}, 0);
    ASSERT_TRUE(handle.ok() && range.ok());
    ASSERT_OK(driver.Map(*range, page, 0, *handle, 0));
    ASSERT_OK(driver.SetAccess(*range, page, Access()));
    auto pinned = driver.AllocatePinned(page);
    ASSERT_TRUE(pinned.ok()) << pinned.status().message();
    ASSERT_OK(driver.Clear(kGpu, *range, page));
    ASSERT_OK(driver.CopyToDevice(kGpu, *range, (*pinned)->data(), page));
    ASSERT_OK(driver.CopyToHost(kGpu, (*pinned)->data(), *range, page));
    ASSERT_OK(driver.FinishCopies(kGpu, In(std::chrono::minutes(1))));
    ASSERT_TRUE(driver.Memory(kGpu).ok());
    const auto descriptor = driver.Export(*handle);
    ASSERT_TRUE(descriptor.ok());
    ASSERT_OK(driver.Release(*driver.Import(*descriptor)));
    pinned->reset();
    ASSERT_OK(driver.Unmap(*range, page));
    ASSERT_OK(driver.Release(*handle));
    ASSERT_OK(driver.FreeRange(*range, page));
  };
  work();                    // from the thread that captures
  std::thread(work).join();  // and from another
  EXPECT_EQ(EndCapture(stream), CUDA_SUCCESS);
}

TEST_P(BesideCuda, synchronize_is_refused_during_a_capture_and_spares_one_on_a_blocking_stream) {
  const CUstream stream = StartCapture(CU_STREAM_DEFAULT, CU_STREAM_CAPTURE_MODE_GLOBAL);
  const Status status = driver_->Synchronize(kGpu, In(std::chrono::minutes(1)));
  EXPECT_EQ(status.code(), Code::kRefused) << status.message();
  EXPECT_EQ(status.driver_result(), cuda::kCaptureUnsupported);
  EXPECT_EQ(EndCapture(stream), CUDA_SUCCESS);
  EXPECT_TRUE(driver_->Synchronize(kGpu, In(std::chrono::minutes(1))).ok());
}

TEST_P(BesideCuda, synchronize_is_refused_during_a_capture_on_a_non_blocking_stream_which_is_lost) {
  for (const CUstreamCaptureMode mode :
       {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
    const CUstream stream = StartCapture(CU_STREAM_NON_BLOCKING, mode);
    Status status;
    std::thread([&] { status = driver_->Synchronize(kGpu, In(std::chrono::minutes(1))); }).join();
    EXPECT_EQ(status.code(), Code::kRefused) << status.message();
    EXPECT_EQ(EndCapture(stream), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) << "the driver offers no way to spare it";
    EXPECT_TRUE(driver_->Synchronize(kGpu, In(std::chrono::minutes(1))).ok());
  }
}

TEST(CudaDriver, waiting_for_a_device_without_a_context_opens_none) {
  const auto driver = LoadFake();
  ASSERT_TRUE(driver.ok()) << driver.status().message();
  constexpr DeviceOrdinal kOther{1};
  const auto contexts = reinterpret_cast<decltype(&stand_in_cuda_contexts)>(dlsym(FakeLibrary(), "stand_in_cuda_contexts"));
  ASSERT_TRUE((*driver)->DeviceCount().ok());
  const std::uint64_t before = contexts(kOther.value);
  ASSERT_OK((*driver)->Synchronize(kOther, In(std::chrono::minutes(1))));
  EXPECT_EQ(contexts(kOther.value), before);
  ASSERT_TRUE((*driver)->Memory(kOther).ok());
  EXPECT_EQ(contexts(kOther.value), before + 1) << "this needs one";
  EXPECT_RESULT((*driver)->Synchronize(DeviceOrdinal{2}, In(std::chrono::minutes(1))), CUDA_ERROR_INVALID_DEVICE);
}

TEST(CudaDriver, page_locked_memory_makes_a_context_only_where_memory_was_made) {
  const auto contexts = reinterpret_cast<decltype(&stand_in_cuda_contexts)>(dlsym(FakeLibrary(), "stand_in_cuda_contexts"));
  const auto state =
      reinterpret_cast<decltype(&cuDevicePrimaryCtxGetState)>(dlsym(FakeLibrary(), "cuDevicePrimaryCtxGetState"));
  const auto driver = LoadFake();
  ASSERT_TRUE(driver.ok()) << driver.status().message();
  ASSERT_TRUE((*driver)->DeviceCount().ok());
  unsigned flags = 0;
  int active = 1;
  for (const int device : {0, 1}) {
    ASSERT_EQ(state(device, &flags, &active), CUDA_SUCCESS);
    if (active != 0) GTEST_SKIP() << "another test of this process left device " << device << " with a context";
  }
  const std::uint64_t first = contexts(0), second = contexts(1);
  const auto handle = (*driver)->Create(Bytes{2} << 20, OnDevice(1), 0);
  ASSERT_TRUE(handle.ok()) << handle.status().message();
  ASSERT_TRUE((*driver)->AllocatePinned(4096).ok());
  EXPECT_EQ(contexts(0), first) << "nothing is there";
  EXPECT_EQ(contexts(1), second + 1);
  EXPECT_TRUE((*driver)->Release(*handle).ok());
}

// The device writes to it, and a copy would cost a child's first write to each page.
TEST(CudaDriver, a_forked_child_has_no_copy_of_page_locked_memory) {
  constexpr Bytes kBytes = Bytes{4} << 20;
  const auto driver = LoadFake();
  ASSERT_TRUE(driver.ok()) << driver.status().message();
  ASSERT_TRUE((*driver)->Populates(kBytes)) << "the driver's own memory is its own affair";
  const auto buffer = (*driver)->AllocatePinned(kBytes);
  ASSERT_TRUE(buffer.ok()) << buffer.status().message();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) _exit(write(ends[1], (*buffer)->data(), 1) < 0 && errno == EFAULT ? 0 : 1);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(write(ends[1], (*buffer)->data(), 1), 1) << "it is here";
  for (const int end : ends) close(end);
}

TEST(CudaDriver, a_driver_without_the_entry_point_is_refused_with_what_to_do) {
  const auto refused = CudaDriver::Load([](const char*) -> void* { return nullptr; });
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kUnsupported);
  EXPECT_NE(refused.status().message().find("12.0"), std::string::npos) << refused.status().message();
}

// As a driver answers that is asked for a version before 12.1, and one that has none.
CUresult LookUpWithoutMulticast(const char* name, void** found, int version, cuuint64_t flags,
                                CUdriverProcAddressQueryResult* why) {
  if (std::strncmp(name, "cuMulticast", 11) == 0) return CUDA_ERROR_NOT_FOUND;
  if (std::strncmp(name, "cuModule", 8) == 0 || std::strcmp(name, "cuLaunchKernel") == 0) {  // the stand-in runs no kernels
    *found = reinterpret_cast<void*>(+[]() -> CUresult { return CUDA_ERROR_INVALID_IMAGE; });
    return CUDA_SUCCESS;
  }
  const auto look_up = reinterpret_cast<decltype(&LookUpWithoutMulticast)>(dlsym(FakeLibrary(), "cuGetProcAddress_v2"));
  return look_up(name, found, version, flags, why);
}

TEST(CudaDriver, without_multicast_objects_is_as_fast) {
  const auto driver = CudaDriver::Load([](const char*) { return reinterpret_cast<void*>(&LookUpWithoutMulticast); });
  ASSERT_TRUE(driver.ok()) << driver.status().message();
  const auto found = (*driver)->FindNonZero(kGpu, {}, nullptr, In(std::chrono::minutes(1)));
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(found->unscanned.find("the CUDA driver has no"), std::string::npos) << found->unscanned;
  EXPECT_FALSE((*driver)->CreateMulticast({}).ok());
}

// With kernels that are host functions. amem_sparse_copy does here what the real one does, and counts.
struct CountedCalls {
  std::size_t launches = 0, copies = 0;
} counted;

void CopyPieces(void** arguments) {
  const auto* const pieces = reinterpret_cast<const sparse::TablePiece*>(*static_cast<CUdeviceptr*>(arguments[0]));
  const auto other = *static_cast<CUdeviceptr*>(arguments[2]);
  ++counted.launches;
  for (unsigned i = 0; i < *static_cast<unsigned*>(arguments[1]); ++i) {
    auto* const device = reinterpret_cast<std::byte*>(pieces[i].address);
    auto* const packed = reinterpret_cast<std::byte*>(other + Bytes{pieces[i].first_page} * kPageBytes);
    const bool gather = *static_cast<int*>(arguments[3]) != 0;
    std::memcpy(gather ? packed : device, gather ? device : packed, Bytes{pieces[i].pages} * kPageBytes);
  }
}

// What the kernels that find and clear are told of each unit: its first byte, and how many pages it has.
template <class Do>
void ForEachUnit(void** arguments, const Do& act) {
  const auto* const table = reinterpret_cast<const sparse::TableExtent*>(*static_cast<CUdeviceptr*>(arguments[0]));
  const unsigned count = *static_cast<unsigned*>(arguments[1]), units = *static_cast<unsigned*>(arguments[2]);
  ++counted.launches;
  for (unsigned i = 0, unit = 0; i < count; ++i) {
    EXPECT_EQ(table[i].first_unit, unit) << "without gaps";
    for (unsigned page = 0; page < table[i].pages; page += kUnitPages)
      act(unit++, reinterpret_cast<std::byte*>(table[i].address) + page * kPageBytes,
          std::min(kUnitPages, table[i].pages - page));
    EXPECT_EQ(unit, i + 1 < count ? table[i + 1].first_unit : units);
  }
}

void FindPages(void** arguments) {
  auto* const found = reinterpret_cast<std::uint32_t*>(*static_cast<CUdeviceptr*>(arguments[3]));
  ForEachUnit(arguments, [&](unsigned unit, const std::byte* at, unsigned pages) {
    found[unit] = 0;
    for (Bytes i = 0; i < pages * kPageBytes; ++i)
      if (at[i] != std::byte{0}) found[unit] |= 1U << i / kPageBytes;
  });
}

void ClearPages(void** arguments) {
  ForEachUnit(arguments, [](unsigned, std::byte* at, unsigned pages) { std::memset(at, 0, pages * kPageBytes); });
}

CUresult LookUpWithKernels(const char* name, void** found, int version, cuuint64_t flags, CUdriverProcAddressQueryResult* why) {
  const auto look_up = reinterpret_cast<decltype(&LookUpWithKernels)>(dlsym(FakeLibrary(), "cuGetProcAddress_v2"));
  const std::string_view call(name);
  if (call == "cuModuleLoadData") {
    *found = reinterpret_cast<void*>(+[](CUmodule*, const void*) { return CUDA_SUCCESS; });
  } else if (call == "cuModuleGetGlobal") {
    *found = reinterpret_cast<void*>(+[](CUdeviceptr*, std::size_t* bytes, CUmodule, const char*) {
      *bytes = sizeof(ContentKey);
      return CUDA_SUCCESS;
    });
  } else if (call == "cuModuleGetFunction") {
    *found = reinterpret_cast<void*>(+[](CUfunction* function, CUmodule, const char* kernel) {
      static HostKernel copies{&CopyPieces}, finds{&FindPages}, clears{&ClearPages};
      const std::string_view wanted(kernel);
      *function = reinterpret_cast<CUfunction>(wanted.ends_with("find")    ? &finds
                                               : wanted.ends_with("clear") ? &clears
                                                                           : &copies);
      return CUDA_SUCCESS;
    });
  } else if (call == "cuMemcpyDtoHAsync") {
    *found = reinterpret_cast<void*>(+[](void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
      ++counted.copies;
      return reinterpret_cast<decltype(&cuMemcpyDtoHAsync)>(dlsym(FakeLibrary(), "cuMemcpyDtoHAsync_v2"))(to, from, bytes,
                                                                                                          stream);
    });
  } else {
    return look_up(name, found, version, flags, why);
  }
  return CUDA_SUCCESS;
}

TEST(CudaDriver, copies_parts_that_lie_anywhere_in_host_memory_by_one_kernel_and_long_runs_by_a_copy_engine) {
  const auto driver = CudaDriver::Load([](const char*) { return reinterpret_cast<void*>(&LookUpWithKernels); });
  ASSERT_TRUE(driver.ok()) << driver.status().message();
  constexpr Bytes kMemory = Bytes{16} << 20, kLong = Bytes{2} << 20, kScattered = 500;
  const auto handle = (*driver)->Create(kMemory, OnDevice(0), 0);
  ASSERT_TRUE(handle.ok()) << handle.status().message();
  const auto region = MappedRegion::Map(**driver, *handle, kMemory, 0, Access());
  ASSERT_TRUE(region.ok()) << region.status().message();
  auto* const device = reinterpret_cast<std::byte*>(region->address().value);
  std::array<std::unique_ptr<PinnedBuffer>, 2> pinned{*(*driver)->AllocatePinned(kMemory), *(*driver)->AllocatePinned(kMemory)};
  std::vector<Extent> extents{{region->address() + kLong, kLong, pinned[1]->data() + kPageBytes}};
  for (Bytes i = 0; i < kScattered; ++i) {
    const Bytes pages = 1 + i % 3;
    extents.push_back({region->address() + 2 * kLong + 4 * i * kPageBytes, pages * kPageBytes,
                       pinned[i % 2]->data() + kLong + (4 * (kScattered - i)) * kPageBytes});
  }
  for (Bytes i = 0; i < kMemory; ++i) device[i] = static_cast<std::byte>(i * 2654435761 >> 24);
  const std::vector<std::byte> before(device, device + kMemory);
  counted = {};
  ASSERT_OK((*driver)->Gather(kGpu, extents));
  ASSERT_OK((*driver)->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  EXPECT_EQ(counted.launches, 2U);
  EXPECT_EQ(counted.copies, 1U);
  std::memset(device, 0xab, kMemory);
  ASSERT_OK((*driver)->Scatter(kGpu, extents));
  ASSERT_OK((*driver)->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  std::vector<std::byte> expected(kMemory, std::byte{0xab});
  for (const Extent& extent : extents) {
    const Bytes at = extent.address.value - region->address().value;
    std::memcpy(expected.data() + at, before.data() + at, extent.bytes);
  }
  EXPECT_EQ(std::memcmp(device, expected.data(), kMemory), 0);
  Extent odd = extents.front();
  odd.host += 512;
  EXPECT_EQ((*driver)->Gather(kGpu, std::span(&odd, 1)).code(), Code::kInvalid);
  EXPECT_TRUE((*driver)->Release(*handle).ok());
}

// Extents of a page, of a unit and a page, and of two units, of which every second page holds something.
TEST(CudaDriver, finds_and_clears_extents_of_any_length_by_one_kernel_each) {
  const auto driver = CudaDriver::Load([](const char*) { return reinterpret_cast<void*>(&LookUpWithKernels); });
  ASSERT_TRUE(driver.ok()) << driver.status().message();
  constexpr Bytes kMemory = Bytes{2} << 20;
  const auto handle = (*driver)->Create(kMemory, OnDevice(0), 0);
  ASSERT_TRUE(handle.ok()) << handle.status().message();
  const auto region = MappedRegion::Map(**driver, *handle, kMemory, 0, Access());
  ASSERT_TRUE(region.ok()) << region.status().message();
  auto* const device = reinterpret_cast<std::byte*>(region->address().value);
  const std::vector<Extent> extents{{region->address() + kPageBytes, kPageBytes},
                                    {region->address() + kMemory / 4, kUnitBytes + kPageBytes},
                                    {region->address() + kMemory / 2, 2 * kUnitBytes}};
  for (Bytes i = 0; i < kMemory; ++i) device[i] = std::byte{i / kPageBytes % 2 == 1};
  counted = {};
  const auto found = (*driver)->FindNonZero(kGpu, extents, nullptr, In(std::chrono::minutes(1)));
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(found->unscanned, "");
  constexpr std::uint32_t kEverySecond = 0xaaaaaaaa;
  EXPECT_EQ(found->pages, (std::vector<std::uint32_t>{1, kEverySecond, 0, kEverySecond, kEverySecond}));
  ASSERT_OK((*driver)->ClearAll(kGpu, extents));
  ASSERT_OK((*driver)->FinishCopies(kGpu, In(std::chrono::minutes(1))));
  EXPECT_EQ(counted.launches, 2U);
  for (Bytes at = 0; at < kMemory; at += kPageBytes) {
    const bool is_in = std::ranges::any_of(extents, [&](const Extent& extent) {
      const Bytes from = extent.address.value - region->address().value;
      return at >= from && at < from + extent.bytes;
    });
    EXPECT_EQ(device[at], std::byte{!is_in && at / kPageBytes % 2 == 1}) << at / kPageBytes;
  }
  EXPECT_TRUE((*driver)->Release(*handle).ok());
}

TEST(CudaDriver, a_host_without_the_driver_is_named) {
  if (void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
    dlclose(library);
    GTEST_SKIP() << "this host has one";
  }
  const auto refused = CudaDriver::LoadSystem();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kUnsupported);
  EXPECT_NE(refused.status().message().find("libcuda.so.1"), std::string::npos) << refused.status().message();
}

// ---- the fake itself --------------------------------------------------------------------------------------------------------

class FakeCuda : public BesideCuda {};
INSTANTIATE_TEST_SUITE_P(On, FakeCuda, testing::Values(Kind::kFake), [](const auto&) { return std::string("fake_libcuda"); });

TEST_P(FakeCuda, a_kernel_is_a_host_function_that_sees_mapped_memory) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(Find<decltype(&cuMemAlloc)>("cuMemAlloc_v2")(&memory, 1000), CUDA_SUCCESS);
  ASSERT_EQ(Find<decltype(&cuMemsetD32)>("cuMemsetD32_v2")(memory, 20, 250), CUDA_SUCCESS);
  const HostKernel kernel{[](void** arguments) {
    auto* words = *static_cast<std::uint32_t**>(arguments[0]);
    words[3] += *static_cast<std::uint32_t*>(arguments[1]);
  }};
  std::uint32_t more = 22;
  std::array<void*, 2> arguments = {&memory, &more};
  const auto function = reinterpret_cast<CUfunction>(const_cast<HostKernel*>(&kernel));
  ASSERT_EQ(
      Find<decltype(&cuLaunchKernel)>("cuLaunchKernel")(function, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments.data(), nullptr),
      CUDA_SUCCESS);
  std::array<std::uint32_t, 2> seen{};
  ASSERT_EQ(Find<decltype(&cuMemcpyDtoH)>("cuMemcpyDtoH_v2")(seen.data(), memory + 8, 8), CUDA_SUCCESS);
  EXPECT_EQ(seen, (std::array<std::uint32_t, 2>{20, 42}));
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  ASSERT_EQ(Find<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange_v2")(&base, &bytes, memory + 500), CUDA_SUCCESS);
  EXPECT_EQ(base, memory);
  EXPECT_EQ(bytes, 1000U);
  ASSERT_EQ(Find<decltype(&cuMemFree)>("cuMemFree_v2")(memory), CUDA_SUCCESS);
  EXPECT_EQ(Find<decltype(&cuMemFree)>("cuMemFree_v2")(memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Find<decltype(&stand_in_cuda_bytes_in_use)>("stand_in_cuda_bytes_in_use")(0), 0U);
}

TEST_P(FakeCuda, entry_points_are_found_as_a_driver_gives_them) {
  const auto lookup = Find<decltype(&cuGetProcAddress_v2)>("cuGetProcAddress_v2");
  void* found = nullptr;
  CUdriverProcAddressQueryResult why{};
  ASSERT_EQ(lookup("cuMemAlloc", &found, 12000, 0, &why), CUDA_SUCCESS);
  EXPECT_EQ(found, dlsym(library_, "cuMemAlloc_v2"));
  EXPECT_EQ(lookup("cuNoSuchCall", &found, 12000, 0, &why), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(why, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  ASSERT_EQ(lookup("cuGetProcAddress", &found, 12000, 0, &why), CUDA_SUCCESS);
  EXPECT_EQ(found, dlsym(library_, "cuGetProcAddress_v2"));
}

TEST_P(FakeCuda, multicast_objects_are_kept_by_the_book) {
  constexpr std::size_t kBytes = 2 << 20;
  CUmulticastObjectProp prop{};
  prop.numDevices = 2;
  prop.size = kBytes;
  prop.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle object = 0;
  ASSERT_EQ(Find<decltype(&cuMulticastCreate)>("cuMulticastCreate")(&object, &prop), CUDA_SUCCESS);
  const auto memory = driver_->Create(kBytes, OnDevice(1), 0);
  ASSERT_TRUE(memory.ok());
  const auto bind = Find<decltype(&cuMulticastBindMem)>("cuMulticastBindMem");
  const auto add = Find<decltype(&cuMulticastAddDevice)>("cuMulticastAddDevice");
  EXPECT_EQ(bind(object, 0, memory->value, 0, kBytes, 0), CUDA_ERROR_INVALID_DEVICE) << "the device was not added";
  EXPECT_EQ(add(object, 0), CUDA_SUCCESS);
  EXPECT_EQ(add(object, 1), CUDA_SUCCESS);
  EXPECT_EQ(add(object, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(add(memory->value, 1), CUDA_ERROR_INVALID_VALUE) << "this is no multicast object";
  EXPECT_EQ(bind(object, 0, memory->value, 0, kBytes, 0), CUDA_SUCCESS);
  const auto unbind = Find<decltype(&cuMulticastUnbind)>("cuMulticastUnbind");
  EXPECT_EQ(unbind(object, 1, 0, kBytes), CUDA_SUCCESS);
  EXPECT_EQ(unbind(object, 1, 0, kBytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_TRUE(driver_->Release(*memory).ok());
  EXPECT_TRUE(driver_->Release(DriverHandle{object}).ok());
}

TEST_P(FakeCuda, calls_can_be_made_to_fail) {
  const auto fail = Find<decltype(&stand_in_cuda_fail_next)>("stand_in_cuda_fail_next");
  ASSERT_EQ(fail("Create", 1, CUDA_ERROR_OUT_OF_MEMORY), 0);
  EXPECT_EQ(driver_->Create(2 << 20, OnDevice(0), 0).status().code(), Code::kOutOfMemory);
  EXPECT_EQ(fail("Nonsense", 1, 1), 1);
}

TEST_P(FakeCuda, a_forked_child_is_not_initialised) {
  const pid_t child = fork();
  if (child == 0) _exit(driver_->Create(2 << 20, OnDevice(0), 0).status().driver_result());
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), CUDA_ERROR_NOT_INITIALIZED);
}

// ---- who holds memory ------------------------------------------------------------------------------------------------------

TEST(MemoryHolders, are_named_with_what_they_hold_where_the_management_library_knows) {
  void* library = dlopen(AMEM_STAND_IN_NVML, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  const auto holders = HoldersByNvml(library, "GPU-stand-in");
  ASSERT_EQ(holders.size(), 2U);
  EXPECT_EQ(holders[0].pid, getpid());
  EXPECT_EQ(holders[0].bytes, Bytes{3} << 30);
  EXPECT_EQ(holders[0].name, std::string(program_invocation_short_name).substr(0, 15));
  EXPECT_EQ(holders[1].pid, 1);
  EXPECT_EQ(holders[1].bytes, 0U) << "not known";
  EXPECT_TRUE(HoldersByNvml(library, "GPU-other").empty());
  EXPECT_TRUE(HoldersByNvml(nullptr, "GPU-stand-in").empty());
}

TEST(MemoryHolders, text_names_the_largest_and_not_this_process) {
  EXPECT_EQ(ToText({{7, 5, "me"}}, 7), "");
  EXPECT_EQ(ToText({{8, 0, ""}, {7, 5, "me"}, {9, Bytes{3} << 30, "python3"}}, 7),
            " (pid 9, python3, holds 3 072 MiB; pid 8 holds some)");
  const std::string many = ToText({{1, 1, ""}, {2, 1, ""}, {3, 1, ""}, {4, 1, ""}, {5, 1, ""}, {6, 1, ""}, {8, 1, ""}}, 7);
  EXPECT_TRUE(many.ends_with("; pid 5 holds 1 B; and 2 more)")) << many;
}

}  // namespace
}  // namespace amem
