// Tags whose memory several processes share: a window of NCCL's over tensors is imported by every peer.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <utility>

#include "tests/replay/session/pools_fixture.h"

namespace amem {
namespace {

using test::kChunk, test::kDevice, test::kMiB;

// Two processes that share memory of a's tag.
class SharersTest : public test::PoolsTest {
 protected:
  explicit SharersTest(std::string name) : tag(std::move(name)), pool(Open(tag)) {}
  Pools& of_b() const { return b.session->pools(); }
  PoolId pool_of_b() const { return *of_b().Find(tag); }

  // Both call at once.
  std::pair<Status, Status> Both(CycleKind kind) const {
    auto second = std::async(std::launch::async, [&] {
      return kind == CycleKind::kPause ? of_b().Pause(pool_of_b(), {}) : of_b().Resume(pool_of_b(), {});
    });
    Status first = kind == CycleKind::kPause ? Pause(pool) : Resume(pool);
    return {std::move(first), second.get()};
  }
  void BothSucceed(CycleKind kind) const {
    const auto [first, second] = Both(kind);
    EXPECT_TRUE(first.ok()) << first.message();
    EXPECT_TRUE(second.ok()) << second.message();
  }

  const std::string tag;
  const PoolId pool;
};

class SharedTagsTest : public SharersTest {
 protected:
  // a's tensor under tag weights, which b has imported and mapped, as NCCL does for a window.
  SharedTagsTest() : SharersTest("weights"), part(Take(pool, kMiB)), chunk(*a.session->Retain(AddressOf(part))) {
    Fill(part, kMiB, 1);
    theirs = b.Place(Pass(chunk), kChunk);
  }
  // Each sees what the other writes.
  void SeeEachOther() const {
    EXPECT_TRUE(Holds(part, kMiB, 1));
    EXPECT_TRUE(Holds(theirs, kMiB, 1));
    theirs[7] = ~theirs[7];
    EXPECT_EQ(part[7], theirs[7]);
    part[7] = ~part[7];
    EXPECT_TRUE(Holds(theirs, kMiB, 1));
  }

  std::byte* part;
  AllocationId chunk;
  std::byte* theirs = nullptr;
};

TEST_F(SharedTagsTest, what_another_process_has_imported_leaves_and_comes_back_with_its_tag) {
  for (int cycle = 0; cycle < 3; ++cycle) {
    BothSucceed(CycleKind::kPause);
    EXPECT_EQ(a.InUse(), 0U) << "the chunk stayed";
    BothSucceed(CycleKind::kResume);
    SeeEachOther();
  }
  EXPECT_EQ(a.Count<VoteCast>(), b.Count<VoteCast>());
  EXPECT_GT(a.Count<VoteCast>(), 0U);
}

// As a library that shares what it has of cudaMalloc by cudaIpc.
class TagsByIpcTest : public SharersTest {
 protected:
  TagsByIpcTest() : SharersTest("libone_shot"), neighbour(Take(pool, kMiB)), part(Take(pool, kMiB)) {
    Fill(neighbour, kMiB, 2);
    Fill(part, kMiB, 1);
  }
  std::byte* OpenAtB() const {
    const auto handle = a.session->ExportPart(AddressOf(part) + 4096);
    EXPECT_TRUE(handle.ok()) << handle.status().message();
    const auto opened = b.session->LegacyImport(*handle, kDevice, Origin(), true);
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    return reinterpret_cast<std::byte*>(opened.ok() ? opened->value : 0);
  }

