// The executor runs a plan's steps on the driver, and journals the begin and the end of each.
#pragma once

#include <deque>
#include <functional>
#include <future>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "replay/cycle/backup.h"
#include "replay/cycle/copy_queue.h"
#include "replay/cycle/network.h"
#include "replay/cycle/perform_step.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "statemachine/plan.h"
#include "statemachine/state.h"

namespace amem {

// Fetches the descriptors of a phase's imports: a few owners export while this session imports what has arrived.
class ImportQueue {
 public:
  // `peers` must outlive the queue. `state` has the owners' names of the allocations.
  ImportQueue(Peers& peers, const std::vector<ImportBatch>& batches, const State& state, Deadline until);

  // Waits for the descriptor of an import; they are fetched in the order of the batches. If it fails with kPeerLost, the ledger
  // knows of the loss too, so a new plan replaces what that owner shared.
  Status Await(AllocationId import);
  Result<SharedAllocation> Take(AllocationId import);  // kInvalid: Await was not called for it

 private:
  using Shared = Result<std::vector<SharedAllocation>>;
  struct Batch {
    SessionId owner;
    std::vector<ShareRequest> requests;
  };
  void AskAhead();
  Status AwaitNextBatch();

  Peers& peers_;
  const Deadline until_;
  std::vector<Batch> batches_;
  std::size_t asked_ = 0, arrived_ = 0;
  std::map<AllocationId, SharedAllocation> arrived_with_;
  std::deque<std::future<Shared>> coming_;  // last, so that it ends first: it uses the batches
};

class Executor final : private StepSide {
 public:
  // All must outlive the executor. `pool`: whose plans it runs; zero: NCCL's. Several executors may run at once. `network`: the
  // cards that hold NCCL's memory; null: none does, or what they hold stays.
  Executor(Ledger& ledger, Driver& driver, Peers& peers, Backup& backup, PoolId pool = {}, Network* network = nullptr)
      : ledger_(ledger),
        driver_(driver),
        peers_(peers),
        pool_(pool),
        network_(network),
        copies_(ledger, driver, backup),
        performer_(driver, *this, pool) {}

  // Runs the steps in order. Stops at the first that fails, records StepFailed and returns the reason. For one thread at a
  // time, without the ledger's lock. `is_overtaken`: asked before each step, and in long ones; true: the others go on without
  // the rest, which is not done (kRefused).
  Status Run(const PlannedPhase& phase, const std::function<bool()>& is_overtaken = {});
  // After a resume by that plan, before anybody uses the memory: compares all contents with what was saved. kBroken: they
  // differ.
  Status CompareRestored(const Plan& resume);
  // `hosts_idle`: as CycleOptions.
  void BeginCycle(Deadline until, ScanMode mode = ScanMode::kIdle, bool hosts_idle = false) {
    cycle_ = {.hosts_idle = hosts_idle, .unended = {}, .renewed = {}};
    SetUntil(until);
    copies_.SetScanMode(mode);
  }
  // Waits for copies that a failed save has left under way, and removes what was made for them.
  Status EndCopies() { return copies_.BeginPhase(PhaseKind::kResumeCreateOwn); }
  // For an undo: steps wait until then.
  void SetUntil(Deadline until) {
    until_ = until;
    copies_.SetUntil(until);
  }
  [[nodiscard]] Deadline until() const override { return until_; }
  [[nodiscard]] bool IsOvertaken() const override { return phase_ && phase_->is_overtaken && phase_->is_overtaken(); }
  // Whether this session made or imported new multicast objects in this cycle.
  [[nodiscard]] bool HasRenewedMulticasts() const { return !cycle_.renewed.empty(); }

 private:
  [[nodiscard]] const State& state() const override {
    ledger_.AssertHeld();
    return ledger_.state();
  }
  [[nodiscard]] DriverHandle HandleOf(AllocationId allocation) const override {
    ledger_.AssertHeld();
    return ledger_.HandleOf(allocation);
  }
  [[nodiscard]] std::optional<DeviceOrdinal> SubstituteOf(AllocationId allocation) const override {
    ledger_.AssertHeld();
    return ledger_.RebuiltAs(allocation).stands_in;
  }
  Result<SharedAllocation> Shared(const Step& import) override;
  [[nodiscard]] bool Lacks(AllocationId multicast, DeviceOrdinal device) const override {
    ledger_.AssertHeld();
    return ledger_.RebuiltAs(multicast).lacks.contains(device);
  }
  Status Copy(const Step& step) override;
  Status OnNetwork(const Step& step) override;
  Result<std::vector<Network::Kept>> Drain();

  // Another thread has held the ledger for too long, inside a hanging driver call.
  [[nodiscard]] Status NoLedger() const { return {Code::kDriver, ledger_.Held().message(), cuda::kTimeout}; }
  // One phase while it runs.
  struct PhaseRun {
    PhaseRun(Executor& executor, const PlannedPhase& phase, const std::function<bool()>& overtaken) REQUIRES(executor.ledger_);

    const PlannedPhase& planned;
    const std::function<bool()>& is_overtaken;
    ImportQueue imports;
    std::size_t copies_begun = 0;       // of the phase's copies
    const Step* last_copy = nullptr;    // waits for all copies, not only for its own
    std::vector<Network::Kept> kept{};  // by the step that runs
    Incarnation imported{};             // by the last import
  };
  struct PhaseEnd {
    Executor& executor;
    ~PhaseEnd();
  };
  Status RunSteps(const PlannedPhase& phase);
  Status RunOne(const Step& step);
  void EndUnended() REQUIRES(ledger_);
  Status EndOne(const Step& step, const StepTarget& target, const Result<DriverHandle>& handle) REQUIRES(ledger_);
  [[nodiscard]] bool Exists(const Step& step) const REQUIRES(ledger_);
  // Called when a step is done.
  void NoteHandle(const Step& step, const StepTarget& target, DriverHandle handle) REQUIRES(ledger_);
  void ForgetBindings(AllocationId multicast) REQUIRES(ledger_);
  Status GiveBack(const Step& step, DriverHandle handle) REQUIRES(ledger_);
  // Records it with as much of the reason as there is memory for, so that the next step can begin.
  Status Fail(const Step& step, Status why) REQUIRES(ledger_);
  StepFailed Failure(const Step& step, const Status& why) REQUIRES(ledger_);
  [[nodiscard]] std::optional<DeviceOrdinal> DeviceOf(const Step& step) const REQUIRES(ledger_);
  // Lets go of the ledger meanwhile, too.
  std::vector<MemoryHolder> HoldersOf(std::optional<DeviceOrdinal> device) REQUIRES(ledger_);
  Status FailUnbegun(const Step& step, Status why);

  Ledger& ledger_;
  Driver& driver_;
  Peers& peers_;
  const PoolId pool_;
  Network* const network_;
  Deadline until_ = Deadline::max();
  CopyQueue copies_;
  StepPerformer performer_;
  struct {  // since BeginCycle
    bool hosts_idle = false;
    std::optional<Step> unended;  // begun, and not recorded as done or failed, because the ledger could not be had in time
    // multicast objects made or imported; ordinary memory that stands in for one is not listed
    std::set<AllocationId> renewed;
  } cycle_;
  std::optional<PhaseRun> phase_;  // that runs
};

}  // namespace amem
