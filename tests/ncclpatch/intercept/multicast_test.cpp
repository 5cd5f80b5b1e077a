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
  EXPECT_EQ(Recorded().bindings.find(0)->second.allocation, intercept::ToAllocation(bound_memory));
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
  EXPECT_EQ(Recorded().bindings.find(0)->second.address, Address{memory()});
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

// CUDA 13.1 put the device behind the object's handle, under the same names.
struct LastBinding {
  CUmemGenericAllocationHandle object, memory;
  CUdevice device;
  size_t object_offset, memory_offset, bytes;
  unsigned long long flags;
} g_last_binding;

TEST_F(MulticastTest, from_13_1_on_bindings_name_their_device) {
  using BindMem = CUresult(CUmemGenericAllocationHandle, CUdevice, size_t, CUmemGenericAllocationHandle, size_t, size_t,
                           unsigned long long);
  using BindAddr = CUresult(CUmemGenericAllocationHandle, CUdevice, size_t, CUdeviceptr, size_t, unsigned long long);
  const auto bind = Replace<BindMem>(
      "cuMulticastBindMem",
      +[](CUmemGenericAllocationHandle o, CUdevice device, size_t oo, CUmemGenericAllocationHandle m, size_t mo, size_t bytes,
          unsigned long long flags) {
        g_last_binding = {o, m, device, oo, mo, bytes, flags};
        return CUDA_SUCCESS;
      },
      13010);
  const auto bind_at = Replace<BindAddr>(
      "cuMulticastBindAddr",
      +[](CUmemGenericAllocationHandle o, CUdevice device, size_t oo, CUdeviceptr at, size_t bytes, unsigned long long flags) {
        g_last_binding = {o, at, device, oo, 0, bytes, flags};
        return CUDA_SUCCESS;
      },
      13010);
  ASSERT_EQ(bind(object, 1, 4096, bound_memory, 8192, kBytes / 2, 5), CUDA_SUCCESS);
  EXPECT_FALSE(intercept::IsGuest(g_last_binding.object) || intercept::IsGuest(g_last_binding.memory));
  EXPECT_EQ(g_last_binding.device, 1);
  EXPECT_EQ(g_last_binding.object_offset, 4096U);
  EXPECT_EQ(g_last_binding.memory_offset, 8192U);
  EXPECT_EQ(g_last_binding.bytes, kBytes / 2);
  EXPECT_EQ(g_last_binding.flags, 5U);
  EXPECT_EQ(AllocationOfMemory().multicast_bindings, 1U);
  ASSERT_EQ(bind_at(object, 1, 0, memory(), kBytes, 6), CUDA_SUCCESS);
  EXPECT_EQ(g_last_binding.memory, memory());
  EXPECT_EQ(g_last_binding.flags, 6U);
  EXPECT_EQ(AllocationOfMemory().multicast_bindings, 2U);
  const auto before = Replace("cuMulticastBindMem", &test::Recorded<decltype(cuMulticastBindMem)>::Real, 13000);
  EXPECT_NE(reinterpret_cast<void*>(before), reinterpret_cast<void*>(bind)) << "NCCL of 13.0 has six arguments";
}

// ---- logical endpoints ------------------------------------------------------------------------------------------------------

class EndpointTest : public MulticastTest {
 protected:
  using BindAddr = CUresult(cuuint32_t, CUdevice, cuuint64_t, void*, cuuint64_t, unsigned long long);
  using BindMem = CUresult(cuuint32_t, CUdevice, cuuint64_t, CUmemGenericAllocationHandle, cuuint64_t, cuuint64_t,
                           unsigned long long);
  using Unbind = CUresult(cuuint32_t, CUdevice, cuuint64_t, cuuint64_t);
  using Destroy = CUresult(cuuint32_t);
  static inline CUmemGenericAllocationHandle bound = 0;
  static inline CUresult answer = CUDA_SUCCESS;
  void SetUp() override {
    MulticastTest::SetUp();
    answer = CUDA_SUCCESS;
  }
  [[nodiscard]] bool APauseKeepsIt() const {
    EXPECT_TRUE(session().Pause().ok());
    const bool kept = AllocationOfMemory().resident;
    EXPECT_TRUE(session().Resume().ok());
    return kept;
  }
  [[nodiscard]] void* pointer() const { return reinterpret_cast<void*>(memory()); }

