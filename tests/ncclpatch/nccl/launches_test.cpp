// What is counted of NCCL's launches, under which names, and how they are held, on a libnccl that has the calls and no memory.
#include "ncclpatch/nccl/launches.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"
#include "ncclpatch/nccl/gate.h"
#include "ncclpatch/nccl/graphs.h"
#include "ncclpatch/nccl/places.h"
#include "tests/without_memory.h"

namespace amem::nccl {
namespace {
namespace counted {

using agreement::ClockReading;
using agreement::LaunchOrder;
using agreement::LaunchReading;

class Launches : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    nccl_ = dlopen(AMEM_NCCL_CALLS, RTLD_LAZY | RTLD_LOCAL);
    ASSERT_NE(nccl_, nullptr) << dlerror();
    redirects::Install(Tables(), ThreadCalls());
    ASSERT_TRUE(hook::Attach().ok());
    launches::NoteCapture(false);  // as NCCL asks before each launch
  }
  void TearDown() override { launches::LetGo(); }

  template <class F>
  static F* Function(const char* name) {
    return reinterpret_cast<F*>(dlsym(nccl_, name));
  }
  static ncclComm* Make(const char* unique, int rank, int ranks) {
    UniqueId id{};
    std::snprintf(id.bytes, sizeof id.bytes, "%s", unique);
    ncclComm* comm = nullptr;
    EXPECT_EQ(Function<int(ncclComm**, int, UniqueId, int)>("ncclCommInitRank")(&comm, ranks, id, rank), 0);
    return comm;
  }
  static ncclComm* Split(ncclComm* parent, int color) {
    ncclComm* comm = nullptr;
    EXPECT_EQ(Function<int(ncclComm*, int, int, ncclComm**, void*)>("ncclCommSplit")(parent, color, 0, &comm, nullptr), 0);
    return comm;
  }
  static int Reduce(ncclComm* comm, std::uintptr_t stream = 0) {
    using Call = int(const void*, void*, std::size_t, int, int, ncclComm*, void*);
    return Function<Call>("ncclAllReduce")(nullptr, nullptr, 0, 7, 0, comm, reinterpret_cast<void*>(stream));
  }
  static int Send(ncclComm* comm, int to) {
    return Function<int(const void*, std::size_t, int, int, ncclComm*, void*)>("ncclSend")(nullptr, 0, 7, to, comm, nullptr);
  }
  static int Receive(ncclComm* comm, int from) {
    return Function<int(void*, std::size_t, int, int, ncclComm*, void*)>("ncclRecv")(nullptr, 0, 7, from, comm, nullptr);
  }
  // Until so many seats are held, and their threads wait. A thread that is not held yet is inside, or has not begun.
  static void WaitForHeld(int threads) {
    for (int i = 0; i < 5000 && launches::HeldNow() < threads; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_EQ(launches::HeldNow(), threads);
  }
  static void Do(const char* name) { ASSERT_EQ(Function<int()>(name)(), 0); }
  static void Destroy(ncclComm* comm) { ASSERT_EQ(Function<int(ncclComm*)>("ncclCommDestroy")(comm), 0); }
  static std::uint64_t ClockOf(ncclComm* comm) { return Find(comm)->name; }

  // "collectives" or "FROM>TO", and how often, of one rank of a communicator.
  static std::map<std::string, std::uint64_t> Counts(ncclComm* comm) {
    const LaunchReading reading = launches::Hold({.version = 1});
    launches::LetGo();
    std::map<std::string, std::uint64_t> counts;
    for (const ClockReading& one : reading.clocks)
      if (one.communicator == ClockOf(comm) && one.rank == Find(comm)->rank)
        counts[one.from < 0 ? "collectives" : std::to_string(one.from) + ">" + std::to_string(one.to)] = one.launched;
    return counts;
  }
  using Expected = std::map<std::string, std::uint64_t>;

  static void* nccl_;
};
void* Launches::nccl_ = nullptr;

TEST_F(Launches, collectives_sends_and_receives_count_on_their_communicator_and_their_pair) {
  ncclComm* const comm = Make("counted", 1, 3);
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 0}}));
  Reduce(comm);
  Reduce(comm);
  Send(comm, 2);
  Receive(comm, 0);
  Send(comm, 1);  // to itself
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 2}, {"1>2", 1}, {"0>1", 1}}));
  Destroy(comm);
}

TEST_F(Launches, a_group_counts_at_its_end_with_the_groups_in_it) {
  ncclComm *const comm = Make("group", 0, 2), *const other = Make("of the group", 1, 2);
  Do("ncclGroupStart");
  Do("ncclGroupStart");
  Reduce(comm);
  Send(comm, 1);
  Receive(comm, 1);
  Do("ncclGroupEnd");
  Reduce(other);
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 0}}));
  Do("ncclGroupEnd");
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 1}, {"0>1", 1}, {"1>0", 1}}));
  EXPECT_EQ(Counts(other), (Expected{{"collectives", 1}}));
  for (ncclComm* const one : {comm, other}) Destroy(one);
}

