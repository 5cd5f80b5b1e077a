// The descriptors of a phase's imports. A few owners export while this session imports what came before.
#pragma once

#include <deque>
#include <future>
#include <map>
#include <vector>

#include "replay/peers/peers.h"
#include "statemachine/plan.h"
#include "statemachine/state.h"

namespace amem {

class ImportQueue {
 public:
  // `peers` must outlive the queue. `state` says what the owners call the allocations.
  ImportQueue(Peers& peers, const std::vector<ImportBatch>& batches, const State& state, Deadline until);

  // Waits until the descriptor of an import is here: imports are asked for in the order of the batches. An owner that is lost
  // is known to be lost to the ledger, too, when this fails with kPeerLost, so that a new plan replaces what it shared.
  Status Await(AllocationId import);
  Result<SharedAllocation> Take(AllocationId import);  // kInvalid: it has not been waited for

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
  std::deque<std::future<Shared>> coming_;  // last: what it waits for uses the batches
};

}  // namespace amem
