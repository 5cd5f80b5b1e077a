// With AMEM_NVLS=release a pause takes multicast objects that NCCL made, and what is bound to them; a resume makes them anew.
#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem {
namespace {

const bool kReleased = setenv("AMEM_NVLS", "release", 1) == 0;  // before any session starts

class NvlsTest : public test::Intercepted {
 protected:
  void SetUp() override {
    Intercepted::SetUp();
    CUmulticastObjectProp properties{};
    properties.numDevices = 2;
    properties.size = 2 * kBytes;
    properties.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    std::size_t least = 0, recommended = 0;
    ASSERT_EQ(granularity(&least, &properties, CU_MULTICAST_GRANULARITY_MINIMUM), CUDA_SUCCESS);
    ASSERT_EQ(granularity(&recommended, &properties, CU_MULTICAST_GRANULARITY_RECOMMENDED), CUDA_SUCCESS);
    EXPECT_LT(least, recommended);
    ASSERT_EQ(create(&object, &properties), CUDA_SUCCESS);
    ASSERT_EQ(retain(&memory_handle, reinterpret_cast<void*>(memory())), CUDA_SUCCESS);
    ASSERT_EQ(add_device(object, 0), CUDA_SUCCESS);
    ASSERT_EQ(add_device(object, 1), CUDA_SUCCESS);
    ASSERT_EQ(bind_memory(object, 0, memory_handle, 0, kBytes, 0), CUDA_SUCCESS);
    ASSERT_EQ(bind_address(object, kBytes, memory(), kBytes, 0), CUDA_SUCCESS);
    ASSERT_EQ(reserve(&place, 2 * kBytes, 0, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(map(place, 2 * kBytes, 0, object, 0), CUDA_SUCCESS);
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    ASSERT_EQ(set_access(place, 2 * kBytes, &access, 1), CUDA_SUCCESS);
  }
  void TearDown() override {
    EXPECT_TRUE(session().Resume().ok());
    EXPECT_EQ(unmap(place, 2 * kBytes), CUDA_SUCCESS);
    EXPECT_EQ(free_range(place, 2 * kBytes), CUDA_SUCCESS);
    EXPECT_EQ(release(object), CUDA_SUCCESS);
    EXPECT_EQ(release(memory_handle), CUDA_SUCCESS);
    Intercepted::TearDown();
  }
  [[nodiscard]] Allocation Object() const { return session().CopyState().allocations.at(intercept::ToAllocation(object)); }
  void Unbind() {
    EXPECT_EQ(unbind(object, 0, 0, kBytes), CUDA_SUCCESS);
    EXPECT_EQ(unbind(object, 0, kBytes, kBytes), CUDA_SUCCESS);
    EXPECT_EQ(AllocationOfMemory().multicast_bindings, 0U);
  }

  decltype(cuMulticastCreate)* create = Driver<decltype(cuMulticastCreate)>("cuMulticastCreate");
  decltype(cuMulticastAddDevice)* add_device = Driver<decltype(cuMulticastAddDevice)>("cuMulticastAddDevice");
  decltype(cuMulticastBindMem)* bind_memory = Driver<decltype(cuMulticastBindMem)>("cuMulticastBindMem");
  decltype(cuMulticastBindAddr)* bind_address = Driver<decltype(cuMulticastBindAddr)>("cuMulticastBindAddr");
  decltype(cuMulticastUnbind)* unbind = Driver<decltype(cuMulticastUnbind)>("cuMulticastUnbind");
  decltype(cuMulticastGetGranularity)* granularity = Plain<decltype(cuMulticastGetGranularity)>("cuMulticastGetGranularity");
  decltype(cuMulticastBindMem)* really_bind = Plain<decltype(cuMulticastBindMem)>("cuMulticastBindMem");
  decltype(cuMulticastUnbind)* really_unbind = Plain<decltype(cuMulticastUnbind)>("cuMulticastUnbind");
  decltype(cuMemRetainAllocationHandle)* retain = Driver<decltype(cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle");
  decltype(cuMemRelease)* release = Driver<decltype(cuMemRelease)>("cuMemRelease");
  decltype(cuMemAddressReserve)* reserve = Driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(cuMemAddressFree)* free_range = Driver<decltype(cuMemAddressFree)>("cuMemAddressFree");
  decltype(cuMemMap)* map = Driver<decltype(cuMemMap)>("cuMemMap");
  decltype(cuMemUnmap)* unmap = Driver<decltype(cuMemUnmap)>("cuMemUnmap");
  decltype(cuMemSetAccess)* set_access = Driver<decltype(cuMemSetAccess)>("cuMemSetAccess");
  CUmemGenericAllocationHandle object = 0, memory_handle = 0;
  CUdeviceptr place = 0;
};

TEST_F(NvlsTest, a_cycle_takes_the_object_and_what_is_bound_and_brings_both_back_under_the_same_handles) {
  ASSERT_TRUE(kReleased);
  *reinterpret_cast<int*>(memory()) = 17;
  for (int cycle = 0; cycle < 3; ++cycle) {
    const auto before = session().CopyState().multicasts;
    ASSERT_TRUE(session().Pause().ok());
    EXPECT_FALSE(Object().resident);
    EXPECT_FALSE(AllocationOfMemory().resident);
    EXPECT_TRUE(session().calls().TouchesPaused(Address{place}, 4)) << "a launch that touches the object is refused";
    ASSERT_TRUE(session().Resume().ok());
    EXPECT_TRUE(Object().resident);
    EXPECT_EQ(session().CopyState().multicasts, before);
    EXPECT_EQ(*reinterpret_cast<int*>(memory()), 17);
  }
  const auto [real, offset] = session().nccl().Backing(intercept::ToAllocation(object));
  EXPECT_EQ(really_unbind(real.value, 0, 0, kBytes), CUDA_SUCCESS) << "the driver has bound it again";
  const auto [backing, within] = session().nccl().Backing(intercept::ToAllocation(memory_handle));
  EXPECT_EQ(really_bind(real.value, 0, backing.value, within, kBytes, 0), CUDA_SUCCESS);
  Unbind();
}

TEST_F(NvlsTest, while_paused_unbinding_works_and_adding_is_refused) {
  ASSERT_TRUE(session().Pause().ok());
  EXPECT_EQ(add_device(object, 1), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(bind_memory(object, 0, memory_handle, 0, kBytes, 0), CUDA_ERROR_ILLEGAL_STATE);
  Unbind();
  ASSERT_TRUE(session().Resume().ok()) << "of an object to which nothing is bound";
  EXPECT_TRUE(CheckInvariants(session().CopyState()).ok()) << CheckInvariants(session().CopyState()).message();
}

TEST_F(NvlsTest, a_driver_that_refuses_to_bind_fails_the_resume_which_can_be_tried_again) {
  const auto fail = Plain<int(const char*, std::uint64_t, int)>("stand_in_cuda_fail_next");
  for (const char* call : {"CreateMulticast", "AddDevice", "BindMemory", "BindAddress"}) {
    ASSERT_TRUE(session().Pause().ok());
    ASSERT_EQ(fail(call, 1, 999), 0);
    EXPECT_FALSE(session().Resume().ok()) << call;
    EXPECT_FALSE(Object().resident) << call;
    EXPECT_TRUE(session().Resume().ok()) << call;
  }
  ASSERT_EQ(fail("Unbind", 1, 999), 0);
  EXPECT_FALSE(session().Pause().ok());
  EXPECT_TRUE(Object().resident);
  Unbind();
}

}  // namespace
}  // namespace amem
