// What a job of several hosts keeps in a pause: the buffers that its network card holds, and nothing around them.
#include <algorithm>
#include <map>
#include <thread>
#include <vector>

#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem {
namespace {

constexpr Bytes kMiB = Bytes{1} << 20;
// Of a stock communicator with one GPU a host, 2.28.9: eight buffers of connections, each with 8.75 of 10 MiB registered, one
// that connections share, and what no card sees.
constexpr Bytes kConnection = 10 * kMiB, kRegion = 35 * kMiB / 8, kShared = 16 * kMiB, kOther = 2 * kMiB;
constexpr int kConnections = 4, kOthers = 14;
constexpr Bytes kOfCard = 2 * kConnections * kConnection + kShared;

using RegMr = void*(void*, void*, size_t, int);
using DeregMr = int(void*);
using Make = int(size_t, CUdeviceptr*);
using Connect = int(RegMr*, size_t, size_t, CUdeviceptr*);

std::uintptr_t g_regions = 0;  // handed out so far; a region is its number
void* NewRegion(void*, void*, size_t, int) { return reinterpret_cast<void*>(++g_regions); }
int Undone(void*) { return 0; }

class NetworkTest : public test::Intercepted {
 protected:
  struct Buffer {
    CUdeviceptr address = 0;
    Bytes bytes = 0;
  };
  template <class F>
  static F* Verbs(const char* name, F* real) {
    return reinterpret_cast<F*>(replacements::BindExported(name, reinterpret_cast<void*>(real), nullptr));
  }
  // As a thread of NCCL's, which has not met a card yet.
  template <class Work>
  static void OnAThread(const Work& work) {
    CUcontext context = nullptr;
    EXPECT_EQ(PLAIN(cuCtxGetCurrent)(&context), CUDA_SUCCESS);
    std::thread([&] {
      EXPECT_EQ(PLAIN(cuCtxSetCurrent)(context), CUDA_SUCCESS);
      work();
    }).join();
  }
  Buffer Made(const char* path, Bytes bytes) {
    Buffer made{0, bytes};
    EXPECT_EQ(Nccl<Make>(path)(bytes, &made.address), 0);
    return all_.emplace_back(made);
  }
  void Connected(const char* path) {
    Buffer made{0, kConnection};
    EXPECT_EQ(Nccl<Connect>(path)(reg_mr, made.bytes, kRegion, &made.address), 0);
    all_.push_back(made);
  }
  // In the order of NCCL 2.18: the rings connect, the shared buffer is made, and a first send registers that.
  void MakeCommunicator() {
    for (int i = 0; i < kOthers; ++i) Made("stand_in_nccl_small_buffer", kOther);
    OnAThread([&] {
      Connected("stand_in_nccl_send_buffer");
      const Buffer shared = Made("stand_in_nccl_shared_buffer", kShared);
      shared_.push_back(shared);
      for (int i = 1; i < kConnections; ++i) Connected("stand_in_nccl_send_buffer");
      for (int i = 0; i < kConnections; ++i) Connected("stand_in_nccl_receive_buffer");
      EXPECT_NE(reg_mr(nullptr, reinterpret_cast<void*>(shared.address), shared.bytes, 1), nullptr);
    });
  }
  void Deregister() {
    for (; undone_ < g_regions; ++undone_) EXPECT_EQ(dereg_mr(reinterpret_cast<void*>(undone_ + 1)), 0);
  }
  void Free(const std::vector<Buffer>& buffers) {
    const auto free = Nccl<int(CUdeviceptr, size_t)>("stand_in_nccl_free_buffer");
    for (const Buffer& one : buffers) {
      EXPECT_EQ(free(one.address, one.bytes), 0);
      std::erase_if(all_, [&](const Buffer& known) { return known.address == one.address; });
    }
  }
  static Bytes InUse() {
    std::size_t free = 0, total = 0;
    EXPECT_EQ(PLAIN(cuMemGetInfo)(&free, &total), CUDA_SUCCESS);
    return total - free;
  }
  // What is on the device in a pause, besides what there is before the test.
  [[nodiscard]] Bytes StaysInAPause() const {
    EXPECT_TRUE(session().Pause().ok());
    const Bytes stays = InUse() + kBytes - before_;  // the fixture's memory leaves, too
    EXPECT_TRUE(session().Resume().ok());
    return stays;
  }
  static Bytes KeptForCards() {
    const auto kept = session().Inspect([](const State& state) { return MeasureTag(state, false).kept; });
    const auto* const registered = FindIn(kept, KeepReason::kRegistered);
    return registered == nullptr ? 0 : *registered;
  }

