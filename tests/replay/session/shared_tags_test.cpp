// Tags whose memory several processes share: a window of NCCL's over tensors is imported by every peer.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <string>
#include <utility>

#include "journal/base/file.h"
#include "replay/peers/token.h"
#include "tests/in_thread.h"
#include "tests/replay/session/pools_fixture.h"

namespace amem {
namespace {

using test::k2M, test::kChunk, test::kDevice, test::kMiB;

// Two processes that share memory of a's tag.
class SharersTest : public test::PoolsTest {
 protected:
  explicit SharersTest(std::string name) : tag(std::move(name)), pool(Open(tag)) {}
  Pools& of_b() const { return b.session->pools(); }
  PoolId pool_of_b() const { return *of_b().Find(tag); }

  // Both call at once.
  std::pair<Status, Status> Both(CycleKind kind) const {
    auto second = test::InThread(
        [&] { return kind == CycleKind::kPause ? of_b().Pause(pool_of_b(), {}) : of_b().Resume(pool_of_b(), {}); });
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
  SharedTagsTest() : SharersTest("weights"), part(Take(pool, kMiB)), chunk(*a.session->nccl().Retain(AddressOf(part))) {
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
    const auto handle = a.session->legacy().ExportPart(AddressOf(part) + 4096);
    EXPECT_TRUE(handle.ok()) << handle.status().message();
    const auto opened = b.session->legacy().Import(*handle, kDevice, Origin(), true);
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    return reinterpret_cast<std::byte*>(opened.ok() ? opened->value : 0);
  }

  std::byte *neighbour, *part;
};

TEST_F(TagsByIpcTest, a_handle_is_not_made_in_the_middle_of_a_pause_of_nccl) {
  a.Place(a.Create());
  const auto saving = HoldAt("FinishCopies");
  auto paused = test::InThread([&] { return a.session->Pause(); });
  saving->AwaitReached();
  auto handle = test::InThread([&] { return a.session->legacy().ExportPart(AddressOf(part)); });
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
  EXPECT_TRUE(b.session->legacy().Close(AddressOf(theirs)).ok());
  ASSERT_TRUE(Give(part).ok());
  ASSERT_TRUE(Give(neighbour).ok());
  EXPECT_EQ(a.InUse(), 0U);
  EXPECT_EQ(a.session->legacy().Close(AddressOf(theirs)).code(), Code::kNotFound);
}

TEST_F(TagsByIpcTest, its_importer_closes_while_it_is_paused_and_opens_again_after_it) {
  const std::byte* const theirs = OpenAtB();
  BothSucceed(CycleKind::kPause);
  EXPECT_TRUE(b.session->legacy().Close(AddressOf(theirs)).ok());
  const auto handle = a.session->legacy().ExportPart(AddressOf(part));
  ASSERT_TRUE(handle.ok()) << handle.status().message();
  EXPECT_EQ(b.session->legacy().Import(*handle, kDevice, Origin(), true).status().code(), Code::kRefused) << "it is paused";
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
  EXPECT_EQ(a.session->legacy().ExportPart(Address{0x1000}).status().code(), Code::kNotFound);
  EXPECT_EQ(a.session->records().PartOfTag(Address{0x1000}).status().code(), Code::kNotFound);
  EXPECT_EQ(a.session->records().PartOfTag(AddressOf(part) + 512)->address, AddressOf(part));
}

// torch.multiprocessing opens the handle of each tensor's segment, often, and closes it when the tensor has gone.
TEST_F(TagsByIpcTest, what_is_opened_again_has_one_address_and_is_closed_as_often) {
  const auto handle = [&](const std::byte* of) { return *a.session->legacy().ExportPart(AddressOf(of)); };
  const auto open = [&](const std::byte* of) { return b.session->legacy().Import(handle(of), kDevice, Origin(), true); };
  for (int round = 0; round < 50; ++round) {
    const Address first = *open(part), again = *open(part), beside = *open(neighbour);
    EXPECT_EQ(first, again) << "as the driver answers";
    EXPECT_EQ(beside.value - first.value, AddressOf(neighbour).value - AddressOf(part).value) << "one mapping for the chunk";
    EXPECT_EQ(b.session->CopyState().mappings.size(), 1U);
    EXPECT_TRUE(b.session->legacy().Close(first).ok());
    if (round % 10 == 0) {
      BothSucceed(CycleKind::kPause);
      EXPECT_EQ(a.InUse(), 0U);
      BothSucceed(CycleKind::kResume);
    }
    EXPECT_TRUE(Holds(reinterpret_cast<std::byte*>(first.value), kMiB, 1)) << "it was opened twice";
    EXPECT_TRUE(b.session->legacy().Close(again).ok());
    EXPECT_EQ(b.session->legacy().Close(again).code(), Code::kNotFound) << "it was closed twice";
    EXPECT_TRUE(Holds(reinterpret_cast<std::byte*>(beside.value), kMiB, 2));
    EXPECT_TRUE(b.session->legacy().Close(beside).ok());
    EXPECT_TRUE(b.session->CopyState().allocations.empty());
  }
  auto forged = handle(part);
  ASSERT_TRUE(open(part).ok());
  auto token = *Decode(forged);
  token.secret[3] ^= 1;
  forged = Encode(token);
  EXPECT_EQ(b.session->legacy().Import(forged, kDevice, Origin(), true).status().code(), Code::kRefused);
}

// Handles of cuMemCreate of another library, at addresses that AMem did not see reserved.
class TagsByHandleTest : public SharersTest {
 protected:
  TagsByHandleTest() : SharersTest("libone_shot"), memory(Make()), mine(Map(a, memory)) { Fill(mine, k2M, 1); }
  AllocationId Make(const test::Process& of) const {
    const auto made = of.session->nccl().Create(k2M, test::Process::On(kDevice), 0, {}, false, tag);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? *made : AllocationId{};
  }
  AllocationId Make() const { return Make(a); }
  static AccessDescriptor To(std::int32_t device) { return {{LocationType::kDevice, device}, 3}; }
  static std::byte* Map(const test::Process& at, AllocationId id) {
    const Address address = *at.simulator->Reserve(k2M, 0, {}, 0);
    const AccessDescriptor access = To(0);
    EXPECT_TRUE(at.session->nccl().Map(address, k2M, 0, id, 0).ok());
    EXPECT_TRUE(at.session->nccl().SetAccess(address, k2M, std::span(&access, 1)).ok());
    return reinterpret_cast<std::byte*>(address.value);
  }
  static void Drop(const test::Process& at, const std::byte* mapped, AllocationId id) {
    EXPECT_TRUE(at.session->nccl().Unmap(AddressOf(mapped), k2M).ok());
    EXPECT_TRUE(at.session->nccl().Release(id).ok());
    EXPECT_TRUE(at.simulator->FreeRange(AddressOf(mapped), k2M).ok());
  }
  static AllocationId Import(const test::Process& at, int descriptor) {
    const auto imported = at.session->sharing().Import(descriptor, {}, true);
    EXPECT_TRUE(imported.ok()) << imported.status().message();
    return imported.ok() ? *imported : AllocationId{};
  }
  void CycleAll(int cycles = 1) const {
    for (int cycle = 0; cycle < cycles; ++cycle) {
      BothSucceed(CycleKind::kPause);
      EXPECT_EQ(a.InUse(), 0U) << "nothing of it stays on the device";
      BothSucceed(CycleKind::kResume);
    }
  }

