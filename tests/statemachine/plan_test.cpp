#include <algorithm>

#include "folding.h"

namespace amem::testing {
namespace {

PlannedPhase Phase(const Plan& plan, PhaseKind kind) {
  return *std::find_if(plan.phases.begin(), plan.phases.end(), [&](const auto& p) { return p.phase == kind; });
}

std::size_t Steps(const Plan& plan) {
  std::size_t n = 0;
  for (const auto& p : plan.phases) n += p.steps.size();
  return n;
}

TEST(Plan, imports_go_before_own_and_own_come_before_imports) {
  Folding f;
  f.Allocate(kA);
  f.Import(kB, {kPeer, AllocationId{5}});
  const Plan pause = PlanPause(f.state);
  ASSERT_EQ(pause.phases.size(), 4U);
  std::vector<StepKind> kinds;
  for (const Step& step : Phase(pause, PhaseKind::kPauseReleaseOwn).steps) kinds.push_back(step.kind);
  EXPECT_EQ(kinds, (std::vector{StepKind::kUnmap, StepKind::kReleaseImport, StepKind::kSave, StepKind::kUnmap,
                                StepKind::kReleaseOwn}));
  EXPECT_EQ(Phase(pause, PhaseKind::kPauseSave).steps.size(), 1U);
  f.Pause();
  const Plan resume = PlanResume(f.state);
  const auto own = Phase(resume, PhaseKind::kResumeCreateOwn).steps;
  ASSERT_EQ(own.size(), 4U);
  EXPECT_EQ(own[0].kind, StepKind::kCreate);
  EXPECT_EQ(own[1].kind, StepKind::kMap);
  EXPECT_EQ(own[2].kind, StepKind::kSetAccess);
  EXPECT_EQ(own[3].kind, StepKind::kBeginRestore);
  EXPECT_EQ(Phase(resume, PhaseKind::kResumeImport).steps.back().kind, StepKind::kRestore);
}

TEST(Plan, a_cycle_returns_the_state_it_began_with) {
  Folding f;
  f.Allocate(kA);
  f.Import(kB, {kPeer, AllocationId{5}});
  State before = f.state;
  f.Pause();
  EXPECT_EQ(Measure(f.state).own_device_resident, 0U);
  f.Resume();
  before.last = f.state.last;
  before.totals = f.state.totals;
  before.cycles = 1;
  EXPECT_EQ(before, f.state);
}

TEST(Plan, host_memory_and_registered_memory_stay) {
  Folding f;
  f.Allocate(kA);
  f.Ok(Registered{kA, k2M, "dma-buf"});
  AllocationProperties host;
  host.location = {LocationType::kHostNuma, 0};
  f.Ok(AllocationCreated{AllocationId{2}, k2M, host, 0, {}, {}, {}});
  f.Place(AllocationId{2}, kB, k2M, 0);
  const AllocationId leaves = f.Allocate(kC);
  f.Pause();
  EXPECT_TRUE(f.state.allocations.at(AllocationId{1}).resident);
  EXPECT_TRUE(f.state.allocations.at(AllocationId{2}).resident);
  EXPECT_FALSE(f.state.allocations.at(leaves).resident);
  EXPECT_EQ(Measure(f.state).kept.at(KeepReason::kRegistered), k2M);
  f.Resume();
}

TEST(Plan, memory_of_the_program_stays_with_its_owner_and_its_importers_unless_it_is_to_be_released) {
  for (const MemoryTag tag : {MemoryTag::kUser, MemoryTag::kUserReleased}) {
    Folding f;
    const bool stays = tag == MemoryTag::kUser;
    const AllocationId own = f.Allocate(kA, k2M, 0, tag), imported = f.Import(kB, {kPeer, AllocationId{5}}, k2M, tag);
    const AllocationId nccl = f.Allocate(kC, 4 * kMiB);
    f.Pause();
    for (const auto& [id, address] : {std::pair{own, kA}, {imported, kB}}) {
      EXPECT_EQ(f.state.allocations.at(id).resident, stays) << ToText(tag);
      EXPECT_EQ(f.state.mappings.at(address).accessible, stays) << ToText(tag);
    }
    EXPECT_FALSE(f.state.allocations.at(nccl).resident);
    const Holdings held = Measure(f.state);
    EXPECT_EQ(held.user, k2M);
    EXPECT_EQ(held.user_resident, stays ? k2M : 0);
    EXPECT_EQ(held.own_device_resident, held.user_resident);
    EXPECT_EQ(held.kept, (stays ? std::map<KeepReason, Bytes>{{KeepReason::kUser, k2M}} : std::map<KeepReason, Bytes>{}));
    f.Resume();
    f.Free(own, kA);
  }
}

// As when a communicator is destroyed: its network buffers are deregistered, and its multicast objects unbound.
TEST(Plan, what_stays_may_be_let_go_of_while_paused) {
  for (const bool fails : {false, true}) {
    Folding f;
    const AllocationId own = f.Allocate(kA), imported = f.Import(kB, {kPeer, AllocationId{5}}), bound = f.Allocate(kC);
    const AllocationId object{9};
    f.Ok(MulticastCreated{object, k2M, 1, 1, 0, {}});
    f.Ok(MulticastBound{object, 0, bound, 0, k2M, {}});
    f.Ok(Registered{kA, k2M, "dma-buf"});
    f.Ok(Registered{kB, k2M, "dma-buf"});
    f.Pause();
    f.Ok(Deregistered{kA, k2M});
    f.Ok(Deregistered{kB, k2M});
    f.Ok(MulticastUnbound{object, DeviceOrdinal{0}, 0, k2M});
    if (fails) {  // its undo saves nothing
      f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
      f.Run(PlanPause(f.state));
      f.Ok(CycleFailed{CycleKind::kResume, 1, true, "out of memory"});
    }
    for (const AllocationId id : {own, bound})
      EXPECT_TRUE(f.state.allocations.at(id).resident && !f.state.allocations.at(id).saved);
    EXPECT_EQ(f.state.allocations.at(imported).resident, !fails) << "its owner may make it anew";
    f.Resume();
    f.Pause();
    for (const AllocationId id : {own, imported, bound}) EXPECT_FALSE(f.state.allocations.at(id).resident);
  }
}

// The undo of a pause drops imports whose owners may have made their memory anew; the program's never moves.
TEST(Plan, an_undo_leaves_the_imported_memory_of_a_program_where_it_is) {
  Folding f;
  const AllocationId nccl = f.Import(kA, {kPeer, AllocationId{5}});
  const AllocationId user = f.Import(kB, {kPeer, AllocationId{6}}, k2M, MemoryTag::kUser);
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  f.Ok(PhaseBegun{PhaseKind::kPauseReleaseOwn});
  for (const PlannedPhase& phase : PlanResume(f.state).phases) {
    for (const Step& step : phase.steps) EXPECT_NE(step.allocation, user) << ToText(step);
  }
  EXPECT_EQ(Steps(PlanResume(f.state)), 6U) << "unmap, release, import, map and set access of " << ToText(nccl) << ", verify";
}

TEST(Plan, what_stands_in_for_lost_memory_lies_on_a_device_that_the_process_uses) {
  Folding f;
  f.Allocate(kA, k2M, 1);
  f.Ok(PeerConnected{kPeer, "host", 7, 0, 1});
  const AllocationId orphan = f.Import(kB, {kPeer, AllocationId{5}});
  f.Ok(AccessSet{kB, k2M, {{{LocationType::kDevice, 1}, 3}, {{LocationType::kDevice, 2}, 3}}, {}});
  f.Pause();
  f.Ok(PeerLost{kPeer, kPeerDied});
  const PlannedPhase import = Phase(PlanResume(f.state), PhaseKind::kResumeImport);
  ASSERT_FALSE(import.steps.empty());
  EXPECT_EQ(import.steps[0].kind, StepKind::kCreate);
  EXPECT_EQ(import.steps[0].allocation, orphan);
  EXPECT_EQ(import.steps[0].device, DeviceOrdinal{1}) << "not device 0, where it would open a context";
}

TEST(Plan, an_allocation_that_is_mapped_twice_comes_back_at_both_places) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Place(id, kB, k2M, 1);
  f.Pause();
  const Plan resume = PlanResume(f.state);
  EXPECT_EQ(Phase(resume, PhaseKind::kResumeCreateOwn).steps.size(), 6U);
  f.Resume();
}

TEST(Plan, contents_without_a_mapping_are_saved_all_the_same) {
  Folding f;
  AllocationProperties properties;
  properties.location = {LocationType::kDevice, 0};
  f.Ok(AllocationCreated{AllocationId{1}, k2M, properties, 0, {}, {}, {}});
  const PlannedPhase save = Phase(PlanPause(f.state), PhaseKind::kPauseSave);
  ASSERT_EQ(save.steps.size(), 1U);
  ASSERT_EQ(save.copies.size(), 1U);
  ASSERT_EQ(save.copies[0].size(), 1U);
  EXPECT_EQ(save.copies[0][0].address, Address{});
  f.Pause();
  f.Resume();
}

// Stops a plan after every number of steps and takes the opposite one from there: the undo of a half-done cycle.
TEST(Plan, every_half_done_cycle_can_be_undone_and_done_again) {
  Folding f;
  f.Allocate(kA);
  f.Import(kB, {kPeer, AllocationId{5}});
  f.Place(AllocationId{1}, kC, k2M, 1);
  for (const CycleKind kind : {CycleKind::kPause, CycleKind::kResume}) {
    const bool pause = kind == CycleKind::kPause;
    const Plan plan = pause ? PlanPause(f.state) : PlanResume(f.state);
    for (std::size_t stop = 0; stop <= Steps(plan); ++stop) {
      Folding half = f;
      const std::uint64_t cycle = pause ? half.state.cycles + 1 : half.state.cycles;
      half.Ok(CycleBegun{kind, cycle, {}});
      std::size_t done = 0;
      for (const auto& phase : plan.phases) {
        half.Ok(PhaseBegun{phase.phase});
        for (const Step& step : phase.steps) {
          if (done == stop) break;
          half.Ok(StepBegun{step});
          half.Ok(StepDone{step});
          ++done;
        }
        if (done == stop) break;
      }
      half.Run(pause ? PlanResume(half.state) : PlanPause(half.state));
      half.Ok(CycleFailed{kind, cycle, true, "test"});
      EXPECT_EQ(half.state.lifecycle, pause ? Lifecycle::kRunning : Lifecycle::kPaused);
      if (pause) half.Pause();
      half.Resume();
      ASSERT_FALSE(HasFatalFailure());
    }
    if (pause) f.Pause();
  }
}

TEST(Plan, contents_saved_by_an_undone_pause_are_not_trusted_by_the_next) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  const PlannedPhase save = Phase(PlanPause(f.state), PhaseKind::kPauseSave);
  for (const Step& step : save.copies.at(0)) {
    f.Ok(StepBegun{step});
    f.Ok(StepDone{step});
  }
  EXPECT_TRUE(f.state.allocations.at(id).saved);
  f.Ok(CycleFailed{CycleKind::kPause, 1, true, "test"});
  EXPECT_FALSE(f.state.allocations.at(id).saved);
  EXPECT_EQ(Phase(PlanPause(f.state), PhaseKind::kPauseSave).steps.size(), 1U);
}

