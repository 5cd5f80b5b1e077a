// A pause or resume on the board of its set. The agreement says what a member does next, TakePart does it on the board, and
// what is here carries out the work and keeps the journal. All that belongs to one call is in one object.
#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/no_memory.h"
#include "replay/cycle/coordinator.h"
#include "replay/cycle/sightings.h"
#include "replay/peers/board/participant.h"

namespace amem {

using agreement::Ballot;
using agreement::Work;
using board::BoardReading;

namespace {

constexpr std::chrono::milliseconds kSlow{100};  // what waits longer is journaled while it waits

}  // namespace

class Coordinator::Call final : public board::RoundHooks {
 public:
  // All must outlive it.
  Call(Coordinator& scope, CycleKind kind, const Manner& manner, Assembly& assembly, Deadline until, std::uint64_t cycle)
      : scope_(scope),
        kind_(kind),
        manner_(manner),
        assembly_(assembly),
        until_(assembly.Time() + (until - Now())),
        cycle_(cycle),
        sightings_(scope.ledger_, assembly, CallOfSet{kind, scope.tag_}) {}

  Status Run() {
    const bool patient = manner_.patient && kind_ == CycleKind::kResume;
    const Deadlines& times = scope_.deadlines_;
    board::CallOnBoard call{.kind = kind_,
                            .until = until_,
                            .again = times.margin(),
                            .round = patient ? times.call() : times.round_least(),
                            .undo = times.undo(),
                            .patient = patient,
                            .began = came_};
    while (true) {
      call.keeps = scope_.peers_.Self().keeps;
      if (const Status found = Find(patient); !found.ok()) return NotBegun(found, {found.reported_by()});
      round_ = {};
      sightings_.NextRound();
      auto outcome = board::TakePart(assembly_.board(), assembly_.seat(), call, *this);
      if (outcome.status().code() == Code::kCorrupt && assembly_.Time() < until_) {
        assembly_.Discard();
      } else if (!outcome.ok()) {
        return NotBegun(outcome.status(), {});
      } else if (!outcome->again) {
        return End(*outcome);
      }
    }
  }

 private:
  // ---- the agreement's questions and news

  Status Do(Work work, Deadline until, const std::function<bool()>& is_overtaken) override {
    until = Now() + (until - assembly_.Time());
    scope_.executor_.SetUntil(scope_.deadlines_.OwnPartOf(until));
    NoteEnds();
    const std::uint64_t began = MonotonicNs();
    Status done = OrNoMemory([&] { return Perform(work, until, is_overtaken); });
    round_.worked_ns = MonotonicNs() - began;
    if (!is_overtaken()) done = Journaled(done);
    if (!done.ok() && !is_overtaken() && Passed(scope_.executor_.until())) scope_.RecordThreads();
    if (!done.ok() && !round_.failed) round_.mine = done;
    return done;
  }
  Deadline Time() override { return assembly_.Time(); }
  void AwaitChange(const board::Board&, std::uint32_t ticket, Deadline until) override { assembly_.AwaitChange(ticket, until); }
  bool HasEnded(SessionId session) override { return assembly_.HasEnded(session); }
  std::string HowItEnded(SessionId session) override { return assembly_.HowItEnded(session); }
  bool SetHasChanged() override { return assembly_.SetHasChanged(); }
  std::string NameOf(SessionId session) override { return ToText(assembly_.IdentityOf(session)); }
  std::string PlaceOf(CycleKind kind, Ballot ballot) override {
    return "in phase " + std::string(ToText(PhaseOf(kind, ballot)));
  }
  std::string SeenOf(SessionId session, std::chrono::milliseconds waited) override {
    return sightings_.Late(session, !round_.begins, waited);
  }
  // Ranks finish what they do between a pause and a resume minutes apart; without AMem the first would wait as long in the next
  // collective. One that let go of all that it shared, and so has resumed by itself, is waited for with those who have not said
  // so yet: they are paused, and the set is without it once they have come.
  bool MayComeYet(const std::vector<SessionId>& absent) override {
    std::vector<SessionId> run;
    for (const SessionId who : absent) {
      const Lifecycle last = assembly_.FactsOf(who).lifecycle;
      if (last == Lifecycle::kNew) return false;  // nothing can be read
      if (last == Lifecycle::kRunning) run.push_back(who);
    }
    return !assembly_.SharesNow(run);
  }

