// The ledger: one session's state, its journal, and the driver handles that stand behind it today, moved forward together.
//
// Record() is the only way an event comes into being: Apply, then append to the journal. A call that gives something back to
// the driver (unmap, release, free a range) is made with the lock held over call and Record, so that whoever gets the same
// address next records that after. Calls that only take need the lock for their Record alone: they are slow, and the service
// thread must not wait for them.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "journal/base/unique_fd.h"
#include "journal/journal.h"
#include "replay/driver/driver.h"
#include "statemachine/apply.h"
#include "statemachine/state.h"

namespace amem {

class Ledger {
 public:
  explicit Ledger(std::unique_ptr<JournalWriter> journal) : journal_(std::move(journal)) {}

  [[nodiscard]] std::unique_lock<std::mutex> Lock() { return std::unique_lock(mutex_); }

  // All below: with the lock held.
  // Never fails towards the caller: an append or Apply that fails breaks the session (State::broken), which the next pause
  // says.
  void Record(EventBody body);
  void Break(const std::string& reason);  // latches the reason why pauses are refused from now on
  void SnapshotIfDue();
  [[nodiscard]] const State& state() const { return state_; }
  [[nodiscard]] JournalWriter* journal() { return journal_.get(); }
  // A fresh allocation id. Given out before the event that creates it, so that imports may wait for peers side by side.
  [[nodiscard]] AllocationId TakeAllocationId() { return AllocationId{next_allocation_++}; }

  // The driver's handle for an allocation that is resident; zero if there is none. Forgetting it closes the descriptor, too.
  [[nodiscard]] DriverHandle HandleOf(AllocationId allocation) const;
  void SetHandle(AllocationId allocation, DriverHandle handle);
  void ForgetHandle(AllocationId allocation);
  // A descriptor that was exported and is kept for the next importer (slabs have several); a copy, or none.
  [[nodiscard]] UniqueFd CopyOfDescriptor(AllocationId allocation) const;
  void KeepDescriptor(AllocationId allocation, const UniqueFd& descriptor);

  // Without the lock: a descriptor of an allocation that is resident, kept if `keep`; of those that ask at the same time one
  // exports and the others wait for it.
  Result<UniqueFd> Export(AllocationId allocation, Driver& driver, bool keep);

 private:
  std::mutex mutex_;
  std::mutex export_mutex_;  // taken before the other
  State state_;
  std::uint64_t next_allocation_ = 1;
  std::unique_ptr<JournalWriter> journal_;
  struct Backing {
    DriverHandle handle;
    UniqueFd descriptor;
  };
  std::unordered_map<std::uint64_t, Backing> backing_;
};

}  // namespace amem