TEST(Plan, own_memory_is_never_released_unsaved) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  const Step unmap{StepKind::kUnmap, id, kA, k2M, {}}, release{StepKind::kReleaseOwn, id, {}, k2M, {}};
  f.Ok(StepBegun{unmap});
  f.Ok(StepDone{unmap});
  f.Ok(StepBegun{release});
  f.Refused(StepDone{release}, "not saved");
}

TEST(Plan, a_resume_after_one_that_could_not_be_undone_imports_everything_again) {
  Folding f;
  f.Allocate(kA);
  const AllocationId import = f.Import(kB, {kPeer, AllocationId{5}});
  f.Pause();
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
  f.Run(PlanResume(f.state));
  f.Ok(CycleFailed{CycleKind::kResume, 1, false, "the driver took nothing back"});
  // Meanwhile the owner has given its memory back.
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
  const auto first = Phase(PlanResume(f.state), PhaseKind::kResumeCreateOwn).steps;
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first[0].kind, StepKind::kUnmap);
  EXPECT_EQ(first[1], (Step{StepKind::kReleaseImport, import, {}, k2M, DeviceOrdinal{1}}));
  f.Run(PlanResume(f.state));
  f.Ok(CycleDone{CycleKind::kResume, 1, 1});
}

TEST(Plan, undoing_a_pause_imports_again_what_its_owner_may_have_released) {
  Folding f;
  f.Import(kB, {kPeer, AllocationId{5}});
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  f.Ok(PhaseBegun{PhaseKind::kPauseArrive});
  EXPECT_EQ(Steps(PlanResume(f.state)), 1U);  // verify: nobody has released anything
  f.Ok(PhaseBegun{PhaseKind::kPauseSave});    // it may have passed for others
  EXPECT_EQ(Phase(PlanResume(f.state), PhaseKind::kResumeCreateOwn).steps.size(), 2U);
  f.Run(PlanResume(f.state));
  f.Ok(CycleFailed{CycleKind::kPause, 1, true, "rank 2 failed"});
}

