// The copies of a cycle: which allocations are copied, through which addresses, and which copies are still under way. For one
// thread, without the ledger's lock.
#pragma once

#include <map>
#include <set>
#include <span>
#include <vector>

#include "replay/cycle/backup.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "statemachine/event.h"

namespace amem {

class CopyQueue {
 public:
  // All must outlive the queue.
  CopyQueue(Ledger& ledger, Driver& driver, Backup& backup) : ledger_(ledger), driver_(driver), backup_(backup) {}

  void SetUntil(Deadline until) {  // of later waits
    until_ = until;
    backup_.SetUntil(until);
  }
  void SetScanMode(ScanMode mode) { scan_mode_ = mode; }  // of later saves
  // First waits for copies that a failure left running, which belong neither to this phase nor to the one before.
  Status BeginPhase(PhaseKind phase);
  // Begins to copy what these steps will wait for: only saves, or only restores. Skips allocations that no longer exist,
  // those whose restore has begun, and NCCL's that are to stay after all.
  Status Begin(std::span<const Step> contents);
  Status Await(const Step& step);  // of a save or restore
  // Compares what these steps restored with what was saved. kBroken: a byte differs; the message names it.
  Status Compare(std::span<const Step> restored);
  // Waits for all copies, and removes the mappings that were made for them.
  Status Finish();
  [[nodiscard]] bool Queued() const { return backup_.Queued(); }

 private:
  struct Scratch {
    Address address;
    Bytes bytes = 0;
    bool mapped = false;
  };
  [[nodiscard]] Status NoLedger() const { return {Code::kDriver, ledger_.Held().message(), cuda::kTimeout}; }
  Result<std::vector<Backup::Item>> MapForCopies(std::span<const Step> contents);
  Status MapForCopy(const Step& step, std::vector<Backup::Item>& items) REQUIRES(ledger_);
  std::vector<ByteRange> ExtentsOf(const Step& step, PoolId pool) REQUIRES(ledger_);
  Result<Address> MapScratch(const Step& step) REQUIRES(ledger_);
  Status Drop(Scratch& scratch);
  Status DropScratch();

  Ledger& ledger_;
  Driver& driver_;
  Backup& backup_;
  Deadline until_;
  ScanMode scan_mode_ = ScanMode::kIdle;
  std::set<AllocationId> restoring_;                                        // copies begun and not finished
  std::map<PoolId, std::map<AllocationId, std::vector<ByteRange>>> parts_;  // of pools' chunks, while Begin runs
  std::map<AllocationId, Scratch> scratch_;                                 // mappings made for copies, until Finish
};

}  // namespace amem
