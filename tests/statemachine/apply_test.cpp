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

TEST(Apply, of_two_mappings_each_has_its_place_in_the_allocation_and_one_may_go) {
  Folding f;
  const AllocationId id = f.Allocate(kA, 4 * kMiB);
  f.Ok(RangeReserved{kB, k2M, 0, {}, 0, {}, {}});
  f.Ok(Mapped{kB, k2M, kMiB, id, 7});
  EXPECT_EQ(f.state.mappings.at(kB).offset, kMiB);
  EXPECT_EQ(f.state.mappings.at(kB).flags, 7U);
  EXPECT_EQ(f.state.allocations.at(id).mappings, 2U);
  f.Ok(Unmapped{kA, 4 * kMiB, {}});
  f.Ok(AllocationReleased{id});
  ASSERT_TRUE(f.state.allocations.contains(id)) << "it is mapped at its second address";
  EXPECT_EQ(f.state.allocations.at(id).mappings, 1U);
  f.Ok(Unmapped{kB, k2M, {}});
  EXPECT_TRUE(f.state.allocations.empty());
}

TEST(Apply, of_two_references_by_one_name_one_may_go) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Ok(Exported{id, 1});
  for (int i = 0; i < 2; ++i) f.Ok(ReferenceAdded{id, kPeer, AllocationId{4}});
  f.Ok(ReferenceDropped{id, kPeer, AllocationId{4}});
  f.Free(id, kA);
  ASSERT_TRUE(f.state.allocations.contains(id));
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

TEST(Apply, what_was_shared_by_the_drivers_own_handle_is_kept_and_a_snapshot_knows_it) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Ok(Exported{id, 1});
  EXPECT_EQ(WhyKept(f.state.allocations.at(id)), KeepReason::kNone);
  f.Ok(Exported{id, kFabricHandle});
  EXPECT_EQ(WhyKept(f.state.allocations.at(id)), KeepReason::kHandedOut);
  const auto snapshot = ToSnapshotEvents(f.state);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  State again;
  for (const EventBody& body : *snapshot) ASSERT_TRUE(Apply(again, Event{{}, 0, 0, body}).ok());
  EXPECT_EQ(again, f.state);
}

TEST(Apply, knows_what_other_libraries_share_now) {
  Folding f;
  f.Ok(SharedOutside{"liba.so", OutsideKind::kIpcExport, 1, 64});
  const std::uint64_t shared = Digest(f.state);
  f.Ok(SharedOutside{"liba.so", OutsideKind::kIpcExport, 2, 128});
  EXPECT_NE(Digest(f.state), shared);
  EXPECT_EQ(f.state.outside, (decltype(State::outside){{{"liba.so", OutsideKind::kIpcExport}, {2, 128}}}));
  f.Ok(SharedOutside{"liba.so", OutsideKind::kIpcExport, 0, 0});
  EXPECT_TRUE(f.state.outside.empty());
}

TEST(Apply, when_everything_is_kept_so_is_what_comes_later_and_a_pause_plans_no_release) {
  Folding f;
  const AllocationId before = f.Allocate(kA);
  const std::uint64_t digest = Digest(f.state);
  f.Ok(EverythingKept{"a plugin"});
  f.Ok(EverythingKept{"another"});
  EXPECT_EQ(f.state.kept_whole, "a plugin") << "the first reason";
  const AllocationId after = f.Allocate(kA + k2M);
  const AllocationId imported = f.Import(kC, {kPeer, AllocationId{5}});
  for (const AllocationId id : {before, after, imported})
    EXPECT_EQ(WhyKept(f.state.allocations.at(id)), KeepReason::kUnseen) << ToText(id);
  EXPECT_NE(Digest(f.state), digest);
  for (const PlannedPhase& phase : PlanPause(f.state).phases) {
    for (const Step& step : phase.steps) EXPECT_TRUE(step.kind == StepKind::kQuiesce || step.kind == StepKind::kVerify);
  }
}

