#include "replay/cycle/executor.h"

#include <algorithm>

namespace amem {
namespace {

bool AwaitsCopy(const Step& step) { return step.kind == StepKind::kSave || step.kind == StepKind::kRestore; }

// Steps that take something from the driver, or wait for it, run without the ledger's lock: this thread has the session to
// itself but for the service thread, which must be able to answer peers meanwhile.
bool NeedsLock(StepKind kind) {
  return kind == StepKind::kUnmap || kind == StepKind::kReleaseImport || kind == StepKind::kReleaseOwn ||
         kind == StepKind::kVerify;
}

}  // namespace

Status Executor::Run(const PlannedPhase& phase) {
  {
    const auto lock = ledger_.Lock();
    ledger_.Record(PhaseBegun{phase.phase});
    imports_.emplace(peers_, phase.imports, ledger_.state());
  }
  planned_copies_ = &phase.copies;
  copies_begun_ = 0;
  const auto last = std::ranges::find_if(phase.steps.rbegin(), phase.steps.rend(), AwaitsCopy);
  last_copy_ = last == phase.steps.rend() ? nullptr : &*last;
  Status status = copies_.BeginPhase(phase.phase);
  if (status.ok()) status = RunSteps(phase);
  performer_.EndPhase();
  imports_.reset();
  return status;
}

Status Executor::RunSteps(const PlannedPhase& phase) {
  Status status;
  for (auto step = phase.steps.begin(); step != phase.steps.end() && status.ok(); ++step) {
    if (step->kind == StepKind::kImport) status = imports_->Await(step->allocation);
    status = status.ok() ? RunOne(*step) : FailUnbegun(*step, std::move(status));
  }
  if (last_copy_ == nullptr || !copies_.Queued()) return status;
  // A step has failed, or the allocation of the last one has vanished.
  Status finished = copies_.Finish();
  if (!status.ok() || finished.ok()) return status;
  return FailUnbegun(*last_copy_, std::move(finished));
}

Status Executor::RunOne(const Step& step) {
  auto lock = ledger_.Lock();
  if (!Exists(step)) return {};
  ledger_.Record(StepBegun{step});
  const auto target = performer_.TargetOf(step);
  if (!target.ok()) return Fail(step, target.status());
  if (!NeedsLock(step.kind)) lock.unlock();
  const auto handle = performer_.Perform(step, *target);
  if (!lock.owns_lock()) lock.lock();
  if (!handle.ok()) return Fail(step, handle.status());
  if (!Exists(step)) return GiveBack(step, *handle);
  if (*handle) ledger_.SetHandle(step.allocation, *handle);
  if (step.kind == StepKind::kReleaseImport || step.kind == StepKind::kReleaseOwn) ledger_.ForgetHandle(step.allocation);
  ledger_.Record(StepDone{step});
  return {};
}

Status Executor::Copy(const Step& step) {
  if (!AwaitsCopy(step)) return copies_.Begin(planned_copies_->at(copies_begun_++));
  AMEM_TRY(copies_.Await(step));
  return &step == last_copy_ ? copies_.Finish() : Status{};
}

// An allocation that only a peer held is gone as soon as that peer lets go of it, or dies: also in the middle of a phase.
bool Executor::Exists(const Step& step) const {
  return !step.allocation || ledger_.state().allocations.contains(step.allocation);
}

Status Executor::GiveBack(const Step& step, DriverHandle handle) {
  const Status given = handle ? driver_.Release(handle) : Status{};
  const std::string why = ToText(step.allocation) + " was let go of meanwhile by the last peer that held it";
  ledger_.Record(StepFailed{step, given.code(), given.driver_result(), given.ok() ? why : given.message()});
  return given;
}

Status Executor::Fail(const Step& step, Status why) {
  why = why.Within(ToText(step));
  ledger_.Record(StepFailed{step, why.code(), why.driver_result(), why.message()});
  return why;
}

// The journal names the step although its own calls were never made.
Status Executor::FailUnbegun(const Step& step, Status why) {
  const auto lock = ledger_.Lock();
  ledger_.Record(StepBegun{step});
  return Fail(step, std::move(why));
}

}  // namespace amem