  // The vote that follows from its work is journaled before it is cast; who has no journal any more votes against a pause.
  Status Journaled(const Status& work) {
    Status mine = work;
    const bool needs_journal = kind_ == CycleKind::kPause && !round_.failed;
    if (mine.ok() && needs_journal) mine = CanPause();
    if (!Alone()) scope_.RecordVote(round_.phase, mine);
    return mine.ok() && needs_journal ? CanPause() : mine;  // the record itself may have lost it
  }
  Status CanPause() {
    if (!scope_.TryLedger()) return scope_.NoLedger();
    const LedgerLock lock(scope_.ledger_, std::adopt_lock);
    return scope_.ledger_.CanPause();
  }
  void OnVote(Ballot ballot, const Status&) override {
    round_.voted_on = ballot;
    round_.voted_ns = MonotonicNs();
    waiting_since_ = assembly_.Time();
  }

  void OnWait(Ballot ballot, const BoardReading& reading) override {
    const Deadline now = assembly_.Time();
    if (now - waiting_since_ < kSlow) return;
    sightings_.BallotOf(cycle_, scope_.pool_, ballot, reading);
    if (ballot == Ballot::kCome) assembly_.NotifyAbsent(Absent(ballot, reading));
    if (ballot == Ballot::kCome && now >= until_ && now >= next_word_) SayForWhom(reading);
  }

  void OnDecision(Ballot ballot, const BoardReading& reading, const Status& why) override {
    NoteTime(ballot);
    if (!Alone()) sightings_.BallotOf(cycle_, scope_.pool_, ballot, reading, why);
    const board::BallotDecision& decision = reading.decisions[static_cast<std::size_t>(ballot)];
    // Who decided has looked for the message; the others look for their own journals.
    if (decision.cause == agreement::Cause::kLate && decision.by != assembly_.seat())
      for (const SessionId session : Absent(ballot, reading))
        sightings_.Late(session, ballot == Ballot::kCome, WaitedFor(ballot));
    if (why.code() == Code::kTimeout) scope_.RecordThreads();
    if (why.code() == Code::kPeerLost && why.reported_by()) NoteEnd(why.reported_by());
    if (!why.ok() && !round_.failed) round_.failed = ballot;
    if (ballot == Ballot::kJoined) round_.all_joined = AllVoted(ballot, reading);
    if (ballot == Ballot::kCome) {
      if (why.ok()) AllHaveCome(reading);
      return;
    }
    if (!round_.journaled || Alone() || !scope_.TryLedger()) return;
    const LedgerLock lock(scope_.ledger_, std::adopt_lock);
    RecordDecided(round_.voted_on == ballot ? round_.phase : PhaseOf(kind_, ballot), why);
  }

  static bool AllVoted(Ballot ballot, const BoardReading& reading) {
    return std::ranges::all_of(reading.seats, [&](const agreement::Seat& seat) {
      return seat.votes[static_cast<std::size_t>(ballot)] == agreement::Vote::kYes;
    });
  }

  void AllHaveCome(const BoardReading& reading) {
    assembly_.Begun();
    round_.begins = true;
    round_.began_ns = MonotonicNs();
    scope_.members_ = assembly_.Members();
    for (std::size_t seat = 0; seat < scope_.members_.size(); ++seat) scope_.members_[seat].keeps = reading.keeps[seat];
    scope_.alone_ = Alone();
    report_.members = scope_.members_.size();
  }

  void NoteTime(Ballot ballot) {
    if (ballot == Ballot::kCome || round_.failed) return;
    const std::uint64_t now = MonotonicNs(), waited = round_.voted_ns == 0 ? 0 : now - round_.voted_ns;
    report_.phases.push_back({PhaseOf(kind_, ballot), round_.worked_ns, waited, std::exchange(round_.voted_ns, 0), now});
  }

  // ---- members

  [[nodiscard]] bool Alone() const { return scope_.pool_ && assembly_.board().members().size() == 1; }