  void SetUp() override {
    Intercepted::SetUp();
    undone_ = g_regions;
    before_ = InUse();
  }
  void TearDown() override {
    unsetenv("NCCL_CUMEM_ENABLE");
    Intercepted::TearDown();
  }

  RegMr* reg_mr = Verbs<RegMr>("ibv_reg_mr", &NewRegion);
  DeregMr* dereg_mr = Verbs<DeregMr>("ibv_dereg_mr", &Undone);
  std::vector<Buffer> all_, shared_;
  Bytes before_ = 0;
  std::uintptr_t undone_ = 0;
};

TEST_F(NetworkTest, a_pause_of_three_communicators_keeps_the_buffers_of_connections_and_no_slab) {
  OnAThread([&] {
    for (int i = 0; i < 3; ++i) MakeCommunicator();
  });
  const Bytes held = 3 * (kOfCard + kOthers * kOther);
  EXPECT_GE(InUse() - before_, held);
  EXPECT_EQ(StaysInAPause(), 3 * kOfCard) << "of " << held / kMiB << " MiB";
  EXPECT_EQ(KeptForCards(), 3 * kOfCard) << "and amem.memory() says so";
  Deregister();
  Free(std::vector(all_));
  EXPECT_EQ(InUse(), before_);
}

// After transfers through another GPU's card NCCL forgets the shared buffers of its communicators.
TEST_F(NetworkTest, a_buffer_that_nccl_never_frees_holds_only_itself) {
  OnAThread([&] {
    for (int i = 0; i < 3; ++i) MakeCommunicator();
  });
  std::vector<Buffer> rest;
  std::ranges::copy_if(all_, std::back_inserter(rest), [&](const Buffer& one) { return one.bytes != kShared; });
  Deregister();
  Free(rest);
  EXPECT_EQ(InUse(), before_ + 3 * kShared);
  Free(std::vector(shared_));
  EXPECT_EQ(InUse(), before_);
}

TEST_F(NetworkTest, the_same_holds_for_cuMemAlloc) {
  setenv("NCCL_CUMEM_ENABLE", "0", 1);
  OnAThread([&] { MakeCommunicator(); });
  EXPECT_EQ(StaysInAPause(), kOfCard);
  Deregister();
  Free(std::vector(all_));
  EXPECT_EQ(InUse(), before_);
}

// Buffers between GPUs of one host are made by the same threads.
TEST_F(NetworkTest, what_is_never_registered_goes_to_slabs_after_a_few) {
  const auto slabs_and_alone = [] {
    return session().Inspect([](const State& state) {
      std::map<bool, int> counts;
      for (const auto& [id, a] : state.allocations)
        if (a.tag == MemoryTag::kNccl && !state.slabs.contains(id)) ++counts[a.placed()];
      return std::pair(counts[true], counts[false]);
    });
  };
  OnAThread([&] {
    for (int i = 0; i < 20; ++i) Made("stand_in_nccl_peer_buffer", kOther);
  });
  EXPECT_EQ(slabs_and_alone(), std::pair(20, 0)) << "a thread without a card";
  OnAThread([&] {
    Connected("stand_in_nccl_send_buffer");
    for (int i = 0; i < 20; ++i) Made("stand_in_nccl_peer_buffer", kOther);
  });
  EXPECT_EQ(slabs_and_alone(), std::pair(32, 9));
  EXPECT_EQ(StaysInAPause(), kConnection);
  Deregister();
  EXPECT_EQ(StaysInAPause(), 0U);
  Free(std::vector(all_));
  EXPECT_EQ(InUse(), before_);
}

TEST_F(NetworkTest, a_path_by_which_memory_came_to_a_card_once_is_known_on_every_thread) {
  const auto in_a_slab = [](const Buffer& buffer) {
    return session().Inspect([&](const State& state) { return static_cast<bool>(state.PartAt(Address{buffer.address})); });
  };
  Buffer first, next;
  OnAThread([&] { first = Made("stand_in_nccl_small_buffer", kOther); });
  EXPECT_TRUE(in_a_slab(first));
  EXPECT_NE(reg_mr(nullptr, reinterpret_cast<void*>(first.address + 4096), 4096, 1), nullptr);
  OnAThread([&] { next = Made("stand_in_nccl_small_buffer", kOther); });
  EXPECT_FALSE(in_a_slab(next));
  Deregister();
  Free(std::vector(all_));
}

}  // namespace
}  // namespace amem