TEST_F(Launches, a_group_that_is_only_simulated_launches_nothing) {
  ncclComm* const comm = Make("simulated", 0, 2);
  Do("ncclGroupStart");
  Reduce(comm);
  EXPECT_EQ(Function<int(void*)>("ncclGroupSimulateEnd")(nullptr), 0);
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 0}}));
  Reduce(comm);
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 1}}));
  Destroy(comm);
}

TEST_F(Launches, ranks_know_a_communicator_by_one_name_and_different_ones_by_different_names) {
  ncclComm *const first = Make("same", 0, 2), *const second = Make("same", 1, 2), *const other = Make("another", 0, 2);
  EXPECT_NE(ClockOf(first), 0U);
  EXPECT_EQ(ClockOf(first), ClockOf(second));
  EXPECT_NE(ClockOf(first), ClockOf(other));
  ncclComm *const red = Split(first, 0), *const green = Split(second, 1);  // in one order on both
  ncclComm *const again = Split(first, 0), *const with = Split(second, 0);
  EXPECT_NE(ClockOf(red), ClockOf(green)) << "two colors";
  EXPECT_NE(ClockOf(red), ClockOf(again)) << "a later split";
  EXPECT_EQ(ClockOf(again), ClockOf(with));
  using Shrink = int(ncclComm*, int*, int, ncclComm**, void*, int);
  ncclComm* shrunk[2] = {};
  for (int i = 0; i < 2; ++i)
    ASSERT_EQ(Function<Shrink>("ncclCommShrink")(i == 0 ? first : second, nullptr, 0, &shrunk[i], nullptr, 0), 0);
  EXPECT_EQ(ClockOf(shrunk[0]), ClockOf(shrunk[1]));
  EXPECT_NE(ClockOf(shrunk[0]), ClockOf(again));
  EXPECT_EQ(Counts(first), (Expected{{"collectives", 2}})) << "a split is made by all ranks of its parent, a shrink is not";
  ncclComm* all[2] = {};
  ASSERT_EQ((Function<int(ncclComm**, int, const int*)>("ncclCommInitAll")(all, 2, nullptr)), 0);
  EXPECT_EQ(ClockOf(all[0]), ClockOf(all[1]));
  for (ncclComm* const one : {first, second, other, red, green, again, with, shrunk[0], shrunk[1], all[0], all[1]})
    Destroy(one);
}

