// Registrations with network cards: memory that one holds stays where it is during a pause.
//
// The functions of libibverbs are stood in for here; NCCL gets at them by name, as it does with dlsym.
#include <unistd.h>

#include <array>

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
  [[nodiscard]] std::uint32_t Registrations() const { return AllocationOfMemory().registrations; }
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
  void* const second = reg_mr_iova2(nullptr, pointer(), kBytes / 2, 0, 1);
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

TEST_F(VerbsTest, a_registration_by_dma_buf_counts_though_its_descriptor_is_closed) {
  const auto export_range = Driver<decltype(cuMemGetHandleForAddressRange)>("cuMemGetHandleForAddressRange");
  int descriptor = -1;
  ASSERT_EQ(export_range(&descriptor, memory(), kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), CUDA_SUCCESS);
  EXPECT_EQ(Registrations(), 0U) << "the descriptor alone pins nothing that lasts";
  void* const region = reg_dmabuf_mr(nullptr, kBytes / 2, kBytes / 4, 0, descriptor, 1);
  close(descriptor);
  ASSERT_EQ(Registrations(), 1U);
  const State state = session().CopyState();
  EXPECT_EQ(state.registrations.begin()->first, Address{memory()} + kBytes / 2);
  EXPECT_EQ(state.registrations.begin()->second.bytes, kBytes / 4);
  EXPECT_EQ(state.registrations.begin()->second.how, "dma-buf");
  APauseKeepsIt();
  EXPECT_EQ(dereg_mr(region), 0);
  EXPECT_EQ(Registrations(), 0U);
}

TEST_F(VerbsTest, a_deregistration_that_fails_keeps_the_memory) {
  void* const region = reg_mr(nullptr, pointer(), kBytes, 1);
  g_deregister_result = 16;  // EBUSY
  EXPECT_EQ(dereg_mr(region), 16);
  EXPECT_GE(Registrations(), 1U);
  APauseKeepsIt();
  g_deregister_result = 0;
  EXPECT_EQ(dereg_mr(region), 0);
}

TEST_F(VerbsTest, a_registration_that_fails_counts_for_nothing) {
  g_register_fails = true;
  EXPECT_EQ(reg_mr(nullptr, pointer(), kBytes, 1), nullptr);
  EXPECT_EQ(reg_mr_iova2(nullptr, pointer(), kBytes, 0, 1), nullptr);
  EXPECT_EQ(Registrations(), 0U);
}

TEST_F(VerbsTest, memory_that_is_not_ours_and_unknown_descriptors_pass_through) {
  std::array<std::byte, 64> host{};
  void* const region = reg_mr(nullptr, host.data(), host.size(), 1);
  EXPECT_NE(region, nullptr);
  EXPECT_NE(reg_dmabuf_mr(nullptr, 0, kBytes, 0, 12345, 1), nullptr);
  EXPECT_TRUE(session().CopyState().registrations.empty());
  const auto before = Count<Deregistered>();
  EXPECT_EQ(dereg_mr(region), 0);
  EXPECT_EQ(Count<Deregistered>(), before);
}

TEST_F(VerbsTest, a_dma_buf_of_paused_memory_is_refused) {
  const auto export_range = Driver<decltype(cuMemGetHandleForAddressRange)>("cuMemGetHandleForAddressRange");
  ASSERT_TRUE(session().Pause().ok());
  int descriptor = -1;
  EXPECT_EQ(export_range(&descriptor, memory(), kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(descriptor, -1);
}

}  // namespace
}  // namespace amem
