// NVLS multicast objects: NCCL holds ids of AMem's, the driver gets its own handles, and memory that is bound stays in place.
#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem {
namespace {

class MulticastTest : public test::Intercepted {
 protected:
  void SetUp() override {
    Intercepted::SetUp();
    CUmulticastObjectProp properties{};
    properties.numDevices = 2;
    properties.size = kBytes;
    properties.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    ASSERT_EQ(create(&object, &properties), CUDA_SUCCESS);
    ASSERT_EQ(retain(&bound_memory, reinterpret_cast<void*>(memory())), CUDA_SUCCESS);
  }
  void TearDown() override {
    EXPECT_TRUE(session().Resume().ok());
    EXPECT_EQ(release(bound_memory), CUDA_SUCCESS);
    EXPECT_EQ(release(object), CUDA_SUCCESS);
    Intercepted::TearDown();
  }
  [[nodiscard]] Multicast Recorded() const { return session().CopyState().multicasts.at(intercept::ToAllocation(object)); }

  decltype(cuMulticastCreate)* create = Driver<decltype(cuMulticastCreate)>("cuMulticastCreate");
  decltype(cuMulticastAddDevice)* add_device = Driver<decltype(cuMulticastAddDevice)>("cuMulticastAddDevice");
  decltype(cuMulticastBindMem)* bind_memory = Driver<decltype(cuMulticastBindMem)>("cuMulticastBindMem");
  decltype(cuMulticastBindAddr)* bind_address = Driver<decltype(cuMulticastBindAddr)>("cuMulticastBindAddr");
  decltype(cuMulticastUnbind)* unbind = Driver<decltype(cuMulticastUnbind)>("cuMulticastUnbind");
  decltype(cuMemRetainAllocationHandle)* retain = Driver<decltype(cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle");
  decltype(cuMemRelease)* release = Driver<decltype(cuMemRelease)>("cuMemRelease");
  CUmemGenericAllocationHandle object = 0, bound_memory = 0;
};

TEST_F(MulticastTest, an_object_has_an_id_of_ours_and_the_driver_gets_its_own_handle) {
  EXPECT_TRUE(intercept::IsGuest(object));
  EXPECT_EQ(Recorded().devices, 2U);
  EXPECT_EQ(add_device(object, 0), CUDA_SUCCESS) << "the stand-in knows its own handles only";
  EXPECT_EQ(Recorded().added, std::vector<DeviceOrdinal>{DeviceOrdinal{0}});
}

TEST_F(MulticastTest, bound_memory_stays_in_place_until_it_is_unbound) {
  ASSERT_EQ(add_device(object, 0), CUDA_SUCCESS);
  ASSERT_EQ(add_device(object, 1), CUDA_SUCCESS);
  ASSERT_EQ(bind_memory(object, 0, bound_memory, 0, kBytes, 0), CUDA_SUCCESS);
  ASSERT_EQ(Recorded().bindings.size(), 1U);
  EXPECT_EQ(Recorded().bindings.at(0).front().allocation, intercept::ToAllocation(bound_memory));
  EXPECT_TRUE(session().Pause().ok());
  EXPECT_TRUE(AllocationOfMemory().resident);
  EXPECT_EQ(WhyKept(AllocationOfMemory()), KeepReason::kMulticast);
  EXPECT_TRUE(session().Resume().ok());
  EXPECT_EQ(unbind(object, 0, 0, kBytes), CUDA_SUCCESS);
  EXPECT_TRUE(Recorded().bindings.empty());
  EXPECT_TRUE(session().Pause().ok());
  EXPECT_FALSE(AllocationOfMemory().resident);
}

TEST_F(MulticastTest, memory_can_be_bound_by_its_address) {
  ASSERT_EQ(add_device(object, 0), CUDA_SUCCESS);
  ASSERT_EQ(add_device(object, 1), CUDA_SUCCESS);
  ASSERT_EQ(bind_address(object, 0, memory(), kBytes, 0), CUDA_SUCCESS);
  EXPECT_EQ(Recorded().bindings.at(0).front().address, Address{memory()});
  EXPECT_EQ(AllocationOfMemory().multicast_bindings, 1U);
  EXPECT_EQ(unbind(object, 0, 0, kBytes), CUDA_SUCCESS);
}

TEST_F(MulticastTest, what_the_driver_refuses_is_not_recorded) {
  EXPECT_EQ(add_device(object, 99), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_TRUE(Recorded().added.empty());
  EXPECT_NE(bind_memory(object, 0, bound_memory, 0, kBytes, 0), CUDA_SUCCESS) << "its devices are not all there";
  EXPECT_TRUE(Recorded().bindings.empty());
  EXPECT_NE(unbind(object, 0, 0, kBytes), CUDA_SUCCESS);
  CUmulticastObjectProp none{};
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(create(&handle, &none), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(create(nullptr, &none), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(MulticastTest, a_handle_that_is_gone_or_not_ours_is_answered_without_a_crash) {
  EXPECT_EQ(add_device(intercept::ToGuest(AllocationId{0xFFFF}), 0), CUDA_ERROR_INVALID_HANDLE);
  const auto before = Count<PassedThrough>();
  EXPECT_EQ(add_device(0x1234, 0), CUDA_ERROR_INVALID_VALUE) << "the driver's answer";
  EXPECT_EQ(Count<PassedThrough>(), before + 1);
  ASSERT_EQ(add_device(object, 0), CUDA_SUCCESS);
  ASSERT_EQ(add_device(object, 1), CUDA_SUCCESS);
  EXPECT_EQ(bind_memory(object, 0, intercept::ToGuest(AllocationId{0xFFFF}), 0, kBytes, 0), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(MulticastTest, memory_is_unbound_while_paused) {
  ASSERT_EQ(add_device(object, 0), CUDA_SUCCESS);
  ASSERT_EQ(add_device(object, 1), CUDA_SUCCESS);
  ASSERT_EQ(bind_memory(object, 0, bound_memory, 0, kBytes, 0), CUDA_SUCCESS);
  ASSERT_TRUE(session().Pause().ok());
  EXPECT_EQ(unbind(object, 0, 0, kBytes), CUDA_SUCCESS);
  EXPECT_EQ(AllocationOfMemory().multicast_bindings, 0U);
  EXPECT_TRUE(CheckInvariants(session().CopyState()).ok()) << CheckInvariants(session().CopyState()).message();
}

TEST_F(MulticastTest, each_call_that_adds_something_is_refused_while_memory_is_paused) {
  const State before = session().CopyState();
  ASSERT_TRUE(session().Pause().ok());
  CUmulticastObjectProp properties{};
  properties.numDevices = 2;
  properties.size = kBytes;
  CUmemGenericAllocationHandle other = 0;
  EXPECT_EQ(create(&other, &properties), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(add_device(object, 0), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(bind_memory(object, 0, bound_memory, 0, kBytes, 0), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(bind_address(object, 0, memory(), kBytes, 0), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(session().CopyState().multicasts, before.multicasts);
}

}  // namespace
}  // namespace amem
