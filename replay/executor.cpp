#include "replay/executor.h"

#include <set>

namespace amem {
namespace {

constexpr std::size_t kStepsPerBatch = 600;  // some 200 allocations: import, map, access

bool IsCopy(StepKind kind) { return kind == StepKind::kSave || kind == StepKind::kRestore; }

std::string Name(AllocationId id) { return "allocation " + std::to_string(id.value); }

}  // namespace

Status Executor::Run(const PlannedPhase& phase) {
  {
    const auto lock = ledger_.Lock();
    ledger_.Record(PhaseBegun{phase.phase});
  }
  Status status = RunSteps(phase.steps);
  fetched_.clear();
  return status;
}

Status Executor::RunSteps(const std::vector<Step>& steps) {
  std::vector<Step> imports, copies;
  bool importing = false;
  for (const Step& step : steps) {
    importing = importing || step.kind == StepKind::kImport;
    if (IsCopy(step.kind)) {
      copies.push_back(step);
    } else if (importing) {
      imports.push_back(step);
    } else {
      AMEM_TRY(RunOne(step));
    }
  }
  AMEM_TRY(RunImports(imports));
  return copies.empty() ? Status{} : RunCopies(copies);
}

Status Executor::Fail(const Step& step, Status why) {
  why = why.Within(ToText(step));
  ledger_.Record(StepFailed{step, why.code(), why.driver_result(), why.message()});
  return why;
}

Status Executor::RunOne(const Step& step) {
  // The lock is held over the driver call and its events, as everywhere; waiting for a device is not under it.
  if (step.kind == StepKind::kQuiesce) {
    auto lock = ledger_.Lock();
    ledger_.Record(StepBegun{step});
    lock.unlock();
    Status idle = driver_.Synchronize(step.device);
    lock.lock();
    if (!idle.ok()) return Fail(step, std::move(idle));
    ledger_.Record(StepDone{step});
    return {};
  }
  const auto lock = ledger_.Lock();
  ledger_.Record(StepBegun{step});
  Status done;
  const State& state = ledger_.state();
  switch (step.kind) {
    case StepKind::kUnmap:
      done = driver_.Unmap(step.address, state.mappings.at(step.address).bytes);
      break;
    case StepKind::kReleaseImport:
    case StepKind::kReleaseOwn:
      done = driver_.Release(ledger_.HandleOf(step.allocation));
      if (done.ok()) ledger_.ForgetHandle(step.allocation);
      break;
    case StepKind::kCheckMemory:
      done = CheckMemory(step);
      break;
    case StepKind::kCreate: {
      const Allocation& a = state.allocations.at(step.allocation);
      auto handle = driver_.Create(a.bytes, a.properties, a.flags);
      if (handle.ok()) {
        ledger_.SetHandle(step.allocation, *handle);
      } else {
        done = handle.status();
      }
      break;
    }
    case StepKind::kImport:
      done = Import(step);
      break;
    case StepKind::kMap: {
      const Mapping& m = state.mappings.at(step.address);
      done = driver_.Map(step.address, m.bytes, m.offset, ledger_.HandleOf(step.allocation), m.flags);
      break;
    }
    case StepKind::kSetAccess: {
      const Mapping& m = state.mappings.at(step.address);
      done = driver_.SetAccess(step.address, m.bytes, m.access);
      break;
    }
    case StepKind::kVerify:
      done = Verify();
      break;
    default:
      done = {Code::kInvalid, "no such step"};
  }
  if (!done.ok()) return Fail(step, std::move(done));
  ledger_.Record(StepDone{step});
  return {};
}

Status Executor::CheckMemory(const Step& step) {
  auto memory = driver_.Memory(step.device);
  if (!memory.ok()) return memory.status();
  if (memory->free >= step.bytes) return {};
  return {Code::kOutOfMemory,
          "device " + std::to_string(step.device.value) + " has " + FormatBytes(memory->free) + " free of " +
              FormatBytes(memory->total) + ", and " + FormatBytes(step.bytes) + " must come back; free at least " +
              FormatBytes(step.bytes - memory->free) +
              " on it (nvidia-smi lists the processes that hold memory) and call ncclResume again",
          cuda::kOutOfMemory};
}

Status Executor::Import(const Step& step) {
  const auto fetched = fetched_.find(step.allocation);
  if (fetched == fetched_.end()) return {Code::kInvalid, "the owner's descriptor was not fetched"};
  auto handle = driver_.Import(fetched->second);
  fetched_.erase(fetched);
  if (!handle.ok()) return handle.status();
  ledger_.SetHandle(step.allocation, *handle);
  return {};
}

Status Executor::Verify() {
  AMEM_TRY(CheckInvariants(ledger_.state()));
  for (const auto& [id, a] : ledger_.state().allocations) {
    if (a.multicast) continue;
    if (a.backed != static_cast<bool>(ledger_.HandleOf(id))) {
      return {Code::kInvalid, Name(id) + (a.backed ? " should have a driver handle and has none"
                                                   : " has a driver handle and should have none")};
    }
  }
  return {};
}

// Descriptors come from their owners in batches that a process may hold open at once. Every session begins with the owner
// after itself, so that not all ask the same one.
Status Executor::RunImports(const std::vector<Step>& steps) {
  std::map<SessionId, std::vector<std::vector<Step>>> by_owner;
  SessionId self;
  {
    const auto lock = ledger_.Lock();
    const State& state = ledger_.state();
    self = state.session.session;
    AllocationId last;
    for (const Step& step : steps) {
      const auto& remote = state.allocations.at(step.allocation).remote;
      auto& batches = by_owner[remote ? remote->owner : self];
      if (batches.empty() || (batches.back().size() >= kStepsPerBatch && step.allocation != last)) batches.emplace_back();
      batches.back().push_back(step);
      last = step.allocation;
    }
  }
  std::vector<SessionId> owners;
  for (auto it = by_owner.upper_bound(self); it != by_owner.end(); ++it) owners.push_back(it->first);
  for (auto it = by_owner.begin(); it != by_owner.end() && !(self < it->first); ++it) owners.push_back(it->first);
  for (const SessionId owner : owners) {
    for (const auto& batch : by_owner[owner]) {
      AMEM_TRY(Fetch(owner, batch));
      for (const Step& step : batch) AMEM_TRY(RunOne(step));
    }
  }
  return {};
}

Status Executor::Fetch(SessionId owner, const std::vector<Step>& steps) {
  std::vector<ShareRequest> requests;
  {
    const auto lock = ledger_.Lock();
    for (const Step& step : steps) {
      if (step.kind == StepKind::kImport)
        requests.push_back({ledger_.state().allocations.at(step.allocation).remote->allocation, step.allocation});
    }
  }
  if (requests.empty()) return {};
  auto shared = peers_.Reimport(owner, requests);
  if (!shared.ok()) return shared.status();
  for (std::size_t i = 0; i < requests.size(); ++i) fetched_[requests[i].as] = std::move((*shared)[i].descriptor);
  return {};
}

Result<Backup::Item> Executor::Reach(const Step& step) {
  if (step.address) return Backup::Item{step.allocation, step.device, step.address, step.bytes};
  // Not mapped for its own device: reach the contents through a mapping of our own for the time of the copy.
  const Allocation& a = ledger_.state().allocations.at(step.allocation);
  auto range = driver_.Reserve(a.bytes, 0, {}, 0);
  if (!range.ok()) return range.status();
  Status mapped = driver_.Map(*range, a.bytes, 0, ledger_.HandleOf(step.allocation), 0);
  if (!mapped.ok()) {
    static_cast<void>(driver_.FreeRange(*range, a.bytes));
    return mapped;
  }
  scratch_.push_back({*range, a.bytes});
  const AccessDescriptor access{a.properties.location, 3};
  AMEM_TRY(driver_.SetAccess(*range, a.bytes, std::span(&access, 1)));
  return Backup::Item{step.allocation, step.device, *range, step.bytes};
}

Status Executor::RunCopies(const std::vector<Step>& steps) {
  Status failed;
  Step culprit = steps.front();
  {
    const auto lock = ledger_.Lock();
    std::vector<Backup::Item> saves, restores;
    for (const Step& step : steps) {
      auto item = Reach(step);
      if (!item.ok()) {
        failed = item.status();
        culprit = step;
        break;
      }
      (step.kind == StepKind::kSave ? saves : restores).push_back(*item);
    }
    if (failed.ok() && !saves.empty()) failed = backup_.Save(saves);
    if (failed.ok() && !restores.empty()) failed = backup_.Restore(restores);
  }
  Status finished = backup_.Finish();
  const auto lock = ledger_.Lock();
  for (const Scratch& s : scratch_) {
    Status undone = driver_.Unmap(s.address, s.bytes);
    if (undone.ok()) undone = driver_.FreeRange(s.address, s.bytes);
    if (finished.ok()) finished = std::move(undone);
  }
  scratch_.clear();
  if (failed.ok()) failed = std::move(finished);
  if (!failed.ok()) {
    ledger_.Record(StepBegun{culprit});
    return Fail(culprit, std::move(failed));
  }
  for (const Step& step : steps) {
    ledger_.Record(StepBegun{step});
    ledger_.Record(StepDone{step});
  }
  return {};
}

}  // namespace amem
