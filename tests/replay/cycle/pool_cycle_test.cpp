// The cycle of one pool: every call of the driver belongs to a step in the journal that names the pool.
#include <set>

#include "replay/cycle/coordinator.h"
#include "tests/replay/cycle/cycle_fixture.h"

namespace amem {
namespace {

using test::k2M, test::kMiB;

constexpr PoolId kPool{1};

class PoolCycleTest : public test::CycleFixture {
 protected:
  Deadlines deadlines_;
  void Open(PoolPolicy policy) {
    Record(PoolOpened{kPool, "weights", policy});
    cycle_ = *Coordinator::OfTag({ledger_, *sim_, peers_, pinned_, deadlines_}, gate_, kPool, "weights");
  }
  // A chunk of which all is given out.
  std::byte* Chunk(Bytes bytes = 2 * kMiB) {
    AllocationProperties properties;
    properties.handle_types = 1;
    properties.location = {LocationType::kDevice, 0};
    const DriverHandle handle = *sim_->Create(bytes, properties, 0);
    const AllocationId id{ledger_.state().next_allocation};
    const Address address = *sim_->Reserve(bytes, 0, {}, 0);
    const std::vector<AccessDescriptor> access{{{LocationType::kDevice, 0}, 3}};
    EXPECT_TRUE(sim_->Map(address, bytes, 0, handle, 0).ok());
    EXPECT_TRUE(sim_->SetAccess(address, bytes, access).ok());
    Record(AllocationCreated{id, bytes, properties, 0, handle, {}, {}, MemoryTag::kUser, {}, kPool});
    {
      const LedgerLock lock(ledger_);
      ledger_.SetHandle(id, handle);
    }
    Record(RangeReserved{address, bytes, 0, {}, 0, {}, {}, kPool});
    Record(Mapped{address, bytes, 0, id, 0});
    Record(AccessSet{address, bytes, access, {}});
    Record(PoolAllocated{address, bytes, DeviceOrdinal{0}, id, 0});
    return reinterpret_cast<std::byte*>(address.value);
  }
  CallGate gate_;
  PinnedSupply pinned_{*sim_, {}};
  std::unique_ptr<Coordinator> cycle_;
};

TEST_F(PoolCycleTest, every_driver_call_belongs_to_an_open_step_of_the_pool) {
  Open(PoolPolicy::kPreserve);
  std::memset(Chunk(), 0x5a, k2M);
  std::memset(Memory(Create()), 0x77, k2M);  // NCCL's, which stays
  std::uint64_t outside = 0, inside = 0;
  const std::set<std::string_view> ahead{"AllocatePinned", "OpenLane"};  // host memory belongs to no step
  sim_->SetHook([&](std::string_view call, std::uint64_t) {
    if (!ahead.contains(call)) ++(ledger_.state().pools.at(kPool).cycle.open_step ? inside : outside);
    return 0;
  });
  const Bytes before = InUse();
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kPause).ok());
  EXPECT_EQ(InUse(), before - k2M);
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kResume).ok());
  EXPECT_EQ(InUse(), before);
  EXPECT_GT(inside, 8U);
  EXPECT_EQ(outside, 0U);
  for (const StepBegun& step : All<StepBegun>()) EXPECT_EQ(step.pool, kPool);
  EXPECT_EQ(All<CycleDone>().size(), 2U);
  EXPECT_EQ(ledger_.state().lifecycle, Lifecycle::kRunning);
  EXPECT_TRUE(All<VoteCast>().empty());
}

TEST_F(PoolCycleTest, a_chunk_that_is_imported_while_its_pause_begins_refuses_it) {
  Open(PoolPolicy::kPreserve);
  std::byte* const chunk = Chunk();
  std::memset(chunk, 0x5a, k2M);
  const AllocationId id{ledger_.state().next_allocation - 1};
  bool imported = false;
  sim_->SetHook([&](std::string_view call, std::uint64_t) {
    if (call != "Synchronize" || std::exchange(imported, true)) return 0;
    Record(PeerConnected{test::kOther, "host", 3, 0, 2});
    Record(Exported{id, 1});
    Record(ReferenceAdded{id, test::kOther, AllocationId{4}});
    return 0;
  });
  peers_.await_loss = [](SessionId) { return false; };  // it lives
  const Bytes before = InUse();
  const Status paused = cycle_->Cycle(CycleKind::kPause);
  ASSERT_TRUE(imported);
  EXPECT_EQ(paused.code(), Code::kRefused);
  EXPECT_NE(paused.message().find("call amem_pause of tag weights again on all ranks"), std::string::npos) << paused.message();
  EXPECT_EQ(InUse(), before) << "the other process still uses it";
  EXPECT_TRUE(ledger_.state().broken.empty()) << ledger_.state().broken;
  Record(ReferenceDropped{id, test::kOther, AllocationId{4}});
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kPause).ok());
  EXPECT_EQ(InUse(), before - k2M);
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kResume).ok());
  EXPECT_EQ(chunk[0], std::byte{0x5a});
}

TEST_F(PoolCycleTest, copies_are_queued_before_the_resume_is_done) {
  Open(PoolPolicy::kPreserve);
  std::byte* const chunk = Chunk();
  std::memset(chunk, 0x5a, k2M);
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kPause).ok());
  bool called = false;
  CycleHooks hooks;
  hooks.copies_queued = [&] {
    called = true;
    EXPECT_EQ(sim_->QueuedCopies(DeviceOrdinal{0}), 1U);
    EXPECT_EQ(chunk[0], std::byte{0});
  };
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kResume, {}, hooks).ok());
  EXPECT_TRUE(called);
  EXPECT_EQ(chunk[k2M - 1], std::byte{0x5a});
}