TEST_F(Launches, a_closed_gate_holds_a_launch_until_its_target_rises_or_it_is_let_go_once_more) {
  ncclComm* const comm = Make("held", 0, 2);
  Reduce(comm);
  LaunchOrder order{.version = 1};
  EXPECT_EQ(launches::Hold(order).version, 1U);
  std::atomic<int> made{0};
  std::thread program([&] {
    for (int i = 0; i < 3; ++i) Reduce(comm), ++made;
  });
  const auto is_held = [&] {
    const LaunchReading now = launches::Hold(order);
    return now.seats.size() == 1 && now.seats.front().held && now.inside.empty();
  };
  const auto until = [](const auto& so) {
    for (int i = 0; i < 5000 && !so(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return so();
  };
  ASSERT_TRUE(until(is_held));
  EXPECT_EQ(made, 0);
  ++order.version;
  order.targets = {{.device = 0, .clock = agreement::ClockOf(ClockOf(comm)).value, .count = 2}};
  launches::Hold(order);
  ASSERT_TRUE(until([&] { return made == 1 && is_held(); }));
  ++order.version;
  order.seats = {{.device = 0, .let_go = 1}};
  launches::Hold(order);
  ASSERT_TRUE(until([&] { return made == 2 && is_held(); }));
  const LaunchReading reading = launches::Hold(order);
  EXPECT_EQ(reading.seats.front().let_go, 1U);
  EXPECT_EQ(reading.clocks.front().launched, 3U);
  launches::LetGo();
  program.join();
  EXPECT_EQ(made, 3);
  EXPECT_EQ(launches::Read().version, 0U);
  Destroy(comm);
}

// The thread would otherwise never come back from a communicator that its peers make behind the gate.
// As a tool does each second, so that the rank knows that it lives.
TEST_F(Launches, an_order_that_is_given_again_without_its_targets_lets_those_be_followed) {
  ncclComm* const comm = Make("given again", 0, 2);
  const std::uint64_t to_here = agreement::ClockOfPair(ClockOf(comm), 1, 0).value;
  launches::Hold({.version = 2, .targets = {{.device = 0, .clock = to_here, .count = 1}}});
  launches::Hold({.version = 2});
  std::atomic<bool> received{false};
  std::thread program([&] { received = Receive(comm, 1) == 0; });
  for (int i = 0; i < 5000 && !received; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(received);
  launches::LetGo();
  program.join();
  Destroy(comm);
}

TEST_F(Launches, a_communicator_that_is_being_made_is_held_too_and_is_inside_while_it_is_made) {
  launches::Hold({.version = 1});
  ncclComm* made = nullptr;
  std::thread program([&] { made = Make("made", 0, 1); });
  LaunchReading now;
  for (int i = 0; i < 5000 && (now.seats.empty() || !now.seats.front().held); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    now = launches::Hold({.version = 1});
  }
  ASSERT_EQ(now.seats.size(), 1U);
  EXPECT_EQ(now.seats.front().device, -1);
  EXPECT_EQ(made, nullptr);
  launches::LetGo();
  program.join();
  ASSERT_NE(made, nullptr);
  Destroy(made);
}

// As the runtime's server while NCCL's memory is paused, which it is until the gate opens.
struct PausedUntilLetGo final : SuspendServer {
  PausedUntilLetGo() { SetSuspendServer(this); }
  ~PausedUntilLetGo() { SetSuspendServer(nullptr); }
  int Refuse(const char*, CommunicatorId) noexcept override { return kInvalidUsage; }
  int BeforeMaking(const Communicator&) noexcept override {
    ++asked;
    return launches::g_closed.load() ? kInvalidUsage : kSuccess;
  }
  int CarryOutResumes(const char*) noexcept override { return kSuccess; }
  void ResumeFailedFirst() noexcept override {}
  void UndoSuspends() noexcept override {}
  int CarryOutSuspends(const char*) noexcept override { return kSuccess; }
  std::atomic<int> asked{0};
};

// A program that was stopped between launches does not know it, and its next call of NCCL's may be the first with a
// communicator that it makes only then.
TEST_F(Launches, a_communicator_that_is_made_while_the_job_is_stopped_waits_and_is_not_refused) {
  PausedUntilLetGo server;
  ncclComm *const parent = Make("stopped", 0, 2), *made = nullptr, *pair[2] = {};
  UniqueId id{};
  const auto in_group = [&] {
    int answer = Function<int()>("ncclGroupStart")();
    answer += Function<int(ncclComm**, int, UniqueId, int)>("ncclCommInitRank")(&made, 1, id, 0);
    return answer + Function<int()>("ncclGroupEnd")();
  };
  using Call = std::function<int()>;
  const std::map<std::string, Call> calls = {
      {"one", [&] { return Function<int(ncclComm**, int, UniqueId, int)>("ncclCommInitRank")(&made, 1, id, 0); }},
      {"a part",
       [&] { return Function<int(ncclComm*, int, int, ncclComm**, void*)>("ncclCommSplit")(parent, 0, 0, &made, nullptr); }},
      {"all", [&] { return Function<int(ncclComm**, int, const int*)>("ncclCommInitAll")(pair, 2, nullptr); }},
      {"in a group", in_group}};
  for (const auto& call : calls) {
    SCOPED_TRACE(call.first);
    std::snprintf(id.bytes, sizeof id.bytes, "stopped, %s", call.first.c_str());
    launches::Hold({.version = 1});
    const int before = server.asked;
    std::atomic<int> answer{-1};
    std::thread program([&] { answer = call.second(); });
    for (int i = 0; i < 5000 && launches::HeldNow() == 0 && answer < 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(server.asked, before) << "it is asked when it may be made";
    launches::LetGo();
    program.join();
    EXPECT_EQ(answer, kSuccess);
    EXPECT_GT(server.asked, before);
    for (ncclComm** one : {&made, &pair[0], &pair[1]})
      if (*one != nullptr) Destroy(std::exchange(*one, nullptr));
  }
  Destroy(parent);
}

TEST_F(Launches, a_part_that_waits_is_forgotten_when_its_parent_is_aborted) {
  ncclComm* const parent = Make("parent", 0, 1);
  const std::size_t known = All().size();
  launches::Hold({.version = 1});
  std::atomic<int> answer{-1};
  ncclComm* part = nullptr;
  std::thread program(
      [&] { answer = Function<int(ncclComm*, int, int, ncclComm**, void*)>("ncclCommSplit")(parent, 0, 0, &part, nullptr); });
  WaitForHeld(1);
  EXPECT_EQ(Function<int(ncclComm*)>("ncclCommAbort")(parent), 0);
  program.join();
  EXPECT_EQ(answer, kInvalidUsage);
  EXPECT_EQ(All().size(), known - 1);
}

TEST_F(Launches, what_a_count_cannot_see_is_named) {
  ncclComm* const comm = Make("uncounted", 0, 2);
  EXPECT_EQ(launches::Read().why_not, "");
  ASSERT_EQ((Function<int(int, int, int, unsigned, ncclComm*, void*)>("ncclSignal")(0, 0, 0, 0, comm, nullptr)), 0);
  EXPECT_TRUE(launches::Read().why_not.starts_with("ncclSignal on communicator 0x")) << launches::Read().why_not;
  Destroy(comm);
  EXPECT_EQ(launches::Read().why_not, "") << "it ended with its communicator";
  ncclComm* const captured = Make("captured", 0, 2);
  Function<void(void (*)(const char*))>("stand_in_probe")([](const char*) { launches::NoteCapture(true); });
  Reduce(captured);
  Function<void(void (*)(const char*))>("stand_in_probe")([](const char*) {});
  EXPECT_NE(launches::Read().why_not.find("captured into a CUDA graph"), std::string::npos) << launches::Read().why_not;
  Destroy(captured);
  Reduce(Function<ncclComm*()>("stand_in_unseen")());
  EXPECT_NE(launches::Read().why_not.find("made before AMem"), std::string::npos) << launches::Read().why_not;
}

#ifndef AMEM_SANITIZED
TEST_F(Launches, go_on_once_they_are_let_go_although_there_is_no_memory) {
  ncclComm* const comm = Make("let go", 0, 2);
  EXPECT_EQ(launches::Hold({.version = 1}).version, 1U);
  {
    const test::WithoutMemory none;
    EXPECT_NO_THROW(launches::LetGo());
  }
  EXPECT_EQ(launches::Read().version, 0U) << "the gate is open";
  Reduce(comm);
  Destroy(comm);
}
#endif

TEST_F(Launches, a_failed_check_is_why_not_from_then_on) {
  ncclComm* const comm = Make("checked", 0, 2);
  EXPECT_EQ(launches::Hold({.version = 1}).why_not, "");
  launches::LetGo();
  launches::TheAll().ended.push_back(Find(comm)->id);  // it lives
  const std::string why = launches::Hold({.version = 2}).why_not;
  EXPECT_NE(why.find("known->second->ended() (false"), std::string::npos) << why;
  launches::LetGo();
  launches::TheAll().ended.pop_back();
  EXPECT_EQ(launches::Hold({.version = 3}).why_not, why);
  launches::LetGo();
  Destroy(comm);
}

// Follows graphs for the rest of the process, as AMEM_SCOPE=all does.
TEST_F(Launches, what_a_graph_has_captured_counts_each_time_that_it_is_launched) {
  namespace graphs = launches::graphs;
  const auto why = [] { return launches::Read().why_not; };
  const auto handle = [](std::uintptr_t value) { return reinterpret_cast<void*>(value); };
  ncclComm* const comm = Make("in a graph", 0, 2);
  graphs::Follow();
  const auto capture = [&](void (*probe)(const char*)) {
    Function<void(void (*)(const char*))>("stand_in_probe")(probe);
    Reduce(comm, 16);
    Function<void(void (*)(const char*))>("stand_in_probe")([](const char*) { launches::NoteCapture(false); });
  };
  capture([](const char*) { launches::NoteCapture(true, reinterpret_cast<void*>(0x100), 1); });
  EXPECT_TRUE(launches::Streams().empty()) << "nothing has run on the stream that was captured";
  graphs::CaptureEnded(handle(0x100), 1);
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 1}})) << "all ranks make the call, too";
  EXPECT_NE(why().find("nobody was seen to instantiate"), std::string::npos) << why();
  graphs::Instantiated(handle(0x200), handle(0x100));
  EXPECT_EQ(why(), "");
  graphs::Destroying(handle(0x100)).Done(true);
  EXPECT_EQ(why(), "") << "what was made of it has its launches";

  const auto launch = [&](std::uintptr_t made, void* stream) {
    return launches::Launch("cuGraphLaunch", graphs::LaunchesOf(handle(made), stream), [] { return 0; });
  };
  launch(0x200, handle(32));
  launch(0x200, handle(32));
  launch(0x300, handle(48));  // has nothing of NCCL's
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 3}}));
  std::vector<std::pair<DeviceOrdinal, nccl::Stream>> streams = launches::Streams();
  EXPECT_TRUE(std::ranges::any_of(streams, [&](const auto& one) { return one.second == handle(32); })) << "it is waited for";
  EXPECT_FALSE(std::ranges::any_of(streams, [&](const auto& one) { return one.second == handle(48); }));
  launches::Hold({.version = 1});
  std::thread held([&] { launch(0x200, handle(32)); });
  WaitForHeld(1);
  launches::LetGo();
  held.join();
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 4}}));

  capture([](const char*) { launches::NoteCapture(true, reinterpret_cast<void*>(0x400), 2); });
  graphs::CaptureEnded(handle(0x400), 2);
  graphs::Added(handle(0x500), handle(0x400));
  graphs::Instantiated(handle(0x200), handle(0x500));
  launch(0x200, handle(32));
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 6}}));
  graphs::Instantiated(handle(0x200), handle(0x600));  // anew, from one without
  launch(0x200, handle(32));
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 6}}));
  EXPECT_EQ(why(), "");
  capture([](const char*) { launches::NoteCapture(true, reinterpret_cast<void*>(0x700), 3); });
  graphs::Destroying(handle(0x700)).Done(true);
  EXPECT_NE(why().find("graph that was destroyed without being seen instantiated"), std::string::npos) << why();
  Destroy(comm);
  EXPECT_EQ(why(), "");
}

