// AMEM_NETWORK=renew: a pause takes memory that NCCL has registered with a network card, and a resume registers it anew.
//
// The card of this file gives each registration new keys and knows which live: a request that uses another one is counted as
// stale. Requests complete when a test says so.
#include "ncclpatch/intercept/cards.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <map>
#include <set>

#include "ncclpatch/nccl/attribution.h"
#include "tests/ncclpatch/intercept/intercepted.h"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>
#define HAVE_VERBS
#endif

namespace amem {
namespace {

namespace verbs = intercept::verbs;

const bool kRenews = [] {  // before any session starts
  setenv("AMEM_NETWORK", "renew", 1);
  Runtime::Get().SetAbove({.renew = &intercept::Renew});
  return true;
}();

#ifdef HAVE_VERBS
#define SAME(ours, field, theirs, other) static_assert(offsetof(ours, field) == offsetof(theirs, other))
SAME(verbs::Device, name, ibv_device, name);
SAME(verbs::Domain, context, ibv_pd, context);
SAME(verbs::Region, bytes, ibv_mr, length);
SAME(verbs::Region, local_key, ibv_mr, lkey);
SAME(verbs::Region, remote_key, ibv_mr, rkey);
static_assert(sizeof(verbs::Region) == sizeof(ibv_mr));
SAME(verbs::Queue, context, ibv_cq, context);
SAME(verbs::Pair, domain, ibv_qp, pd);
SAME(verbs::Pair, shared_receives, ibv_qp, srq);
SAME(verbs::Pair, number, ibv_qp, qp_num);
SAME(verbs::PairWanted, shared_receives, ibv_qp_init_attr, srq);
SAME(verbs::PairWanted, signals_all, ibv_qp_init_attr, sq_sig_all);
SAME(verbs::Part, local_key, ibv_sge, lkey);
SAME(verbs::Send, parts, ibv_send_wr, sg_list);
SAME(verbs::Send, count, ibv_send_wr, num_sge);
SAME(verbs::Send, opcode, ibv_send_wr, opcode);
SAME(verbs::Send, flags, ibv_send_wr, send_flags);
SAME(verbs::Send, remote_address, ibv_send_wr, wr.rdma.remote_addr);
SAME(verbs::Send, remote_key, ibv_send_wr, wr.rdma.rkey);
static_assert(verbs::kReads == IBV_WR_RDMA_READ && verbs::kSignaled == IBV_SEND_SIGNALED && verbs::kInline == IBV_SEND_INLINE);
SAME(verbs::Receive, next, ibv_recv_wr, next);
SAME(verbs::Completion, status, ibv_wc, status);
SAME(verbs::Completion, opcode, ibv_wc, opcode);
SAME(verbs::Completion, number, ibv_wc, qp_num);
static_assert(sizeof(verbs::Completion) == sizeof(ibv_wc) && verbs::kReceived == IBV_WC_RECV);
SAME(verbs::Context, device, ibv_context, device);
SAME(verbs::Context, poll, ibv_context, ops.poll_cq);
SAME(verbs::Context, send, ibv_context, ops.post_send);
SAME(verbs::Context, receive, ibv_context, ops.post_recv);
#endif

// The card, behind the functions of libibverbs.
struct FakeCard {
  std::mutex mutex;
  std::set<std::uint32_t> keys;
  std::uint32_t next_key = 100, next_pair = 7;
  std::uint64_t registrations = 0, deregistrations = 0, stale = 0, sent = 0;
  int register_fails = 0, deregister_fails = 0;  // with this errno; the former after so many:
  int registers_before = 0;
  std::deque<verbs::Completion> completions;
  std::vector<verbs::Completion> open;  // what a test lets complete

