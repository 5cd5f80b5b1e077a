// The coordinator: a pause or resume of this session together with its peers, phase by phase, with a vote after each.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "replay/cycle/backup.h"
#include "replay/cycle/executor.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "statemachine/plan.h"

namespace amem {

struct PhaseTime {
  PhaseKind phase{};
  std::uint64_t work_ns = 0;  // this session's own steps
  std::uint64_t wait_ns = 0;  // until everybody had voted
  // When this session voted, and when it knew the decision, by CLOCK_MONOTONIC, which all processes of a host share. A vote
  // costs, beside waiting for the slowest, the latest decided_at of all sessions less the latest voted_at of all.
  std::uint64_t voted_at_ns = 0, decided_at_ns = 0;
};
struct CycleReport {  // of the last pause or resume
  std::uint64_t cycle = 0;
  std::uint64_t total_ns = 0;
  std::vector<PhaseTime> phases;
  std::size_t members = 0;
};

struct CycleTotals {  // of all pauses, or all resumes, of this session
  struct Phase {
    std::uint64_t work_ns = 0, wait_ns = 0;  // also of cycles that failed later
    std::uint64_t failures = 0;              // cycles that failed in this phase, whoever was the reason
  };
  std::uint64_t done = 0, total_ns = 0;  // those that succeeded
  std::map<PhaseKind, Phase> phases;
};

class Coordinator {
 public:
  // All must outlive the coordinator. `pinned_limit`: of host memory that is pinned ahead.
  Coordinator(Ledger& ledger, Driver& driver, Peers& peers, Bytes pinned_limit);

  // Waits for all members of the set. NCCL's own calls go on meanwhile: a peer may still need something of this process.
  Result<std::unique_ptr<Round>> Arrive(CycleKind kind);
  // In place of Run, when this session cannot take part: all members are told why, and the cycle fails before it has begun.
  Status Refuse(CycleKind kind, std::unique_ptr<Round> round, const Status& why);
  // One at a time, with NCCL's own calls kept out. When it fails, what was done has been undone as far as the driver allowed,
  // and the message names the rank and the reason.
  Status Run(CycleKind kind, Round& round);
  [[nodiscard]] CycleReport Last(CycleKind kind) const;
  [[nodiscard]] CycleTotals Totals(CycleKind kind) const;
  // Of all members of the last cycle that failed, the one with the lowest id that is not the culprit; true also where the cycle
  // had not begun, because then the members are not known to each other.
  [[nodiscard]] bool speaks() const { return speaks_; }
  // Pins host memory for contents of that size, in the background.
  // `dense`: of memory that a program fills, and that is hardly zero anywhere; besides `contents`.
  void Prepare(Bytes contents, Bytes dense) { backup_.Prepare(dense + backup_.Expected(contents)); }
  void TrimPinned(Bytes keep) { backup_.Trim(keep); }  // not during Run
  void Busy() { backup_.Busy(); }                      // see Backup
  [[nodiscard]] BackupStatistics Contents() const { return backup_.Statistics(); }

 private:
  Status JournalIntact();
  // What only this session can see, and no other member would notice: with the ledger's lock held, both.
  [[nodiscard]] Status AllNeighboursAreMembers() const;
  [[nodiscard]] Status ImportsCanLeave() const;
  [[nodiscard]] Status MulticastsCanLeave() const;
  [[nodiscard]] bool HasMulticasts();  // that a pause releases
  [[nodiscard]] Plan MakePlan(CycleKind kind);
  // A phase's vote. When the member that counts the votes is lost, the others gather again. `settled` is then how one of them
  // ended its cycle, because it had heard a decision that did not reach this session.
  struct Decided {
    Status status;
    SessionId culprit;
    std::optional<Lifecycle> settled;
    bool gathered_again = false;
  };
  Decided Vote(Round& round, PhaseKind phase, const Status& mine);
  void RecordVote(PhaseKind phase, const Status& mine);
  // Which member speaks for all, and because of whom the cycle fails.
  void NoteFailure(const Round& round, SessionId culprit);
  void RecordThreads();  // once a cycle, at its first deadline
  Status RunUndoPhase(CycleKind undo, PhaseKind phase);
  [[nodiscard]] Status TeamsAreWhole() const;
  void RecordNotBegun(CycleKind kind, std::uint64_t cycle, const Status& why);
  Status GiveUp(CycleKind kind, Round& round, std::uint64_t cycle, const Status& why);
  Status RunPhases(CycleKind kind, Round& round, CycleReport& report);
  Status Undo(CycleKind failed, Round& round);
  [[nodiscard]] std::uint64_t CycleNumber(CycleKind kind);
  void Add(CycleKind kind, const CycleReport& report, bool succeeded);

  Ledger& ledger_;
  Driver& driver_;
  Peers& peers_;
  Backup backup_;
  Executor executor_;
  mutable std::mutex report_mutex_;
  CycleReport pause_, resume_;
  CycleTotals pauses_, resumes_;
  bool threads_recorded_ = false;
  std::atomic<bool> speaks_ = true;
  std::vector<CycleMember> culprits_;  // of the cycle that fails, other than this session
};

}  // namespace amem
