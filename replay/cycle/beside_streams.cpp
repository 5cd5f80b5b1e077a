// What a pause or resume does while streams of the program go on: it follows one, leads one, and takes nothing back that one
// uses.
#include <chrono>
#include <thread>

#include "replay/cycle/coordinator.h"

namespace amem {

// What a stream uses cannot be taken back. All copies are queued, so only waiting for them is left, which is tried again for as
// long as an undo would have.
Status Coordinator::GoOn(const PlannedPhase& phase, const Manner& manner, Status why) {
  constexpr auto kBetween = std::chrono::milliseconds(10);
  in_use_ = in_use_ || (manner.in_use && manner.in_use());
  if (!in_use_) return why;
  const Deadline until = In(deadlines_.undo());
  executor_.SetUntil(deadlines_.OwnPartOf(until));
  while (!why.ok() && !Passed(executor_.until())) {
    std::this_thread::sleep_for(kBetween);
    why = RunPhase(phase, CycleKind::kResume, {});
  }
  return why;
}

// The next cycle waits for these copies too, and may fail again meanwhile.
Status Coordinator::AwaitCopies() {
  const auto under_way = [this] {
    const std::lock_guard lock(copying_mutex_);
    return copying_since_ns_;
  }();
  const Deadline until = In(deadlines_.call());
  for (const auto& [device, since] : under_way) {
    AMEM_TRY(copier_.FinishCopies(device, until)
                 .Within("give memory back while copies of a pause or resume that failed are under way"));
    const std::lock_guard lock(copying_mutex_);
    if (const auto* const still = FindIn(copying_since_ns_, device); still != nullptr && *still == since)
      copying_since_ns_.erase(device);
  }
  return {};
}

void Coordinator::NoteCopies() {
  const std::lock_guard lock(copying_mutex_);
  copying_since_ns_.clear();
  for (const DeviceOrdinal device : backup_.QueuedOn()) copying_since_ns_.emplace(device, MonotonicNs());
}

Status Coordinator::Lead(void* stream) {
  const Deadline until = In(deadlines_.call());
  AMEM_ASSIGN(const auto devices, Devices(until));
  for (const DeviceOrdinal device : devices) AMEM_TRY(copier_.Lead(device, stream, until));
  return {};
}

Result<std::unique_ptr<StreamMoment>> Coordinator::MomentOf(void* stream) {
  AMEM_ASSIGN(const auto devices, Devices(In(deadlines_.call())));
  if (devices.empty()) return std::make_unique<StreamMoment>();  // waiting must open no context on a device
  return copier_.MomentOf(devices.front(), stream);
}

}  // namespace amem