  void Reset() {
    const std::lock_guard lock(mutex);
    register_fails = deregister_fails = registers_before = 0;
    registrations = deregistrations = stale = sent = 0;
    completions.clear();
    open.clear();
  }
  void CompleteAll() {
    const std::lock_guard lock(mutex);
    completions.insert(completions.end(), open.begin(), open.end());
    open.clear();
  }
} g_card;

int CardSends(verbs::Pair* pair, verbs::Send* work, verbs::Send**) {
  const std::lock_guard lock(g_card.mutex);
  for (; work != nullptr; work = work->next) {
    ++g_card.sent;
    for (int i = 0; i < work->count; ++i) g_card.stale += g_card.keys.contains(work->parts[i].local_key) ? 0 : 1;
    if (work->opcode == verbs::kReads) g_card.stale += g_card.keys.contains(work->remote_key) ? 0 : 1;
    if ((work->flags & verbs::kSignaled) != 0) g_card.open.push_back({.id = work->id, .number = pair->number});
  }
  return 0;
}
int CardReceives(verbs::Pair* pair, verbs::Receive* work, verbs::Receive**) {
  const std::lock_guard lock(g_card.mutex);
  for (; work != nullptr; work = work->next)
    g_card.open.push_back({.id = work->id, .opcode = verbs::kReceived, .number = pair->number});
  return 0;
}
int CardPolls(verbs::Queue*, int most, verbs::Completion* completions) {
  const std::lock_guard lock(g_card.mutex);
  int polled = 0;
  for (; polled < most && !g_card.completions.empty(); ++polled) {
    completions[polled] = g_card.completions.front();
    g_card.completions.pop_front();
  }
  return polled;
}
verbs::Context* OpenCard(void* device) {
  auto* const context = new verbs::Context{};
  context->device = static_cast<verbs::Device*>(device);
  context->poll = &CardPolls;
  context->send = &CardSends;
  context->receive = &CardReceives;
  return context;
}
int CloseCard(verbs::Context* context) {
  EXPECT_EQ(context->send, &CardSends) << "the library finds its own functions";
  delete context;
  return 0;
}
verbs::Pair* MakePair(void* domain, verbs::PairWanted*) {
  auto* const pair = new verbs::Pair{};
  pair->domain = static_cast<verbs::Domain*>(domain);
  pair->context = pair->domain->context;
  pair->number = g_card.next_pair++;
  return pair;
}
int EndPair(verbs::Pair* pair) {
  delete pair;
  return 0;
}
void* RegisterRegion(void* domain, void* address, size_t bytes, int) {
  const std::lock_guard lock(g_card.mutex);
  if (g_card.register_fails != 0 && g_card.registers_before-- <= 0) return errno = g_card.register_fails, nullptr;
  auto* const region = new verbs::Region{};
  region->domain = static_cast<verbs::Domain*>(domain);
  region->address = address;
  region->bytes = bytes;
  region->local_key = g_card.next_key++;
  region->remote_key = g_card.next_key++;
  g_card.keys.insert({region->local_key, region->remote_key});
  ++g_card.registrations;
  return region;
}
void* RegisterAtIo(void* domain, void* address, size_t bytes, std::uint64_t, unsigned access) {
  return RegisterRegion(domain, address, bytes, static_cast<int>(access));
}
int Undo(void* handle) {
  const std::lock_guard lock(g_card.mutex);
  if (g_card.deregister_fails != 0) return g_card.deregister_fails;
  auto* const region = static_cast<verbs::Region*>(handle);
  EXPECT_EQ(g_card.keys.erase(region->local_key), 1U) << "it was the card's own region";
  g_card.keys.erase(region->remote_key);
  ++g_card.deregistrations;
  delete region;
  return 0;
}

using Work = std::function<void()>;
void* RunWork(void* work) {
  (*static_cast<const Work*>(work))();
  return nullptr;
}
void* RunJob(void* work) { return RunWork(work); }

class CardsTest : public test::Intercepted {
 protected:
  template <class F>
  static F* Verbs(const char* name, F* real) {
    bool replaced = false;
    void* const entry = replacements::BindExported(name, reinterpret_cast<void*>(real), &replaced);
    EXPECT_TRUE(replaced) << name;
    return reinterpret_cast<F*>(entry);
  }
  // On a thread that NCCL starts with that function.
  static void OnThread(void* (*runs)(void*), const Work& work) {
    const auto start = reinterpret_cast<decltype(pthread_create)*>(nccl::ThreadStarts().front().replacement);
    CUcontext context = nullptr;
    EXPECT_EQ(PLAIN(cuCtxGetCurrent)(&context), CUDA_SUCCESS);
    Work all = [&] {
      EXPECT_EQ(PLAIN(cuCtxSetCurrent)(context), CUDA_SUCCESS);
      work();
    };
    pthread_t thread{};
    ASSERT_EQ(start(&thread, nullptr, runs, &all), 0);
    pthread_join(thread, nullptr);
  }
  // As a communicator's proxy: NCCL has started the thread while it made a communicator.
  static void OnServiceThread(const Work& work, CommunicatorId of = {}) {
    nccl::t_state.making = true;
    const auto before = std::exchange(nccl::t_state.id, of);
    OnThread(&RunWork, work);
    nccl::t_state.id = before;
    nccl::t_state.making = false;
  }
  [[nodiscard]] CUdeviceptr Buffer(size_t bytes) {
    CUdeviceptr address = 0;
    EXPECT_EQ((Nccl<int(size_t, CUdeviceptr*)>("stand_in_nccl_small_buffer")(bytes, &address)), 0);
    buffers_.emplace_back(address, bytes);
    return address;
  }
  verbs::Region* Register(CUdeviceptr address, size_t bytes) {
    return static_cast<verbs::Region*>(reg_mr(&domain_, reinterpret_cast<void*>(address), bytes, 7));
  }
  verbs::Pair* Connect() {
    verbs::PairWanted wanted{};
    return pairs_.emplace_back(create_qp(&domain_, &wanted));
  }
  // A connection's buffer, registered as NCCL's proxy does it.
  void MakeConnection() {
    OnServiceThread([&] {
      pair_ = Connect();
      buffer_ = Buffer(kBytes);
      region_ = Register(buffer_, kBytes);
    });
    ASSERT_NE(region_, nullptr);
  }
  // Of today; a resume on another thread writes it.
  [[nodiscard]] std::uint32_t Key() const { return std::atomic_ref(region_->local_key).load(std::memory_order_relaxed); }
  [[nodiscard]] State Now() const { return session().CopyState(); }
  [[nodiscard]] Allocation Below(CUdeviceptr address) const {
    const State state = Now();
    return state.allocations.at(state.MappingAt(Address{address})->second.allocation);
  }
  [[nodiscard]] static std::string KeptWhy() {
    std::string why;
    session().Inspect([&](const State& state) {
      for (const auto& [id, region] : state.regions) why += region.kept;
      return 0;
    });
    return why;
  }
  int Post(verbs::Pair* pair, std::uint32_t key, unsigned flags = verbs::kSignaled, CUdeviceptr address = 0) {
    verbs::Part part{address == 0 ? buffer_ : address, 64, key};
    verbs::Send work{.id = 1, .parts = &part, .count = 1, .flags = flags}, *bad = nullptr;
    return pair->context->send(pair, &work, &bad);
  }
  int PostReceive(verbs::Pair* pair) {
    verbs::Receive work{.id = 2}, *bad = nullptr;
    return pair->context->receive(pair, &work, &bad);
  }
  int Poll() {
    std::array<verbs::Completion, 16> completions{};
    verbs::Queue queue{context_};
    return context_->poll(&queue, completions.size(), completions.data());
  }
  void PauseStays() {
    ASSERT_TRUE(session().PauseOfIdleHosts().ok());
    EXPECT_TRUE(Below(buffer_).resident);
    EXPECT_EQ(WhyKept(Below(buffer_)), KeepReason::kRegistered);
    EXPECT_EQ(g_card.deregistrations, 0U);
  }
  void PauseLeaves() {
    ASSERT_TRUE(session().PauseOfIdleHosts().ok());
    EXPECT_FALSE(Below(buffer_).resident) << KeptWhy();
  }
  void Resume() {
    const Status resumed = session().Resume();
    ASSERT_TRUE(resumed.ok()) << resumed.message();
  }