TEST(Plan, a_pause_that_follows_one_that_could_not_be_undone_imports_again_from_the_beginning) {
  Folding f;
  f.Import(kB, {kPeer, AllocationId{5}});
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  f.Ok(CycleFailed{CycleKind::kPause, 1, false, "the driver took nothing back"});
  f.Ok(CycleBegun{CycleKind::kPause, 2, {}});
  f.Ok(PhaseBegun{PhaseKind::kPauseArrive});
  EXPECT_EQ(Phase(PlanResume(f.state), PhaseKind::kResumeCreateOwn).steps.size(), 2U) << "an unmap and a release";
}

TEST(Plan, contents_are_read_where_all_of_an_allocation_is_mapped) {
  Folding f;
  const AllocationId id{1};
  f.Ok(AllocationCreated{id, 4 * kMiB, OnDevice(0), 0, {}, {}, {}});
  f.Place(id, kA, k2M, 0);  // its first half
  const auto saved_from = [&] { return Phase(PlanPause(f.state), PhaseKind::kPauseReleaseOwn).steps.at(0); };
  EXPECT_EQ(saved_from(), (Step{StepKind::kSave, id, {}, 4 * kMiB, DeviceOrdinal{0}})) << "nowhere";
  f.Place(id, kB, 4 * kMiB, 0);
  EXPECT_EQ(saved_from().address, kB);
  f.state.mappings.at(kB).accessible = false;  // an undo that failed got as far as mapping it
  EXPECT_EQ(saved_from().address, Address{});
}

