// Pools: memory of the program with pauses and resumes of its own, whatever NCCL's do meanwhile.
#include <deque>
#include <random>

#include "folding.h"

namespace amem::testing {
namespace {

std::vector<Step> StepsOf(const Plan& plan, StepKind kind) {
  std::vector<Step> found;
  for (const PlannedPhase& phase : plan.phases) {
    for (const Step& step : phase.steps) {
      if (step.kind == kind) found.push_back(step);
    }
  }
  return found;
}

// A snapshot of `state` leads to the same state.
void ExpectSnapshot(const State& state) {
  const auto snapshot = ToSnapshotEvents(state);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
  State again;
  for (const EventBody& body : *snapshot) ASSERT_TRUE(Apply(again, Event{{}, 0, 0, body}).ok()) << ToText(body);
  EXPECT_EQ(again, state);
  EXPECT_EQ(Digest(again), Digest(state));
}

TEST(Pools, a_pause_releases_the_chunks_of_that_pool_only) {
  Folding f;
  const AllocationId nccl = f.Allocate(kA);
  const PoolId weights = f.Open("weights"), cache = f.Open("kv_cache");
  const AllocationId first = f.AddChunk(weights, kB), other = f.AddChunk(cache, kC);
  f.Pause(weights);
  EXPECT_FALSE(f.state.allocations.at(first).resident);
  EXPECT_TRUE(f.state.allocations.at(first).saved);
  EXPECT_TRUE(f.state.allocations.at(nccl).resident);
  EXPECT_TRUE(f.state.allocations.at(other).resident);
  EXPECT_EQ(f.state.lifecycle, Lifecycle::kRunning);
  EXPECT_EQ(f.state.LifecycleOf(weights), Lifecycle::kPaused);
  EXPECT_EQ(f.state.LifecycleOf(cache), Lifecycle::kRunning);
  f.Resume(weights);
  EXPECT_TRUE(f.state.allocations.at(first).resident);
  EXPECT_EQ(f.state.pools.at(weights).cycles, 1U);
  EXPECT_EQ(f.state.cycles, 0U);
}

TEST(Pools, a_pause_of_nccl_leaves_them_running_or_paused_as_they_are) {
  Folding f;
  const AllocationId nccl = f.Allocate(kA);
  const PoolId weights = f.Open("weights"), cache = f.Open("kv_cache", PoolPolicy::kDiscard);
  const AllocationId first = f.AddChunk(weights, kB, k2M, 1), other = f.AddChunk(cache, kC, k2M, 2);
  f.Pause(cache);
  const Plan pause = PlanPause(f.state);
  EXPECT_EQ(StepsOf(pause, StepKind::kQuiesce).size(), 1U) << "the devices of pools are none of NCCL's business";
  f.Pause();
  EXPECT_FALSE(f.state.allocations.at(nccl).resident);
  EXPECT_TRUE(f.state.allocations.at(first).resident);
  const auto needed = StepsOf(PlanResume(f.state), StepKind::kCheckMemory);
  ASSERT_EQ(needed.size(), 1U);
  EXPECT_EQ(needed[0].bytes, k2M);
  f.Resume();
  EXPECT_FALSE(f.state.allocations.at(other).resident);
  EXPECT_EQ(f.state.LifecycleOf(cache), Lifecycle::kPaused);
}

TEST(Pools, a_resume_asks_each_device_for_room_for_all_its_chunks) {
  Folding f;
  const PoolId weights = f.Open("weights");
  f.AddChunk(weights, kA, k2M, 0);
  f.AddChunk(weights, kB, k2M, 1);
  f.AddChunk(weights, kC, 2 * k2M, 0);
  f.Pause(weights);
  const auto needed = StepsOf(PlanResume(f.state, weights), StepKind::kCheckMemory);
  ASSERT_EQ(needed.size(), 2U);
  EXPECT_EQ(std::pair(needed[0].device, needed[0].bytes), std::pair(DeviceOrdinal{0}, 3 * k2M));
  EXPECT_EQ(std::pair(needed[1].device, needed[1].bytes), std::pair(DeviceOrdinal{1}, k2M));
}

TEST(Pools, that_a_pause_keeps_contents_ends_with_its_resume) {
  Folding f;
  const PoolId cache = f.Open("kv_cache", PoolPolicy::kDiscard);
  f.AddChunk(cache, kA);
  f.Ok(CycleBegun{.kind = CycleKind::kPause, .cycle = 1, .pool = cache, .keeps = true});
  f.Run(PlanPause(f.state, cache), cache);
  f.Ok(CycleDone{CycleKind::kPause, 1, 1, cache});
  EXPECT_TRUE(f.state.pools.at(cache).keeps);
  f.Resume(cache);
  EXPECT_FALSE(f.state.pools.at(cache).keeps);
}

TEST(Pools, the_policy_discard_saves_and_restores_nothing) {
  Folding f;
  const PoolId cache = f.Open("kv_cache", PoolPolicy::kDiscard);
  const AllocationId chunk = f.AddChunk(cache, kA);
  const Plan pause = PlanPause(f.state, cache);
  EXPECT_TRUE(StepsOf(pause, StepKind::kScan).empty());
  EXPECT_TRUE(StepsOf(pause, StepKind::kSave).empty());
  EXPECT_EQ(StepsOf(pause, StepKind::kReleaseOwn).size(), 1U);
  f.Pause(cache);
  EXPECT_FALSE(f.state.allocations.at(chunk).saved);
  const Plan resume = PlanResume(f.state, cache);
  EXPECT_TRUE(StepsOf(resume, StepKind::kBeginRestore).empty());
  EXPECT_TRUE(StepsOf(resume, StepKind::kRestore).empty());
  EXPECT_EQ(StepsOf(resume, StepKind::kSetAccess).size(), 1U);
  f.Resume(cache);
  EXPECT_TRUE(f.state.mappings.at(kA).accessible);
}

TEST(Pools, a_pause_waits_for_the_devices_of_its_chunks_only) {
  Folding f;
  f.Allocate(kA, k2M, 0);
  const PoolId weights = f.Open("weights");
  f.AddChunk(weights, kB, k2M, 3);
  const auto quiesce = StepsOf(PlanPause(f.state, weights), StepKind::kQuiesce);
  ASSERT_EQ(quiesce.size(), 1U);
  EXPECT_EQ(quiesce[0].device, DeviceOrdinal{3});
}

TEST(Pools, a_chunk_that_a_card_or_a_multicast_object_holds_stays) {
  Folding f;
  const PoolId weights = f.Open("weights");
  const AllocationId registered = f.AddChunk(weights, kB), bound = f.AddChunk(weights, kC);
  f.Ok(Registered{kB, k2M, "ibv_reg_mr"});
  const AllocationId object{f.state.next_allocation};
  f.Ok(MulticastCreated{object, k2M, 2, 1, 0, {}, MemoryTag::kMulticastReleased});
  f.Ok(MulticastDeviceAdded{object, DeviceOrdinal{0}});
  f.Ok(MulticastBound{object, 0, bound, 0, k2M, {}});
  EXPECT_EQ(WhyKept(f.state.allocations.at(registered)), KeepReason::kRegistered);
  EXPECT_EQ(WhyKept(f.state.allocations.at(bound)), KeepReason::kMulticast) << "also where NCCL's pause would unbind it";
  f.Pause(weights);
  EXPECT_EQ(MeasurePools(f.state).at(weights).own_resident, 2 * k2M);
  f.Pause();  // unbinds the chunk, which stays
  f.Resume();
  f.Resume(weights);
}

TEST(Pools, a_chunk_that_was_imported_leaves_and_comes_back_with_its_tag) {
  Folding f;
  f.Ok(PeerConnected{kPeer, "host", 7, 0, 1});
  const PoolId weights = f.Open("weights");
  const AllocationId lent = f.AddChunk(weights, kA), imported{f.state.next_allocation};
  f.Ok(Exported{lent, 1});
  f.Ok(ReferenceAdded{lent, kPeer, AllocationId{3}});
  f.Ok(Imported{imported, {kPeer, AllocationId{9}}, k2M, OnDevice(0), 1, {}, {}, {}, MemoryTag::kUser, {}, weights});
  f.Ok(RangeReserved{kB, k2M, 0, {}, 0, {}, {}});
  f.Ok(Mapped{kB, k2M, 0, imported, 0});
  EXPECT_TRUE(StepsOf(PlanPause(f.state), StepKind::kReleaseImport).empty()) << "NCCL's pause leaves it";
  f.Pause(weights);
  EXPECT_FALSE(f.state.allocations.at(lent).resident);
  EXPECT_FALSE(f.state.allocations.at(imported).resident);
  EXPECT_EQ(MeasurePools(f.state).at(weights).own, k2M) << "the owner counts what is imported";
  const auto again = StepsOf(PlanResume(f.state, weights), StepKind::kImport);
  ASSERT_EQ(again.size(), 1U);
  EXPECT_EQ(again[0].allocation, imported);
  f.Resume(weights);
  EXPECT_TRUE(f.state.mappings.at(kB).present);
}

TEST(Pools, a_pool_that_a_peers_memory_came_with_gets_its_policy_from_the_program) {
  Folding f;
  const PoolId cache = f.Open("cache");
  f.Ok(PoolOpened{cache, "cache", PoolPolicy::kDiscard});
  EXPECT_EQ(f.state.pools.at(cache).policy, PoolPolicy::kDiscard);
  f.Refused(PoolOpened{cache, "other", PoolPolicy::kDiscard}, "that id is in use");
  const AllocationId chunk = f.AddChunk(cache, kA);
  f.Ok(PoolOpened{cache, "cache", PoolPolicy::kDiscard});  // as in journals of earlier versions; Pools::Open refuses it
  f.Ok(PoolAllocated{kA, 512, DeviceOrdinal{0}, chunk, 0});
  f.Refused(PoolOpened{cache, "cache", PoolPolicy::kPreserve}, "its policy cannot change");
}

TEST(Pools, memory_is_made_while_nccl_is_paused_but_not_while_the_pool_is) {
  Folding f;
  f.Allocate(kA);
  const PoolId weights = f.Open("weights");
  f.Pause();
  const AllocationId chunk = f.AddChunk(weights, kB);
  f.Ok(PoolAllocated{kB, 512, DeviceOrdinal{0}, chunk, 0});
  f.Pause(weights);
  f.Resume();
  f.Refused(AllocationCreated{AllocationId{3}, k2M, OnDevice(0), 0, {}, {}, {}, MemoryTag::kUser, {}, weights},
            "pool weights is paused");
  f.Refused(RangeReserved{kC, k2M, 0, {}, 0, {}, {}, weights}, "pool weights is paused");
  f.Refused(PoolAllocated{kB + 512, 512, DeviceOrdinal{0}, chunk, 512}, "pool weights is paused");
  f.Allocate(kC);  // NCCL's
}

TEST(Pools, memory_is_freed_while_the_pool_is_paused_and_its_contents_are_forgotten) {
  Folding f;
  const PoolId weights = f.Open("weights");
  const AllocationId chunk = f.AddChunk(weights, kA);
  f.Ok(PoolAllocated{kA, 512, DeviceOrdinal{0}, chunk, 0});
  f.Ok(PoolAllocated{kA + 512, 512, DeviceOrdinal{0}, chunk, 512});
  f.Pause(weights);
  f.Ok(PoolFreed{kA});
  f.Refused(Unmapped{kA, k2M}, "amem_alloc's part at 0x7f0000000200 was not freed");
  f.Ok(PoolFreed{kA + 512});
  f.DropChunk(chunk, kA);
  EXPECT_TRUE(f.state.allocations.empty());
  EXPECT_TRUE(StepsOf(PlanResume(f.state, weights), StepKind::kCreate).empty());
  f.Resume(weights);
}

TEST(Pools, what_cannot_be_is_refused) {
  Folding f;
  const PoolId weights = f.Open("weights");
  const AllocationId chunk = f.AddChunk(weights, kA), nccl = f.Allocate(kB);
  f.Refused(PoolOpened{weights, "other"}, "that id is in use");
  f.Refused(PoolOpened{PoolId{}, "other"}, "zero is no id");
  f.Refused(PoolOpened{PoolId{2}, "weights"}, "that tag is pool 1's");
  f.Refused(PoolOpened{PoolId{2}, "nccl"}, "that is no tag for a pool");
  f.Refused(PoolAllocated{kB, 512, DeviceOrdinal{0}, nccl, 0}, "allocation 2 is no chunk of a pool");
  f.Refused(PoolAllocated{kA, 512, DeviceOrdinal{1}, chunk, 0}, "allocation 1 is on device 0");
  f.Refused(PoolAllocated{kA, 512, DeviceOrdinal{0}, chunk, 512}, "that is no part of allocation 1 from offset 512 B");
  f.Refused(PoolAllocated{kA + kMiB, k2M, DeviceOrdinal{0}, chunk, kMiB}, "that is no part of allocation 1");
  f.Refused(PoolAllocated{kA + kMiB, kMiB + 1, DeviceOrdinal{0}, chunk, kMiB}, "that is no part of allocation 1");
  f.Refused(PoolAllocated{kB, 512, DeviceOrdinal{0}, chunk, 0}, "that is no part of allocation 1");
  f.Refused(PoolAllocated{kC, 512, DeviceOrdinal{0}, chunk, 0}, "that is no part of allocation 1");
  f.Refused(PoolAllocated{kA, 0, DeviceOrdinal{0}, chunk, 0}, "its size is zero");
  f.Ok(PoolAllocated{kA + 512, 512, DeviceOrdinal{0}, chunk, 512});
  f.Refused(PoolAllocated{kA, 1024, DeviceOrdinal{0}, chunk, 0}, "it overlaps the part at 0x7f0000000200");
  f.Refused(PoolAllocated{kA + 768, 512, DeviceOrdinal{0}, chunk, 768}, "it overlaps the part at 0x7f0000000200");
  f.Ok(PoolAllocated{kA + kMiB, kMiB, DeviceOrdinal{0}, chunk, kMiB});
  f.Refused(PoolFreed{kA}, "nothing is allocated there");
  f.Refused(PoolFreed{kB}, "nothing is allocated there");
  f.Refused(CycleBegun{CycleKind::kPause, 1, {}, {}, PoolId{7}}, "pool 7 does not exist");
  f.Refused(CycleBegun{CycleKind::kResume, 1, {}, {}, weights}, "pool weights is running");
  f.Refused(StepBegun{{StepKind::kSave, chunk}, weights}, "no pause or resume is under way, pool weights is running");
  f.Refused(PhaseBegun{PhaseKind::kPauseSave, weights}, "no pause or resume is under way");
}

TEST(Pools, a_step_works_on_the_memory_of_its_own_cycle_only) {
  Folding f;
  const PoolId weights = f.Open("weights");
  const AllocationId chunk = f.AddChunk(weights, kA), nccl = f.Allocate(kB);
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}, {}, weights});
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  f.Ok(StepBegun{{StepKind::kSave, nccl}, weights});
  f.Refused(StepDone{{StepKind::kSave, nccl}, weights}, "it belongs to no pool");
  f.Ok(StepBegun{{StepKind::kUnmap, chunk, kA}});
  f.Refused(StepDone{{StepKind::kUnmap, chunk, kA}}, "it is a chunk of pool 1");
  f.Refused(StepDone{{StepKind::kSave, nccl}}, "that step was not begun");
}

