#include "replay/cycle/executor.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <system_error>
#include <thread>

#include "journal/base/no_memory.h"
#include "statemachine/check.h"

namespace amem {

static bool AwaitsCopy(const Step& step) { return step.kind == StepKind::kSave || step.kind == StepKind::kRestore; }

// Steps that take something from the driver, or wait for it, run without the ledger's lock, because the service thread must
// answer peers meanwhile. No other thread works on the session.
static bool NeedsLock(StepKind kind) {
  return kind == StepKind::kUnmap || kind == StepKind::kReleaseImport || kind == StepKind::kReleaseOwn ||
         kind == StepKind::kVerify || kind == StepKind::kUnbind;
}

// These steps change nothing in the driver, so the state lacks nothing if their end cannot be recorded in time.
static bool OnlyWaits(StepKind kind) {
  return kind == StepKind::kQuiesce || kind == StepKind::kCheckMemory || kind == StepKind::kScan || kind == StepKind::kSave;
}

constexpr std::size_t kBatchesComing = 6;  // asked for and not yet imported

Executor::PhaseRun::PhaseRun(Executor& executor, const PlannedPhase& phase, const std::function<bool()>& overtaken)
    : planned(phase),
      is_overtaken(overtaken),
      imports(executor.peers_, phase.imports, executor.ledger_.state(), executor.until_) {
  const auto last = std::ranges::find_if(phase.steps.rbegin(), phase.steps.rend(), AwaitsCopy);
  if (last != phase.steps.rend()) last_copy = &*last;
}

Status Executor::Run(const PlannedPhase& phase, const std::function<bool()>& is_overtaken) {
  {
    if (!ledger_.TryLockUntil(until_)) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    if (!ledger_.Check(!phase_, "a phase begins while another one runs")) return ledger_.Broken();
    ledger_.Record(PhaseBegun{phase.phase, pool_});
    phase_.emplace(*this, phase, is_overtaken);
  }
  const PhaseEnd end{*this};  // also where the system gives no memory
  Status status = copies_.BeginPhase(phase.phase);
  if (status.ok()) status = RunSteps(phase);
  return status;
}

Executor::PhaseEnd::~PhaseEnd() {
  executor.performer_.EndPhase();
  executor.phase_.reset();
}

Status Executor::CompareRestored(const Plan& resume) {
  std::vector<Step> restored;
  for (const PlannedPhase& phase : resume.phases)
    std::ranges::copy_if(phase.steps, std::back_inserter(restored), [](const Step& s) { return s.kind == StepKind::kRestore; });
  return copies_.Compare(restored);
}

Status Executor::RunSteps(const PlannedPhase& phase) {
  Status status;
  for (auto step = phase.steps.begin(); step != phase.steps.end() && status.ok(); ++step) {
    if (IsOvertaken()) {
      status = {Code::kRefused, "the others have ended this phase without this rank"};
      break;
    }
    if (step->kind == StepKind::kImport) status = phase_->imports.Await(step->allocation);
    status = status.ok() ? RunOne(*step) : FailUnbegun(*step, std::move(status));
  }
  const Step* const last_copy = phase_->last_copy;
  if (last_copy == nullptr || !copies_.Queued()) return status;
  // A step failed, or the allocation of the last one has vanished.
  Status finished = copies_.Finish();
  if (!status.ok() || finished.ok()) return status;
  return FailUnbegun(*last_copy, std::move(finished));
}

// A failure, or that there is no memory for a copy of its text.
template <class Value>
static Status StatusOf(const Result<Value>& result) {
  return OrNoMemory([&] { return result.status(); });
}

void Executor::EndUnended() {
  if (!cycle_.unended) return;
  const Step step = *std::exchange(cycle_.unended, std::nullopt);
  static_cast<void>(Fail(step, OrNoMemory([this] { return NoLedger(); })));
}

Status Executor::RunOne(const Step& step) {
  Result<StepTarget> target = Status{Code::kInvalid, "not known yet"};
  const auto perform = [&] { return OrNoMemory([&] { return performer_.Perform(step, *target); }); };
  {
    if (!ledger_.TryLockUntil(until_)) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    if (!Exists(step)) return {};
    EndUnended();
    ledger_.Record(StepBegun{step, pool_});
    target = OrNoMemory([&] { return performer_.TargetOf(step); });
    if (!target.ok()) return Fail(step, StatusOf(target));
    if (NeedsLock(step.kind)) return EndOne(step, *target, perform());
  }
  const auto handle = perform();
  if (!OnlyWaits(step.kind)) {
    ledger_.lock();
  } else if (!ledger_.TryLockUntil(until_)) {
    cycle_.unended = step;
    return NoLedger();
  }
  const LedgerLock lock(ledger_, std::adopt_lock);
  return EndOne(step, *target, handle);
}

Status Executor::EndOne(const Step& step, const StepTarget& target, const Result<DriverHandle>& handle) {
  if (!handle.ok()) return Fail(step, StatusOf(handle));
  if (!Exists(step)) return GiveBack(step, *handle);
  for (Network::Kept& kept : std::exchange(phase_->kept, {}))
    if (ledger_.state().regions.contains(kept.region)) ledger_.Record(RegionKept{kept.region, std::move(kept.why)});
  const Status noted = OrNoMemory([&]() -> Status {
    ledger_.AssertHeld();
    NoteHandle(step, target, *handle);
    if (*handle) return ledger_.RecordIfThereIsMemory(StepDone{step, pool_}) ? Status{} : NoMemory();
    ledger_.Record(StepDone{step, pool_});
    return {};
  });
  if (!noted.ok()) {  // memory that nobody knows of would stay for ever
    ledger_.ForgetHandle(step.allocation);
    cycle_.renewed.erase(step.allocation);
    static_cast<void>(OrNoMemory([&] { return driver_.Release(*handle); }));
    return Fail(step, noted);
  }
  if (!*handle || !target.multicast) return {};
  return OrNoMemory([&] {
    ledger_.AssertHeld();
    ForgetBindings(step.allocation);
    return Status{};
  });
}

Result<SharedAllocation> Executor::Shared(const Step& import) {
  auto shared = phase_->imports.Take(import.allocation);
  if (shared.ok()) phase_->imported = shared->incarnation;
  return shared;
}

void Executor::NoteHandle(const Step& step, const StepTarget& target, DriverHandle handle) {
  if (handle) {
    ledger_.Check(!ledger_.HandleOf(step.allocation), ToText(step.allocation) + " was made again while it has memory");
    ledger_.SetHandle(step.allocation, handle);
  }
  if (step.kind == StepKind::kReleaseImport || step.kind == StepKind::kReleaseOwn) ledger_.ForgetHandle(step.allocation);
  if (step.kind == StepKind::kReleaseImport || step.kind == StepKind::kReleaseOwn) cycle_.renewed.erase(step.allocation);
  if (step.kind == StepKind::kAddDevice) ledger_.DeviceAdded(step.allocation, step.device);
  if (!handle || (!target.multicast && !target.stands_in)) return;
  const Ledger::Rebuilt& before = ledger_.RebuiltAs(step.allocation);
  const bool own = step.kind == StepKind::kCreate;
  const Incarnation& imported = phase_->imported;
  if (!own && imported.number == before.number) return;  // its owner kept it
  Ledger::Rebuilt now{before.number + 1, target.stands_in, {}};
  if (!own) now = {imported.number, imported.stands_in ? std::optional(step.device) : std::nullopt, {}};
  auto* const multicast_now = FindIn(ledger_.state().multicasts, step.allocation);
  if (!now.stands_in) cycle_.renewed.insert(step.allocation);
  if (multicast_now != nullptr && !now.stands_in) now.lacks = {multicast_now->added.begin(), multicast_now->added.end()};
  ledger_.SetRebuilt(step.allocation, std::move(now));
}

// Nothing can be bound to ordinary memory that stands in for a multicast object, so its bindings are not in force any more.
void Executor::ForgetBindings(AllocationId multicast) {
  if (!ledger_.RebuiltAs(multicast).stands_in) return;
  auto* const object = FindIn(ledger_.state().multicasts, multicast);
  if (object == nullptr) return;
  std::vector<MulticastUnbound> gone;
  for (const auto& [offset, b] : object->bindings) gone.push_back({multicast, b.device, offset, b.bytes});
  for (const MulticastUnbound& unbound : gone) ledger_.Record(unbound);
}

Status Executor::Copy(const Step& step) {
  if (!AwaitsCopy(step)) {
    const auto& copies = phase_->planned.copies;
    AMEM_CHECK(phase_->copies_begun < copies.size(), step.allocation);
    return copies_.Begin(copies[phase_->copies_begun++]);
  }
  AMEM_TRY(copies_.Await(step));
  return &step == phase_->last_copy ? copies_.Finish() : Status{};
}

// A registration that cannot be drained or deregistered stays, and the pause goes on without it. The undo of a resume
// deregisters only what the pause before had deregistered, so there it is a failure.
Status Executor::OnNetwork(const Step& step) {
  phase_->kept.clear();
  if (network_ == nullptr) return {Code::kInvalid, "there is no network card"};
  if (step.kind == StepKind::kRegister) return network_->Register(step.region);
  if (step.kind == StepKind::kDrain) {
    AMEM_ASSIGN(phase_->kept, Drain());
  } else if (Status gone = network_->Deregister(step.region); !gone.ok()) {
    if (!ledger_.TryLockUntil(until_)) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    if (ledger_.state().lifecycle != Lifecycle::kPausing) return gone;
    phase_->kept.push_back({step.region, gone.message()});
  }
  return {};
}

Result<std::vector<Network::Kept>> Executor::Drain() {
  std::vector<RegionId> regions;
  {
    if (!ledger_.TryLockUntil(until_)) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    for (const auto& [id, region] : ledger_.state().regions)
      if (region.present && region.kept.empty()) regions.push_back(id);
  }
  // What is under way when all GPUs are idle ends soon, or waits for something else.
  constexpr std::chrono::milliseconds kMost{2000};
  if (cycle_.hosts_idle) return network_->Drain(regions, In(std::min(LeftUntil(until_) / 4, kMost)));
  std::vector<Network::Kept> kept;
  for (const RegionId id : regions)
    kept.push_back({id, "the call does not say that the GPUs of all hosts are idle (AMEM_HOSTS_IDLE)"});
  return kept;
}

// An allocation that only a peer held goes as soon as the peer lets go of it or dies, even within a phase.
bool Executor::Exists(const Step& step) const {
  if (!step.allocation) return true;
  auto* const allocation = ledger_.Find(step.allocation);
  if (allocation == nullptr) return false;
  if (step.region && !ledger_.state().regions.contains(step.region)) return false;
  // What a network card holds after all stays mapped, with what was deregistered of it.
  const bool takes = step.kind == StepKind::kSave || step.kind == StepKind::kDeregister || step.kind == StepKind::kUnmap ||
                     step.kind == StepKind::kReleaseOwn;
  if (!pool_ && takes && allocation->own() && WhyKept(*allocation) == KeepReason::kRegistered) return false;
  // A network card may have registered a chunk after the pause was planned. Then the chunk stays, and is only mapped again.
  if (pool_ && step.kind == StepKind::kReleaseOwn && WhyKept(*allocation) != KeepReason::kNone) return false;
  if (step.kind != StepKind::kBind && step.kind != StepKind::kUnbind) return true;
  auto* const object = FindIn(ledger_.state().multicasts, step.allocation);
  return object != nullptr && object->bindings.contains(step.offset);
}

Status Executor::GiveBack(const Step& step, DriverHandle handle) {
  Status given = OrNoMemory([&] { return handle ? driver_.Release(handle) : Status{}; });
  StepFailed dropped{step, given.code(), given.driver_result(), NoMemory().message(), {}, pool_};
  static_cast<void>(OrNoMemory([&] {
    dropped.message =
        given.ok() ? ToText(step.allocation) + " was dropped meanwhile by the last peer that held it" : given.message();
    return Status{};
  }));
  ledger_.Record(std::move(dropped));
  return given;
}

StepFailed Executor::Failure(const Step& step, const Status& why) {
  StepFailed failed{step, why.code(), why.driver_result(), why.message(), why.reported_by(), pool_};
  if (why.code() == Code::kOutOfMemory) failed.holders = HoldersOf(DeviceOf(step));
  return failed;
}

Status Executor::Fail(const Step& step, Status why) {
  StepFailed failed{step, why.code(), why.driver_result(), NoMemory().message(), why.reported_by(), pool_};
  static_cast<void>(OrNoMemory([&] {
    ledger_.AssertHeld();
    why = why.Within(ToText(step));
    failed = Failure(step, why);
    return Status{};
  }));
  ledger_.BreakIfCheckFailed(why);
  ledger_.Record(std::move(failed));
  return why;
}

// Whose memory a step asked for in vain; nothing where that is no device's.
std::optional<DeviceOrdinal> Executor::DeviceOf(const Step& step) const {
  if (step.kind == StepKind::kCheckMemory) return step.device;
  auto* const allocation = ledger_.Find(step.allocation);
  if (step.kind != StepKind::kCreate || allocation == nullptr || !allocation->on_device()) return std::nullopt;
  return DeviceOrdinal{allocation->properties.location.id};
}

// The largest of the others.
std::vector<MemoryHolder> Executor::HoldersOf(std::optional<DeviceOrdinal> device) {
  constexpr std::size_t kMost = 5;
  if (!device) return {};
  const WithoutLedger apart(ledger_);
  std::vector<MemoryHolder> holders = Others(driver_.MemoryHolders(*device), ::getpid());
  if (holders.size() > kMost) holders.resize(kMost);
  return holders;
}

// The journal names the step although none of its calls was made.
Status Executor::FailUnbegun(const Step& step, Status why) {
  if (!ledger_.TryLockUntil(until_)) return why;
  const LedgerLock lock(ledger_, std::adopt_lock);
  EndUnended();
  ledger_.Record(StepBegun{step, pool_});
  return Fail(step, std::move(why));
}

ImportQueue::ImportQueue(Peers& peers, const std::vector<ImportBatch>& batches, const State& state, Deadline until)
    : peers_(peers), until_(until) {
  for (const ImportBatch& planned : batches) {
    Batch batch{planned.owner, {}};
    for (const AllocationId import : planned.imports) {
      auto* const a = FindIn(state.allocations, import);
      if (a != nullptr && a->remote) batch.requests.push_back({a->remote->allocation, import});
    }
    if (!batch.requests.empty()) batches_.push_back(std::move(batch));
  }
}

void ImportQueue::AskAhead() {
  for (; asked_ < batches_.size() && coming_.size() < kBatchesComing; ++asked_) {
    const auto ask = [this, &batch = batches_[asked_]] { return peers_.Reimport(batch.owner, batch.requests, until_); };
    try {
      coming_.push_back(std::async(std::launch::async, ask));
    } catch (const std::system_error&) {  // no thread can be had: Await asks the owner itself
      coming_.push_back(std::async(std::launch::deferred, ask));
    }
  }
}

Status ImportQueue::AwaitNextBatch() {
  AskAhead();
  Shared shared = coming_.front().get();
  coming_.pop_front();
  const Batch& batch = batches_[arrived_++];
  if (!shared.ok()) {
    if (shared.status().code() != Code::kPeerLost) return shared.status();
    static_cast<void>(peers_.AwaitLoss(batch.owner, kLossPatience));
    return shared.status().ReportedBy(batch.owner);
  }
  for (std::size_t i = 0; i < batch.requests.size(); ++i) arrived_with_[batch.requests[i].as] = std::move((*shared)[i]);
  return {};
}

Status ImportQueue::Await(AllocationId import) {
  while (!arrived_with_.contains(import) && arrived_ < batches_.size()) AMEM_TRY(AwaitNextBatch());
  return {};
}

Result<SharedAllocation> ImportQueue::Take(AllocationId import) {
  auto found = arrived_with_.extract(import);
  if (found.empty()) return Status{Code::kInvalid, "the owner was not asked for the descriptor"};
  return std::move(found.mapped());
}

}  // namespace amem
