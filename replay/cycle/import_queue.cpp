#include "replay/cycle/import_queue.h"

#include <system_error>

namespace amem {
namespace {

constexpr std::size_t kBatchesComing = 6;  // asked for and not yet imported

}  // namespace

ImportQueue::ImportQueue(Peers& peers, const std::vector<ImportBatch>& batches, const State& state, Deadline until)
    : peers_(peers), until_(until) {
  for (const ImportBatch& planned : batches) {
    Batch batch{planned.owner, {}};
    for (const AllocationId import : planned.imports) {
      auto* const a = FindIn(state.allocations, import);
      if (a != nullptr && a->remote) batch.requests.push_back({a->remote->allocation, import});
    }
    if (!batch.requests.empty()) batches_.push_back(std::move(batch));
  }
}

void ImportQueue::AskAhead() {
  for (; asked_ < batches_.size() && coming_.size() < kBatchesComing; ++asked_) {
    const auto ask = [this, &batch = batches_[asked_]] { return peers_.Reimport(batch.owner, batch.requests, until_); };
    try {
      coming_.push_back(std::async(std::launch::async, ask));
    } catch (const std::system_error&) {  // no thread can be had: Await asks the owner itself
      coming_.push_back(std::async(std::launch::deferred, ask));
    }
  }
}

Status ImportQueue::AwaitNextBatch() {
  AskAhead();
  Shared shared = coming_.front().get();
  coming_.pop_front();
  const Batch& batch = batches_[arrived_++];
  if (!shared.ok()) {
    if (shared.status().code() != Code::kPeerLost) return shared.status();
    static_cast<void>(peers_.AwaitLoss(batch.owner));
    return shared.status().ReportedBy(batch.owner);
  }
  for (std::size_t i = 0; i < batch.requests.size(); ++i) arrived_with_[batch.requests[i].as] = std::move((*shared)[i]);
  return {};
}

Status ImportQueue::Await(AllocationId import) {
  while (!arrived_with_.contains(import) && arrived_ < batches_.size()) AMEM_TRY(AwaitNextBatch());
  return {};
}

Result<SharedAllocation> ImportQueue::Take(AllocationId import) {
  auto found = arrived_with_.extract(import);
  if (found.empty()) return Status{Code::kInvalid, "the owner was not asked for the descriptor"};
  return std::move(found.mapped());
}

}  // namespace amem
