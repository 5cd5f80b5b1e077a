// A process under AMem with AMEM_NETWORK=renew, and a card that gives each registration new keys and knows which live: a
// request that uses another one is counted as stale. Requests complete when a test says so.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <vector>

#include "ncclpatch/intercept/cards.h"
#include "ncclpatch/nccl/attribution.h"
#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem::test {

namespace verbs = intercept::verbs;

inline const bool kRenews = [] {  // before any session starts
  setenv("AMEM_NETWORK", "renew", 1);
  Runtime::Get().SetAbove({.renew = &intercept::Renew});
  return true;
}();

// The card, behind the functions of libibverbs.
struct FakeCard {
  std::mutex mutex;
  std::set<std::uint32_t> keys;
  std::uint32_t next_key = 100, next_pair = 7;
  std::uint64_t registrations = 0, deregistrations = 0, stale = 0, sent = 0;
  int register_fails = 0, deregister_fails = 0;  // with this errno; the former after so many:
  int registers_before = 0;
  int accepts = -1;  // so many sends of a request; -1: all
  std::function<void()> on_deregistering;
  std::deque<verbs::Completion> completions;
  std::vector<verbs::Completion> open;  // what a test lets complete

  void Reset() {
    const std::lock_guard lock(mutex);
    register_fails = deregister_fails = registers_before = 0;
    accepts = -1;
    registrations = deregistrations = stale = sent = 0;
    completions.clear();
    open.clear();
  }
  void CompleteAll() {
    const std::lock_guard lock(mutex);
    completions.insert(completions.end(), open.begin(), open.end());
    open.clear();
  }
};
inline FakeCard g_card;

inline int CardSends(verbs::Pair* pair, verbs::Send* work, verbs::Send** bad) {
  const std::lock_guard lock(g_card.mutex);
  int left = g_card.accepts;
  for (; work != nullptr; work = work->next) {
    if (left-- == 0) return *bad = work, ENOMEM;
    ++g_card.sent;
    for (int i = 0; i < work->count; ++i) g_card.stale += g_card.keys.contains(work->parts[i].local_key) ? 0 : 1;
    if (work->opcode == verbs::kReads) g_card.stale += g_card.keys.contains(work->remote_key) ? 0 : 1;
    if ((work->flags & verbs::kSignaled) != 0) g_card.open.push_back({.id = work->id, .number = pair->number});
  }
  return 0;
}
inline int CardReceives(verbs::Pair* pair, verbs::Receive* work, verbs::Receive**) {
  const std::lock_guard lock(g_card.mutex);
  for (; work != nullptr; work = work->next)
    g_card.open.push_back({.id = work->id, .opcode = verbs::kReceived, .number = pair->number});
  return 0;
}
inline int CardPolls(verbs::Queue*, int most, verbs::Completion* completions) {
  const std::lock_guard lock(g_card.mutex);
  int polled = 0;
  for (; polled < most && !g_card.completions.empty(); ++polled) {
    completions[polled] = g_card.completions.front();
    g_card.completions.pop_front();
  }
  return polled;
}
// What a context that is opened has.
inline verbs::PostSend* g_posts = &CardSends;
inline verbs::PollQueue* g_polls = &CardPolls;
inline verbs::Context* OpenCard(void* device) {
  auto* const context = new verbs::Context{};
  context->device = static_cast<verbs::Device*>(device);
  context->poll = g_polls;
  context->send = g_posts;
  context->receive = &CardReceives;
  return context;
}
inline int CloseCard(verbs::Context* context) {
  EXPECT_EQ(context->send, g_posts) << "the library finds its own functions";
  delete context;
  return 0;
}
inline verbs::Pair* MakePair(void* domain, verbs::PairWanted*) {
  auto* const pair = new verbs::Pair{};
  pair->domain = static_cast<verbs::Domain*>(domain);
  pair->context = pair->domain->context;
  pair->number = g_card.next_pair++;
  return pair;
}
inline int EndPair(verbs::Pair* pair) {
  delete pair;
  return 0;
}
// Of all bits, as the keys of some cards are.
inline std::uint32_t NewKey(std::uint32_t number) { return (number ^ number << 7) * 2246822519U; }
inline void* RegisterRegion(void* domain, void* address, size_t bytes, int) {
  const std::lock_guard lock(g_card.mutex);
  if (g_card.register_fails != 0 && g_card.registers_before-- <= 0) return errno = g_card.register_fails, nullptr;
  auto* const region = new verbs::Region{};
  region->domain = static_cast<verbs::Domain*>(domain);
  region->address = address;
  region->bytes = bytes;
  region->local_key = NewKey(g_card.next_key++);
  region->remote_key = NewKey(g_card.next_key++);
  g_card.keys.insert({region->local_key, region->remote_key});
  ++g_card.registrations;
  return region;
}
inline void* RegisterAtIo(void* domain, void* address, size_t bytes, std::uint64_t, unsigned access) {
  return RegisterRegion(domain, address, bytes, static_cast<int>(access));
}
inline int Undo(void* handle) {
  if (g_card.on_deregistering) g_card.on_deregistering();
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
inline void* RunWork(void* work) {
  (*static_cast<const Work*>(work))();
  return nullptr;
}
inline void* RunJob(void* work) { return RunWork(work); }

class WithCard : public Intercepted {
 protected:
  template <class F>
  static F* Verbs(const char* name, F* real) {
    bool replaced = false;
    void* const entry = replacements::BindExported(name, reinterpret_cast<void*>(real), &replaced);
    EXPECT_TRUE(replaced) << name;
    return reinterpret_cast<F*>(entry);
  }
  // What libnccl calls in place of a function for threads.
  static void* Replaced(std::string_view name) {
    const auto calls = nccl::ThreadCalls();
    const auto found = std::ranges::find(calls, name, &redirects::ThreadCall::name);
    return found == calls.end() ? nullptr : found->replacement;
  }
  // On a thread that NCCL starts with that function.
  static void OnThread(void* (*runs)(void*), const Work& work) {
    const auto start = reinterpret_cast<decltype(&pthread_create)>(Replaced("pthread_create"));
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
    const auto before = std::exchange(nccl::t_state.call, {.id = of, .inside = nccl::Inside::kMaking});
    OnThread(&RunWork, work);
    nccl::t_state.call = before;
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

}  // namespace amem::test