  // The plans must know of an end: nothing is imported from the dead, and an object that lost a member is not made anew.
  void NoteEnd(SessionId session) {
    if (round_.ends.insert(session).second) static_cast<void>(scope_.peers_.AwaitLoss(session, kLossPatience));
  }
  // Also of whom this call has found dead, and so not among the members, while the journal has them alive.
  void NoteEnds() {
    const std::vector<SessionId>& members = assembly_.board().members();
    std::set<SessionId> others(members.begin(), members.end());
    if (scope_.ledger_.TryLockFor(kToJournal)) {
      const LedgerLock lock(scope_.ledger_, std::adopt_lock);
      for (const auto& [session, peer] : scope_.ledger_.state().peers)
        if (peer.connected) others.insert(session);
    }
    others.erase(scope_.peers_.Self().session);
    for (const SessionId session : others)
      if (assembly_.HasEnded(session)) NoteEnd(session);
  }

  // A patient member also waits for one that is stopped, and cannot even be met.
  Status Find(bool patient) {
    while (true) {
      Status found = assembly_.Find(patient ? std::max(until_, assembly_.Time() + scope_.deadlines_.margin()) : until_);
      const bool late = found.code() == Code::kTimeout && found.reported_by();
      if (!late) return found;
      const bool waits_on = patient && MayComeYet({found.reported_by()});
      std::string seen;
      if (!waits_on || assembly_.Time() >= next_word_) {
        seen = sightings_.Late(found.reported_by(), true, Waited());
        next_word_ = assembly_.Time() + Waited();
      }
      if (waits_on) std::this_thread::sleep_for(kSlow);
      if (!waits_on)
        return Status{found.code(), found.message() + (seen.empty() ? "" : "; " + NameOf(found.reported_by()) + " " + seen),
                      found.driver_result()}
            .ReportedBy(found.reported_by());
    }
  }

  [[nodiscard]] std::chrono::milliseconds WaitedFor(Ballot ballot) const {
    return ballot == Ballot::kCome ? Waited()
                                   : std::chrono::round<std::chrono::milliseconds>(assembly_.Time() - waiting_since_);
  }
  [[nodiscard]] std::vector<SessionId> Absent(Ballot ballot, const BoardReading& reading) const {
    std::vector<SessionId> absent;
    for (const std::size_t seat : agreement::Absent(reading.ViewOf(assembly_.seat()), ballot))
      absent.push_back(assembly_.board().members()[seat]);
    return absent;
  }
  [[nodiscard]] std::chrono::milliseconds Waited() const {
    return std::chrono::round<std::chrono::milliseconds>(assembly_.Time() - came_);
  }
  // More and more rarely.
  void SayForWhom(const BoardReading& reading) {
    const auto waited = Waited();
    next_word_ = assembly_.Time() + waited;
    std::string names, seen;
    for (const SessionId session : Absent(Ballot::kCome, reading)) {
      names += (names.empty() ? "" : ", ") + NameOf(session);
      const std::string what = sightings_.Late(session, true, waited);
      if (!what.empty()) seen += (seen.empty() ? ", of whom " : "; ") + NameOf(session) + " " + what;
    }
    const std::string of_tag = scope_.tag_.empty() ? "" : " of tag " + scope_.tag_;
    assembly_.Say("resume" + of_tag + ": waits since " + std::to_string(waited.count() / 1000) + " s for " + names + seen);
  }

  // ---- the work

  Status Perform(Work work, Deadline until, const std::function<bool()>& is_overtaken) {
    switch (work) {
      case Work::kQuiesce:
        AMEM_TRY(Begin(until));
        return Forward(PhaseKind::kPauseArrive, is_overtaken);
      case Work::kSave:
        return Forward(PhaseKind::kPauseSave, is_overtaken);
      case Work::kRelease:
        if (round_.failed) return round_.left = ReleaseAgain();
        AMEM_TRY(Forward(PhaseKind::kPauseReleaseOwn, is_overtaken));
        return Forward(PhaseKind::kPauseGone, is_overtaken);
      case Work::kMake:
        if (round_.failed) return Backward(PhaseKind::kResumeCreateOwn, is_overtaken);
        AMEM_TRY(Begin(until));
        AMEM_TRY(Forward(PhaseKind::kResumeArrive, {}));  // several ranks may lack memory, and each says so
        return Forward(PhaseKind::kResumeCreateOwn, is_overtaken);
      case Work::kImport:
        return round_.failed ? Backward(PhaseKind::kResumeImport, is_overtaken)
                             : Forward(PhaseKind::kResumeImport, is_overtaken);
      case Work::kRestore:
        if (!round_.failed) return Forward(PhaseKind::kResumeVerify, is_overtaken);
        // Its device may not have been added to a new multicast object, and binding memory to such an object would hang.
        if (!round_.all_joined && scope_.executor_.HasRenewedMulticasts())
          return {Code::kRefused,
                  "a rank died before it was sure that its device was added to a multicast object; nothing was bound to it"};
        return Backward(PhaseKind::kResumeVerify, is_overtaken);
    }
    return {};
  }

