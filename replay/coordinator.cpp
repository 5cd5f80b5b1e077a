#include "replay/coordinator.h"

#include <chrono>

namespace amem {
namespace {

std::uint64_t Now() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

}  // namespace

Coordinator::Coordinator(Ledger& ledger, Driver& driver, Peers& peers)
    : ledger_(ledger), driver_(driver), peers_(peers), backup_(driver), executor_(ledger, driver, peers, backup_) {}

CycleReport Coordinator::Last(CycleKind kind) const {
  const std::lock_guard lock(report_mutex_);
  return kind == CycleKind::kPause ? pause_ : resume_;
}

Status Coordinator::Run(CycleKind kind) {
  const std::uint64_t start = Now();
  std::uint64_t cycle = 0;
  {
    const auto lock = ledger_.Lock();
    const State& state = ledger_.state();
    if (kind == CycleKind::kPause && !state.broken.empty()) {
      return {Code::kBroken, "pause refused: this session is broken: " + state.broken +
                                 "; the job runs on, and its memory cannot be given back until it is restarted"};
    }
    cycle = kind == CycleKind::kPause && state.lifecycle == Lifecycle::kRunning ? state.cycles + 1 : state.cycles;
  }
  auto round = peers_.Arrive(kind, cycle);
  if (!round.ok()) return round.status().Within(ToText(kind));

  CycleReport report;
  report.cycle = cycle;
  std::vector<SessionId> members;
  for (const PeerIdentity& member : (*round)->Members()) members.push_back(member.session);
  report.members = members.size();
  {
    const auto lock = ledger_.Lock();
    ledger_.Record(CycleBegun{kind, cycle, std::move(members)});
  }
  Status status = RunPhases(kind, **round, report);
  if (!status.ok()) {
    Status undone = Undo(kind);
    if (undone.ok()) {
      status = Status{status.code(),
                      std::string(ToText(kind)) + ": " + status.message() +
                          (kind == CycleKind::kPause ? "; the session runs on as before"
                                                     : "; the session stays paused, with its contents kept"),
                      status.driver_result()};
    } else {
      status = Status{Code::kBroken,
                      std::string(ToText(kind)) + ": " + status.message() + "; undoing it failed too: " + undone.message(),
                      status.driver_result()};
    }
    const auto lock = ledger_.Lock();
    ledger_.Record(CycleFailed{kind, cycle, undone.ok(), status.message()});
    if (kind == CycleKind::kPause && undone.ok()) backup_.ForgetAll();
    return status;
  }
  report.total_ns = Now() - start;
  {
    const auto lock = ledger_.Lock();
    ledger_.Record(CycleDone{kind, cycle, report.total_ns});
    ledger_.SnapshotIfDue();
  }
  if (kind == CycleKind::kResume) backup_.ForgetAll();
  const std::lock_guard lock(report_mutex_);
  (kind == CycleKind::kPause ? pause_ : resume_) = std::move(report);
  return {};
}

Status Coordinator::RunPhases(CycleKind kind, Round& round, CycleReport& report) {
  Plan plan;
  {
    const auto lock = ledger_.Lock();
    plan = kind == CycleKind::kPause ? PlanPause(ledger_.state()) : PlanResume(ledger_.state());
  }
  for (const PlannedPhase& phase : plan.phases) {
    const std::uint64_t begun = Now();
    const Status mine = executor_.Run(phase);
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

// The opposite plan from wherever the failure left this session. Phases of the undo are not voted on: releasing and creating
// own memory needs nobody, and imports wait for their owners in the exchange itself.
Status Coordinator::Undo(CycleKind failed) {
  Plan plan;
  {
    const auto lock = ledger_.Lock();
    plan = failed == CycleKind::kPause ? PlanResume(ledger_.state()) : PlanPause(ledger_.state());
  }
  for (const PlannedPhase& phase : plan.phases) {
    if (phase.phase == PhaseKind::kPauseArrive || phase.phase == PhaseKind::kResumeArrive) continue;
    AMEM_TRY(executor_.Run(phase));
  }
  return {};
}

}  // namespace amem
