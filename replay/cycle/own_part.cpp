#include "replay/cycle/own_part.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "journal/base/no_memory.h"
#include "statemachine/check.h"

namespace amem {

// What a pause or resume that has ended can do without, if the system gives no memory for it. False: it does not.
template <class Work>
static bool Tidy(const Work& work) {
  return OrNoMemory([&] { return work(), Status(); }).ok();
}

Status Coordinator::OwnPart::CloseGate(Deadline until) {
  Executor& executor = scope_.executor_;
  if (call_.kind == CycleKind::kPause) AMEM_TRY(ledger_.AwaitFiles(executor.until()));
  if (const Status closed = scope_.gate_.Close(LeftUntil(executor.until())); !closed.ok()) {
    if (!ledger_.TryLockFor(kToRecord)) return {closed.code(), closed.message() + "; " + ledger_.Held().message()};
    ledger_.unlock();
    std::string devices;
    if (const auto known = scope_.Devices(executor.until()); known.ok())
      for (const DeviceOrdinal device : *known) devices += (devices.empty() ? " " : " and ") + std::to_string(device.value);
    return {closed.code(),
            closed.message() + "; it waits for device" + devices +
                ", where a stream is full of work that does not end: " + OrRaiseTheTimeout("let that end before")};
  }
  closed_.emplace(scope_.gate_);
  if (call_.hooks.gate_closed) call_.hooks.gate_closed();
  executor.BeginCycle(scope_.context_.deadlines.OwnPartOf(until),
                      call_.options.after == nullptr ? ScanMode::kIdle : ScanMode::kBeside, call_.options.hosts_idle);
  return LeaveAllInPlaceIfAnyDoes();
}

void Coordinator::OwnPart::OpenGate() {
  if (closed_ && call_.hooks.gate_opens) Tidy([&] { call_.hooks.gate_opens(); });
  closed_.reset();
}

const PeerIdentity* Coordinator::OwnPart::Keeper() const {
  const auto found = std::ranges::find(call_.members, true, &PeerIdentity::keeps);
  return found == call_.members.end() ? nullptr : &*found;
}

// If one member leaves memory mapped, its owner must not make it anew. The session keeps everything even after that member has
// gone.
Status Coordinator::OwnPart::LeaveAllInPlaceIfAnyDoes() {
  const PeerIdentity* const keeper = Keeper();
  if (keeper == nullptr) return {};
  {
    if (!ledger_.TryLockUntil(scope_.executor_.until())) return LedgerIsHeld(ledger_);
    const LedgerLock lock(ledger_, std::adopt_lock);
    if (!ledger_.state().kept_whole.empty()) return {};
    ledger_.Record(EverythingKept{ToText(*keeper) + " keeps all memory in place"});
  }
  scope_.context_.peers.SetReleasesNothing();
  return {};
}

Result<Plan> Coordinator::OwnPart::PlanOf(CycleKind kind) {
  if (!ledger_.TryLockUntil(scope_.executor_.until())) return LedgerIsHeld(ledger_);
  const LedgerLock lock(ledger_, std::adopt_lock);
  return kind == CycleKind::kPause ? PlanPause(ledger_.state(), scope_.pool_) : PlanResume(ledger_.state(), scope_.pool_);
}

Status Coordinator::OwnPart::MakePlan() {
  AMEM_ASSIGN(plan_, PlanOf(call_.kind));
  return {};
}

Status Coordinator::OwnPart::CanRun(PhaseKind phase) const {
  AMEM_CHECK(closed_.has_value(), phase);  // no call may touch the memory meanwhile
  AMEM_CHECK(phase_ <= phase);
  return {};
}

Status Coordinator::OwnPart::Forward(PhaseKind phase, const std::function<bool()>& is_overtaken) {
  const auto planned = std::ranges::find(plan_.phases, phase, &PlannedPhase::phase);
  if (planned == plan_.phases.end()) return {};
  AMEM_TRY(Latched(ledger_, CanRun(phase)));
  phase_ = phase;
  Status mine = OrNoMemory([&] { return RunPhase(*planned, call_.hooks, is_overtaken); });
  if (!mine.ok() && call_.kind == CycleKind::kResume) mine = GoOn(*planned, mine);
  if (mine.ok() && scope_.context_.compare && phase == PhaseKind::kResumeVerify) mine = scope_.executor_.CompareRestored(plan_);
  return mine;
}

// This session's part of a phase. A pause that follows a stream waits for that moment of the stream and for no device, even if
// nothing is copied, because memory that was discarded or freed is released next.
Status Coordinator::OwnPart::RunPhase(const PlannedPhase& planned, const CycleHooks& hooks,
                                      const std::function<bool()>& is_overtaken) {
  Executor& executor = scope_.executor_;
  PlannedPhase phase = planned;
  if (scope_.followed_) std::erase_if(phase.steps, [](const Step& step) { return step.kind == StepKind::kBeginRestore; });
  const bool follows = call_.options.after != nullptr && phase.phase == PhaseKind::kPauseArrive;
  if (follows) std::erase_if(phase.steps, [](const Step& step) { return step.kind == StepKind::kQuiesce; });
  AMEM_TRY(executor.Run(phase, is_overtaken));
  if (follows) {
    AMEM_ASSIGN(const auto devices, scope_.Devices(executor.until()));
    for (const DeviceOrdinal device : devices) {
      AMEM_TRY(scope_.copier().Follow(device, *call_.options.after));
      AMEM_TRY(scope_.copier().FinishCopies(device, executor.until()));
    }
  }
  if (call_.kind == CycleKind::kPause) {  // who cannot pause votes no; if it did not arrive, the others would wait for it
    if (!ledger_.TryLockUntil(executor.until())) return LedgerIsHeld(ledger_);
    const LedgerLock lock(ledger_, std::adopt_lock);
    AMEM_TRY(ledger_.CanPause());
  }
  // A chunk is mapped for its own device, so once own memory exists all copies have begun. The program may use the memory from
  // here on, which would disturb a comparison.
  if (phase.phase == PhaseKind::kResumeCreateOwn && hooks.copies_queued && call_.alone && !scope_.context_.compare)
    hooks.copies_queued();
  return phase.phase == PhaseKind::kPauseArrive ? CanBegin() : Status{};
}

// What a stream uses cannot be taken back. All copies are queued, so only waiting for them is left, which is tried again for as
// long as an undo would have.
Status Coordinator::OwnPart::GoOn(const PlannedPhase& phase, Status why) {
  constexpr auto kBetween = std::chrono::milliseconds(10);
  scope_.followed_ = scope_.followed_ || (call_.hooks.is_followed && call_.hooks.is_followed());
  if (!scope_.followed_) return why;
  const Deadline until = In(scope_.context_.deadlines.undo());
  scope_.executor_.SetUntil(scope_.context_.deadlines.OwnPartOf(until));
  while (!why.ok() && !Passed(scope_.executor_.until())) {
    std::this_thread::sleep_for(kBetween);
    why = RunPhase(phase, {});
  }
  return why;
}

Status Coordinator::OwnPart::CanBegin() {
  const std::string again = "call " + NameOf(CycleKind::kPause, scope_.tag_) + " again on all ranks";
  SessionId outsider;
  const auto check = [&]() -> Status {
    if (!ledger_.TryLockUntil(scope_.executor_.until())) return LedgerIsHeld(ledger_);
    const LedgerLock lock(ledger_, std::adopt_lock);
    outsider = {};
    AMEM_TRY(AllNeighboursAreMembers(ledger_.state(), scope_.pool_, again, &outsider));
    // Where all memory stays, imports may stay, too.
    if (Keeper() == nullptr) AMEM_TRY(ImportsCanLeave(ledger_.state(), scope_.pool_, again));
    return scope_.pool_ ? Status{} : MulticastsCanLeave(ledger_.state());
  };
  Status can = check();
  // A member may have died before this session's journal knew of it; the members were then found without that one.
  for (SessionId awaited; outsider && outsider != awaited && scope_.context_.peers.AwaitLoss(outsider, kLossPatience);) {
    awaited = outsider;
    can = check();
  }
  return can;
}

// A phase of an undo is planned when it begins, and again if an owner is lost meanwhile.
Status Coordinator::OwnPart::Backward(PhaseKind phase, const std::function<bool()>& is_overtaken) {
  phase_ = phase;
  const CycleKind undo = phase >= PhaseKind::kResumeArrive ? CycleKind::kResume : CycleKind::kPause;
  PlannedPhase tried{phase, {}};
  while (true) {
    PlannedPhase now{phase, {}};
    AMEM_ASSIGN(Plan plan, PlanOf(undo));
    for (PlannedPhase& planned : plan.phases)
      if (planned.phase == phase) now = std::move(planned);
    Status status = scope_.executor_.Run(now, is_overtaken);
    if (status.code() != Code::kPeerLost || now == tried) return status;
    tried = std::move(now);
  }
}

// No member waits for this release, so it may take longer; what it does not release stays on the device.
Status Coordinator::OwnPart::ReleaseAgain() {
  scope_.executor_.SetUntil(std::max(scope_.executor_.until(), In(scope_.context_.deadlines.margin())));
  for (const PhaseKind phase : {PhaseKind::kPauseSave, PhaseKind::kPauseReleaseOwn, PhaseKind::kPauseGone})
    AMEM_TRY(Backward(phase, {}));
  return {};
}

void Coordinator::OwnPart::CheckMemoryToo() {
  scope_.executor_.BeginCycle(In(scope_.context_.deadlines.margin()));
  const auto plan = PlanOf(call_.kind);
  if (!plan.ok()) return;
  const auto arrive = std::ranges::find(plan->phases, PhaseKind::kResumeArrive, &PlannedPhase::phase);
  if (arrive != plan->phases.end()) static_cast<void>(RunPhase(*arrive, {}));
}

CycleProgress Coordinator::OwnPart::Conclude(CycleReport report, std::uint64_t began_ns) {
  Backup& backup = scope_.backup_;
  report.total_ns = MonotonicNs() - began_ns;
  NoteCopies();
  bool discards = false;
  CycleProgress ended;
  CycleDone done{.kind = call_.kind, .cycle = report.cycle, .duration_ns = report.total_ns, .pool = scope_.pool_};
  if (call_.kind == CycleKind::kPause && backup.Saved())
    Tidy([&] {
      const BackupStatistics contents = backup.Statistics();
      done.changed = contents.bytes_saved;
      done.unchanged = contents.bytes_unchanged;
      done.zero = contents.bytes_zero;
    });
  {
    const LedgerLock lock(ledger_);
    ledger_.Check(closed_.has_value(), "a pause or resume is done, and its scope's calls were let in before");
    ledger_.Check(call_.kind == CycleKind::kResume || backup.QueuedOn().empty(),
                  "a pause is done, and copies from the memory that it released are under way");
    ledger_.Record(done);
    ended = ProgressOf(ledger_.state(), scope_.pool_);
    Tidy([&] {
      ledger_.AssertHeld();
      scope_.host_memory_.Measure();
    });
    const auto* const pool = FindIn(ledger_.state().pools, scope_.pool_);
    discards = pool != nullptr && pool->policy == PoolPolicy::kDiscard;  // the next pause may save nothing
  }
  if (call_.kind == CycleKind::kResume && (discards || !Tidy([&] { backup.RetainCopy(); }))) Tidy([&] { backup.ForgetAll(); });
  scope_.followed_ = false;
  Tidy([&] {
    if (call_.kind == CycleKind::kPause && call_.options.after == nullptr) scope_.host_memory_.GiveSpareBack(began_ns);
  });
  Tidy([&] { scope_.reports_.AddDone(call_.kind, std::move(report)); });
  return ended;
}

void Coordinator::OwnPart::ForgetSave(bool undisturbed) {
  if (!Tidy([&] { scope_.backup_.Abandon(undisturbed); })) Tidy([&] { scope_.backup_.ForgetAll(); });
}

void Coordinator::OwnPart::NoteCopies() {
  Tidy([&] { scope_.unended_.Set(scope_.backup_.QueuedOn()); });
}

void Coordinator::OwnPart::EndCopies() {
  scope_.executor_.SetUntil(In(scope_.context_.deadlines.undo()));
  Tidy([&] { static_cast<void>(scope_.executor_.EndCopies()); });
}

}  // namespace amem