  [[nodiscard]] CycleBegun CycleHere() const REQUIRES(scope_.ledger_) {
    CycleBegun begun{.kind = kind_, .cycle = scope_.CycleNumber(kind_), .pool = scope_.pool_, .keeps = manner_.keeps};
    for (const PeerIdentity& member : Alone() ? std::vector<PeerIdentity>() : scope_.members_) {
      begun.members.push_back(member.session);
      begun.processes.push_back(AsMember(member));
    }
    return begun;
  }
  // All had come, and the call failed on another member before this one had done anything, so the gate is open. A call of the
  // program must not find the scope pausing, where new memory cannot be recorded: all of a pause is recorded under one lock.
  // What is paused refuses such calls itself. None: it could not be recorded.
  std::optional<Status> JournalWhatOthersBegan(const Status& why) {
    const Status told = scope_.Told(kind_, why);
    {
      if (!scope_.ledger_.TryLockFor(kToJournal)) return {};
      const LedgerLock lock(scope_.ledger_, std::adopt_lock);
      const Lifecycle now = scope_.ledger_.state().LifecycleOf(scope_.pool_);
      if (now != Lifecycle::kRunning && now != Lifecycle::kPaused) return {};  // what an earlier call left is for a resume
      RecordBegun();
      if (kind_ == CycleKind::kPause) {
        RecordDecided(PhaseOf(kind_, *round_.failed), why);
        scope_.ledger_.Record(FailedAs(told, why));
        return told;
      }
    }
    if (why.code() == Code::kOutOfMemory) CheckMemoryToo();
    if (!scope_.TryLedger()) {
      scope_.ledger_.RecordSoon(FailedAs(told, why));
      return told;
    }
    const LedgerLock lock(scope_.ledger_, std::adopt_lock);
    RecordDecided(PhaseOf(kind_, *round_.failed), why);
    scope_.ledger_.Record(FailedAs(told, why));
    return told;
  }
  void RecordBegun() REQUIRES(scope_.ledger_) {
    CycleBegun begun = CycleHere();
    cycle_ = begun.cycle;
    scope_.ledger_.Record(std::move(begun));
    round_.after_failed_undo = scope_.ledger_.state().ScopeOf(scope_.pool_).cycle.after_failed_undo;
  }
  void RecordDecided(PhaseKind phase, const Status& why) REQUIRES(scope_.ledger_) {
    scope_.ledger_.Record(PhaseDecided{phase, why.ok(), why.ok() ? SessionId{} : why.reported_by(), why.message(), why.code(),
                                       why.driver_result(), scope_.pool_});
  }
  [[nodiscard]] CycleFailed FailedAs(const Status& told, const Status& why, const Status& undone = {}) const {
    return {kind_, cycle_, undone.ok(), told.message(), why.code(), why.driver_result(), scope_.culprits_, scope_.pool_};
  }
  // Several ranks may lack device memory, and each says so in its own journal.
  void CheckMemoryToo() {
    scope_.executor_.BeginCycle(In(scope_.deadlines_.margin()));
    const auto plan = scope_.MakePlan(kind_);
    if (!plan.ok()) return;
    const auto arrive = std::ranges::find(plan->phases, PhaseKind::kResumeArrive, &PlannedPhase::phase);
    if (arrive != plan->phases.end()) static_cast<void>(scope_.RunPhase(*arrive, kind_, manner_));
  }
  // Keeps the scope's calls out, and begins the cycle in the journal.
  Status Begin(Deadline until) {
    Executor& executor = scope_.executor_;
    if (kind_ == CycleKind::kPause) AMEM_TRY(scope_.ledger_.AwaitFiles(executor.until()));
    AMEM_TRY(scope_.CloseGate(executor.until()));
    closed_.reset(new OpenAtEnd{scope_.gate_});
    if (manner_.kept_out) manner_.kept_out();
    executor.BeginCycle(scope_.deadlines_.OwnPartOf(until),
                        manner_.after == nullptr ? Backup::Looking::kIdle : Backup::Looking::kBeside, manner_.hosts_idle);
    AMEM_TRY(scope_.KeepIfAnyDoes(scope_.members_));
    {
      if (!scope_.TryLedger()) return scope_.NoLedger();
      const LedgerLock lock(scope_.ledger_, std::adopt_lock);
      RecordBegun();
    }
    round_.journaled = true;
    AMEM_ASSIGN(plan_, scope_.MakePlan(kind_));
    return {};
  }