  BindAddr* bind_at = Replace<BindAddr>(
      "cuLogicalEndpointBindAddr",
      +[](cuuint32_t, CUdevice, cuuint64_t, void*, cuuint64_t, unsigned long long) { return answer; }, 13030);
  BindMem* bind_mem = Replace<BindMem>(
      "cuLogicalEndpointBindMem",
      +[](cuuint32_t, CUdevice, cuuint64_t, CUmemGenericAllocationHandle handle, cuuint64_t, cuuint64_t, unsigned long long) {
        bound = handle;
        return answer;
      },
      13030);
  Unbind* unbind_all = Replace<Unbind>(
      "cuLogicalEndpointUnbind", +[](cuuint32_t, CUdevice, cuuint64_t, cuuint64_t) { return answer; }, 13030);
};

TEST_F(EndpointTest, memory_bound_by_address_or_handle_stays_until_it_is_unbound) {
  EXPECT_EQ(bind_at(3, 0, 0, pointer(), kBytes, 0), CUDA_SUCCESS);
  EXPECT_EQ(bind_mem(3, 0, kBytes, bound_memory, 0, kBytes, 0), CUDA_SUCCESS);
  EXPECT_FALSE(intercept::IsGuest(bound)) << "the driver knows its own handles only";
  EXPECT_NE(bound, 0U);
  EXPECT_TRUE(APauseKeepsIt());
  EXPECT_EQ(unbind_all(3, 1, 0, 2 * kBytes), CUDA_SUCCESS) << "of another device";
  EXPECT_EQ(unbind_all(3, 0, 0, kBytes), CUDA_SUCCESS);
  EXPECT_TRUE(APauseKeepsIt()) << "the second binding";
  EXPECT_EQ(unbind_all(3, 0, 0, 2 * kBytes), CUDA_SUCCESS);
  EXPECT_FALSE(APauseKeepsIt());
}

TEST_F(EndpointTest, to_destroy_an_endpoint_undoes_its_bindings_on_every_device_and_no_others) {
  Destroy* destroy = Replace<Destroy>(
      "cuLogicalEndpointDestroy", +[](cuuint32_t) { return answer; }, 13030);
  EXPECT_EQ(bind_at(3, 0, 0, pointer(), kBytes, 0), CUDA_SUCCESS);
  EXPECT_EQ(bind_mem(3, 1, kBytes, bound_memory, 0, kBytes, 0), CUDA_SUCCESS);
  EXPECT_EQ(bind_at(4, 0, 0, pointer(), kBytes, 0), CUDA_SUCCESS);
  const auto before = Count<Deregistered>();
  answer = CUDA_ERROR_INVALID_VALUE;
  EXPECT_EQ(destroy(3), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Count<Deregistered>(), before) << "the driver refused";
  answer = CUDA_SUCCESS;
  EXPECT_EQ(destroy(3), CUDA_SUCCESS);
  EXPECT_EQ(Count<Deregistered>(), before + 2);
  EXPECT_TRUE(APauseKeepsIt()) << "endpoint 4";
  EXPECT_EQ(destroy(4), CUDA_SUCCESS);
  EXPECT_FALSE(APauseKeepsIt());
}

TEST_F(EndpointTest, what_the_driver_refuses_is_not_recorded_and_paused_memory_is_refused) {
  answer = CUDA_ERROR_INVALID_VALUE;
  EXPECT_EQ(bind_at(3, 0, 0, pointer(), kBytes, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(bind_mem(3, 0, 0, bound_memory, 0, kBytes, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(AllocationOfMemory().pinned, 0U);
  answer = CUDA_SUCCESS;
  EXPECT_EQ(bind_at(4, 0, 0, pointer(), kBytes, 0), CUDA_SUCCESS);
  answer = CUDA_ERROR_INVALID_VALUE;
  EXPECT_EQ(unbind_all(4, 0, 0, kBytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_TRUE(APauseKeepsIt());
  answer = CUDA_SUCCESS;
  EXPECT_EQ(unbind_all(4, 0, 0, kBytes), CUDA_SUCCESS);
  ASSERT_TRUE(session().Pause().ok());
  EXPECT_EQ(bind_at(3, 0, 0, pointer(), kBytes, 0), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(bind_mem(3, 0, 0, bound_memory, 0, kBytes, 0), CUDA_ERROR_ILLEGAL_STATE);
}

}  // namespace
}  // namespace amem
