// The executor: every call of the driver belongs to a step that the journal shows, and whatever happens in the middle of a step
// leaves the session with what its state says.
#include "replay/cycle/executor.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <mutex>
#include <thread>

#include "tests/replay/cycle/cycle_fixture.h"
#include "tests/replay/cycle/lone_backup.h"
#include "tests/replay/cycle/plain_driver.h"

namespace amem {
namespace {

using test::k2M, test::kMiB, test::kOwner;

class ExecutorTest : public test::CycleFixture {
 protected:
  PlannedPhase Planned(CycleKind kind, PhaseKind phase) {
    const Plan plan = kind == CycleKind::kPause ? PlanPause(ledger_.state()) : PlanResume(ledger_.state());
    return *std::ranges::find(plan.phases, phase, &PlannedPhase::phase);
  }
  Status RunPhases(const Plan& plan) {
    for (const PlannedPhase& phase : plan.phases) {
      AMEM_TRY(executor_.Run(phase));
      Record(PhaseDecided{phase.phase, true, {}, {}});
    }
    return {};
  }
  Status Pause() {
    const std::uint64_t cycle = ledger_.state().cycles + 1;
    Record(CycleBegun{CycleKind::kPause, cycle, {}});
    AMEM_TRY(RunPhases(PlanPause(ledger_.state())));
    Record(CycleDone{CycleKind::kPause, cycle, 1});
    return {};
  }
  void BeginResume() { Record(CycleBegun{CycleKind::kResume, ledger_.state().cycles, {}}); }
  Status FinishResume() {
    AMEM_TRY(RunPhases(PlanResume(ledger_.state())));
    Record(CycleDone{CycleKind::kResume, ledger_.state().cycles, 1});
    backup_.ForgetAll();
    return {};
  }
  Status Resume() {
    BeginResume();
    return FinishResume();
  }

