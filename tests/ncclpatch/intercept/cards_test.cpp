// AMEM_NETWORK=renew: a pause takes memory that NCCL has registered with a network card, and a resume registers it anew.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <iterator>

#include "ncclpatch/intercept/live_keys.h"
#include "tests/ncclpatch/intercept/with_card.h"
#include "tests/without_memory.h"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>
#define HAVE_VERBS
#endif

namespace amem {
namespace {

namespace verbs = intercept::verbs;
using test::g_card;
using test::RunJob;
using test::RunWork;
using test::Work;

class CardsTest : public test::WithCard {
 protected:
  // As NCCL flushes what has arrived: a read of a byte of the buffer into host memory.
  int Flush(std::uint32_t remote_key) {
    constexpr std::uint32_t kHostKey = 1;
    const auto lend = [&](bool lent) {
      const std::lock_guard lock(g_card.mutex);
      if (lent)
        g_card.keys.insert(kHostKey);
      else
        g_card.keys.erase(kHostKey);
    };
    std::array<char, 64> host{};
    verbs::Part part{reinterpret_cast<std::uint64_t>(host.data()), 1, kHostKey};
    verbs::Send work{.parts = &part,
                     .count = 1,
                     .opcode = verbs::kReads,
                     .flags = verbs::kSignaled,
                     .remote_address = buffer_ + 4096,
                     .remote_key = remote_key};
    verbs::Send* bad = nullptr;
    lend(true);
    const int answer = pair_->context->send(pair_, &work, &bad);
    lend(false);
    return answer;
  }
  template <class Call>
  static std::chrono::nanoseconds Took(const Call& call) {
    const auto began = std::chrono::steady_clock::now();
    call();
    return std::chrono::steady_clock::now() - began;
  }
};

using intercept::LiveKeys;

TEST(LiveKeysTest, a_key_is_good_for_its_own_memory_and_domain_until_it_is_removed) {
  static LiveKeys keys;
  const int domain = 0, other = 0;
  keys.Add({7, &domain, 0x1000, 0x3000});
  EXPECT_TRUE(keys.Cover(7, &domain, 0x1000, 0x2000));
  EXPECT_FALSE(keys.Cover(7, &domain, 0x1000, 0x2001));
  EXPECT_FALSE(keys.Cover(7, &domain, 0xfff, 2));
  EXPECT_FALSE(keys.Cover(7, &other, 0x1000, 1));
  EXPECT_FALSE(keys.Cover(8, &domain, 0x1000, 1));
  keys.Add({7, &other, 0x8000, 0x9000});
  EXPECT_TRUE(keys.Cover(7, &domain, 0x1000, 1)) << "cards count alike";
  EXPECT_TRUE(keys.Cover(7, &other, 0x8000, 1));
  keys.Remove(7, &domain);
  EXPECT_FALSE(keys.Cover(7, &domain, 0x1000, 1));
  EXPECT_TRUE(keys.Cover(7, &other, 0x8000, 1));
}

// As cards give them: in order, in the upper bits alone, or at random.
TEST(LiveKeysTest, all_of_many_keys_are_known_and_none_once_it_is_removed) {
  constexpr std::uint32_t kMany = 20'000;
  const int domain = 0;
  using KeyOf = std::uint32_t (*)(std::uint32_t);
  for (const KeyOf key_of : {+[](std::uint32_t i) { return i; }, +[](std::uint32_t i) { return i << 8 | 0x2b; },
                             +[](std::uint32_t i) { return (i ^ i << 7) * 2246822519U; }}) {
    auto* const keys = new LiveKeys;  // never destroyed, as the cards' own, so that its tables do not leak
    static auto& all = *new std::vector<LiveKeys*>;
    all.push_back(keys);
    for (std::uint32_t i = 1; i <= kMany; ++i) keys->Add({key_of(i), &domain, i * 0x1000ULL, (i + 1) * 0x1000ULL});
    for (std::uint32_t i = 1; i <= kMany; ++i) {
      ASSERT_TRUE(keys->Cover(key_of(i), &domain, i * 0x1000ULL, 0x1000)) << i;
      ASSERT_FALSE(keys->Cover(key_of(i), &domain, i * 0x1000ULL, 0x1001)) << i;
    }
    for (std::uint32_t i = 1; i <= kMany; ++i) keys->Remove(key_of(i), &domain);
    for (std::uint32_t i = 1; i <= kMany; ++i) ASSERT_FALSE(keys->Cover(key_of(i), &domain, i * 0x1000ULL, 1)) << i;
  }
}

// So many have one place that no table could have them all.
TEST(LiveKeysTest, keys_that_find_no_place_are_unknown_and_no_other_suffers) {
  static LiveKeys keys;
  std::array<int, 10> domains{};
  for (int& domain : domains) keys.Add({7, &domain, 0x1000, 0x2000});
  keys.Add({8, domains.data(), 0x5000, 0x6000});
  std::size_t known = 0;
  for (const int& domain : domains) known += keys.Cover(7, &domain, 0x1000, 1) ? 1 : 0;
  EXPECT_EQ(known, 4U);
  EXPECT_TRUE(keys.Cover(8, domains.data(), 0x5000, 1));
}

// A card may give a key again, for other memory.
TEST(LiveKeysTest, a_reader_never_takes_a_key_for_another_ones_memory) {
  static LiveKeys keys;
  static constexpr std::uint64_t kLow = 0x10000, kHigh = 0x40000, kSize = 0x1000;
  const int domain = 0;
  std::atomic<bool> ended = false;
  std::atomic<std::uint64_t> wrong = 0, right = 0;
  std::thread reads([&] {
    while (!ended) {
      // From one memory into the other: good only for whoever reads half of each entry.
      wrong += keys.Cover(7, &domain, kLow, kHigh - kLow + kSize) ? 1 : 0;
      right += keys.Cover(7, &domain, kLow, kSize) || keys.Cover(7, &domain, kHigh, kSize) ? 1 : 0;
    }
  });
  for (int i = 0; i < 20'000 || right == 0; ++i) {
    keys.Add({7, &domain, kLow, kLow + kSize});
    keys.Remove(7, &domain);
    keys.Add({7, &domain, kHigh, kHigh + kSize});
    keys.Remove(7, &domain);
  }
  ended = true;
  reads.join();
  EXPECT_EQ(wrong, 0U);
}

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

// In amem.stats(), and in amem.memory() of the tag nccl.
TEST_F(CardsTest, what_each_card_holds_is_told_also_in_a_pause) {
  MakeConnection();
  verbs::Region* const window = Register(buffer_, kBytes / 2);  // by a thread of the program's
  const auto holds = [](const std::string& text) { return session().statistics().Json().find(text) != std::string::npos; };
  const std::string pinned =
      R"("pinned":{"it was not registered by the thread that serves a communicator's connections":1048576},)";
  EXPECT_TRUE(holds(R"("cards":[{"card":"mlx5_7",)" + pinned + R"("pinned_bytes":1048576,"pinned_regions":1,)" +
                    R"("renewable_bytes":2097152,"renewable_now_bytes":2097152,"renewable_regions":1}])"))
      << session().statistics().Json();
  EXPECT_EQ(dereg_mr(window), 0);
  PauseLeaves();
  const std::string gone = R"("renewable_bytes":2097152,"renewable_now_bytes":0,"renewable_regions":1)";
  EXPECT_TRUE(holds(gone)) << session().statistics().Json();
  EXPECT_NE(session().statistics().MemoryJson().find(gone), std::string::npos) << session().statistics().MemoryJson();
  EXPECT_NE(session().statistics().Text().find("a pause undoes       2 MiB in 1 regions that mlx5_7 holds"), std::string::npos)
      << session().statistics().Text();
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

// The dma-buf pins first, by nobody, and the card is known only after it.
TEST_F(CardsTest, the_card_and_the_reason_are_known_of_what_is_registered_by_dma_buf) {
  const auto make = Driver<decltype(cuMemGetHandleForAddressRange)>("cuMemGetHandleForAddressRange");
  const auto reg = Verbs(
      "ibv_reg_dmabuf_mr", +[](void* domain, std::uint64_t, size_t bytes, std::uint64_t at, int, int access) {
        return test::RegisterRegion(domain, reinterpret_cast<void*>(at), bytes, access);
      });
  Connect();
  buffer_ = Buffer(kBytes);
  int descriptor = -1;
  ASSERT_EQ(make(&descriptor, buffer_, kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), CUDA_SUCCESS);
  auto* const region = static_cast<verbs::Region*>(reg(&domain_, 0, kBytes, buffer_, descriptor, 7));
  ASSERT_EQ(::close(descriptor), 0);
  const Registration noted = Now().registrations.at({Address{buffer_}, ""});
  EXPECT_EQ(noted.count, 1U);
  EXPECT_EQ(noted.card, "mlx5_7");
  EXPECT_EQ(noted.pins, "it was not registered by the thread that serves a communicator's connections");
  PauseStays();
  Resume();
  EXPECT_EQ(dereg_mr(region), 0);
  EXPECT_TRUE(Now().registrations.empty());
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

// As with NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS: as many receives are open at each pause as at the one before.
TEST_F(CardsTest, receives_that_are_posted_ahead_are_waited_for_long_but_once) {
  MakeConnection();
  const auto post = [this] {
    for (int i = 0; i < 3; ++i) EXPECT_EQ(PostReceive(pair_), 0);
  };
  const auto complete = [this] {
    g_card.CompleteAll();
    EXPECT_EQ(Poll(), 3);
  };
  post();
  const auto first = Took([this] { PauseStays(); });
  Resume();
  complete();
  post();
  EXPECT_LT(4 * Took([this] { PauseStays(); }), first);
  EXPECT_EQ(KeptWhy(), "mlx5_7: queue pair " + std::to_string(pair_->number) +
                           " has 0 sends and 3 receives under way, as many as at an earlier pause, so perhaps posted ahead");
  Resume();
  complete();
  // Once the card was quiet in a pause, such receives are waited for as any are.
  PauseLeaves();
  Resume();
  post();
  std::thread ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    complete();
  });
  PauseLeaves();
  ends.join();
}

// Each time that the gate is shut something begins: the wait ends at its deadline all the same.
TEST(TrafficGateTest, traffic_that_begins_behind_the_gate_costs_no_more_than_the_deadline) {
  class Busy final : public intercept::TrafficGate {
    Traffic UnderWay() override { return {.what = IsShut() ? "one send" : ""}; }
  };
  static Busy gate;
  auto why = intercept::TrafficGate::Shut({&gate}, In(std::chrono::milliseconds(30)));
  EXPECT_EQ(why[&gate], "one send");
  EXPECT_FALSE(gate.IsShut());
}

// Even those that look posted ahead are waited for shortly.
TEST_F(CardsTest, receives_that_end_soon_are_not_taken_for_those_that_are_posted_ahead) {
  MakeConnection();
  EXPECT_EQ(PostReceive(pair_), 0);
  PauseStays();
  bool left = false;
  for (int tries = 0; tries < 10 && !left; ++tries) {  // this thread may be late
    Resume();
    std::thread ends([this] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      g_card.CompleteAll();
      EXPECT_EQ(Poll(), 1);
    });
    ASSERT_TRUE(session().PauseOfIdleHosts().ok());
    left = !Below(buffer_).resident;
    ends.join();
    if (!left) {
      EXPECT_EQ(PostReceive(pair_), 0);
    }
  }
  EXPECT_TRUE(left);
}

// Each card has all the time that there is, so that one pause is long, and not one for each card.
TEST_F(CardsTest, receives_that_are_posted_ahead_on_two_cards_are_waited_for_at_once) {
  MakeConnection();
  verbs::Device second_device{};
  std::snprintf(second_device.name, sizeof second_device.name, "mlx5_8");
  verbs::Context* const second = open_device(&second_device);
  verbs::Domain domain{};
  domain.context = second;
  verbs::Pair* pair = nullptr;
  verbs::Region* region = nullptr;
  OnServiceThread([&] {
    verbs::PairWanted wanted{};
    pair = create_qp(&domain, &wanted);
    const CUdeviceptr other = Buffer(kBytes);
    region = static_cast<verbs::Region*>(reg_mr(&domain, reinterpret_cast<void*>(other), kBytes, 7));
  });
  EXPECT_EQ(PostReceive(pair_), 0);
  EXPECT_EQ(PostReceive(pair), 0);
  const auto first = Took([this] { PauseStays(); });
  EXPECT_NE(KeptWhy().find("mlx5_8"), std::string::npos) << KeptWhy();
  Resume();
  EXPECT_LT(4 * Took([this] { PauseStays(); }), first);
  Resume();
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 2);
  EXPECT_EQ(dereg_mr(region), 0);
  EXPECT_EQ(destroy_qp(pair), 0);
  EXPECT_EQ(close_device(second), 0);
}