TEST(Plan, a_resume_needs_memory_for_what_is_not_there) {
  Folding f;
  f.Allocate(kA);
  f.Allocate(kB, 4 * kMiB);
  f.Ok(Registered{kB, 4 * kMiB, "dma-buf"});  // stays
  f.Pause();
  EXPECT_EQ(Phase(PlanResume(f.state), PhaseKind::kResumeArrive).steps.at(0).bytes, k2M);
}

TEST(Plan, what_a_lost_owner_shared_is_made_anew_and_can_be_freed) {
  Folding f;
  f.Ok(PeerConnected{kPeer, "host", 2, 0, 1});
  f.Allocate(kA);
  const AllocationId orphan = f.Import(kB, {kPeer, AllocationId{5}});
  f.Pause();
  f.Ok(PeerLost{kPeer, "died"});
  EXPECT_TRUE(f.state.Orphaned(f.state.allocations.at(orphan)));
  const Plan resume = PlanResume(f.state);
  const auto steps = Phase(resume, PhaseKind::kResumeImport).steps;
  // On the device that has access, and not on the one that the owner called by that number.
  EXPECT_EQ(steps[0], (Step{StepKind::kCreate, orphan, {}, k2M, DeviceOrdinal{0}}));
  EXPECT_EQ(Phase(resume, PhaseKind::kResumeArrive).steps.at(0).bytes, 2 * k2M);  // its own, and a piece that stands in
  f.Resume();
  f.Pause();  // not its contents, but its memory takes part in all that follows
  EXPECT_FALSE(f.state.allocations.at(orphan).resident);
  f.Resume();
  f.Ok(Unmapped{kB, k2M});
  f.Ok(AllocationReleased{orphan});
  EXPECT_FALSE(f.state.allocations.contains(orphan));
}

