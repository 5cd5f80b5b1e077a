#include "replay/cycle/pool_cycle.h"

#include <algorithm>
#include <set>

#include "journal/base/clock.h"

namespace amem {
namespace {

// A program fills its pools, so contents are dense as a rule: they travel by the copy engines, in pieces that are large enough
// to keep these busy, and host memory is wanted for all of them.
BackupOptions ForPools() {
  BackupOptions options;
  options.chunk = Bytes{32} << 20;
  options.quiet = std::chrono::milliseconds(10);
  options.prepare_limit = ~Bytes{0};  // the session's pools share a limit, which it applies
  options.prepare_threads = 2;
  options.first_guess = 1;
  options.dense = 0.9;
  return options;
}

bool Arrives(PhaseKind phase) { return phase == PhaseKind::kPauseArrive || phase == PhaseKind::kResumeArrive; }

}  // namespace

Result<std::unique_ptr<PoolCycle>> PoolCycle::Open(Ledger& ledger, Driver& driver, Peers& peers, PoolId pool) {
  auto lane = driver.OpenLane();
  if (!lane.ok()) return lane.status();
  return std::unique_ptr<PoolCycle>(new PoolCycle(ledger, driver, peers, pool, *std::move(lane)));
}

PoolCycle::PoolCycle(Ledger& ledger, Driver& driver, Peers& peers, PoolId pool, std::unique_ptr<Copier> lane)
    : ledger_(ledger),
      pool_(pool),
      lane_(std::move(lane)),
      backup_(*lane_, ForPools()),
      executor_(ledger, driver, peers, backup_, pool) {}

Status PoolCycle::Pause(const StreamMoment* after) { return Run(CycleKind::kPause, after, {}); }
Status PoolCycle::Resume(const std::function<void()>& queued) { return Run(CycleKind::kResume, nullptr, queued); }

std::optional<PoolCycle::Begun> PoolCycle::Begin(CycleKind kind) {
  const auto lock = ledger_.Lock();
  const auto pool = ledger_.state().pools.find(pool_);
  if (pool == ledger_.state().pools.end()) return std::nullopt;
  const bool pausing = kind == CycleKind::kPause;
  const Lifecycle now = pool->second.lifecycle;
  if (now == (pausing ? Lifecycle::kPaused : Lifecycle::kRunning)) return std::nullopt;
  Begun begun{pool->second.cycles + (pausing && now == Lifecycle::kRunning ? 1 : 0), pool->second.tag};
  if (pausing) ledger_.RenewJournal();
  ledger_.Record(CycleBegun{.kind = kind, .cycle = begun.number, .pool = pool_});
  return begun;
}

Status PoolCycle::Run(CycleKind kind, const StreamMoment* after, const std::function<void()>& queued) {
  const std::uint64_t start = MonotonicNs();
  const auto begun = Begin(kind);
  if (!begun) return {};
  executor_.BeginCycle(after == nullptr ? Backup::Looking::kForZeros : Backup::Looking::kWhole);
  if (const Status status = RunPhases(kind, after, queued); !status.ok()) return GiveUp(kind, *begun, status);
  const std::uint64_t took = MonotonicNs() - start;
  {
    const auto lock = ledger_.Lock();
    ledger_.Record(CycleDone{.kind = kind, .cycle = begun->number, .duration_ns = took, .pool = pool_});
  }
  if (kind == CycleKind::kResume) backup_.ForgetAll();
  (kind == CycleKind::kPause ? pause_ns_ : resume_ns_) = took;
  return {};
}

Status PoolCycle::RunPhases(CycleKind kind, const StreamMoment* after, const std::function<void()>& queued) {
  for (const PlannedPhase& planned : MakePlan(kind).phases) {
    AMEM_TRY(RunPhase(planned, after));
    if (kind == CycleKind::kPause && Arrives(planned.phase)) {
      const auto lock = ledger_.Lock();
      AMEM_TRY(ledger_.CanPause());
    }
    // A chunk is mapped for its own device, so all copies have begun with the memory.
    if (planned.phase == PhaseKind::kResumeCreateOwn && queued) queued();
  }
  return {};
}

Status PoolCycle::RunPhase(const PlannedPhase& planned, const StreamMoment* after) {
  if (after == nullptr || planned.phase != PhaseKind::kPauseArrive) return executor_.Run(planned);
  PlannedPhase phase = planned;
  std::erase_if(phase.steps, [](const Step& step) { return step.kind == StepKind::kQuiesce; });
  AMEM_TRY(executor_.Run(phase));
  for (const DeviceOrdinal device : Devices()) AMEM_TRY(lane_->Follow(device, *after));
  return {};
}

// Runs the opposite plan from wherever the failure left the pool.
Status PoolCycle::Undo(CycleKind failed) {
  for (const PlannedPhase& planned : MakePlan(failed == CycleKind::kPause ? CycleKind::kResume : CycleKind::kPause).phases) {
    if (!Arrives(planned.phase)) AMEM_TRY(executor_.Run(planned));
  }
  return {};
}

Status PoolCycle::GiveUp(CycleKind kind, const Begun& begun, const Status& why) {
  const Status undone = Undo(kind);
  const bool pausing = kind == CycleKind::kPause;
  const std::string after =
      undone.ok()
          ? pausing ? "; the tag runs on as before" : "; the tag stays paused, with its contents kept"
          : "; undoing it failed too: " + undone.message() + "; contents are kept: resume the tag again once the cause is gone";
  const std::string message = std::string(pausing ? "pause" : "resume") + " of tag " + begun.tag + ": " + why.message() + after;
  const auto lock = ledger_.Lock();
  ledger_.Record(CycleFailed{.kind = kind,
                             .cycle = begun.number,
                             .undone = undone.ok(),
                             .message = message,
                             .code = why.code(),
                             .driver_result = why.driver_result(),
                             .pool = pool_});
  const bool saved = std::ranges::any_of(ledger_.state().allocations,
                                         [&](const auto& item) { return item.second.pool == pool_ && item.second.saved; });
  if (pausing && !saved) backup_.ForgetAll();
  return {undone.ok() ? why.code() : Code::kBroken, message, why.driver_result()};
}

Plan PoolCycle::MakePlan(CycleKind kind) {
  const auto lock = ledger_.Lock();
  return kind == CycleKind::kPause ? PlanPause(ledger_.state(), pool_) : PlanResume(ledger_.state(), pool_);
}

std::vector<DeviceOrdinal> PoolCycle::Devices() {
  std::set<DeviceOrdinal> devices;
  const auto lock = ledger_.Lock();
  for (const auto& [id, a] : ledger_.state().allocations) {
    if (a.pool == pool_ && a.on_device()) devices.insert(DeviceOrdinal{a.properties.location.id});
  }
  return {devices.begin(), devices.end()};
}

Status PoolCycle::Lead(void* stream) {
  for (const DeviceOrdinal device : Devices()) AMEM_TRY(lane_->Lead(device, stream));
  return {};
}

Result<std::unique_ptr<StreamMoment>> PoolCycle::MomentOf(void* stream) {
  const auto devices = Devices();
  if (devices.empty()) return std::make_unique<StreamMoment>();  // no device is to get a context because of this
  return lane_->MomentOf(devices.front(), stream);
}

}  // namespace amem