TEST(Apply, a_registration_that_is_repeated_with_more_bytes_keeps_what_it_reaches_then) {
  Folding f;
  const AllocationId first = f.Allocate(kA), second = f.Allocate(kA + k2M);
  const auto registrations = [&] {
    return std::pair(f.state.allocations.at(first).pinned, f.state.allocations.at(second).pinned);
  };
  f.Ok(Registered{kA + kMiB, 4096, "ibv_reg_mr"});
  EXPECT_EQ(registrations(), std::pair(1U, 0U));
  f.Ok(Registered{kA + kMiB, k2M, "ibv_reg_mr"});
  EXPECT_EQ(registrations(), std::pair(1U, 1U));
  f.Ok(Deregistered{kA + kMiB, k2M});
  EXPECT_EQ(registrations(), std::pair(1U, 1U)) << "which of the two is gone is not known";
  f.Ok(Deregistered{kA + kMiB, 4096});
  EXPECT_EQ(registrations(), std::pair(0U, 0U));
}

TEST(Apply, what_other_libraries_hold_is_known_by_their_names_each_until_it_lets_go) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  const auto why = [&] { return WhyKept(f.state.allocations.at(id)); };
  using Names = std::set<std::string>;
  const std::uint64_t digest = Digest(f.state);
  f.Ok(Registered{kA, k2M, "cuMemRetainAllocationHandle", "libone.so"});
  f.Ok(Registered{kA, k2M, "ibv_reg_mr", "libtwo.so"});
  EXPECT_EQ(why(), KeepReason::kHeld);
  EXPECT_EQ(LibrariesHolding(f.state, id), (Names{"libone.so", "libtwo.so"}));
  EXPECT_NE(Digest(f.state), digest);
  const auto snapshot = ToSnapshotEvents(f.state);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  State again;
  for (const EventBody& body : *snapshot) ASSERT_TRUE(Apply(again, Event{{}, 0, 0, body}).ok());
  EXPECT_EQ(again, f.state);
  f.Ok(Registered{kA, k2M, "ibv_reg_mr"});
  EXPECT_EQ(why(), KeepReason::kRegistered) << "by NCCL";
  f.Ok(Deregistered{kA, k2M, "libone.so"});
  f.Ok(Deregistered{kA, k2M});
  EXPECT_EQ(why(), KeepReason::kHeld);
  EXPECT_EQ(LibrariesHolding(f.state, id), Names{"libtwo.so"});
  f.Ok(Deregistered{kA, k2M, "libtwo.so"});
  EXPECT_EQ(why(), KeepReason::kNone);
  f.Ok(Exported{id, 1});
  EXPECT_EQ(why(), KeepReason::kNone) << "a token";
  f.Ok(Exported{id, 1, "libone.so"});
  EXPECT_EQ(why(), KeepReason::kHeld) << "the driver's own descriptor, for good";
  EXPECT_EQ(LibrariesHolding(f.state, id), Names{"libone.so"});
}

TEST(Apply, a_multicast_object_of_a_peer_is_known_by_its_use) {
  Folding f;
  const AllocationId own = f.Allocate(kA), object{f.state.next_allocation};
  f.Ok(Imported{object, {kPeer, AllocationId{6}}, k2M, {}, 1, {}, {}, {}});
  f.Ok(MulticastBound{object, 0, own, 0, k2M, {}});
  EXPECT_EQ(WhyKept(f.state.allocations.at(own)), KeepReason::kMulticast);
  f.Ok(MulticastUnbound{object, DeviceOrdinal{0}, 0, k2M});
  EXPECT_EQ(WhyKept(f.state.allocations.at(own)), KeepReason::kNone);
  EXPECT_TRUE(f.state.multicasts.empty()) << "a snapshot could not tell of it";
  f.Ok(MulticastDeviceAdded{object, DeviceOrdinal{1}});
  EXPECT_EQ(f.state.multicasts.at(object).added, std::vector{DeviceOrdinal{1}});
  f.Ok(AllocationReleased{object});
  EXPECT_TRUE(f.state.multicasts.empty());
  f.Refused(MulticastBound{own, 0, own, 0, k2M, {}}, "it does not exist");
}

// The driver has made it when the event comes, and a pause of another thread may have begun in between.
TEST(Apply, a_multicast_object_may_come_at_any_time) {
  Folding f;
  f.Allocate(kA);
  f.Pause();
  f.Ok(MulticastCreated{AllocationId{9}, k2M, 2, 1, 0, {}});
  f.Resume();
  EXPECT_TRUE(f.state.multicasts.contains(AllocationId{9}));
}

