// Memory of a tag that NCCL uses too: windows and registrations made of it, before and while its tag is paused or resumed.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <optional>

#include "tests/in_thread.h"
#include "tests/replay/session/pools_fixture.h"

namespace amem {
namespace {

using test::kChunk, test::kDevice, test::kMiB;

constexpr std::chrono::milliseconds kMoment{100};

class TagsAndNcclTest : public test::PoolsTest {
 protected:
  // As ncclCommWindowRegister does with memory of a program: the handle is retained and mapped a second time.
  struct Window {
    AllocationId chunk;
    std::byte* memory = nullptr;
  };
  Window MakeWindow(const std::byte* part) const {
    const AllocationId chunk = *a.session->nccl().Retain(AddressOf(part));
    return {chunk, a.Place(chunk, kChunk)};
  }
};

TEST_F(TagsAndNcclTest, contents_are_found_by_their_place_in_the_chunk_wherever_nccl_mapped_it_again) {
  const PoolId pool = Open("weights");
  std::byte* const part = Take(pool, 3 * kMiB);
  Fill(part, 3 * kMiB, 1);
  std::byte* lowest = part;
  for (int i = 0; i < 16 && lowest == part; ++i) lowest = std::min(lowest, MakeWindow(part).memory);
  ASSERT_LT(lowest, part) << "the copy goes through the lowest mapping, which must be a window here";
  for (int cycle = 0; cycle < 2; ++cycle) {
    ASSERT_TRUE(Pause(pool).ok());
    EXPECT_EQ(a.InUse(), 0U);
    ASSERT_TRUE(Resume(pool).ok());
    EXPECT_TRUE(Holds(part, 3 * kMiB, 1));
    EXPECT_TRUE(Holds(lowest, 3 * kMiB, 1));
  }
}

TEST_F(TagsAndNcclTest, a_window_that_is_mapped_during_a_pause_waits_for_its_end_and_is_refused) {
  const PoolId pool = Open("weights");
  std::byte* const part = Take(pool, kMiB);
  Fill(part, kMiB, 1);
  const AllocationId chunk = *a.session->nccl().Retain(AddressOf(part));
  const Address window = *a.session->nccl().Reserve(kChunk, 0, {}, 0, {});
  const auto saving = HoldAt("FinishCopies");
  ASSERT_TRUE(pools().Pause(pool, {.wait = false}).ok());
  saving->AwaitReached();
  auto mapped = test::InThread([&] { return a.session->nccl().Map(window, kChunk, 0, chunk, 0); });
  EXPECT_EQ(mapped.wait_for(kMoment), std::future_status::timeout) << "it did not wait for the pause";
  saving->Open();
  ASSERT_TRUE(pools().Wait(pool).ok());
  EXPECT_EQ(mapped.get().driver_result(), cuda::kIllegalState);
  EXPECT_EQ(a.InUse(), 0U);
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(Holds(part, kMiB, 1));
  ASSERT_TRUE(a.session->nccl().Map(window, kChunk, 0, chunk, 0).ok());
  EXPECT_EQ(a.session->CopyState().broken, "");
}

// The driver waits in an unmap for a kernel of NCCL's, and the kernel for a copy of NCCL's own, between its buffers or from a
// tensor. Once there is a tag, each copy asks which tags it touches.
TEST_F(TagsAndNcclTest, a_copy_does_not_wait_for_an_unmap_that_waits_for_a_kernel) {
  const PoolId pool = Open("weights");
  std::byte* const freed = Take(pool, kChunk);
  std::byte* const tensor = Take(pool, kMiB);
  const std::byte* const buffer = a.Place(a.Create());
  const auto unmap = HoldAt("Unmap");
  auto given = test::InThread([&] { return Give(freed); });
  unmap->AwaitReached();
  auto copied = test::InThread([&]() -> Status {
    const auto nccl = a.session->calls().EnterLaunch("cuMemcpyAsync");
    const Extent touched[] = {{AddressOf(buffer), kMiB}, {AddressOf(tensor), kMiB}};
    const InTags tags = a.session->calls().EnterTags(touched, "cuMemcpyAsync");
    return {tags.gates.size() == 1 && !tags.paused ? Code::kOk : Code::kRefused, "the gates of the tags that it touches"};
  });
  EXPECT_EQ(copied.wait_for(std::chrono::seconds(5)), std::future_status::ready) << "the job would hang for ever";
  unmap->Open();
  EXPECT_TRUE(copied.get().ok());
  EXPECT_TRUE(given.get().ok());
}

// What is not asked of the ledger is what the ledger says.
TEST_F(TagsAndNcclTest, the_places_of_tags_are_those_of_the_state) {
  const auto agree = [](const test::Process& p) {
    const State state = p.session->CopyState();
    for (const auto& [at, mapping] : state.mappings) {
      const InTags in = p.session->calls().EnterTags({at, mapping.bytes}, "a test");
      EXPECT_EQ(in.gates.size(), state.PoolsIn(at, mapping.bytes).size());
      EXPECT_EQ(in.paused, !in.gates.empty() && state.LifecycleOf(*state.PoolsIn(at, 1).begin()) != Lifecycle::kRunning);
    }
  };
  const PoolId pool = Open("weights"), other = Open("cache");
  std::byte* const part = Take(pool, kMiB);
  std::byte* const second = Take(other, kMiB);
  MakeWindow(part);
  a.Place(a.Create());
  b.Place(Pass(*a.session->nccl().Retain(AddressOf(part))), kChunk);
  const auto all_agree = [&] {
    agree(a);
    agree(b);
  };
  all_agree();
  ASSERT_TRUE(Pause(other).ok());
  all_agree();
  ASSERT_TRUE(Resume(other).ok());
  all_agree();
  EXPECT_TRUE(Give(second).ok());
  EXPECT_TRUE(a.session->calls().EnterTags({AddressOf(second), kMiB}, "a test").gates.empty());
  all_agree();
}

TEST_F(TagsAndNcclTest, memory_that_a_card_keeps_is_not_mapped_again_while_its_tag_is_paused) {
  const PoolId pool = Open("weights");
  std::byte* const part = Take(pool, kMiB);
  const AllocationId chunk = *a.session->nccl().Retain(AddressOf(part));
  const Address window = *a.session->nccl().Reserve(kChunk, 0, {}, 0, {});
  ASSERT_TRUE(a.session->records().NoteRegistration({AddressOf(part), kMiB, "ibv_reg_mr"}));
  ASSERT_TRUE(Pause(pool).ok());
  const Status mapped = a.session->nccl().Map(window, kChunk, 0, chunk, 0);
  EXPECT_EQ(mapped.driver_result(), cuda::kIllegalState) << mapped.message();
  const AccessDescriptor access{{LocationType::kDevice, kDevice.value}, 3};
  EXPECT_FALSE(a.session->nccl().SetAccess(AddressOf(part), kChunk, std::span(&access, 1)).ok());
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_EQ(a.session->CopyState().broken, "");
}

TEST_F(TagsAndNcclTest, a_window_that_is_unmapped_during_a_resume_is_gone_after_it) {
  const PoolId pool = Open("weights");
  std::byte* const part = Take(pool, kMiB);
  Fill(part, kMiB, 1);
  const Window window = MakeWindow(part);
  ASSERT_TRUE(Pause(pool).ok());
  const auto mapping = HoldAt("Map");
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  mapping->AwaitReached();
  auto unmapped = test::InThread([&] { return a.session->nccl().Unmap(AddressOf(window.memory), kChunk); });
  EXPECT_EQ(unmapped.wait_for(kMoment), std::future_status::timeout) << "it did not wait for the resume";
  mapping->Open();
  ASSERT_TRUE(pools().Wait(pool).ok());
  EXPECT_TRUE(unmapped.get().ok());
  EXPECT_EQ(a.session->CopyState().broken, "");
  EXPECT_TRUE(Holds(part, kMiB, 1));
  EXPECT_FALSE(a.simulator->MappingAt(AddressOf(window.memory)).ok());
}

TEST_F(TagsAndNcclTest, a_pause_waits_for_a_card_that_registers_its_memory_and_leaves_that_in_place) {
  const PoolId pool = Open("weights");
  std::byte* const part = Take(pool, kMiB);
  std::optional<InTags> registering = a.session->calls().EnterTags({AddressOf(part), kMiB}, "ibv_reg_mr");
  auto paused = test::InThread([&] { return Pause(pool); });
  EXPECT_EQ(paused.wait_for(kMoment), std::future_status::timeout) << "it did not wait for the registration";
  ASSERT_TRUE(a.session->records().NoteRegistration({AddressOf(part), kMiB, "ibv_reg_mr"}));
  registering.reset();
  ASSERT_TRUE(paused.get().ok());
  EXPECT_EQ(a.InUse(), kChunk) << "the card holds its pages";
  EXPECT_FALSE(a.session->calls().EnterTags({AddressOf(part), kMiB}, "cuMemcpyAsync").away) << "what stayed can be copied";
}

TEST_F(TagsAndNcclTest, a_call_that_touches_paused_memory_of_a_tag_hears_so_and_others_do_not) {
  const PoolId pool = Open("weights"), other = Open("cache");
  std::byte* const part = Take(pool, kMiB);
  std::byte* const there = Take(other, kMiB);
  ASSERT_TRUE(Pause(pool).ok());
  EXPECT_TRUE(a.session->calls().EnterTags({AddressOf(part), 1}, "cuMemcpyAsync").away);
  EXPECT_FALSE(a.session->calls().EnterTags({AddressOf(there), kMiB}, "cuMemcpyAsync").away);
  EXPECT_FALSE(a.session->calls().EnterTags({Address{1}, 1}, "cuMemcpyAsync").away);
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_FALSE(a.session->calls().EnterTags({AddressOf(part), 1}, "cuMemcpyAsync").away);
}

// The thread that allocates gives back what was freed before, and waits for its stream; meanwhile another one pauses the tag.
TEST_F(TagsAndNcclTest, memory_that_an_allocation_gives_back_is_not_taken_from_under_a_pause) {
  const PoolId pool = Open("weights");
  std::byte* const kept = Take(pool, kMiB);
  std::byte* const freed = Take(pool, 130 * kMiB);
  Fill(kept, kMiB, 1);
  Fill(freed, 130 * kMiB, 2);
  ASSERT_TRUE(a.simulator->FailNext("AwaitMoment", 1, cuda::kTimeout).ok());
  ASSERT_TRUE(Give(freed).ok()) << "it is given back later";
  const auto waiting = HoldAt("AwaitMoment");
  const auto saving = HoldAt("FinishCopies");
  auto taken = test::InThread([&] { return pools().Allocate(pool, kMiB, kDevice); });
  waiting->AwaitReached();
  ASSERT_TRUE(pools().Pause(pool, {.wait = false}).ok());
  saving->AwaitReached();
  waiting->Open();
  EXPECT_FALSE(taken.get().ok()) << "its tag is about to be paused";
  EXPECT_TRUE(a.simulator->MappingAt(AddressOf(freed)).ok()) << "it was unmapped while it was being copied";
  saving->Open();
  ASSERT_TRUE(pools().Wait(pool).ok());
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(Holds(kept, kMiB, 1));
}

// ---- everything is kept ------------------------------------------------------------------------------------------------

class EverythingIsKept : public test::PoolsTest {
 protected:
  EverythingIsKept() : shared(a.Create()), mine(a.Place(shared)), theirs(b.Place(Pass(shared))), only_a(a.Place(a.Create())) {}
  [[nodiscard]] bool IsShared() const {
    *mine = static_cast<std::byte>(++writes_);
    return *theirs == *mine;
  }
  AllocationId shared;
  std::byte *mine, *theirs, *only_a;

