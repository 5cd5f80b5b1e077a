// A slab that is cut up, because NCCL maps a part of it at a second address: whichever call of the driver fails on the way, the
// program's memory is where it was, with what it held.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include "tests/in_thread.h"
#include "tests/replay/session/session_process.h"

namespace amem {
namespace {

using test::k2M, test::kDevice, test::kMiB, test::Process;

SessionOptions OneSmallSlab() {
  SessionOptions options;
  options.layout = Layout::kSlab;
  options.slab_bytes = 32 * kMiB;
  return options;
}

// Three allocations in one slab: the first two are mapped, the last has an address and is not mapped there yet.
class CutUpSlab : public test::TwoProcesses {
 protected:
  CutUpSlab() : TwoProcesses(OneSmallSlab(), 512 * kMiB) {}

  void TearDown() override {
    if (a.session->CopyState().broken.empty()) return TwoProcesses::TearDown();
    for (const Process* p : {&a, &b}) EXPECT_TRUE(p->session->Close("test").ok());
  }
  void Allocate() {
    for (std::size_t i = 0; i < 2; ++i) {
      ids_[i] = a.Create();
      memory_[i] = a.Place(ids_[i]);
      std::memset(memory_[i], static_cast<int>(0x11 * (i + 1)), k2M);
    }
    ids_[2] = a.Create();
    reserved_ = *a.session->nccl().Reserve(k2M, 0, {}, 0, {});
    elsewhere_ = *a.session->nccl().Reserve(3 * k2M, 0, {}, 0, {});
    ASSERT_EQ(a.session->CopyState().slabs.size(), 1U);
  }
  // NCCL's call that needs the slab to be cut up.
  Status MapOnceMore() const { return a.session->nccl().Map(elsewhere_ + k2M, k2M, 0, ids_[0], 0); }
  void AllIsThere() const {
    for (std::size_t i = 0; i < 2; ++i) {
      const std::vector<std::byte> expected(k2M, static_cast<std::byte>(0x11 * (i + 1)));
      EXPECT_EQ(std::memcmp(memory_[i], expected.data(), k2M), 0) << i;
    }
  }
  void WorksOverAPause() const {
    ASSERT_TRUE(a.session->Pause().ok());
    ASSERT_TRUE(a.session->Resume().ok());
    AllIsThere();
  }
  void FreeAll() const {
    if (a.simulator->MappingAt(elsewhere_ + k2M).ok()) {
      EXPECT_TRUE(a.session->nccl().Unmap(elsewhere_ + k2M, k2M).ok());
    }
    EXPECT_TRUE(a.session->nccl().FreeRange(elsewhere_, 3 * k2M).ok());
    EXPECT_TRUE(a.session->nccl().Release(ids_[2]).ok());
    EXPECT_TRUE(a.session->nccl().FreeRange(reserved_, k2M).ok());
    for (std::size_t i = 0; i < 2; ++i) a.Free(memory_[i], ids_[i]);
    EXPECT_TRUE(a.session->CopyState().allocations.empty());
    EXPECT_TRUE(a.session->CopyState().ranges.empty());
  }
  void IsSound(const std::string& where) const {
    const State state = a.session->CopyState();
    ASSERT_TRUE(state.broken.empty()) << where << ": " << state.broken;
    const Status sound = CheckInvariants(state);
    EXPECT_TRUE(sound.ok()) << where << ": " << sound.message();
    a.JournalFolds();
  }