// Three calls of one group, into two graphs; NCCL asks in the call, and once for a stream of a communicator.
TEST_F(Launches, a_group_is_remembered_with_the_graph_of_each_communicator) {
  namespace graphs = launches::graphs;
  static void* into = nullptr;
  const auto handle = [](std::uintptr_t value) { return reinterpret_cast<void*>(value); };
  const auto probe = Function<void(void (*)(const char*))>("stand_in_probe");
  ncclComm *const first = Make("first in a graph", 0, 2), *const second = Make("second in a graph", 0, 2);
  ncclComm* const other = Make("in no graph", 0, 2);
  graphs::Follow();
  probe([](const char* where) {
    if (std::string(where) == "asks") launches::NoteCapture(into != nullptr, into, reinterpret_cast<std::uintptr_t>(into));
  });
  Do("ncclGroupStart");
  into = handle(0x10);
  Reduce(first, 16);
  into = nullptr;
  Reduce(first, 16);
  Reduce(other, 24);
  into = handle(0x20);
  Reduce(second, 32);
  Do("ncclGroupEnd");
  probe([](const char*) {});
  for (const std::uintptr_t graph : {0x10, 0x20}) {
    graphs::CaptureEnded(handle(graph), graph);
    graphs::Instantiated(handle(graph + 1), handle(graph));
  }
  EXPECT_EQ(launches::Read().why_not, "");
  const auto of = [&](std::uintptr_t made) {
    std::map<const void*, int> launched;
    for (const launches::Launched& one : graphs::LaunchesOf(handle(made), nullptr)) ++launched[one.counted];
    return launched;
  };
  EXPECT_EQ(of(0x11), (std::map<const void*, int>{{launches::FindCounted(first), 2}}));
  EXPECT_EQ(of(0x21), (std::map<const void*, int>{{launches::FindCounted(second), 1}}));
  using Streams = std::vector<std::pair<DeviceOrdinal, nccl::Stream>>;
  EXPECT_EQ(launches::Streams(), (Streams{{DeviceOrdinal{0}, handle(24)}}));
  Destroy(first);
  EXPECT_TRUE(of(0x11).empty()) << "it has ended, and may be forgotten";
  for (ncclComm* const one : {second, other}) Destroy(one);
}

