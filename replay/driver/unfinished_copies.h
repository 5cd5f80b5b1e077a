// What copies read or write that had not ended by their deadline.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "replay/driver/driver.h"
#include "statemachine/types.h"

namespace amem {

// Owns what must outlive such copies, a buffer say, until their device has finished them. Thread-safe.
template <class Used>
class UnfinishedCopies : NoCopies {
 public:
  void Add(DeviceOrdinal device, Used used) {
    const std::lock_guard lock(mutex_);
    used_.emplace(device, std::move(used));
  }

  // Frees what belongs to the devices whose copies `copier` finishes until then; the rest waits for the next call.
  void Free(Copier& copier, Deadline until) {
    std::multimap<DeviceOrdinal, Used> ended;  // is freed without the lock, because that calls the driver
    {
      const std::lock_guard lock(mutex_);
      ended.swap(used_);
    }
    for (auto at = ended.begin(); at != ended.end();) {
      const auto next = ended.upper_bound(at->first);
      if (!copier.FinishCopies(at->first, until).ok()) {
        const std::lock_guard lock(mutex_);
        while (at != next) used_.insert(ended.extract(at++));
      }
      at = next;
    }
  }

 private:
  std::mutex mutex_;
  std::multimap<DeviceOrdinal, Used> used_;
};

}  // namespace amem