  const AllocationId memory;
  std::byte* const mine;
};

TEST_F(TagsByHandleTest, a_handle_is_shared_by_a_descriptor_and_paused_together) {
  UniqueFd descriptor = *a.session->sharing().Export(memory);
  const AllocationId there = Import(b, descriptor.get());
  std::byte* const theirs = Map(b, there);
  for (int cycle = 0; cycle < 20; ++cycle) {
    CycleAll();
    ASSERT_TRUE(Holds(mine, k2M, 1));
    ASSERT_TRUE(Holds(theirs, k2M, 1));
    theirs[cycle] = ~theirs[cycle];
    EXPECT_EQ(mine[cycle], theirs[cycle]);
    mine[cycle] = ~mine[cycle];
  }
  descriptor.Reset();
  Drop(b, theirs, there);
  Drop(a, mine, memory);
  EXPECT_EQ(a.InUse(), 0U);
  for (const test::Process* process : {&a, &b}) {
    EXPECT_TRUE(process->session->CopyState().allocations.empty());
    EXPECT_TRUE(process->session->CopyState().ranges.empty());
  }
}

TEST_F(TagsByHandleTest, contents_that_nobody_shares_are_saved_too) {
  Fill(mine, k2M, 1);
  const AllocationId bare = Make();
  std::byte* const mapped = Map(a, bare);
  Fill(mapped, k2M, 2);
  ASSERT_TRUE(a.session->nccl().Unmap(AddressOf(mapped), k2M).ok());
  ASSERT_TRUE(Pause(pool).ok());
  EXPECT_EQ(a.InUse(), 0U);
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(Holds(mine, k2M, 1));
  EXPECT_TRUE(Holds(Map(a, bare), k2M, 2));
}

TEST_F(TagsByHandleTest, a_descriptor_holds_the_memory_after_its_exporter_has_let_go) {
  UniqueFd descriptor = *a.session->sharing().Export(memory), second = *a.session->sharing().Export(memory);
  Drop(a, mine, memory);
  EXPECT_EQ(a.InUse(), k2M) << "two descriptors are open";
  ASSERT_TRUE(Pause(pool).ok());
  EXPECT_EQ(a.InUse(), 0U);
  ASSERT_TRUE(Resume(pool).ok());
  const AllocationId there = Import(b, descriptor.get());
  descriptor.Reset();
  std::byte* const theirs = Map(b, there);
  EXPECT_TRUE(Holds(theirs, k2M, 1));
  CycleAll();
  EXPECT_TRUE(Holds(theirs, k2M, 1));
  Drop(b, theirs, there);
  EXPECT_EQ(a.InUse(), k2M) << "a descriptor is open";
  UniqueFd copy(::dup(second.get()));
  second.Reset();
  EXPECT_TRUE(a.session->nccl().Release(Make()).ok());
  EXPECT_EQ(a.InUse(), k2M) << "a copy of it is";
  EXPECT_TRUE(b.session->nccl().Release(Import(b, copy.get())).ok());
  copy.Reset();
  EXPECT_TRUE(a.session->nccl().Release(Make()).ok());
  EXPECT_EQ(a.InUse(), 0U);
}

TEST_F(TagsByHandleTest, memory_goes_with_its_last_descriptor) {
  for (const bool by_peer : {false, true}) {
    const AllocationId one = Make();
    UniqueFd descriptor = *a.session->sharing().Export(one);
    const AllocationId there = by_peer ? Import(b, descriptor.get()) : AllocationId{};
    EXPECT_TRUE(a.session->nccl().Release(one).ok());
    descriptor.Reset();
    EXPECT_EQ(a.InUse(), 2 * k2M);
    EXPECT_TRUE(by_peer ? b.session->nccl().Release(there).ok() : a.session->nccl().Release(Make()).ok());
    EXPECT_EQ(a.InUse(), k2M) << "what nobody has is gone with the next call";
  }
}

// How many memfds of tokens this process has, of AMem's and of those that it was given.
std::size_t TokensOpen() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    if (LinkOf(entry.path()).starts_with("/memfd:amem-token")) ++count;
  return count;
}

// A library with thousands of allocations passes each on and closes the descriptor.
TEST_F(TagsByHandleTest, descriptors_that_were_closed_take_none_of_the_programs) {
  constexpr std::size_t kMany = 200;
  std::vector<AllocationId> all;
  for (std::size_t i = 0; i < kMany; ++i) {
    all.push_back(Make());
    ASSERT_TRUE(a.session->sharing().Export(all.back()).ok());
  }
  EXPECT_LE(TokensOpen(), 64U);
  UniqueFd again = *a.session->sharing().Export(all.front());
  const AllocationId there = Import(b, again.get());
  for (const AllocationId one : all) EXPECT_TRUE(a.session->nccl().Release(one).ok());
  EXPECT_EQ(a.InUse(), 2 * k2M) << "what has a descriptor and an importer, and the fixture's";
  EXPECT_TRUE(b.session->nccl().Release(there).ok());
  again.Reset();
  EXPECT_TRUE(a.session->nccl().Release(Make()).ok());
  EXPECT_EQ(a.InUse(), k2M);
}

TEST_F(TagsByHandleTest, where_too_many_descriptors_are_open_memory_is_held_for_ever) {
  constexpr std::size_t kMost = 64, kMore = 6;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{4 * kMost, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<AllocationId> all;
  std::vector<UniqueFd> descriptors;
  for (std::size_t i = 0; i < kMost + kMore; ++i) {
    all.push_back(Make());
    auto made = a.session->sharing().Export(all.back());
    if (made.ok()) descriptors.push_back(*std::move(made));
  }
  const std::size_t open = TokensOpen() - descriptors.size();
  UniqueFd second = *a.session->sharing().Export(all.back());
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(descriptors.size(), kMost + kMore);
  EXPECT_EQ(open, kMost);
  EXPECT_EQ(a.Count<PassedThrough>(), 1U) << "said once";
  for (const AllocationId one : all) EXPECT_TRUE(a.session->nccl().Release(one).ok());
  EXPECT_FALSE(a.session->nccl().Release(all.back()).ok()) << "it was released";
  EXPECT_TRUE(b.session->nccl().Release(Import(b, second.get())).ok()) << "and can be imported";
  second.Reset();
  descriptors.clear();
  EXPECT_TRUE(a.session->nccl().Release(Make()).ok());
  EXPECT_EQ(a.InUse(), (1 + kMore) * k2M);
}

TEST_F(TagsByHandleTest, a_descriptor_is_imported_twice_by_its_exporter_and_passed_on_by_its_importer) {
  const UniqueFd descriptor = *a.session->sharing().Export(memory);
  const AllocationId first = Import(b, descriptor.get()), second = Import(b, descriptor.get()),
                     own = Import(a, descriptor.get());
  const UniqueFd passed_on = *b.session->sharing().Export(first);
  const AllocationId back = Import(a, passed_on.get());
  std::byte* const views[] = {Map(b, first), Map(b, second), Map(a, own), Map(a, back)};
  CycleAll(3);
  mine[9] = std::byte{77};
  for (const std::byte* const view : views) EXPECT_EQ(view[9], std::byte{77});
  Drop(a, mine, memory);
  CycleAll();
  for (const std::byte* const view : views) EXPECT_EQ(view[9], std::byte{77});
}

TEST_F(TagsByHandleTest, several_handles_lie_in_one_range_and_several_devices_reach_them) {
  const AllocationId one = Make(), other = Make();
  const Address range = *a.simulator->Reserve(4 * k2M, 0, {}, 0), third = range + 2 * k2M;
  const DriverHandle drivers = *a.simulator->Create(k2M, test::Process::On(kDevice), 0);
  ASSERT_TRUE(a.session->nccl().Map(range, k2M, 0, one, 0).ok());
  ASSERT_TRUE(a.session->nccl().Map(range + k2M, k2M, 0, other, 0).ok());
  ASSERT_TRUE(a.simulator->Map(third, k2M, 0, drivers, 0).ok());
  const AccessDescriptor both[] = {To(0), To(1)};
  ASSERT_TRUE(a.session->nccl().SetAccess(range, 3 * k2M, both).ok()) << "the last is the driver's";
  auto* const bytes = reinterpret_cast<std::byte*>(range.value);
  Fill(bytes, 3 * k2M, 5);
  ASSERT_TRUE(Pause(pool).ok());
  EXPECT_EQ(a.InUse(), k2M) << "the driver's";
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(Holds(bytes, 3 * k2M, 5));
  for (const Address at : {range, range + k2M}) EXPECT_EQ(a.simulator->MappingAt(at)->access.size(), 2U);
  EXPECT_EQ(a.session->records().HandlesOfTags(range, 4 * k2M), 2 * k2M);
  ASSERT_TRUE(a.session->nccl().Unmap(range, k2M).ok());
  EXPECT_EQ(a.session->records().HandlesOfTags(range, 4 * k2M), k2M);
  ASSERT_TRUE(Pause(pool).ok());
  ASSERT_TRUE(a.session->nccl().Unmap(range + k2M, k2M).ok()) << "while it is paused";
  ASSERT_TRUE(a.session->nccl().Release(other).ok());
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_EQ(a.InUse(), 3 * k2M) << "`memory`, `one` and the driver's";
}

TEST_F(TagsByHandleTest, a_pause_of_nccl_keeps_nobody_from_anything) {
  a.Place(a.Create());
  b.Place(b.Create());
  TwoProcesses::Both(&Session::Pause);
  const AllocationId more = Make();
  std::byte* const mapped = Map(a, more);
  const UniqueFd descriptor = *a.session->sharing().Export(more);
  const AllocationId there = Import(b, descriptor.get());
  std::byte* const theirs = Map(b, there);
  mapped[3] = std::byte{3};
  EXPECT_EQ(theirs[3], std::byte{3});
  Drop(b, theirs, there);
  Drop(a, mapped, more);
  TwoProcesses::Both(&Session::Resume);
}

TEST_F(TagsByHandleTest, a_paused_tag_takes_nothing_new_and_gives_all_back) {
  const AllocationId bare = Make();
  const UniqueFd descriptor = *a.session->sharing().Export(memory);
  ASSERT_TRUE(Pause(pool).ok());
  EXPECT_EQ(a.session->nccl().Create(k2M, test::Process::On(kDevice), 0, {}, false, tag).status().code(), Code::kRefused);
  EXPECT_EQ(a.session->nccl().Map(*a.simulator->Reserve(k2M, 0, {}, 0), k2M, 0, bare, 0).code(), Code::kRefused);
  EXPECT_EQ(b.session->sharing().Import(descriptor.get(), {}, true).status().code(), Code::kRefused);
  Drop(a, mine, memory);
  EXPECT_TRUE(a.session->nccl().Release(bare).ok());
  ASSERT_TRUE(Resume(pool).ok());
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
  std::byte* const second_theirs = b.Place(Pass(*a.session->nccl().Retain(AddressOf(second))), kChunk);
  const PoolId cache_of_b = *of_b().Find("cache");
  a.Place(a.Create());
  std::byte* const nccl = a.Place(a.Create());
  std::memset(nccl, 3, 4096);
  for (int cycle = 0; cycle < 3; ++cycle) {
    for (const CycleKind kind : {CycleKind::kPause, CycleKind::kResume}) {
      const auto other_tag = [&](Pools& of, PoolId id) {
        return test::InThread([&of, id, kind] { return kind == CycleKind::kPause ? of.Pause(id, {}) : of.Resume(id, {}); });
      };
      auto mine = other_tag(pools(), cache), its = other_tag(of_b(), cache_of_b);
      auto of_nccl =
          test::InThread([&] { TwoProcesses::Both(kind == CycleKind::kPause ? &Session::Pause : &Session::Resume); });
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
  auto token = a.session->sharing().Export(chunk);
  ASSERT_TRUE(token.ok());
  const AllocationId own_of_b = *b.session->nccl().Retain(*of_b().Allocate(pool_of_b(), kMiB, kDevice));
  auto token_of_b = b.session->sharing().Export(own_of_b);
  BothSucceed(CycleKind::kPause);
  const auto at_its_owner = b.session->sharing().Import(token->get(), {});
  EXPECT_EQ(at_its_owner.status().driver_result(), cuda::kIllegalState);
  EXPECT_NE(at_its_owner.status().message().find("call amem_resume of tag weights there"), std::string::npos)
      << at_its_owner.status().message();
  BothSucceed(CycleKind::kResume);
  EXPECT_TRUE(b.session->sharing().Import(token->get(), {}).ok());
  EXPECT_TRUE(a.session->sharing().Import(token_of_b->get(), {}).ok());
}

TEST_F(SharedTagsTest, the_program_says_later_what_a_tag_that_came_with_a_peers_memory_is) {
  EXPECT_TRUE(of_b().Open("weights", PoolPolicy::kDiscard).ok());
  EXPECT_FALSE(of_b().Open("weights", PoolPolicy::kPreserve).ok());
  ASSERT_TRUE(of_b().Allocate(pool_of_b(), kMiB, kDevice).ok());
  BothSucceed(CycleKind::kPause);
  BothSucceed(CycleKind::kResume);
  SeeEachOther();
}

TEST_F(SharedTagsTest, what_the_program_has_said_of_such_a_tag_stays) {
  ASSERT_TRUE(of_b().Open("weights", PoolPolicy::kPreserve).ok()) << "as it came";
  ASSERT_TRUE(of_b().Allocate(pool_of_b(), kMiB, kDevice).ok());
  EXPECT_EQ(of_b().Open("weights", PoolPolicy::kDiscard).status().code(), Code::kInvalid);
  EXPECT_TRUE(b.session->CopyState().broken.empty()) << b.session->CopyState().broken;
  BothSucceed(CycleKind::kPause);
  BothSucceed(CycleKind::kResume);
  SeeEachOther();
}

TEST_F(SharedTagsTest, a_librarys_memory_is_saved_whatever_the_program_says_of_its_tag_later) {
  const auto made = a.session->nccl().Create(k2M, test::Process::On(kDevice), 0, {}, false, "library");
  ASSERT_TRUE(made.ok()) << made.status().message();
  const AccessDescriptor access{{LocationType::kDevice, kDevice.value}, 3};
  const Address at = *a.session->nccl().Reserve(k2M, 0, {}, 0, {});
  ASSERT_TRUE(a.session->nccl().Map(at, k2M, 0, *made, 0).ok());
  ASSERT_TRUE(a.session->nccl().SetAccess(at, k2M, std::span(&access, 1)).ok());
  std::byte* const memory = reinterpret_cast<std::byte*>(at.value);
  Fill(memory, k2M, 3);
  const auto opened = pools().Open("library", PoolPolicy::kDiscard);
  EXPECT_NE(opened.status().message().find("tag library holds memory"), std::string::npos) << opened.status().message();
  const PoolId library = *pools().Find("library");
  ASSERT_TRUE(Pause(library).ok());
  EXPECT_FALSE(a.session->CopyState().allocations.at(*made).resident);
  ASSERT_TRUE(Resume(library).ok());
  EXPECT_TRUE(Holds(memory, k2M, 3));
  EXPECT_TRUE(pools().Open("library", PoolPolicy::kPreserve).ok());
  // Once its memory is gone, the program may choose; but it has chosen now.
  EXPECT_TRUE(a.session->nccl().Unmap(at, k2M).ok());
  EXPECT_TRUE(a.session->nccl().Release(*made).ok());
  EXPECT_EQ(pools().Open("library", PoolPolicy::kDiscard).status().code(), Code::kInvalid);
}

TEST_F(SharedTagsTest, a_tag_that_came_with_a_peers_memory_has_the_peers_policy) {
  const PoolId cache = Open("cache", PoolPolicy::kDiscard);
  b.Place(Pass(*a.session->nccl().Retain(AddressOf(Take(cache, kMiB)))), kChunk);
  EXPECT_EQ(b.session->CopyState().pools.at(*of_b().Find("cache")).policy, PoolPolicy::kDiscard);
  EXPECT_EQ(b.session->CopyState().pools.at(pool_of_b()).policy, PoolPolicy::kPreserve);
}

TEST_F(SharedTagsTest, what_its_owner_has_freed_keeps_its_contents_for_those_who_hold_it) {
  ASSERT_TRUE(a.session->nccl().Release(chunk).ok());
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

TEST_F(SharedTagsTest, what_was_imported_of_such_an_owner_can_be_mapped_after_that) {
  const Address more = *pools().Allocate(pool, 3 * kChunk, kDevice);
  auto token = a.session->sharing().Export(*a.session->nccl().Retain(more));
  const AllocationId imported = *b.session->sharing().Import(token->get(), {});
  const Bytes bytes = b.session->CopyState().allocations.at(imported).bytes;
  BothSucceed(CycleKind::kPause);
  network.Kill(SessionId{1});
  ASSERT_TRUE(of_b().Resume(pool_of_b(), {}).ok());
  std::byte* const mapped = b.Place(imported, bytes);
  mapped[bytes - 1] = std::byte{7};
  b.Free(mapped, imported, bytes);
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
  auto led = test::InThread([&] { return pools().WaitOn(pool, nullptr); });
  EXPECT_EQ(led.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  ASSERT_TRUE(of_b().Resume(pool_of_b(), {}).ok());
  EXPECT_TRUE(led.get().ok());
  SeeEachOther();
}

TEST(SharedTags, a_process_that_does_not_come_is_named_and_nothing_has_changed) {
  const auto world = *SimulatorWorld::InMemory(1, 512 * kMiB);
  LocalNetwork network;
  SessionOptions options;
  options.deadlines = Deadlines(std::chrono::milliseconds(300));
  const test::Process a(1, world, network, options), b(2, world, network, options);
  const PoolId pool = *a.session->pools().Open("weights", PoolPolicy::kPreserve);
  const Address part = *a.session->pools().Allocate(pool, kMiB, kDevice);
  auto token = a.session->sharing().Export(*a.session->nccl().Retain(part));
  std::byte* const theirs = b.Place(*b.session->sharing().Import(token->get(), {}), kChunk);
  theirs[3] = std::byte{4};
  const Status paused = a.session->pools().Pause(pool, {});
  EXPECT_EQ(paused.code(), Code::kTimeout);
  EXPECT_EQ(paused.message().find("pause of tag weights: "), 0U) << paused.message();
  EXPECT_NE(paused.message().find(" ms for rank 1"), std::string::npos) << paused.message();
  EXPECT_EQ(a.InUse(), kChunk);
  EXPECT_EQ(reinterpret_cast<std::byte*>(part.value)[3], std::byte{4});
  ASSERT_EQ(a.Count<CycleFailed>(), 1U);
  a.JournalFolds();
}

}  // namespace
}  // namespace amem
