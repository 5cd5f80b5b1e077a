#include "replay/cycle/coordinator.h"

#include <algorithm>
#include <chrono>

#include "journal/base/clock.h"
#include "journal/base/process_sight.h"

namespace amem {

// Host memory is handed to the driver when NCCL has not called it for a moment, so as not to hold up a start-up full of calls.
constexpr std::chrono::milliseconds kQuiet{10};

static CycleMember AsMember(const PeerIdentity& who) { return {who.session, who.rank, who.pid, who.host}; }

Coordinator::Coordinator(Ledger& ledger, Driver& driver, Peers& peers, Bytes pinned_limit)
    : ledger_(ledger),
      driver_(driver),
      peers_(peers),
      backup_(driver, {.quiet = kQuiet, .prepare_limit = pinned_limit}),
      executor_(ledger, driver, peers, backup_) {}

CycleReport Coordinator::Last(CycleKind kind) const {
  const std::lock_guard lock(report_mutex_);
  return kind == CycleKind::kPause ? pause_ : resume_;
}

CycleTotals Coordinator::Totals(CycleKind kind) const {
  const std::lock_guard lock(report_mutex_);
  return kind == CycleKind::kPause ? pauses_ : resumes_;
}

// A cycle that failed did so in the last phase of its report; before the first one, it was waiting for all to arrive.
void Coordinator::Add(CycleKind kind, const CycleReport& report, bool succeeded) {
  const std::lock_guard lock(report_mutex_);
  CycleTotals& totals = kind == CycleKind::kPause ? pauses_ : resumes_;
  PhaseKind last = kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive;
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

std::uint64_t Coordinator::CycleNumber(CycleKind kind) {
  const auto lock = ledger_.Lock();
  const State& state = ledger_.state();
  return kind == CycleKind::kPause && state.lifecycle == Lifecycle::kRunning ? state.cycles + 1 : state.cycles;
}

Result<std::unique_ptr<Round>> Coordinator::Arrive(CycleKind kind) {
  const std::uint64_t cycle = CycleNumber(kind);
  threads_recorded_ = false;
  speaks_ = true;
  culprits_.clear();
  {
    const auto lock = ledger_.Lock();
    if (kind == CycleKind::kPause) ledger_.RenewJournal();
    ledger_.Record(PhaseBegun{kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive});
  }
  auto round = peers_.Arrive(kind, cycle);
  if (round.status().code() == Code::kTimeout) RecordThreads();
  if (round.ok()) return round;
  for (const PeerIdentity& who : peers_.Culprits()) culprits_.push_back(AsMember(who));
  RecordNotBegun(kind, cycle, round.status());
  return round;
}

void Coordinator::RecordNotBegun(CycleKind kind, std::uint64_t cycle, const Status& why) {
  Add(kind, {}, false);
  const auto lock = ledger_.Lock();
  const Lifecycle now = ledger_.state().lifecycle;
  // After a failure that could not be undone there is still something left to do.
  const bool undone = now == Lifecycle::kRunning || now == Lifecycle::kPaused;
  ledger_.Record(CycleFailed{kind, cycle, undone, why.message(), why.code(), why.driver_result(), culprits_});
}

void Coordinator::RecordVote(PhaseKind phase, const Status& mine) {
  const auto lock = ledger_.Lock();
  ledger_.Record(VoteCast{phase, mine.ok(), mine.code(), mine.message()});
}

void Coordinator::NoteFailure(const Round& round, SessionId culprit) {
  const std::vector<PeerIdentity> members = round.Members();  // sorted
  const auto speaker = std::ranges::find_if(members, [&](const PeerIdentity& who) { return who.session != culprit; });
  speaks_ = speaker == members.end() || speaker->session == peers_.Self().session;
  const auto other = std::ranges::find(members, culprit, &PeerIdentity::session);
  if (other != members.end() && culprit != peers_.Self().session) culprits_ = {AsMember(*other)};
}

// Of the process as it was when a wait ended without what was waited for.
void Coordinator::RecordThreads() {
  constexpr std::size_t kThreadsMost = 64, kFramesMost = 32;
  if (std::exchange(threads_recorded_, true)) return;
  std::vector<ThreadSight> threads = SeeOwnThreads(kThreadsMost);
  std::vector<std::string> stack = OwnStack(kFramesMost);
  const auto lock = ledger_.Lock();
  for (ThreadSight& seen : threads) {  // the first is this one
    ledger_.Record(ThreadSeen{static_cast<std::uint32_t>(seen.thread), std::move(seen.name), std::move(seen.sight.state),
                              std::move(seen.sight.where), std::exchange(stack, {})});
  }
}

// The others undo what they have begun; this session has nothing to undo, and leaves the round once they know.
Status Coordinator::Refuse(CycleKind kind, std::unique_ptr<Round> round, const Status& why) {
  const bool pausing = kind == CycleKind::kPause;
  SessionId culprit;
  const PhaseKind phase = pausing ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive;
  RecordThreads();  // one of them is inside the call that has not returned
  RecordVote(phase, why);
  const Status told = round->Vote(phase, why, &culprit);
  NoteFailure(*round, culprit);
  const std::string message =
      (told.ok() ? why : told).message() +
      (pausing ? "; the session runs on as before" : "; the session stays paused, with its contents kept");
  const Status refused{why.code(), message, why.driver_result()};
  RecordNotBegun(kind, CycleNumber(kind), refused);
  return refused;
}

Status Coordinator::Run(CycleKind kind, Round& round) {
  const std::uint64_t start = MonotonicNs();
  CycleReport report;
  report.cycle = CycleNumber(kind);
  std::vector<SessionId> members;
  std::vector<CycleMember> processes;
  for (const PeerIdentity& member : round.Members()) {
    members.push_back(member.session);
    processes.push_back(AsMember(member));
  }
  report.members = members.size();
  {
    const auto lock = ledger_.Lock();
    ledger_.Record(CycleBegun{kind, report.cycle, std::move(members), std::move(processes)});
  }
  executor_.BeginCycle();
  if (const Status status = RunPhases(kind, round, report); !status.ok()) {
    Add(kind, report, false);
    return GiveUp(kind, round, report.cycle, status);
  }
  report.total_ns = MonotonicNs() - start;
  {
    const auto lock = ledger_.Lock();
    ledger_.Record(CycleDone{kind, report.cycle, report.total_ns});
  }
  if (kind == CycleKind::kResume) backup_.ForgetAll();
  Add(kind, report, true);
  const std::lock_guard lock(report_mutex_);
  (kind == CycleKind::kPause ? pause_ : resume_) = std::move(report);
  return {};
}

Status Coordinator::GiveUp(CycleKind kind, Round& round, std::uint64_t cycle, const Status& why) {
  const Status undone = Undo(kind, round);
  const char* after =
      kind == CycleKind::kPause ? "; the session runs on as before" : "; the session stays paused, with its contents kept";
  const std::string message =
      why.message() + (undone.ok() ? after
                                   : "; undoing it failed too: " + undone.message() +
                                         "; contents are kept: call ncclResume on all ranks once the cause is gone");
  const auto lock = ledger_.Lock();
  ledger_.Record(CycleFailed{kind, cycle, undone.ok(), message, why.code(), why.driver_result(), culprits_});
  const auto& allocations = ledger_.state().allocations;
  const bool saved = std::ranges::any_of(allocations, [](const auto& item) { return item.second.saved && !item.second.pool; });
  if (kind == CycleKind::kPause && !saved) backup_.ForgetAll();
  return {undone.ok() ? why.code() : Code::kBroken, message, why.driver_result()};
}

// A session that cannot pause refuses by its vote: if it did not arrive, the others would wait for it.
Status Coordinator::JournalIntact() {
  const auto lock = ledger_.Lock();
  return ledger_.CanPause();
}

// A peer may have imported memory after the members were found and before this session's part of the round had begun.
Status Coordinator::AllNeighboursAreMembers() const {
  const State& state = ledger_.state();
  const auto& members = state.cycle.members;
  const auto outside = [&](SessionId session) {
    const auto peer = state.peers.find(session);
    return peer != state.peers.end() && peer->second.connected && std::ranges::find(members, session) == members.end();
  };
  for (const auto& [id, a] : state.allocations) {
    std::optional<SessionId> who;
    if (a.remote && outside(a.remote->owner)) who = a.remote->owner;
    for (const auto& [importer, count] : a.importers) {
      if (outside(importer.by)) who = importer.by;
    }
    if (who) {
      return {Code::kRefused, "pause refused: " + ToText(*who) + " (pid " + std::to_string(state.peers.at(*who).pid) +
                                  ") came to share " + ToText(id) +
                                  " while the pause began; call ncclPause again on all ranks"};
    }
  }
  return {};
}

// An import that a network card holds stays mapped, and its owner would make the memory anew: then it is not shared any more.
Status Coordinator::ImportsCanLeave() const {
  for (const auto& [id, a] : ledger_.state().allocations) {
    if (a.own() || WhyKept(a) != KeepReason::kRegistered) continue;
    return {Code::kRefused,
            "pause refused: " + ToText(id) + " (" + FormatBytes(a.bytes) + ") is imported from " + ToText(a.remote->owner) +
                " and registered with a network card here, so that it would stay while its owner makes it anew; " +
                "deregister it before the pause, or register it in the process that owns it"};
  }
  return {};
}

// The driver unbinds by device, and whose memory that is cannot be known of memory that is not AMem's in a process with
// several.
Status Coordinator::MulticastsCanLeave() const {
  const State& state = ledger_.state();
  for (const auto& [id, multicast] : state.multicasts) {
    const auto object = state.allocations.find(id);
    if (object == state.allocations.end() || !object->second.rebuilt()) continue;
    for (const auto& [offset, bindings] : multicast.bindings) {
      for (const MulticastBinding& b : bindings) {
        if (b.device.value >= 0) continue;
        return {Code::kRefused, "pause refused: memory at " + Hex(b.address.value) + ", bound to multicast object " +
                                    std::to_string(id.value) +
                                    ", is not AMem's, and its device is not known; set AMEM_NVLS=keep"};
      }
    }
  }
  return {};
}

bool Coordinator::HasMulticasts() {
  const auto lock = ledger_.Lock();
  const auto& allocations = ledger_.state().allocations;
  return std::ranges::any_of(allocations, [](const auto& item) { return item.second.rebuilt(); });
}

Plan Coordinator::MakePlan(CycleKind kind) {
  const auto lock = ledger_.Lock();
  return kind == CycleKind::kPause ? PlanPause(ledger_.state()) : PlanResume(ledger_.state());
}

Coordinator::Decided Coordinator::Vote(Round& round, PhaseKind phase, const Status& mine) {
  Decided decided;
  RecordVote(phase, mine);
  decided.status = round.Vote(phase, mine, &decided.culprit);
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
  // What follows is planned with the loss known: an object that lost a member is not made anew.
  if (decided.status.code() == Code::kPeerLost && decided.culprit && HasMulticasts())
    static_cast<void>(peers_.AwaitLoss(decided.culprit));
  const auto lock = ledger_.Lock();
  ledger_.Record(PhaseDecided{phase, decided.status.ok(), decided.culprit, decided.status.message(), decided.status.code(),
                              decided.status.driver_result()});
  return decided;
}

Status Coordinator::RunPhases(CycleKind kind, Round& round, CycleReport& report) {
  const Plan plan = MakePlan(kind);
  const Lifecycle target = kind == CycleKind::kPause ? Lifecycle::kPaused : Lifecycle::kRunning;
  for (const PlannedPhase& phase : plan.phases) {
    const std::uint64_t begun = MonotonicNs();
    Status mine = executor_.Run(phase);
    if (mine.ok() && kind == CycleKind::kPause) mine = JournalIntact();
    if (mine.ok() && phase.phase == PhaseKind::kPauseArrive) {
      const auto lock = ledger_.Lock();
      mine = AllNeighboursAreMembers();
      if (mine.ok()) mine = ImportsCanLeave();
      if (mine.ok()) mine = MulticastsCanLeave();
    }
    const std::uint64_t voted = MonotonicNs();
    const std::chrono::nanoseconds worked(voted - begun);
    if (!mine.ok() && worked >= driver_.patience()) RecordThreads();
    const Decided all = Vote(round, phase.phase, mine);
    const std::uint64_t decided = MonotonicNs();
    report.phases.push_back({phase.phase, voted - begun, decided - voted, voted, decided});
    // The member that counted the votes has died after it told another one that the last vote passed. Then it passed for all.
    const bool passed_elsewhere = mine.ok() && &phase == &plan.phases.back() && all.settled == target;
    if (!passed_elsewhere && !all.status.ok()) {
      NoteFailure(round, all.culprit);
      return all.status;
    }
  }
  return {};
}

// Runs the opposite plan from wherever the failure left this session. Its phases are voted on like any other, because an import
// can only follow its owner's create. A failure of another member does not stop this one's own undo, but no member goes on as
// if nothing had happened while another cannot.
Status Coordinator::Undo(CycleKind failed, Round& round) {
  const CycleKind undo = failed == CycleKind::kPause ? CycleKind::kResume : CycleKind::kPause;
  Status mine, others;
  bool somebody_died = false;
  const Plan outline = MakePlan(undo);
  for (const PlannedPhase& planned : outline.phases) {
    const PhaseKind phase = planned.phase;
    if (phase == PhaseKind::kPauseArrive || phase == PhaseKind::kResumeArrive) continue;
    if (mine.ok() && phase == PhaseKind::kResumeVerify && somebody_died) mine = TeamsAreWhole();
    if (mine.ok()) mine = RunUndoPhase(undo, phase);
    Decided all = Vote(round, phase, mine);
    // Some members have heard why the cycle failed, others only lost the one that counted. This brings them to the same phase.
    while (all.gathered_again) all = Vote(round, phase, mine);
    somebody_died = somebody_died || all.status.code() == Code::kPeerLost;
    // A dead member has nothing to undo, a late one does it when it comes back, and a vote out of step is no failure.
    const bool cannot =
        !all.status.ok() && all.culprit && all.status.code() != Code::kPeerLost && all.status.code() != Code::kTimeout;
    if (cannot && others.ok()) others = all.status;
  }
  return mine.ok() ? others : mine;
}

// A session that died in the middle of an undo may not have added its device to a multicast object that was made anew
// meanwhile, and binding memory to such an object would hang. Another resume knows of the loss from its beginning.
Status Coordinator::TeamsAreWhole() const {
  if (!executor_.HasRenewedMulticasts()) return {};
  return {Code::kRefused,
          "a rank died before it was sure that its device was added to a multicast object; nothing was bound to it"};
}

// The phase is planned when it begins, and again when an owner is lost while it runs.
Status Coordinator::RunUndoPhase(CycleKind undo, PhaseKind phase) {
  PlannedPhase tried{phase, {}};
  while (true) {
    PlannedPhase now{phase, {}};
    Plan plan = MakePlan(undo);
    for (PlannedPhase& planned : plan.phases) {
      if (planned.phase == phase) now = std::move(planned);
    }
    Status status = executor_.Run(now);
    if (status.code() != Code::kPeerLost || now == tried) return status;
    tried = std::move(now);
  }
}

}  // namespace amem