TEST(Pools, a_pool_that_preserves_is_not_released_before_it_is_saved) {
  Folding f;
  const PoolId weights = f.Open("weights");
  const AllocationId chunk = f.AddChunk(weights, kA);
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}, {}, weights});
  f.Ok(StepBegun{{StepKind::kUnmap, chunk, kA}, weights});
  f.Ok(StepDone{{StepKind::kUnmap, chunk, kA}, weights});
  f.Ok(StepBegun{{StepKind::kReleaseOwn, chunk}, weights});
  f.Refused(StepDone{{StepKind::kReleaseOwn, chunk}, weights}, "its contents were not saved");
}

TEST(Pools, are_measured_apart_from_nccl) {
  Folding f;
  f.Allocate(kA);
  const PoolId weights = f.Open("weights"), empty = f.Open("gradients");
  const AllocationId chunk = f.AddChunk(weights, kB, 2 * k2M, 1);
  f.Ok(PoolAllocated{kB, kMiB, DeviceOrdinal{1}, chunk, 0});
  const Holdings all = Measure(f.state);
  EXPECT_EQ(all.own_device, k2M);
  EXPECT_EQ(all.user, 0U);
  EXPECT_TRUE(all.kept.empty());
  EXPECT_EQ(all.pools, 2 * k2M);
  EXPECT_EQ(MeasureCommunicators(f.state).at(CommunicatorId{}).own, k2M);
  EXPECT_EQ(MeasureSavable(f.state, {}), (Savable{.nccl = k2M}));
  EXPECT_EQ(MeasureSavable(f.state, weights), (Savable{.program = 2 * k2M}));
  EXPECT_EQ(MeasureSavable(f.state, empty), Savable{});
  const PoolHoldings expected{2 * k2M, 2 * k2M, kMiB, {}, {}, 1, 1, {DeviceOrdinal{1}}};
  EXPECT_EQ(MeasurePools(f.state).at(weights), expected);
  EXPECT_EQ(MeasurePools(f.state).at(empty), PoolHoldings{});
  f.Pause(weights);
  EXPECT_EQ(Measure(f.state).pools_resident, 0U);
  EXPECT_EQ(MeasurePools(f.state).at(weights).own_resident, 0U);
}

