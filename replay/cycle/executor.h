// The executor: runs the steps of a plan on the driver, each between a begun and a done in the journal.
#pragma once

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "replay/cycle/backup.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "statemachine/plan.h"

namespace amem {

class Executor {
 public:
  // All must outlive the executor.
  Executor(Ledger& ledger, Driver& driver, Peers& peers, Backup& backup)
      : ledger_(ledger), driver_(driver), peers_(peers), backup_(backup) {}

  // Runs the steps, stops at the first that fails (StepFailed is recorded) and returns its reason. Steps of one allocation keep
  // their order; imports are taken owner by owner, because their descriptors come in batches. Called by one thread at a time,
  // without the ledger's lock.
  Status Run(const PlannedPhase& phase);

 private:
  Status RunSteps(const std::vector<Step>& steps);
  struct Target {  // what a step works on, as it was when the step began
    DriverHandle handle;
    Bytes bytes = 0;
    AllocationProperties properties;
    std::uint64_t flags = 0;
    Mapping mapping;
    bool stands_in = false;  // the memory replaces that of an owner who was lost
  };
  static bool NeedsLock(StepKind kind);
  Status RunOne(const Step& step);
  [[nodiscard]] bool Exists(const Step& step) const;
  Status GiveBack(const Step& step, DriverHandle handle);
  [[nodiscard]] Target TargetOf(const Step& step) const;
  Result<DriverHandle> Perform(const Step& step, const Target& target);  // the new handle, if the step makes one
  // What a save or restore of that step copies: an allocation, or the parts of a slab.
  Status MapForCopy(const Step& step, std::vector<Backup::Item>& items);
  Result<DriverHandle> Import(const Step& step);
  Result<DriverHandle> StandIn(const Step& step);
  Status Map(const Step& step, const Target& target);
  Status SetAccess(const Step& step, const Mapping& mapping);
  Status CheckMemory(const Step& step);
  Status Verify();
  Status Find(const Step& step);
  Status AwaitSaved(const Step& step);
  // Contents come back while memory is still being created and imports are taken: copies are queued as soon as there is enough
  // to copy to, and the restore steps are done when all are.
  Status RestoreSoon(AllocationId allocation, Address address, Bytes enough);
  Status BeginRestores(const std::vector<Step>& steps, Step& culprit);
  Status FinishRestores(const std::vector<Step>& steps, Status begun, Step culprit);
  // Waits for all copies, and takes the mappings away that were made for them.
  Status FinishCopies();
  Status RunImports(const std::vector<Step>& steps);
  struct Batch {  // imports whose descriptors come together from one owner
    SessionId owner;
    std::vector<Step> steps;
    std::vector<ShareRequest> requests;
  };
  std::vector<Batch> Batches(const std::vector<Step>& steps);
  Status Fail(const Step& step, Status why);

  Ledger& ledger_;
  Driver& driver_;
  Peers& peers_;
  Backup& backup_;
  std::vector<Backup::Item> restorable_;  // mapped again, and not being copied to yet
  Bytes restorable_bytes_ = 0;
  std::set<AllocationId> restoring_;
  std::map<std::pair<DeviceOrdinal, Bytes>, UniqueFd> stand_ins_;  // by size of a piece; for one phase
  std::set<AllocationId> standing_in_;                             // until they are released
  std::map<AllocationId, UniqueFd> fetched_;  // descriptors from owners, until their import steps used them
  struct Scratch {
    Address address;
    Bytes bytes = 0;
    bool mapped = false;
  };
  Status Drop(Scratch& scratch);
  Status DropScratch();
  std::map<AllocationId, Scratch> scratch_;  // mappings made only to reach contents, until the copies are finished
};

}  // namespace amem