TEST_F(Launches, a_graph_is_not_taken_for_an_earlier_one_of_its_handle) {
  namespace graphs = launches::graphs;
  static std::uint64_t id = 0;
  const auto handle = [](std::uintptr_t value) { return reinterpret_cast<void*>(value); };
  const auto probe = Function<void(void (*)(const char*))>("stand_in_probe");
  ncclComm* comm = nullptr;
  graphs::Follow();
  const auto capture = [&](const char* name) {  // into 0x900, of a communicator of its own
    comm = Make(name, 0, 2);
    probe([](const char*) { launches::NoteCapture(true, reinterpret_cast<void*>(0x900), id); });
    ++id;
    Reduce(comm, 16);
    probe([](const char*) {});
  };
  const auto why = [&] {
    const std::string why_not = launches::Read().why_not;
    Destroy(comm);
    EXPECT_EQ(launches::Read().why_not, "") << "it ended with its communicator";
    return why_not;
  };
  capture("invalidated");
  graphs::CaptureFailed(0);
  EXPECT_NE(why().find("that capture failed"), std::string::npos);
  capture("the next capture has its handle");
  ncclComm* const earlier = comm;
  capture("that capture");
  graphs::CaptureEnded(handle(0x900), id);
  graphs::Instantiated(handle(0x901), handle(0x900));
  EXPECT_EQ(graphs::LaunchesOf(handle(0x901), nullptr).size(), 1U);
  Destroy(comm);
  comm = earlier;
  EXPECT_NE(why().find("has become another's"), std::string::npos);
  graphs::Destroying(handle(0x900)).Done(true);
  capture("a capture without launches has its handle");
  graphs::CaptureEnded(handle(0x900), id + 1);
  graphs::Instantiated(handle(0x901), handle(0x900));
  EXPECT_TRUE(graphs::LaunchesOf(handle(0x901), nullptr).empty());
  EXPECT_NE(why().find("has become another's"), std::string::npos);
  capture("an empty graph has its handle");
  graphs::CaptureEnded(handle(0x900), id);
  graphs::Created(handle(0x900));
  graphs::Instantiated(handle(0x901), handle(0x900));
  EXPECT_TRUE(graphs::LaunchesOf(handle(0x901), nullptr).empty());
  EXPECT_NE(why().find("without being seen instantiated"), std::string::npos);
  capture("a clone has its handle");
  graphs::CaptureEnded(handle(0x900), id);
  graphs::Instantiated(handle(0x901), handle(0x900));
  graphs::Cloned(handle(0x900), handle(0x999));
  EXPECT_EQ(graphs::LaunchesOf(handle(0x901), nullptr).size(), 1U);
  graphs::Instantiated(handle(0x902), handle(0x900));
  EXPECT_TRUE(graphs::LaunchesOf(handle(0x902), nullptr).empty());
  EXPECT_EQ(why(), "");
  graphs::Destroying(handle(0x900)).Done(true);
  capture("its capture ends unseen");
  graphs::Instantiated(handle(0x901), handle(0x900));
  EXPECT_NE(why().find("not seen to end"), std::string::npos);
}

// With the handle it may launch, or change, what is in the other graph.
TEST_F(Launches, a_program_that_gets_the_handle_of_a_part_can_no_longer_be_followed) {
  namespace graphs = launches::graphs;
  const auto handle = [](std::uintptr_t value) { return reinterpret_cast<void*>(value); };
  const auto probe = Function<void(void (*)(const char*))>("stand_in_probe");
  ncclComm* const comm = Make("in a part", 0, 2);
  graphs::Follow();
  probe([](const char*) { launches::NoteCapture(true, reinterpret_cast<void*>(0x100), 1); });
  Reduce(comm, 16);
  probe([](const char*) {});
  graphs::CaptureEnded(handle(0x100), 1);
  graphs::Instantiated(handle(0x101), handle(0x100));
  graphs::PartGiven();
  EXPECT_EQ(launches::Read().why_not, "") << "it is no part of another";
  graphs::Added(handle(0x200), handle(0x100));
  graphs::Instantiated(handle(0x201), handle(0x200));
  EXPECT_EQ(launches::Read().why_not, "");
  graphs::PartGiven();
  EXPECT_NE(launches::Read().why_not.find(graphs::kNotFollowed), std::string::npos) << launches::Read().why_not;
  Destroy(comm);
  EXPECT_EQ(launches::Read().why_not, "");
}