 private:
  mutable int writes_ = 0;
};

TEST_F(EverythingIsKept, by_all_who_share_memory_with_one_that_must_and_pauses_work) {
  const PoolId tag = Open("weights");
  Take(tag, test::kMiB);
  b.session->NoteEverythingKept("an unknown plugin");
  const Bytes held = a.InUse();
  for (int round = 0; round < 2; ++round) {
    Both(&Session::Pause);
    EXPECT_EQ(a.InUse(), held);
    EXPECT_TRUE(IsShared());
    Both(&Session::Resume);
    EXPECT_TRUE(IsShared());
  }
  EXPECT_NE(a.session->CopyState().kept_whole.find("rank 1"), std::string::npos) << a.session->CopyState().kept_whole;
  ASSERT_TRUE(pools().Pause(tag, {}).ok());
  EXPECT_EQ(a.InUse(), held) << "a tag of one that keeps everything stays as well";
  EXPECT_TRUE(pools().Resume(tag, {}).ok());
}

// A plugin may be loaded while the ranks gather, too late for the others to hear of it.
TEST_F(EverythingIsKept, and_one_that_learns_it_in_the_middle_refuses_that_pause) {
  b.session->records().Note(EverythingKept{"an unknown plugin"});
  Status of_b;
  std::thread other([&] { of_b = b.session->Pause(); });
  const Status of_a = a.session->Pause();
  other.join();
  for (const Status& status : {of_a, of_b}) {
    EXPECT_EQ(status.code(), Code::kRefused) << status.message();
    EXPECT_NE(status.message().find("an unknown plugin"), std::string::npos) << status.message();
  }
  EXPECT_TRUE(IsShared());
  b.session->NoteEverythingKept("an unknown plugin");
  Both(&Session::Pause);
  EXPECT_TRUE(IsShared());
  Both(&Session::Resume);
}

}  // namespace
}  // namespace amem
