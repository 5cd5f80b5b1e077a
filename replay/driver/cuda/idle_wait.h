// Waits until a device is idle, with a deadline. Only the CUDA driver includes this.
//
// The driver's wait for a context has no limit, so a thread makes it, and the caller waits for that thread until its deadline.
// The thread stays inside the driver until the device's work ends; the next wait for that context joins it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <future>
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

  // For the device's primary context, and those that NoteStream has seen on it.
  Status Await(DeviceOrdinal device, Deadline until, const std::function<bool()>& breaks_off);
  void NoteStream(const char* call, void* stream);

 private:
  using Clock = std::chrono::steady_clock;
  using Wait = std::shared_future<CUresult>;
  // nullopt: the wait did not end in time, or was broken off.
  Result<std::optional<CUresult>> AwaitContext(CUcontext context, Clock::time_point until,
                                               const std::function<bool()>& breaks_off);
  static bool Ends(const Wait& wait, Clock::time_point until, const std::function<bool()>& breaks_off);
  void Forget(DeviceOrdinal device, CUcontext context);
  [[nodiscard]] std::string Details(CUcontext context) const;
  std::atomic<CUcontext>& Recent(CUcontext context) {
    return recent_[reinterpret_cast<std::uintptr_t>(context) / 64 % recent_.size()];
  }

  const std::shared_ptr<Core> core_;
  // From NoteStream: the last call, and contexts that are known to be in noted_.
  std::atomic<const char*> last_call_ = nullptr;
  std::atomic<void*> last_stream_ = nullptr;
  std::atomic<CUcontext> last_context_ = nullptr;
  std::array<std::atomic<CUcontext>, 32> recent_{};
  Mutex mutex_{LockRank::kLast};
  std::map<DeviceOrdinal, std::set<CUcontext>> noted_ GUARDED_BY(mutex_);
  std::map<CUcontext, Wait> unfinished_ GUARDED_BY(mutex_);  // that outlived their callers
};

}  // namespace amem