  void SetUp() override {
    ASSERT_TRUE(kRenews);
    Intercepted::SetUp();
    g_card.Reset();
    std::snprintf(device_.name, sizeof device_.name, "mlx5_7");
    context_ = open_device(&device_);
    domain_.context = context_;
  }
  void TearDown() override {
    Resume();
    g_card.deregister_fails = g_card.register_fails = 0;
    if (region_ != nullptr) {
      EXPECT_EQ(dereg_mr(region_), 0);
    }
    for (verbs::Pair* const pair : pairs_) EXPECT_EQ(destroy_qp(pair), 0);
    for (const auto& [address, bytes] : buffers_)
      EXPECT_EQ((Nccl<int(CUdeviceptr, size_t)>("stand_in_nccl_free_buffer")(address, bytes)), 0);
    EXPECT_EQ(close_device(context_), 0);
    EXPECT_TRUE(Now().regions.empty());
    EXPECT_TRUE(g_card.keys.empty()) << "all was deregistered";
    EXPECT_EQ(g_card.stale, 0U);
    Intercepted::TearDown();
  }

  decltype(&RegisterRegion) reg_mr = Verbs("ibv_reg_mr", &RegisterRegion);
  decltype(&RegisterAtIo) reg_mr_iova2 = Verbs("ibv_reg_mr_iova2", &RegisterAtIo);
  decltype(&Undo) dereg_mr = Verbs("ibv_dereg_mr", &Undo);
  decltype(&OpenCard) open_device = Verbs("ibv_open_device", &OpenCard);
  decltype(&CloseCard) close_device = Verbs("ibv_close_device", &CloseCard);
  decltype(&MakePair) create_qp = Verbs("ibv_create_qp", &MakePair);
  decltype(&EndPair) destroy_qp = Verbs("ibv_destroy_qp", &EndPair);
  verbs::Device device_{};
  verbs::Context* context_ = nullptr;
  verbs::Domain domain_{};
  verbs::Pair* pair_ = nullptr;
  verbs::Region* region_ = nullptr;
  CUdeviceptr buffer_ = 0;
  std::vector<std::pair<CUdeviceptr, size_t>> buffers_;
  std::vector<verbs::Pair*> pairs_;
};

TEST_F(CardsTest, a_pause_takes_a_connections_buffer_and_a_resume_gives_its_region_new_keys) {
  MakeConnection();
  EXPECT_EQ(Below(buffer_).renewable, 1U);
  const State before = Now();
  ASSERT_EQ(before.regions.size(), 1U);
  EXPECT_EQ(before.regions.begin()->second.card, "mlx5_7");
  EXPECT_EQ(before.regions.begin()->second.access, 7U);
  const std::uint32_t local = Key(), remote = region_->remote_key;
  for (int cycle = 0; cycle < 3; ++cycle) {
    PauseLeaves();
    EXPECT_TRUE(g_card.keys.empty()) << "the card holds nothing";
    Resume();
    EXPECT_EQ(g_card.keys, (std::set{Key(), region_->remote_key}));
  }
  EXPECT_NE(Key(), local);
  EXPECT_NE(region_->remote_key, remote);
  EXPECT_EQ(Post(pair_, Key()), 0);
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
}

TEST_F(CardsTest, without_the_word_that_all_hosts_are_idle_it_stays) {
  MakeConnection();
  ASSERT_TRUE(session().Pause().ok());
  EXPECT_TRUE(Below(buffer_).resident);
  EXPECT_NE(KeptWhy().find("AMEM_HOSTS_IDLE"), std::string::npos) << KeptWhy();
  EXPECT_EQ(Post(pair_, Key()), 0) << "and nothing waits";
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
}

// Windows and transfers from kernels: their keys are told to others once.
TEST_F(CardsTest, what_other_threads_register_pins_and_the_reason_is_known) {
  const auto pins = [&](const auto& on_thread, const std::string& why) {
    verbs::Region* region = nullptr;
    on_thread([&] {
      Connect();
      buffer_ = Buffer(kBytes);
      region = Register(buffer_, kBytes);
    });
    EXPECT_EQ(Below(buffer_).pinned, 1U);
    EXPECT_EQ(Below(buffer_).renewable, 0U);
    EXPECT_EQ(Now().registrations.at({Address{buffer_}, ""}).pins, why);
    PauseStays();
    Resume();
    EXPECT_EQ(dereg_mr(region), 0);
    g_card.deregistrations = 0;
  };
  const std::string other = "it was not registered by the thread that serves a communicator's connections";
  pins([](const Work& work) { work(); }, other);
  pins([](const Work& work) { OnThread(&RunWork, work); }, other);
  // A part of a group of calls, begun by another such part.
  pins([](const Work& work) { OnThread(&RunJob, [&] { OnThread(&RunJob, work); }); }, other);
}

TEST_F(CardsTest, a_thread_that_a_part_of_a_group_starts_to_serve_connections_is_known) {
  OnThread(&RunJob, [&] {
    OnThread(&RunWork, [&] {
      Connect();
      buffer_ = Buffer(kBytes);
      region_ = Register(buffer_, kBytes);
    });
  });
  EXPECT_EQ(Below(buffer_).renewable, 1U);
}

TEST_F(CardsTest, another_io_address_and_memory_of_the_program_pin) {
  verbs::Region *at_zero = nullptr, *programs = nullptr;
  OnServiceThread([&] {
    Connect();
    buffer_ = Buffer(kBytes);
    at_zero = static_cast<verbs::Region*>(reg_mr_iova2(&domain_, reinterpret_cast<void*>(buffer_), kBytes, 0, 7));
    programs = Register(memory(), kBytes);
    region_ = static_cast<verbs::Region*>(reg_mr_iova2(&domain_, reinterpret_cast<void*>(buffer_), kBytes, buffer_, 7));
  });
  EXPECT_EQ(Below(buffer_).pinned, 1U);
  EXPECT_EQ(Below(buffer_).renewable, 1U);
  EXPECT_EQ(Now().registrations.at({Address{buffer_}, ""}).pins, "the card knows it by another address");
  EXPECT_EQ(Now().registrations.at({Address{memory()}, ""}).pins, "its memory is the program's");
  PauseStays();
  Resume();
  EXPECT_EQ(dereg_mr(at_zero), 0);
  EXPECT_EQ(dereg_mr(programs), 0);
  PauseLeaves();
}

TEST_F(CardsTest, what_is_not_quiet_in_time_stays_and_the_message_says_what_is_under_way) {
  MakeConnection();
  EXPECT_EQ(Post(pair_, Key()), 0);
  EXPECT_EQ(Post(pair_, Key()), 0);
  EXPECT_EQ(PostReceive(pair_), 0);
  PauseStays();
  EXPECT_EQ(KeptWhy(), "mlx5_7: queue pair " + std::to_string(pair_->number) + " has 2 sends and 1 receive under way");
  Resume();
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 3);
  EXPECT_EQ(KeptWhy(), "");
  PauseLeaves();
}

TEST_F(CardsTest, a_pause_waits_for_what_ends_soon) {
  MakeConnection();
  EXPECT_EQ(Post(pair_, Key()), 0);
  std::thread ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    g_card.CompleteAll();
    EXPECT_EQ(Poll(), 1);
  });
  PauseLeaves();
  ends.join();
}

