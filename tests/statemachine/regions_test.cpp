// Registrations with network cards that a pause undoes and a resume does again. After each event the harness checks the
// invariants, and that a snapshot says the same.
#include <random>

#include "folding.h"

namespace amem::testing {
namespace {

constexpr RegionId kRegion{1}, kOtherRegion{2};

Registered Renewable(RegionId id, Address address, Bytes bytes = k2M) {
  return {address, bytes, "ibv_reg_mr", {}, id, "mlx5_0", 3, 7, 1};
}
std::vector<StepKind> KindsOn(const Plan& plan, AllocationId id) {
  std::vector<StepKind> kinds;
  for (const PlannedPhase& phase : plan.phases)
    for (const Step& step : phase.steps)
      if (step.allocation == id) kinds.push_back(step.kind);
  return kinds;
}
std::size_t CountOf(const Plan& plan, StepKind kind) {
  std::size_t count = 0;
  for (const PlannedPhase& phase : plan.phases)
    for (const Step& step : phase.steps) count += step.kind == kind ? 1 : 0;
  return count;
}

class RegionsTest : public ::testing::Test {
 protected:
  [[nodiscard]] const Allocation& Of(AllocationId id) const { return f.state.allocations.at(id); }
  void Do(const Step& step) {
    f.Ok(StepBegun{step});
    f.Ok(StepDone{step});
  }
  // Runs a plan up to its first step of that kind, which is returned and not run.
  Step RunUpTo(const Plan& plan, StepKind kind) {
    for (const PlannedPhase& phase : plan.phases) {
      f.Ok(PhaseBegun{phase.phase});
      for (const Step& step : phase.steps) {
        if (step.kind == kind) return step;
        Do(step);
      }
    }
    ADD_FAILURE() << "no step " << ToText(kind);
    return {};
  }
  // As an executor does: steps that would take what must stay are left out.
  void RunAsFarAsItGoes(const Plan& plan) {
    for (const PlannedPhase& phase : plan.phases) {
      f.Ok(PhaseBegun{phase.phase});
      for (const Step& step : phase.steps) {
        const bool takes = step.kind == StepKind::kSave || step.kind == StepKind::kUnmap ||
                           step.kind == StepKind::kReleaseOwn || step.kind == StepKind::kDeregister;
        if (takes && WhyKept(Of(step.allocation)) != KeepReason::kNone) continue;
        Do(step);
      }
    }
  }

