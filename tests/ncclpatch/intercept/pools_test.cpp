// Memory pools of the driver, pinned memory, and memory of the host that NCCL creates with the calls for device memory (elastic
// buffers).
#include <algorithm>
#include <future>
#include <limits>
#include <thread>
#include <type_traits>

#include "ncclpatch/runtime/log.h"
#include "tests/ncclpatch/intercept/intercepted.h"
#include "tests/stand_ins/cuda/control.h"

namespace amem {
namespace {

class PoolTest : public test::Intercepted {
 protected:
  static constexpr std::size_t kKept = 8 << 20;

  void SetUp() override {
    Intercepted::SetUp();
    Runtime::Get().SetAbove({.after_pause = &intercept::TrimPools});
    CUmemPoolProps properties{};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    ASSERT_EQ(create(&pool, &properties), CUDA_SUCCESS);
    cuuint64_t keep_all = std::numeric_limits<cuuint64_t>::max();  // as NCCL sets it
    ASSERT_EQ(set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all), CUDA_SUCCESS);
  }
  void TearDown() override {
    Runtime::Get().SetAbove({});
    EXPECT_TRUE(session().Resume().ok());
    EXPECT_TRUE(pool == nullptr || destroy(pool) == CUDA_SUCCESS);
    Intercepted::TearDown();
  }

  [[nodiscard]] static bool Pause() { return Runtime::Get().Cycle(session(), CycleKind::kPause).ok(); }
  static cuuint64_t Reserved(CUmemoryPool of) {
    cuuint64_t bytes = 0;
    EXPECT_EQ(ask(of, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes), CUDA_SUCCESS);
    return bytes;
  }
  // Allocates from a pool and frees it again, so that the pool keeps that much.
  void Keep(CUmemoryPool in, std::size_t bytes) {
    CUdeviceptr block = 0;
    ASSERT_EQ(allocate(&block, bytes, in, nullptr), CUDA_SUCCESS);
    ASSERT_EQ(free_async(block, nullptr), CUDA_SUCCESS);
    ASSERT_EQ(Reserved(in), bytes);
  }

  static inline decltype(cuMemPoolGetAttribute)* ask = nullptr;
  decltype(cuMemPoolCreate)* create = Driver<decltype(cuMemPoolCreate)>("cuMemPoolCreate");
  decltype(cuMemPoolDestroy)* destroy = Driver<decltype(cuMemPoolDestroy)>("cuMemPoolDestroy");
  decltype(cuMemPoolSetAttribute)* set_attribute = Driver<decltype(cuMemPoolSetAttribute)>("cuMemPoolSetAttribute");
  decltype(cuMemAllocFromPoolAsync)* allocate = Driver<decltype(cuMemAllocFromPoolAsync)>("cuMemAllocFromPoolAsync");
  decltype(cuMemFreeAsync)* free_async = Driver<decltype(cuMemFreeAsync)>("cuMemFreeAsync");
  CUmemoryPool pool = nullptr;