// As where a program replays it between launches of its own, on other streams: each time a stream is another than the last.
TEST_F(Launches, the_cost_of_a_graph_is_linear_in_its_launches) {
  namespace graphs = launches::graphs;
  constexpr int kDoublings = 16;
  const auto handle = [](std::uintptr_t value) { return reinterpret_cast<void*>(value); };
  const auto probe = Function<void(void (*)(const char*))>("stand_in_probe");
  ncclComm* const comm = Make("many in a graph", 0, 2);
  graphs::Follow();
  probe([](const char*) { launches::NoteCapture(true, reinterpret_cast<void*>(0x100), 1); });
  Reduce(comm, 16);
  probe([](const char*) {});
  graphs::CaptureEnded(handle(0x100), 1);
  for (int i = 0; i < kDoublings; ++i) graphs::Added(handle(0x100), handle(0x100));
  graphs::Instantiated(handle(0x200), handle(0x100));
  const auto cpu_ms = [] {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
  };
  const auto began = cpu_ms();
  Reduce(comm, 24);
  launches::Launch("cuGraphLaunch", graphs::LaunchesOf(handle(0x200), handle(32)), [] { return 0; });
  EXPECT_LT(cpu_ms() - began, 1000) << "of 65536 launches; each compared with each takes some ten times this";
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", (1U << kDoublings) + 2}}));
  EXPECT_TRUE(launches::IsAwaited(handle(24)) && launches::IsAwaited(handle(32)));
  Destroy(comm);
}

TEST_F(Launches, each_library_that_launches_must_be_seen_to_ask_for_captures) {
  auto* const address = reinterpret_cast<ncclComm*>(0x7000);
  Communicator of_another{.place = 1, .how = "init", .name = 9, .rank = 0, .ranks = 2, .device = DeviceOrdinal{0}};
  of_another.id = registry::Begin(of_another);
  registry::Bind(of_another.id, address);
  registry::MarkReady(of_another);
  const auto launch = [&](bool asks) {
    Touch(1, address);
    const launches::Launched one{launches::FindCounted(address), launches::Shape::kCollective, -1,
                                 reinterpret_cast<nccl::Stream>(48)};
    launches::Launch("ncclAllReduce", {&one, 1}, [&] {
      if (asks) launches::NoteCapture(false);
      return 0;
    });
  };
  ncclComm* const comm = Make("of the first library", 0, 2);
  Function<void(void (*)(const char*))>("stand_in_probe")([](const char*) { launches::NoteCapture(false); });
  Reduce(comm, 16);
  Function<void(void (*)(const char*))>("stand_in_probe")([](const char*) {});
  EXPECT_EQ(launches::Read().why_not, "");
  launch(false);
  EXPECT_NE(launches::Read().why_not.find("questions whether a stream is captured are not seen"), std::string::npos);
  launch(true);
  EXPECT_EQ(launches::Read().why_not, "");
  registry::End(of_another.id, "destroyed");
  Destroy(comm);
}

// Such as the destructors of a program's own thread_local objects.
TEST_F(Launches, a_thread_that_calls_as_it_ends_leaves_no_place_behind) {
  static ncclComm* comm = nullptr;
  comm = Make("to the end of a thread", 0, 2);
  struct CallsAtEnd {
    ~CallsAtEnd() { Reduce(comm, 16); }
  };
  const auto taken = [] {
    int count = 0;
    for (const launches::Place* place = launches::FirstPlace(); place != nullptr; place = place->next)
      count += place->taken.load() ? 1 : 0;
    return count;
  };
  Reduce(comm, 16);
  const int before = taken();
  std::thread([] {
    thread_local const CallsAtEnd calls;  // begins before AMem knows the thread, so that it ends after
    static_cast<void>(calls);
    Reduce(comm, 16);
  }).join();
  EXPECT_EQ(taken(), before);
  EXPECT_EQ(Counts(comm), (Expected{{"collectives", 3}}));
  Destroy(comm);
}

TEST_F(Launches, a_stream_that_was_destroyed_is_not_waited_for) {
  const auto stream = [](std::uintptr_t value) { return reinterpret_cast<nccl::Stream>(value); };
  ncclComm* const comm = Make("on a stream that goes", 0, 2);
  Reduce(comm, 64);
  ASSERT_TRUE(launches::IsAwaited(stream(64)));
  EXPECT_FALSE(launches::IsAwaited(stream(72)));
  launches::StreamEnding(stream(64)).Done(true, true);
  EXPECT_TRUE(launches::Streams().empty());
  EXPECT_EQ(launches::Read().why_not, "");
  Reduce(comm, 64);
  EXPECT_TRUE(launches::IsAwaited(stream(64))) << "another has got its handle";
  launches::StreamEnding(stream(64)).Done(true, false);
  EXPECT_TRUE(launches::Streams().empty());
  EXPECT_NE(launches::Read().why_not.find("on a stream that was destroyed"), std::string::npos);
  Destroy(comm);
  EXPECT_EQ(launches::Read().why_not, "");
}

