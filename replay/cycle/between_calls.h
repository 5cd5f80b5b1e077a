// What a scope holds between its pauses and resumes: host memory for the next pause, and copies that a failed call left
// running.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "journal/base/clock.h"
#include "replay/cycle/backup.h"
#include "replay/cycle/pinned_memory.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "statemachine/plan.h"

namespace amem {

// Host memory for the next pause of one scope: pinned ahead while the scope grows, and given back once it has shrunk.
class HostMemoryAhead {
 public:
  // All must outlive it. `pool`: zero: NCCL's memory.
  HostMemoryAhead(Ledger& ledger, PinnedSupply& pinned, const Backup& backup, PoolId pool)
      : ledger_(ledger), pinned_(pinned), backup_(backup), pool_(pool) {}

  // With the ledger: the program made so much memory in the scope. Pins ahead in steps of a sixteenth.
  void Made(Bytes bytes) {
    ledger_.AssertHeld();
    constexpr Bytes kFrom = Bytes{64} << 20;
    pinned_.Busy();
    made_ += bytes;
    if (made_ >= std::max(measured_ / 16, kFrom)) Measure();
  }
  // With the ledger: pins what all memory of the scope is expected to need. What was freed is no longer counted.
  void Measure() {
    ledger_.AssertHeld();
    const Savable held = MeasureSavable(ledger_.state(), pool_);
    made_ = 0;
    measured_ = held.nccl + held.program;
    pinned_.Want(pool_, pool_ ? backup_.Expected(held.program) : backup_.Expected(held.nccl) + held.program);
  }
  // After a pause that began then, and whose devices are idle. One thread at a time, without the ledger.
  void GiveSpareBack(std::uint64_t pause_began_ns) {
    pinned_.GiveSpareBack(std::chrono::nanoseconds(pause_began_ns - std::exchange(paused_at_ns_, pause_began_ns)));
  }

 private:
  Ledger& ledger_;
  PinnedSupply& pinned_;
  const Backup& backup_;
  const PoolId pool_;
  Bytes made_ GUARDED_BY(ledger_) = 0;  // since measured_ was set
  Bytes measured_ GUARDED_BY(ledger_) = 0;
  std::uint64_t paused_at_ns_ = MonotonicNs();  // the last time
};

// The devices on which copies of a pause or resume that failed may still be under way. Thread-safe.
class UnendedCopies {
 public:
  void Set(const std::set<DeviceOrdinal>& devices) {
    const std::lock_guard lock(mutex_);
    since_ns_.clear();
    all_known_ = false;  // where this throws
    for (const DeviceOrdinal device : devices) since_ns_.emplace(device, MonotonicNs());
    all_known_ = true;
  }
  // The next pause or resume waits for these copies too, and may fail again meanwhile.
  Status Await(Copier& copier, Deadline until) {
    const auto [under_way, all_known] = [this] {
      const std::lock_guard lock(mutex_);
      return std::pair(since_ns_, all_known_);
    }();
    if (!all_known)
      return Status{Code::kRefused, "copies of a pause or resume for which there was no memory may be under way; repeat it"}
          .Within("give memory back");
    for (const auto& [device, since] : under_way) {
      AMEM_TRY(copier.FinishCopies(device, until)
                   .Within("give memory back while copies of a pause or resume that failed are under way"));
      const std::lock_guard lock(mutex_);
      if (const auto* const still = FindIn(since_ns_, device); still != nullptr && *still == since) since_ns_.erase(device);
    }
    return {};
  }

 private:
  std::mutex mutex_;  // guards what follows
  std::map<DeviceOrdinal, std::uint64_t> since_ns_;
  bool all_known_ = true;  // false: there was no memory to note all of them
};

}  // namespace amem
