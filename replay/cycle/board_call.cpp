// A pause or resume on the board of its set. The agreement says what a member does next, and TakePart does it on the board.
// Call answers TakePart: it has the work done (Coordinator::OwnPart) and journaled (CycleJournal), and says for whom it waits.
#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/no_memory.h"
#include "replay/cycle/own_part.h"
#include "replay/cycle/sightings.h"
#include "replay/peers/board/participant.h"
#include "statemachine/check.h"

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
  Call(Coordinator& scope, CycleCall& call, Assembly& assembly, Deadline until)
      : scope_(scope),
        call_(call),
        assembly_(assembly),
        until_(assembly.Time() + (until - Now())),
        waiting_since_(Came()),
        sightings_(scope.context_.ledger, assembly, CallOfSet{call.kind, scope.tag_}),
        journal_(scope.context_.ledger, scope.executor_, call, scope.pool_),
        part_(scope, call) {}

  Status Run() {
    const bool patient = call_.options.patient && call_.kind == CycleKind::kResume;
    const Deadlines& times = scope_.context_.deadlines;
    board::CallOnBoard call{.kind = call_.kind,
                            .until = until_,
                            .again = times.margin(),
                            .round = patient ? times.call() : times.round_least(),
                            .undo = times.undo(),
                            .patient = patient,
                            .began = Came()};
    while (true) {
      call.keeps = scope_.context_.peers.Self().keeps;
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
    if (ReleasesAgain(work)) round_.left = NoMemory();  // unless there is some to try it
    scope_.executor_.SetUntil(scope_.context_.deadlines.OwnPartOf(until));
    NoteEnds();
    const std::uint64_t began = MonotonicNs();
    Status done = OrNoMemory([&] { return Perform(work, until, is_overtaken); });
    round_.worked_ns = MonotonicNs() - began;
    if (!is_overtaken()) done = Journaled(done);
    if (!done.ok() && !is_overtaken() && Passed(scope_.executor_.until())) journal_.Threads();
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
    return sightings_.Late(session, round_.stage == Stage::kGathers, waited);
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
    const bool needs_journal = call_.kind == CycleKind::kPause && !round_.failed;
    if (mine.ok() && needs_journal) mine = journal_.CanPause();
    if (!Alone()) journal_.Vote(part_.phase(), mine);
    return mine.ok() && needs_journal ? journal_.CanPause() : mine;  // the record itself may have lost it
  }
  void OnVote(Ballot ballot, const Status&) override {
    round_.voted_on = ballot;
    round_.voted_ns = MonotonicNs();
    waiting_since_ = assembly_.Time();
  }

  void OnWait(Ballot ballot, const BoardReading& reading) override {
    const Deadline now = assembly_.Time();
    if (now - waiting_since_ < kSlow) return;
    sightings_.BallotOf(call_.cycle, scope_.pool_, ballot, reading);
    if (ballot == Ballot::kCome) assembly_.NotifyAbsent(Absent(ballot, reading));
    if (ballot == Ballot::kCome && now >= until_ && now >= next_word_) SayForWhom(reading);
  }

  void OnDecision(Ballot ballot, const BoardReading& reading, const Status& why) override {
    // What the work goes by comes first: for the rest there may be no memory.
    const bool failed_before = round_.failed.has_value();
    if (!why.ok() && !failed_before) round_.failed = ballot;
    if (!round_.failed) round_.passed = ballot;
    if (ballot == Ballot::kJoined) round_.all_joined = AllVoted(ballot, reading);
    if (ballot == Ballot::kCome && why.ok()) AllHaveCome(reading);
    if (ballot != Ballot::kCome && !failed_before) NoteTime(ballot);
    if (!Alone()) sightings_.BallotOf(call_.cycle, scope_.pool_, ballot, reading, why);
    const board::BallotDecision& decision = reading.decisions[static_cast<std::size_t>(ballot)];
    // The member that decided has asked about the late ones for its message; the others ask for their own journals.
    if (decision.cause == agreement::Cause::kLate && decision.by != assembly_.seat())
      for (const SessionId session : Absent(ballot, reading))
        sightings_.Late(session, ballot == Ballot::kCome, WaitedFor(ballot));
    if (why.code() == Code::kTimeout) journal_.Threads();
    if (why.code() == Code::kPeerLost && why.reported_by()) NoteEnd(why.reported_by());
    if (ballot == Ballot::kCome) return;
    Ledger& ledger = scope_.context_.ledger;
    if (round_.stage != Stage::kBegun || Alone() || !ledger.TryLockUntil(scope_.executor_.until())) return;
    const LedgerLock lock(ledger, std::adopt_lock);
    journal_.Decided(round_.voted_on == ballot ? part_.phase() : PhaseOf(call_.kind, ballot), why);
  }

  static bool AllVoted(Ballot ballot, const BoardReading& reading) {
    return std::ranges::all_of(reading.seats, [&](const agreement::Seat& seat) {
      return seat.votes[static_cast<std::size_t>(ballot)] == agreement::Vote::kYes;
    });
  }

  void AllHaveCome(const BoardReading& reading) {
    assembly_.Begun();
    round_.began_ns = MonotonicNs();
    call_.members = assembly_.Members();
    for (std::size_t seat = 0; seat < call_.members.size(); ++seat) call_.members[seat].keeps = reading.keeps[seat];
    call_.alone = Alone();
    report_.members = call_.members.size();
    round_.stage = Stage::kCome;
  }

  void NoteTime(Ballot ballot) {
    const std::uint64_t now = MonotonicNs(), waited = round_.voted_ns == 0 ? 0 : now - round_.voted_ns;
    report_.phases.push_back({PhaseOf(call_.kind, ballot), round_.worked_ns, waited, std::exchange(round_.voted_ns, 0), now});
  }

  // ---- members

  [[nodiscard]] Deadline Came() const { return until_ - scope_.context_.deadlines.call(); }
  [[nodiscard]] bool Alone() const { return scope_.pool_ && assembly_.board().members().size() == 1; }

  // The plans must know of an end: nothing is imported from the dead, and an object that lost a member is not made anew.
  void NoteEnd(SessionId session) {
    if (round_.ends.contains(session)) return;
    static_cast<void>(scope_.context_.peers.AwaitLoss(session, kLossPatience));
    round_.ends.insert(session);
  }
  // Also of sessions that this call has found dead, which are no members then, while the journal has them alive.
  void NoteEnds() {
    const std::vector<SessionId>& members = assembly_.board().members();
    std::set<SessionId> others(members.begin(), members.end());
    if (Ledger& ledger = scope_.context_.ledger; ledger.TryLockFor(kToRecord)) {
      const LedgerLock lock(ledger, std::adopt_lock);
      for (const auto& [session, peer] : ledger.state().peers)
        if (peer.connected) others.insert(session);
    }
    others.erase(scope_.context_.peers.Self().session);
    for (const SessionId session : others)
      if (assembly_.HasEnded(session)) NoteEnd(session);
  }

  // A patient member also waits for one that is stopped, and cannot even be met.
  Status Find(bool patient) {
    while (true) {
      Status found = assembly_.Find(patient ? std::max(until_, assembly_.Time() + scope_.context_.deadlines.margin()) : until_);
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
    return std::chrono::round<std::chrono::milliseconds>(assembly_.Time() - Came());
  }
  // Ever more rarely.
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
        return part_.Forward(PhaseKind::kPauseArrive, is_overtaken);
      case Work::kSave:
        AMEM_TRY(AllPassed(Ballot::kIdle));
        return part_.Forward(PhaseKind::kPauseSave, is_overtaken);
      case Work::kRelease:
        if (ReleasesAgain(work)) return round_.left = ReleaseAgain();
        AMEM_TRY(AllPassed(Ballot::kSaved));
        AMEM_TRY(part_.Forward(PhaseKind::kPauseReleaseOwn, is_overtaken));
        return part_.Forward(PhaseKind::kPauseGone, is_overtaken);
      case Work::kMake:
        if (round_.failed) return part_.Backward(PhaseKind::kResumeCreateOwn, is_overtaken);
        AMEM_TRY(Begin(until));
        AMEM_TRY(part_.Forward(PhaseKind::kResumeArrive, {}));  // several ranks may lack memory, and each says so
        return part_.Forward(PhaseKind::kResumeCreateOwn, is_overtaken);
      case Work::kImport:
        if (round_.failed) return part_.Backward(PhaseKind::kResumeImport, is_overtaken);
        AMEM_TRY(AllPassed(Ballot::kMade));
        return part_.Forward(PhaseKind::kResumeImport, is_overtaken);
      case Work::kRestore:
        if (!round_.failed) {
          AMEM_TRY(AllPassed(Ballot::kJoined));
          return part_.Forward(PhaseKind::kResumeVerify, is_overtaken);
        }
        // The device of a rank that died may not have been added to a new multicast object; to bind memory to such an object
        // would hang.
        if (!round_.all_joined && scope_.executor_.HasRenewedMulticasts())
          return {Code::kRefused,
                  "a rank died before it was sure that its device was added to a multicast object; nothing was bound to it"};
        return part_.Backward(PhaseKind::kResumeVerify, is_overtaken);
    }
    return {};
  }

  // A resume releases only what it has made.
  [[nodiscard]] bool ReleasesAgain(Work work) const {
    return work == Work::kRelease && (round_.failed || call_.kind == CycleKind::kResume);
  }
  // Before work that goes forward: whoever released what others have not saved, or mapped what others have not made, would lose
  // contents or share other memory than they do.
  Status AllPassed(Ballot ballot) {
    const auto check = [&]() -> Status {
      AMEM_CHECK(round_.stage == Stage::kBegun);
      AMEM_CHECK(round_.passed == ballot);
      return {};
    };
    return Latched(scope_.context_.ledger, check());
  }
  // Before anything is begun.
  Status IsMember() {
    const auto check = [&]() -> Status {
      const SessionId self = scope_.context_.peers.Self().session;
      AMEM_CHECK(round_.stage == Stage::kCome);
      AMEM_CHECK(std::ranges::count(call_.members, self, &PeerIdentity::session) == 1, self);
      if (call_.alone) AMEM_CHECK(call_.members.size() == 1U);
      return {};
    };
    return Latched(scope_.context_.ledger, check());
  }
  // All had come, and the call failed on another member before this one had done anything, so the gate is open. A call of the
  // program must not find the scope pausing, where new memory cannot be recorded: all of a pause is recorded under one lock.
  // A paused scope refuses such calls itself. Nothing: the beginning could not be recorded.
  std::optional<Status> JournalWhatOthersBegan(const Status& why, Ballot others_failed) {
    Ledger& ledger = scope_.context_.ledger;
    const Status told = scope_.CallerMessage(call_.kind, why);
    const PhaseKind phase = PhaseOf(call_.kind, others_failed);
    CycleFailed failed = journal_.FailedAs(told, why);  // what has begun must end, for which there might be no memory then
    const auto end = [&] {
      ledger.AssertHeld();
      static_cast<void>(OrNoMemory([&] {
        ledger.AssertHeld();
        journal_.Decided(phase, why);
        return Status{};
      }));
      ledger.Record(std::move(failed));
    };
    {
      if (!ledger.TryLockFor(kToRecord)) return {};
      const LedgerLock lock(ledger, std::adopt_lock);
      const Lifecycle now = ledger.state().LifecycleOf(scope_.pool_);
      if (now != Lifecycle::kRunning && now != Lifecycle::kPaused) return {};  // what an earlier call left is for a resume
      const auto begun = journal_.Begun();
      if (!begun.ok()) return {};
      round_.after_failed_undo = *begun;
      failed.cycle = call_.cycle;
      if (call_.kind == CycleKind::kPause) {
        end();
        return told;
      }
    }
    if (why.code() == Code::kOutOfMemory)  // without host memory for it, the cycle must be ended all the same
      static_cast<void>(OrNoMemory([&] { return part_.CheckMemoryToo(), Status{}; }));
    if (!ledger.TryLockUntil(scope_.executor_.until())) {
      ledger.RecordSoon(failed);
      return told;
    }
    const LedgerLock lock(ledger, std::adopt_lock);
    end();
    return told;
  }
  // Keeps the scope's calls out, and begins the cycle in the journal.
  Status Begin(Deadline until) {
    AMEM_TRY(IsMember());
    AMEM_TRY(part_.CloseGate(until));
    {
      Ledger& ledger = scope_.context_.ledger;
      if (!ledger.TryLockUntil(scope_.executor_.until())) return LedgerIsHeld(ledger);
      const LedgerLock lock(ledger, std::adopt_lock);
      AMEM_ASSIGN(round_.after_failed_undo, journal_.Begun());
    }
    round_.stage = Stage::kBegun;
    return part_.MakePlan();
  }
  Status ReleaseAgain() {
    if (round_.stage != Stage::kBegun) return {};
    return scope_.followed_ ? round_.mine : part_.ReleaseAgain();
  }

  // ---- the end

  Status End(const board::RoundOutcome& outcome) {
    report_.cycle = call_.cycle;
    if (!outcome.failed) {
      assembly_.EndedAs(part_.Conclude(std::move(report_), round_.began_ns));
      part_.OpenGate();
      return {};
    }
    if (round_.stage == Stage::kBegun) return Failed(outcome);
    std::vector<SessionId> culprits = CulpritsOf(outcome);
    const Status why = WhyFailed(outcome);
    NameCulprits(culprits);
    const bool others_began = round_.stage == Stage::kCome && round_.mine.ok();
    const auto told = others_began ? JournalWhatOthersBegan(why, *outcome.failed) : std::nullopt;
    if (!told) return NotBegun(why, culprits);
    scope_.reports_.AddFailed(call_.kind, report_);
    EndCopies(outcome);
    LeaveContents(outcome, false);
    return *told;
  }
  [[nodiscard]] static std::vector<SessionId> CulpritsOf(const board::RoundOutcome& outcome) {
    if (outcome.failed == Ballot::kCome && outcome.status.code() == Code::kTimeout) return outcome.absent;
    return {outcome.culprit};
  }
  [[nodiscard]] Status WhyFailed(const board::RoundOutcome& outcome) const {
    return Alone() && !round_.mine.ok() ? round_.mine : outcome.status;
  }

  Status Failed(const board::RoundOutcome& outcome) {
    EndCopies(outcome);
    Status told = NoMemory();
    CycleFailed failed = HowFailed(outcome, &told);
    failed.paused = call_.kind == CycleKind::kPause && outcome.ending == agreement::Ending::kPaused && round_.left.ok();
    bool saved = true;
    std::optional<CycleProgress> ended;  // unknown while another thread holds the ledger
    Ledger& ledger = scope_.context_.ledger;
    if (ledger.TryLockUntil(scope_.executor_.until())) {
      const LedgerLock lock(ledger, std::adopt_lock);
      ledger.Record(std::move(failed));
      ended = ProgressOf(ledger.state(), scope_.pool_);
      saved = std::ranges::any_of(ledger.state().allocations,
                                  [&](const auto& item) { return item.second.saved && item.second.pool == scope_.pool_; });
    } else {
      ledger.RecordSoon(failed);
    }
    if (ended) assembly_.EndedAs(*ended);
    LeaveContents(outcome, saved);
    part_.OpenGate();
    return told;
  }
  // How it ended is recorded also where there is no memory to say why, because the scope would otherwise be neither running nor
  // paused.
  CycleFailed HowFailed(const board::RoundOutcome& outcome, Status* told) {
    // This call has released nothing; memory that an earlier call left released is still to be made anew.
    const bool left_before = round_.left.ok() && outcome.undo.ok() && round_.after_failed_undo &&
                             outcome.ending == agreement::Ending::kRunning && *outcome.failed < Ballot::kGone;
    CycleFailed failed{.kind = call_.kind,
                       .cycle = call_.cycle,
                       .undone = round_.left.ok() && outcome.undo.ok() && !left_before,
                       .message = NoMemory().message(),
                       .code = outcome.status.code(),
                       .driver_result = outcome.status.driver_result(),
                       .pool = scope_.pool_};
    static_cast<void>(OrNoMemory([&] {
      const Status why = WhyFailed(outcome);
      NameCulprits(CulpritsOf(outcome));
      scope_.reports_.AddFailed(call_.kind, report_);
      Status undone = round_.left.ok() ? outcome.undo : round_.left;
      if (left_before) undone = {Code::kBroken, "an earlier pause or resume that failed has left memory released here"};
      *told = scope_.CallerMessage(call_.kind, why, undone);
      failed = journal_.FailedAs(*told, why, undone);
      return Status{};
    }));
    return failed;
  }
  void EndCopies(const board::RoundOutcome& outcome) {
    if (call_.kind == CycleKind::kPause && *outcome.failed < Ballot::kGone) part_.EndCopies();
  }
  // If the call failed before `gone`, other members run on while these copies end, and may write to the memory, so that the
  // copies differ from what was hashed.
  void LeaveContents(const board::RoundOutcome& outcome, bool saved) {
    const bool undisturbed = call_.members.size() == 1 || *outcome.failed >= Ballot::kGone;
    if (call_.kind == CycleKind::kPause && !saved) part_.ForgetSave(undisturbed);
    part_.NoteCopies();
  }

  Status NotBegun(const Status& why, const std::vector<SessionId>& culprits) {
    if (why.code() == Code::kTimeout) journal_.Threads();
    NameCulprits(culprits);
    if (why.code() == Code::kPeerLost && why.reported_by()) assembly_.FailedBy(why.reported_by());
    const bool come = round_.stage != Stage::kGathers;
    const Status told = scope_.pool_ || come ? scope_.CallerMessage(call_.kind, why) : why;
    scope_.reports_.AddFailed(call_.kind, {});
    journal_.NotBegun(told);
    return told;
  }
  // Without memory for that nobody is named.
  void NameCulprits(const std::vector<SessionId>& culprits) {
    static_cast<void>(OrNoMemory([&] {
      std::vector<CycleMember> others;
      for (const SessionId session : culprits)
        if (session && session != scope_.context_.peers.Self().session)
          others.push_back(CycleJournal::AsMember(assembly_.IdentityOf(session)));
      journal_.NameCulprits(std::move(others));
      return Status{};
    }));
  }

  Coordinator& scope_;
  CycleCall& call_;
  Assembly& assembly_;
  const Deadline until_;  // on its clock
  Deadline waiting_since_;
  Sightings sightings_;
  Deadline next_word_{};  // when to say next for whom a resume waits
  CycleJournal journal_;
  Coordinator::OwnPart part_;
  CycleReport report_;
  // kGathers: members have yet to come; kCome: all have; kBegun: CycleBegun is recorded, too.
  enum class Stage : std::uint8_t { kGathers, kCome, kBegun };
  struct Progress {  // of this member in a round
    Stage stage = Stage::kGathers;
    bool all_joined = true;
    bool after_failed_undo = false;  // it was begun neither running nor paused
    Ballot passed{};                 // the last one before any failed
    std::optional<Ballot> failed{};  // the first that did
    std::optional<Ballot> voted_on{};
    Status mine{};  // this member's work that failed, before anything else had
    Status left{};  // why not all could be released again
    std::uint64_t began_ns = 0, worked_ns = 0, voted_ns = 0;
    std::set<SessionId> ends{};  // of members, which the ledger knows of
  } round_;
};

