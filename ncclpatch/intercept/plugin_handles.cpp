#include "ncclpatch/intercept/plugin_handles.h"

#include <spdlog/fmt/fmt.h>

#include <new>
#include <set>

#include "ncclpatch/nccl/attribution.h"

namespace amem::intercept {

// ---- transfers

void PluginGate::Begun(const void* request, const void* connection) {
  const std::lock_guard lock(mutex_);
  try {
    open_[request] = connection;
  } catch (const std::bad_alloc&) {  // NCCL's C code must not see it
    uncounted_ = true;
  }
}

void PluginGate::Ended(const void* request) {
  const std::lock_guard lock(mutex_);
  open_.erase(request);
}

void PluginGate::Closed(const void* connection) {
  const std::lock_guard lock(mutex_);
  std::erase_if(open_, [&](const auto& one) { return one.second == connection; });
}

TrafficGate::Traffic PluginGate::UnderWay() {
  const std::string plugin = std::string(plugin_.load()) + ": ";
  if (inside_.load() > 0) return {plugin + "a transfer is being begun"};
  const std::lock_guard lock(mutex_);
  if (uncounted_) return {plugin + "a transfer was not counted, for lack of memory", true};
  if (open_.empty()) return {};
  std::set<const void*> connections;
  for (const auto& [request, connection] : open_) connections.insert(connection);
  return {fmt::format("{}{} under way on {}", plugin,
                      open_.size() == 1 ? "a transfer is" : fmt::format("{} transfers are", open_.size()),
                      connections.size() == 1 ? "a connection" : fmt::format("{} connections", connections.size()))};
}

// ---- handles

PluginHandles::Handle* PluginHandles::Take(RegionId region) {
  for (std::size_t tried = 0; tried < kMost; ++tried) {
    Handle& one = all_[next_++ % kMost];
    if (one.region) continue;
    one.region = region;
    return &one;
  }
  return nullptr;
}

void* PluginHandles::Wrap(void* real, const Extent& part, Way way, Registered* record) {
  Session* const session = Runtime::Get().started();
  if (!on() || session == nullptr || part.bytes == 0) return nullptr;
  record->card = way.plugin;
  record->pins = session->records().WhyPins(part);
  if (record->pins.empty() && !nccl::OnServiceThread())
    record->pins = "it was not registered by the thread that serves a communicator's connections";
  if (!record->pins.empty()) return nullptr;
  const RegionId region = Registrations::NewRegion();
  const std::lock_guard lock(mutex_);
  Handle* const made = Take(region);
  if (made == nullptr) return record->pins = "there are too many", nullptr;
  try {
    by_region_[region] = made;
  } catch (...) {
    made->region = {};
    throw;
  }
  record->region = region;
  way.gate->SetPlugin(way.plugin);
  made->part = part;
  made->way = std::move(way);
  made->real.store(real, std::memory_order_release);
  return made;
}

int PluginHandles::GiveUp(void* handle, const std::function<int(void*)>& make_call) {
  if (!IsOurs(handle)) return make_call(handle);
  const std::lock_guard lock(mutex_);
  Handle& one = *static_cast<Handle*>(handle);
  if (void* const real = one.real.load(); real != nullptr)
    if (const int result = make_call(real); result != 0) return result;
  by_region_.erase(one.region);
  one.real.store(nullptr);
  one.way = {};
  one.region = {};
  return 0;
}

void PluginHandles::Closed(const void* connection) {
  const std::lock_guard lock(mutex_);
  for (const auto& [region, handle] : by_region_)
    if (handle->way.connection == connection) handle->way.undo = nullptr, handle->way.again = nullptr;
}

void PluginHandles::Unloaded(const PluginGate* gate) {
  const std::lock_guard lock(mutex_);
  for (const auto& [region, handle] : by_region_)
    if (handle->way.gate == gate) handle->way.undo = nullptr, handle->way.again = nullptr;
}

// ---- what a pause and a resume ask for

void PluginHandles::FindGates(const std::vector<RegionId>& regions, std::map<RegionId, TrafficGate*>* gates) {
  const std::lock_guard lock(mutex_);
  for (const RegionId region : regions)
    if (auto* const found = FindIn(by_region_, region)) (*gates)[region] = (*found)->way.gate;
}

Status PluginHandles::Deregister(RegionId region) {
  const std::lock_guard lock(mutex_);
  auto* const found = FindIn(by_region_, region);
  void* const real = found == nullptr ? nullptr : (*found)->real.load();
  if (real == nullptr) return {};
  const Handle& one = **found;
  if (!one.way.gate->IsShut()) return {Code::kInvalid, fmt::format("the gate of {} is not shut", one.way.plugin)};
  if (one.way.undo == nullptr)
    return {Code::kIo, fmt::format("{} at {} was still registered when its connection was closed", FormatBytes(one.part.bytes),
                                   Hex(one.part.address))};
  if (const int result = one.way.undo(real); result != 0)
    return {Code::kIo, fmt::format("{} did not deregister {} at {}: its deregMr answered {}", one.way.plugin,
                                   FormatBytes(one.part.bytes), Hex(one.part.address), result)};
  (*found)->real.store(nullptr);
  return {};
}

Status PluginHandles::Register(RegionId region) {
  const std::lock_guard lock(mutex_);
  auto* const found = FindIn(by_region_, region);
  if (found == nullptr || (*found)->real.load() != nullptr || (*found)->way.again == nullptr) return {};
  const Handle& one = **found;
  void* real = nullptr;
  if (const int result = one.way.again(&real); result != 0)
    return {Code::kIo, fmt::format("{} did not register {} at {} again: its regMr answered {}", one.way.plugin,
                                   FormatBytes(one.part.bytes), Hex(one.part.address), result)};
  (*found)->real.store(real, std::memory_order_release);
  return {};
}

}  // namespace amem::intercept
