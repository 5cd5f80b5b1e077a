#include "replay/cycle/cycle_journal.h"

#include <string>
#include <utility>

#include "journal/base/no_memory.h"
#include "journal/base/process_sight.h"
#include "replay/cycle/coordinator.h"

namespace amem {

Status LedgerIsHeld(const Ledger& ledger) {
  const Status held = ledger.Held();
  return {Code::kRefused, held.message() + OrRaiseTheTimeout("; let the device become idle before"), held.driver_result()};
}

Status Latched(Ledger& ledger, Status check) {
  if (check.ok()) return check;
  if (!ledger.TryLockFor(kToRecord)) {
    ledger.BreakSoonIfCheckFailed(check);
    return check;
  }
  const LedgerLock lock(ledger, std::adopt_lock);
  ledger.BreakIfCheckFailed(check);
  return check;
}

std::uint64_t NumberOf(CycleKind kind, const State& state, PoolId pool) {
  const std::uint64_t cycles = state.ScopeOf(pool).cycles;
  return kind == CycleKind::kPause && state.LifecycleOf(pool) == Lifecycle::kRunning ? cycles + 1 : cycles;
}

CycleProgress ProgressOf(const State& state, PoolId pool) { return {state.LifecycleOf(pool), state.ScopeOf(pool).cycles}; }

void CycleJournal::Vote(PhaseKind phase, const Status& mine) {
  if (!ledger_.TryLockFor(kToRecord)) return;
  const LedgerLock lock(ledger_, std::adopt_lock);
  ledger_.Record(VoteCast{phase, mine.ok(), mine.code(), mine.message(), pool_});
}

// The process's threads at the moment when a wait reached its deadline.
void CycleJournal::Threads() {
  constexpr std::size_t kThreadsMost = 64, kFramesMost = 32;
  if (std::exchange(has_threads_, true)) return;
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

void CycleJournal::NotBegun(const Status& why) {
  if (!ledger_.TryLockFor(kToRecord)) return;
  const LedgerLock lock(ledger_, std::adopt_lock);
  const Lifecycle now = ledger_.state().LifecycleOf(pool_);
  // After a failed undo something is left to do.
  const bool undone = now == Lifecycle::kRunning || now == Lifecycle::kPaused;
  ledger_.Record(
      CycleFailed{call_.kind, call_.cycle, undone, why.message(), why.code(), why.driver_result(), culprits_, pool_});
}

Status CycleJournal::CanPause() {
  if (!ledger_.TryLockUntil(executor_.until())) return LedgerIsHeld(ledger_);
  const LedgerLock lock(ledger_, std::adopt_lock);
  return ledger_.CanPause();
}

Result<bool> CycleJournal::Begun() {
  ledger_.AssertHeld();
  call_.cycle = NumberOf(call_.kind, ledger_.state(), pool_);
  CycleBegun begun{.kind = call_.kind, .cycle = call_.cycle, .pool = pool_, .keeps = call_.options.keeps};
  for (const PeerIdentity& member : call_.alone ? std::vector<PeerIdentity>() : call_.members) {
    begun.members.push_back(member.session);
    begun.processes.push_back(AsMember(member));
  }
  if (!ledger_.RecordIfThereIsMemory(std::move(begun))) return NoMemory();
  return ledger_.state().ScopeOf(pool_).cycle.after_failed_undo;
}

void CycleJournal::Decided(PhaseKind phase, const Status& why) {
  ledger_.AssertHeld();
  ledger_.Record(PhaseDecided{phase, why.ok(), why.ok() ? SessionId{} : why.reported_by(), why.message(), why.code(),
                              why.driver_result(), pool_});
}

}  // namespace amem