TEST(Plan, only_a_lost_owners_memory_is_made_by_somebody_else) {
  Folding f;
  f.Ok(PeerConnected{kPeer, "host", 2, 0, 1});
  const AllocationId import = f.Import(kB, {kPeer, AllocationId{5}});
  f.Pause();
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
  const Step create{StepKind::kCreate, import, {}, k2M, DeviceOrdinal{0}};
  f.Ok(StepBegun{create});
  f.Refused(StepDone{create}, "it is imported");
}

// ---- the schedule of copies and imports
// --------------------------------------------------------------------------------------

// The kinds of a phase's steps, with the bytes of those that begin copies: "create map set-access begin(256 MiB)".
std::string Outline(const PlannedPhase& phase) {
  std::string outline;
  for (const Step& step : phase.steps) {
    if (!outline.empty()) outline += ", ";
    outline += ToText(step.kind);
    if (step.kind == StepKind::kBeginRestore || step.kind == StepKind::kScan)
      outline += " " + FormatBytes(step.bytes) + " on " + std::to_string(step.device.value);
  }
  return outline;
}

Address At(std::size_t i) { return kA + i * (Bytes{1} << 32); }

TEST(Plan, contents_begin_to_come_back_as_soon_as_256_mib_can_be_reached) {
  Folding f;
  for (std::size_t i = 0; i < 3; ++i) f.Allocate(At(i), 128 * kMiB);
  f.Pause();
  const PlannedPhase own = Phase(PlanResume(f.state), PhaseKind::kResumeCreateOwn);
  EXPECT_EQ(Outline(own),
            "create, map, set access, create, map, set access, begin restore 256 MiB on 0, "
            "create, map, set access, begin restore 128 MiB on 0");
  ASSERT_EQ(own.copies.size(), 2U);
  EXPECT_EQ(own.copies[0], (std::vector{Step{StepKind::kRestore, AllocationId{1}, At(0), 128 * kMiB, {}},
                                        Step{StepKind::kRestore, AllocationId{2}, At(1), 128 * kMiB, {}}}));
  EXPECT_EQ(own.copies[1], (std::vector{Step{StepKind::kRestore, AllocationId{3}, At(2), 128 * kMiB, {}}}));
  const PlannedPhase import = Phase(PlanResume(f.state), PhaseKind::kResumeImport);
  EXPECT_EQ(Outline(import), "restore, restore, restore");  // each waits for its own copies
  EXPECT_TRUE(import.copies.empty());
}

TEST(Plan, copies_of_several_devices_begin_device_by_device) {
  Folding f;
  f.Allocate(At(0), k2M, 1);
  f.Allocate(At(1), k2M, 0);
  f.Allocate(At(2), k2M, 1);
  EXPECT_EQ(Outline(Phase(PlanPause(f.state), PhaseKind::kPauseSave)), "find contents 2 MiB on 0, find contents 4 MiB on 1");
  f.Pause();
  const PlannedPhase own = Phase(PlanResume(f.state), PhaseKind::kResumeCreateOwn);
  ASSERT_EQ(own.copies.size(), 2U);
  EXPECT_EQ(own.steps.back(), (Step{StepKind::kBeginRestore, {}, {}, 2 * k2M, DeviceOrdinal{1}}));
  EXPECT_EQ(own.copies[1][1].allocation, AllocationId{3});
}