TEST(Pools, a_state_without_pools_keeps_its_digest) {
  Folding f, g;
  f.Allocate(kA);
  g.Allocate(kA);
  EXPECT_EQ(Digest(f.state), Digest(g.state));
  g.state.pools[PoolId{1}].tag = "weights";
  EXPECT_NE(Digest(f.state), Digest(g.state));
  State h = g.state;
  h.pools[PoolId{1}].lifecycle = Lifecycle::kPaused;
  EXPECT_NE(Digest(h), Digest(g.state));
  h = g.state;
  h.allocations.at(AllocationId{1}).pool = PoolId{1};
  EXPECT_NE(Digest(h), Digest(g.state));
}

TEST(Pools, a_failed_resume_leaves_the_pool_paused_with_its_reason) {
  Folding f;
  const PoolId weights = f.Open("weights");
  f.AddChunk(weights, kA);
  f.AddChunk(weights, kB);
  f.Pause(weights);
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}, {}, weights});
  f.Ok(PhaseBegun{PhaseKind::kResumeCreateOwn, weights});
  const auto creates = StepsOf(PlanResume(f.state, weights), StepKind::kCreate);
  f.Ok(StepBegun{creates[0], weights});
  f.Ok(StepDone{creates[0], weights});
  f.Ok(StepBegun{creates[1], weights});
  ExpectSnapshot(f.state);
  f.Ok(StepFailed{creates[1], Code::kOutOfMemory, 2, "out of memory", {}, weights});
  f.Run(PlanPause(f.state, weights), weights);
  f.Ok(CycleFailed{CycleKind::kResume, 1, true, "out of memory", Code::kOutOfMemory, 2, {}, weights});
  EXPECT_EQ(f.state.LifecycleOf(weights), Lifecycle::kPaused);
  EXPECT_EQ(f.state.pools.at(weights).cycle.failure, "out of memory");
  EXPECT_TRUE(f.state.cycle.failure.empty());
  ExpectSnapshot(f.state);
  f.Resume(weights);
  ExpectSnapshot(f.state);
}