  Status Forward(PhaseKind phase, const std::function<bool()>& is_overtaken) {
    const auto planned = std::ranges::find(plan_.phases, phase, &PlannedPhase::phase);
    if (planned == plan_.phases.end()) return {};
    round_.phase = phase;
    Status mine = OrNoMemory([&] { return scope_.RunPhase(*planned, kind_, manner_, is_overtaken); });
    if (!mine.ok() && kind_ == CycleKind::kResume) mine = scope_.GoOn(*planned, manner_, mine);
    if (mine.ok() && scope_.compare_ && phase == PhaseKind::kResumeVerify) mine = scope_.executor_.CompareRestored(plan_);
    return mine;
  }

  // A phase of the opposite plan, from wherever this session is.
  Status Backward(PhaseKind phase, const std::function<bool()>& is_overtaken) {
    round_.phase = phase;
    const CycleKind undo = phase >= PhaseKind::kResumeArrive ? CycleKind::kResume : CycleKind::kPause;
    return scope_.RunUndoPhase(undo, phase, is_overtaken);
  }

  Status ReleaseAgain() {
    if (!round_.journaled) return {};
    if (scope_.in_use_) return round_.mine;
    // Nobody waits for it, and what it does not release stays on the device.
    scope_.executor_.SetUntil(std::max(scope_.executor_.until(), In(scope_.deadlines_.margin())));
    for (const PhaseKind phase : {PhaseKind::kPauseSave, PhaseKind::kPauseReleaseOwn, PhaseKind::kPauseGone})
      AMEM_TRY(Backward(phase, {}));
    return {};
  }

  // ---- the end

  Status End(const board::RoundOutcome& outcome) {
    report_.cycle = cycle_;
    if (!outcome.failed) {
      scope_.Conclude(kind_, manner_, std::move(report_), round_.began_ns);
      return LetIn({});
    }
    std::vector<SessionId> culprits{outcome.culprit};
    if (outcome.failed == Ballot::kCome && outcome.status.code() == Code::kTimeout) culprits = outcome.absent;
    const Status why = Alone() && !round_.mine.ok() ? round_.mine : outcome.status;
    NameCulprits(culprits);
    if (!round_.journaled) {
      const auto told = round_.begins && round_.mine.ok() ? JournalWhatOthersBegan(why) : std::nullopt;
      if (!told) return LetIn(NotBegun(why, culprits));
      scope_.Add(kind_, report_, false);
      EndCopies(outcome);
      LeaveContents(outcome, false);
      return LetIn(*told);
    }
    scope_.Add(kind_, report_, false);
    return LetIn(Failed(why, outcome));
  }
  Status LetIn(Status status) {
    if (closed_ != nullptr && manner_.ended) manner_.ended();
    closed_.reset();
    return status;
  }