TEST_F(Launches, a_part_whose_address_nccl_writes_late_is_not_taken_for_one_from_before_amem) {
  struct Configuration {
    std::size_t size = sizeof(Configuration);
    unsigned magic = 0, version = 0;
    int blocking = 0;
  } in_background;
  ncclComm *const parent = Make("late", 0, 2), *part = nullptr;
  Function<void(int)>("stand_in_write_late")(1);
  using Call = int(ncclComm*, int, int, ncclComm**, void*);
  EXPECT_EQ(Function<Call>("ncclCommSplit")(parent, 0, 0, &part, &in_background), kInProgress);
  ASSERT_EQ(part, nullptr);
  Function<void(int)>("stand_in_write_late")(0);
  for (int waited = 0; waited < 5000 && std::atomic_ref(part).load() == nullptr; ++waited)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(launches::Read().why_not, "");
  Reduce(part);
  EXPECT_NE(launches::Read().why_not.find("made in the background"), std::string::npos) << launches::Read().why_not;
}

TEST_F(Launches, an_ended_communicator_whose_kernels_may_run_is_named) {
  const auto why = [] { return launches::Read().why_not; };
  const std::string ended = " has ended, but perhaps not yet what it launched";
  ncclComm *const first = Make("two of a process", 0, 2), *const second = Make("two of a process", 1, 2);
  for (ncclComm* const one : {first, second}) Reduce(one, 16);
  EXPECT_EQ(why(), "");
  Destroy(first);
  EXPECT_NE(why().find(ended), std::string::npos) << why();
  ncclComm* const other = Make("on the same stream", 0, 2);
  Reduce(other, 16);  // which is waited for
  EXPECT_EQ(why(), "");
  Destroy(other);
  EXPECT_NE(why().find(ended), std::string::npos) << why();
  Destroy(second);
  EXPECT_EQ(why(), "") << "the last of the process ends them";
  ncclComm* const grouped = Make("in a group", 0, 1);
  Reduce(grouped, 16);
  Do("ncclGroupStart");
  Destroy(grouped);
  EXPECT_NE(why().find(ended), std::string::npos) << why();
  Do("ncclGroupEnd");
  EXPECT_EQ(why(), "");
}

TEST_F(Launches, nothing_is_launched_for_a_communicator_that_ended_behind_its_targets) {
  ncclComm *const aborted = Make("behind", 0, 2), *const comm = Make("lives", 0, 2);
  LaunchOrder order{.version = 1};
  order.targets = {{.device = 0, .clock = agreement::ClockOf(ClockOf(aborted)).value, .count = 2},
                   {.device = 0, .clock = agreement::ClockOfPair(ClockOf(aborted), 1, 0).value, .count = 1}};
  launches::Hold(order);
  ASSERT_EQ(Function<int(ncclComm*)>("ncclCommAbort")(aborted), 0);
  launches::Hold({.version = 2});  // it is a target of no living communicator any more
  std::thread program([&] { Reduce(comm); });
  WaitForHeld(1);
  launches::LetGo();
  program.join();
  Destroy(comm);
}