// ---- cycles of NCCL and of pools, interleaved ------------------------------------------------------------------------------

// One of several that pause and resume, each at its own pace: NCCL, or a pool. Some cycles fail at some step and are undone.
class Actor {
 public:
  Actor(PoolId pool, std::mt19937& random) : pool_(pool), random_(random) {}

  void Advance(Folding& f) {
    if (todo_.empty()) Refill(f.state);
    const EventBody next = std::move(todo_.front());
    todo_.pop_front();
    f.Ok(next);
  }
  [[nodiscard]] bool Rests(const State& state) const {
    return todo_.empty() && state.LifecycleOf(pool_) == Lifecycle::kRunning;
  }

 private:
  void Refill(const State& state) {
    const std::uint64_t cycles = pool_ ? state.pools.at(pool_).cycles : state.cycles;
    switch (state.LifecycleOf(pool_)) {
      case Lifecycle::kRunning:
        todo_.emplace_back(CycleBegun{CycleKind::kPause, cycles + 1, {}, {}, pool_});
        break;
      case Lifecycle::kPaused:
        todo_.emplace_back(CycleBegun{CycleKind::kResume, cycles, {}, {}, pool_});
        break;
      case Lifecycle::kPausing:
        Carry(state, CycleKind::kPause, cycles);
        break;
      default:
        Carry(state, CycleKind::kResume, cycles);
        break;
    }
  }
  void Carry(const State& state, CycleKind kind, std::uint64_t cycle) {
    const bool undo = std::exchange(failed_, false);
    const bool pause = (kind == CycleKind::kPause) != undo;
    const Plan plan = pause ? PlanPause(state, pool_) : PlanResume(state, pool_);
    for (const PlannedPhase& phase : plan.phases) {
      todo_.emplace_back(PhaseBegun{phase.phase, pool_});
      for (const Step& step : phase.steps) {
        todo_.emplace_back(StepBegun{step, pool_});
        failed_ = !undo && random_() % 40 == 0;
        if (failed_) todo_.emplace_back(StepFailed{step, Code::kDriver, 999, "so the seed wants it", {}, pool_});
        if (failed_) return;
        todo_.emplace_back(StepDone{step, pool_});
      }
    }
    if (undo) todo_.emplace_back(CycleFailed{kind, cycle, true, "so the seed wants it", Code::kDriver, 999, {}, pool_});
    if (!undo) todo_.emplace_back(CycleDone{kind, cycle, 1, pool_});
  }

