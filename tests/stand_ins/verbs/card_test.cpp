// The stand-in card refuses what a card refuses; otherwise a job over it would show nothing. Host memory, memory of a simulated
// GPU, and two queue pairs of one process.
#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#undef ibv_reg_mr

extern "C" void amem_card_counts(std::uint64_t counts[6]);
extern "C" void amem_card_fault(const char* faults);

namespace amem::card {
namespace {

// Before the card looks for it.
void* const kDriver = ::dlopen(AMEM_STAND_INS "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

#define NAME(text) #text
#define DRIVER(name) reinterpret_cast<decltype(::name)*>(::dlsym(kDriver, NAME(name)))

class CardTest : public testing::Test {
 protected:
  CardTest() {
    ::setenv("AMEM_SIM_CARD_FINDINGS", "/dev/null", 1);
    ibv_device** const devices = ibv_get_device_list(nullptr);
    context_ = ibv_open_device(devices[0]);
    ibv_free_device_list(devices);
    domain_ = ibv_alloc_pd(context_);
    queue_ = ibv_create_cq(context_, 64, nullptr, nullptr, 0);
    ibv_qp_init_attr wanted{};
    wanted.send_cq = wanted.recv_cq = queue_;
    wanted.qp_type = IBV_QPT_RC;
    for (ibv_qp*& pair : pairs_) pair = ibv_create_qp(domain_, &wanted);
    for (const std::size_t i : {0, 1}) {
      ibv_qp_attr attributes{};
      attributes.qp_state = IBV_QPS_RTS;
      attributes.dest_qp_num = pairs_.at(1 - i)->qp_num;
      ibv_modify_qp(pairs_.at(i), &attributes, IBV_QP_STATE | IBV_QP_DEST_QPN);
    }
  }
  ~CardTest() override {
    for (ibv_qp* const pair : pairs_) ibv_destroy_qp(pair);
    ibv_destroy_cq(queue_);
    ibv_dealloc_pd(domain_);
    ibv_close_device(context_);
  }

  ibv_mr* Register(std::vector<char>& memory) const {
    return ibv_reg_mr(domain_, memory.data(), memory.size(), IBV_ACCESS_REMOTE_WRITE);
  }
  void Write(const std::vector<char>& from, std::uint32_t lkey, const char* to, std::uint32_t rkey, std::uint64_t id,
             bool imm = false) const {
    ibv_sge part{reinterpret_cast<std::uint64_t>(from.data()), static_cast<std::uint32_t>(from.size()), lkey};
    ibv_send_wr work{}, *bad = nullptr;
    work.wr_id = id;
    work.sg_list = &part;
    work.num_sge = 1;
    work.opcode = imm ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    work.imm_data = 42;
    work.send_flags = IBV_SEND_SIGNALED;
    work.wr.rdma.remote_addr = reinterpret_cast<std::uint64_t>(to);
    work.wr.rdma.rkey = rkey;
    ASSERT_EQ(ibv_post_send(pairs_[0], &work, &bad), 0);
  }
  ibv_wc Await() const {
    ibv_wc completion{};
    for (int tries = 0; tries < 20'000; ++tries) {
      if (ibv_poll_cq(queue_, 1, &completion) == 1) return completion;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    ADD_FAILURE() << "no completion in four seconds";
    return completion;
  }
  static std::uint64_t Findings() {
    std::array<std::uint64_t, 6> counts{};
    amem_card_counts(counts.data());
    return counts[5];
  }

  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
  ibv_cq* queue_ = nullptr;
  std::array<ibv_qp*, 2> pairs_{};
  std::vector<char> from_ = std::vector<char>(70'000, 'x'), to_ = std::vector<char>(70'000, '-');
};

TEST_F(CardTest, a_write_reaches_the_region_of_its_key_and_completes) {
  const std::uint64_t findings = Findings();
  ibv_mr *const own = Register(from_), *const other = Register(to_);
  Write(from_, own->lkey, to_.data(), other->rkey, 7);
  const ibv_wc done = Await();
  EXPECT_EQ(done.status, IBV_WC_SUCCESS);
  EXPECT_EQ(done.wr_id, 7U);
  EXPECT_EQ(to_, from_);
  EXPECT_EQ(ibv_dereg_mr(own), 0);
  EXPECT_EQ(ibv_dereg_mr(other), 0);
  EXPECT_EQ(Findings(), findings);
}

TEST_F(CardTest, a_key_whose_region_was_deregistered_ends_the_request_with_an_error) {
  const std::uint64_t findings = Findings();
  ibv_mr *const own = Register(from_), *const other = Register(to_);
  const std::uint32_t stale = other->rkey;
  ASSERT_EQ(ibv_dereg_mr(other), 0);
  ibv_mr* const again = Register(to_);
  Write(from_, own->lkey, to_.data(), stale, 1);
  EXPECT_EQ(Await().status, IBV_WC_REM_ACCESS_ERR);
  const std::uint32_t own_stale = own->lkey;
  ASSERT_EQ(ibv_dereg_mr(own), 0);
  Write(from_, own_stale, to_.data(), again->rkey, 2);
  EXPECT_EQ(Await().status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(to_, std::vector<char>(70'000, '-')) << "nothing was written";
  EXPECT_EQ(Findings(), findings + 2);
  ibv_dereg_mr(again);
}

TEST_F(CardTest, a_key_of_another_protection_domain_ends_the_request_with_an_error) {
  const std::uint64_t findings = Findings();
  ibv_pd* const other_domain = ibv_alloc_pd(context_);
  ibv_mr *const own = Register(from_), *const other = Register(to_);
  ibv_mr* const own_there = ibv_reg_mr(other_domain, from_.data(), from_.size(), IBV_ACCESS_LOCAL_WRITE);
  ibv_mr* const other_there = ibv_reg_mr(other_domain, to_.data(), to_.size(), IBV_ACCESS_REMOTE_WRITE);
  Write(from_, own_there->lkey, to_.data(), other->rkey, 1);
  EXPECT_EQ(Await().status, IBV_WC_LOC_PROT_ERR);
  Write(from_, own->lkey, to_.data(), other_there->rkey, 2);
  EXPECT_EQ(Await().status, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(to_, std::vector<char>(70'000, '-')) << "nothing was written";
  EXPECT_EQ(Findings(), findings + 2);
  for (ibv_mr* const region : {own, other, own_there, other_there}) ibv_dereg_mr(region);
  ibv_dealloc_pd(other_domain);
}

TEST_F(CardTest, a_write_beyond_its_region_ends_with_an_error) {
  ibv_mr *const own = Register(from_), *const other = Register(to_);
  Write(from_, own->lkey, to_.data() + 1, other->rkey, 1);
  EXPECT_EQ(Await().status, IBV_WC_REM_ACCESS_ERR);
  ibv_dereg_mr(own);
  ibv_dereg_mr(other);
}

TEST_F(CardTest, a_write_with_immediate_data_waits_for_a_receive) {
  ibv_mr *const own = Register(from_), *const other = Register(to_);
  Write(from_, own->lkey, to_.data(), other->rkey, 3, true);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ibv_wc none{};
  EXPECT_EQ(ibv_poll_cq(queue_, 1, &none), 0) << "nobody has posted a receive";
  ibv_recv_wr receive{}, *bad = nullptr;
  receive.wr_id = 11;
  ASSERT_EQ(ibv_post_recv(pairs_[1], &receive, &bad), 0);
  std::set<std::uint64_t> completed;
  for (int i = 0; i < 2; ++i) {
    const ibv_wc done = Await();
    EXPECT_EQ(done.status, IBV_WC_SUCCESS);
    completed.insert(done.wr_id);
    if (done.wr_id == 11) {
      EXPECT_EQ(done.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
      EXPECT_EQ(done.imm_data, 42U);
      EXPECT_EQ(done.byte_len, from_.size());
    }
  }
  EXPECT_EQ(completed, (std::set<std::uint64_t>{3, 11}));
  ibv_dereg_mr(own);
  ibv_dereg_mr(other);
}

TEST_F(CardTest, no_key_is_ever_used_again) {
  std::set<std::uint32_t> keys;
  for (int i = 0; i < 500; ++i) {
    ibv_mr* const region = Register(from_);
    EXPECT_TRUE(keys.insert(region->lkey).second);
    EXPECT_TRUE(keys.insert(region->rkey).second);
    ibv_dereg_mr(region);
  }
}

TEST_F(CardTest, only_what_is_registered_can_be_deregistered) {
  ibv_mr* const region = Register(from_);
  EXPECT_EQ(ibv_dereg_mr(region), 0);
  EXPECT_EQ(ibv_dereg_mr(region), EINVAL);
}

TEST_F(CardTest, a_request_waits_for_as_long_as_it_is_told_and_fails_on_a_link_that_is_down) {
  ibv_mr *const own = Register(from_), *const other = Register(to_);
  amem_card_fault("late=60000000");
  Write(from_, own->lkey, to_.data(), other->rkey, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ibv_wc none{};
  EXPECT_EQ(ibv_poll_cq(queue_, 1, &none), 0);
  EXPECT_EQ(to_[0], '-');
  amem_card_fault("late=0");
  EXPECT_EQ(Await().status, IBV_WC_SUCCESS);
  EXPECT_EQ(to_, from_);
  amem_card_fault("ack=60000000");
  std::ranges::fill(to_, '-');
  Write(from_, own->lkey, to_.data(), other->rkey, 3);
  for (int tries = 0; tries < 4'000 && to_.back() == '-'; ++tries) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(to_.back(), 'x') << "it is done";
  EXPECT_EQ(ibv_poll_cq(queue_, 1, &none), 0) << "and nobody is told";
  amem_card_fault("ack=0");
  EXPECT_EQ(Await().wr_id, 3U);
  amem_card_fault("down");
  Write(from_, own->lkey, to_.data(), other->rkey, 2);
  EXPECT_EQ(Await().status, IBV_WC_RETRY_EXC_ERR);
  amem_card_fault("down=0");
  ibv_dereg_mr(own);
  ibv_dereg_mr(other);
}

// Memory of a simulated GPU, which the card reaches as it reaches that of a real one.
class GpuCardTest : public CardTest {
 protected:
  static constexpr std::size_t kBytes = std::size_t{2} << 20;
  struct Memory {
    CUmemGenericAllocationHandle handle = 0;
    [[nodiscard]] CUresult MapAt(CUdeviceptr address) const {
      CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
      const CUresult mapped = DRIVER(cuMemMap)(address, kBytes, 0, handle, 0);
      return mapped != CUDA_SUCCESS ? mapped : DRIVER(cuMemSetAccess)(address, kBytes, &access, 1);
    }
  };
  GpuCardTest() {
    CUcontext context = nullptr;
    EXPECT_EQ(DRIVER(cuInit)(0), CUDA_SUCCESS);
    EXPECT_EQ(DRIVER(cuDevicePrimaryCtxRetain)(&context, 0), CUDA_SUCCESS);
    EXPECT_EQ(DRIVER(cuCtxSetCurrent)(context), CUDA_SUCCESS);
    EXPECT_EQ(DRIVER(cuMemAddressReserve)(&address_, kBytes, 0, 0, 0), CUDA_SUCCESS);
    memory_ = Make();
    EXPECT_EQ(memory_.MapAt(address_), CUDA_SUCCESS);
    own_ = Register(from_);
  }
  ~GpuCardTest() override {
    ibv_dereg_mr(own_);
    EXPECT_EQ(DRIVER(cuMemUnmap)(address_, kBytes), CUDA_SUCCESS);
    EXPECT_EQ(DRIVER(cuMemAddressFree)(address_, kBytes), CUDA_SUCCESS);
    EXPECT_EQ(DRIVER(cuMemRelease)(memory_.handle), CUDA_SUCCESS);
    EXPECT_EQ(InUse(), 0U);
  }
  static Memory Make() {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    Memory made;
    EXPECT_EQ(DRIVER(cuMemCreate)(&made.handle, kBytes, &properties, 0), CUDA_SUCCESS);
    return made;
  }
  static std::uint64_t InUse() {
    return reinterpret_cast<std::uint64_t (*)(int)>(::dlsym(kDriver, "stand_in_cuda_bytes_in_use"))(0);
  }
  [[nodiscard]] char* memory() const { return reinterpret_cast<char*>(address_); }
  [[nodiscard]] ibv_mr* RegisterMemory() const { return ibv_reg_mr(domain_, memory(), kBytes, IBV_ACCESS_REMOTE_WRITE); }
  [[nodiscard]] int DmaBuf() const {
    int descriptor = -1;
    EXPECT_EQ(DRIVER(cuMemGetHandleForAddressRange)(&descriptor, address_, kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
              CUDA_SUCCESS);
    return descriptor;
  }
  ibv_wc WriteThere(const ibv_mr* region) const {
    Write(from_, own_->lkey, memory() + 4096, region->rkey, 1);
    return Await();
  }
  [[nodiscard]] bool Arrived() const { return std::equal(from_.begin(), from_.end(), memory() + 4096); }
  // The same address with other memory, as after a pause that the card does not know of.
  void MapAnew() {
    EXPECT_EQ(DRIVER(cuMemUnmap)(address_, kBytes), CUDA_SUCCESS);
    EXPECT_EQ(DRIVER(cuMemRelease)(memory_.handle), CUDA_SUCCESS);
    memory_ = Make();
    EXPECT_EQ(memory_.MapAt(address_), CUDA_SUCCESS);
  }

  CUdeviceptr address_ = 0;
  Memory memory_;
  ibv_mr* own_ = nullptr;
};

TEST_F(GpuCardTest, memory_is_written_and_read_there_however_it_was_registered) {
  const std::uint64_t findings = Findings();
  const int dma_buf = DmaBuf();
  ibv_mr* const by_address = RegisterMemory();
  ibv_mr* const by_dma_buf = ibv_reg_dmabuf_mr(domain_, 0, kBytes, address_, dma_buf, IBV_ACCESS_REMOTE_WRITE);
  ::close(dma_buf);
  for (const ibv_mr* const region : {by_address, by_dma_buf}) {
    ASSERT_NE(region, nullptr);
    std::memset(memory(), '-', kBytes);
    EXPECT_EQ(WriteThere(region).status, IBV_WC_SUCCESS);
    EXPECT_TRUE(Arrived());
    ibv_mr* const back = Register(to_);
    const std::vector<char> there(memory() + 4096, memory() + 4096 + to_.size());
    ibv_sge part{address_ + 4096, static_cast<std::uint32_t>(to_.size()), region->lkey};
    ibv_send_wr work{}, *bad = nullptr;
    work.sg_list = &part;
    work.num_sge = 1;
    work.opcode = IBV_WR_RDMA_WRITE;
    work.send_flags = IBV_SEND_SIGNALED;
    work.wr.rdma.remote_addr = reinterpret_cast<std::uint64_t>(to_.data());
    work.wr.rdma.rkey = back->rkey;
    ASSERT_EQ(ibv_post_send(pairs_[0], &work, &bad), 0);
    EXPECT_EQ(Await().status, IBV_WC_SUCCESS);
    EXPECT_EQ(to_, there);
    ibv_dereg_mr(back);
  }
  EXPECT_EQ(ibv_dereg_mr(by_address), 0);
  EXPECT_EQ(ibv_dereg_mr(by_dma_buf), 0);
  EXPECT_EQ(Findings(), findings);
}

TEST_F(GpuCardTest, memory_that_was_mapped_anew_under_a_region_is_not_reached_and_is_a_finding) {
  const std::uint64_t findings = Findings();
  ibv_mr* const region = RegisterMemory();
  ASSERT_NE(region, nullptr);
  MapAnew();
  EXPECT_EQ(InUse(), 2 * kBytes) << "the card has the pages that it was told of";
  EXPECT_EQ(WriteThere(region).status, IBV_WC_REM_ACCESS_ERR);
  EXPECT_FALSE(Arrived());
  EXPECT_EQ(Findings(), findings + 1);
  EXPECT_EQ(ibv_dereg_mr(region), 0);
  EXPECT_EQ(Findings(), findings + 2) << "as when that is given up";
  EXPECT_EQ(InUse(), kBytes);
  ibv_mr* const again = RegisterMemory();
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(WriteThere(again).status, IBV_WC_SUCCESS);
  EXPECT_TRUE(Arrived());
  EXPECT_EQ(ibv_dereg_mr(again), 0);
  EXPECT_EQ(Findings(), findings + 2);
}

TEST_F(GpuCardTest, a_dma_buf_of_other_memory_than_lies_at_the_address_is_refused) {
  const std::uint64_t findings = Findings();
  const int of_before = DmaBuf();
  MapAnew();
  EXPECT_EQ(InUse(), 2 * kBytes) << "a dma-buf holds the pages, too";
  EXPECT_EQ(ibv_reg_dmabuf_mr(domain_, 0, kBytes, address_, of_before, IBV_ACCESS_REMOTE_WRITE), nullptr);
  EXPECT_EQ(Findings(), findings + 1);
  ::close(of_before);
  EXPECT_EQ(ibv_reg_dmabuf_mr(domain_, 0, kBytes, address_, -1, IBV_ACCESS_REMOTE_WRITE), nullptr);
  EXPECT_EQ(errno, EBADF) << "as NCCL asks whether dma-bufs are possible";
  EXPECT_EQ(Findings(), findings + 1);
}

TEST_F(GpuCardTest, memory_of_cudaMalloc_is_reached_by_its_address) {
  CUdeviceptr plain = 0;
  ASSERT_EQ(DRIVER(cuMemAlloc)(&plain, from_.size() + 1), CUDA_SUCCESS);
  auto* const there = reinterpret_cast<char*>(plain);
  ibv_mr* const region = ibv_reg_mr(domain_, there, from_.size() + 1, IBV_ACCESS_REMOTE_WRITE);
  ASSERT_NE(region, nullptr);
  Write(from_, own_->lkey, there + 1, region->rkey, 1);
  EXPECT_EQ(Await().status, IBV_WC_SUCCESS);
  EXPECT_TRUE(std::equal(from_.begin(), from_.end(), there + 1));
  EXPECT_EQ(ibv_dereg_mr(region), 0);
  EXPECT_EQ(DRIVER(cuMemFree)(plain), CUDA_SUCCESS);
}

TEST_F(GpuCardTest, the_registrations_that_are_named_fail) {
  amem_card_fault("register=2,deregister=1");
  ibv_mr* const first = RegisterMemory();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(RegisterMemory(), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_EQ(ibv_dereg_mr(first), EBUSY);
  EXPECT_EQ(WriteThere(first).status, IBV_WC_SUCCESS) << "then it is registered still";
  EXPECT_EQ(ibv_dereg_mr(first), 0);
}

}  // namespace
}  // namespace amem::card