  AllocationId ids_[3];
  std::byte* memory_[2] = {};
  Address reserved_, elsewhere_;
};

TEST_F(CutUpSlab, any_call_that_fails_once_costs_nothing_but_that_mapping) {
  // Those that make the slab's parts and copy them, that exchange them for the slab, and that map where NCCL wants it.
  int failures = 0;
  for (const char* call : {"Synchronize", "Create", "Reserve", "Map", "SetAccess", "AllocatePinned", "CopyToHost",
                           "CopyToDevice", "FinishCopies", "Unmap"}) {
    for (std::uint64_t nth = 1;; ++nth) {
      const std::string where = std::string(call) + " " + std::to_string(nth);
      Allocate();
      const std::uint64_t before = a.simulator->Calls(call);
      ASSERT_TRUE(a.simulator->FailNext(call, nth, cuda::kUnknown).ok());
      const Status mapped = MapOnceMore();
      const bool happened = a.simulator->Calls(call) - before >= nth;
      a.simulator->ForgetPlannedFailures();
      IsSound(where);
      AllIsThere();
      if (!mapped.ok()) {
        ++failures;
        EXPECT_TRUE(happened) << where << ": " << mapped.message();
        EXPECT_EQ(MapOnceMore(), Status{}) << where << ": the next try";
        IsSound(where);
      }
      WorksOverAPause();
      FreeAll();
      ASSERT_FALSE(HasFailure()) << where;
      if (!happened) break;
    }
  }
  EXPECT_GE(failures, 20) << "calls that were made to fail";
}

// The GPU hangs while contents are copied: the copies end later, and what they read and write must still be there.
TEST_F(CutUpSlab, copies_that_have_not_ended_do_not_lose_their_memory) {
  for (const int fine : {0, 1}) {
    Allocate();
    a.session->devices().TrimPinned(0);
    const Bytes pinned = a.simulator->PinnedBytes();
    int calls = 0;
    a.simulator->SetHook(
        [&](std::string_view call, std::uint64_t) { return call == "FinishCopies" && calls++ >= fine ? cuda::kTimeout : 0; });
    EXPECT_FALSE(MapOnceMore().ok());
    EXPECT_EQ(calls, fine + 2);
    EXPECT_EQ(a.simulator->QueuedCopies(kDevice), 1U);
    EXPECT_EQ(a.simulator->PinnedBytes() - pinned, k2M);
    a.session->devices().TrimPinned(0);
    EXPECT_EQ(a.simulator->PinnedBytes() - pinned, k2M) << "they may still be under way";
    a.simulator->SetHook({});
    if (fine == 0) {
      a.session->devices().TrimPinned(0);
      EXPECT_EQ(a.simulator->PinnedBytes(), pinned) << "what is given back by hand";
    }
    EXPECT_EQ(MapOnceMore(), Status{}) << fine;
    EXPECT_EQ(a.simulator->PinnedBytes(), pinned);
    AllIsThere();
    WorksOverAPause();
    FreeAll();
  }
}

TEST_F(CutUpSlab, one_that_a_network_card_uses_stays_whole) {
  Allocate();
  const Registered by_card{Address{reinterpret_cast<std::uint64_t>(memory_[1])}, k2M, "ibv_reg_mr"};
  ASSERT_TRUE(a.session->records().NoteRegistration(by_card));
  EXPECT_EQ(MapOnceMore().code(), Code::kUnsupported);
  EXPECT_EQ(a.session->CopyState().slabs.size(), 1U);
  AllIsThere();
  a.session->records().Note(Deregistered{by_card.address, by_card.bytes});
  EXPECT_EQ(MapOnceMore(), Status{});
  FreeAll();
}

// A launch, say, whose stream is full. It may be waiting for what a third thread launches.
TEST_F(CutUpSlab, one_that_a_call_is_in_the_way_of_is_cut_up_after_it_and_other_calls_go_on) {
  constexpr auto kLong = std::chrono::milliseconds(2'300), kSoon = std::chrono::milliseconds(1'500);
  Allocate();
  std::promise<void> inside;
  std::thread busy([&] {
    const auto call = a.session->calls().EnterLaunch();
    inside.set_value();
    std::this_thread::sleep_for(kLong);
  });
  inside.get_future().wait();
  auto mapped = test::InThread([&] { return MapOnceMore(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it is waiting
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(a.session->calls().EnterLaunch().owns_lock());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
  EXPECT_EQ(mapped.get(), Status{});
  busy.join();
  AllIsThere();
  FreeAll();
}

// A kernel of NCCL's that waits for a copy which a thread of NCCL's makes.
TEST_F(CutUpSlab, what_runs_on_the_device_gets_the_calls_that_it_waits_for) {
  constexpr auto kLong = std::chrono::milliseconds(1'500), kBriefly = std::chrono::milliseconds(50);
  Allocate();
  a.simulator->SetWork(Simulator::Work::kOfProgram);
  auto mapped = test::InThread([&] { return MapOnceMore(); });
  std::this_thread::sleep_for(kBriefly);  // it is waiting
  auto copied = test::InThread([&] { return a.session->calls().EnterLaunch().owns_lock(); });
  EXPECT_EQ(copied.wait_for(kLong), std::future_status::ready) << "and the kernel would not end before the deadline";
  a.simulator->SetWork(Simulator::Work::kNone);
  EXPECT_TRUE(copied.get());
  EXPECT_EQ(mapped.get(), Status{});
  AllIsThere();
  FreeAll();
}

// Something is always launched between the wait for the device and the closing of the gate.
TEST_F(CutUpSlab, it_is_tried_again_where_work_comes_in_between) {
  Allocate();
  int waits = 0;
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) {
    return call == "Synchronize" && ++waits % 2 == 0 && waits < 6 ? cuda::kCaptureUnsupported : 0;
  });
  EXPECT_EQ(MapOnceMore(), Status{});
  EXPECT_EQ(waits, 6);
  a.simulator->SetHook({});
  AllIsThere();
  FreeAll();
}

TEST_F(CutUpSlab, a_slab_that_the_driver_does_not_take_back_is_left_and_noted) {
  Allocate();
  ASSERT_TRUE(a.simulator->FailNext("Release", 1, cuda::kUnknown).ok());
  EXPECT_EQ(MapOnceMore(), Status{});
  IsSound("Release");
  AllIsThere();
  EXPECT_EQ(a.Count<PassedThrough>(), 1U);
  WorksOverAPause();
  FreeAll();
  EXPECT_EQ(a.InUse(), 32 * kMiB) << "the slab that stayed, and nothing else";
}

TEST_F(CutUpSlab, one_that_can_neither_be_cut_up_nor_be_put_back_breaks_the_session_and_says_why) {
  Allocate();
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) {
    const bool slab_is_unmapped = !a.simulator->MappingAt(Address{reinterpret_cast<std::uint64_t>(memory_[0])}).ok();
    return call == "Map" && slab_is_unmapped ? cuda::kUnknown : 0;
  });
  EXPECT_FALSE(MapOnceMore().ok());
  a.simulator->SetHook({});
  const std::string broken = a.session->CopyState().broken;
  EXPECT_NE(broken.find("could neither be"), std::string::npos) << broken;
  EXPECT_EQ(a.session->Pause().code(), Code::kBroken);
}

}  // namespace
}  // namespace amem
