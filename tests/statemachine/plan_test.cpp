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
  ASSERT_EQ(own.size(), 3U);
  EXPECT_EQ(own[0].kind, StepKind::kCreate);
  EXPECT_EQ(own[1].kind, StepKind::kMap);
  EXPECT_EQ(own[2].kind, StepKind::kSetAccess);
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

TEST(Plan, an_allocation_that_is_mapped_twice_comes_back_at_both_places) {
  Folding f;
  const AllocationId id = f.Allocate(kA);
  f.Place(id, kB, k2M, 1);
  f.Pause();
  const Plan resume = PlanResume(f.state);
  EXPECT_EQ(Phase(resume, PhaseKind::kResumeCreateOwn).steps.size(), 5U);
  f.Resume();
}

TEST(Plan, contents_without_a_mapping_are_saved_all_the_same) {
  Folding f;
  AllocationProperties properties;
  properties.location = {LocationType::kDevice, 0};
  f.Ok(AllocationCreated{AllocationId{1}, k2M, properties, 0, {}, {}, {}});
  const auto save = Phase(PlanPause(f.state), PhaseKind::kPauseSave).steps;
  ASSERT_EQ(save.size(), 1U);
  EXPECT_EQ(save[0].address, Address{});
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
  for (const Step& step : ContentsToSave(f.state)) {
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

}  // namespace
}  // namespace amem::testing
