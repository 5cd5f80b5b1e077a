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

PhaseKind FirstOf(CycleKind kind) { return kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive; }

// Nobody shares the memory, so nobody else votes.
class RoundOfOne final : public Round {
 public:
  RoundOfOne(PeerIdentity self, Deadline until) : self_(std::move(self)), until_(until) {}
  [[nodiscard]] std::vector<PeerIdentity> Members() const override { return {self_}; }
  [[nodiscard]] Deadline until() const override { return until_; }
  void SetUntil(Deadline until) override { until_ = until; }
  Decision Vote(PhaseKind, const Status& mine) override {
    return {mine.ok() ? SessionId{} : self_.session, mine, {}, !mine.ok()};
  }

 private:
  const PeerIdentity self_;
  Deadline until_;
};

}  // namespace

Coordinator::Coordinator(const CycleContext& context, CallGate& gate) : Coordinator(context, gate, PoolId{}, {}, nullptr) {}

Coordinator::Coordinator(const CycleContext& context, CallGate& gate, PoolId pool, std::string tag,
                         std::unique_ptr<Copier> lane)
    : ledger_(context.ledger),
      peers_(context.peers),
      gate_(gate),
      deadlines_(context.deadlines),
      on_board_(context.on_board),
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
  PhaseKind last = FirstOf(kind);
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

Status Coordinator::Cycle(CycleKind kind, const Manner& manner) {
  const Deadline until = In(deadlines_.call());
  executor_.SetUntil(deadlines_.OwnPartOf(until));
  {
    if (!TryLedger()) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    if (unrecorded_) ledger_.Record(*std::exchange(unrecorded_, std::nullopt));
    // After a failed undo the lifecycle is neither, so either call can be tried again.
    const Lifecycle target = kind == CycleKind::kPause ? Lifecycle::kPaused : Lifecycle::kRunning;
    if (ledger_.state().LifecycleOf(pool_) == target) return {};
  }
  // Its contents are newer than the copies that it was resumed from.
  if (in_use_ && kind == CycleKind::kPause) AMEM_TRY(Cycle(CycleKind::kResume));
  if (on_board_) {
    AMEM_ASSIGN(auto assembly, Assemble(kind));
    if (assembly != nullptr) return CycleOnBoard(kind, manner, std::move(assembly), until);
  }
  AMEM_ASSIGN(auto round, Arrive(kind, until, manner.patient));
  executor_.SetUntil(deadlines_.OwnPartOf(round->until()));
  Status ready = kind == CycleKind::kPause ? ledger_.AwaitFiles(executor_.until()) : Status{};
  if (ready.ok()) ready = CloseGate(executor_.until());
  if (!ready.ok()) return Refuse(kind, *round, ready);
  const OpenAtEnd open_at_end{gate_};
  if (manner.kept_out) manner.kept_out();
  Status status = Run(kind, *round, manner);
  if (manner.ended) manner.ended();
  return status;
}

Result<std::unique_ptr<Round>> Coordinator::Arrive(CycleKind kind, Deadline until, bool patient) {
  threads_recorded_ = false;
  culprits_.clear();
  RoundCall call{kind, 0, until, patient, tag_};
  {
    if (!TryLedger()) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    call.cycle = arriving_ = CycleNumber(kind);
    if (kind == CycleKind::kPause) ledger_.RenewJournal();
    if (pool_ && !IsShared()) return std::unique_ptr<Round>(std::make_unique<RoundOfOne>(peers_.Self(), until));
    ledger_.Record(PhaseBegun{FirstOf(kind), pool_});
    // After an undo that failed some may run, to whom nothing is left to resume. Their memory can be imported.
    if (kind == CycleKind::kResume && ledger_.state().LifecycleOf(pool_) != Lifecycle::kPaused)
      call.spares = [this](SessionId session) { return HasInPlace(session); };
  }
  std::vector<PeerIdentity> culprits;
  auto round = peers_.Arrive(call, &culprits);
  if (round.status().code() == Code::kTimeout) RecordThreads();
  if (round.ok()) return round;
  for (const PeerIdentity& who : culprits) culprits_.push_back(AsMember(who));
  const Status why = pool_ ? Told(kind, round.status()) : round.status();
  RecordNotBegun(kind, call.cycle, why);
  return why;
}