  Status Failed(const Status& why, const board::RoundOutcome& outcome) {
    EndCopies(outcome);
    Status undone = round_.left.ok() ? outcome.undo : round_.left;
    // Nothing has been released by this call; what an earlier one left is still to be made anew.
    if (undone.ok() && round_.after_failed_undo && outcome.ending == agreement::Ending::kRunning &&
        *outcome.failed < Ballot::kGone)
      undone = {Code::kBroken, "an earlier pause or resume that failed has left memory released here"};
    const Status told = scope_.Told(kind_, why, undone);
    CycleFailed failed = FailedAs(told, why, undone);
    failed.paused = kind_ == CycleKind::kPause && outcome.ending == agreement::Ending::kPaused && round_.left.ok();
    bool saved = true;
    if (scope_.TryLedger()) {
      const LedgerLock lock(scope_.ledger_, std::adopt_lock);
      scope_.ledger_.Record(failed);
      saved = std::ranges::any_of(scope_.ledger_.state().allocations,
                                  [&](const auto& item) { return item.second.saved && item.second.pool == scope_.pool_; });
    } else {
      scope_.ledger_.RecordSoon(failed);
    }
    LeaveContents(outcome, saved);
    return told;
  }
  // What cannot be ended now is for the next call.
  void EndCopies(const board::RoundOutcome& outcome) {
    if (kind_ != CycleKind::kPause || *outcome.failed >= Ballot::kGone) return;
    scope_.executor_.SetUntil(In(scope_.deadlines_.undo()));
    static_cast<void>(scope_.executor_.EndCopies());
  }
  // Before `gone` others run on while these copies end, and may write to the memory: they are no copy of what was hashed.
  void LeaveContents(const board::RoundOutcome& outcome, bool saved) {
    const bool undisturbed = scope_.members_.size() == 1 || *outcome.failed >= Ballot::kGone;
    if (kind_ == CycleKind::kPause && !saved) scope_.backup_.Abandon(undisturbed);
    scope_.NoteCopies();
  }

  Status NotBegun(const Status& why, const std::vector<SessionId>& culprits) {
    if (why.code() == Code::kTimeout) scope_.RecordThreads();
    NameCulprits(culprits);
    if (why.code() == Code::kPeerLost && why.reported_by()) assembly_.FailedBy(why.reported_by());
    const Status told = scope_.pool_ || round_.begins ? scope_.Told(kind_, why) : why;
    scope_.RecordNotBegun(kind_, cycle_, told);
    return told;
  }
  void NameCulprits(const std::vector<SessionId>& culprits) {
    scope_.culprits_.clear();
    for (const SessionId session : culprits)
      if (session && session != scope_.peers_.Self().session)
        scope_.culprits_.push_back(AsMember(assembly_.IdentityOf(session)));
  }

  Coordinator& scope_;
  const CycleKind kind_;
  const Manner& manner_;
  Assembly& assembly_;
  const Deadline until_, came_ = until_ - scope_.deadlines_.call();  // on its clock
  Deadline waiting_since_ = came_;
  std::uint64_t cycle_;
  Sightings sightings_;
  Deadline next_word_{};               // when to say next for whom a resume waits
  std::unique_ptr<OpenAtEnd> closed_;  // the gate
  Plan plan_;                          // of the way forward
  CycleReport report_;
  struct Progress {          // of this member in a round
    bool begins = false;     // all have come
    bool journaled = false;  // CycleBegun is
    bool all_joined = true;
    bool after_failed_undo = false;  // it was begun neither running nor paused
    PhaseKind phase{};               // the last one that it began
    std::optional<Ballot> failed{};  // the first that did
    std::optional<Ballot> voted_on{};
    Status mine{};  // this member's work that failed, before anything else had
    Status left{};  // why not all could be released again
    std::uint64_t began_ns = 0, worked_ns = 0, voted_ns = 0;
    std::set<SessionId> ends{};  // of members, which the ledger knows of
  } round_;
};

Status Coordinator::Cycle(CycleKind kind, const Manner& manner) {
  const Deadline until = In(deadlines_.call());
  executor_.SetUntil(deadlines_.OwnPartOf(until));
  {
    if (!TryLedger()) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    // After a failed undo the lifecycle is neither, so either call can be tried again.
    const Lifecycle target = kind == CycleKind::kPause ? Lifecycle::kPaused : Lifecycle::kRunning;
    if (ledger_.state().LifecycleOf(pool_) == target) return {};
  }
  // Its contents are newer than the copies that it was resumed from.
  if (in_use_ && kind == CycleKind::kPause) AMEM_TRY(Cycle(CycleKind::kResume));
  AMEM_ASSIGN(const auto assembly, Assemble(kind));
  threads_recorded_ = false;
  culprits_.clear();
  std::uint64_t cycle = 0;
  {
    if (!TryLedger()) return NoLedger();
    const LedgerLock lock(ledger_, std::adopt_lock);
    cycle = CycleNumber(kind);
    if (kind == CycleKind::kPause) ledger_.RenewJournal();
    if (!pool_ || IsShared()) ledger_.Record(PhaseBegun{PhaseOf(kind, Ballot::kCome), pool_});
  }
  return Call(*this, kind, manner, *assembly, until, cycle).Run();
}

}  // namespace amem
