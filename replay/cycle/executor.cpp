#include "replay/cycle/executor.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <future>
#include <set>
#include <system_error>

namespace amem {
namespace {

constexpr std::size_t kStepsPerBatch =
    24;                                    // some 8 allocations: import, map, access; fewer at first, as everybody waits for it
constexpr std::size_t kBatchesComing = 6;  // asked for, and not imported yet
constexpr std::string_view kAskNvidiaSmi = " (nvidia-smi lists the processes that hold memory)";
constexpr Bytes kRestoreAtOnce = Bytes{256} << 20;

}  // namespace

Status Executor::Run(const PlannedPhase& phase) {
  {
    const auto lock = ledger_.Lock();
    ledger_.Record(PhaseBegun{phase.phase});
  }
  // What a pause began to copy is waited for where it is released. Any other phase that finds copies comes after a failure.
  const bool expected = phase.phase == PhaseKind::kPauseReleaseOwn
                            ? backup_.Saving()
                            : phase.phase == PhaseKind::kResumeImport && !backup_.Saving();
  Status status;
  if (!expected) status = backup_.Queued() || !restoring_.empty() ? FinishCopies() : DropScratch();
  if (status.ok()) status = RunSteps(phase.steps);
  if (status.ok() && phase.phase == PhaseKind::kPauseReleaseOwn && backup_.Queued()) {
    status = FinishCopies();
    if (!status.ok() &&
        !phase.steps.empty()) {  // of all copies; the journal must name a step, and this is the last that waited
      const auto lock = ledger_.Lock();
      ledger_.Record(StepBegun{phase.steps.back()});
      status = Fail(phase.steps.back(), std::move(status));
    }
  }
  fetched_.clear();
  stand_ins_.clear();
  return status;
}

Status Executor::RunSteps(const std::vector<Step>& steps) {
  std::vector<Step> imports, restores;
  bool importing = false;
  for (const Step& step : steps) {
    importing = importing || step.kind == StepKind::kImport;
    if (step.kind == StepKind::kRestore) {
      restores.push_back(step);
    } else if (importing) {
      imports.push_back(step);
    } else {
      AMEM_TRY(RunOne(step));
      if (step.kind == StepKind::kSetAccess) AMEM_TRY(RestoreSoon(step.allocation, step.address, kRestoreAtOnce));
    }
  }
  if (restores.empty()) AMEM_TRY(RestoreSoon({}, {}, 0));
  Step culprit;
  Status begun = restores.empty() ? Status{} : BeginRestores(restores, culprit);
  Status imported = begun.ok() ? RunImports(imports) : Status{};
  if (restores.empty()) return imported;
  if (!imported.ok()) {
    static_cast<void>(FinishCopies());  // what matters is why the imports failed
    return imported;
  }
  return FinishRestores(restores, std::move(begun), culprit);
}

Status Executor::Fail(const Step& step, Status why) {
  why = why.Within(ToText(step));
  ledger_.Record(StepFailed{step, why.code(), why.driver_result(), why.message()});
  return why;
}

// Steps that take something from the driver, or wait for it, run without the ledger's lock: this thread has the session to
// itself but for the service thread, which must be able to answer peers meanwhile.
bool Executor::NeedsLock(StepKind kind) {
  return kind == StepKind::kUnmap || kind == StepKind::kReleaseImport || kind == StepKind::kReleaseOwn ||
         kind == StepKind::kVerify;
}

Status Executor::RunOne(const Step& step) {
  auto lock = ledger_.Lock();
  if (!Exists(step)) return {};
  ledger_.Record(StepBegun{step});
  const Target target = TargetOf(step);
  if (!NeedsLock(step.kind)) lock.unlock();
  auto handle = Perform(step, target);
  if (!lock.owns_lock()) lock.lock();
  if (!handle.ok()) return Fail(step, handle.status());
  if (!Exists(step)) return GiveBack(step, *handle);
  if (*handle) ledger_.SetHandle(step.allocation, *handle);
  if (step.kind == StepKind::kReleaseImport || step.kind == StepKind::kReleaseOwn) ledger_.ForgetHandle(step.allocation);
  if (step.kind == StepKind::kReleaseImport) standing_in_.erase(step.allocation);
  ledger_.Record(StepDone{step});
  return {};
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

Executor::Target Executor::TargetOf(const Step& step) const {
  Target target;
  const State& state = ledger_.state();
  if (step.allocation) {
    target.handle = ledger_.HandleOf(step.allocation);
    if (const auto it = state.allocations.find(step.allocation); it != state.allocations.end()) {
      target.bytes = it->second.bytes;
      target.properties = it->second.properties;
      target.flags = it->second.flags;
      target.stands_in = state.Orphaned(it->second);
    }
  }
  if (step.address) {
    if (const auto it = state.mappings.find(step.address); it != state.mappings.end()) target.mapping = it->second;
  }
  return target;
}

Result<DriverHandle> Executor::Perform(const Step& step, const Target& target) {
  const auto done = [](Status status) {
    return status.ok() ? Result<DriverHandle>(DriverHandle{}) : Result<DriverHandle>(std::move(status));
  };
  const Mapping& m = target.mapping;
  switch (step.kind) {
    case StepKind::kQuiesce:
      return done(driver_.Synchronize(step.device));
    case StepKind::kCheckMemory:
      return done(CheckMemory(step));
    case StepKind::kUnmap:
      return done(driver_.Unmap(step.address, m.bytes));
    case StepKind::kReleaseImport:
    case StepKind::kReleaseOwn:
      return done(driver_.Release(target.handle));
    case StepKind::kCreate:
      return target.stands_in ? StandIn(step) : driver_.Create(target.bytes, target.properties, target.flags);
    case StepKind::kImport:
      return Import(step);
    case StepKind::kMap:
      return done(Map(step, target));
    case StepKind::kSetAccess:
      return done(SetAccess(step, m));
    case StepKind::kVerify:
      return done(Verify());
    case StepKind::kScan:
      return done(Find(step));
    case StepKind::kSave:
      return done(AwaitSaved(step));
    default:
      return Status{Code::kInvalid, "no such step"};
  }
}

Status Executor::CheckMemory(const Step& step) {
  auto memory = driver_.Memory(step.device);
  if (!memory.ok()) return memory.status();
  if (memory->free >= step.bytes) return {};
  const std::string holders = ToText(driver_.MemoryHolders(step.device), ::getpid());
  return {Code::kOutOfMemory,
          "device " + std::to_string(step.device.value) + " has " + FormatBytes(memory->free) + " free of " +
              FormatBytes(memory->total) + ", and " + FormatBytes(step.bytes) + " must come back; free at least " +
              FormatBytes(step.bytes - memory->free) + " on it" + (holders.empty() ? std::string(kAskNvidiaSmi) : holders) +
              " and call ncclResume again",
          cuda::kOutOfMemory};
}

// What stands in for lost memory costs next to nothing, as nobody can expect anything of its contents: a small piece is mapped
// over and over.
Result<DriverHandle> Executor::StandIn(const Step& step) {
  const Bytes piece = StandInPiece(step.bytes);
  standing_in_.insert(step.allocation);
  UniqueFd& shared = stand_ins_[{step.device, piece}];
  if (shared) return driver_.Import(shared);
  AllocationProperties properties;
  properties.handle_types = 1;
  properties.location = {LocationType::kDevice, step.device.value};
  auto handle = driver_.Create(piece, properties, 0);
  if (!handle.ok()) return handle;
  auto exported = driver_.Export(*handle);  // where that fails, the next one gets a piece of its own
  if (exported.ok()) shared = *std::move(exported);
  return handle;
}

Status Executor::Map(const Step& step, const Target& target) {
  const Mapping& m = target.mapping;
  if (!standing_in_.contains(step.allocation)) return driver_.Map(step.address, m.bytes, m.offset, target.handle, m.flags);
  const Bytes piece = StandInPiece(target.bytes);
  for (Bytes done = 0; done < m.bytes; done += piece) {
    Status mapped = driver_.Map(step.address + done, piece, 0, target.handle, m.flags);
    if (mapped.ok()) continue;
    if (done > 0) static_cast<void>(driver_.Unmap(step.address, done));
    return mapped;
  }
  return {};
}

Status Executor::SetAccess(const Step& step, const Mapping& mapping) {
  AMEM_TRY(driver_.SetAccess(step.address, mapping.bytes, mapping.access));
  if (!standing_in_.contains(step.allocation)) return {};
  for (const AccessDescriptor& a : mapping.access) {  // old flags in it would be believed by a kernel
    if (a.location.type != LocationType::kDevice || a.flags != 3) continue;
    const DeviceOrdinal device{a.location.id};
    AMEM_TRY(driver_.Clear(device, step.address, StandInPiece(step.bytes)));
    return driver_.FinishCopies(device);
  }
  return {};
}

Result<DriverHandle> Executor::Import(const Step& step) {
  const auto fetched = fetched_.find(step.allocation);
  if (fetched == fetched_.end()) return Status{Code::kInvalid, "the owner's descriptor was not fetched"};
  auto handle = driver_.Import(fetched->second);
  fetched_.erase(fetched);
  return handle;
}

// That everything is gone is checked when the pause is done; that everything is as it was takes a look at everything.
Status Executor::Verify() {
  if (ledger_.state().lifecycle == Lifecycle::kResuming) AMEM_TRY(CheckInvariants(ledger_.state()));
  for (const auto& [id, a] : ledger_.state().allocations) {
    if (a.multicast) continue;
    if (a.placed()) {
      if (ledger_.HandleOf(id)) return {Code::kInvalid, ToText(id) + " is part of a slab and has a driver handle"};
      continue;
    }
    if (a.resident != static_cast<bool>(ledger_.HandleOf(id))) {
      return {Code::kInvalid, ToText(id) + (a.resident ? " should have a driver handle and has none"
                                                       : " has a driver handle and should have none")};
    }
  }
  return {};
}

// One owner's steps in batches of descriptors that a process may hold open at once; the owners take turns, every session
// beginning with the one after itself, so that not all ask the same one.
std::vector<Executor::Batch> Executor::Batches(const std::vector<Step>& steps) {
  std::map<SessionId, std::vector<Batch>> by_owner;
  const auto lock = ledger_.Lock();
  const State& state = ledger_.state();
  const SessionId self = state.session.session;
  AllocationId last;
  for (const Step& step : steps) {
    if (!Exists(step)) continue;
    const auto& remote = state.allocations.at(step.allocation).remote;
    const SessionId owner = remote ? remote->owner : self;
    auto& batches = by_owner[owner];
    const std::size_t enough = kStepsPerBatch >> (3 - std::min<std::size_t>(batches.size(), 3));
    if (batches.empty() || (batches.back().steps.size() >= enough && step.allocation != last))
      batches.push_back({owner, {}, {}});
    batches.back().steps.push_back(step);
    if (step.kind == StepKind::kImport && remote) batches.back().requests.push_back({remote->allocation, step.allocation});
    last = step.allocation;
  }
  std::vector<Batch> all;
  for (std::size_t round = 0, before = 1; all.size() != before; ++round) {
    before = all.size();
    const auto take = [&](auto begin, auto end) {
      for (auto it = begin; it != end; ++it) {
        if (round < it->second.size()) all.push_back(std::move(it->second[round]));
      }
    };
    const auto after_self = by_owner.upper_bound(self);
    take(after_self, by_owner.end());
    take(by_owner.begin(), after_self);
  }
  return all;
}

// A few owners export at the same time as this session imports what came before.
Status Executor::RunImports(const std::vector<Step>& steps) {
  std::vector<Batch> batches = Batches(steps);
  using Shared = Result<std::vector<SharedAllocation>>;
  std::deque<std::future<Shared>> coming;
  std::size_t asked = 0;
  for (const Batch& batch : batches) {
    for (; asked < batches.size() && coming.size() < kBatchesComing; ++asked) {
      const auto ask = [this, &wanted = batches[asked]]() -> Shared {
        if (wanted.requests.empty()) return std::vector<SharedAllocation>();
        return peers_.Reimport(wanted.owner, wanted.requests);
      };
      try {
        coming.push_back(std::async(std::launch::async, ask));
      } catch (const std::system_error&) {  // no thread to be had: it is asked when it is waited for
        coming.push_back(std::async(std::launch::deferred, ask));
      }
    }
    Shared shared = coming.front().get();
    coming.pop_front();
    if (!shared.ok()) {
      // So that a new plan takes what it shared for lost.
      if (shared.status().code() == Code::kPeerLost) static_cast<void>(peers_.AwaitLoss(batch.owner));
      const auto lock = ledger_.Lock();
      const auto import = std::ranges::find_if(batch.steps, [](const Step& step) { return step.kind == StepKind::kImport; });
      ledger_.Record(StepBegun{*import});
      return Fail(*import, shared.status());
    }
    for (std::size_t i = 0; i < batch.requests.size(); ++i) fetched_[batch.requests[i].as] = std::move((*shared)[i].descriptor);
    for (const Step& step : batch.steps) AMEM_TRY(RunOne(step));
  }
  return {};
}

Status Executor::MapForCopy(const Step& step, std::vector<Backup::Item>& items) {
  const State& state = ledger_.state();
  if (const auto slab = state.slabs.find(step.allocation); slab != state.slabs.end()) {
    for (const auto& [offset, parts] : slab->second.parts) {
      const AllocationId part = parts.front();
      items.push_back({part, step.device, slab->second.address + offset, state.allocations.at(part).bytes});
    }
    return {};
  }
  if (step.address) {
    items.push_back({step.allocation, step.device, step.address, step.bytes});
    return {};
  }
  // Not mapped for its own device: reach the contents through a mapping of our own for the time of the copy.
  const Allocation& a = state.allocations.at(step.allocation);
  auto range = driver_.Reserve(a.bytes, 0, {}, 0);
  if (!range.ok()) return range.status();
  Scratch& scratch = scratch_[step.allocation];
  scratch = {*range, a.bytes, false};
  AMEM_TRY(driver_.Map(*range, a.bytes, 0, ledger_.HandleOf(step.allocation), 0));
  scratch.mapped = true;
  const AccessDescriptor access{a.properties.location, 3};
  AMEM_TRY(driver_.SetAccess(*range, a.bytes, std::span(&access, 1)));
  items.push_back({step.allocation, step.device, *range, step.bytes});
  return {};
}

Status Executor::Find(const Step& step) {
  std::vector<Backup::Item> items;
  {
    const auto lock = ledger_.Lock();
    for (const Step& save : ContentsToSave(ledger_.state())) {
      if (save.device == step.device) AMEM_TRY(MapForCopy(save, items));
    }
  }
  return backup_.Save(items);
}

Status Executor::AwaitSaved(const Step& step) {
  std::vector<AllocationId> allocations;
  {
    const auto lock = ledger_.Lock();
    const auto slab = ledger_.state().slabs.find(step.allocation);
    if (slab == ledger_.state().slabs.end()) {
      allocations.push_back(step.allocation);
    } else {
      for (const auto& [offset, parts] : slab->second.parts) allocations.push_back(parts.front());
    }
  }
  for (const AllocationId allocation : allocations) AMEM_TRY(backup_.AwaitSaved(allocation));
  const auto scratch = scratch_.find(step.allocation);
  if (scratch == scratch_.end()) return {};
  AMEM_TRY(Drop(scratch->second));
  scratch_.erase(scratch);
  return {};
}

Status Executor::Drop(Scratch& scratch) {
  if (scratch.mapped) AMEM_TRY(driver_.Unmap(scratch.address, scratch.bytes));
  scratch.mapped = false;
  return driver_.FreeRange(scratch.address, scratch.bytes);
}

// What the driver refuses to take back stays noted, and is tried again in the next phase: it would hold memory for ever.
Status Executor::DropScratch() {
  Status first;
  for (auto it = scratch_.begin(); it != scratch_.end();) {
    const Status dropped = Drop(it->second);
    if (first.ok()) first = dropped;
    it = dropped.ok() ? scratch_.erase(it) : std::next(it);
  }
  return first;
}

Status Executor::FinishCopies() {
  Status finished = backup_.Finish();
  restorable_.clear();
  restorable_bytes_ = 0;
  restoring_.clear();
  if (backup_.Queued()) return finished;  // copies may still be under way there
  Status dropped = DropScratch();
  return finished.ok() ? dropped : finished;
}

// Of an own allocation that can be reached through its own mapping. The others wait for their restore steps.
Status Executor::RestoreSoon(AllocationId allocation, Address address, Bytes enough) {
  const auto lock = ledger_.Lock();
  if (const auto step = ContentsToRestore(ledger_.state(), allocation, address); step && !restoring_.contains(allocation)) {
    AMEM_TRY(MapForCopy(*step, restorable_));
    restoring_.insert(allocation);
    restorable_bytes_ += step->bytes;
  }
  if (restorable_.empty() || restorable_bytes_ < enough) return {};
  const std::vector<Backup::Item> items = std::exchange(restorable_, {});
  restorable_bytes_ = 0;
  Status begun = backup_.Restore(items);
  if (begun.ok()) return {};
  const Step culprit{StepKind::kRestore, items.front().allocation, items.front().address, items.front().bytes,
                     items.front().device};
  ledger_.Record(StepBegun{culprit});
  return Fail(culprit, std::move(begun));
}

Status Executor::BeginRestores(const std::vector<Step>& steps, Step& culprit) {
  culprit = steps.front();
  std::vector<Backup::Item> items;
  const auto lock = ledger_.Lock();
  for (const Step& step : steps) {
    if (!Exists(step) || restoring_.contains(step.allocation)) continue;
    if (Status reached = MapForCopy(step, items); !reached.ok()) {
      culprit = step;
      return reached;
    }
  }
  return items.empty() ? Status{} : backup_.Restore(items);
}

Status Executor::FinishRestores(const std::vector<Step>& steps, Status begun, Step culprit) {
  Status finished = FinishCopies();
  if (begun.ok()) begun = std::move(finished);
  const auto lock = ledger_.Lock();
  if (!begun.ok()) {
    ledger_.Record(StepBegun{culprit});
    return Fail(culprit, std::move(begun));
  }
  for (const Step& step : steps) {
    if (!Exists(step)) continue;
    ledger_.Record(StepBegun{step});
    ledger_.Record(StepDone{step});
  }
  return {};
}

}  // namespace amem
