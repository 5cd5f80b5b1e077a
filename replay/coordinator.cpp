#include "replay/coordinator.h"

#include <chrono>

namespace amem {
namespace {

std::uint64_t Now() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

}  // namespace

// Pinning begins when NCCL has not allocated for a moment, so that it does not hold up a start-up full of driver calls.
constexpr std::chrono::milliseconds kQuiet{10};

Coordinator::Coordinator(Ledger& ledger, Driver& driver, Peers& peers)
    : ledger_(ledger),
      driver_(driver),
      peers_(peers),
      backup_(driver, {.quiet = kQuiet}),
      executor_(ledger, driver, peers, backup_) {}

CycleReport Coordinator::Last(CycleKind kind) const {
  const std::lock_guard lock(report_mutex_);
  return kind == CycleKind::kPause ? pause_ : resume_;
}

std::uint64_t Coordinator::CycleNumber(CycleKind kind) {
  const auto lock = ledger_.Lock();
  const State& state = ledger_.state();
  return kind == CycleKind::kPause && state.lifecycle == Lifecycle::kRunning ? state.cycles + 1 : state.cycles;
}

Result<std::unique_ptr<Round>> Coordinator::Arrive(CycleKind kind) {
  if (kind == CycleKind::kPause) {
    const auto lock = ledger_.Lock();
    if (const std::string& broken = ledger_.state().broken; !broken.empty()) {
      return Status{Code::kBroken, "pause refused: this session is broken: " + broken +
                                       "; the job runs on, and its memory cannot be given back until it is restarted"};
    }
  }
  const std::uint64_t cycle = CycleNumber(kind);
  {
    const auto lock = ledger_.Lock();
    ledger_.Record(PhaseBegun{kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive});
  }
  auto round = peers_.Arrive(kind, cycle);
  if (!round.ok()) {
    const auto lock = ledger_.Lock();
    const Lifecycle now = ledger_.state().lifecycle;
    // After a failure that could not be undone there is still something left to do.
    const bool undone = now == Lifecycle::kRunning || now == Lifecycle::kPaused;
    ledger_.Record(CycleFailed{kind, cycle, undone, round.status().message()});
  }
  return round;
}

Status Coordinator::Run(CycleKind kind, Round& round) {
  const std::uint64_t start = Now();
  CycleReport report;
  report.cycle = CycleNumber(kind);
  std::vector<SessionId> members;
  for (const PeerIdentity& member : round.Members()) members.push_back(member.session);
  report.members = members.size();
  {
    const auto lock = ledger_.Lock();
    ledger_.Record(CycleBegun{kind, report.cycle, std::move(members)});
  }
  if (const Status status = RunPhases(kind, round, report); !status.ok()) return GiveUp(kind, round, report.cycle, status);
  report.total_ns = Now() - start;
  {
    const auto lock = ledger_.Lock();
    ledger_.Record(CycleDone{kind, report.cycle, report.total_ns});
    ledger_.SnapshotIfDue();
  }
  if (kind == CycleKind::kResume) backup_.ForgetAll();
  const std::lock_guard lock(report_mutex_);
  (kind == CycleKind::kPause ? pause_ : resume_) = std::move(report);
  return {};
}

Status Coordinator::GiveUp(CycleKind kind, Round& round, std::uint64_t cycle, const Status& why) {
  const Status undone = Undo(kind, round);
  const char* after =
      kind == CycleKind::kPause ? "; the session runs on as before" : "; the session stays paused, with its contents kept";
  const std::string message = why.message() + (undone.ok() ? after : "; undoing it failed too: " + undone.message());
  const auto lock = ledger_.Lock();
  ledger_.Record(CycleFailed{kind, cycle, undone.ok(), message});
  if (kind == CycleKind::kPause && undone.ok()) backup_.ForgetAll();
  return {undone.ok() ? why.code() : Code::kBroken, message, why.driver_result()};
}

Status Coordinator::JournalIntact() {
  const auto lock = ledger_.Lock();
  const std::string& broken = ledger_.state().broken;
  return broken.empty() ? Status{} : Status{Code::kBroken, broken};
}

Status Coordinator::RunPhases(CycleKind kind, Round& round, CycleReport& report) {
  Plan plan;
  {
    const auto lock = ledger_.Lock();
    plan = kind == CycleKind::kPause ? PlanPause(ledger_.state()) : PlanResume(ledger_.state());
  }
  for (const PlannedPhase& phase : plan.phases) {
    const std::uint64_t begun = Now();
    Status mine = executor_.Run(phase);
    if (mine.ok() && kind == CycleKind::kPause) mine = JournalIntact();
    const std::uint64_t voted = Now();
    SessionId culprit;
    const Status all = round.Vote(phase.phase, mine, &culprit);
    report.phases.push_back({phase.phase, voted - begun, Now() - voted});
    {
      const auto lock = ledger_.Lock();
      ledger_.Record(PhaseDecided{phase.phase, all.ok(), culprit, all.message()});
    }
    AMEM_TRY(all);
  }
  return {};
}

// The opposite plan from wherever the failure left this session. Its phases are voted on like any other, because an import can
// only follow its owner's create; a failure of another member does not stop this one's own undo.
Status Coordinator::Undo(CycleKind failed, Round& round) {
  Plan plan;
  {
    const auto lock = ledger_.Lock();
    plan = failed == CycleKind::kPause ? PlanResume(ledger_.state()) : PlanPause(ledger_.state());
  }
  Status mine;
  for (const PlannedPhase& phase : plan.phases) {
    if (phase.phase == PhaseKind::kPauseArrive || phase.phase == PhaseKind::kResumeArrive) continue;
    if (mine.ok()) mine = executor_.Run(phase);
    SessionId culprit;
    const Status all = round.Vote(phase.phase, mine, &culprit);
    const auto lock = ledger_.Lock();
    ledger_.Record(PhaseDecided{phase.phase, all.ok(), culprit, all.message()});
  }
  return mine;
}

}  // namespace amem
