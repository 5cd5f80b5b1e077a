// The coordinator's waits for the ledger and the gate, and what it records of a cycle that could not go on.
#include <algorithm>
#include <chrono>
#include <utility>

#include "journal/base/process_sight.h"
#include "replay/cycle/coordinator.h"

namespace amem {

// How long to wait for the ledger, which a hanging driver call may hold. After that the failure is not recorded.
constexpr std::chrono::milliseconds kToRecord{100};

bool Coordinator::TryLedger() { return ledger_.TryLockFor(std::max(LeftUntil(executor_.until()), kToRecord)); }

Status Coordinator::NoLedger() const {
  const Status held = ledger_.Held();
  return {Code::kRefused, held.message() + OrRaiseTheTimeout("; let the device become idle before"), held.driver_result()};
}

Result<std::vector<DeviceOrdinal>> Coordinator::Devices(Deadline until) {
  std::set<DeviceOrdinal> devices;
  if (!ledger_.TryLockFor(std::max(LeftUntil(until), kToRecord))) return NoLedger();
  const LedgerLock lock(ledger_, std::adopt_lock);
  for (const auto& [id, a] : ledger_.state().allocations)
    if (a.own() && a.pool == pool_ && a.on_device()) devices.insert(DeviceOrdinal{a.properties.location.id});
  return std::vector<DeviceOrdinal>(devices.begin(), devices.end());
}

Status Coordinator::CloseGate(Deadline until) {
  Status closed = gate_.Close(LeftUntil(until));
  if (closed.ok()) return closed;
  if (!ledger_.TryLockFor(kToRecord)) return {closed.code(), closed.message() + "; " + ledger_.Held().message()};
  ledger_.unlock();
  std::string devices;
  if (const auto known = Devices(until); known.ok())
    for (const DeviceOrdinal device : *known) devices += (devices.empty() ? " " : " and ") + std::to_string(device.value);
  return {closed.code(), closed.message() + "; it waits for device" + devices +
                             ", where a stream is full of work that does not end: " + OrRaiseTheTimeout("let that end before")};
}

void Coordinator::RecordNotBegun(CycleKind kind, std::uint64_t cycle, const Status& why) {
  Add(kind, {}, false);
  if (!ledger_.TryLockFor(kToRecord)) return;
  const LedgerLock lock(ledger_, std::adopt_lock);
  const Lifecycle now = ledger_.state().LifecycleOf(pool_);
  // After a failed undo something is left to do.
  const bool undone = now == Lifecycle::kRunning || now == Lifecycle::kPaused;
  ledger_.Record(CycleFailed{kind, cycle, undone, why.message(), why.code(), why.driver_result(), culprits_, pool_});
}

void Coordinator::RecordVote(PhaseKind phase, const Status& mine) {
  if (!ledger_.TryLockFor(kToRecord)) return;
  const LedgerLock lock(ledger_, std::adopt_lock);
  ledger_.Record(VoteCast{phase, mine.ok(), mine.code(), mine.message(), pool_});
}

// The process's threads at the moment when a wait reached its deadline.
void Coordinator::RecordThreads() {
  constexpr std::size_t kThreadsMost = 64, kFramesMost = 32;
  if (std::exchange(threads_recorded_, true)) return;
  std::vector<ThreadSight> threads = SeeOwnThreads(kThreadsMost);
  const std::vector<std::string> frames = OwnStack(kFramesMost);
  std::vector<FreeText> stack(frames.begin(), frames.end());
  if (!ledger_.TryLockFor(kToRecord)) return;
  const LedgerLock lock(ledger_, std::adopt_lock);
  for (ThreadSight& seen : threads) {  // the first is this one
    ledger_.Record(ThreadSeen{static_cast<std::uint32_t>(seen.thread), std::move(seen.name), std::move(seen.sight.state),
                              std::move(seen.sight.where), std::exchange(stack, {})});
  }
}

}  // namespace amem
