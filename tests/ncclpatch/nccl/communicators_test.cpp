// What AMem sees of NCCL's calls, on a libnccl that has the calls and no memory.
#include "ncclpatch/nccl/communicators.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"
#include "ncclpatch/nccl/names.h"

namespace amem::nccl {
namespace {

// Keeps what it is told, and what NCCL's allocations were attributed to.
struct Seen {
  std::vector<std::string> lines;
};
Seen g_seen;
void See(EventBody event) {
  std::string& line = g_seen.lines.emplace_back();
  if (const auto* begun = std::get_if<CommunicatorBegun>(&event)) line = "begun " + begun->how;
  if (const auto* ready = std::get_if<CommunicatorReady>(&event)) line = "ready " + std::to_string(ready->rank);
  if (const auto* ended = std::get_if<CommunicatorEnded>(&event)) line = "ended " + ended->how;
  if (const auto* suspended = std::get_if<CommunicatorSuspended>(&event)) line = suspended->suspended ? "suspended" : "resumed";
}
std::mutex g_probe_mutex;
std::multimap<std::string, std::uint64_t> g_probed;
void Probe(const char* where) {
  const CommunicatorId id = CurrentCommunicator();
  const std::lock_guard lock(g_probe_mutex);
  g_probed.emplace(where, id.value);
}
std::set<std::uint64_t> Probed(const std::string& where) {
  const std::lock_guard lock(g_probe_mutex);
  std::set<std::uint64_t> found;
  for (auto [at, end] = g_probed.equal_range(where); at != end; ++at) found.insert(at->second);
  return found;
}

struct Configuration {
  std::size_t size = sizeof(Configuration);
  unsigned magic = 0xcafebeef, version = 22105;
  int blocking = 0;
};

class Communicators : public ::testing::Test {
 protected:
  static constexpr int kBadColor = 4444, kFailingColor = 3333;  // of the stand-in

  static void SetUpTestSuite() {
    nccl_ = dlopen(AMEM_NCCL_CALLS, RTLD_LAZY | RTLD_LOCAL);
    ASSERT_NE(nccl_, nullptr) << dlerror();
    plain_all_reduce_ = Function<AllReduce>("ncclAllReduce");
    SetObserver(&See);
    redirects::Install(Tables(), ThreadCalls());
    ASSERT_TRUE(hook::Attach().ok());
    Function<void(void (*)(const char*))>("stand_in_probe")(&Probe);
  }
  void SetUp() override {
    ASSERT_NE(nccl_, nullptr);
    for (const Communicator& left : All()) registry::End(left.id, "");
    g_seen.lines.clear();
    g_probed.clear();
  }
  // A thread that still makes a communicator calls Probe, which must not outlive what it writes to.
  void TearDown() override { Function<void()>("stand_in_await_background")(); }

  using AllReduce = int(const void*, void*, std::size_t, int, int, ncclComm*, void*);
  template <class F>
  static F* Function(const char* name) {
    return reinterpret_cast<F*>(dlsym(nccl_, name));
  }
  static UniqueId Unique(const char* text) {
    UniqueId id{};
    std::snprintf(id.bytes, sizeof id.bytes, "\xc3%s", text);
    return id;
  }
  static int InitRank(ncclComm** comm, const char* unique, int rank = 0, int ranks = 1) {
    return Function<int(ncclComm**, int, UniqueId, int)>("ncclCommInitRank")(comm, ranks, Unique(unique), rank);
  }
  static int Split(ncclComm* parent, int color, ncclComm** comm) {
    return Function<int(ncclComm*, int, int, ncclComm**, void*)>("ncclCommSplit")(parent, color, 0, comm, nullptr);
  }
  static int Shrink(ncclComm* parent, std::vector<int> without, ncclComm** comm) {
    return Function<int(ncclComm*, int*, int, ncclComm**, void*, int)>("ncclCommShrink")(
        parent, without.data(), static_cast<int>(without.size()), comm, nullptr, 0);
  }
  static ncclComm* Grow(ncclComm* parent, int ranks, const UniqueId* id, int rank) {
    ncclComm* grown = nullptr;
    EXPECT_EQ((Function<int(ncclComm*, int, const UniqueId*, int, ncclComm**, void*)>("ncclCommGrow")(parent, ranks, id, rank,
                                                                                                      &grown, nullptr)),
              0);
    return grown;
  }
  static std::uint64_t NameOf(const ncclComm* comm) { return Find(comm)->name; }
  // Of the part that a split makes.
  static std::uint64_t NameOfSplit(ncclComm* parent, int color) {
    ncclComm* made = nullptr;
    EXPECT_EQ(Split(parent, color, &made), 0);
    return NameOf(made);
  }
  static std::uint64_t NameOfShrink(ncclComm* parent, const std::vector<int>& without) {
    ncclComm* made = nullptr;
    EXPECT_EQ(Shrink(parent, without, &made), 0);
    return NameOf(made);
  }
  static int Reduce(ncclComm* comm) { return Function<AllReduce>("ncclAllReduce")(nullptr, nullptr, 0, 7, 0, comm, nullptr); }
  static int Do(const char* name) { return Function<int()>(name)(); }
  static int Do(const char* name, ncclComm* comm) { return Function<int(ncclComm*)>(name)(comm); }
  static std::uint64_t HashIn(const ncclComm* comm) { return Function<std::uint64_t(const ncclComm*)>("stand_in_hash")(comm); }
  static std::set<std::uint64_t> Only(const ncclComm* comm) { return {Find(comm)->id.value}; }