TEST_F(CardsTest, sends_of_gpu_memory_that_nobody_tells_the_end_of_are_not_quiet) {
  MakeConnection();
  EXPECT_EQ(Post(pair_, Key(), 0), 0);
  PauseStays();
  Resume();
  EXPECT_EQ(Post(pair_, Key()), 0) << "which ends after it";
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
  std::array<char, 64> host{};
  EXPECT_EQ(Post(pair_, Key(), 0, reinterpret_cast<CUdeviceptr>(host.data())), 0) << "of no GPU";
  PauseLeaves();
}

// Where NCCL tells a peer of receives, it sends from host memory, and mostly asks for no completion. On a machine with GPUs
// such memory lies between registered ranges.
TEST_F(CardsTest, silent_sends_of_host_memory_between_registered_ranges_do_no_harm) {
  MakeConnection();
  CUdeviceptr far = 0;
  verbs::Region* other = nullptr;
  OnServiceThread([&] {
    static_cast<void>(Connect());
    static_cast<void>(Buffer(kBytes));
    far = Buffer(kBytes);
    other = Register(far, kBytes);
  });
  const CUdeviceptr between = std::min(buffer_, far) + kBytes + 4096;
  ASSERT_LT(between + 64, std::max(buffer_, far)) << "the ranges are not apart";
  EXPECT_EQ(Post(pair_, Key()), 0);
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Post(pair_, Key(), 0, between), 0);
  PauseLeaves();
  Resume();
  EXPECT_EQ(Post(pair_, Key(), 0, far), 0);
  EXPECT_EQ(Post(pair_, Key(), 0, between), 0) << "which does not tell the end of the one before";
  ASSERT_TRUE(session().PauseOfIdleHosts().ok());
  EXPECT_TRUE(Below(buffer_).resident);
  EXPECT_NE(KeptWhy().find("sends whose end nobody tells"), std::string::npos) << KeptWhy();
  Resume();
  EXPECT_EQ(dereg_mr(other), 0);
  EXPECT_EQ(Post(pair_, Key()), 0);
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
}