bool Coordinator::HasInPlace(SessionId session) const {
  const LedgerLock lock(ledger_);
  const auto& allocations = ledger_.state().allocations;
  return std::ranges::none_of(allocations, [&](const auto& item) {
    const Allocation& a = item.second;
    const auto* const slab = FindIn(allocations, a.slab);  // a part is where its slab is
    const Allocation& holds = slab != nullptr ? *slab : a;
    return a.pool == pool_ && (!holds.resident || holds.awaiting_restore) &&
           std::ranges::any_of(a.importers, [&](const auto& importer) { return importer.first.by == session; });
  });
}

bool Coordinator::IsShared() const {
  return std::ranges::any_of(ledger_.state().allocations, [&](const auto& item) {
    return item.second.pool == pool_ && (item.second.remote || !item.second.importers.empty());
  });
}

void Coordinator::NoteFailure(const std::vector<PeerIdentity>& members, SessionId culprit) {
  const auto other = std::ranges::find(members, culprit, &PeerIdentity::session);
  if (other != members.end() && culprit != peers_.Self().session) culprits_ = {AsMember(*other)};
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

// The others undo what they have begun. This session has nothing to undo and leaves the round once they know.
Status Coordinator::Refuse(CycleKind kind, Round& round, const Status& why) {
  RecordThreads();  // one of them is inside the call that has not returned
  if (Alone(round)) return Told(kind, why);
  RecordVote(FirstOf(kind), why);
  const Decision told = round.Vote(FirstOf(kind), why);
  NoteFailure(round.Members(), told.culprit);
  const Status refused = Told(kind, {why.code(), (told.status.ok() ? why : told.status).message(), why.driver_result()});
  RecordNotBegun(kind, arriving_, refused);
  return refused;
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
  peers_.KeepEverything();
  return {};
}

Status Coordinator::Run(CycleKind kind, Round& round, const Manner& manner) {
  const std::uint64_t start = MonotonicNs();
  CycleReport report;
  CycleBegun begun{.kind = kind, .pool = pool_, .keeps = manner.keeps};
  members_ = round.Members();
  leader_is_late_ = false;
  alone_ = Alone(round);
  for (const PeerIdentity& member : alone_ ? std::vector<PeerIdentity>() : members_) {
    begun.members.push_back(member.session);
    begun.processes.push_back(AsMember(member));
  }
  report.members = members_.size();
  executor_.BeginCycle(deadlines_.OwnPartOf(round.until()),
                       manner.after == nullptr ? Backup::Looking::kIdle : Backup::Looking::kBeside, manner.hosts_idle);
  if (const Status kept = KeepIfAnyDoes(members_); !kept.ok()) return Refuse(kind, round, kept);
  {
    if (!TryLedger()) return Refuse(kind, round, NoLedger());
    const LedgerLock lock(ledger_, std::adopt_lock);
    report.cycle = begun.cycle = CycleNumber(kind);
    ledger_.Record(std::move(begun));
  }
  if (const Status status = OrNoMemory([&] { return RunPhases(kind, round, manner, report); }); !status.ok()) {
    Add(kind, report, false);
    return GiveUp(kind, round, report.cycle, status);
  }
  Conclude(kind, manner, std::move(report), start);
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

Status Coordinator::GiveUp(CycleKind kind, Round& round, std::uint64_t cycle, const Status& why) {
  const Status undone = in_use_ ? why : Undo(kind, round);
  const Status told = Told(kind, why, undone);
  bool saved = true;
  if (TryLedger()) {
    const LedgerLock lock(ledger_, std::adopt_lock);
    ledger_.Record(CycleFailed{kind, cycle, undone.ok(), told.message(), why.code(), why.driver_result(), culprits_, pool_});
    saved = std::ranges::any_of(ledger_.state().allocations,
                                [&](const auto& item) { return item.second.saved && item.second.pool == pool_; });
  }
  if (kind == CycleKind::kPause && !saved) backup_.Abandon();
  NoteCopies();
  return told;
}

Result<Plan> Coordinator::MakePlan(CycleKind kind) {
  if (!TryLedger()) return NoLedger();
  const LedgerLock lock(ledger_, std::adopt_lock);
  return kind == CycleKind::kPause ? PlanPause(ledger_.state(), pool_) : PlanResume(ledger_.state(), pool_);
}

Coordinator::Decided Coordinator::Vote(Round& round, PhaseKind phase, const Status& mine) {
  if (Alone(round)) return {round.Vote(phase, mine)};
  RecordVote(phase, mine);
  Decided decided{round.Vote(phase, mine)};
  if (decided.status.code() == Code::kTimeout) RecordThreads();
  if (round.Leaderless()) {
    auto gathered = round.Regather();
    if (gathered.ok()) {
      decided.settled = *gathered;
      decided.gathered_again = !decided.settled;
    } else {
      decided.status = {decided.status.code(), decided.status.message() + "; " + gathered.status().message()};
    }
  }
  // The plans of the undo and of the next call must know of the loss: nothing is imported from the dead, and an object that
  // lost a member is not made anew.
  if (decided.status.code() == Code::kPeerLost && decided.culprit)
    static_cast<void>(peers_.AwaitLoss(decided.culprit, kLossPatience));
  if (!TryLedger()) return decided;
  const LedgerLock lock(ledger_, std::adopt_lock);
  ledger_.Record(PhaseDecided{phase, decided.status.ok(), decided.culprit, decided.status.message(), decided.status.code(),
                              decided.status.driver_result(), pool_});
  return decided;
}

// This session's part of a phase. A pause that follows a stream waits for that moment of the stream and for no device, even if
// nothing is copied, because memory that was discarded or freed is released next.
Status Coordinator::RunPhase(const PlannedPhase& planned, CycleKind kind, const Manner& manner,
                             const std::function<bool()>& is_overtaken) {
  PlannedPhase phase = planned;
  if (in_use_) std::erase_if(phase.steps, [](const Step& step) { return step.kind == StepKind::kBeginRestore; });
  const bool follows = manner.after != nullptr && phase.phase == PhaseKind::kPauseArrive;
  if (follows) std::erase_if(phase.steps, [](const Step& step) { return step.kind == StepKind::kQuiesce; });
  AMEM_TRY(executor_.Run(phase, {}, is_overtaken));
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

Status Coordinator::RunPhases(CycleKind kind, Round& round, const Manner& manner, CycleReport& report) {
  const auto planned = OrNoMemory([&] { return MakePlan(kind); });
  if (!planned.ok()) {  // the others hear of it
    const Decided all = Vote(round, FirstOf(kind), planned.status());
    NoteFailure(members_, all.culprit);
    return all.status.ok() ? planned.status() : all.status;
  }
  const Plan& plan = *planned;
  const Lifecycle target = kind == CycleKind::kPause ? Lifecycle::kPaused : Lifecycle::kRunning;
  for (const PlannedPhase& phase : plan.phases) {
    const std::uint64_t begun = MonotonicNs();
    Status mine = OrNoMemory([&] { return RunPhase(phase, kind, manner); });
    if (!mine.ok() && kind == CycleKind::kResume) mine = GoOn(phase, manner, &round, mine);
    if (mine.ok() && compare_ && phase.phase == PhaseKind::kResumeVerify) mine = executor_.CompareRestored(plan);
    const std::uint64_t voted = MonotonicNs();
    if (!mine.ok() && Passed(deadlines_.OwnPartOf(round.until()))) RecordThreads();
    const Decided all = Vote(round, phase.phase, mine);
    const std::uint64_t decided = MonotonicNs();
    report.phases.push_back({phase.phase, voted - begun, decided - voted, voted, decided});
    // The leader died after it had told another member that the last vote passed. Then it passed for all.
    const bool passed_elsewhere = mine.ok() && &phase == &plan.phases.back() && all.settled == target;
    if (!passed_elsewhere && !all.status.ok()) {
      NoteFailure(members_, all.culprit);
      leader_is_late_ = all.gathered_again && (all.status.code() != Code::kPeerLost || !peers_.AwaitLoss(all.culprit, {}));
      all_held_ = kind == CycleKind::kPause && phase.phase <= PhaseKind::kPauseSave && all.heard;
      return all.status;
    }
  }
  return {};
}

// Runs the opposite plan from wherever the failure left this session. Its phases are voted on like any others, because an
// import needs its owner's create. A member goes on with its own undo if another fails, but reports that failure.
Status Coordinator::Undo(CycleKind failed, Round& round) {
  const CycleKind undo = failed == CycleKind::kPause ? CycleKind::kResume : CycleKind::kPause;
  Status mine, others;
  // The plan knows of a leader that has died, and not of one that is stopped and was left out.
  bool somebody_missing = leader_is_late_;
  Decision last;
  round.SetUntil(In(deadlines_.undo()));
  executor_.SetUntil(deadlines_.OwnPartOf(round.until()));
  AMEM_ASSIGN(const Plan outline, OrNoMemory([&] { return MakePlan(undo); }));
  for (const PlannedPhase& planned : outline.phases) {
    const PhaseKind phase = planned.phase;
    if (phase == FirstOf(undo)) continue;
    // A session that died during an undo may not have added its device to a new multicast object, and binding memory to such an
    // object would hang. The next resume knows of the loss from the start.
    if (mine.ok() && phase == PhaseKind::kResumeVerify && somebody_missing && executor_.HasRenewedMulticasts())
      mine = {Code::kRefused,
              "a rank died, or was late, before it was sure that its device was added to a multicast object; "
              "nothing was bound to it"};
    std::set<SessionId> owners;
    const auto in_step = [&](SessionId owner) { return IsInStep(owner, round, last); };
    if (mine.ok()) mine = OrNoMemory([&] { return RunUndoPhase(undo, phase, in_step, owners); });
    Decided all = Vote(round, phase, mine);
    // Some members know why the cycle failed; others only lost the leader. This brings all to the same phase.
    while (all.gathered_again) {
      somebody_missing = true;
      all = Vote(round, phase, mine);
    }
    somebody_missing = somebody_missing || all.status.code() == Code::kPeerLost || !all.absent.empty();
    last = all;
    if (mine.ok()) mine = HaveRestored(owners, round, all);
    // A dead member has nothing to undo, a late one undoes when it is back, and a vote out of step is no failure.
    if (all.against && others.ok()) others = all.status;
  }
  return mine.ok() ? others : mine;
}

// A phase is planned when it begins, and again if an owner is lost meanwhile.
Status Coordinator::RunUndoPhase(CycleKind undo, PhaseKind phase, const std::function<bool(SessionId)>& in_step,
                                 std::set<SessionId>& owners, const std::function<bool()>& is_overtaken) {
  PlannedPhase tried{phase, {}};
  while (true) {
    PlannedPhase now{phase, {}};
    AMEM_ASSIGN(Plan plan, MakePlan(undo));
    for (PlannedPhase& planned : plan.phases)
      if (planned.phase == phase) now = std::move(planned);
    for (const ImportBatch& batch : now.imports) owners.insert(batch.owner);
    Status status = executor_.Run(now, in_step, is_overtaken);
    if (status.code() != Code::kPeerLost || now == tried) return status;
    tried = std::move(now);
  }
}

// Whether a session took part in the last vote of an undo, and so does the same steps at the same time as this one.
bool Coordinator::IsInStep(SessionId session, const Round& round, const Decision& last) {
  const std::vector<PeerIdentity> members = round.Members();
  return std::ranges::find(members, session, &PeerIdentity::session) != members.end() &&
         std::ranges::find(last.absent, session) == last.absent.end();
}

// What an owner has made anew holds nothing until it has restored its contents, and who goes on reads that. So if an owner
// lives and is late, or has left the round, its importers stay paused, and because they say so by their next vote, all others
// do as well. An owner that runs has undone the call, though it has left: its contents are back. The others wait for the vote,
// so none of these questions waits long.
Status Coordinator::HaveRestored(const std::set<SessionId>& owners, const Round& round, const Decision& decided) {
  if (all_held_) return {};
  for (const SessionId owner : owners) {
    if (IsInStep(owner, round, decided) || peers_.AwaitLoss(owner, kLossPatience.zero())) continue;
    if (peers_.ProgressOf(owner, tag_).lifecycle == Lifecycle::kRunning) continue;
    const auto member = std::ranges::find(members_, owner, &PeerIdentity::session);
    const PeerIdentity who = member != members_.end() ? *member : PeerIdentity{.session = owner};
    return {Code::kRefused, ToText(who) + ", whose memory is imported here, has not said that it has restored the contents"};
  }
  return {};
}

}  // namespace amem