  Folding f;
};

TEST_F(RegionsTest, what_each_card_holds_is_measured_also_in_a_pause) {
  using Regions = CardHoldings::Regions;
  f.Allocate(kA, 4 * kMiB);
  f.Ok(Renewable(kRegion, kA));
  f.Ok(Renewable(kOtherRegion, kA + k2M));
  f.Ok(Registered{.address = kA, .bytes = kMiB, .how = "ibv_reg_mr"});
  f.Ok(Registered{.address = kA + k2M, .bytes = kMiB, .how = "dma-buf", .card = "mlx5_1", .pins = "a window"});
  f.Ok(Registered{.address = kA + k2M, .bytes = kMiB, .how = "dma-buf", .library = "libother.so"});
  auto cards = MeasureCards(f.state);
  EXPECT_EQ(cards.size(), 3U);
  EXPECT_EQ(cards["mlx5_0"].renewable, (Regions{2, 4 * kMiB}));
  EXPECT_EQ(cards["mlx5_0"].renewable_now, 4 * kMiB);
  EXPECT_EQ(cards["mlx5_0"].pinned, Regions{});
  EXPECT_EQ(cards["mlx5_1"].by_why, (std::map<std::string, Regions>{{"a window", {1, kMiB}}}));
  EXPECT_EQ(cards[""].by_why, (std::map<std::string, Regions>{{"ibv_reg_mr", {1, kMiB}}})) << "nobody asked whether it pins";
  f.Ok(Deregistered{kA, kMiB, {}, {}});
  f.Ok(Deregistered{kA + k2M, kMiB, {}, {}});
  f.Ok(Deregistered{kA + k2M, kMiB, "libother.so", {}});

  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  const Step drain = RunUpTo(PlanPause(f.state), StepKind::kDrain);
  f.Ok(StepBegun{drain});
  f.Ok(RegionKept{kOtherRegion, "queue pair 7 has 1 send under way"});
  f.Ok(StepDone{drain});
  cards = MeasureCards(f.state);
  EXPECT_EQ(cards["mlx5_0"].renewable, (Regions{1, k2M}));
  EXPECT_EQ(cards["mlx5_0"].pinned, (Regions{1, k2M}));
  EXPECT_EQ(cards["mlx5_0"].by_why.begin()->first, "queue pair 7 has 1 send under way");
}

TEST_F(RegionsTest, renewable_memory_leaves_and_comes_back_with_its_registrations) {
  const AllocationId own = f.Allocate(kA, 4 * kMiB);
  f.Ok(Renewable(kRegion, kA));
  f.Ok(Renewable(kOtherRegion, kA + k2M));
  EXPECT_EQ(Of(own).renewable, 2U);
  EXPECT_EQ(Of(own).pinned, 0U);
  EXPECT_EQ(WhyKept(Of(own)), KeepReason::kNone);
  const State before = f.state;
  f.Pause();
  EXPECT_FALSE(Of(own).resident);
  EXPECT_FALSE(f.state.regions.at(kRegion).present);
  f.Resume();
  EXPECT_EQ(f.state.regions, before.regions);
  EXPECT_EQ(f.state.allocations, before.allocations);
}

TEST_F(RegionsTest, a_pause_drains_first_and_deregisters_before_it_unmaps_and_a_resume_registers_what_has_access) {
  using K = StepKind;
  const AllocationId own = f.Allocate(kA);
  f.Ok(Renewable(kRegion, kA));
  const Plan pause = PlanPause(f.state);
  EXPECT_EQ(KindsOn(pause, own), (std::vector{K::kSave, K::kDeregister, K::kUnmap, K::kReleaseOwn}));
  ASSERT_FALSE(pause.phases.at(1).steps.empty());
  EXPECT_EQ(pause.phases.at(1).phase, PhaseKind::kPauseSave) << "after the vote that says that all devices are idle";
  EXPECT_EQ(pause.phases.at(1).steps.front().kind, K::kDrain) << "before contents are looked at";
  f.Pause();
  EXPECT_EQ(KindsOn(PlanResume(f.state), own), (std::vector{K::kCreate, K::kMap, K::kSetAccess, K::kRegister, K::kRestore}));
}

TEST_F(RegionsTest, a_part_of_a_slab_is_of_the_slab) {
  f.state = Whole();
  f.Ok(Renewable(kRegion, kSlabAddress + 4096, 8192));
  EXPECT_EQ(f.state.regions.at(kRegion).allocation, kSlab);
  f.Pause();
  f.Resume();
}

TEST_F(RegionsTest, without_registrations_plans_are_as_they_were) {
  f.Allocate(kA);
  f.Ok(Registered{kA, k2M, "ibv_reg_mr"});
  f.Allocate(kB);
  const Plan pause = PlanPause(f.state);
  for (const StepKind kind : {StepKind::kDrain, StepKind::kDeregister, StepKind::kRegister})
    EXPECT_EQ(CountOf(pause, kind), 0U);
}

TEST_F(RegionsTest, what_the_network_keeps_stays_this_time_and_leaves_the_next) {
  const AllocationId busy = f.Allocate(kA), quiet = f.Allocate(kB);
  f.Ok(Renewable(kRegion, kA));
  f.Ok(Renewable(kOtherRegion, kB));
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  const Plan plan = PlanPause(f.state);
  RunUpTo(plan, StepKind::kDrain);
  Do({StepKind::kDrain, {}, {}, 0, {}});
  f.Ok(RegionKept{kRegion, "queue pair 7 has 2 sends under way"});
  EXPECT_EQ(WhyKept(Of(busy)), KeepReason::kRegistered);
  RunAsFarAsItGoes(PlanPause(f.state));
  f.Ok(CycleDone{CycleKind::kPause, 1, 1});
  EXPECT_TRUE(Of(busy).resident);
  EXPECT_TRUE(f.state.regions.at(kRegion).present);
  EXPECT_FALSE(Of(quiet).resident);
  f.Resume();
  EXPECT_EQ(WhyKept(Of(busy)), KeepReason::kNone);
  f.Pause();
  EXPECT_FALSE(Of(busy).resident);
}

// Of two registrations of one allocation the card lets go of the first, and refuses the second.
TEST_F(RegionsTest, a_card_that_refuses_keeps_the_memory_and_the_resume_mends_what_was_undone) {
  const AllocationId own = f.Allocate(kA, 4 * kMiB);
  f.Ok(Renewable(kRegion, kA));
  f.Ok(Renewable(kOtherRegion, kA + k2M));
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  const Plan plan = PlanPause(f.state);
  Do(RunUpTo(plan, StepKind::kDeregister));
  EXPECT_FALSE(f.state.regions.at(kRegion).present);
  const Step second{StepKind::kDeregister, own, kA + k2M, k2M, DeviceOrdinal{0}, 0, kOtherRegion};
  f.Ok(StepBegun{second});
  f.Ok(RegionKept{kOtherRegion, "errno 16"});
  f.Ok(StepDone{second});
  EXPECT_TRUE(f.state.regions.at(kOtherRegion).present);
  f.Ok(CycleDone{CycleKind::kPause, 1, 1});
  EXPECT_TRUE(Of(own).resident);
  EXPECT_FALSE(Of(own).saved) << "its contents are where they belong";
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
  EXPECT_EQ(CountOf(PlanResume(f.state), StepKind::kRegister), 1U);
  f.Run(PlanResume(f.state));
  f.Ok(CycleDone{CycleKind::kResume, 1, 1});
  EXPECT_TRUE(f.state.regions.at(kRegion).present);
  EXPECT_EQ(Of(own).renewable, 2U);
}

TEST_F(RegionsTest, a_failed_registration_leaves_all_paused_and_the_undo_deregisters_what_was_registered) {
  const AllocationId first = f.Allocate(kA), second = f.Allocate(kB);
  f.Ok(Renewable(kRegion, kA));
  f.Ok(Renewable(kOtherRegion, kB));
  f.Pause();
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
  const Plan resume = PlanResume(f.state);
  Do(RunUpTo(resume, StepKind::kRegister));
  bool begun = false;
  for (const Step& step : resume.phases.at(1).steps) {
    if (step.allocation != second && !(begun && step.kind == StepKind::kBeginRestore)) continue;
    begun = true;
    f.Ok(StepBegun{step});
    if (step.kind == StepKind::kRegister) {
      f.Ok(StepFailed{step, Code::kDriver, 0, "errno 12"});
      break;
    }
    f.Ok(StepDone{step});
  }
  const Plan undo = PlanPause(f.state);
  EXPECT_EQ(CountOf(undo, StepKind::kDeregister), 1U);
  EXPECT_EQ(CountOf(undo, StepKind::kDrain), 0U) << "the cards are quiet since the pause";
  f.Refused(RegionKept{kRegion, "why"}, "no pause is under way, the session is resuming");
  f.Run(undo);
  f.Ok(CycleFailed{CycleKind::kResume, 1, true, "errno 12"});
  EXPECT_EQ(f.state.lifecycle, Lifecycle::kPaused);
  for (const AllocationId id : {first, second}) EXPECT_FALSE(Of(id).resident);
  f.Resume();
}

TEST_F(RegionsTest, a_pause_that_fails_registers_again) {
  f.Allocate(kA);
  f.Ok(Renewable(kRegion, kA));
  const State before = f.state;
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  RunUpTo(PlanPause(f.state), StepKind::kReleaseOwn);
  EXPECT_FALSE(f.state.regions.at(kRegion).present);
  f.Run(PlanResume(f.state));
  f.Ok(CycleFailed{CycleKind::kPause, 1, true, "a peer died"});
  EXPECT_EQ(f.state.regions, before.regions);
}

// A communicator that is destroyed while paused.
TEST_F(RegionsTest, nccl_may_deregister_and_free_while_paused) {
  const AllocationId own = f.Allocate(kA);
  f.Ok(Renewable(kRegion, kA));
  f.Pause();
  f.Ok(Deregistered{kA, k2M, {}, kRegion});
  EXPECT_TRUE(f.state.regions.empty());
  EXPECT_EQ(Of(own).renewable, 0U);
  f.Free(own, kA);
  f.Resume();
}

TEST_F(RegionsTest, memory_that_is_unmapped_under_a_registration_is_pinned_by_it) {
  const AllocationId own = f.Allocate(kA);
  f.Ok(Renewable(kRegion, kA));
  f.Ok(AllocationRetained{own, kA});
  // What a snapshot cannot say: the registration of memory that is mapped nowhere.
  ASSERT_TRUE(f.Try(Unmapped{kA, k2M}).ok());
  EXPECT_TRUE(f.state.regions.empty());
  EXPECT_EQ(Of(own).pinned, 1U);
  EXPECT_EQ(Of(own).renewable, 0U);
  f.Ok(Deregistered{kA, k2M, {}, kRegion});
  EXPECT_EQ(Of(own).pinned, 0U);
}

TEST_F(RegionsTest, while_paused_memory_may_be_unmapped_before_it_is_deregistered) {
  const AllocationId own = f.Allocate(kA);
  f.Ok(Renewable(kRegion, kA));
  f.Pause();
  f.Free(own, kA);
  EXPECT_TRUE(f.state.regions.empty()) << "no card has it";
  f.Resume();
}

TEST_F(RegionsTest, what_cannot_be_done_again_is_refused) {
  f.state = Whole();
  const PoolId pool = f.Open("weights");
  constexpr Address kChunk{0x7f0010000000};
  f.AddChunk(pool, kChunk);
  f.Refused(Renewable(kRegion, kB), "allocation 2 is no device memory of NCCL's own");
  f.Refused(Renewable(kRegion, kChunk), "is no device memory of NCCL's own");
  f.Refused(Renewable(kRegion, kA + kMiB), "it does not lie in one mapping");
  f.Refused(Renewable(kRegion, Address{0x1000}), "it does not lie in one mapping");
  Registered others = Renewable(kRegion, kA);
  others.library = "libother.so";
  f.Refused(others, "only NCCL's own");
  f.Ok(Renewable(kRegion, kA));
  f.Refused(Renewable(kRegion, kA), "that id is in use");
  f.Refused(RegionKept{kRegion, "why"}, "no pause or resume is under way");
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  f.Refused(RegionKept{kOtherRegion, "why"}, "registration 2 does not exist");
  f.Refused(RegionKept{kRegion, ""}, "it gives no reason");
  const Step deregister{StepKind::kDeregister, kOwn, kA, k2M, {}, 0, kRegion};
  const Step again{StepKind::kRegister, kOwn, kA, k2M, {}, 0, kRegion}, unmap{StepKind::kUnmap, kOwn, kA, k2M, {}};
  const auto refused = [&](Step step, const std::string& why) {
    f.Ok(StepBegun{step});
    f.Refused(StepDone{step}, why);
    f.Ok(StepFailed{step, Code::kDriver, 0, "for the test"});
  };
  refused(unmap, "a network card holds it by registration 1");
  refused(again, "the card has it already");
  refused({StepKind::kDeregister, kImported, kA, k2M, {}, 0, kRegion}, "it is of allocation 1");
  refused({StepKind::kDeregister, kOwn, kA, k2M, {}, 0, kOtherRegion}, "registration 2 does not exist");
  Do(deregister);
  f.Refused(RegionKept{kRegion, "why"}, "the card has let go of it");
  refused(deregister, "the card has let go of it already");
  Do(unmap);
  refused(again, "its memory is not mapped with access");
}

TEST_F(RegionsTest, a_pool_undoes_none) {
  const PoolId pool = f.Open("weights");
  f.Allocate(kA);
  f.Ok(Renewable(kRegion, kA));
  EXPECT_EQ(CountOf(PlanPause(f.state, pool), StepKind::kDrain), 0U);
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}, {}, pool});
  const Step step{StepKind::kDeregister, AllocationId{1}, kA, k2M, {}, 0, kRegion};
  f.Ok(StepBegun{step, pool});
  f.Refused(StepDone{step, pool}, "for a pool");
}

