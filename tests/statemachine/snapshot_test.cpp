#include "folding.h"

namespace amem::testing {
namespace {

constexpr SessionId kGone{0x98};

State Expand(const std::vector<EventBody>& bodies) {
  State state;
  for (const EventBody& body : bodies) EXPECT_TRUE(Apply(state, Event{{}, 0, 0, body}).ok()) << ToText(body);
  return state;
}

TEST(Snapshot, equals_the_state_it_was_taken_from) {
  Folding f;
  f.Ok(LibraryAttached{"libnccl.so.2", "abc", "preload", "2.28.9", 0x1000});
  f.Ok(PeerConnected{kPeer, "host", 7, 0, 1});
  f.Ok(PeerConnected{kGone, "host", 8, 0, 2});
  f.Ok(PeerLost{kGone, "died"});
  const AllocationId id = f.Allocate(kA);
  f.Import(kB, {kPeer, AllocationId{5}});
  f.Ok(Exported{id, 1});
  f.Ok(Exported{id, 1});
  f.Ok(ReferenceAdded{id, kPeer, AllocationId{3}});
  f.Ok(AllocationRetained{id, kA});
  const AllocationId zombie = f.Allocate(kC);
  f.Ok(Exported{zombie, 1});
  f.Ok(ReferenceAdded{zombie, kPeer, AllocationId{4}});
  f.Free(zombie, kC);
  f.Ok(Registered{kA, k2M, "dma-buf"});
  f.Ok(HostAllocated{Address{0x1000}, 64, 3, false});
  f.Ok(AsyncAllocated{Address{0x2000}, 64});
  f.Ok(SharedOutside{"libone_shot.so", OutsideKind::kIpcExport, 2, 64});
  f.Ok(LegacyAllocated{kA, 512, id, 0, "", {}});
  f.Ok(MulticastCreated{AllocationId{9}, k2M, 2, 1, 0, {}});
  f.Ok(MulticastDeviceAdded{AllocationId{9}, DeviceOrdinal{0}});
  const Address far{0x7f0010000000};
  f.Allocate(far, k2M, 0, MemoryTag::kUser);
  const AllocationId object{f.state.next_allocation};  // a multicast object that a peer made
  f.Ok(Imported{object, {kPeer, AllocationId{6}}, k2M, {}, 1, {}, {}, {}, MemoryTag::kUserReleased});
  f.Ok(MulticastDeviceAdded{object, DeviceOrdinal{0}});
  f.Ok(MulticastBound{object, 0, id, 0, k2M, {}});
  f.Ok(PassedThrough{"cuMemSomething", "", 0});
  const auto snapshot = ToSnapshotEvents(f.state);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  EXPECT_EQ(Expand(*snapshot), f.state);
  EXPECT_EQ(Digest(Expand(*snapshot)), Digest(f.state));
}

TEST(Snapshot, knows_the_references_to_what_is_mapped_no_more) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Ok(AllocationRetained{id, kA});
  f.Ok(Unmapped{kA, k2M, {}});
  const auto snapshot = ToSnapshotEvents(f.state);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  EXPECT_EQ(Expand(*snapshot), f.state);
}

// A pause that fails, and whose undo fails too: all was released again.
TEST(Snapshot, knows_that_a_pause_that_could_not_be_undone_left_the_session_paused) {
  Folding f;
  f.Allocate(kA);
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}, {}});
  f.Refused(CycleFailed{CycleKind::kPause, 1, false, "no memory", Code::kOutOfMemory, 2, {}, {}, true}, "still has memory");
  f.Run(PlanPause(f.state));
  f.Ok(CycleFailed{CycleKind::kPause, 1, false, "no memory", Code::kOutOfMemory, 2, {}, {}, true});
  EXPECT_EQ(f.state.lifecycle, Lifecycle::kPaused);
  EXPECT_EQ(f.state.cycle.failure, "no memory");
  const auto snapshot = ToSnapshotEvents(f.state);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  EXPECT_EQ(Expand(*snapshot), f.state);
  f.Resume();
  EXPECT_EQ(f.state.lifecycle, Lifecycle::kRunning);
}

