#include "folding.h"

namespace amem::testing {
namespace {

TEST(Apply, an_allocation_lives_from_create_to_the_last_release) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Free(id, kA);
  EXPECT_TRUE(f.state.allocations.empty());
  EXPECT_TRUE(f.state.ranges.empty());
}

TEST(Apply, memory_released_while_mapped_lives_until_it_is_unmapped) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Ok(AllocationReleased{id});
  EXPECT_TRUE(f.state.allocations.contains(id));
  f.Ok(Unmapped{kA, k2M});
  EXPECT_FALSE(f.state.allocations.contains(id));
}

TEST(Apply, memory_that_a_peer_holds_outlives_its_release) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Ok(Exported{id, 1});
  f.Ok(ReferenceAdded{id, kPeer, AllocationId{4}});
  f.Free(id, kA);
  EXPECT_TRUE(f.state.allocations.contains(id));
  f.Ok(ReferenceDropped{id, kPeer, AllocationId{4}});
  EXPECT_FALSE(f.state.allocations.contains(id));
}

TEST(Apply, a_lost_peer_drops_its_references) {
  Folding f;
  const AllocationId id = f.Allocate(kA), kept = f.Allocate(kB);
  f.Ok(PeerConnected{kPeer, "host", 7, 0, 1});
  for (const AllocationId each : {id, kept}) {
    f.Ok(Exported{each, 1});
    f.Ok(ReferenceAdded{each, kPeer, each});
  }
  f.Free(id, kA);
  f.Ok(PeerLost{kPeer, "died"});
  EXPECT_FALSE(f.state.allocations.contains(id));
  EXPECT_TRUE(f.state.allocations.at(kept).importers.empty());
}

TEST(Apply, wrong_orders_are_refused_by_name) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  const AllocationId nobody{77};
  f.Refused(Mapped{kB, k2M, 0, id, 0}, "map 0x7f0000400000 of allocation 1: the address range is not reserved");
  f.Refused(Mapped{kA, k2M, 0, id, 0}, "mapped already");
  f.Refused(Mapped{kA, k2M, 0, nobody, 0}, "allocation 77: the allocation does not exist");
  f.Refused(Mapped{kA, 2 * k2M, 0, id, 0}, "outside");
  f.Refused(RangeReserved{kA + kMiB, k2M, 0, {}, 0, {}}, "overlaps");
  f.Refused(RangeFreed{kA, k2M}, "still mapped");
  f.Refused(RangeFreed{kB, k2M}, "no range");
  f.Refused(Unmapped{kA, kMiB}, "cut a mapping");
  f.Refused(Unmapped{kB, k2M}, "nothing is mapped");
  f.Refused(AccessSet{kB, k2M, {}}, "nothing is mapped");
  f.Refused(AllocationCreated{id, k2M, {}, 0, {}, {}, {}}, "in use");
  f.Refused(AllocationReleased{nobody}, "does not exist");
  f.Refused(AllocationRetained{nobody, kA}, "does not exist");
  f.Refused(ReferenceAdded{id, kPeer, AllocationId{1}}, "never exported");
  f.Refused(ReferenceDropped{id, kPeer, AllocationId{1}}, "holds none");
  f.Refused(Imported{AllocationId{2}, {}, k2M, {}, 1, {}, {}, {}}, "no owner");
  f.Refused(PeerLost{kPeer, "?"}, "never connected");
  f.Refused(StepBegun{}, "no pause or resume");
  f.Refused(CycleBegun{CycleKind::kResume, 1, {}}, "the session is running");
  f.Refused(SessionOpened{}, "open already");
  f.Refused(HostFreed{kA}, "none is known");
  f.Refused(LegacyFreed{kA}, "nothing is allocated");
  f.Refused(Deregistered{kA, k2M}, "not registered");
}

TEST(Apply, a_gap_in_sequence_numbers_is_refused) {
  Folding f;
  const Status status = Apply(f.state, Event{SequenceNumber{9}, 0, 0, PassedThrough{}});
  EXPECT_EQ(status.message(), "event 9 does not follow event 1");
}

TEST(Apply, access_settings_merge_by_location) {
  Folding f;
  f.Allocate(kA);
  f.Ok(AccessSet{kA, k2M, {{{LocationType::kDevice, 1}, 1}}});
  f.Ok(AccessSet{kA, k2M, {{{LocationType::kDevice, 1}, 3}}});
  f.Ok(AccessSet{kA, k2M, {{{LocationType::kDevice, 0}, 0}}});
  const auto& access = f.state.mappings.at(kA).access;
  ASSERT_EQ(access.size(), 1U);
  EXPECT_EQ(access[0], (AccessDescriptor{{LocationType::kDevice, 1}, 3}));
}

TEST(Apply, nothing_is_created_while_paused_but_everything_can_be_freed) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Pause();
  f.Refused(AllocationCreated{AllocationId{2}, k2M, {}, 0, {}, {}, {}}, "paused");
  f.Refused(RangeReserved{kB, k2M, 0, {}, 0, {}}, "paused");
  f.Free(id, kA);
  EXPECT_TRUE(f.state.allocations.empty());
}

TEST(Apply, a_session_may_end_while_it_is_paused_and_only_once) {
  Folding f;
  f.Allocate(kA);
  f.Pause();
  f.Ok(SessionClosed{"exit"});
  f.Refused(SessionClosed{"exit"}, "not open");
}

TEST(Apply, a_registered_buffer_is_kept_and_named) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Ok(Registered{kA + kMiB, 4096, "dma-buf"});
  EXPECT_EQ(WhyKept(f.state.allocations.at(id)), KeepReason::kRegistered);
  f.Ok(Registered{kA + kMiB, 4096, "dma-buf"});
  f.Ok(Deregistered{kA + kMiB, 4096});
  EXPECT_EQ(WhyKept(f.state.allocations.at(id)), KeepReason::kRegistered);
  f.Ok(Deregistered{kA + kMiB, 4096});
  EXPECT_EQ(WhyKept(f.state.allocations.at(id)), KeepReason::kNone);
}

TEST(Apply, the_same_events_give_the_same_digest_and_another_event_another) {
  Folding f, g;
  f.Allocate(kA);
  g.Allocate(kA);
  EXPECT_EQ(f.state, g.state);
  EXPECT_EQ(Digest(f.state), Digest(g.state));
  g.Allocate(kB);
  EXPECT_NE(Digest(f.state), Digest(g.state));
}

}  // namespace
}  // namespace amem::testing
