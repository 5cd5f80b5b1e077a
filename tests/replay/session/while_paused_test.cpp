// What goes on while NCCL is paused: the program uses its own memory, anything can be freed, and what is only counted changes.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "tests/in_thread.h"
#include "tests/replay/session/session_process.h"

namespace amem {
namespace {

using test::k2M, test::kDevice, test::kMiB, test::Process;

Address AddressOf(const std::byte* memory) { return Address{reinterpret_cast<std::uint64_t>(memory)}; }

SessionOptions Options(Layout layout, UserMemory user_memory = UserMemory::kKeep) {
  SessionOptions options;
  options.layout = layout;
  options.slab_bytes = 32 * kMiB;
  options.user_memory = user_memory;
  return options;
}

// As ncclMemFree does it, and NCCL with each buffer of a communicator that is destroyed.
void FreeAsNccl(const Process& p, const std::byte* memory, Bytes bytes = k2M) {
  const Address address = AddressOf(memory);
  const auto id = p.session->nccl().Retain(address);
  ASSERT_TRUE(id.ok()) << id.status().message();
  EXPECT_TRUE(p.session->nccl().Release(*id).ok());
  EXPECT_EQ(p.session->nccl().AddressRange(address)->second, bytes);
  for (const Status& status :
       {p.session->nccl().Unmap(address, bytes), p.session->nccl().Release(*id), p.session->nccl().FreeRange(address, bytes)}) {
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

// ---- memory of the program ---------------------------------------------------------------------------------------------

class UserMemoryTest : public test::TwoProcesses, public ::testing::WithParamInterface<UserMemory> {
 protected:
  UserMemoryTest() : TwoProcesses(Options(Layout::kSlab, GetParam()), 256 * kMiB) {}
  [[nodiscard]] static bool kept() { return GetParam() == UserMemory::kKeep; }
};

TEST_P(UserMemoryTest, is_there_for_the_program_while_nccl_is_paused_or_comes_back_as_it_was) {
  const AllocationId tensor = a.Create(k2M, true);
  std::byte* mine = a.Place(tensor);
  std::byte* theirs = b.Place(Pass(tensor));
  std::byte* nccl = a.Place(a.Create());
  std::memset(nccl, 0x44, k2M);
  for (int cycle = 0; cycle < 3; ++cycle) {
    for (Bytes i = 0; i < k2M; ++i) mine[i] = static_cast<std::byte>(i * 31 >> cycle);
    std::vector<std::byte> expected(mine, mine + k2M);
    Both(&Session::Pause);
    EXPECT_EQ(a.InUse(), kept() ? k2M : 0U);
    EXPECT_EQ(a.session->calls().TouchesPaused(AddressOf(mine), k2M), !kept());
    if (kept()) {
      mine[7] = expected[7] = std::byte{42};
      EXPECT_EQ(theirs[7], std::byte{42}) << "the importer sees what the owner writes";
      theirs[8] = expected[8] = std::byte{43};
    }
    Both(&Session::Resume);
    EXPECT_EQ(std::memcmp(mine, expected.data(), k2M), 0);
    EXPECT_EQ(std::memcmp(theirs, expected.data(), k2M), 0);
    EXPECT_EQ(nccl[k2M - 1], std::byte{0x44});
  }
}

TEST_P(UserMemoryTest, has_figures_of_its_own) {
  a.Place(a.Create(k2M, true));
  a.Place(a.Create(4 * kMiB), 4 * kMiB);
  EXPECT_TRUE(a.session->Pause().ok());
  EXPECT_EQ(a.Figure({"tags", "user", "bytes"}), k2M);
  EXPECT_EQ(a.Figure({"tags", "user", "kept_bytes"}), kept() ? k2M : 0);
  EXPECT_EQ(a.Figure({"tags", "user", "released_bytes"}), kept() ? 0 : k2M);
  EXPECT_EQ(a.Figure({"tags", "nccl", "bytes"}), 4 * kMiB);
  EXPECT_EQ(a.Figure({"tags", "nccl", "kept_bytes"}), 0U);
  EXPECT_EQ(a.Figure({"tags", "nccl", "released_bytes"}), 4 * kMiB);
  const std::string text = a.session->statistics().Text();
  EXPECT_NE(text.find(kept() ? "2 MiB (ncclMemAlloc), 2 MiB of it on the device now"
                             : "2 MiB (ncclMemAlloc), 0 MiB of it on the device now"),
            std::string::npos)
      << text;
  EXPECT_TRUE(a.session->Resume().ok());
}

TEST_P(UserMemoryTest, is_freed_while_paused_and_then_its_importer_holds_it_alone) {
  const AllocationId tensor = a.Create(k2M, true);
  std::byte* mine = a.Place(tensor);
  std::byte* theirs = b.Place(Pass(tensor));
  std::memset(mine, 0x11, k2M);
  Both(&Session::Pause);
  FreeAsNccl(a, mine);
  EXPECT_EQ(a.InUse(), kept() ? k2M : 0U);
  Both(&Session::Resume);
  EXPECT_EQ(theirs[k2M - 1], std::byte{0x11});
  Both(&Session::Pause);
  FreeAsNccl(b, theirs);
  EXPECT_EQ(a.InUse(), 0U);
  EXPECT_TRUE(a.session->Resume().ok());  // they share nothing any more
  EXPECT_TRUE(b.session->Resume().ok());
  EXPECT_TRUE(a.session->CopyState().allocations.empty());
}

// As NCCL does it at the end of a communicator with symmetric windows.
TEST_P(UserMemoryTest, is_unmapped_at_once_from_a_whole_range_with_holes) {
  const AllocationId first = a.Create(k2M, true), second = a.Create(k2M, true);
  for (const bool paused : {false, true}) {
    const Address flat = *a.session->nccl().Reserve(5 * k2M, 0, {}, 0, {});
    EXPECT_TRUE(a.session->nccl().Map(flat + k2M, k2M, 0, first, 0).ok());
    EXPECT_TRUE(a.session->nccl().Map(flat + 3 * k2M, k2M, 0, second, 0).ok());
    EXPECT_EQ(paused ? a.session->Pause() : Status{}, Status{});
    const Status cut = a.session->nccl().Unmap(flat, k2M + kMiB);
    EXPECT_NE(cut.message().find("would cut a mapping in two"), std::string::npos) << cut.message();
    EXPECT_EQ(a.session->nccl().Unmap(flat + 3 * k2M + kMiB, 2 * k2M).code(), Code::kInvalid) << "begins in a mapping";
    const Status mapped = a.session->nccl().FreeRange(flat, 5 * k2M);
    EXPECT_EQ(mapped.driver_result(), cuda::kInvalidValue);
    EXPECT_NE(mapped.message().find("memory is still mapped at " + Hex((flat + k2M).value)), std::string::npos);
    EXPECT_TRUE(a.session->nccl().Unmap(flat, 5 * k2M).ok());
    EXPECT_EQ(a.session->nccl().Unmap(flat, 5 * k2M).code(), Code::kNotFound) << "the driver's to answer: success";
    EXPECT_TRUE(a.session->nccl().FreeRange(flat, 5 * k2M).ok());
  }
  for (const AllocationId id : {first, second}) EXPECT_TRUE(a.session->nccl().Release(id).ok());
  EXPECT_EQ(a.InUse(), 0U);
  EXPECT_TRUE(a.session->Resume().ok());
}

TEST_P(UserMemoryTest, of_cuMemAlloc_is_the_drivers_when_it_is_kept) {
  const auto address = a.session->legacy().Allocate(8, kDevice, {}, true);
  EXPECT_EQ(address.ok(), !kept());
  if (!kept()) return;
  EXPECT_EQ(address.status().code(), Code::kUnsupported);
  a.session->records().Note(LegacyAllocated{Address{0x5000}, k2M, {}, 0, address.status().message(), {}});
  EXPECT_EQ(a.Figure({"tags", "user", "kept_bytes"}), k2M);
  EXPECT_EQ(a.Figure({"tags", "nccl", "kept_bytes"}), 0U);
}

// What a program fills is hardly zero anywhere, so that a first pause finds host memory for all of it.
TEST_P(UserMemoryTest, is_expected_whole_where_a_pause_takes_it) {
  const AllocationId id = a.Create(128 * kMiB, true);
  const auto pinned = [&] { return a.Pinned(); };
  for (int waited = 0; !kept() && waited < 10'000 && pinned() < 128 * kMiB; ++waited)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (kept()) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(pinned() >= 128 * kMiB, !kept()) << pinned();
  EXPECT_TRUE(a.session->nccl().Release(id).ok());
}

std::string NameOf(const ::testing::TestParamInfo<UserMemory>& info) {
  return info.param == UserMemory::kKeep ? "keep" : "release";
}
// A copy that comes in the middle of a pause or resume must not reach what is saved already, or is about to be restored.
TEST_P(UserMemoryTest, of_nccl_is_out_of_bounds_from_the_first_copy_of_a_pause_to_the_last_of_a_resume) {
  std::byte* nccl = a.Place(a.Create());
  std::memset(nccl, 0x44, k2M);
  std::size_t asked = 0;
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) {
    if (call != "FindNonZero" && call != "Gather" && call != "Scatter") return 0;
    ++asked;
    EXPECT_TRUE(a.simulator->MappingAt(AddressOf(nccl)).ok()) << call;
    EXPECT_TRUE(a.session->calls().TouchesPaused(AddressOf(nccl), 8)) << call;
    return 0;
  });
  EXPECT_TRUE(a.session->Pause().ok());
  EXPECT_TRUE(a.session->Resume().ok());
  a.simulator->SetHook({});
  EXPECT_GE(asked, 3U);
  EXPECT_FALSE(a.session->calls().TouchesPaused(AddressOf(nccl), 8));
}

INSTANTIATE_TEST_SUITE_P(, UserMemoryTest, ::testing::Values(UserMemory::kKeep, UserMemory::kRelease), NameOf);

// ---- freeing -----------------------------------------------------------------------------------------------------------

class FreeWhilePaused : public test::TwoProcesses, public ::testing::WithParamInterface<Layout> {
 protected:
  FreeWhilePaused() : TwoProcesses(Options(GetParam()), 256 * kMiB) {
    const AllocationId shared = a.Create();
    mine = a.Place(shared);
    theirs = b.Place(Pass(shared));
    std::memset(mine, 0x22, k2M);
    stays = a.Place(a.Create());
    std::memset(stays, 0x33, k2M);
  }
  void TearDown() override {
    for (const Process* p : {&a, &b}) {
      const State state = p->session->CopyState();
      EXPECT_TRUE(state.broken.empty()) << state.broken;
      EXPECT_TRUE(CheckInvariants(state).ok()) << CheckInvariants(state).message();
    }
    EXPECT_EQ(stays[k2M - 1], std::byte{0x33});
    FreeAsNccl(a, stays);
    for (const Process* p : {&a, &b}) {
      EXPECT_TRUE(p->session->CopyState().allocations.empty());
      EXPECT_EQ(p->simulator->Snapshot(), SimulatorSnapshot{});
    }
    TwoProcesses::TearDown();
  }
  void EachResumes() const {
    EXPECT_TRUE(a.session->Resume().ok());
    EXPECT_TRUE(b.session->Resume().ok());
  }
  std::byte *mine = nullptr, *theirs = nullptr, *stays = nullptr;
};

TEST_P(FreeWhilePaused, on_both_sides_leaves_nothing_in_common_and_each_resumes_by_itself) {
  for (const bool owner_first : {true, false}) {
    Both(&Session::Pause);
    FreeAsNccl(owner_first ? a : b, owner_first ? mine : theirs);
    FreeAsNccl(owner_first ? b : a, owner_first ? theirs : mine);
    EachResumes();
    EXPECT_EQ(b.InUse(), GetParam() == Layout::kDirect ? k2M : 32 * kMiB) << "what stays";
    if (!owner_first) break;
    const AllocationId shared = a.Create();
    mine = a.Place(shared);
    EXPECT_EQ(mine[0], std::byte{0}) << "what was freed was cleared";
    theirs = b.Place(Pass(shared));
  }
}

TEST_P(FreeWhilePaused, by_the_owner_leaves_the_contents_to_the_importer) {
  Both(&Session::Pause);
  FreeAsNccl(a, mine);
  Both(&Session::Resume);
  EXPECT_EQ(theirs[0], std::byte{0x22});
  EXPECT_EQ(theirs[k2M - 1], std::byte{0x22});
  FreeAsNccl(b, theirs);
}

TEST_P(FreeWhilePaused, by_the_importer_is_told_to_the_owner_at_once) {
  Both(&Session::Pause);
  FreeAsNccl(b, theirs);
  for (const auto& [id, allocation] : a.session->CopyState().allocations) EXPECT_TRUE(allocation.importers.empty());
  EachResumes();
  EXPECT_EQ(mine[k2M - 1], std::byte{0x22});
  FreeAsNccl(a, mine);
}

TEST_P(FreeWhilePaused, after_a_resume_that_failed_and_was_undone) {
  std::byte* leaves = a.Place(a.Create());
  std::memset(leaves, 0x44, k2M);
  Both(&Session::Pause);
  FreeAsNccl(b, theirs);
  for (const char* call : {"Create", "Scatter"}) {
    ASSERT_TRUE(a.simulator->FailNext(call, 1, cuda::kUnknown).ok());
    EXPECT_FALSE(a.session->Resume().ok());
    EXPECT_TRUE(a.session->paused());
    FreeAsNccl(a, std::exchange(leaves, mine));
  }
  EachResumes();
}

TEST_P(FreeWhilePaused, waits_for_copies_of_a_resume_that_could_not_be_undone) {
  std::byte* const leaves = a.Place(a.Create());
  std::memset(leaves, 0x44, k2M);
  Both(&Session::Pause);
  FreeAsNccl(b, theirs);
  a.simulator->SetHook([](std::string_view call, std::uint64_t) { return call == "FinishCopies" ? cuda::kUnknown : 0; });
  EXPECT_EQ(a.session->Resume().code(), Code::kBroken);
  const auto under_way = a.simulator->QueuedCopies(kDevice);
  ASSERT_GT(under_way, 0U);
  const Status refused = a.session->nccl().Unmap(AddressOf(leaves), k2M);
  EXPECT_NE(refused.message().find("copies of a pause or resume that failed"), std::string::npos) << refused.message();
  EXPECT_EQ(a.simulator->QueuedCopies(kDevice), under_way);
  a.simulator->SetHook({});
  FreeAsNccl(a, leaves);
  EXPECT_EQ(a.simulator->QueuedCopies(kDevice), 0U);
  EachResumes();
  EXPECT_EQ(mine[k2M - 1], std::byte{0x22});
  FreeAsNccl(a, mine);
}

TEST_P(FreeWhilePaused, of_what_was_never_mapped) {
  const AllocationId own = a.Create(), shared = a.Create();
  const AllocationId imported = Pass(shared);
  Both(&Session::Pause);
  EXPECT_TRUE(a.session->nccl().Release(own).ok());
  EXPECT_TRUE(b.session->nccl().Release(imported).ok());
  EXPECT_TRUE(a.session->nccl().Release(shared).ok());
  FreeAsNccl(b, theirs);
  FreeAsNccl(a, mine);
  EachResumes();
}

TEST_P(FreeWhilePaused, of_cuMemAlloc_memory_and_of_opened_ipc_handles) {
  const Address freed = *a.session->legacy().Allocate(8, kDevice, {}), kept = *a.session->legacy().Allocate(8, kDevice, {});
  const Address alone = *a.session->legacy().Allocate(3 * kMiB, kDevice, {});
  *reinterpret_cast<std::byte*>(kept.value) = std::byte{0x55};
  const auto opened = b.session->legacy().Import(*a.session->legacy().Export(alone), kDevice, {});
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  Both(&Session::Pause);
  EXPECT_TRUE(a.session->legacy().Free(freed).ok());
  EXPECT_TRUE(a.session->legacy().Free(alone).ok());
  EXPECT_TRUE(b.session->legacy().Close(*opened).ok());
  Both(&Session::Resume);
  EXPECT_EQ(*reinterpret_cast<std::byte*>(kept.value), std::byte{0x55});
  EXPECT_TRUE(a.session->legacy().Free(kept).ok());
  FreeAsNccl(b, theirs);
  FreeAsNccl(a, mine);
}

std::string LayoutName(const ::testing::TestParamInfo<Layout>& info) {
  return info.param == Layout::kDirect ? "direct" : "slab";
}
INSTANTIATE_TEST_SUITE_P(, FreeWhilePaused, ::testing::Values(Layout::kDirect, Layout::kSlab), LayoutName);

// ---- contexts ----------------------------------------------------------------------------------------------------------

// ncclMemAlloc lets every device of the host in.
TEST_P(FreeWhilePaused, and_a_cycle_opens_no_context_on_a_device_that_only_has_access) {
  const AccessDescriptor other{{LocationType::kDevice, 1}, 3};
  EXPECT_TRUE(a.session->nccl().SetAccess(AddressOf(stays), k2M, std::span(&other, 1)).ok());
  Both(&Session::Pause);
  Both(&Session::Resume);
  EXPECT_EQ(a.simulator->ContextsOpened(), std::set{kDevice});
  EXPECT_TRUE(b.simulator->ContextsOpened().empty()) << "it only imported";
  FreeAsNccl(b, theirs);
  FreeAsNccl(a, mine);
}

// ---- what is only counted ----------------------------------------------------------------------------------------------

class Counted : public test::TwoProcesses {
 protected:
  Counted() : TwoProcesses(Options(Layout::kDirect), 256 * kMiB) { a.Place(a.Create()); }
  void TearDown() override {
    EXPECT_TRUE(a.session->CopyState().broken.empty()) << a.session->CopyState().broken;
    EXPECT_TRUE(a.session->Pause().ok());
    EXPECT_TRUE(a.session->Resume().ok());
    TwoProcesses::TearDown();
  }
};

TEST_F(Counted, a_group_is_not_changed_while_paused_and_the_same_group_is_no_change) {
  EXPECT_TRUE(a.session->SetGroup(3).ok());
  EXPECT_TRUE(a.session->Pause().ok());
  EXPECT_TRUE(a.session->SetGroup(3).ok());
  const Status refused = a.session->SetGroup(4);
  EXPECT_EQ(refused.code(), Code::kRefused);
  EXPECT_NE(refused.message().find("change the group to 4: refused"), std::string::npos) << refused.message();
  EXPECT_NE(refused.message().find("call ncclResume first"), std::string::npos) << refused.message();
  EXPECT_EQ(a.session->group(), 3);
  EXPECT_EQ(a.Count<GroupChanged>(), 1U);
  EXPECT_TRUE(a.session->Resume().ok());
  EXPECT_TRUE(a.session->SetGroup(4).ok());
}

TEST_F(Counted, memory_that_was_freed_unseen_is_counted_as_what_it_is_now) {
  for (const Bytes bytes : {Bytes{64}, Bytes{128}}) {
    a.session->records().Note(HostAllocated{Address{0x1000}, bytes, 0, false});
    a.session->records().Note(AsyncAllocated{Address{0x2000}, bytes});
    a.session->records().Note(LegacyAllocated{Address{0x3000}, bytes, {}, 0, "no context", {}});
  }
  const Holdings held = Measure(a.session->CopyState());
  EXPECT_EQ(std::tuple(held.host, held.async, held.legacy_kept), std::tuple(128U, 128U, 128U));
}

TEST_F(Counted, an_event_that_cannot_follow_is_dropped_and_said) {
  const std::vector<EventBody> cannot_follow = {
      HostFreed{Address{0x1000}}, AsyncFreed{Address{0x2000}}, Deregistered{Address{0x3000}, 1},
      MulticastDeviceAdded{AllocationId{77}, kDevice}, MulticastUnbound{AllocationId{77}, kDevice, 0, 1}};
  for (const EventBody& event : cannot_follow) a.session->records().Note(event);
  EXPECT_EQ(a.Figure({"dropped_events"}), cannot_follow.size());
  EXPECT_EQ(a.Count<PassedThrough>(), cannot_follow.size());
  EXPECT_EQ(
      ToText(a.journal->events.back().body),
      "passed through: multicast unbound, not counted: multicast unbound: multicast 77, device 0, 1 B: it does not exist");
}

// ---- facts -------------------------------------------------------------------------------------------------------------

std::vector<LaunchRefused> Refused(const Process& p) {
  std::vector<LaunchRefused> all;
  for (const Event& event : p.journal->events) {
    if (const auto* refused = std::get_if<LaunchRefused>(&event.body)) all.push_back(*refused);
  }
  return all;
}

TEST_F(Counted, refused_launches_are_journaled_at_once_then_by_tens_and_the_rest_when_the_pause_ends) {
  a.Place(a.Create());
  Both(&Session::Pause);
  a.session->calls().NoteRefused("cuLaunchKernel");
  EXPECT_EQ(Refused(a), (std::vector<LaunchRefused>{{"cuLaunchKernel", 1}}));
  for (int i = 0; i < 1233; ++i) a.session->calls().NoteRefused("cuLaunchKernel");
  a.session->calls().NoteRefused("cuMemcpyAsync");
  EXPECT_EQ(Refused(a), (std::vector<LaunchRefused>{{"cuLaunchKernel", 1},
                                                    {"cuLaunchKernel", 9},
                                                    {"cuLaunchKernel", 90},
                                                    {"cuLaunchKernel", 900},
                                                    {"cuMemcpyAsync", 1}}));
  Both(&Session::Resume);
  EXPECT_EQ(Refused(a).back(), (LaunchRefused{"cuLaunchKernel", 234}));
  Both(&Session::Pause);
  a.session->calls().NoteRefused("cuLaunchKernel");
  EXPECT_EQ(Refused(a).back(), (LaunchRefused{"cuLaunchKernel", 1})) << "another pause begins anew";
  Both(&Session::Resume);
}

TEST_F(Counted, facts_are_not_waited_for_while_another_thread_has_the_ledger) {
  const EventBody fact = MemberHeard{SessionId{7}};
  a.session->Inspect([&](const State&) {
    const bool told = test::InThread([&] {
                        return a.session->records().TryNote({&fact, 1}, std::chrono::milliseconds(0));
                      }).get();
    EXPECT_FALSE(told);
  });
  EXPECT_EQ(a.Count<MemberHeard>(), 0U);
  EXPECT_TRUE(a.session->records().TryNote({&fact, 1}, std::chrono::milliseconds(0)));
  EXPECT_EQ(a.Count<MemberHeard>(), 1U);
}

}  // namespace
}  // namespace amem