Status Coordinator::Cycle(CycleKind kind, const CycleOptions& options, const CycleHooks& hooks) {
  const Deadline until = In(context_.deadlines.call());
  executor_.SetUntil(context_.deadlines.OwnPartOf(until));
  {
    if (!context_.ledger.TryLockUntil(executor_.until())) return LedgerIsHeld(context_.ledger);
    const LedgerLock lock(context_.ledger, std::adopt_lock);
    // After a failed undo the lifecycle is neither, so either call can be tried again.
    const Lifecycle target = kind == CycleKind::kPause ? Lifecycle::kPaused : Lifecycle::kRunning;
    if (context_.ledger.state().LifecycleOf(pool_) == target) return {};
  }
  // Its contents are newer than the copies that it was resumed from.
  if (followed_ && kind == CycleKind::kPause) AMEM_TRY(Cycle(CycleKind::kResume));
  AMEM_ASSIGN(const auto assembly, Assemble(kind));
  CycleCall call{.kind = kind, .options = options, .hooks = hooks};
  {
    if (!context_.ledger.TryLockUntil(executor_.until())) return LedgerIsHeld(context_.ledger);
    const LedgerLock lock(context_.ledger, std::adopt_lock);
    call.cycle = NumberOf(kind, context_.ledger.state(), pool_);
    if (kind == CycleKind::kPause) context_.ledger.RenewJournal();
    if (!pool_ || IsShared()) context_.ledger.Record(PhaseBegun{PhaseOf(kind, Ballot::kCome), pool_});
  }
  return Call(*this, call, *assembly, until).Run();
}

}  // namespace amem