TEST_F(PoolCycleTest, an_undo_that_fails_is_tried_again_by_the_next_call) {
  Open(PoolPolicy::kPreserve);
  std::byte* const first = Chunk();
  std::byte* const second = Chunk();
  std::memset(first, 1, k2M);
  std::memset(second, 2, k2M);
  // The second chunk cannot be unmapped, and the first cannot be made again.
  ASSERT_TRUE(sim_->FailNext("Unmap", 2, cuda::kUnknown).ok());
  ASSERT_TRUE(sim_->FailNext("Create", 1, cuda::kOutOfMemory).ok());
  const Status failed = cycle_->Cycle(CycleKind::kPause);
  EXPECT_EQ(failed.code(), Code::kBroken);
  EXPECT_NE(failed.message().find("undoing it failed too"), std::string::npos) << failed.message();
  EXPECT_EQ(ledger_.state().LifecycleOf(kPool), Lifecycle::kPaused);
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kResume).ok());
  EXPECT_EQ(ledger_.state().LifecycleOf(kPool), Lifecycle::kRunning);
  EXPECT_EQ(first[5], std::byte{1});
  EXPECT_EQ(second[5], std::byte{2});
}

TEST_F(PoolCycleTest, a_pause_that_keeps_saves_what_the_policy_would_discard_and_the_next_one_does_not) {
  Open(PoolPolicy::kDiscard);
  std::byte* const chunk = Chunk();
  std::memset(chunk, 0x5a, k2M);
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kPause, {.keeps = true}).ok());
  EXPECT_TRUE(ledger_.state().pools.at(kPool).keeps);
  EXPECT_TRUE(ToSnapshotEvents(ledger_.state()).ok()) << "which folds into the same state, or fails";
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kResume).ok());
  EXPECT_EQ(chunk[k2M - 1], std::byte{0x5a});
  EXPECT_EQ(cycle_->Contents().kept_bytes, 0U) << "no later pause compares with a copy";

  ASSERT_TRUE(sim_->FailNext("Unmap", 1, cuda::kUnknown).ok());
  ASSERT_FALSE(cycle_->Cycle(CycleKind::kPause, {.keeps = true}).ok());
  EXPECT_FALSE(ledger_.state().pools.at(kPool).keeps) << "it was undone";
  EXPECT_EQ(chunk[0], std::byte{0x5a});

  const std::uint64_t copies = sim_->Calls("CopyToHost");
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kPause).ok());
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kResume).ok());
  EXPECT_EQ(sim_->Calls("CopyToHost"), copies);
  EXPECT_EQ(chunk[0], std::byte{0});
}

TEST_F(PoolCycleTest, a_device_that_is_not_idle_in_time_refuses_the_pause) {
  deadlines_ = Deadlines(std::chrono::milliseconds(20));
  Open(PoolPolicy::kDiscard);
  Chunk();
  sim_->SetWork(Simulator::Work::kOfProgram);
  const Status refused = cycle_->Cycle(CycleKind::kPause);
  EXPECT_EQ(refused.code(), Code::kRefused);
  EXPECT_NE(refused.message().find("pause of tag weights"), std::string::npos) << refused.message();
  const auto moment = cycle_->MomentOf(nullptr);
  ASSERT_TRUE(moment.ok());
  EXPECT_TRUE(cycle_->Cycle(CycleKind::kPause, {.after = moment->get()}).ok())
      << "one stream is waited for, and not the device";
  sim_->SetWork(Simulator::Work::kNone);
  EXPECT_TRUE(cycle_->Cycle(CycleKind::kResume).ok());
}

// Nothing is copied that would come after what the stream holds, and the driver unmaps memory while kernels work on it.
TEST_F(PoolCycleTest, memory_goes_after_the_stream_that_its_pause_follows_also_where_nothing_is_copied) {
  Open(PoolPolicy::kDiscard);
  Chunk();
  const auto moment = cycle_->MomentOf(nullptr);
  ASSERT_TRUE(moment.ok());
  std::vector<std::string> calls;
  sim_->SetHook([&](std::string_view call, std::uint64_t) {
    if (call == "Follow" || call == "FinishCopies" || call == "Unmap") calls.emplace_back(call);
    return 0;
  });
  ASSERT_TRUE(cycle_->Cycle(CycleKind::kPause, {.after = moment->get()}).ok());
  ASSERT_GE(calls.size(), 3U);
  calls.resize(3);
  EXPECT_EQ(calls, (std::vector<std::string>{"Follow", "FinishCopies", "Unmap"}));
  EXPECT_TRUE(cycle_->Cycle(CycleKind::kResume).ok());
}

// The copies of a pool and of NCCL's memory are queued and finished apart.
TEST_F(PoolCycleTest, lanes_do_not_wait_for_each_other) {
  const AllocationId nccl = Create();
  std::memset(Memory(nccl), 7, k2M);
  auto lane = *sim_->OpenLane();
  auto here = *sim_->AllocatePinned(k2M), there = *lane->AllocatePinned(k2M);
  const DeviceOrdinal device{0};
  ASSERT_TRUE(sim_->CopyToHost(device, here->data(), PlaceOf(nccl), k2M).ok());
  ASSERT_TRUE(lane->CopyToHost(device, there->data(), PlaceOf(nccl), k2M).ok());
  EXPECT_EQ(sim_->QueuedCopies(device), 2U);
  ASSERT_TRUE(lane->FinishCopies(device, In(std::chrono::minutes(1))).ok());
  EXPECT_EQ(sim_->QueuedCopies(device), 1U);
  EXPECT_EQ(there->data()[0], std::byte{7});
  ASSERT_TRUE(sim_->FinishCopies(device, In(std::chrono::minutes(1))).ok());
  EXPECT_EQ(here->data()[0], std::byte{7});
}

}  // namespace
}  // namespace amem
