// Waiting until the device is idle, and not for ever. Only the CUDA driver includes this.
//
// The driver's wait for a context has no limit, so it is made by a thread of its own; the caller waits for that thread as long
// as it wants. A thread that is still inside the driver then is left there: it ends when the device's work does, and the next
// wait for that context joins it in place of starting another.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "journal/base/mutex.h"
#include "replay/driver/cuda/core.h"

namespace amem {

// Thread-safe.
class CudaDriver::IdleWait {
 public:
  explicit IdleWait(std::shared_ptr<Core> core) : core_(std::move(core)) {}

  // Of the device's primary context, and of those that NoteStream has seen on it.
  Status Await(DeviceOrdinal device, Deadline until);
  void NoteStream(const char* call, void* stream);

 private:
  using Clock = std::chrono::steady_clock;
  struct Wait {
    Mutex mutex{LockRank::kLast};
    Condition changed;
    std::optional<CUresult> result GUARDED_BY(mutex);  // once it has ended
  };
  // nullopt: it has not ended by then.
  Result<std::optional<CUresult>> AwaitContext(CUcontext context, Clock::time_point until);
  Result<std::shared_ptr<Wait>> Begin(CUcontext context);
  std::shared_ptr<Wait> Unfinished(CUcontext context);
  std::set<CUcontext> NotedOn(DeviceOrdinal device);
  void Forget(DeviceOrdinal device, CUcontext context);
  [[nodiscard]] std::string Details(CUcontext context) const;
  std::atomic<CUcontext>& Recent(CUcontext context) {
    return recent_[reinterpret_cast<std::uintptr_t>(context) / 64 % recent_.size()];
  }

  const std::shared_ptr<Core> core_;
  // What NoteStream saw: the last call, and some contexts that are known to be in noted_.
  std::atomic<const char*> last_call_ = nullptr;
  std::atomic<void*> last_stream_ = nullptr;
  std::atomic<CUcontext> last_context_ = nullptr;
  std::array<std::atomic<CUcontext>, 32> recent_{};
  Mutex mutex_{LockRank::kLast};
  std::map<DeviceOrdinal, std::set<CUcontext>> noted_ GUARDED_BY(mutex_);
  std::map<CUcontext, std::shared_ptr<Wait>> unfinished_ GUARDED_BY(mutex_);  // waits that were left behind
};

}  // namespace amem