TEST_F(Launches, an_abort_in_a_group_does_not_wait_at_the_gate) {
  ncclComm* const comm = Make("aborted in a group", 0, 1);
  launches::Hold({.version = 1});
  std::atomic<bool> done{false};
  std::thread program([&] {
    Do("ncclGroupStart");
    Function<int(ncclComm*)>("ncclCommAbort")(comm);
    Do("ncclGroupEnd");
    done = true;
  });
  for (int i = 0; i < 5000 && !done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(done);
  launches::LetGo();
  program.join();
}

// A watchdog asks beside the thread that launches, and its answer may be the older one.
TEST_F(Launches, an_answer_of_before_does_not_end_what_began_after_it) {
  launches::Background background;
  background.Begin();
  const std::uint64_t asked = background.begun();
  background.Begin();
  background.End(asked);
  EXPECT_TRUE(background.goes_on());
  background.End(background.begun());
  background.End(asked);
  EXPECT_FALSE(background.goes_on());
}

TEST_F(Launches, one_that_nccl_refuses_lets_no_later_one_through_the_gate) {
  for (const bool is_ordered : {false, true}) {
    SCOPED_TRACE(is_ordered);
    ncclComm* const comm = Make(is_ordered ? "refused, and ordered" : "refused", 0, 2);
    const std::uint64_t all = agreement::ClockOf(ClockOf(comm)).value;
    const std::uint64_t pair = agreement::ClockOfPair(ClockOf(comm), 0, 1).value;
    launches::Hold({.version = 1, .seats = {{.device = 0, .let_go = 1}}});
    std::thread([&] {
      const launches::Launched both[] = {{launches::FindCounted(comm), launches::Shape::kCollective},
                                         {launches::FindCounted(comm), launches::Shape::kSend, 1}};
      const int answer = launches::Launch("ncclGroupEnd", both, [&] {
        if (is_ordered)  // by a tool that has seen it inside
          launches::Hold({.version = 2, .targets = {{0, all, 1}, {0, pair, 1}}});
        return kInvalidUsage;
      });
      EXPECT_EQ(answer, kInvalidUsage);
    }).join();
    std::atomic<int> made{0};
    std::thread program([&] {
      Reduce(comm), ++made;
      Send(comm, 1), ++made;
    });
    for (int i = 0; i < 5000 && launches::HeldNow() == 0 && made < 2; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(made, is_ordered ? 2 : 0) << "what was ordered the others follow, so this rank must";
    launches::LetGo();
    program.join();
    Destroy(comm);
  }
}

// There is none beside a pause, and no program expects a refusal.
TEST_F(Launches, memory_for_the_program_is_held_too) {
  launches::Hold({.version = 1});
  void* memory = nullptr;
  std::atomic<bool> freed{false};
  std::thread program([&] {
    EXPECT_EQ((Function<int(void**, std::size_t)>("ncclMemAlloc")(&memory, 64)), 0);
    freed = Function<int(void*)>("ncclMemFree")(memory) == 0;
  });
  WaitForHeld(1);
  EXPECT_EQ(memory, nullptr);
  launches::LetGo();
  program.join();
  EXPECT_TRUE(freed);
}

// NCCL frees it, and would use freed memory.
TEST_F(Launches, what_is_held_does_not_enter_nccl_with_a_communicator_that_was_aborted_meanwhile) {
  ncclComm *const comm = Make("aborted", 0, 1), *const other = Make("of its group", 0, 1);
  launches::Hold({.version = 1});
  std::atomic<int> reduced{-1}, finalized{-1}, ended{-1};
  std::thread reduces([&] { reduced = Reduce(comm); });
  std::thread finalizes([&] { finalized = Function<int(ncclComm*)>("ncclCommFinalize")(comm); });
  std::thread groups([&] {
    Do("ncclGroupStart");
    Reduce(comm);
    Reduce(other);
    ended = Function<int()>("ncclGroupEnd")();
    Do("ncclGroupStart");  // is one of its own
    ended = ended + 10 * Function<int()>("ncclGroupEnd")();
  });
  WaitForHeld(3);
  EXPECT_EQ(Function<int(ncclComm*)>("ncclCommAbort")(comm), 0);
  for (int i = 0; i < 5000 && (reduced < 0 || finalized < 0); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(reduced, kInvalidUsage);
  EXPECT_EQ(finalized, kInvalidUsage);
  launches::LetGo();
  for (std::thread* one : {&reduces, &finalizes, &groups}) one->join();
  EXPECT_EQ(ended, 0);
  EXPECT_EQ(Counts(other), (Expected{{"collectives", 1}}));
  Destroy(other);
}

TEST_F(Launches, an_abort_waits_no_longer_for_what_is_held_than_until_it_has_left) {
  auto least = std::chrono::steady_clock::duration::max();
  for (int i = 0; i < 3; ++i) {  // on a busy machine some are late
    ncclComm* const comm = Make("left", 0, 1);
    launches::Hold({.version = 1});
    std::thread reduces([&] { EXPECT_EQ(Reduce(comm), kInvalidUsage); });
    WaitForHeld(1);
    const auto began = std::chrono::steady_clock::now();
    EXPECT_EQ(Function<int(ncclComm*)>("ncclCommAbort")(comm), 0);
    least = std::min(least, std::chrono::steady_clock::now() - began);
    reduces.join();
    launches::LetGo();
  }
  EXPECT_LT(least, std::chrono::milliseconds(900));
}

// Who waited is counted on, although the gate was closed again before it ran.
TEST_F(Launches, a_gate_that_closes_again_at_once_knows_who_still_waits) {
  constexpr int kThreads = 16;  // not all of which run at once
  ncclComm* const comm = Make("twice", 0, 1);
  launches::Hold({.version = 1});
  std::vector<std::thread> programs;
  programs.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) programs.emplace_back([&] { Reduce(comm); });
  WaitForHeld(kThreads);
  launches::LetGo();
  launches::Hold({.version = 1});
  const int held = launches::HeldNow();  // who is not held any more has counted
  EXPECT_GE(held + static_cast<int>(launches::Hold({.version = 1}).clocks.front().launched), kThreads);
  launches::LetGo();
  for (std::thread& program : programs) program.join();
  Destroy(comm);
}

TEST_F(Launches, the_stream_of_a_thread_cannot_be_waited_for_by_another_thread) {
  ncclComm* const comm = Make("per thread", 0, 1);
  Reduce(comm, 1);
  EXPECT_EQ(launches::Read().why_not, "");
  Reduce(comm, 2);
  EXPECT_NE(launches::Read().why_not.find("cudaStreamPerThread"), std::string::npos) << launches::Read().why_not;
  Destroy(comm);
}

}  // namespace counted
}  // namespace
}  // namespace amem::nccl
