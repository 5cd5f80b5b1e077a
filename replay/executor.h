// The executor: runs the steps of a plan on the driver, each between a begun and a done in the journal.
#pragma once

#include <map>
#include <vector>

#include "replay/backup.h"
#include "replay/driver.h"
#include "replay/ledger.h"
#include "replay/peers.h"
#include "statemachine/plan.h"

namespace amem {

class Executor {
 public:
  Executor(Ledger& ledger, Driver& driver, Peers& peers, Backup& backup)
      : ledger_(ledger), driver_(driver), peers_(peers), backup_(backup) {}

  // Runs the steps in order, stops at the first that fails (StepFailed is recorded) and returns its reason.
  Status Run(const PlannedPhase& phase);

 private:
  Status RunStep(const Step& step);
  Status FetchImports(const std::vector<Step>& steps);

  Ledger& ledger_;
  Driver& driver_;
  Peers& peers_;
  Backup& backup_;
  std::map<AllocationId, SharedAllocation> fetched_;  // descriptors from owners, until their import steps used them
};

}  // namespace amem