  std::byte *neighbour, *part;
};

TEST_F(TagsByIpcTest, a_handle_is_not_made_in_the_middle_of_a_pause_of_nccl) {
  a.Place(a.Create());
  const auto saving = HoldAt("FinishCopies");
  auto paused = std::async(std::launch::async, [&] { return a.session->Pause(); });
  saving->AwaitReached();
  auto handle = std::async(std::launch::async, [&] { return a.session->ExportPart(AddressOf(part)); });
  EXPECT_EQ(handle.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout) << "as any other call waits";
  saving->Open();
  EXPECT_TRUE(paused.get().ok());
  EXPECT_TRUE(handle.get().ok());
  EXPECT_TRUE(a.session->Resume().ok());
}

TEST_F(TagsByIpcTest, a_part_is_shared_by_a_token_and_paused_together) {
  std::byte* const theirs = OpenAtB();
  ASSERT_NE(theirs, nullptr);
  for (int cycle = 0; cycle < 20; ++cycle) {
    BothSucceed(CycleKind::kPause);
    EXPECT_EQ(a.InUse(), 0U) << "nothing of it stays on the device";
    BothSucceed(CycleKind::kResume);
    ASSERT_TRUE(Holds(part, kMiB, 1));
    ASSERT_TRUE(Holds(theirs, kMiB, 1)) << "the handle of an address within it opens the whole part";
    ASSERT_TRUE(Holds(neighbour, kMiB, 2));
    theirs[cycle] = ~theirs[cycle];
    EXPECT_EQ(part[cycle], theirs[cycle]);
    part[cycle] = ~part[cycle];
  }
  EXPECT_TRUE(b.session->LegacyClose(AddressOf(theirs)).ok());
  ASSERT_TRUE(Give(part).ok());
  ASSERT_TRUE(Give(neighbour).ok());
  EXPECT_EQ(a.InUse(), 0U);
  EXPECT_EQ(a.session->LegacyClose(AddressOf(theirs)).code(), Code::kNotFound);
}

TEST_F(TagsByIpcTest, its_importer_closes_while_it_is_paused_and_opens_again_after_it) {
  const std::byte* const theirs = OpenAtB();
  BothSucceed(CycleKind::kPause);
  EXPECT_TRUE(b.session->LegacyClose(AddressOf(theirs)).ok());
  const auto handle = a.session->ExportPart(AddressOf(part));
  ASSERT_TRUE(handle.ok()) << handle.status().message();
  EXPECT_EQ(b.session->LegacyImport(*handle, kDevice, Origin(), true).status().code(), Code::kRefused) << "it is paused";
  BothSucceed(CycleKind::kResume);
  EXPECT_TRUE(Holds(OpenAtB(), kMiB, 1));
}

TEST_F(TagsByIpcTest, a_pause_of_NCCL_keeps_nobody_from_opening) {
  a.Place(a.Create());
  b.Place(b.Create());
  ASSERT_TRUE(b.session->Pause().ok());
  EXPECT_TRUE(Holds(OpenAtB(), kMiB, 1));
  ASSERT_TRUE(b.session->Resume().ok());
}

TEST_F(TagsByIpcTest, memory_of_no_tag_has_no_such_handle) {
  EXPECT_EQ(a.session->ExportPart(Address{0x1000}).status().code(), Code::kNotFound);
  EXPECT_EQ(a.session->PartOfTag(Address{0x1000}).status().code(), Code::kNotFound);
  EXPECT_EQ(a.session->PartOfTag(AddressOf(part) + 512)->address, AddressOf(part));
}

TEST_F(SharedTagsTest, a_tag_that_nobody_shares_asks_nobody) {
  const PoolId cache = Open("cache");
  Take(cache, kMiB);
  ASSERT_TRUE(Pause(cache).ok());
  ASSERT_TRUE(Resume(cache).ok());
  EXPECT_EQ(a.Count<VoteCast>(), 0U);
}

TEST_F(SharedTagsTest, pauses_of_NCCL_and_of_other_tags_leave_it) {
  TwoProcesses::Both(&Session::Pause);
  SeeEachOther();
  const PoolId cache = Open("cache");
  Take(cache, kMiB);
  ASSERT_TRUE(Pause(cache).ok());
  SeeEachOther();
  BothSucceed(CycleKind::kPause);
  TwoProcesses::Both(&Session::Resume);
  BothSucceed(CycleKind::kResume);
  SeeEachOther();
}

TEST_F(SharedTagsTest, rounds_of_two_tags_and_of_NCCL_are_under_way_beside_each_other) {
  const PoolId cache = Open("cache");
  std::byte* const second = Take(cache, kMiB);
  std::byte* const second_theirs = b.Place(Pass(*a.session->Retain(AddressOf(second))), kChunk);
  const PoolId cache_of_b = *of_b().Find("cache");
  a.Place(a.Create());
  std::byte* const nccl = a.Place(a.Create());
  std::memset(nccl, 3, 4096);
  for (int cycle = 0; cycle < 3; ++cycle) {
    for (const CycleKind kind : {CycleKind::kPause, CycleKind::kResume}) {
      const auto other_tag = [&](Pools& of, PoolId id) {
        return std::async(std::launch::async,
                          [&of, id, kind] { return kind == CycleKind::kPause ? of.Pause(id, {}) : of.Resume(id, {}); });
      };
      auto mine = other_tag(pools(), cache), its = other_tag(of_b(), cache_of_b);
      auto of_nccl = std::async(std::launch::async,
                                [&] { TwoProcesses::Both(kind == CycleKind::kPause ? &Session::Pause : &Session::Resume); });
      BothSucceed(kind);
      of_nccl.get();
      EXPECT_TRUE(mine.get().ok());
      EXPECT_TRUE(its.get().ok());
    }
    SeeEachOther();
    second[5] = std::byte{9};
    EXPECT_EQ(second_theirs[5], std::byte{9});
    EXPECT_EQ(nccl[4095], std::byte{3});
  }
}

TEST_F(SharedTagsTest, a_failure_of_one_undoes_the_pause_of_both) {
  ASSERT_TRUE(b.simulator->FailNext("Unmap", 1, cuda::kUnknown).ok());
  const auto [first, second] = Both(CycleKind::kPause);
  EXPECT_FALSE(first.ok());
  EXPECT_FALSE(second.ok());
  EXPECT_NE(first.message().find("pause of tag weights: rank 1"), std::string::npos) << first.message();
  EXPECT_NE(first.message().find("runs on as before"), std::string::npos) << first.message();
  EXPECT_EQ(StateOf(pool), "resident");
  SeeEachOther();
  BothSucceed(CycleKind::kPause);
  BothSucceed(CycleKind::kResume);
  SeeEachOther();
}

TEST_F(SharedTagsTest, a_failure_of_one_leaves_both_paused_with_contents_kept) {
  BothSucceed(CycleKind::kPause);
  ASSERT_TRUE(b.simulator->FailNext("Import", 1, cuda::kUnknown).ok());
  const auto [first, second] = Both(CycleKind::kResume);
  EXPECT_FALSE(first.ok());
  EXPECT_FALSE(second.ok());
  EXPECT_EQ(StateOf(pool), "paused");
  EXPECT_EQ(a.InUse(), 0U);
  BothSucceed(CycleKind::kResume);
  SeeEachOther();
}

TEST_F(SharedTagsTest, nobody_imports_memory_of_a_tag_that_is_paused_on_either_side) {
  auto token = a.session->Export(chunk);
  ASSERT_TRUE(token.ok());
  const AllocationId own_of_b = *b.session->Retain(*of_b().Allocate(pool_of_b(), kMiB, kDevice));
  auto token_of_b = b.session->Export(own_of_b);
  BothSucceed(CycleKind::kPause);
  const auto at_its_owner = b.session->Import(token->get(), {});
  EXPECT_EQ(at_its_owner.status().driver_result(), cuda::kIllegalState);
  EXPECT_NE(at_its_owner.status().message().find("call amem_resume of tag weights there"), std::string::npos)
      << at_its_owner.status().message();
  BothSucceed(CycleKind::kResume);
  EXPECT_TRUE(b.session->Import(token->get(), {}).ok());
  EXPECT_TRUE(a.session->Import(token_of_b->get(), {}).ok());
}

TEST_F(SharedTagsTest, the_program_says_later_what_a_tag_that_came_with_a_peers_memory_is) {
  EXPECT_TRUE(of_b().Open("weights", PoolPolicy::kDiscard).ok());
  EXPECT_FALSE(of_b().Open("weights", PoolPolicy::kPreserve).ok());
  ASSERT_TRUE(of_b().Allocate(pool_of_b(), kMiB, kDevice).ok());
  BothSucceed(CycleKind::kPause);
  BothSucceed(CycleKind::kResume);
  SeeEachOther();
}

TEST_F(SharedTagsTest, a_tag_that_came_with_a_peers_memory_has_the_peers_policy) {
  const PoolId cache = Open("cache", PoolPolicy::kDiscard);
  b.Place(Pass(*a.session->Retain(AddressOf(Take(cache, kMiB)))), kChunk);
  EXPECT_EQ(b.session->CopyState().pools.at(*of_b().Find("cache")).policy, PoolPolicy::kDiscard);
  EXPECT_EQ(b.session->CopyState().pools.at(pool_of_b()).policy, PoolPolicy::kPreserve);
}

TEST_F(SharedTagsTest, what_its_owner_has_freed_keeps_its_contents_for_those_who_hold_it) {
  ASSERT_TRUE(a.session->Release(chunk).ok());
  ASSERT_TRUE(Give(part).ok());
  EXPECT_TRUE(Holds(theirs, kMiB, 1));
  BothSucceed(CycleKind::kPause);
  EXPECT_EQ(a.InUse(), 0U);
  BothSucceed(CycleKind::kResume);
  EXPECT_TRUE(Holds(theirs, kMiB, 1));
}

TEST_F(SharedTagsTest, memory_of_an_owner_that_died_while_paused_is_replaced_by_zeros) {
  BothSucceed(CycleKind::kPause);
  network.Kill(SessionId{1});
  EXPECT_TRUE(of_b().Resume(pool_of_b(), {}).ok());
  EXPECT_EQ(theirs[0], std::byte{0});
  EXPECT_EQ(theirs[kChunk - 1], std::byte{0});
}

TEST_F(SharedTagsTest, once_the_import_is_gone_the_owner_pauses_alone) {
  const AllocationId imported = b.session->CopyState().mappings.at(AddressOf(theirs)).allocation;
  b.Free(theirs, imported, kChunk);
  ASSERT_TRUE(Pause(pool).ok());
  EXPECT_EQ(a.Count<VoteCast>(), 0U);
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(Holds(part, kMiB, 1));
}

TEST_F(SharedTagsTest, a_stream_waits_for_the_whole_resume_because_others_bring_part_of_it) {
  BothSucceed(CycleKind::kPause);
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  auto led = std::async(std::launch::async, [&] { return pools().WaitOn(pool, nullptr); });
  EXPECT_EQ(led.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  ASSERT_TRUE(of_b().Resume(pool_of_b(), {}).ok());
  EXPECT_TRUE(led.get().ok());
  SeeEachOther();
}

TEST(SharedTags, a_process_that_does_not_come_is_named_and_nothing_has_changed) {
  const auto world = *SimulatorWorld::InMemory(1, 512 * kMiB);
  LocalNetwork network(300);
  const test::Process a(1, world, network, {}), b(2, world, network, {});
  const PoolId pool = *a.session->pools().Open("weights", PoolPolicy::kPreserve);
  const Address part = *a.session->pools().Allocate(pool, kMiB, kDevice);
  auto token = a.session->Export(*a.session->Retain(part));
  std::byte* const theirs = b.Place(*b.session->Import(token->get(), {}), kChunk);
  theirs[3] = std::byte{4};
  const Status paused = a.session->pools().Pause(pool, {});
  EXPECT_EQ(paused.code(), Code::kTimeout);
  EXPECT_NE(paused.message().find("pause of tag weights: waited 300 ms for rank 1"), std::string::npos) << paused.message();
  EXPECT_EQ(a.InUse(), kChunk);
  EXPECT_EQ(reinterpret_cast<std::byte*>(part.value)[3], std::byte{4});
  ASSERT_EQ(a.Count<CycleFailed>(), 1U);
  a.JournalFolds();
}

}  // namespace
}  // namespace amem
