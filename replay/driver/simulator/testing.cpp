// The simulator for tests: what it holds, what it counted, and how it is made to fail.
#include <algorithm>
#include <thread>

#include "replay/driver/simulator/internal.h"

namespace amem {

static Status NoSuchCall(std::string_view call) {
  std::string known;
  for (const std::string_view one : Simulator::kCalls) known.append(known.empty() ? "" : ", ").append(one);
  return {Code::kInvalid, "the simulator has no call '" + std::string(call) + "'; it has " + known};
}

static void Spend(std::chrono::nanoseconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  if (time > std::chrono::microseconds(200)) std::this_thread::sleep_for(time - std::chrono::microseconds(100));
  while (std::chrono::steady_clock::now() < until) {  // a sleep alone would round up
  }
}

SimulatorSnapshot Simulator::Snapshot() const {
  const MutexLock lock(mutex_);
  SimulatorSnapshot snapshot;
  for (const auto& [handle, memory] : memories_) {
    snapshot.handles.push_back({DriverHandle{handle}, memory->bytes, memory->properties, memory->references, memory->mappings,
                                memory->imported, memory->key});
  }
  std::ranges::sort(snapshot.handles, [](const SimulatedHandle& a, const SimulatedHandle& b) { return a.handle < b.handle; });
  for (const auto& [address, bytes] : ranges_) snapshot.ranges.push_back({address, bytes});
  for (const auto& [address, mapped] : mappings_)
    snapshot.mappings.push_back({address, mapped.bytes, mapped.memory->handle, mapped.access, mapped.memory->key});
  return snapshot;
}

Result<SimulatedMapping> Simulator::MappingAt(Address address) {
  const MutexLock lock(mutex_);
  const auto it = Containing(mappings_, address);
  if (it == mappings_.end()) return Status(Code::kNotFound, "nothing is mapped at " + Hex(address));
  return SimulatedMapping{it->first, it->second.bytes, it->second.memory->handle, it->second.access, it->second.memory->key};
}

Result<Extent> Simulator::RangeAt(Address address) {
  const MutexLock lock(mutex_);
  const auto it = Containing(ranges_, address);
  if (it == ranges_.end()) return Status(Code::kNotFound, "no range was reserved at " + Hex(address));
  return Extent{it->first, it->second};
}

Bytes Simulator::BytesInUse(DeviceOrdinal device) const {
  const std::int32_t world_device = WorldDevice(device.value);
  return world_device < 0 ? 0 : world_->InUse(world_device);
}

std::size_t Simulator::QueuedCopies(DeviceOrdinal device) const {
  const MutexLock lock(mutex_);
  std::size_t copies = 0;
  for (const auto& [place, queue] : queued_) copies += place.second == device ? queue.size() : 0;
  return copies;
}

std::size_t Simulator::IndexOf(std::string_view call) {
  return static_cast<std::size_t>(std::ranges::find(kCalls, call) - kCalls.begin());
}

std::set<DeviceOrdinal> Simulator::ContextsOpened() const {
  const MutexLock lock(mutex_);
  return contexts_;
}

std::uint64_t Simulator::Calls(std::string_view call) const {
  const std::size_t index = IndexOf(call);
  return index == kCalls.size() ? 0 : counts_[index].load();
}

Status Simulator::FailNext(std::string_view call, std::uint64_t nth, int result) {
  const std::size_t index = IndexOf(call);
  if (index == kCalls.size()) return NoSuchCall(call);
  const MutexLock lock(faults_->mutex);
  faults_->planned[index].push_back({counts_[index].load() + nth, result});
  armed_ = true;
  return {};
}

void Simulator::ForgetPlannedFailures() {
  const MutexLock lock(faults_->mutex);
  for (auto& planned : faults_->planned) planned.clear();
}

void Simulator::SetHook(Hook hook) {
  const MutexLock lock(faults_->mutex);
  faults_->hook = hook ? std::make_shared<const Hook>(std::move(hook)) : nullptr;
  armed_ = true;
}

Status Simulator::SetLatency(std::string_view call, std::chrono::nanoseconds latency) {
  const std::size_t index = IndexOf(call);
  if (index == kCalls.size()) return NoSuchCall(call);
  const MutexLock lock(faults_->mutex);
  faults_->latency[index] = latency;
  armed_ = true;
  return {};
}

int Simulator::EnterSlow(Call call, std::uint64_t count) {
  std::chrono::nanoseconds latency{};
  std::shared_ptr<const Hook> hook;
  int result = 0;
  {
    const MutexLock lock(faults_->mutex);
    latency = faults_->latency[call];
    hook = faults_->hook;
    auto& planned = faults_->planned[call];
    const auto due = std::ranges::find_if(planned, [&](const auto& one) { return one.at_count == count; });
    if (due != planned.end()) {
      result = due->result;
      planned.erase(due);
    }
  }
  if (latency.count() > 0) Spend(latency);
  if (result == 0 && hook) result = (*hook)(kCalls[call], count);
  return result;
}

}  // namespace amem