TEST(Plan, memory_that_only_a_mapping_for_the_copy_reaches_is_copied_back_after_all_that_is_mapped) {
  Folding f;
  AllocationProperties properties;
  properties.location = {LocationType::kDevice, 0};
  f.Ok(AllocationCreated{AllocationId{1}, k2M, properties, 0, {}, {}, {}});
  f.Allocate(At(1));
  f.Import(At(2), {kPeer, AllocationId{5}});
  f.Pause();
  const Plan plan = PlanResume(f.state);
  const PlannedPhase own = Phase(plan, PhaseKind::kResumeCreateOwn), import = Phase(plan, PhaseKind::kResumeImport);
  ASSERT_EQ(own.copies.size(), 1U);
  EXPECT_EQ(own.copies[0], (std::vector{Step{StepKind::kRestore, AllocationId{2}, At(1), k2M, {}}}));
  EXPECT_EQ(Outline(import), "begin restore 2 MiB on 0, import, map, set access, restore, restore");
  ASSERT_EQ(import.copies.size(), 1U);
  EXPECT_EQ(import.copies[0], (std::vector{Step{StepKind::kRestore, AllocationId{1}, {}, k2M, {}}}));
}

TEST(Plan, memory_that_stands_in_is_cleared_before_copies_of_the_import_phase_begin) {
  Folding f;
  f.Ok(PeerConnected{kPeer, "host", 2, 0, 1});
  AllocationProperties properties;
  properties.location = {LocationType::kDevice, 0};
  f.Ok(AllocationCreated{AllocationId{1}, k2M, properties, 0, {}, {}, {}});
  f.Import(At(1), {SessionId{0x77}, AllocationId{6}});
  f.Import(At(2), {kPeer, AllocationId{5}});
  f.Pause();
  f.Ok(PeerLost{kPeer, "died"});
  EXPECT_EQ(Outline(Phase(PlanResume(f.state), PhaseKind::kResumeImport)),
            "create, map, set access, begin restore 2 MiB on 0, import, map, set access, restore");
}

TEST(Plan, owners_take_turns_from_the_one_after_this_session_on_and_batches_grow) {
  Folding f;  // session 0x51
  std::vector<AllocationId> low, high;
  for (std::uint64_t i = 0; i < 20; ++i) {
    low.push_back(f.Import(At(2 * i), {SessionId{0x10}, AllocationId{i + 1}}));
    high.push_back(f.Import(At(2 * i + 1), {SessionId{0x99}, AllocationId{i + 1}}));
  }
  f.Pause();
  const PlannedPhase import = Phase(PlanResume(f.state), PhaseKind::kResumeImport);
  std::vector<std::pair<SessionId, std::size_t>> batches;
  std::vector<AllocationId> in_batches, in_steps;
  for (const ImportBatch& batch : import.imports) {
    batches.emplace_back(batch.owner, batch.imports.size());
    in_batches.insert(in_batches.end(), batch.imports.begin(), batch.imports.end());
  }
  for (const Step& step : import.steps) {
    if (step.kind == StepKind::kImport) in_steps.push_back(step.allocation);
  }
  // 6, 12 and then 24 steps; three an import.
  EXPECT_EQ(batches, (std::vector<std::pair<SessionId, std::size_t>>{{SessionId{0x99}, 2},
                                                                     {SessionId{0x10}, 2},
                                                                     {SessionId{0x99}, 4},
                                                                     {SessionId{0x10}, 4},
                                                                     {SessionId{0x99}, 8},
                                                                     {SessionId{0x10}, 8},
                                                                     {SessionId{0x99}, 6},
                                                                     {SessionId{0x10}, 6}}));
  EXPECT_EQ(in_batches, in_steps);
  ASSERT_EQ(in_steps.size(), 40U);
  EXPECT_EQ(in_steps[0], high[0]);
  EXPECT_EQ(in_steps[2], low[0]);
}

TEST(Plan, a_resume_that_is_planned_again_does_not_begin_copies_in_the_phase_that_is_over) {
  Folding f;
  f.Allocate(At(0));
  f.Pause();
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
  const PlannedPhase own = Phase(PlanResume(f.state), PhaseKind::kResumeCreateOwn);
  for (const Step& step : own.steps) {
    f.Ok(StepBegun{step});
    f.Ok(StepDone{step});
  }
  const Plan again = PlanResume(f.state);
  EXPECT_TRUE(Phase(again, PhaseKind::kResumeCreateOwn).steps.empty());
  EXPECT_EQ(Outline(Phase(again, PhaseKind::kResumeImport)), "begin restore 2 MiB on 0, restore");
}

}  // namespace
}  // namespace amem::testing
