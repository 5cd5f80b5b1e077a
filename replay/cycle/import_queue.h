// Fetches the descriptors of a phase's imports: a few owners export while this session imports what has arrived.
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

}  // namespace amem