// Cycles that fail anywhere, cards that refuse anything: no card ever holds memory that is unmapped, a session that runs has
// all its registrations, and nothing is lost. The harness checks that after each event.
TEST_F(RegionsTest, at_random) {
  std::mt19937 random{7};
  const auto chance = [&](unsigned one_in) { return random() % one_in == 0; };
  std::uint64_t next = 0;
  std::vector<std::pair<AllocationId, Address>> memory;
  for (std::uint64_t i = 0; i < 4; ++i) {
    const Address address = kA + i * 8 * kMiB;
    memory.emplace_back(f.Allocate(address), address);
  }
  const auto run = [&](const Plan& plan, unsigned failures) {
    for (const PlannedPhase& phase : plan.phases) {
      f.Ok(PhaseBegun{phase.phase});
      for (const Step& step : phase.steps) {
        const bool own = step.allocation && WhyKept(Of(step.allocation)) != KeepReason::kNone;
        const bool takes = step.kind == StepKind::kSave || step.kind == StepKind::kUnmap ||
                           step.kind == StepKind::kReleaseOwn || step.kind == StepKind::kDeregister;
        if (takes && own) continue;
        f.Ok(StepBegun{step});
        if (failures != 0 && chance(failures)) return f.Ok(StepFailed{step, Code::kDriver, 0, "by chance"}), false;
        if (step.kind == StepKind::kDeregister && f.state.lifecycle == Lifecycle::kPausing && chance(4))
          f.Ok(RegionKept{step.region, "by chance"});
        f.Ok(StepDone{step});
        if (step.kind != StepKind::kDrain) continue;
        for (const auto& [id, region] : State(f.state).regions)
          if (region.present && chance(6)) f.Ok(RegionKept{id, "not quiet"});
      }
    }
    return true;
  };
  for (int round = 0; round < 20 && !HasFailure(); ++round) {
    for (const auto& [id, address] : memory)
      if (chance(2)) f.Ok(Renewable(RegionId{++next}, address + random() % 2 * kMiB, kMiB));
    const auto cycle = [&](CycleKind kind) {
      const std::uint64_t number = kind == CycleKind::kPause ? f.state.cycles + 1 : f.state.cycles;
      f.Ok(CycleBegun{kind, number, {}});
      const bool pause = kind == CycleKind::kPause;
      if (run(pause ? PlanPause(f.state) : PlanResume(f.state), 20)) return f.Ok(CycleDone{kind, number, 1});
      run(pause ? PlanResume(f.state) : PlanPause(f.state), 0);
      f.Ok(CycleFailed{kind, number, true, "by chance"});
    };
    cycle(CycleKind::kPause);
    for (const auto& [id, region] : State(f.state).regions)
      if (chance(3)) f.Ok(Deregistered{region.address, region.bytes, {}, id});
    while (f.state.lifecycle == Lifecycle::kPaused && !HasFailure()) cycle(CycleKind::kResume);
    for (const auto& [id, region] : f.state.regions) EXPECT_TRUE(region.present);
  }
  EXPECT_GT(next, 20U);
}

}  // namespace
}  // namespace amem::testing