  test::LoneBackup backup_{*sim_};
  Executor executor_{ledger_, *sim_, peers_, backup_};
};

TEST_F(ExecutorTest, every_driver_call_of_a_pause_and_a_resume_belongs_to_an_open_step) {
  std::memset(Memory(Create()), 0x5a, k2M);
  Create(k2M, false);  // copied through a mapping that is made for it
  Import();
  std::map<std::string, std::vector<StepKind>> steps_of;
  std::uint64_t calls = 0;
  sim_->SetHook([&](std::string_view call, std::uint64_t) {
    ++calls;
    const auto& open = ledger_.state().cycle.open_step;
    if (open) {
      steps_of[std::string(call)].push_back(open->kind);
    } else {
      ADD_FAILURE() << call << " without an open step";
    }
    return 0;
  });
  ASSERT_TRUE(Pause().ok());
  ASSERT_TRUE(Resume().ok());
  EXPECT_GT(calls, 30U);
  for (const auto& [call, kind] : {std::pair("Gather", StepKind::kScan), std::pair("ClearAll", StepKind::kBeginRestore),
                                   std::pair("Scatter", StepKind::kBeginRestore)}) {
    EXPECT_FALSE(steps_of[call].empty()) << call;
    EXPECT_EQ(std::ranges::count(steps_of[call], kind), std::ssize(steps_of[call])) << call;
  }
  for (const StepKind kind : steps_of["FinishCopies"]) EXPECT_TRUE(kind == StepKind::kSave || kind == StepKind::kRestore);
}

// Notes what memory is asked for; the simulator knows no flags.
class NotingDriver final : public test::PlainDriver {
 public:
  using PlainDriver::PlainDriver;
  Result<DriverHandle> Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags) override {
    created.emplace_back(bytes, properties, flags);
    return sim_.Create(bytes, properties, 0);
  }
  std::vector<std::tuple<Bytes, AllocationProperties, std::uint64_t>> created;
};

TEST_F(ExecutorTest, a_phase_does_not_wait_for_ever_for_a_ledger_that_another_thread_holds) {
  Create();
  const Plan plan = PlanPause(ledger_.state());
  std::promise<void> holds, go_on;
  std::thread hangs([&] {
    const LedgerLock lock(ledger_);
    holds.set_value();
    go_on.get_future().wait_for(std::chrono::seconds(20));
  });
  holds.get_future().wait();
  const Deadline began = Now();
  executor_.BeginCycle(In(std::chrono::milliseconds(50)));
  const Status late = executor_.Run(plan.phases.front());
  EXPECT_LT(SinceThen(began), std::chrono::seconds(10));
  go_on.set_value();
  hangs.join();
  EXPECT_EQ(late.driver_result(), cuda::kTimeout);
  EXPECT_NE(late.message().find("a driver call of another thread has not returned"), std::string::npos) << late.message();
}

// The journal has one step after the other, also where the end of one could not be recorded in time.
TEST_F(ExecutorTest, a_step_that_ended_while_another_thread_held_the_ledger_has_failed_before_the_next_one_begins) {
  Create();
  Record(CycleBegun{CycleKind::kPause, 1, {}});
  const Plan plan = PlanPause(ledger_.state());
  std::promise<void> go_on;
  std::thread hangs;
  At("Synchronize", 1, [&] {
    std::promise<void> holds;
    hangs = std::thread([&] {
      const LedgerLock lock(ledger_);
      holds.set_value();
      go_on.get_future().wait();
    });
    holds.get_future().wait();
  });
  executor_.BeginCycle(In(std::chrono::milliseconds(50)));
  EXPECT_FALSE(executor_.Run(plan.phases.front()).ok());
  go_on.set_value();
  hangs.join();
  executor_.SetUntil(In(std::chrono::seconds(20)));
  EXPECT_TRUE(executor_.Run(plan.phases.front()).ok());
  const auto failed = All<StepFailed>();
  ASSERT_EQ(failed.size(), 1U);
  EXPECT_EQ(failed[0].step.kind, StepKind::kQuiesce);
}

TEST_F(ExecutorTest, memory_is_made_again_with_all_that_nccl_asked_for) {
  AllocationProperties properties;
  properties.handle_types = 1;
  properties.location = {LocationType::kDevice, 0};
  properties.gpu_direct_rdma = 1;
  const AllocationId id{ledger_.state().next_allocation};
  const DriverHandle handle = *sim_->Create(k2M, properties, 0);
  Record(AllocationCreated{id, k2M, properties, 7, handle, {}, {}});
  ledger_.SetHandle(id, handle);
  NotingDriver driver(*sim_);
  test::LoneBackup backup(driver);
  Executor executor(ledger_, driver, peers_, backup);
  const auto run = [&](const Plan& plan) {
    for (const PlannedPhase& phase : plan.phases) {
      EXPECT_EQ(executor.Run(phase), Status{});
      Record(PhaseDecided{phase.phase, true, {}, {}});
    }
  };
  Record(CycleBegun{CycleKind::kPause, 1, {}});
  run(PlanPause(ledger_.state()));
  Record(CycleDone{CycleKind::kPause, 1, 1});
  BeginResume();
  run(PlanResume(ledger_.state()));
  ASSERT_EQ(driver.created.size(), 1U);
  EXPECT_EQ(driver.created[0], std::tuple(k2M, properties, std::uint64_t{7}));
}

TEST_F(ExecutorTest, a_device_that_is_too_full_fails_the_resume_before_anything_is_made) {
  Create();
  ASSERT_TRUE(Pause().ok());
  AllocationProperties properties;
  properties.location = {LocationType::kDevice, 0};
  const DriverHandle hog = *owner_->Create(512 * kMiB, properties, 0);
  BeginResume();
  const Status full = FinishResume();
  EXPECT_EQ(full.code(), Code::kOutOfMemory) << full.message();
  EXPECT_NE(full.message().find("0 B free of 512 MiB, and 2 MiB must come back"), std::string::npos) << full.message();
  EXPECT_EQ(All<StepFailed>().at(0).step.kind, StepKind::kCheckMemory);
  EXPECT_TRUE(owner_->Release(hog).ok());
}

class CrowdedDriver final : public test::PlainDriver {
 public:
  using PlainDriver::PlainDriver;
  std::vector<MemoryHolder> MemoryHolders(DeviceOrdinal) override {
    return {{7, kMiB, "small"}, {::getpid(), 9 * kMiB, "this one"}, {8, 2 * kMiB, "large"}};
  }
};

TEST_F(ExecutorTest, the_journal_has_who_holds_a_device_that_is_too_full) {
  Create();
  ASSERT_TRUE(Pause().ok());
  BeginResume();
  CrowdedDriver driver(*sim_);
  Executor executor(ledger_, driver, peers_, backup_);
  const std::vector<MemoryHolder> others = {{8, 2 * kMiB, "large"}, {7, kMiB, "small"}};
  sim_->SetHook([](std::string_view name, std::uint64_t) { return name == "Create" ? cuda::kOutOfMemory : 0; });
  EXPECT_EQ(executor.Run(Planned(CycleKind::kResume, PhaseKind::kResumeCreateOwn)).code(), Code::kOutOfMemory);
  ASSERT_EQ(All<StepFailed>().size(), 1U);
  EXPECT_EQ(All<StepFailed>()[0].step.kind, StepKind::kCreate);
  EXPECT_EQ(All<StepFailed>()[0].holders, others);
  sim_->SetHook({});
  AllocationProperties properties;
  properties.location = {LocationType::kDevice, 0};
  const DriverHandle hog = *owner_->Create(512 * kMiB, properties, 0);
  EXPECT_EQ(executor.Run(Planned(CycleKind::kResume, PhaseKind::kResumeArrive)).code(), Code::kOutOfMemory);
  ASSERT_EQ(All<StepFailed>().size(), 2U);
  EXPECT_EQ(All<StepFailed>()[1].step.kind, StepKind::kCheckMemory);
  EXPECT_EQ(All<StepFailed>()[1].holders, others);
  EXPECT_TRUE(owner_->Release(hog).ok());
}

// No plan of AMem's is like this.
TEST_F(ExecutorTest, a_check_that_fails_in_a_step_fails_the_phase_and_breaks_the_session) {
  broken_ = true;
  std::memset(Memory(Create()), 0x5a, k2M);
  Record(CycleBegun{CycleKind::kPause, 1, {}});
  ASSERT_TRUE(executor_.Run(Planned(CycleKind::kPause, PhaseKind::kPauseArrive)).ok());
  Record(PhaseDecided{PhaseKind::kPauseArrive, true, {}, {}});
  PlannedPhase save = Planned(CycleKind::kPause, PhaseKind::kPauseSave);
  ASSERT_FALSE(save.copies.empty());
  save.copies.clear();
  const Status failed = executor_.Run(save);
  EXPECT_EQ(failed.code(), Code::kInvalid);
  EXPECT_NE(failed.message().find("check failed at executor.cpp:"), std::string::npos) << failed.message();
  EXPECT_NE(ledger_.state().broken.find("check failed at executor.cpp:"), std::string::npos) << ledger_.state().broken;
}

TEST_F(ExecutorTest, a_restore_is_done_when_its_copy_is_and_not_before) {
  const AllocationId id = Create();
  std::memset(Memory(id), 0x5a, k2M);
  ASSERT_TRUE(Pause().ok());
  BeginResume();
  bool looked = false;
  At("FinishCopies", 1, [&] {
    looked = true;
    ASSERT_TRUE(ledger_.state().cycle.open_step.has_value());
    EXPECT_EQ(ledger_.state().cycle.open_step->kind, StepKind::kRestore);
    EXPECT_EQ(ledger_.state().cycle.open_step->allocation, id);
    EXPECT_TRUE(ledger_.state().allocations.at(id).awaiting_restore);
    EXPECT_EQ(Memory(id)[0], std::byte{0});
  });
  ASSERT_TRUE(FinishResume().ok());
  EXPECT_TRUE(looked);
  EXPECT_EQ(Memory(id)[k2M - 1], std::byte{0x5a});
}

TEST_F(ExecutorTest, a_copy_that_fails_is_the_failure_of_its_restore_and_the_contents_can_be_restored_again) {
  const AllocationId id = Create();
  std::memset(Memory(id), 0x5a, k2M);
  ASSERT_TRUE(Pause().ok());
  BeginResume();
  ASSERT_TRUE(sim_->FailNext("FinishCopies", 1, cuda::kUnknown).ok());
  const Status failed = FinishResume();
  EXPECT_EQ(failed.driver_result(), cuda::kUnknown);
  EXPECT_EQ(failed.message().find("restore allocation 1"), 0U) << failed.message();
  ASSERT_EQ(All<StepFailed>().size(), 1U);
  EXPECT_EQ(All<StepFailed>()[0].step.kind, StepKind::kRestore);
  ASSERT_TRUE(FinishResume().ok());
  EXPECT_EQ(Memory(id)[0], std::byte{0x5a});
}

TEST_F(ExecutorTest, a_copy_back_that_cannot_begin_is_the_failure_of_the_step_that_begins_it) {
  Create();
  ASSERT_TRUE(Pause().ok());
  BeginResume();
  ASSERT_TRUE(sim_->FailNext("ClearAll", 1, cuda::kUnknown).ok());
  EXPECT_FALSE(FinishResume().ok());
  ASSERT_EQ(All<StepFailed>().size(), 1U);
  EXPECT_EQ(All<StepFailed>()[0].step, (Step{StepKind::kBeginRestore, {}, {}, k2M, DeviceOrdinal{0}}));
  EXPECT_TRUE(FinishResume().ok());
}

TEST_F(ExecutorTest, a_slab_without_parts_has_no_contents_and_comes_back) {
  const AllocationId slab = Create();
  Record(SlabOpened{slab, PlaceOf(slab), {}});
  ASSERT_TRUE(Pause().ok());
  EXPECT_EQ(InUse(), 0U);
  ASSERT_TRUE(Resume().ok());
  EXPECT_EQ(InUse(), k2M);
  EXPECT_EQ(sim_->Calls("ClearAll"), 0U);
}

// ---- an allocation that vanishes --------------------------------------------------------------------------------------------

class HeldByAPeer : public ExecutorTest {
 protected:
  // An allocation whose owner has let go of it, and that one peer has imported.
  AllocationId Make() {
    const AllocationId id = Create(k2M, false);
    Record(Exported{id, 1});
    Record(ReferenceAdded{id, kOwner, AllocationId{9}});
    Record(AllocationReleased{id});
    return id;
  }
  void Drop(AllocationId id) { Record(ReferenceDropped{id, kOwner, AllocationId{9}}); }
};

TEST_F(HeldByAPeer, its_new_memory_is_given_back_when_the_peer_lets_go_inside_the_create_step) {
  const AllocationId id = Make();
  ASSERT_TRUE(Pause().ok());
  BeginResume();
  At("Create", 1, [&] { Drop(id); });
  EXPECT_TRUE(FinishResume().ok());
  EXPECT_FALSE(ledger_.state().allocations.contains(id));
  EXPECT_EQ(InUse(), 0U);
  ASSERT_EQ(All<StepFailed>().size(), 1U);
  EXPECT_NE(All<StepFailed>()[0].message.find("dropped meanwhile by the last peer"), std::string::npos);
}

TEST_F(HeldByAPeer, memory_that_cannot_be_given_back_then_fails_the_phase) {
  const AllocationId id = Make();
  ASSERT_TRUE(Pause().ok());
  BeginResume();
  At("Create", 1, [&] {
    Drop(id);
    ASSERT_TRUE(sim_->FailNext("Release", 1, cuda::kUnknown).ok());
  });
  EXPECT_EQ(FinishResume().driver_result(), cuda::kUnknown);
  ASSERT_EQ(All<StepFailed>().size(), 1U);
  EXPECT_EQ(All<StepFailed>()[0].driver_result, cuda::kUnknown);
}

TEST_F(HeldByAPeer, the_steps_of_an_allocation_that_is_gone_are_passed_over) {
  const AllocationId id = Make();
  const AllocationId stays = Create();
  std::memset(Memory(stays), 0x11, k2M);
  ASSERT_TRUE(Pause().ok());
  BeginResume();
  At("Memory", 1, [&] { Drop(id); });  // in the first phase of a plan that still has steps for it
  EXPECT_TRUE(FinishResume().ok());
  EXPECT_TRUE(All<StepFailed>().empty());
  EXPECT_EQ(InUse(), k2M);
  EXPECT_EQ(Memory(stays)[0], std::byte{0x11});
}

TEST_F(HeldByAPeer, the_copies_end_with_the_phase_when_the_last_of_them_vanishes) {
  Create();
  const AllocationId id = Make();  // the last to be saved
  Record(CycleBegun{CycleKind::kPause, 1, {}});
  const Plan plan = PlanPause(ledger_.state());
  for (const PlannedPhase& phase : plan.phases) {
    if (phase.phase == PhaseKind::kPauseReleaseOwn) {
      ASSERT_TRUE(backup_.Queued());
      const DriverHandle handle = ledger_.HandleOf(id);
      Drop(id);
      ASSERT_TRUE(sim_->Release(handle).ok());  // as the session does
      ledger_.ForgetHandle(id);
    }
    ASSERT_TRUE(executor_.Run(phase).ok());
    Record(PhaseDecided{phase.phase, true, {}, {}});
    EXPECT_EQ(backup_.Queued(), phase.phase == PhaseKind::kPauseSave);
  }
  EXPECT_EQ(InUse(), 0U);
  EXPECT_TRUE(sim_->Snapshot().mappings.empty());  // of the mapping that was made for its copy, too
}

// ---- memory that stands in for a lost owner's
// ---------------------------------------------------------------------------------

TEST_F(ExecutorTest, memory_that_stands_in_is_cleared_of_what_its_last_user_left) {
  const AllocationId orphan = Import();
  ASSERT_TRUE(Pause().ok());
  Record(PeerLost{kOwner, kPeerDied});
  BeginResume();
  const Address place = PlaceOf(orphan);
  bool dirtied = false;
  // New memory of the simulator is zero, that of a GPU may be anything: it is written to before the executor gets to it.
  At("SetAccess", 1, [&] {
    sim_->SetHook({});
    const AccessDescriptor access{{LocationType::kDevice, 0}, 3};
    ASSERT_TRUE(sim_->SetAccess(place, k2M, std::span(&access, 1)).ok());
    std::memset(Memory(orphan), 0xff, k2M);
    dirtied = true;
  });
  ASSERT_TRUE(FinishResume().ok());
  ASSERT_TRUE(dirtied);
  for (Bytes i = 0; i < k2M; i += 4096) ASSERT_EQ(Memory(orphan)[i], std::byte{0}) << i;
}

TEST_F(ExecutorTest, a_piece_that_stands_in_and_cannot_be_mapped_everywhere_is_mapped_nowhere) {
  const AllocationId orphan = Import(96 * kMiB);  // three times a piece of 32 MiB
  ASSERT_TRUE(Pause().ok());
  Record(PeerLost{kOwner, kPeerDied});
  BeginResume();
  ASSERT_TRUE(sim_->FailNext("Map", 3, cuda::kUnknown).ok());
  EXPECT_EQ(FinishResume().driver_result(), cuda::kUnknown);
  EXPECT_TRUE(sim_->Snapshot().mappings.empty());
  ASSERT_TRUE(FinishResume().ok());
  EXPECT_EQ(sim_->Snapshot().mappings.size(), 3U);
  EXPECT_EQ(InUse(), 32 * kMiB);
  Memory(orphan)[0] = std::byte{7};
  EXPECT_EQ(Memory(orphan)[64 * kMiB], std::byte{7});  // the same memory
}

TEST_F(ExecutorTest, memory_of_one_size_that_stands_in_is_one_piece) {
  Import();
  Import();
  ASSERT_TRUE(Pause().ok());
  Record(PeerLost{kOwner, kPeerDied});
  ASSERT_TRUE(Resume().ok());
  EXPECT_EQ(InUse(), k2M);
}

TEST_F(ExecutorTest, a_piece_that_could_not_be_exported_once_is_shared_by_the_next_allocation) {
  Import();
  Import();
  ASSERT_TRUE(Pause().ok());
  Record(PeerLost{kOwner, kPeerDied});
  ASSERT_TRUE(sim_->FailNext("Export", 1, cuda::kUnknown).ok());
  ASSERT_TRUE(Resume().ok());
  EXPECT_EQ(InUse(), k2M);
}

// ---- imports
// -------------------------------------------------------------------------------------------------------------------

TEST_F(ExecutorTest, imports_are_asked_for_batch_by_batch_under_the_names_of_their_owner) {
  for (int i = 0; i < 7; ++i) Import();
  ASSERT_TRUE(Pause().ok());
  std::mutex mutex;
  std::map<AllocationId, std::vector<ShareRequest>> asked;  // by the first of each batch: they are asked for side by side
  peers_.reimport = [&](SessionId owner, const std::vector<ShareRequest>& requests) {
    EXPECT_EQ(owner, kOwner);
    const std::lock_guard lock(mutex);
    asked[requests.front().as] = requests;
    return Share(requests);
  };
  ASSERT_TRUE(Resume().ok());
  std::vector<std::size_t> sizes;
  for (const auto& [first, requests] : asked) {
    sizes.push_back(requests.size());
    for (const ShareRequest& request : requests)
      EXPECT_EQ(ledger_.state().allocations.at(request.as).remote->allocation, request.allocation);
  }
  EXPECT_EQ(sizes, (std::vector<std::size_t>{2, 4, 1}));
}

TEST_F(ExecutorTest, an_import_that_its_owner_refuses_names_the_owner) {
  Import();
  ASSERT_TRUE(Pause().ok());
  peers_.reimport = [](SessionId owner, const auto&) { return Status{Code::kRefused, "no such reference"}.ReportedBy(owner); };
  BeginResume();
  EXPECT_EQ(FinishResume().code(), Code::kRefused);
  ASSERT_EQ(All<StepFailed>().size(), 1U);
  EXPECT_EQ(All<StepFailed>()[0].reported_by, kOwner);
}

TEST_F(ExecutorTest, an_owner_that_is_lost_fails_the_first_import_of_the_batch_and_is_known_to_be_lost) {
  const AllocationId import = Import();
  ASSERT_TRUE(Pause().ok());
  peers_.reimport = [](SessionId, const auto&) { return Status{Code::kPeerLost, "rank 1 died"}; };
  BeginResume();
  const Status failed = FinishResume();
  EXPECT_EQ(failed.code(), Code::kPeerLost);
  ASSERT_EQ(All<StepFailed>().size(), 1U);
  EXPECT_EQ(All<StepFailed>()[0].step.kind, StepKind::kImport);
  EXPECT_EQ(All<StepFailed>()[0].step.allocation, import);
  EXPECT_EQ(All<StepFailed>()[0].reported_by, kOwner);
  ASSERT_EQ(All<PeerLost>().size(), 1U);
  ASSERT_TRUE(FinishResume().ok());  // the next plan puts memory of its own in its place
  EXPECT_TRUE(Resident(import));
}

}  // namespace
}  // namespace amem
