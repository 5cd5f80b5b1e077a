// The stand-in card refuses what a card refuses; otherwise a job over it would show nothing. Host memory and two queue pairs of
// one process.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#undef ibv_reg_mr

extern "C" void amem_card_counts(std::uint64_t counts[6]);

namespace amem::card {
namespace {

class CardTest : public testing::Test {
 protected:
  CardTest() {
    ::setenv("AMEM_CARD_FINDINGS", "/dev/null", 1);
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

  ibv_mr* Register(std::vector<char>& memory) {
    return ibv_reg_mr(domain_, memory.data(), memory.size(), IBV_ACCESS_REMOTE_WRITE);
  }
  void Write(const std::vector<char>& from, std::uint32_t lkey, const char* to, std::uint32_t rkey, std::uint64_t id,
             bool imm = false) {
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
  ibv_wc Await() {
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

}  // namespace
}  // namespace amem::card