TEST(Apply, a_part_that_a_peer_imported_leaves_dirt_behind) {
  for (const bool imported : {false, true}) {
    Folding f;
    f.state = Whole();
    if (imported) {
      f.Ok(Exported{kSecond, 1});
      f.Ok(ReferenceAdded{kSecond, kPeer, kOwn});
      f.Ok(ReferenceDropped{kSecond, kPeer, kOwn});
    }
    f.Ok(AllocationReleased{kSecond});
    EXPECT_FALSE(f.state.allocations.contains(kSecond));
    const auto& dirty = f.state.slabs.at(kSlab).dirty;
    EXPECT_EQ(dirty, (imported ? std::map<Bytes, Bytes>{{4 * kMiB, k2M}} : std::map<Bytes, Bytes>{}));
  }
}

// Its owner clears it.
TEST(Apply, what_leaves_an_imported_slab_leaves_no_dirt_behind) {
  Folding f;
  const AllocationId slab = f.Import(kSlabAddress, {kPeer, AllocationId{5}}, 8 * kMiB), part{f.state.next_allocation};
  f.Ok(SlabOpened{slab, kSlabAddress, {}});
  f.Ok(Imported{part, {kPeer, AllocationId{6}}, k2M, OnDevice(1), 1, {}, {}, {}});
  f.Ok(Placed{part, slab, k2M, true});
  f.Ok(AllocationReleased{part});
  EXPECT_FALSE(f.state.allocations.contains(part));
  EXPECT_TRUE(f.state.slabs.at(slab).dirty.empty());
}

TEST(Apply, clearing_a_piece_keeps_the_dirt_before_and_behind_it) {
  Folding f;
  f.state = Whole();
  f.Ok(Unmapped{kSlabAddress, k2M, kPart});
  f.Ok(RangeFreed{kSlabAddress, k2M, kPart});
  f.Ok(AllocationReleased{kPart});
  f.Ok(PartCleared{kSlab, kMiB / 2, kMiB});
  using Dirty = std::map<Bytes, Bytes>;
  EXPECT_EQ(f.state.slabs.at(kSlab).dirty, (Dirty{{0, kMiB / 2}, {kMiB + kMiB / 2, kMiB / 2}}));
  f.Ok(PartCleared{kSlab, 0, kMiB});
  EXPECT_EQ(f.state.slabs.at(kSlab).dirty, (Dirty{{kMiB + kMiB / 2, kMiB / 2}}));
}

TEST(Apply, neighbouring_dirt_is_one_range) {
  Folding f;
  f.state = Whole();
  f.Ok(AllocationCreated{AllocationId{6}, k2M, OnDevice(0), 0, {}, {}, {}});
  f.Ok(Placed{AllocationId{6}, kSlab, k2M, true});
  f.Ok(Unmapped{kSlabAddress, k2M, kPart});
  f.Ok(RangeFreed{kSlabAddress, k2M, kPart});
  f.Ok(AllocationReleased{kPart});
  f.Ok(AllocationReleased{AllocationId{6}});
  EXPECT_EQ(f.state.slabs.at(kSlab).dirty, (std::map<Bytes, Bytes>{{0, 4 * kMiB}}));
}

TEST(Apply, what_lies_between_and_behind_the_parts_of_a_slab_that_is_made_anew_is_dirty) {
  Folding f;
  f.state = Whole();
  f.Ok(AccessSet{kSlabAddress, 8 * kMiB, {{{LocationType::kDevice, 0}, 3}}, {}});
  f.Pause();
  f.Resume();
  EXPECT_EQ(f.state.slabs.at(kSlab).dirty, (std::map<Bytes, Bytes>{{k2M, k2M}, {6 * kMiB, k2M}}));
}

TEST(Apply, a_cycle_that_follows_a_failed_undo_knows_it) {
  Folding f;
  f.Allocate(kA);
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  EXPECT_FALSE(f.state.cycle.after_failed_undo);
  f.Ok(CycleFailed{CycleKind::kPause, 1, false, "the driver took nothing back"});
  f.Ok(CycleBegun{CycleKind::kPause, 2, {}});
  EXPECT_TRUE(f.state.cycle.after_failed_undo);
  f.Ok(CycleFailed{CycleKind::kPause, 2, true, "undone this time"});
  EXPECT_FALSE(f.state.cycle.after_failed_undo);
}

