// Questions about pointers, and freeing, while NCCL's memory is paused; cudaFree of memory of a pool.
#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem {
namespace {

class Pointers : public test::Intercepted {};

TEST_F(Pointers, to_paused_memory_are_answered_as_if_it_were_there) {
  const auto ask = Driver<decltype(cuPointerGetAttribute)>("cuPointerGetAttribute");
  const CUdeviceptr inside = memory() + 4096;
  const auto answers = [&] {
    unsigned type = 0;
    int device = -1;
    CUdeviceptr pointer = 0, start = 0;
    std::size_t bytes = 0;
    EXPECT_EQ(ask(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside), CUDA_SUCCESS);
    EXPECT_EQ(ask(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, inside), CUDA_SUCCESS);
    EXPECT_EQ(ask(&pointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, inside), CUDA_SUCCESS);
    EXPECT_EQ(ask(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside), CUDA_SUCCESS);
    EXPECT_EQ(ask(&bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, inside), CUDA_SUCCESS);
    return std::tuple(type, device, pointer, start, bytes);
  };
  const auto running = answers();
  EXPECT_EQ(running, std::tuple(unsigned{CU_MEMORYTYPE_DEVICE}, 0, inside, memory(), std::size_t{kBytes}));
  ASSERT_TRUE(session().Pause().ok());
  EXPECT_EQ(answers(), running);
  std::uint64_t types = 0;
  EXPECT_EQ(ask(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, inside), CUDA_SUCCESS);
  EXPECT_EQ(types, 1U);
  int unknown = 0;
  EXPECT_NE(ask(&unknown, CU_POINTER_ATTRIBUTE_BUFFER_ID, inside), CUDA_SUCCESS) << "only the driver knows it";
  EXPECT_EQ(ask(&unknown, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 0x1000), CUDA_ERROR_INVALID_VALUE) << "nobody's memory";
}

TEST_F(Pointers, are_freed_while_paused) {
  void* freed = AllocateAnother();
  ASSERT_TRUE(session().Pause().ok());
  EXPECT_EQ(Free(freed), 0);
  const State state = session().CopyState();
  EXPECT_EQ(state.MappingAt(Address{reinterpret_cast<std::uint64_t>(freed)}), state.mappings.end());
}

TEST_F(Pointers, to_memory_of_a_pool_are_freed_by_cudaFree_too) {
  using Real = decltype(cuMemFree);
  const auto free = Replace<Real>("cuMemFree", &test::Recorded<Real>::Real);
  const Address pooled{0x5000};
  session().records().Note(AsyncAllocated{pooled, 4096});
  const std::uint64_t passed = Count<PassedThrough>();
  test::Recorded<Real>::result = CUDA_ERROR_UNKNOWN;
  EXPECT_EQ(free(pooled.value), CUDA_ERROR_UNKNOWN);
  EXPECT_TRUE(session().CopyState().async.contains(pooled)) << "the driver refused";
  test::Recorded<Real>::result = CUDA_SUCCESS;
  EXPECT_EQ(free(pooled.value), CUDA_SUCCESS);
  EXPECT_FALSE(session().CopyState().async.contains(pooled));
  EXPECT_EQ(Count<PassedThrough>(), passed) << "it was known";
  EXPECT_EQ(test::Recorded<Real>::calls, 2);
}

}  // namespace
}  // namespace amem
