#include "replay/cycle/coordinator.h"

#include <algorithm>
#include <chrono>

#include "journal/base/no_memory.h"

namespace amem {
namespace {

// A program fills its tags, so the contents are dense: copy engines move them, and host memory is prepared for all of them.
// NCCL's are sparse.
BackupOptions OptionsFor(const CycleContext& context, PoolId pool) {
  if (!pool) return {.compare = context.compare, .rest = 15};
  return {.first_guess = 1, .dense = 0.9, .compare = context.compare};
}

}  // namespace

Coordinator::Coordinator(const CycleContext& context, CallGate& gate) : Coordinator(context, gate, PoolId{}, {}, nullptr) {}

Coordinator::Coordinator(const CycleContext& context, CallGate& gate, PoolId pool, std::string tag,
                         std::unique_ptr<Copier> lane)
    : ledger_(context.ledger),
      peers_(context.peers),
      gate_(gate),
      deadlines_(context.deadlines),
      compare_(context.compare),
      pool_(pool),
      tag_(std::move(tag)),
      lane_(std::move(lane)),
      copier_(lane_ != nullptr ? *lane_ : context.driver),
      pinned_(context.pinned),
      backup_(copier_, pinned_, OptionsFor(context, pool)),
      executor_(ledger_, context.driver, peers_, backup_, pool, pool ? nullptr : context.network) {}

Result<std::unique_ptr<Coordinator>> Coordinator::OfTag(const CycleContext& context, CallGate& gate, PoolId pool,
                                                        std::string tag) {
  AMEM_ASSIGN(auto lane, context.driver.OpenLane());
  return std::unique_ptr<Coordinator>(new Coordinator(context, gate, pool, std::move(tag), std::move(lane)));
}

void Coordinator::Made(Bytes bytes) {
  ledger_.AssertHeld();
  constexpr Bytes kFrom = Bytes{64} << 20;
  pinned_.Busy();
  made_ += bytes;
  if (made_ >= std::max(measured_ / 16, kFrom)) WantHostMemory();
}

// What was freed is no longer counted.
void Coordinator::WantHostMemory() {
  const Savable held = MeasureSavable(ledger_.state(), pool_);
  made_ = 0;
  measured_ = held.nccl + held.program;
  pinned_.Want(pool_, pool_ ? backup_.Expected(held.program) : backup_.Expected(held.nccl) + held.program);
}

CycleReport Coordinator::Last(CycleKind kind) const {
  const std::lock_guard lock(report_mutex_);
  return kind == CycleKind::kPause ? pause_ : resume_;
}

CycleTotals Coordinator::Totals(CycleKind kind) const {
  const std::lock_guard lock(report_mutex_);
  return kind == CycleKind::kPause ? pauses_ : resumes_;
}

// A failed cycle failed in the last phase of its report; without phases, while it waited for all to arrive.
void Coordinator::Add(CycleKind kind, const CycleReport& report, bool succeeded) {
  const std::lock_guard lock(report_mutex_);
  CycleTotals& totals = kind == CycleKind::kPause ? pauses_ : resumes_;
  PhaseKind last = PhaseOf(kind, agreement::Ballot::kCome);
  for (const PhaseTime& time : report.phases) {
    last = time.phase;
    totals.phases[last].work_ns += time.work_ns;
    totals.phases[last].wait_ns += time.wait_ns;
  }
  if (!succeeded) {
    ++totals.phases[last].failures;
    return;
  }
  ++totals.done;
  totals.total_ns += report.total_ns;
}

std::uint64_t Coordinator::CycleNumber(CycleKind kind) const {
  const std::uint64_t cycles = ledger_.state().ScopeOf(pool_).cycles;
  return kind == CycleKind::kPause && ledger_.state().LifecycleOf(pool_) == Lifecycle::kRunning ? cycles + 1 : cycles;
}

Result<std::unique_ptr<Assembly>> Coordinator::Assemble(CycleKind kind) {
  {
    if (!TryLedger()) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    if (pool_ && !IsShared()) {
      if (own_board_ == nullptr) {
        AMEM_ASSIGN(auto made, board::Board::MakePrivate(tag_, {peers_.Self().session}));
        own_board_ = std::make_shared<board::Board>(std::move(made));
      }
      return std::unique_ptr<Assembly>(std::make_unique<LoneAssembly>(peers_.Self(), own_board_));
    }
  }
  return peers_.Assemble(kind, tag_);
}

bool Coordinator::IsShared() const {
  return std::ranges::any_of(ledger_.state().allocations, [&](const auto& item) {
    return item.second.pool == pool_ && (item.second.remote || !item.second.importers.empty());
  });
}

Status Coordinator::Told(CycleKind kind, const Status& why, const Status& undone) const {
  const std::string who = pool_ ? "the tag" : "the session";
  std::string after = who + (kind == CycleKind::kPause ? " runs on as before" : " stays paused, with its contents kept");
  if (!undone.ok())
    after = "undoing it failed too: " + undone.message() +
            "; contents are kept: " + (pool_ ? "resume the tag again" : "call ncclResume on all ranks") +
            " once the cause is gone";
  if (in_use_) after = "a stream of the program goes on behind it, so the memory stays where it is; resume the tag again";
  const std::string doing = pool_ ? std::string(ToText(kind)) + " of tag " + tag_ + ": " : std::string();
  return {undone.ok() ? why.code() : Code::kBroken, doing + why.message() + "; " + after, why.driver_result()};
}

// If one member leaves memory mapped, its owner must not make it anew. The session keeps everything even after that member has
// gone.
Status Coordinator::KeepIfAnyDoes(const std::vector<PeerIdentity>& members) {
  const auto keeper = std::ranges::find(members, true, &PeerIdentity::keeps);
  all_keep_ = keeper != members.end();
  if (!all_keep_) return {};
  {
    if (!TryLedger()) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    if (!ledger_.state().kept_whole.empty()) return {};
    ledger_.Record(EverythingKept{ToText(*keeper) + " keeps all memory in place"});
  }
  peers_.SetReleasesNothing();
  return {};
}

void Coordinator::Conclude(CycleKind kind, const Manner& manner, CycleReport report, std::uint64_t start) {
  report.total_ns = MonotonicNs() - start;
  NoteCopies();
  bool discards = false;
  {
    const LedgerLock lock(ledger_);
    CycleDone done{.kind = kind, .cycle = report.cycle, .duration_ns = report.total_ns, .pool = pool_};
    if (kind == CycleKind::kPause && backup_.Saved()) {
      const BackupStatistics contents = backup_.Statistics();
      done.changed = contents.bytes_saved;
      done.unchanged = contents.bytes_unchanged;
      done.zero = contents.bytes_zero;
    }
    ledger_.Record(done);
    WantHostMemory();
    const auto* const pool = FindIn(ledger_.state().pools, pool_);
    discards = pool != nullptr && pool->policy == PoolPolicy::kDiscard;  // the next pause may save nothing
  }
  if (kind == CycleKind::kResume) discards ? backup_.ForgetAll() : backup_.Keep();
  in_use_ = false;
  if (kind == CycleKind::kPause && manner.after == nullptr)  // the devices are idle
    pinned_.GiveSpareBack(std::chrono::nanoseconds(start - std::exchange(paused_at_ns_, start)));
  Add(kind, report, true);
  const std::lock_guard lock(report_mutex_);
  (kind == CycleKind::kPause ? pause_ : resume_) = std::move(report);
}

Result<Plan> Coordinator::MakePlan(CycleKind kind) {
  if (!TryLedger()) return NoLedger();
  const LedgerLock lock(ledger_, std::adopt_lock);
  return kind == CycleKind::kPause ? PlanPause(ledger_.state(), pool_) : PlanResume(ledger_.state(), pool_);
}

// This session's part of a phase. A pause that follows a stream waits for that moment of the stream and for no device, even if
// nothing is copied, because memory that was discarded or freed is released next.
Status Coordinator::RunPhase(const PlannedPhase& planned, CycleKind kind, const Manner& manner,
                             const std::function<bool()>& is_overtaken) {
  PlannedPhase phase = planned;
  if (in_use_) std::erase_if(phase.steps, [](const Step& step) { return step.kind == StepKind::kBeginRestore; });
  const bool follows = manner.after != nullptr && phase.phase == PhaseKind::kPauseArrive;
  if (follows) std::erase_if(phase.steps, [](const Step& step) { return step.kind == StepKind::kQuiesce; });
  AMEM_TRY(executor_.Run(phase, is_overtaken));
  if (follows) {
    AMEM_ASSIGN(const auto devices, Devices(executor_.until()));
    for (const DeviceOrdinal device : devices) {
      AMEM_TRY(copier_.Follow(device, *manner.after));
      AMEM_TRY(copier_.FinishCopies(device, executor_.until()));
    }
  }
  if (kind == CycleKind::kPause) {  // who cannot pause says so by its vote; if it did not arrive, the others would wait for it
    if (!TryLedger()) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    AMEM_TRY(ledger_.CanPause());
  }
  // A chunk is mapped for its own device, so once own memory exists all copies have begun. The program may use the memory from
  // here on, which would disturb a comparison.
  if (phase.phase == PhaseKind::kResumeCreateOwn && manner.queued && alone_ && !compare_) manner.queued();
  return phase.phase == PhaseKind::kPauseArrive ? CanBegin() : Status{};
}

// A phase is planned when it begins, and again if an owner is lost meanwhile.
Status Coordinator::RunUndoPhase(CycleKind undo, PhaseKind phase, const std::function<bool()>& is_overtaken) {
  PlannedPhase tried{phase, {}};
  while (true) {
    PlannedPhase now{phase, {}};
    AMEM_ASSIGN(Plan plan, MakePlan(undo));
    for (PlannedPhase& planned : plan.phases)
      if (planned.phase == phase) now = std::move(planned);
    Status status = executor_.Run(now, is_overtaken);
    if (status.code() != Code::kPeerLost || now == tried) return status;
    tried = std::move(now);
  }
}

}  // namespace amem