TEST(Apply, the_same_events_give_the_same_digest_and_another_event_another) {
  Folding f, g;
  f.Allocate(kA);
  g.Allocate(kA);
  EXPECT_EQ(f.state, g.state);
  EXPECT_EQ(Digest(f.state), Digest(g.state));
  g.Allocate(kB);
  EXPECT_NE(Digest(f.state), Digest(g.state));
  f.Allocate(kB, k2M, 0, MemoryTag::kUser);
  EXPECT_NE(Digest(f.state), Digest(g.state)) << "whose memory it is";
}

// Replays of recorded journals compare digests, so they are the same for ever.
TEST(Apply, what_the_program_allocated_by_the_old_calls_is_measured_apart) {
  Folding f;
  f.Allocate(kA);
  f.Ok(LegacyAllocated{kB, 4096, {}, 0, std::string(ToText(KeepReason::kUser)), {}});
  f.Ok(LegacyAllocated{kC, 512, {}, 0, "too large", {}});
  f.Ok(LegacyAllocated{kA, 64, kOwn, 0, "", {}});
  const Holdings held = Measure(f.state);
  EXPECT_EQ(held.legacy_kept, 4096U + 512U);
  EXPECT_EQ(held.legacy_user, 4096U);
}

TEST(Apply, a_digest_covers_everything_and_never_changes) {
  Folding f;
  f.state = Whole();
  EXPECT_EQ(Hex(Digest(f.state)), "0x31cbaa161f243ac6");
  f.Ok(LibraryAttached{"libnccl.so.2", "abc", "preload", "2.28.9", 0x1000});
  f.Ok(PeerConnected{kPeer, "host", -7, -3, 1});
  f.Ok(PeerConnected{SessionId{0x98}, "other", 8, 0, -1});
  f.Ok(PeerLost{SessionId{0x98}, "died"});
  f.Ok(Exported{kOwn, 1});
  f.Ok(ReferenceAdded{kOwn, kPeer, AllocationId{3}});
  f.Ok(MulticastCreated{AllocationId{9}, k2M, 2, 1, 0, {}});
  f.Ok(MulticastDeviceAdded{AllocationId{9}, DeviceOrdinal{-1}});
  f.Ok(MulticastBound{AllocationId{9}, kMiB, kPart, 0, kMiB, {}});
  f.Ok(HostAllocated{Address{0x1000}, 64, 3, true});
  f.Ok(AsyncAllocated{Address{0x2000}, 64});
  f.Ok(LegacyAllocated{kA, 512, kOwn, 4096, "why", CallSite{{1, 2, 3, 0, 0}}});
  f.Ok(LegacyImported{kB, kImported});
  f.Ok(AccessSet{kA, k2M, {{{LocationType::kHostNuma, -2}, 1}}, {}});
  EXPECT_EQ(Hex(Digest(f.state)), "0x67ab772bb974d292");
  f.Ok(Unmapped{kSlabAddress, k2M, kPart});
  f.Ok(RangeFreed{kSlabAddress, k2M, kPart});
  f.Ok(AllocationReleased{kSecond});
  f.Ok(MulticastUnbound{AllocationId{9}, DeviceOrdinal{0}, kMiB, kMiB});
  f.Ok(Registered{kB, k2M, "dma-buf"});
  f.Ok(CycleBegun{CycleKind::kPause, 1, {kPeer, SessionId{0x51}}});
  f.Ok(PhaseBegun{PhaseKind::kPauseSave});
  f.Ok(StepBegun{{StepKind::kSave, kOwn, kA, k2M, {}}});
  EXPECT_EQ(Hex(Digest(f.state)), "0xbd346167d8c941fc");
  f.Ok(StepFailed{{StepKind::kSave, kOwn, kA, k2M, {}}, Code::kOutOfMemory, 2, "no pinned memory"});
  f.Ok(SessionBroken{"the disk is full"});
  EXPECT_EQ(Hex(Digest(f.state)), "0x59e30d7af7d297f3");
}

}  // namespace
}  // namespace amem::testing
