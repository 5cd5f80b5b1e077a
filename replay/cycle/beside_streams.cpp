// What a pause or resume does while streams of the program go on: it follows one, leads one, and takes nothing back that one
// uses.
#include <chrono>
#include <thread>

#include "replay/cycle/coordinator.h"

namespace amem {

// What a stream uses cannot be taken back. All copies are queued, so only waiting for them is left, which is tried again for as
// long as an undo would have.
Status Coordinator::GoOn(const PlannedPhase& phase, const Manner& manner, Round& round, Status why) {
  constexpr auto kBetween = std::chrono::milliseconds(10);
  in_use_ = in_use_ || (manner.in_use && manner.in_use());
  if (!in_use_) return why;
  round.SetUntil(In(deadlines_.undo()));
  executor_.SetUntil(deadlines_.OwnPartOf(round.until()));
  while (!why.ok() && !Passed(executor_.until())) {
    std::this_thread::sleep_for(kBetween);
    why = RunPhase(phase, CycleKind::kResume, {});
  }
  return why;
}

// The next cycle waits for these copies too, and may fail again meanwhile.
Status Coordinator::AwaitCopies() {
  std::uint64_t since = copying_since_ns_;
  if (since == 0) return {};
  const Deadline until = In(deadlines_.call());
  for (const DeviceOrdinal device : Devices())
    AMEM_TRY(copier_.FinishCopies(device, until)
                 .Within("give memory back while copies of a pause or resume that failed are under way"));
  copying_since_ns_.compare_exchange_strong(since, 0);
  return {};
}

Status Coordinator::Lead(void* stream) {
  for (const DeviceOrdinal device : Devices()) AMEM_TRY(copier_.Lead(device, stream, In(deadlines_.call())));
  return {};
}

Result<std::unique_ptr<StreamMoment>> Coordinator::MomentOf(void* stream) {
  const auto devices = Devices();
  if (devices.empty()) return std::make_unique<StreamMoment>();  // waiting must open no context on a device
  return copier_.MomentOf(devices.front(), stream);
}

}  // namespace amem