  PoolId pool_;
  std::mt19937& random_;
  std::deque<EventBody> todo_;
  bool failed_ = false;
};

// What must be as before once all have paused and resumed some times.
State WithoutHistory(State state) {
  state.last = {};
  state.totals = {};
  state.cycles = 0;
  state.cycle = {};
  for (auto& [id, pool] : state.pools) {
    pool.cycles = 0;
    pool.cycle = {};
  }
  return state;
}

void Interleave(unsigned seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  Folding f;
  f.Allocate(kA);
  f.Import(kB, {kPeer, AllocationId{5}});
  f.Allocate(kC, k2M, 0, MemoryTag::kUser);
  const PoolId weights = f.Open("weights"), cache = f.Open("kv_cache", PoolPolicy::kDiscard);
  Address at{0x7f1000000000};
  for (const PoolId pool : {weights, cache, weights}) {
    const AllocationId chunk = f.AddChunk(pool, at, k2M, static_cast<int>(random() % 2));
    f.Ok(PoolAllocated{at, kMiB, DeviceOrdinal{f.state.allocations.at(chunk).properties.location.id}, chunk, 0});
    at = at + k2M;
  }
  const State before = WithoutHistory(f.state);
  std::vector<Actor> actors;
  for (const PoolId pool : {PoolId{}, weights, cache}) actors.emplace_back(pool, random);
  for (int i = 0; i < 600 && !::testing::Test::HasFatalFailure(); ++i) {
    Actor& next = actors[random() % actors.size()];
    if (&next == actors.data() && next.Rests(f.state) && random() % 16 != 0) continue;
    next.Advance(f);  // checks the invariants and the snapshot
  }
  for (Actor& actor : actors) {
    while (!actor.Rests(f.state) && !::testing::Test::HasFatalFailure()) actor.Advance(f);
  }
  EXPECT_EQ(WithoutHistory(f.state), before);
}

#ifdef AMEM_BY_NIGHT
constexpr unsigned kOrders = 40;
#else
constexpr unsigned kOrders = 5;
#endif

TEST(Pools, cycles_of_nccl_and_of_pools_interleave_in_any_order) {
  for (unsigned seed = 1; seed <= kOrders; ++seed) Interleave(seed);
}

}  // namespace
}  // namespace amem::testing