// NCCL makes a dma-buf for each connection that uses a buffer, and registers only the first.
TEST_F(CardsTest, a_dma_buf_that_is_closed_unused_pins_no_longer_than_somebody_has_it) {
  MakeConnection();
  // A dma-buf is a file of its own; the simulator's is that of the memory.
  const auto make = Replace<decltype(cuMemGetHandleForAddressRange)>(
      "cuMemGetHandleForAddressRange", +[](void* descriptor, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long) {
        const int made = ::memfd_create("dma-buf", MFD_CLOEXEC);
        *static_cast<int*>(descriptor) = made;
        return ::ftruncate(made, 4096) == 0 ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
      });
  int descriptor = -1;
  OnServiceThread([&] { ASSERT_EQ(make(&descriptor, buffer_, kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), CUDA_SUCCESS); });
  const int elsewhere = ::dup(descriptor);
  ASSERT_EQ(::close(descriptor), 0);
  Forever<intercept::Registrations>().DropClosed();
  PauseStays();
  Resume();
  void* const mapped = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, elsewhere, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  ASSERT_EQ(::close(elsewhere), 0);
  Forever<intercept::Registrations>().DropClosed();
  PauseStays();
  Resume();
  ASSERT_EQ(::munmap(mapped, 4096), 0);
  Forever<intercept::Registrations>().DropClosed();
  PauseLeaves();
}

