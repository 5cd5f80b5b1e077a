// The copies of a cycle: which allocations are copied, through which addresses, and which copies are still under way.
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

// For one thread, without the ledger's lock.
class CopyQueue {
 public:
  // All must outlive the queue.
  CopyQueue(Ledger& ledger, Driver& driver, Backup& backup) : ledger_(ledger), driver_(driver), backup_(backup) {}

  void SetUntil(Deadline until) { backup_.SetUntil(until); }        // of what is waited for from now on
  void SetLooking(Backup::Looking looking) { looking_ = looking; }  // of the saves that follow
  // Waits for copies that do not belong to this phase or the one before it: a failure left them behind.
  Status BeginPhase(PhaseKind phase);
  // Begins to copy what these steps will wait for: only saves, or only restores. Passes over allocations that do not exist any
  // more, and over those whose restore has begun.
  Status Begin(std::span<const Step> contents);
  Status Await(const Step& step);  // a save or a restore
  // What these steps have restored with what was saved of it. kBroken: a byte differs, which is named.
  Status Compare(std::span<const Step> restored);
  // Waits for all copies, and takes the mappings away that were made for them.
  Status Finish();
  [[nodiscard]] bool Queued() const { return backup_.Queued(); }

 private:
  struct Scratch {
    Address address;
    Bytes bytes = 0;
    bool mapped = false;
  };
  Result<std::vector<Backup::Item>> MapForCopies(std::span<const Step> contents);
  Status MapForCopy(const Step& step, std::vector<Backup::Item>& items) REQUIRES(ledger_);
  std::vector<ByteRange> ExtentsOf(const Step& step, PoolId pool) REQUIRES(ledger_);
  [[nodiscard]] Status HasNoContents(AllocationId chunk, PoolId pool) const REQUIRES(ledger_);
  Result<Address> MapScratch(const Step& step) REQUIRES(ledger_);
  Status Drop(Scratch& scratch);
  Status DropScratch();

  Ledger& ledger_;
  Driver& driver_;
  Backup& backup_;
  Backup::Looking looking_ = Backup::Looking::kForZeros;
  std::set<AllocationId> restoring_;                                        // whose copies were begun, and not finished
  std::map<PoolId, std::map<AllocationId, std::vector<ByteRange>>> parts_;  // of the chunks of pools, while Begin runs
  std::map<AllocationId, Scratch> scratch_;  // mappings made only to reach contents, until the copies are finished
};

}  // namespace amem
