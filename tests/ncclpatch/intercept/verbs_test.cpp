// Registrations with network cards: memory that one holds stays where it is during a pause.
//
// The stand-ins for the functions of libibverbs are in this file; NCCL looks those functions up by name with dlsym.
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem {
namespace {

using RegMr = void*(void*, void*, size_t, int);
using RegMrIova2 = void*(void*, void*, size_t, std::uint64_t, unsigned int);
using RegDmabufMr = void*(void*, std::uint64_t, size_t, std::uint64_t, int, int);
using DeregMr = int(void*);

bool g_register_fails = false;
int g_deregister_result = 0;

void* NewRegion() {
  static std::array<std::byte, 16> regions;
  static std::size_t next = 0;
  return g_register_fails ? nullptr : &regions[next++ % regions.size()];
}
void* VerbsRegMr(void*, void*, size_t, int) { return NewRegion(); }
void* VerbsRegMrIova2(void*, void*, size_t, std::uint64_t, unsigned int) { return NewRegion(); }
void* VerbsRegDmabufMr(void*, std::uint64_t, size_t, std::uint64_t, int, int) { return NewRegion(); }
int VerbsDeregMr(void*) { return g_deregister_result; }

class VerbsTest : public test::Intercepted {
 protected:
  template <class F>
  static F* Verbs(const char* name, F* real) {
    bool replaced = false;
    void* entry = replacements::BindExported(name, reinterpret_cast<void*>(real), &replaced);
    EXPECT_TRUE(replaced) << name;
    return reinterpret_cast<F*>(entry);
  }
  void SetUp() override {
    Intercepted::SetUp();
    g_register_fails = false;
    g_deregister_result = 0;
  }
  [[nodiscard]] void* pointer() const { return reinterpret_cast<void*>(memory()); }
  [[nodiscard]] std::uint32_t Registrations() const { return AllocationOfMemory().pinned; }
  // While memory is registered a pause leaves it, and says why.
  void APauseKeepsIt() const {
    EXPECT_TRUE(session().Pause().ok());
    EXPECT_TRUE(AllocationOfMemory().resident);
    EXPECT_EQ(WhyKept(AllocationOfMemory()), KeepReason::kRegistered);
    EXPECT_TRUE(session().Resume().ok());
  }
  void APauseTakesIt() const {
    EXPECT_TRUE(session().Pause().ok());
    EXPECT_FALSE(AllocationOfMemory().resident);
    EXPECT_TRUE(session().Resume().ok());
  }

  RegMr* reg_mr = Verbs("ibv_reg_mr", &VerbsRegMr);
  RegMrIova2* reg_mr_iova2 = Verbs("ibv_reg_mr_iova2", &VerbsRegMrIova2);
  RegDmabufMr* reg_dmabuf_mr = Verbs("ibv_reg_dmabuf_mr", &VerbsRegDmabufMr);
  DeregMr* dereg_mr = Verbs("ibv_dereg_mr", &VerbsDeregMr);
};

TEST_F(VerbsTest, registered_memory_stays_until_it_is_deregistered) {
  void* const first = reg_mr(nullptr, pointer(), kBytes, 1);
  void* const second = reg_mr_iova2(nullptr, static_cast<std::byte*>(pointer()) + kBytes / 2, kBytes / 2, 0, 1);
  EXPECT_EQ(Registrations(), 2U);
  EXPECT_EQ(session().CopyState().registrations.begin()->second.how, "ibv_reg_mr");
  APauseKeepsIt();
  EXPECT_EQ(dereg_mr(first), 0);
  EXPECT_EQ(Registrations(), 1U);
  APauseKeepsIt();
  EXPECT_EQ(dereg_mr(second), 0);
  EXPECT_EQ(Registrations(), 0U);
  APauseTakesIt();
}

TEST_F(VerbsTest, a_pause_waits_until_a_card_that_is_being_told_of_memory_has_answered) {
  static std::byte region;
  test::Held<RegMr>::Reset();
  test::Held<RegMr>::result = &region;
  RegMr* const slow = Verbs("ibv_reg_mr", &test::Held<RegMr>::Real);
  std::thread registers([&] { EXPECT_EQ(slow(nullptr, pointer(), kBytes, 1), &region); });
  test::Held<RegMr>::AwaitInside(1);
  EXPECT_FALSE(APauseGoesOnBefore([] { test::Held<RegMr>::Release(); })) << "the card has pages that the pause takes";
  registers.join();
  EXPECT_TRUE(session().Resume().ok());
  EXPECT_EQ(Registrations(), 1U);
  APauseKeepsIt();
  EXPECT_EQ(dereg_mr(&region), 0);
}

TEST_F(VerbsTest, a_registration_by_dma_buf_counts_though_its_descriptor_is_closed) {
  const auto export_range = Driver<decltype(cuMemGetHandleForAddressRange)>("cuMemGetHandleForAddressRange");
  int descriptor = -1;
  ASSERT_EQ(export_range(&descriptor, memory(), kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), CUDA_SUCCESS);
  EXPECT_EQ(Registrations(), 1U) << "somebody unknown may register the descriptor";
  void* const region = reg_dmabuf_mr(nullptr, kBytes / 2, kBytes / 4, 0, descriptor, 1);
  close(descriptor);
  ASSERT_EQ(Registrations(), 1U);
  const State state = session().CopyState();
  EXPECT_EQ(state.registrations.begin()->first.first, Address{memory()} + kBytes / 2);
  EXPECT_EQ(state.registrations.begin()->second.bytes, kBytes / 4);
  EXPECT_EQ(state.registrations.begin()->second.how, "dma-buf");
  APauseKeepsIt();
  EXPECT_EQ(dereg_mr(region), 0);
  EXPECT_EQ(Registrations(), 0U);
}

TEST_F(VerbsTest, a_registration_by_dma_buf_is_recorded_with_the_flags_that_made_the_descriptor) {
  const auto export_range = Replace<decltype(cuMemGetHandleForAddressRange)>(
      "cuMemGetHandleForAddressRange", +[](void* descriptor, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long) {
        *static_cast<int*>(descriptor) = 12346;
        return CUDA_SUCCESS;
      });
  const auto how = [] { return session().CopyState().registrations.begin()->second.how; };
  int descriptor = -1;
  ASSERT_EQ(export_range(&descriptor, memory(), kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 1), CUDA_SUCCESS);
  EXPECT_EQ(how(), "dma-buf, flags 1");
  void* const region = reg_dmabuf_mr(nullptr, 4096, kBytes / 2, 0, descriptor, 1);
  ASSERT_EQ(Registrations(), 1U);
  EXPECT_EQ(how(), "dma-buf, flags 1");
  EXPECT_EQ(dereg_mr(region), 0);
}

// The pause has planned with what the card holds, and could not end if that was given up in the middle of it.
TEST_F(VerbsTest, a_pause_waits_until_a_card_that_lets_go_of_memory_has_answered) {
  void* const region = reg_mr(nullptr, pointer(), kBytes, 1);
  test::Held<DeregMr>::Reset();
  DeregMr* const slow = Verbs("ibv_dereg_mr", &test::Held<DeregMr>::Real);
  std::thread lets_go([&] { EXPECT_EQ(slow(region), 0); });
  test::Held<DeregMr>::AwaitInside(1);
  EXPECT_FALSE(APauseGoesOnBefore([] { test::Held<DeregMr>::Release(); }));
  lets_go.join();
  EXPECT_EQ(Registrations(), 0U);
  EXPECT_TRUE(session().Resume().ok());
  APauseTakesIt();
}

TEST_F(VerbsTest, a_pause_of_a_tag_waits_until_a_card_that_lets_go_of_its_memory_has_answered) {
  Pools& pools = session().pools();
  const PoolId tag = *pools.Open("registered", PoolPolicy::kPreserve);
  const Address part = *pools.Allocate(tag, kBytes, DeviceOrdinal{0});
  void* const region = reg_mr(nullptr, reinterpret_cast<void*>(part.value), kBytes, 1);
  test::Held<DeregMr>::Reset();
  DeregMr* const slow = Verbs("ibv_dereg_mr", &test::Held<DeregMr>::Real);
  std::thread lets_go([&] { EXPECT_EQ(slow(region), 0); });
  test::Held<DeregMr>::AwaitInside(1);
  std::atomic<bool> paused{false};
  std::thread pauses([&] {
    EXPECT_TRUE(pools.Pause(tag, {}).ok());
    paused = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_FALSE(paused);
  test::Held<DeregMr>::Release();
  lets_go.join();
  pauses.join();
  EXPECT_TRUE(session().CopyState().registrations.empty());
  EXPECT_TRUE(pools.Resume(tag, {}).ok());
  EXPECT_TRUE(pools.Free(part, nullptr).ok());
}

TEST_F(VerbsTest, a_deregistration_that_fails_keeps_the_memory) {
  void* const region = reg_mr(nullptr, pointer(), kBytes, 1);
  g_deregister_result = 16;  // EBUSY
  EXPECT_EQ(dereg_mr(region), 16);
  EXPECT_EQ(Registrations(), 1U);
  APauseKeepsIt();
  g_deregister_result = 0;
  EXPECT_EQ(dereg_mr(region), 0);
  EXPECT_EQ(Registrations(), 0U) << "a failure does not count as one more registration";
  APauseTakesIt();
}

TEST_F(VerbsTest, a_dma_buf_pins_its_range_until_its_registration_is_seen_to_end_or_to_fail) {
  const auto export_range = Driver<decltype(cuMemGetHandleForAddressRange)>("cuMemGetHandleForAddressRange");
  int descriptor = -1;
  ASSERT_EQ(export_range(&descriptor, memory(), kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), CUDA_SUCCESS);
  APauseKeepsIt();
  g_register_fails = true;
  EXPECT_EQ(reg_dmabuf_mr(nullptr, 0, kBytes, 0, descriptor, 1), nullptr);
  close(descriptor);
  EXPECT_EQ(Registrations(), 0U);
  APauseTakesIt();
}

TEST_F(VerbsTest, a_second_longer_registration_at_one_address_holds_all_of_it) {
  void* const first = reg_mr(nullptr, pointer(), 4096, 1);
  void* const second = reg_mr(nullptr, pointer(), kBytes, 1);
  EXPECT_EQ(session().CopyState().registrations.at({Address{memory()}, ""}).bytes, kBytes);
  EXPECT_EQ(dereg_mr(first), 0);
  APauseKeepsIt();
  EXPECT_EQ(dereg_mr(second), 0);
  APauseTakesIt();
}

TEST_F(VerbsTest, a_registration_that_outlives_its_memory_does_not_hide_one_of_the_next) {
  void* const lost = reg_mr(nullptr, pointer(), kBytes, 1);
  const CUdeviceptr before = memory();
  FreeAndAllocate();
  if (memory() != before) GTEST_SKIP() << "the next memory lies elsewhere";
  void* const region = reg_mr(nullptr, pointer(), kBytes, 1);
  APauseKeepsIt();
  EXPECT_EQ(dereg_mr(region), 0);
  EXPECT_EQ(dereg_mr(lost), 0);
  APauseTakesIt();
}

TEST_F(VerbsTest, registering_paused_memory_is_refused) {
  ASSERT_TRUE(session().Pause().ok());
  EXPECT_EQ(reg_mr(nullptr, pointer(), kBytes, 1), nullptr);
  EXPECT_EQ(errno, EBUSY);
  std::array<std::byte, 64> host{};
  void* const region = reg_mr(nullptr, host.data(), host.size(), 1);
  EXPECT_NE(region, nullptr);
  EXPECT_EQ(dereg_mr(region), 0);
}

// The functions beside plain verbs: each pins, and its counterpart lets go.
TEST_F(VerbsTest, mellanox_user_memory_and_gdrcopy_count_as_well) {
  struct Input {
    void* address;
    size_t bytes;
    std::uint32_t access;
    std::uint64_t page_sizes, mask;
    int descriptor;
  };
  struct Handle {
    unsigned long value;
  };
  const auto umem = Verbs(
      "mlx5dv_devx_umem_reg", +[](void*, void*, size_t, std::uint32_t) { return NewRegion(); });
  const auto umem_ex = Verbs(
      "mlx5dv_devx_umem_reg_ex", +[](void*, void*) { return NewRegion(); });
  const auto umem_gone = Verbs("mlx5dv_devx_umem_dereg", &VerbsDeregMr);
  const auto reg_dmabuf = Verbs(
      "mlx5dv_reg_dmabuf_mr", +[](void*, std::uint64_t, size_t, std::uint64_t, int, int, int) { return NewRegion(); });
  const auto pin = Verbs(
      "gdr_pin_buffer", +[](void*, unsigned long, size_t, std::uint64_t, std::uint32_t, Handle* handle) {
        handle->value = 7;
        return 0;
      });
  const auto pin_2 = Verbs(
      "gdr_pin_buffer_v2", +[](void*, unsigned long, size_t, std::uint32_t, Handle* handle) {
        handle->value = 8;
        return 0;
      });
  const auto unpin = Verbs(
      "gdr_unpin_buffer", +[](void*, Handle) { return g_deregister_result; });
  const auto counts = [&](const auto& add, const auto& remove) {
    add();
    EXPECT_EQ(Registrations(), 1U);
    g_deregister_result = 22;
    EXPECT_EQ(remove(), 22);
    EXPECT_EQ(Registrations(), 1U);
    g_deregister_result = 0;
    EXPECT_EQ(remove(), 0);
    EXPECT_EQ(Registrations(), 0U);
  };
  void* region = nullptr;
  counts([&] { region = umem(nullptr, pointer(), kBytes, 1); }, [&] { return umem_gone(region); });
  Input plain{pointer(), kBytes, 1, 0, 0, -1};
  counts([&] { region = umem_ex(nullptr, &plain); }, [&] { return umem_gone(region); });
  const auto export_range = Driver<decltype(cuMemGetHandleForAddressRange)>("cuMemGetHandleForAddressRange");
  int descriptor = -1;
  ASSERT_EQ(export_range(&descriptor, memory(), kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), CUDA_SUCCESS);
  Input by_descriptor{nullptr, kBytes, 1, 0, 1, descriptor};
  counts([&] { region = umem_ex(nullptr, &by_descriptor); }, [&] { return umem_gone(region); });
  counts([&] { region = reg_dmabuf(nullptr, 0, kBytes, 0, descriptor, 1, 0); }, [&] { return dereg_mr(region); });
  close(descriptor);
  Handle handle{};
  counts([&] { EXPECT_EQ(pin(nullptr, memory(), kBytes, 0, 0, &handle), 0); }, [&] { return unpin(nullptr, handle); });
  counts([&] { EXPECT_EQ(pin_2(nullptr, memory(), kBytes, 0, &handle), 0); }, [&] { return unpin(nullptr, handle); });
}

TEST_F(VerbsTest, a_registration_that_fails_counts_for_nothing) {
  g_register_fails = true;
  EXPECT_EQ(reg_mr(nullptr, pointer(), kBytes, 1), nullptr);
  EXPECT_EQ(reg_mr_iova2(nullptr, pointer(), kBytes, 0, 1), nullptr);
  EXPECT_EQ(Registrations(), 0U);
}

TEST_F(VerbsTest, memory_that_is_not_ours_and_unknown_descriptors_pass_through) {
  std::array<std::byte, 64> host{};
  const auto registered = Count<Registered>(), deregistered = Count<Deregistered>();
  void* const region = reg_mr(nullptr, host.data(), host.size(), 1);
  EXPECT_NE(region, nullptr);
  EXPECT_NE(reg_dmabuf_mr(nullptr, 0, kBytes, 0, 12345, 1), nullptr);
  EXPECT_EQ(dereg_mr(region), 0);
  EXPECT_EQ(Count<Registered>(), registered);
  EXPECT_EQ(Count<Deregistered>(), deregistered);
}

TEST_F(VerbsTest, a_dma_buf_of_paused_memory_is_refused) {
  const auto export_range = Driver<decltype(cuMemGetHandleForAddressRange)>("cuMemGetHandleForAddressRange");
  ASSERT_TRUE(session().Pause().ok());
  int descriptor = -1;
  EXPECT_EQ(export_range(&descriptor, memory(), kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(descriptor, -1);
}

TEST_F(VerbsTest, whether_an_attribute_of_our_memory_can_be_set_the_driver_says_and_it_is_journaled) {
  const auto set = Driver<decltype(cuPointerSetAttribute)>("cuPointerSetAttribute");
  const auto before = Count<PassedThrough>();
  unsigned on = 1;
  EXPECT_EQ(set(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory() + 4096), CUDA_ERROR_NOT_SUPPORTED) << "of mapped memory";
  EXPECT_EQ(Count<PassedThrough>(), before + 1);
  EXPECT_EQ(set(nullptr, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory()), CUDA_ERROR_INVALID_VALUE) << "the driver's answer";
  EXPECT_EQ(Count<PassedThrough>(), before + 2);
  using Real = decltype(cuPointerSetAttribute);
  const auto not_ours = Replace<Real>("cuPointerSetAttribute", &test::Recorded<Real>::Real);
  EXPECT_EQ(not_ours(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, 0x1000), CUDA_SUCCESS);
  EXPECT_EQ(test::Recorded<Real>::calls, 1);
  EXPECT_EQ(Count<PassedThrough>(), before + 2) << "other memory is not worth an event";
}

}  // namespace
}  // namespace amem
