// With AMEM_NETWORK=renew: registrations by network plugins that a pause undoes and a resume does again.
//
// What NCCL gets for one is a handle of AMem's, which every later call translates into the plugin's handle of today. Handles
// are opaque to NCCL, so no more is needed; but a plugin may know more of a handle than NCCL tells it (a cache that keeps
// registrations, keys that it has told others once). So only a plugin that has been read is taken: nccl-rdma-sharp in mode ib,
// whose code is NCCL's own for InfiniBand.
//
// Nothing may be under way while a handle changes. AMem counts the requests that the plugin has given and not yet called done.
// While the gate is shut a transfer that NCCL begins is answered as by a plugin that is not ready yet, so that NCCL tries again
// later.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "ncclpatch/intercept/registrations.h"
#include "ncclpatch/intercept/traffic_gate.h"

namespace amem::intercept {

// The transfers of one table of functions.
class PluginGate final : public TrafficGate {
 public:
  // Makes a call that begins a transfer on `connection`: 0 is success, and *request is what was begun. While the gate is shut
  // nothing is called, and *request is null.
  template <class MakeCall>
  int Begin(const void* connection, void** request, const MakeCall& make_call) {
    inside_.fetch_add(1);
    int result = 0;
    if (IsShut()) [[unlikely]]
      *request = nullptr;
    else if (result = make_call(); result == 0 && *request != nullptr)
      Begun(*request, connection);
    inside_.fetch_sub(1);
    return result;
  }
  void SetPlugin(const char* name) { plugin_.store(name); }
  void Ended(const void* request);
  void Closed(const void* connection);  // what was under way there ends no more

 private:
  void Begun(const void* request, const void* connection);
  Traffic UnderWay() override;

  std::atomic<const char*> plugin_{"a network plugin"};
  std::atomic<int> inside_{0};
  std::mutex mutex_;
  std::unordered_map<const void*, const void*> open_;  // requests, with their connection; guarded by mutex_
  bool uncounted_ = false;                             // guarded by mutex_
};

class PluginHandles {
 public:
  void Begin() { on_.store(true); }
  [[nodiscard]] bool on() const { return on_.load(std::memory_order_relaxed); }

  // A registration of a plugin's. `undo` and `again` give the plugin's result; 0 is success.
  struct Way {
    const char* plugin = "";  // its name
    PluginGate* gate = nullptr;
    const void* connection = nullptr;
    std::function<int(void* handle)> undo;
    std::function<int(void** handle)> again;
  };
  // What NCCL gets for `real`, which the plugin has just given. Null: that registration pins, and record->pins says why. The
  // caller holds Registering, and records it.
  void* Wrap(void* real, const Extent& part, Way way, Registered* record);
  // Undoes the registration behind `handle` by `make_call`, as deregMr; without one behind it, succeeds.
  int GiveUp(void* handle, const std::function<int(void*)>& make_call);
  void Closed(const void* connection);    // its handles are neither undone nor done again
  void Unloaded(const PluginGate* gate);  // the same of all connections of a plugin

  // The plugin's handle of today; null while there is none.
  [[nodiscard]] void* Real(void* handle) const {
    return IsOurs(handle) ? static_cast<const Handle*>(handle)->real.load(std::memory_order_acquire) : handle;
  }

  // ---- what a pause and a resume ask for, as Network. Of registrations that are not a plugin's, these do nothing.
  void FindGates(const std::vector<RegionId>& regions, std::map<RegionId, TrafficGate*>* gates);
  Status Deregister(RegionId region);
  Status Register(RegionId region);

 private:
  struct Handle {
    std::atomic<void*> real{nullptr};  // null: it is free, or undone
    RegionId region;                   // zero: it is free
    Extent part;
    Way way;
  };
  static constexpr std::size_t kMost = 8192;  // further ones pin
  Handle* Take(RegionId region);              // null: none is free; the caller holds mutex_
  [[nodiscard]] bool IsOurs(const void* handle) const {
    return std::greater_equal<>()(handle, static_cast<const void*>(all_.data())) &&
           std::less<>()(handle, static_cast<const void*>(all_.data() + all_.size()));
  }

  std::atomic<bool> on_{false};
  std::mutex mutex_;  // guards what follows, but for Handle::real
  std::array<Handle, kMost> all_{};
  std::size_t next_ = 0;  // where to look for a free one
  std::map<RegionId, Handle*> by_region_;
};

}  // namespace amem::intercept