// Only what stays open during the second half of a long wait, without a send, is taken for that.
TEST_F(CardsTest, traffic_that_goes_on_is_not_taken_for_receives_that_are_posted_ahead) {
  MakeConnection();
  EXPECT_EQ(Post(pair_, Key()), 0);
  EXPECT_EQ(PostReceive(pair_), 0);
  PauseStays();
  Resume();
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 2);
  EXPECT_EQ(PostReceive(pair_), 0);
  std::thread ends([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
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

TEST(RegisteredRangesTest, a_range_is_found_wherever_it_overlaps_one_of_them) {
  const intercept::RegisteredRanges ranges({{10, 90}, {20, 30}, {100, 110}, {100, 105}});
  const auto has = [&](std::uint64_t begin, std::uint64_t end) { return ranges.HaveAnyOf(begin, end); };
  for (const auto& [begin, end] : {std::pair{9, 11}, {40, 50}, {89, 95}, {90, 101}, {106, 107}, {0, 200}, {109, 200}})
    EXPECT_TRUE(has(begin, end)) << begin << " to " << end;
  for (const auto& [begin, end] : {std::pair{0, 10}, {90, 100}, {110, 200}, {50, 50}, {50, 40}})
    EXPECT_FALSE(has(begin, end)) << begin << " to " << end;
  EXPECT_FALSE(intercept::RegisteredRanges({}).HaveAnyOf(0, 200));
}

// On a GPU a job of 91 communicators and 1,092 regions spent 18 ms of each pause with such searches.
TEST_F(CardsTest, a_look_at_many_queue_pairs_does_not_search_all_regions_for_each) {
  constexpr std::size_t kPairs = 4000, kMany = 8000, kApart = 128;
  static_assert(kMany * kApart <= kBytes);
  auto* const card = Forever<intercept::Cards>().CardOf(context_);
  const auto spent = [] {
    timespec now{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
  };
  std::vector<verbs::Region*> regions;
  buffer_ = Buffer(kBytes);
  // The least processor time of several looks, once there are so many regions.
  const auto look = [&](std::size_t all) {
    OnServiceThread([&] {
      do Connect();  // as every thread does that registers
      while (pairs_.size() < kPairs);
      while (regions.size() < all) regions.push_back(Register(buffer_ + regions.size() * kApart, kApart / 2));
    });
    // Without a completion, of 64 bytes between the last two of many regions.
    for (verbs::Pair* const pair : pairs_)
      EXPECT_EQ(Post(pair, regions.front()->local_key, 0, buffer_ + (kMany - 2) * kApart + kApart / 2), 0);
    auto least = std::chrono::nanoseconds::max();
    for (int i = 0; i < 10; ++i) {
      const auto before = spent();
      EXPECT_EQ(intercept::TrafficGate::Shut({card}, In(std::chrono::seconds(10)))[card], "");
      least = std::min<std::chrono::nanoseconds>(least, spent() - before);
      card->Reopen();
    }
    return least;
  };
  const auto few = look(2), many = look(kMany);
  EXPECT_LT(many, 60 * few) << "with 2 regions and with 8 000: " << few.count() << " and " << many.count() << " ns";
  for (verbs::Region* const region : regions) EXPECT_EQ(dereg_mr(region), 0);
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

TEST_F(CardsTest, a_dma_buf_that_a_resume_makes_to_register_it_again_is_closed) {
  const auto make = Driver<decltype(cuMemGetHandleForAddressRange)>("cuMemGetHandleForAddressRange");
  const auto reg = Verbs(
      "ibv_reg_dmabuf_mr", +[](void* domain, std::uint64_t, size_t bytes, std::uint64_t at, int, int access) {
        return test::RegisterRegion(domain, reinterpret_cast<void*>(at), bytes, access);
      });
  OnServiceThread([&] {
    pair_ = Connect();
    buffer_ = Buffer(kBytes);
    int descriptor = -1;
    ASSERT_EQ(make(&descriptor, buffer_, kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), CUDA_SUCCESS);
    region_ = static_cast<verbs::Region*>(reg(&domain_, 0, kBytes, buffer_, descriptor, 7));
    ASSERT_EQ(::close(descriptor), 0);
  });
  ASSERT_NE(region_, nullptr);
  const auto open = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); };
  PauseLeaves();
  Resume();
  const auto before = open();  // with what the first pause opens for good
  PauseLeaves();
  Resume();
  EXPECT_EQ(g_card.registrations, 3U);
  EXPECT_EQ(open(), before);
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
    EXPECT_EQ(Flush(ended_remote), 0);
    ++returned;
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

// Not even while a card takes its time for another registration.
TEST_F(CardsTest, a_send_with_keys_that_live_waits_for_nobody) {
  MakeConnection();
  CUdeviceptr second = 0;
  verbs::Region* other = nullptr;
  OnServiceThread([&] {
    Connect();
    second = Buffer(kBytes);
    other = Register(second, kBytes);
  });
  verbs::Region* const programs = Register(memory(), kBytes);
  PauseLeaves();
  Resume();
  g_card.deregister_fails = EBUSY;
  EXPECT_EQ(dereg_mr(region_), EBUSY) << "and its keys live on";
  g_card.deregister_fails = 0;
  std::atomic<bool> begun = false, sent = false, waited = false;
  g_card.on_deregistering = [&] {
    begun = true;
    for (int i = 0; i < 2000 && !sent; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    waited = !sent;
  };
  std::thread ends([&] { EXPECT_EQ(dereg_mr(other), 0); });
  while (!begun) std::this_thread::yield();
  EXPECT_EQ(Post(pair_, Key()), 0);
  EXPECT_EQ(Post(pair_, programs->local_key, verbs::kSignaled, memory()), 0) << "a buffer of the program's";
  sent = true;
  ends.join();
  EXPECT_FALSE(waited);
  g_card.on_deregistering = {};
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 2);
  EXPECT_EQ(dereg_mr(programs), 0);
}

TEST_F(CardsTest, what_the_card_refuses_is_not_under_way) {
  MakeConnection();
  verbs::Part part{buffer_, 64, Key()};
  verbs::Send third{.id = 3, .parts = &part, .count = 1, .flags = verbs::kSignaled};
  verbs::Send second{.id = 2, .next = &third, .parts = &part, .count = 1, .flags = verbs::kSignaled};
  verbs::Send first{.id = 1, .next = &second, .parts = &part, .count = 1, .flags = verbs::kSignaled}, *bad = nullptr;
  g_card.accepts = 1;
  EXPECT_EQ(pair_->context->send(pair_, &first, &bad), ENOMEM);
  EXPECT_EQ(bad, &second);
  PauseStays();
  EXPECT_NE(KeptWhy().find("has 1 send and 0 receives under way"), std::string::npos) << KeptWhy();
  Resume();
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
  PauseLeaves();
}

// [a send of GPU memory without a completion, one with a completion], of which the card takes the first; and alone.
TEST_F(CardsTest, silent_sends_are_under_way_also_where_the_card_refuses_what_would_end_them) {
  MakeConnection();
  verbs::Part part{buffer_, 64, Key()};
  verbs::Send signaled{.id = 2, .parts = &part, .count = 1, .flags = verbs::kSignaled};
  verbs::Send silent{.id = 1, .next = &signaled, .parts = &part, .count = 1}, *bad = nullptr;
  const auto ends = [&] {
    g_card.accepts = -1;
    Resume();
    EXPECT_EQ(Post(pair_, Key()), 0);
    g_card.CompleteAll();
    EXPECT_EQ(Poll(), 1);
    g_card.deregistrations = 0;
  };
  g_card.accepts = 1;
  EXPECT_EQ(pair_->context->send(pair_, &silent, &bad), ENOMEM);
  EXPECT_EQ(bad, &signaled);
  PauseStays();
  ends();
  EXPECT_EQ(Post(pair_, Key(), 0), 0);
  g_card.accepts = 0;
  EXPECT_EQ(Post(pair_, Key()), ENOMEM);
  PauseStays();
  ends();
  PauseLeaves();
}

// As the functions of a device that cannot do so, which write nothing else.
class RefusingCardTest : public CardsTest {
  void SetUp() override {
    test::g_posts = [](verbs::Pair*, verbs::Send*, verbs::Send**) { return EOPNOTSUPP; };
    CardsTest::SetUp();
  }
  void TearDown() override {
    CardsTest::TearDown();
    test::g_posts = &test::CardSends;
  }
};

TEST_F(RefusingCardTest, has_taken_nothing_of_what_it_refuses) {
  MakeConnection();
  verbs::Part part{buffer_, 64, Key()};
  verbs::Send work{.id = 1, .parts = &part, .count = 1, .flags = verbs::kSignaled};
  verbs::Send* bad = reinterpret_cast<verbs::Send*>(0x1234);  // NCCL leaves it as it is
  EXPECT_EQ(pair_->context->send(pair_, &work, &bad), EOPNOTSUPP);
  EXPECT_EQ(bad, &work);
  PauseLeaves();
}

// A flush that waits at the gate over a resume that fails for another region, or over two that succeed.
TEST_F(CardsTest, a_flush_that_waits_over_several_resumes_reads_with_the_key_of_today) {
  MakeConnection();
  verbs::Region* other = nullptr;
  OnServiceThread([&] {
    static_cast<void>(Connect());
    other = Register(Buffer(kBytes), kBytes);
  });
  PauseLeaves();
  const std::uint32_t ended = region_->remote_key;
  g_card.register_fails = ENOMEM;
  g_card.registers_before = 1;
  EXPECT_FALSE(session().ResumeInTime().ok());
  g_card.register_fails = 0;
  for (int later = 0; later < 2; ++later) {
    Resume();
    EXPECT_EQ(Flush(ended), 0);
    EXPECT_EQ(g_card.stale, 0U);
    g_card.CompleteAll();
    EXPECT_EQ(Poll(), 1);
    PauseLeaves();
  }
  Resume();
  EXPECT_EQ(dereg_mr(other), 0);
}

// A pause finds the card quiet or not; either way no send uses a key that has ended.
TEST_F(CardsTest, sends_go_on_through_many_pauses) {
  MakeConnection();
  std::atomic<bool> ended = false;
  std::thread sends([&] {
    while (!ended) {
      const std::uint32_t key = Key();
      std::this_thread::yield();
      EXPECT_EQ(Post(pair_, key), 0);
      g_card.CompleteAll();
      EXPECT_EQ(Poll(), 1);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  int left = 0;
  for (int cycle = 0; cycle < 20; ++cycle) {
    EXPECT_TRUE(session().PauseOfIdleHosts().ok());
    left += Below(buffer_).resident ? 0 : 1;
    Resume();
  }
  ended = true;
  sends.join();
  EXPECT_GT(left, 0);
}

// NCCL ends a communicator by joining the threads that serve it. Which communicator that is does not matter: threads of
// communicators that are made in one group, or share their threads, cannot be told apart.
TEST_F(CardsTest, a_thread_that_is_joined_while_paused_is_let_go_and_others_wait_on) {
  MakeConnection();
  PauseLeaves();
  for (const bool standard : {false, true}) {
    g_card.Reset();
    std::atomic<int> result = -1, other_result = -1;
    const Work ends = [&] { result = Post(pair_, Key()); }, lives = [&] { other_result = Post(pair_, Key()); };
    pthread_t ending{};
    std::thread standard_ending;
    if (standard)
      standard_ending = std::thread(ends);
    else
      ASSERT_EQ(pthread_create(&ending, nullptr, &RunWork, const_cast<Work*>(&ends)), 0);
    std::thread other(lives);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(result, -1);
    if (standard)
      reinterpret_cast<void (*)(std::thread*)>(Replaced("_ZNSt6thread4joinEv"))(&standard_ending);
    else
      EXPECT_EQ(reinterpret_cast<decltype(&pthread_join)>(Replaced("pthread_join"))(ending, nullptr), 0);
    EXPECT_EQ(result, EIO);
    EXPECT_EQ(g_card.sent, 0U);
    EXPECT_EQ(other_result, -1);
    Resume();
    other.join();
    EXPECT_EQ(other_result, 0);
    g_card.CompleteAll();
    EXPECT_EQ(Poll(), 1);
    if (!standard) PauseLeaves();
  }
}

// As in ncclCommDestroy, whose sends are completed first. What one joins that serves no connections ends by itself.
TEST_F(CardsTest, a_pause_waits_for_a_communicator_that_is_being_destroyed_and_else_leaves_the_buffers) {
  MakeConnection();
  const auto join = reinterpret_cast<decltype(&pthread_join)>(Replaced("pthread_join"));
  std::atomic<bool> ends = false;
  std::atomic<int> joined = 0;
  Work waits = [&] {
    while (!ends) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  const auto joins = [&] {
    pthread_t thread{};
    EXPECT_EQ(pthread_create(&thread, nullptr, &RunWork, &waits), 0);
    ++joined;
    EXPECT_EQ(join(thread, nullptr), 0);
  };
  std::thread of_the_program(joins);
  while (joined == 0) std::this_thread::yield();
  PauseLeaves();
  Resume();
  std::thread proxy([&] { OnServiceThread(joins); });
  while (joined == 1) std::this_thread::yield();
  g_card.deregistrations = 0;
  PauseStays();
  EXPECT_EQ(KeptWhy(), "a communicator is being ended, whose sends may be under way");
  EXPECT_EQ(Post(pair_, Key()), 0) << "one of them";
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
  Resume();
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ends = true;
  });
  PauseLeaves();
  for (std::thread* const one : {&later, &proxy, &of_the_program}) one->join();
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

TEST_F(CardsTest, a_region_that_nccl_has_let_go_of_is_forgotten) {
  MakeConnection();
  auto& cards = Forever<intercept::Cards>();
  void* const handle = region_;
  EXPECT_NE(cards.Behind(handle), handle);
  EXPECT_TRUE(cards.CoveredNow().HaveAnyOf(buffer_, buffer_ + kBytes));
  EXPECT_EQ(dereg_mr(std::exchange(region_, nullptr)), 0);
  EXPECT_EQ(cards.Behind(handle), handle);
  EXPECT_FALSE(cards.CoveredNow().HaveAnyOf(buffer_, buffer_ + kBytes));
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

// As drivers answer that return the kernel's error, or only that there is one.
TEST_F(CardsTest, every_answer_but_zero_says_that_the_card_holds_the_memory) {
  MakeConnection();
  for (const int answer : {-EBUSY, -1}) {
    g_card.deregister_fails = answer;
    g_card.on_deregistering = [] { errno = 0; };
    PauseStays();
    Resume();
  }
  g_card.on_deregistering = {};
}

// Its memory is registered, and its thread waits.
TEST_F(CardsTest, a_card_that_refuses_to_be_closed_is_counted_on) {
  MakeConnection();
  const auto close = Verbs(
      "ibv_close_device", +[](verbs::Context*) { return EBUSY; });
  const auto send = context_->send;
  PauseLeaves();
  std::atomic<int> result = -1;
  std::thread sends([&] { result = Post(pair_, Key()); });
  EXPECT_EQ(close(context_), EBUSY);
  EXPECT_EQ(context_->send, send);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(result, -1);
  Resume();
  sends.join();
  EXPECT_EQ(result, 0);
  EXPECT_EQ(g_card.stale, 0U);
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
  static_cast<void>(Verbs("ibv_close_device", &test::CloseCard));
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

// One of two registrations of a buffer stays, so the buffer does. What a resume that fails registered of it is of no harm.
TEST_F(CardsTest, a_failed_resume_leaves_a_buffer_that_has_stayed_with_its_card) {
  MakeConnection();
  verbs::Region *same = nullptr, *other = nullptr;
  OnServiceThread([&] {
    Connect();
    same = Register(buffer_, kBytes);
    other = Register(Buffer(kBytes), kBytes);
  });
  g_card.on_deregistering = [calls = 0]() mutable { g_card.deregister_fails = ++calls == 2 ? EBUSY : 0; };
  ASSERT_TRUE(session().PauseOfIdleHosts().ok());
  g_card.on_deregistering = {};
  EXPECT_TRUE(Below(buffer_).resident);
  EXPECT_EQ(g_card.keys.size(), 2U) << KeptWhy();
  g_card.register_fails = ENOMEM;
  g_card.registers_before = 1;
  EXPECT_FALSE(session().ResumeInTime().ok());
  EXPECT_TRUE(session().paused());
  EXPECT_TRUE(Below(buffer_).resident);
  g_card.register_fails = 0;
  Resume();
  EXPECT_EQ(g_card.keys.size(), 6U);
  for (const verbs::Region* const region : {region_, same}) {
    EXPECT_EQ(Post(pair_, region->local_key), 0);
    g_card.CompleteAll();
    EXPECT_EQ(Poll(), 1);
  }
  PauseLeaves();
  EXPECT_TRUE(g_card.keys.empty());
  Resume();
  EXPECT_EQ(dereg_mr(same), 0);
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

TEST_F(CardsTest, of_pairs_that_have_ended_only_the_last_are_retained) {
  intercept::Card& card = *Forever<intercept::Cards>().CardOf(context_);
  verbs::Pair pair{};
  std::weak_ptr<intercept::CountedPair> first;
  for (std::uint32_t i = 0; i < 5000; ++i) {
    pair.number = 1000 + i % 300;
    card.Add(pair, {});
    const auto ended = card.Remove(pair.number);
    ASSERT_NE(ended, nullptr);
    if (i == 0) first = ended;
    if (i == 1000) {
      EXPECT_FALSE(first.expired()) << "a thread may still count there";
    }
  }
  EXPECT_TRUE(first.expired());
}

TEST_F(CardsTest, a_pair_of_a_number_whose_last_pair_was_not_seen_to_end_is_counted) {
  MakeConnection();
  intercept::Card& card = *Forever<intercept::Cards>().CardOf(context_);
  card.Add(*pair_, {});
  EXPECT_EQ(Post(pair_, Key()), 0);
  g_card.CompleteAll();
  EXPECT_EQ(Poll(), 1);
  PauseLeaves();
}

#ifndef AMEM_SANITIZED  // tests/without_memory.cpp
using test::WithMemory;
using test::WithoutMemory;

// The card has memory of its own, and counts what it has made and not taken back.
int g_made = 0;
verbs::Context* OpenWithMemory(void* device) {
  const WithMemory of_the_card;
  return ++g_made, test::OpenCard(device);
}
int CloseWithMemory(verbs::Context* context) {
  const WithMemory of_the_card;
  return --g_made, test::CloseCard(context);
}
verbs::Pair* MakePairWithMemory(void* domain, verbs::PairWanted* wanted) {
  const WithMemory of_the_card;
  return ++g_made, test::MakePair(domain, wanted);
}
int EndPairWithMemory(verbs::Pair* pair) {
  const WithMemory of_the_card;
  return --g_made, test::EndPair(pair);
}
void* RegisterWithMemory(void* domain, void* address, size_t bytes, int access) {
  const WithMemory of_the_card;
  return test::RegisterRegion(domain, address, bytes, access);
}

class CardsWithoutMemory : public CardsTest {
 protected:
  // With ever more memory before an allocation fails, until none does.
  template <class Call>
  static void Each(const Call& call) {
    bool refused = true;
    for (std::uint64_t spared = 0; refused && !HasFailure(); ++spared) {
      SCOPED_TRACE(spared);
      ASSERT_LT(spared, 1000U);
      call([&](const auto& without) {
        const WithoutMemory none(spared, 1);
        auto result = without();
        refused = WithoutMemory::HasRefused();
        return result;
      });
    }
  }

  decltype(&OpenWithMemory) open_ = Verbs("ibv_open_device", &OpenWithMemory);
  decltype(&CloseWithMemory) close_ = Verbs("ibv_close_device", &CloseWithMemory);
  decltype(&MakePairWithMemory) make_pair_ = Verbs("ibv_create_qp", &MakePairWithMemory);
  decltype(&EndPairWithMemory) end_pair_ = Verbs("ibv_destroy_qp", &EndPairWithMemory);
  decltype(&RegisterWithMemory) register_ = Verbs("ibv_reg_mr", &RegisterWithMemory);
};

TEST_F(CardsWithoutMemory, a_device_and_a_pair_are_given_to_nccl_and_taken_back) {
  Each([&](const auto& without) {
    verbs::Context* const context = without([&] { return open_(&device_); });
    ASSERT_NE(context, nullptr);
    EXPECT_EQ(close_(context), 0);
  });
  Each([&](const auto& without) {
    verbs::Context* const context = open_(&device_);
    EXPECT_EQ(without([&] { return close_(context); }), 0);
    EXPECT_EQ(g_made, 0);
  });
  verbs::PairWanted wanted{};
  Each([&](const auto& without) {
    verbs::Pair* const pair = without([&] { return make_pair_(&domain_, &wanted); });
    ASSERT_NE(pair, nullptr);
    EXPECT_EQ(end_pair_(pair), 0);
  });
  Each([&](const auto& without) {
    verbs::Pair* const pair = make_pair_(&domain_, &wanted);
    EXPECT_EQ(without([&] { return end_pair_(pair); }), 0);
    EXPECT_EQ(g_made, 0);
  });
}

TEST_F(CardsWithoutMemory, a_pair_that_could_not_be_counted_keeps_all_of_its_card) {
  verbs::PairWanted wanted{};
  int uncounted = 0;
  Each([&](const auto& without) {
    MakeConnection();
    // Of a page of numbers that is not there yet. Whatever is freed meanwhile is used again.
    g_card.next_pair += 256;
    verbs::Pair* const pair = without([&] { return make_pair_(&domain_, &wanted); });
    const bool counted = !WithoutMemory::HasRefused();
    const std::string used(sizeof(intercept::CountedPair) - 1, 'x');
    ASSERT_NE(pair, nullptr);
    EXPECT_EQ(Post(pair, Key()), 0);
    g_card.CompleteAll();
    EXPECT_EQ(Poll(), 1);
    g_card.deregistrations = 0;
    counted ? PauseLeaves() : PauseStays();
    uncounted += counted ? 0 : 1;
    Resume();
    EXPECT_EQ(used, std::string(used.size(), 'x'));
    EXPECT_EQ(end_pair_(pair), 0);
    EXPECT_EQ(dereg_mr(std::exchange(region_, nullptr)), 0);
    for (verbs::Pair* const one : std::exchange(pairs_, {})) EXPECT_EQ(destroy_qp(one), 0);
    EXPECT_EQ(close_device(context_), 0);  // on a card that is opened anew the pairs are counted again
    domain_.context = context_ = open_device(&device_);
  });
  EXPECT_GT(uncounted, 2) << "the pair, its page and its place in the list";
}

int g_pinned = 0;
struct FileAnswer {  // CUfileError_t
  int file, driver;
};

TEST_F(CardsWithoutMemory, what_is_pinned_for_copies_and_files_is_recorded_or_undone) {
  const CUdeviceptr buffer = Buffer(kBytes);
  const auto pin = Verbs(
      "gdr_pin_buffer_v2", +[](void*, unsigned long, size_t, std::uint32_t, unsigned long* handle) {
        *handle = 5;
        return ++g_pinned, 0;
      });
  const auto unpin = Verbs(
      "gdr_unpin_buffer", +[](void*, unsigned long) { return --g_pinned, 0; });
  const auto reg = Verbs(
      "cuFileBufRegister", +[](const void*, size_t, int) {
        return ++g_pinned, FileAnswer{0, 0};
      });
  const auto dereg = Verbs(
      "cuFileBufDeregister", +[](const void*) {
        return --g_pinned, FileAnswer{0, 0};
      });
  unsigned long handle = 0;
  int failed = 0;
  const auto is_recorded = [&](bool made) {
    EXPECT_EQ(g_pinned, made ? 1 : 0);
    EXPECT_EQ(Below(buffer).pinned, made ? 1U : 0U);
    return made;
  };
  Each([&](const auto& without) {
    if (is_recorded(without([&] { return pin(nullptr, buffer, kBytes, 0, &handle); }) == 0))
      EXPECT_EQ(unpin(nullptr, handle), 0);
    else
      ++failed;
    is_recorded(false);
  });
  Each([&](const auto& without) {
    const auto* const at = reinterpret_cast<const void*>(buffer);
    if (is_recorded(without([&] { return reg(at, kBytes, 0); }).file == 0))
      EXPECT_EQ(dereg(at).file, 0);
    else
      ++failed;
    is_recorded(false);
  });
  EXPECT_GT(failed, 4) << "next to nothing was refused";
}

TEST_F(CardsWithoutMemory, the_card_keeps_no_region_that_nccl_was_not_given_or_has_given_back) {
  const CUdeviceptr buffer = Buffer(kBytes);
  const auto make = [&] {
    return static_cast<verbs::Region*>(register_(&domain_, reinterpret_cast<void*>(buffer), kBytes, 7));
  };
  const auto each = [&] {
    Each([&](const auto& without) {
      verbs::Region* const region = without(make);
      EXPECT_EQ(g_card.keys.empty(), region == nullptr);
      if (region != nullptr) {
        EXPECT_EQ(dereg_mr(region), 0);
      }
      EXPECT_TRUE(Now().regions.empty());
    });
    Each([&](const auto& without) {
      verbs::Region* const region = make();
      ASSERT_NE(region, nullptr);
      EXPECT_EQ(without([&] { return dereg_mr(region); }), 0);
      EXPECT_TRUE(g_card.keys.empty());
      EXPECT_TRUE(Now().regions.empty());
    });
  };
  each();  // of one that pins
  OnServiceThread([&] {
    pair_ = Connect();
    each();
  });
  EXPECT_EQ(Now().broken, "");
}
#endif

}  // namespace
}  // namespace amem