 private:
  bool asked_ = (ask = PLAIN(cuMemPoolGetAttribute)) != nullptr;
};

TEST_F(PoolTest, a_pause_gives_back_what_a_pool_of_nccls_only_keeps) {
  CUdeviceptr used = 0;
  ASSERT_EQ(allocate(&used, 2 << 20, pool, nullptr), CUDA_SUCCESS);
  CUdeviceptr freed = 0;
  ASSERT_EQ(allocate(&freed, kKept, pool, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(free_async(freed, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(Reserved(pool), kKept + (2 << 20));
  const auto before = Count<PassedThrough>();
  ASSERT_TRUE(Pause());
  EXPECT_EQ(Reserved(pool), std::size_t{2 << 20}) << "what is in use stays";
  EXPECT_EQ(session().CopyState().async.size(), 1U) << "and is counted";
  EXPECT_EQ(Count<PassedThrough>(), before + 1) << "the trim is in the journal";
  EXPECT_EQ(free_async(used, nullptr), CUDA_SUCCESS) << "freeing works at any time";
}

TEST_F(PoolTest, what_a_stream_allocates_is_counted_until_it_is_freed_and_a_failure_is_the_drivers) {
  const auto on_stream = Driver<decltype(cuMemAllocAsync)>("cuMemAllocAsync");
  CUdeviceptr memory = 0;
  ASSERT_EQ(on_stream(&memory, kKept, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(session().CopyState().async.size(), 1U);
  EXPECT_EQ(free_async(memory, nullptr), CUDA_SUCCESS);
  EXPECT_TRUE(session().CopyState().async.empty());
  EXPECT_NE(on_stream(&memory, std::size_t{1} << 60, nullptr), CUDA_SUCCESS);
  EXPECT_TRUE(session().CopyState().async.empty());
}

TEST_F(PoolTest, a_pool_of_the_programs_or_one_that_was_destroyed_is_left_alone) {
  CUmemPoolProps properties{};
  CUmemoryPool programs = nullptr;
  ASSERT_EQ(PLAIN(cuMemPoolCreate)(&programs, &properties), CUDA_SUCCESS);
  cuuint64_t keep_all = std::numeric_limits<cuuint64_t>::max();
  ASSERT_EQ(set_attribute(programs, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all), CUDA_SUCCESS);
  Keep(programs, kKept);
  ASSERT_EQ(destroy(pool), CUDA_SUCCESS);
  pool = nullptr;
  const auto before = Count<PassedThrough>();
  ASSERT_TRUE(Pause());
  EXPECT_EQ(Reserved(programs), kKept);
  EXPECT_EQ(Count<PassedThrough>(), before) << "no pool was trimmed";
  EXPECT_EQ(PLAIN(cuMemPoolDestroy)(programs), CUDA_SUCCESS);
}

TEST_F(PoolTest, a_pool_that_the_driver_does_not_destroy_is_trimmed_on) {
  Keep(pool, kKept);
  EXPECT_EQ(destroy(reinterpret_cast<CUmemoryPool>(0x10)), CUDA_ERROR_INVALID_VALUE);
  ASSERT_TRUE(Pause());
  EXPECT_EQ(Reserved(pool), 0U);
}

TEST_F(PoolTest, a_pool_that_cannot_be_trimmed_does_not_fail_the_pause) {
  CUmemPoolProps properties{};
  CUmemoryPool gone = nullptr;
  ASSERT_EQ(create(&gone, &properties), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuMemPoolDestroy)(gone), CUDA_SUCCESS) << "AMem does not see it";
  Keep(pool, kKept);
  log::Configure("warn", -1);
  testing::internal::CaptureStderr();
  const bool paused = Pause();
  const std::string said = testing::internal::GetCapturedStderr();
  log::Configure("off", -1);
  ASSERT_TRUE(paused);
  EXPECT_NE(said.find("cuMemPoolTrimTo at a pause: the driver answered 1;"), std::string::npos) << said;
  EXPECT_EQ(Reserved(pool), 0U) << "the others are trimmed all the same";
  EXPECT_NE(destroy(gone), CUDA_SUCCESS);
}

TEST_F(PoolTest, a_pause_does_not_wait_for_a_pool_whose_destruction_hangs) {
  static std::promise<void> begun, end;
  const auto hanging = Replace<decltype(cuMemPoolDestroy)>(
      "cuMemPoolDestroy", +[](CUmemoryPool) {
        begun.set_value();
        end.get_future().wait();
        return CUDA_ERROR_UNKNOWN;
      });
  Keep(pool, kKept);
  std::thread destroying([&] { EXPECT_EQ(hanging(pool), CUDA_ERROR_UNKNOWN); });
  begun.get_future().wait();
  EXPECT_TRUE(Pause());
  EXPECT_EQ(Reserved(pool), kKept) << "it is not touched meanwhile";
  end.set_value();
  destroying.join();
  ASSERT_TRUE(Runtime::Get().Cycle(session(), CycleKind::kResume).ok());
  ASSERT_TRUE(Pause());
  EXPECT_EQ(Reserved(pool), 0U) << "the driver kept the pool, so the next pause trims it";
}

TEST_F(PoolTest, a_second_pause_and_a_resume_trim_nothing) {
  ASSERT_TRUE(Pause());
  const auto before = Count<PassedThrough>();
  Keep(pool, kKept);
  const auto kept = Count<PassedThrough>();
  ASSERT_TRUE(Pause());
  ASSERT_TRUE(Runtime::Get().Cycle(session(), CycleKind::kResume).ok());
  EXPECT_EQ(Reserved(pool), kKept);
  EXPECT_EQ(Count<PassedThrough>(), kept);
  EXPECT_GE(kept, before);
}

TEST_F(PoolTest, what_nccl_does_with_pools_is_journaled_with_the_drivers_answer) {
  using Trim = decltype(cuMemPoolTrimTo);
  const auto trim = Replace<Trim>("cuMemPoolTrimTo", &test::Recorded<Trim>::Real);
  const auto before = Count<PassedThrough>();
  test::Recorded<Trim>::result = CUDA_ERROR_INVALID_VALUE;
  EXPECT_EQ(trim(nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Count<PassedThrough>(), before + 1);
  EXPECT_EQ(create(nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Count<PassedThrough>(), before + 2);
  EXPECT_EQ(destroy(reinterpret_cast<CUmemoryPool>(0x10)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Count<PassedThrough>(), before + 3);
}

// ---- pinned memory of the host
// ------------------------------------------------------------------------------------------------

class PinnedTest : public test::Intercepted {};

TEST_F(PinnedTest, is_counted_by_whatever_version_the_runtime_asks) {
  const auto driver = [](auto* type, const char* name, int version) {
    return Replace(name, Plain<std::remove_pointer_t<decltype(type)>>(name), version);
  };
  const auto allocate = driver(static_cast<decltype(cuMemHostAlloc)*>(nullptr), "cuMemHostAlloc", 2020);
  const auto free = driver(static_cast<decltype(cuMemFreeHost)*>(nullptr), "cuMemFreeHost", 2000);
  void* pinned = nullptr;
  ASSERT_EQ(allocate(&pinned, 1 << 20, 0), CUDA_SUCCESS);
  const Address at{reinterpret_cast<std::uint64_t>(pinned)};
  EXPECT_TRUE(session().CopyState().host.contains(at));
  EXPECT_EQ(free(pinned), CUDA_SUCCESS);
  EXPECT_FALSE(session().CopyState().host.contains(at));
}

// ---- elastic buffers: memory of the host
// --------------------------------------------------------------------------------------

class HostNumaTest : public test::Intercepted {
 protected:
  void SetUp() override {
    Intercepted::SetUp();
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    ASSERT_EQ(Driver<decltype(cuMemCreate)>("cuMemCreate")(&handle, kBytes, &properties, 0), CUDA_SUCCESS);
    ASSERT_EQ(Driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve")(&address, kBytes, 0, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(Driver<decltype(cuMemMap)>("cuMemMap")(address, kBytes, 0, handle, 0), CUDA_SUCCESS);
    CUmemAccessDesc access[2] = {};
    access[0] = {{CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    access[1] = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    ASSERT_EQ(Driver<decltype(cuMemSetAccess)>("cuMemSetAccess")(address, kBytes, access, 2), CUDA_SUCCESS);
  }
  void TearDown() override {
    EXPECT_TRUE(session().Resume().ok());
    EXPECT_EQ(Driver<decltype(cuMemUnmap)>("cuMemUnmap")(address, kBytes), CUDA_SUCCESS);
    EXPECT_EQ(Driver<decltype(cuMemRelease)>("cuMemRelease")(handle), CUDA_SUCCESS);
    EXPECT_EQ(Driver<decltype(cuMemAddressFree)>("cuMemAddressFree")(address, kBytes), CUDA_SUCCESS);
    Intercepted::TearDown();
  }
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
};

TEST_F(HostNumaTest, stays_in_place_is_counted_and_can_be_used_while_paused) {
  auto* const bytes = reinterpret_cast<unsigned char*>(address);
  std::fill_n(bytes, kBytes, 0x5A);
  ASSERT_TRUE(session().Pause().ok());
  const State state = session().CopyState();
  const Allocation& host = state.allocations.at(intercept::ToAllocation(handle));
  EXPECT_TRUE(host.resident);
  EXPECT_EQ(WhyKept(host), KeepReason::kHostMemory);
  EXPECT_FALSE(AllocationOfMemory().resident) << "device memory goes as ever";
  EXPECT_EQ(std::count(bytes, bytes + kBytes, 0x5A), static_cast<std::ptrdiff_t>(kBytes)) << "NCCL's host threads may poll it";
  bytes[0] = 1;
  EXPECT_TRUE(session().Resume().ok());
  EXPECT_EQ(bytes[0], 1) << "what was written meanwhile is not undone";
}

TEST_F(HostNumaTest, is_never_cut_from_a_slab) {
  const State state = session().CopyState();
  EXPECT_FALSE(state.allocations.at(intercept::ToAllocation(handle)).placed());
}

}  // namespace
}  // namespace amem