TEST_F(CardsTest, a_pair_after_a_failure_is_not_quiet_until_it_is_destroyed) {
  MakeConnection();
  EXPECT_EQ(Post(pair_, Key()), 0);
  for (auto& one : g_card.open) one.status = 5;
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
  PauseStays();
  EXPECT_NE(KeptWhy().find("after a request that failed"), std::string::npos) << KeptWhy();
  Resume();
  std::erase(pairs_, pair_);
  EXPECT_EQ(destroy_qp(pair_), 0);
  PauseLeaves();
}

// An unmatched send shows in no call until its receive comes. Then it waits, and goes on with the key of today.
TEST_F(CardsTest, what_is_posted_during_a_pause_waits_and_uses_no_key_that_has_ended) {
  MakeConnection();
  PauseLeaves();
  std::atomic<int> returned = 0;
  const std::uint32_t ended = Key(), ended_remote = region_->remote_key;
  std::thread sends([&] {
    EXPECT_EQ(Post(pair_, ended), 0);
    ++returned;
  });
  std::thread flushes([&] {
    std::uint32_t host_key = 1;
    {
      const std::lock_guard lock(g_card.mutex);
      g_card.keys.insert(host_key);
    }
    std::array<char, 64> host{};
    verbs::Part part{reinterpret_cast<std::uint64_t>(host.data()), 1, host_key};
    verbs::Send work{.parts = &part,
                     .count = 1,
                     .opcode = verbs::kReads,
                     .flags = verbs::kSignaled,
                     .remote_address = buffer_ + 4096,
                     .remote_key = ended_remote};
    verbs::Send* bad = nullptr;
    EXPECT_EQ(pair_->context->send(pair_, &work, &bad), 0);
    ++returned;
    const std::lock_guard lock(g_card.mutex);
    g_card.keys.erase(host_key);
  });
  std::thread receives([&] {
    EXPECT_EQ(PostReceive(pair_), 0);
    ++returned;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(returned, 0);
  EXPECT_EQ(g_card.sent, 0U);
  Resume();
  sends.join();
  flushes.join();
  receives.join();
  EXPECT_EQ(g_card.sent, 2U);
  EXPECT_EQ(g_card.stale, 0U);
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 3);
}

TEST_F(CardsTest, a_communicator_that_ends_while_paused_is_let_go_and_others_wait_on) {
  MakeConnection();
  PauseLeaves();
  std::atomic<int> result = -1, other_result = -1;
  constexpr CommunicatorId kEnds{41}, kLives{42};
  const auto post = [&](CommunicatorId of, std::atomic<int>& into) {
    return std::thread([&, of] {
      nccl::t_state.id = of;
      into = Post(pair_, Key());
    });
  };
  std::thread ends = post(kEnds, result), lives = post(kLives, other_result);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(result, -1);
  nccl::TellEnding(kEnds, true);
  ends.join();
  EXPECT_EQ(result, EIO);
  EXPECT_EQ(g_card.sent, 0U);
  EXPECT_EQ(other_result, -1);
  Resume();
  lives.join();
  EXPECT_EQ(other_result, 0);
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
}

TEST_F(CardsTest, a_communicator_that_has_ended_before_the_pause_lets_nobody_go) {
  MakeConnection();
  nccl::TellEnding({}, true);
  nccl::TellEnding({}, false);
  PauseLeaves();
  std::atomic<int> result = -1;
  std::thread sends([&] { result = Post(pair_, Key()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(result, -1);
  Resume();
  sends.join();
  EXPECT_EQ(result, 0);
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
}

TEST_F(CardsTest, a_deregistration_while_paused_succeeds) {
  MakeConnection();
  PauseLeaves();
  EXPECT_EQ(dereg_mr(std::exchange(region_, nullptr)), 0);
  EXPECT_EQ(g_card.deregistrations, 1U) << "by the pause";
  EXPECT_TRUE(Now().regions.empty());
  Resume();
  EXPECT_EQ(g_card.registrations, 1U);
  EXPECT_EQ(Below(buffer_).renewable, 0U);
}

TEST_F(CardsTest, a_deregistration_that_fails_for_nccl_keeps_the_shadow) {
  MakeConnection();
  g_card.deregister_fails = EBUSY;
  EXPECT_EQ(dereg_mr(region_), EBUSY);
  g_card.deregister_fails = 0;
  EXPECT_EQ(Below(buffer_).renewable, 1U);
  PauseLeaves();
}

TEST_F(CardsTest, what_the_card_does_not_deregister_stays_this_time) {
  MakeConnection();
  g_card.deregister_fails = EBUSY;
  PauseStays();
  EXPECT_NE(KeptWhy().find("mlx5_7 did not deregister 2 MiB"), std::string::npos) << KeptWhy();
  EXPECT_NE(KeptWhy().find("errno 16"), std::string::npos) << KeptWhy();
  const std::uint32_t key = Key();
  Resume();
  EXPECT_EQ(Key(), key);
  g_card.deregister_fails = 0;
  PauseLeaves();
}

TEST_F(CardsTest, a_resume_whose_registration_fails_leaves_all_paused_and_can_be_repeated) {
  MakeConnection();
  const auto write = PLAIN(cuMemsetD8);
  EXPECT_EQ(write(buffer_, 0x5a, kBytes), CUDA_SUCCESS);
  PauseLeaves();
  g_card.register_fails = ENOMEM;
  const Status failed = session().ResumeInTime();
  EXPECT_FALSE(failed.ok());
  EXPECT_NE(failed.message().find("mlx5_7 did not register 2 MiB at " + Hex(buffer_)), std::string::npos) << failed.message();
  EXPECT_NE(failed.message().find("errno 12"), std::string::npos) << failed.message();
  EXPECT_NE(failed.message().find("stays paused, with its contents kept"), std::string::npos) << failed.message();
  EXPECT_TRUE(session().paused());
  EXPECT_FALSE(Below(buffer_).resident);
  g_card.register_fails = 0;
  Resume();
  std::vector<unsigned char> contents(kBytes);
  EXPECT_EQ(PLAIN(cuMemcpyDtoH)(contents.data(), buffer_, kBytes), CUDA_SUCCESS);
  EXPECT_EQ(contents, std::vector<unsigned char>(kBytes, 0x5a));
}

TEST_F(CardsTest, what_was_registered_before_the_one_that_fails_is_deregistered_again) {
  MakeConnection();
  CUdeviceptr second = 0;
  verbs::Region* other = nullptr;
  OnServiceThread([&] {
    Connect();
    second = Buffer(kBytes);
    other = Register(second, kBytes);
  });
  PauseLeaves();
  g_card.register_fails = ENOMEM;
  g_card.registers_before = 1;
  EXPECT_FALSE(session().ResumeInTime().ok());
  EXPECT_TRUE(g_card.keys.empty());
  EXPECT_FALSE(Below(buffer_).resident);
  EXPECT_FALSE(Below(second).resident);
  g_card.register_fails = 0;
  Resume();
  EXPECT_EQ(g_card.keys.size(), 4U);
  EXPECT_EQ(dereg_mr(other), 0);
}

TEST_F(CardsTest, a_pair_that_was_not_seen_made_keeps_all_of_its_card) {
  MakeConnection();
  verbs::Pair unseen{};
  unseen.context = context_;
  unseen.domain = &domain_;
  unseen.number = 4000;
  EXPECT_EQ(Post(&unseen, Key()), 0);
  PauseStays();
  EXPECT_NE(KeptWhy().find("that AMem has not seen made"), std::string::npos) << KeptWhy();
}

TEST_F(CardsTest, a_tag_and_its_pause_know_nothing_of_it) {
  MakeConnection();
  Pools& pools = session().pools();
  const PoolId tag = *pools.Open("cards", PoolPolicy::kPreserve);
  const Address part = *pools.Allocate(tag, kBytes, DeviceOrdinal{0});
  verbs::Region* region = nullptr;
  OnServiceThread([&] {
    Connect();
    region = Register(part.value, kBytes);
  });
  EXPECT_EQ(Below(part.value).pinned, 1U);
  EXPECT_TRUE(pools.Pause(tag, {}).ok());
  EXPECT_EQ(Post(pair_, Key()), 0) << "NCCL is not paused";
  EXPECT_TRUE(pools.Resume(tag, {}).ok());
  EXPECT_EQ(dereg_mr(region), 0);
  EXPECT_TRUE(pools.Free(part, nullptr).ok());
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
}

}  // namespace
}  // namespace amem