  static void* nccl_;
  static AllReduce* plain_all_reduce_;
};
void* Communicators::nccl_ = nullptr;
Communicators::AllReduce* Communicators::plain_all_reduce_ = nullptr;

TEST_F(Communicators, one_that_is_made_used_and_destroyed_is_known_by_rank_size_device_and_name) {
  ncclComm* comm = nullptr;
  ASSERT_EQ(InitRank(&comm, "made", 2, 4), 0);
  const auto known = Find(comm);
  ASSERT_TRUE(known.has_value());
  EXPECT_EQ(known->stage, Stage::kReady);
  EXPECT_EQ(known->rank, 2);
  EXPECT_EQ(known->ranks, 4);
  EXPECT_EQ(known->device.value, 2);
  EXPECT_EQ(known->name, HashIn(comm)) << "as NCCL computes it";
  EXPECT_EQ(Probed("init"), Only(comm)) << "memory is for the communicator before it has an address";
  EXPECT_EQ(Probed("proxy"), Only(comm)) << "a thread that a thread of NCCL's starts is the communicator's, too";
  EXPECT_EQ(Reduce(comm), 0);
  EXPECT_EQ(Probed("all-reduce"), Only(comm));
  EXPECT_EQ(Do("ncclCommFinalize", comm), 0);
  EXPECT_EQ(Find(comm)->stage, Stage::kFinalized);
  EXPECT_EQ(Do("ncclCommDestroy", comm), 0);
  EXPECT_FALSE(Find(comm).has_value());
  EXPECT_EQ(g_seen.lines, (std::vector<std::string>{"begun init", "ready 2", "ended destroyed"}));
  EXPECT_EQ(CurrentCommunicator(), CommunicatorId{}) << "no call is under way";
}

TEST_F(Communicators, all_ways_to_make_one_are_seen) {
  ncclComm *config = nullptr, *scalable = nullptr, *split = nullptr, *shrunk = nullptr, *grown = nullptr, *all[2] = {};
  UniqueId ids[2] = {Unique("first"), Unique("second")};
  ASSERT_EQ((Function<int(ncclComm**, int, UniqueId, int, void*)>("ncclCommInitRankConfig")(&config, 1, ids[1], 0, nullptr)),
            0);
  ASSERT_EQ((Function<int(ncclComm**, int, int, int, UniqueId*, void*)>("ncclCommInitRankScalable")(&scalable, 3, 1, 2, ids,
                                                                                                    nullptr)),
            0);
  ASSERT_EQ((Function<int(ncclComm**, int, const int*)>("ncclCommInitAll")(all, 2, nullptr)), 0);
  EXPECT_EQ(*Probed("init").begin(), 0U) << "of several at once it is not known whose the memory is";
  ASSERT_EQ(Split(scalable, 0, &split), 0);
  ASSERT_EQ((Function<int(ncclComm*, int*, int, ncclComm**, void*, int)>("ncclCommShrink")(scalable, nullptr, 1, &shrunk,
                                                                                           nullptr, 0)),
            0);
  ASSERT_EQ((Function<int(ncclComm*, int, const UniqueId*, int, ncclComm**, void*)>("ncclCommGrow")(scalable, 5, nullptr, -1,
                                                                                                    &grown, nullptr)),
            0);
  for (const auto& [comm, how] : std::map<ncclComm*, std::string>{{config, "init"},
                                                                  {scalable, "init"},
                                                                  {all[0], "init all"},
                                                                  {all[1], "init all"},
                                                                  {split, "split"},
                                                                  {shrunk, "shrink"},
                                                                  {grown, "grow"}}) {
    ASSERT_TRUE(Find(comm).has_value()) << how;
    EXPECT_EQ(Find(comm)->how, how);
    EXPECT_EQ(Find(comm)->stage, Stage::kReady) << how;
    if (how == "init") {
      EXPECT_EQ(Find(comm)->name, HashIn(comm)) << "of several ids NCCL takes the first";
    }
    EXPECT_EQ(Find(comm)->name != 0, how != "grow") << how;
    EXPECT_EQ(Find(comm)->parent, how == "split" || how == "shrink" || how == "grow" ? Find(scalable)->id : CommunicatorId{});
  }
  EXPECT_EQ(Find(grown)->ranks, 5);
  EXPECT_EQ(Find(shrunk)->ranks, 2);
  for (ncclComm* comm : {config, scalable, all[0], all[1], split, shrunk, grown}) Do("ncclCommAbort", comm);
  EXPECT_TRUE(All().empty());
  EXPECT_EQ(std::count(g_seen.lines.begin(), g_seen.lines.end(), "ended aborted"), 7);
}

// The same bytes, hashed by a program of its own.
TEST(Names, of_a_unique_id_is_the_hash_of_the_version_that_made_it) {
  UniqueId id{};
  for (std::size_t i = 0; i < sizeof id.bytes; ++i) id.bytes[i] = static_cast<char>(i * 37 + 200);
  constexpr std::uint64_t kBytewise =
      std::is_signed_v<char> ? 0x6d51a6fa7a620005 : 0xf089f0398c664805;  // as NCCL's processor has it
  constexpr std::uint64_t kWordwise = 0x130bf80bb2fc3c2b;
  for (const int version : {21803, 22105, 22203, 22304, 22403, 22501}) EXPECT_EQ(names::OfUniqueId(id, version), kBytewise);
  for (const int version : {22602, 22809, 23203, 0}) EXPECT_EQ(names::OfUniqueId(id, version), kWordwise) << version;
}

TEST_F(Communicators, all_ranks_know_a_part_by_one_name_although_a_call_failed_on_one_of_them) {
  ncclComm *first = nullptr, *second = nullptr, *unused = nullptr;
  ASSERT_EQ(InitRank(&first, "parent", 0, 3), 0);
  ASSERT_EQ(InitRank(&second, "parent", 1, 3), 0);
  EXPECT_EQ(NameOf(first), NameOf(second));
  const std::uint64_t before = NameOfSplit(first, 1);
  EXPECT_EQ(before, NameOfSplit(second, 1));
  EXPECT_EQ(Split(first, kBadColor, &unused), 4) << "NCCL refuses the call, and the other rank has made none";
  EXPECT_EQ(Split(first, 1, nullptr), 4);
  EXPECT_EQ(NameOfSplit(first, 1), NameOfSplit(second, 1));
  ncclComm* other = nullptr;
  EXPECT_EQ(Split(first, kFailingColor, &unused), 3) << "the other rank's call succeeds";
  EXPECT_EQ(Split(second, 1, &other), 0);
  const std::uint64_t after = NameOfSplit(first, 1);
  EXPECT_EQ(after, NameOfSplit(second, 1));
  EXPECT_NE(after, before);
  EXPECT_EQ(Split(first, -1, &unused), 0) << "takes part as well, without a communicator";
  NameOfSplit(second, 1);
  EXPECT_EQ(NameOfSplit(first, 1), NameOfSplit(second, 1));
  EXPECT_NE(NameOfSplit(first, 1), NameOfSplit(second, 2)) << "two colors of one call";
}

TEST_F(Communicators, all_ranks_know_a_part_by_one_name_although_a_group_failed_on_one_of_them) {
  ncclComm *first = nullptr, *second = nullptr, *unused = nullptr, *shrunk = nullptr, *grouped[2] = {};
  ASSERT_EQ(InitRank(&first, "grouped", 0, 3), 0);
  ASSERT_EQ(InitRank(&second, "grouped", 1, 3), 0);
  Do("ncclGroupStart");
  for (ncclComm*& one : grouped) EXPECT_EQ(Split(first, 1, &one), 0);
  EXPECT_EQ(Split(first, kBadColor, &unused), 4);
  EXPECT_EQ(Shrink(first, {2}, &shrunk), 0);
  EXPECT_EQ(Do("ncclGroupEnd"), 4) << "NCCL makes none of them, and the other rank waits";
  EXPECT_EQ(grouped[0], nullptr);
  EXPECT_EQ(NameOfShrink(first, {2}), NameOfShrink(second, {2}));
  Do("ncclGroupStart");
  for (ncclComm*& one : grouped) EXPECT_EQ(Split(first, 1, &one), 0);
  EXPECT_EQ(Do("ncclGroupEnd"), 0);
  for (const ncclComm* const one : grouped) EXPECT_EQ(NameOf(one), NameOfSplit(second, 1));
  Do("ncclGroupStart");
  EXPECT_EQ(Split(first, kFailingColor, &unused), 0);
  EXPECT_EQ(Do("ncclGroupEnd"), 3) << "the other rank's call succeeds";
  NameOfSplit(second, 1);
  EXPECT_EQ(NameOfSplit(first, 1), NameOfSplit(second, 1));
}

TEST_F(Communicators, a_rank_that_one_shrink_left_out_knows_the_parts_of_later_ones_by_the_same_names) {
  ncclComm *first = nullptr, *second = nullptr;
  ASSERT_EQ(InitRank(&first, "shrunk", 0, 4), 0);
  ASSERT_EQ(InitRank(&second, "shrunk", 1, 4), 0);
  const std::uint64_t without_second = NameOfShrink(first, {1, 2});
  const std::uint64_t later = NameOfShrink(first, {2});
  EXPECT_EQ(later, NameOfShrink(second, {2}));
  EXPECT_NE(later, without_second);
  EXPECT_EQ(NameOfSplit(first, 0), NameOfSplit(second, 0));
  EXPECT_EQ(NameOfShrink(first, {2, 3}), NameOfShrink(second, {3, 2})) << "in any order";
  EXPECT_NE(NameOfShrink(first, {2}), later) << "once more";
}

// What a rank's AMem has not seen, because it was attached later or because the rank joined, has no name there, and so have its
// parts: a wrong one would be worse.
TEST_F(Communicators, without_what_its_ranks_have_in_common_a_communicator_has_no_name) {
  ncclComm* const unseen = Function<ncclComm*()>("stand_in_unseen")();
  EXPECT_EQ(NameOfSplit(unseen, 0), 0U);
  EXPECT_EQ(NameOfShrink(unseen, {1}), 0U);
  Do("ncclCommDestroy", unseen);
  ncclComm* parent = nullptr;
  ASSERT_EQ(InitRank(&parent, "to grow", 0, 2), 0);
  const UniqueId id = Unique("of the grown one");
  ncclComm *const coordinator = Grow(parent, 3, &id, -1), *const stays = Grow(parent, 3, nullptr, -1);
  ncclComm* const joins = Grow(nullptr, 3, &id, 2);
  for (ncclComm* const one : {coordinator, stays, joins}) {
    EXPECT_EQ(NameOf(one), 0U);
    EXPECT_EQ(NameOfSplit(one, 0), 0U);
  }
  ncclComm *all[2] = {}, *others[2] = {};
  for (ncclComm** made : {all, others})
    ASSERT_EQ((Function<int(ncclComm**, int, const int*)>("ncclCommInitAll")(made, 2, nullptr)), 0);
  EXPECT_EQ(NameOf(all[0]), NameOf(all[1]));
  EXPECT_NE(NameOf(all[0]), NameOf(others[0])) << "in no other process either";
  EXPECT_EQ(NameOfSplit(all[0], 0), NameOfSplit(all[1], 0));
}

TEST_F(Communicators, a_rank_without_a_color_has_none) {
  ncclComm *world = nullptr, *none = reinterpret_cast<ncclComm*>(1);
  ASSERT_EQ(InitRank(&world, "no color"), 0);
  ASSERT_EQ(Split(world, -1, &none), 0);
  EXPECT_EQ(none, nullptr);
  EXPECT_EQ(g_seen.lines.back(), "ended left out");
  Do("ncclCommDestroy", world);
}

TEST_F(Communicators, what_fails_ends_as_failed) {
  ncclComm* comm = nullptr;
  UniqueId id = Unique("");
  id.bytes[0] = 'F';
  EXPECT_EQ((Function<int(ncclComm**, int, UniqueId, int)>("ncclCommInitRank")(&comm, 1, id, 0)), 3);
  EXPECT_EQ(g_seen.lines, (std::vector<std::string>{"begun init", "ended failed"}));
  Do("ncclGroupStart");
  EXPECT_EQ((Function<int(ncclComm**, int, UniqueId, int)>("ncclCommInitRank")(&comm, 1, id, 0)), 0);
  EXPECT_EQ(All().size(), 1U) << "not known before the group ends";
  EXPECT_EQ(Do("ncclGroupEnd"), 3);
  EXPECT_TRUE(All().empty());
  EXPECT_EQ(Do("ncclCommDestroy", nullptr), 4);
}

// NCCL writes the address at once or when the group ends; in a group of several it is not known whose memory is allocated.
TEST_F(Communicators, one_whose_end_fails_is_known_as_before) {
  ncclComm* comm = nullptr;
  ASSERT_EQ(InitRank(&comm, "stays"), 0);
  const CommunicatorId id = Find(comm)->id;
  Function<void(int)>("stand_in_fail_ends")(1);
  for (const char* call : {"ncclCommDestroy", "ncclCommAbort"}) {
    EXPECT_EQ(Do(call, comm), 3) << call;
    ASSERT_TRUE(Find(comm).has_value()) << call;
    EXPECT_EQ(Find(comm)->id, id) << call;
    EXPECT_EQ(Reduce(comm), 0) << call;
  }
  EXPECT_EQ(Probed("all-reduce"), Only(comm));
  Function<void(int)>("stand_in_fail_ends")(0);
  EXPECT_EQ(Do("ncclCommDestroy", comm), 0);
  EXPECT_EQ(g_seen.lines, (std::vector<std::string>{"begun init", "ready 0", "ended destroyed"}));
}

TEST_F(Communicators, a_group_of_several_is_known_at_its_end) {
  for (const int late : {0, 1}) {
    Function<void(int)>("stand_in_write_late")(late);
    g_probed.clear();
    ncclComm *first = nullptr, *second = nullptr;
    Do("ncclGroupStart");
    ASSERT_EQ(InitRank(&first, late != 0 ? "first, late" : "first", 0, 2), 0);
    Do("ncclGroupStart");
    ASSERT_EQ(InitRank(&second, late != 0 ? "second, late" : "second", 1, 2), 0);
    EXPECT_EQ(Do("ncclGroupEnd"), 0) << "the inner group";
    EXPECT_FALSE(
        std::any_of(g_seen.lines.begin(), g_seen.lines.end(), [](const auto& line) { return line.starts_with("ready"); }));
    ASSERT_EQ(Do("ncclGroupEnd"), 0);
    EXPECT_EQ(Find(first)->rank, 0);
    EXPECT_EQ(Find(second)->rank, 1);
    EXPECT_EQ(Probed("init"), (std::set<std::uint64_t>{0}));
    g_seen.lines.clear();
    Do("ncclCommDestroy", first);
    Do("ncclCommDestroy", second);
  }
  Function<void(int)>("stand_in_write_late")(0);
}

TEST_F(Communicators, a_group_of_one_is_attributed) {
  ncclComm *made = nullptr, *other = nullptr;
  Do("ncclGroupStart");
  ASSERT_EQ(InitRank(&made, "one"), 0);
  ASSERT_EQ(Do("ncclGroupEnd"), 0);
  EXPECT_EQ(Probed("init"), Only(made));
  ASSERT_EQ(InitRank(&other, "other"), 0);
  Do("ncclGroupStart");
  Reduce(made);
  Reduce(made);
  Do("ncclGroupEnd");
  EXPECT_EQ(Probed("group"), Only(made));
  g_probed.clear();
  Do("ncclGroupStart");
  Reduce(made);
  Reduce(other);
  Do("ncclGroupEnd");
  EXPECT_EQ(Probed("group"), (std::set<std::uint64_t>{0}));
  Reduce(other);
  EXPECT_EQ(Probed("all-reduce"), Only(other)) << "the group before it leaves nothing behind";
  Do("ncclCommDestroy", made);
  Do("ncclCommDestroy", other);
}

TEST_F(Communicators, a_nonblocking_one_is_ready_when_ncclCommGetAsyncError_says_so) {
  const Configuration configuration;
  const auto init = Function<int(ncclComm**, int, UniqueId, int, const void*)>("ncclCommInitRankConfig");
  const auto poll = Function<int(ncclComm*, int*)>("ncclCommGetAsyncError");
  for (const bool grouped : {false, true}) {
    g_seen.lines.clear();
    g_probed.clear();
    Function<void(int)>("stand_in_hold")(1);
    ncclComm* comm = nullptr;
    if (grouped) Do("ncclGroupStart");
    EXPECT_EQ(init(&comm, 3, Unique(grouped ? "grouped" : "background"), 1, &configuration), grouped ? 0 : 7);
    if (grouped) {
      EXPECT_EQ(Do("ncclGroupEnd"), 7);
    }
    int error = 0;
    ASSERT_EQ(poll(comm, &error), 0);
    EXPECT_EQ(error, 7);
    ASSERT_TRUE(Find(comm).has_value()) << "it has an address";
    EXPECT_EQ(Find(comm)->stage, Stage::kMaking);
    EXPECT_EQ(Find(comm)->rank, 1) << "as it was asked for";
    EXPECT_EQ(Find(comm)->ranks, 3);
    Function<void(int)>("stand_in_hold")(0);
    Function<void(ncclComm*)>("stand_in_let_go")(comm);
    while (poll(comm, &error) == 0 && error == 7) std::this_thread::yield();
    EXPECT_EQ(Find(comm)->stage, Stage::kReady);
    EXPECT_EQ(Find(comm)->name, HashIn(comm));
    EXPECT_EQ(Probed("init"), Only(comm)) << "the thread that makes it";
    poll(comm, &error);
    EXPECT_EQ(std::count(g_seen.lines.begin(), g_seen.lines.end(), "ready 1"), 1);
    Do("ncclCommAbort", comm);
  }
}

TEST_F(Communicators, an_address_that_nccl_gives_again_is_another_communicator) {
  ncclComm *first = nullptr, *second = nullptr;
  ASSERT_EQ(InitRank(&first, "before"), 0);
  const CommunicatorId id = Find(first)->id;
  Do("ncclCommDestroy", first);
  ASSERT_EQ(InitRank(&second, "after"), 0);
  EXPECT_NE(Find(second)->id, id);
  Do("ncclCommDestroy", second);
}

TEST_F(Communicators, a_thread_forgets_the_one_that_it_destroyed_before_another_has_its_address) {
  ncclComm* comm = nullptr;
  ASSERT_EQ(InitRank(&comm, "before"), 0);
  Reduce(comm);
  Do("ncclCommDestroy", comm);
  registry::Bind(registry::Begin({}), comm);  // by another thread
  EXPECT_EQ(CurrentCommunicator(), CommunicatorId{});
}

TEST_F(Communicators, one_may_be_given_its_address_twice_and_one_that_has_ended_gets_none) {
  ncclComm* comm = nullptr;
  ASSERT_EQ(InitRank(&comm, "twice"), 0);
  const CommunicatorId id = Find(comm)->id;
  registry::Bind(id, comm);
  ASSERT_TRUE(Find(comm).has_value());
  Do("ncclCommDestroy", comm);
  registry::Bind(id, comm);
  EXPECT_FALSE(Find(comm).has_value());
  EXPECT_EQ(g_seen.lines, (std::vector<std::string>{"begun init", "ready 0", "ended destroyed"}));
}

TEST_F(Communicators, threads_have_communicators_of_their_own) {
  ncclComm* comms[4] = {};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      ASSERT_EQ(InitRank(&comms[i], std::to_string(i).c_str(), i, 4), 0);
      for (int n = 0; n < 1000; ++n) Reduce(comms[i]);
      EXPECT_EQ(CurrentCommunicator(), Find(comms[i])->id);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Probed("all-reduce").size(), 4U);
  EXPECT_FALSE(Probed("all-reduce").contains(0));
  for (ncclComm* comm : comms) Do("ncclCommDestroy", comm);
}

#ifndef AMEM_SANITIZED
double NanosecondsOf(int (*call)(const void*, void*, std::size_t, int, int, ncclComm*, void*)) {
  constexpr int kCalls = 200'000;
  double best = 1e9;
  for (int round = 0; round < 20; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call(nullptr, nullptr, 0, 7, 0, nullptr, nullptr);
    best = std::min(best, std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / kCalls);
  }
  return best;
}

TEST_F(Communicators, following_a_collective_costs_some_nanoseconds) {
  const double plain = NanosecondsOf(Function<AllReduce>("stand_in_empty"));
  const double followed = NanosecondsOf(Function<AllReduce>("ncclReduceScatter"));
  std::printf("a collective that does nothing: %.1f ns, followed %.1f ns\n", plain, followed);
  EXPECT_LT(followed - plain, 30.0);
}
#endif

TEST_F(Communicators, names_and_aliases_lead_here_and_the_own_look_up_stays_real) {
  EXPECT_NE(Function<AllReduce>("ncclAllReduce"), plain_all_reduce_);
  EXPECT_EQ(redirects::Real(0, "ncclAllReduce"), reinterpret_cast<void*>(plain_all_reduce_));
  EXPECT_EQ(dlsym(nccl_, "pncclCommInitRank"), dlsym(nccl_, "ncclCommInitRank"));
  EXPECT_EQ(redirects::Real(0, "ncclCommCount"), dlsym(nccl_, "ncclCommCount")) << "not redirected";
}

std::string g_reported;

bool LeadsHere(void* library, const char* name) {
  Dl_info found{}, self{};
  dladdr(dlsym(library, name), &found);
  dladdr(reinterpret_cast<const void*>(&LeadsHere), &self);
  return found.dli_fbase == self.dli_fbase;
}

TEST_F(Communicators, the_names_of_a_fifth_nccl_stay_its_own_until_another_is_unloaded) {
  const std::filesystem::path directory = std::filesystem::path(testing::TempDir()) / ("fifth-" + std::to_string(getpid()));
  std::filesystem::create_directories(directory);
  std::vector<void*> loaded;
  const auto load = [&](int number) {
    const auto copy = directory / ("libnccl-" + std::to_string(number) + ".so");
    std::filesystem::copy_file(AMEM_NCCL_CALLS, copy, std::filesystem::copy_options::overwrite_existing);
    void* library = dlopen(copy.c_str(), RTLD_LAZY | RTLD_LOCAL);
    EXPECT_NE(library, nullptr) << dlerror();
    EXPECT_TRUE(hook::Attach().ok());
    return library;
  };
  hook::SetReport([](bool failed, std::string_view message) {
    if (failed) g_reported = message;
  });
  for (int i = 0; i < 4; ++i) loaded.push_back(load(i));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(LeadsHere(loaded[i], "ncclCommInitRank"), i < 3) << i;
  EXPECT_NE(g_reported.find("its communicators are not seen"), std::string::npos) << g_reported;
  ncclComm* comm = nullptr;
  using Init = int (*)(ncclComm**, int, UniqueId, int);
  EXPECT_EQ(reinterpret_cast<Init>(dlsym(loaded[2], "ncclCommInitRank"))(&comm, 1, Unique("third"), 0), 0);
  ASSERT_TRUE(Find(comm).has_value());
  EXPECT_NE(redirects::Real(Find(comm)->place, "ncclCommInitRank"), redirects::Real(0, "ncclCommInitRank"));
  reinterpret_cast<int (*)(ncclComm*)>(dlsym(loaded[2], "ncclCommDestroy"))(comm);
  dlclose(loaded[0]);
  loaded.erase(loaded.begin());
  EXPECT_TRUE(hook::Attach().ok());
  EXPECT_TRUE(LeadsHere(loaded[2], "ncclCommInitRank")) << "in the place of the one that was unloaded";
  hook::SetReport(nullptr);
  for (void* library : loaded) dlclose(library);
  std::filesystem::remove_all(directory);
}

// The last test, because the library stays loaded: it hashes as NCCL does since 2.26, and imports pthread_create a second time,
// as a pointer for its threads.
TEST_F(Communicators, of_a_newer_nccl_have_names_too_and_its_threads_inherit_them) {
  void* newer = dlopen(AMEM_NCCL_CALLS_NEWER, RTLD_LAZY | RTLD_LOCAL);
  ASSERT_NE(newer, nullptr) << dlerror();
  ASSERT_TRUE(hook::Attach().ok());
  reinterpret_cast<void (*)(void (*)(const char*))>(dlsym(newer, "stand_in_probe"))(&Probe);
  ncclComm* comm = nullptr;
  using Init = int (*)(ncclComm**, int, UniqueId, int);
  ASSERT_EQ(reinterpret_cast<Init>(dlsym(newer, "ncclCommInitRank"))(&comm, 1, Unique("newer"), 0), 0);
  const std::optional<Communicator> known = Find(comm);
  ASSERT_TRUE(known.has_value());
  EXPECT_EQ(known->name, reinterpret_cast<std::uint64_t (*)(const ncclComm*)>(dlsym(newer, "stand_in_hash"))(comm));
  EXPECT_EQ(Probed("pointer").count(known->id.value), 1U);
  EXPECT_EQ(Probed("standard").count(known->id.value), 1U);
  reinterpret_cast<int (*)(ncclComm*)>(dlsym(newer, "ncclCommDestroy"))(comm);
}

// Each call with a communicator, given another one wherever NCCL takes a pointer to memory or to something of its own. But for
// ncclReduceScatter, which does nothing here, so that what it costs to be followed can be measured.
struct CallWith {
  const char* probed;
  bool gives_back;  // is right with a suspended communicator as well
  int (*make)(void* nccl, ncclComm* comm, void* other);
};
template <class... Parameters, class... Arguments>
int CallByName(void* nccl, const char* name, int (*)(Parameters...), Arguments... arguments) {
  return reinterpret_cast<int (*)(Parameters...)>(dlsym(nccl, name))(arguments...);
}
#define CALL_WITH(probed, gives_back, name, type, ...)                                                                      \
  CallWith {                                                                                                                \
    probed, gives_back,                                                                                                     \
        [](void* nccl, ncclComm* comm, void* p) { return CallByName(nccl, name, std::add_pointer_t<type>{}, __VA_ARGS__); } \
  }
const CallWith kCallsWith[] = {
    CALL_WITH("all-reduce", false, "ncclAllReduce", int(const void*, void*, std::size_t, int, int, ncclComm*, void*), p, p, 0,
              7, 0, comm, p),
    CALL_WITH("all-gather", false, "ncclAllGather", int(const void*, void*, std::size_t, int, ncclComm*, void*), p, p, 0, 7,
              comm, p),
    CALL_WITH("broadcast", false, "ncclBroadcast", int(const void*, void*, std::size_t, int, int, ncclComm*, void*), p, p, 0, 7,
              0, comm, p),
    CALL_WITH("bcast", false, "ncclBcast", int(void*, std::size_t, int, int, ncclComm*, void*), p, 0, 7, 0, comm, p),
    CALL_WITH("reduce", false, "ncclReduce", int(const void*, void*, std::size_t, int, int, int, ncclComm*, void*), p, p, 0, 7,
              0, 0, comm, p),
    CALL_WITH("all-to-all", false, "ncclAlltoAll", int(const void*, void*, std::size_t, int, ncclComm*, void*), p, p, 0, 7,
              comm, p),
    CALL_WITH("gather", false, "ncclGather", int(const void*, void*, std::size_t, int, int, ncclComm*, void*), p, p, 0, 7, 0,
              comm, p),
    CALL_WITH("scatter", false, "ncclScatter", int(const void*, void*, std::size_t, int, int, ncclComm*, void*), p, p, 0, 7, 0,
              comm, p),
    CALL_WITH("send", false, "ncclSend", int(const void*, std::size_t, int, int, ncclComm*, void*), p, 0, 7, 0, comm, p),
    CALL_WITH("recv", false, "ncclRecv", int(void*, std::size_t, int, int, ncclComm*, void*), p, 0, 7, 0, comm, p),
    CALL_WITH("put-signal", false, "ncclPutSignal",
              int(const void*, std::size_t, int, int, void*, std::size_t, int, int, unsigned, ncclComm*, void*), p, 0, 7, 0, p,
              0, 0, 0, 0, comm, p),
    CALL_WITH("signal", false, "ncclSignal", int(int, int, int, unsigned, ncclComm*, void*), 0, 0, 0, 0, comm, p),
    CALL_WITH("wait-signal", false, "ncclWaitSignal", int(int, void*, ncclComm*, void*), 0, p, comm, p),
    CALL_WITH("register", false, "ncclCommRegister", int(ncclComm*, void*, std::size_t, void**), comm, p, 0, nullptr),
    CALL_WITH("deregister", true, "ncclCommDeregister", int(ncclComm*, void*), comm, p),
    CALL_WITH("window", false, "ncclCommWindowRegister", int(ncclComm*, void*, std::size_t, void**, int), comm, p, 0, nullptr,
              0),
    CALL_WITH("window deregister", true, "ncclCommWindowDeregister", int(ncclComm*, void*), comm, p),
    CALL_WITH("device communicator", false, "ncclDevCommCreate", int(ncclComm*, const void*, void*), comm, p, p),
    CALL_WITH("device communicator destroy", true, "ncclDevCommDestroy", int(ncclComm*, const void*), comm, p)};
#undef CALL_WITH

// What is asked of the server, and what the registry had then.
struct Server : SuspendServer {
  int Refuse(const char*, CommunicatorId) noexcept override { return 5; }
  int BeforeMaking(const Communicator& asked) noexcept override {
    EXPECT_TRUE(asked.id);
    makings += std::ranges::count(All(), Stage::kMaking, &Communicator::stage);
    return answer;
  }
  int CarryOutResumes(const char*) noexcept override { return 0; }
  void ResumeFailedFirst() noexcept override {}
  void UndoSuspends() noexcept override {}
  int CarryOutSuspends(const char*) noexcept override { return ++pauses, pause; }
  std::ptrdiff_t makings = 0;
  int pauses = 0, answer = 0, pause = 0;
};

class BesideSuspended : public Communicators {
 protected:
  void SetUp() override {
    Communicators::SetUp();
    SetSuspendServer(&server_);
  }
  void TearDown() override {
    SetSuspendServer(nullptr);
    Communicators::TearDown();
  }
  Server server_;
};

// Otherwise a suspend on another thread could pause the process between the question and the first allocation.
TEST_F(BesideSuspended, one_counts_before_it_is_asked_whether_there_is_memory_for_it) {
  ncclComm* comm = nullptr;
  ASSERT_EQ(InitRank(&comm, "first"), 0);
  EXPECT_EQ(server_.makings, 1);
  ncclComm* both[2] = {};
  const int devices[] = {0, 1};
  ASSERT_EQ(Function<int(ncclComm**, int, const int*)>("ncclCommInitAll")(both, 2, devices), 0);
  EXPECT_EQ(server_.makings, 1 + 2 * 2) << "asked for each of the two";
  server_.answer = 3;
  const std::size_t living = All().size();
  ncclComm* refused = nullptr;
  EXPECT_EQ(InitRank(&refused, "refused"), 3);
  EXPECT_EQ(Function<int(ncclComm**, int, const int*)>("ncclCommInitAll")(both, 2, devices), 3);
  EXPECT_EQ(refused, nullptr);
  EXPECT_EQ(All().size(), living) << "what was refused is forgotten";
}

TEST_F(BesideSuspended, a_part_that_is_refused_on_one_rank_does_not_count_there) {
  ncclComm *first = nullptr, *second = nullptr, *refused = nullptr;
  ASSERT_EQ(InitRank(&first, "in part", 0, 2), 0);
  ASSERT_EQ(InitRank(&second, "in part", 1, 2), 0);
  server_.answer = 3;  // there is no memory for it
  EXPECT_EQ(Split(first, 0, &refused), 3);
  server_.answer = 0;
  ASSERT_TRUE(registry::SetSuspended(Find(first)->id, true));
  EXPECT_EQ(Split(first, 0, &refused), 5);
  ASSERT_TRUE(registry::SetSuspended(Find(first)->id, false));
  EXPECT_EQ(NameOfSplit(first, 0), NameOfSplit(second, 0));
}

TEST_F(BesideSuspended, every_call_with_one_is_its_own_and_only_giving_back_is_right_while_it_is_suspended) {
  ncclComm *comm = nullptr, *other = nullptr;
  ASSERT_EQ(InitRank(&comm, "used"), 0);
  ASSERT_EQ(InitRank(&other, "other"), 0);
  for (const CallWith& call : kCallsWith) {
    ASSERT_EQ(call.make(nccl_, comm, other), 0) << call.probed;
    EXPECT_EQ(Probed(call.probed), Only(comm)) << call.probed;
    ASSERT_TRUE(registry::SetSuspended(Find(other)->id, true));
    EXPECT_EQ(call.make(nccl_, comm, other), 0) << call.probed << ": another is suspended";
    ASSERT_TRUE(registry::SetSuspended(Find(comm)->id, true));
    EXPECT_EQ(call.make(nccl_, comm, other), call.gives_back ? 0 : 5) << call.probed;
    ASSERT_TRUE(registry::SetSuspended(Find(comm)->id, false));
    ASSERT_TRUE(registry::SetSuspended(Find(other)->id, false));
    EXPECT_EQ(call.make(nccl_, comm, other), 0) << call.probed << ": resumed";
  }
  for (ncclComm* one : {comm, other}) Do("ncclCommDestroy", one);
}

TEST_F(BesideSuspended, the_end_of_one_that_was_not_is_told_at_once_or_with_its_group) {
  ncclComm *first = nullptr, *second = nullptr, *third = nullptr;
  ASSERT_EQ(InitRank(&first, "first"), 0);
  ASSERT_EQ(InitRank(&second, "second"), 0);
  ASSERT_EQ(InitRank(&third, "third"), 0);
  ASSERT_EQ(Do("ncclCommDestroy", first), 0);
  EXPECT_EQ(server_.pauses, 0) << "none is suspended";
  ASSERT_TRUE(registry::SetSuspended(Find(second)->id, true));
  ASSERT_EQ(Do("ncclGroupStart"), 0);
  ASSERT_EQ(Do("ncclCommDestroy", third), 0);
  EXPECT_EQ(server_.pauses, 0) << "NCCL has not ended it yet";
  ASSERT_EQ(Do("ncclGroupEnd"), 0);
  EXPECT_EQ(server_.pauses, 1);
  ASSERT_EQ(Do("ncclCommDestroy", second), 0);
  EXPECT_EQ(server_.pauses, 1) << "its memory was not waited for";
  EXPECT_FALSE(registry::AnySuspended()) << "that one is gone";
}

TEST_F(BesideSuspended, a_pause_that_fails_at_the_end_of_a_group_is_its_answer_although_NCCL_is_in_progress) {
  ncclComm *suspended = nullptr, *ended = nullptr, *made = nullptr;
  ASSERT_EQ(InitRank(&suspended, "suspended"), 0);
  ASSERT_EQ(InitRank(&ended, "ended"), 0);
  ASSERT_TRUE(registry::SetSuspended(Find(suspended)->id, true));
  server_.pause = 3;
  const Configuration nonblocking;
  const auto init = Function<int(ncclComm**, int, UniqueId, int, const void*)>("ncclCommInitRankConfig");
  ASSERT_EQ(Do("ncclGroupStart"), 0);
  ASSERT_EQ(Do("ncclCommDestroy", ended), 0);
  ASSERT_EQ(init(&made, 1, Unique("nonblocking"), 0, &nonblocking), 0);
  EXPECT_EQ(Do("ncclGroupEnd"), 3);
  EXPECT_EQ(server_.pauses, 1);
  ASSERT_TRUE(Find(made).has_value()) << "NCCL makes it all the same";
}

}  // namespace
}  // namespace amem::nccl
