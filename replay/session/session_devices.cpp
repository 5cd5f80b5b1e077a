#include "replay/session/session_devices.h"

#include <spdlog/fmt/fmt.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace amem {

SessionDevices::SessionDevices(const LowerParts& parts, Mutex& cycle_mutex, PinnedSupply& pinned, Coordinator& cycles,
                               Pools& pools, Records& records)
    : parts_(parts),
      driver_(parts.driver),
      ledger_(parts.ledger),
      cycle_mutex_(cycle_mutex),
      pinned_(pinned),
      cycles_(cycles),
      pools_(pools),
      records_(records) {}

Status SessionDevices::AwaitIdle() {
  const Deadline until = In(parts_.options.deadlines.call());
  Plan pause;
  {
    const LedgerLock lock(ledger_);
    if (ledger_.state().lifecycle == Lifecycle::kPaused) return {};  // nothing of NCCL's can run
    pause = PlanPause(ledger_.state(), {});
  }
  for (const Step& step : pause.phases.front().steps)
    if (step.kind == StepKind::kQuiesce) AMEM_TRY(driver_.Synchronize(step.device, until));
  return {};
}

Status SessionDevices::AwaitStreams(std::span<const std::pair<DeviceOrdinal, void*>> streams) {
  const Deadline until = In(parts_.options.deadlines.call());
  std::vector<std::pair<DeviceOrdinal, std::unique_ptr<StreamMoment>>> moments;
  for (const auto& [device, stream] : streams) {
    AMEM_ASSIGN(auto moment, driver_.MomentOf(device, stream));
    moments.emplace_back(device, std::move(moment));
  }
  for (const auto& [device, moment] : moments) AMEM_TRY(driver_.AwaitMoment(device, *moment, until));
  return {};
}

Status SessionDevices::HasRoomFor(std::span<const PoolId> scopes) {
  std::map<DeviceOrdinal, Bytes> needed;
  for (const PoolId scope : scopes) {
    const LedgerLock lock(ledger_);
    if (ledger_.state().LifecycleOf(scope) != Lifecycle::kPaused) continue;
    const Plan plan = PlanResume(ledger_.state(), scope);
    for (const PlannedPhase& phase : plan.phases) {
      for (const Step& step : phase.steps)
        if (step.kind == StepKind::kCheckMemory) needed[step.device] += step.bytes;
    }
  }
  for (const auto& [device, bytes] : needed) AMEM_TRY(CheckFreeMemory(driver_, device, bytes, "resume again"));
  return {};
}

void SessionDevices::TrimPinned(Bytes most) { TrimPinnedUntil(most, Deadline::max()); }

void SessionDevices::TrimPinnedUntil(Bytes most, Deadline until) {
  if (!TryLockUntil(cycle_mutex_, until)) return;
  cycle_mutex_.AssertHeld();
  const MutexLock cycle(cycle_mutex_, std::adopt_lock);
  cycles_.FreeUnfinished();
  pools_.FreeUnfinished();
  parts_.slabs.FreeUnfinished();
  pinned_.Trim(most);
}

std::vector<Address> SessionDevices::PartsOn(DeviceOrdinal device) {
  return Inspect(ledger_, [&](const State& state) {
    std::vector<Address> found;
    for (const auto& [id, pool] : state.pools)
      for (const auto& [address, part] : pool.parts)
        if (part.device == device) found.push_back(address);
    return found;
  });
}

void SessionDevices::Forget(DeviceOrdinal device) {
  ForgetParts(device, PartsOn(device), fmt::format("reset device {} (cudaDeviceReset)", device.value));
}

void SessionDevices::ForgetParts(DeviceOrdinal device, std::span<const Address> parts, std::string_view did) {
  for (const Address address : parts) static_cast<void>(pools_.Free(address, std::nullopt));
  TrimPinnedUntil(0, In(parts_.options.deadlines.call()));  // a cycle may wait for other ranks for as long as those like
  driver_.ForgetContext(device);
  const Bytes left = Inspect(ledger_, [&](const State& state) {
    Bytes sum = 0;
    for (const auto& [id, a] : state.allocations)
      if (a.on_device() && a.properties.location.id == device.value && !a.placed() && !a.multicast) sum += a.bytes;
    return sum;
  });
  if (left == 0 && pinned_.Count().pinned_bytes == 0) return;
  records_.Note(SessionBroken{fmt::format("the program {} while {}", did,
                                          left == 0 ? "contents of paused memory were in host memory that was pinned there"
                                                    : FormatBytes(left) + " there were AMem's or NCCL's")});
}

Driver::Released SessionDevices::ReleaseContext(DeviceOrdinal device, const std::function<int()>& release) {
  // Contents that are away, or on their way, need AMem's reference: then it stays. Nobody waits here, because a cycle may wait
  // for other ranks.
  if (!TryLockUntil(cycle_mutex_, Now())) return {release(), false};
  std::optional<Driver::Released> released;
  std::vector<Address> parts;  // those of before: another thread may make the context anew at once
  {
    cycle_mutex_.AssertHeld();
    const MutexLock cycle(cycle_mutex_, std::adopt_lock);
    parts = PartsOn(device);
    const auto let_go = [&] {
      released = driver_.ReleaseContext(device, release);
      if (released->gone) pinned_.Trim(0);  // before a cycle takes what was pinned there
    };
    if (!parts_.calls.paused()) pools_.IfAllRun(let_go);
  }
  if (!released) return {release(), false};
  if (released->gone)
    ForgetParts(device, parts,
                fmt::format("gave up the primary context of device {} (cuDevicePrimaryCtxRelease)", device.value));
  return *released;
}

}  // namespace amem