TEST(Snapshot, knows_that_everything_is_kept) {
  Folding f;
  f.Allocate(kA);
  f.Ok(EverythingKept{"a plugin"});
  f.Allocate(kB);
  const auto snapshot = ToSnapshotEvents(f.state);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  EXPECT_EQ(Expand(*snapshot), f.state);
}

TEST(Snapshot, knows_how_the_last_freeze_stands) {
  Folding f;
  const FreezeStep step{
      .begun_ns = 7, .goal = "frozen", .step = "lock", .gpus = {{"GPU-a", 2, 1}}, .moved = {{"GPU-a", "GPU-b"}}};
  f.Ok(step);
  ASSERT_EQ(f.state.freeze, step);
  const auto snapshot = ToSnapshotEvents(f.state);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  EXPECT_EQ(Expand(*snapshot), f.state);
  State other = f.state;
  other.freeze->step = "checkpoint";
  EXPECT_NE(Digest(other), Digest(f.state));
}

TEST(Snapshot, is_followed_by_the_next_event) {
  Folding f;
  f.Allocate(kA);
  f.Pause();
  f.Resume();
  const auto snapshot = ToSnapshotEvents(f.state);
  ASSERT_TRUE(snapshot.ok());
  Folding g;
  g.state = Expand(*snapshot);
  g.Allocate(kB);
  f.Allocate(kB);
  EXPECT_EQ(f.state, g.state);
}

TEST(Snapshot, keeps_the_last_failure) {
  Folding f;
  f.Allocate(kA);
  f.Ok(CycleBegun{CycleKind::kPause, 1, {SessionId{0x51}}});
  f.Ok(CycleFailed{CycleKind::kPause, 1, true, "rank 2 did not come"});
  const auto snapshot = ToSnapshotEvents(f.state);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  EXPECT_EQ(Expand(*snapshot).cycle.failure, "rank 2 did not come");
}

TEST(Snapshot, keeps_the_failure_of_a_pause_that_never_began) {
  Folding f;
  f.Allocate(kA);
  f.Pause();
  f.Resume();
  f.Ok(PhaseBegun{PhaseKind::kPauseArrive});
  f.Ok(CycleFailed{CycleKind::kPause, 2, true, "waited for rank 2"});
  EXPECT_EQ(f.state.lifecycle, Lifecycle::kRunning);
  EXPECT_EQ(f.state.cycles, 1U);
  const auto snapshot = ToSnapshotEvents(f.state);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  EXPECT_EQ(Expand(*snapshot), f.state);
  f.Pause();  // tried again
  f.Ok(PhaseBegun{PhaseKind::kResumeArrive});
  f.Ok(CycleFailed{CycleKind::kResume, 2, true, "waited for rank 2"});
  EXPECT_EQ(f.state.lifecycle, Lifecycle::kPaused);
  f.Refused(PhaseBegun{PhaseKind::kPauseArrive}, "no pause or resume");
  f.Resume();
}

TEST(Snapshot, is_of_any_moment_of_a_pause_and_a_resume) {
  Folding f;
  f.state = Whole();
  f.Pause();  // which compares after each event
  const auto snapshot = ToSnapshotEvents(f.state);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  Folding again;
  again.state = Expand(*snapshot);
  EXPECT_EQ(again.state, f.state);
  EXPECT_EQ(again.state.lifecycle, Lifecycle::kPaused);
  again.Resume();
  f.Resume();
  EXPECT_EQ(again.state, f.state);
}

TEST(Snapshot, is_as_large_as_what_lives) {
  Folding f;
  f.state = Whole();
  const auto before = ToSnapshotEvents(f.state);
  for (int i = 0; i < 10'000; ++i) ASSERT_TRUE(f.Try(Exported{kOwn, 1}).ok());
  const auto after = ToSnapshotEvents(f.state);
  ASSERT_TRUE(before.ok() && after.ok()) << after.status().message();
  EXPECT_LT(after->size(), before->size() + 100);
}

TEST(Snapshot, is_refused_of_a_session_that_has_not_begun_or_has_ended) {
  EXPECT_FALSE(ToSnapshotEvents(State{}).ok());
  Folding f;
  f.Ok(SessionClosed{"exit", 0});
  EXPECT_FALSE(ToSnapshotEvents(f.state).ok());
}

}  // namespace
}  // namespace amem::testing
