// The executor: runs the steps of a plan on the driver, each between a begun and a done in the journal.
#pragma once

#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "replay/cycle/backup.h"
#include "replay/cycle/copy_queue.h"
#include "replay/cycle/import_queue.h"
#include "replay/cycle/perform_step.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "statemachine/plan.h"

namespace amem {

class Executor final : private StepSide {
 public:
  // All must outlive the executor. `pool`: whose plans it runs; zero: NCCL's. Several may run beside each other.
  Executor(Ledger& ledger, Driver& driver, Peers& peers, Backup& backup, PoolId pool = {})
      : ledger_(ledger),
        driver_(driver),
        peers_(peers),
        pool_(pool),
        copies_(ledger, driver, backup),
        performer_(driver, *this, pool) {}

  // Runs the steps in their order, stops at the first that fails (StepFailed is recorded) and returns its reason. Called by one
  // thread at a time, without the ledger's lock.
  Status Run(const PlannedPhase& phase);
  // After the resume of that plan, before anybody else uses its memory: all contents with what was saved. kBroken: they differ.
  Status CompareRestored(const Plan& resume);
  void BeginCycle(Deadline until, Backup::Looking looking = Backup::Looking::kForZeros) {
    renewed_.clear();
    SetUntil(until);
    copies_.SetLooking(looking);
  }
  // For an undo. What steps wait for they wait for until then.
  void SetUntil(Deadline until) {
    until_ = until;
    copies_.SetUntil(until);
  }
  [[nodiscard]] Deadline until() const override { return until_; }
  // Whether this session made multicast objects anew in this cycle, or imported such.
  [[nodiscard]] bool HasRenewedMulticasts() const { return !renewed_.empty(); }

 private:
  // StepSide
  [[nodiscard]] const State& state() const override {
    ledger_.AssertHeld();
    return ledger_.state();
  }
  [[nodiscard]] DriverHandle HandleOf(AllocationId allocation) const override {
    ledger_.AssertHeld();
    return ledger_.HandleOf(allocation);
  }
  Result<SharedAllocation> Shared(const Step& import) override;
  [[nodiscard]] bool Lacks(AllocationId multicast, DeviceOrdinal device) const override {
    ledger_.AssertHeld();
    return ledger_.RebuiltAs(multicast).lacks.contains(device);
  }
  Status Copy(const Step& step) override;

  // Fails where another thread holds the ledger for too long, inside a driver call that hangs.
  [[nodiscard]] bool TryLedger() TRY_ACQUIRE(true, ledger_);
  [[nodiscard]] Status NoLedger() const { return {Code::kDriver, ledger_.Held().message(), cuda::kTimeout}; }
  Status RunSteps(const PlannedPhase& phase);
  Status RunOne(const Step& step);
  Result<DriverHandle> PerformApart(const Step& step, const StepTarget& target)
      REQUIRES(ledger_);  // lets go of the ledger meanwhile
  [[nodiscard]] bool Exists(const Step& step) const REQUIRES(ledger_);
  // With the ledger's lock, when a step is done.
  void NoteHandle(const Step& step, DriverHandle handle, bool multicast) REQUIRES(ledger_);
  void ForgetBindings(AllocationId multicast) REQUIRES(ledger_);
  Status GiveBack(const Step& step, DriverHandle handle) REQUIRES(ledger_);
  Status Fail(const Step& step, Status why) REQUIRES(ledger_);
  Status FailUnbegun(const Step& step, Status why);

  Ledger& ledger_;
  Driver& driver_;
  Peers& peers_;
  const PoolId pool_;
  Deadline until_ = Deadline::max();
  CopyQueue copies_;
  StepPerformer performer_;
  std::set<AllocationId> renewed_;  // multicast objects that are not those of before this cycle, and no piece of memory

  // Of the phase that runs:
  std::optional<ImportQueue> imports_;
  const std::vector<std::vector<Step>>* planned_copies_ = nullptr;
  std::size_t copies_begun_ = 0;     // of those
  Incarnation imported_;             // of the last import
  const Step* last_copy_ = nullptr;  // waits for all copies, not only for its own
};

}  // namespace amem
