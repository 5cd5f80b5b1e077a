// What only tests and the stand-in driver ask of a simulator: what it holds, what it counted, how it is made to fail, and what
// the driver can and AMem does not need.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <thread>

#include "replay/driver/simulator/internal.h"

namespace amem {

struct Simulator::PlannedFaults final : Faults {
  struct Planned {
    std::uint64_t at_count = 0;
    int result = 0;
  };
  Mutex mutex{LockRank::kLast};
  std::array<std::vector<Planned>, kCalls.size()> planned GUARDED_BY(mutex);
  std::array<std::chrono::nanoseconds, kCalls.size()> latency GUARDED_BY(mutex){};
  std::shared_ptr<const Hook> hook GUARDED_BY(mutex);

  int Of(Call call, std::uint64_t count) override;
};

static Status NoSuchCall(std::string_view call) {
  std::string known;
  for (const std::string_view one : Simulator::kCalls) known.append(known.empty() ? "" : ", ").append(one);
  return {Code::kInvalid, "the simulator has no call '" + std::string(call) + "'; it has " + known};
}

// kCalls.size(): there is none of that name.
static std::size_t IndexOf(std::string_view call) {
  return static_cast<std::size_t>(std::ranges::find(Simulator::kCalls, call) - Simulator::kCalls.begin());
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

std::set<DeviceOrdinal> Simulator::ContextsOpened() const {
  const MutexLock lock(mutex_);
  return contexts_;
}

std::uint64_t Simulator::Calls(std::string_view call) const {
  const std::size_t index = IndexOf(call);
  return index == kCalls.size() ? 0 : counts_[index].load();
}

Bytes Simulator::PinnedBytes() const {
  const MutexLock lock(pinned_->mutex);
  Bytes bytes = 0;
  for (const auto& [data, size] : pinned_->buffers) bytes += size;
  return bytes;
}

Result<DriverHandle> Simulator::Retain(Address address) {
  const MutexLock lock(mutex_);
  const auto it = Containing(mappings_, address);
  if (it == mappings_.end())
    return SimulatedFailure(cuda::kInvalidValue, "cuMemRetainAllocationHandle " + Hex(address), "nothing is mapped there");
  ++it->second.memory->references;
  return it->second.memory->handle;
}

Result<AllocationProperties> Simulator::PropertiesOf(DriverHandle handle) {
  const MutexLock lock(mutex_);
  const auto memory = Find(handle);
  if (memory) return memory->properties;
  return SimulatedFailure(cuda::kInvalidValue, "cuMemGetAllocationPropertiesFromHandle " + OfHandle(handle), kNoSuchHandle);
}

Status Simulator::Kernel(DeviceOrdinal device, const Copy& access) {
  const auto pieces = LockAndResolve(device, access);
  if (pieces.ok()) return Perform(access, *pieces);
  dead_ = true;
  return SimulatedFailure(cuda::kIllegalAddress, "a kernel at " + InRange(access.device_address, access.bytes),
                          pieces.status().message());
}

Status Simulator::KernelReads(DeviceOrdinal device, Address from, std::span<std::byte> to) {
  return Kernel(device, {CopyKind::kKernelReads, from, to.data(), to.size()});
}

Status Simulator::KernelWrites(DeviceOrdinal device, Address to, std::span<const std::byte> from) {
  return Kernel(device, {CopyKind::kKernelWrites, to, const_cast<std::byte*>(from.data()), from.size()});
}

Simulator::PlannedFaults& Simulator::Plan() {
  const MutexLock lock(mutex_);
  if (planned_ == nullptr) planned_ = std::make_unique<PlannedFaults>();
  faults_.store(planned_.get(), std::memory_order_release);
  return static_cast<PlannedFaults&>(*planned_);
}

Status Simulator::FailNext(std::string_view call, std::uint64_t nth, int result) {
  const std::size_t index = IndexOf(call);
  if (index == kCalls.size()) return NoSuchCall(call);
  PlannedFaults& faults = Plan();
  const MutexLock lock(faults.mutex);
  faults.planned[index].push_back({counts_[index].load() + nth, result});
  return {};
}

void Simulator::ForgetPlannedFailures() {
  PlannedFaults& faults = Plan();
  const MutexLock lock(faults.mutex);
  for (auto& planned : faults.planned) planned.clear();
}

void Simulator::SetHook(Hook hook) {
  PlannedFaults& faults = Plan();
  const MutexLock lock(faults.mutex);
  faults.hook = hook ? std::make_shared<const Hook>(std::move(hook)) : nullptr;
}

Status Simulator::SetLatency(std::string_view call, std::chrono::nanoseconds latency) {
  const std::size_t index = IndexOf(call);
  if (index == kCalls.size()) return NoSuchCall(call);
  PlannedFaults& faults = Plan();
  const MutexLock lock(faults.mutex);
  faults.latency[index] = latency;
  return {};
}

int Simulator::PlannedFaults::Of(Call call, std::uint64_t count) {
  std::chrono::nanoseconds delay{};
  std::shared_ptr<const Hook> asked;
  int result = 0;
  {
    const MutexLock lock(mutex);
    delay = latency[call];
    asked = hook;
    auto& own = planned[call];
    const auto due = std::ranges::find_if(own, [&](const auto& one) { return one.at_count == count; });
    if (due != own.end()) {
      result = due->result;
      own.erase(due);
    }
  }
  if (delay.count() > 0) Spend(delay);
  if (result == 0 && asked) result = (*asked)(kCalls[call], count);
  return result;
}

}  // namespace amem
