// The coordinator makes the pauses and resumes of one scope, phase by phase, with a vote of all members after each. If no other
// session shares memory of a tag, this session is the only member: it asks nobody, and its journal has no votes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "journal/base/clock.h"
#include "replay/cycle/backup.h"
#include "replay/cycle/call_gate.h"
#include "replay/cycle/executor.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/assembly.h"
#include "replay/peers/peers.h"
#include "statemachine/plan.h"

namespace amem {

struct PhaseTime {
  PhaseKind phase{};
  std::uint64_t work_ns = 0;
  std::uint64_t wait_ns = 0;
  // CLOCK_MONOTONIC, which all processes of a host share. Beside waiting for the slowest member, a vote costs the latest
  // decided_at of all sessions less the latest voted_at.
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
    std::uint64_t work_ns = 0, wait_ns = 0;  // including cycles that failed later
    std::uint64_t failures = 0;              // whoever caused them
  };
  std::uint64_t done = 0, total_ns = 0;  // successful ones
  std::map<PhaseKind, Phase> phases;
};

// How one pause or resume is made.
struct Manner {
  // Of a pause. Null: it waits until the scope's devices are idle. Otherwise it waits for that moment of a stream only, and
  // hashes and copies contents beside what the program runs (Backup::Looking).
  const StreamMoment* after = nullptr;
  bool keeps = false;  // the pause saves contents, whatever the pool's policy
  // The pause was called when the GPUs of all hosts of the job were idle, so that no kernel anywhere waits for what a network
  // card here would send. Else what cards hold stays.
  bool hosts_idle = false;
  bool patient = false;  // the resume waits as long as the other members live and stay paused
  // Called once all memory is back and all copies to it are queued (Lead); only for a resume of memory that nobody shares.
  std::function<void()> queued;
  // Asked, after `queued`, when such a resume fails: whether a stream already goes on behind its copies (Lead). If not, none
  // may from now on, and the resume is undone.
  std::function<bool()> in_use;
  std::function<void()> kept_out;  // called when the scope's calls are kept out
  std::function<void()> ended;     // called before they are let in again
};

// What the coordinators of a session have in common. All of it must outlive them.
struct CycleContext {
  Ledger& ledger;
  Driver& driver;
  Peers& peers;
  PinnedSupply& pinned;
  Deadlines deadlines{};
  Network* network = nullptr;  // Executor's, of NCCL's memory; null: what network cards hold stays
  bool compare = false;        // compare contents with their copies: all at the end of a resume, what is unchanged in a pause
};

// One thread at a time calls Cycle; any thread may call the rest.
class Coordinator {
 public:
  // For NCCL's memory, which the driver itself copies. `gate` holds the calls that touch the scope's memory, and must outlive
  // the coordinator.
  Coordinator(const CycleContext& context, CallGate& gate);
  // For a tag, whose copies have a lane of their own.
  static Result<std::unique_ptr<Coordinator>> OfTag(const CycleContext& context, CallGate& gate, PoolId pool, std::string tag);

  // A whole pause or resume. Does nothing if the scope is in that state already. After a failure it has
  // undone what it could, no contents are lost, the message names the tag or rank and the reason, and the caller can try again.
  // A resume that a stream already follows is not undone: what is left of it waits for the next call, which ends it first.
  Status Cycle(CycleKind kind, const Manner& manner = {});

  // Call it before memory of the scope is given back: waits for copies that a failed cycle left under way. Any thread.
  Status AwaitCopies();
  // The stream waits for the copies that are queued now.
  Status Lead(void* stream);
  // What the stream holds now; on the scope's first device if the thread has no current context. Empty if the scope holds
  // nothing.
  Result<std::unique_ptr<StreamMoment>> MomentOf(void* stream);
  [[nodiscard]] CycleReport Last(CycleKind kind) const;
  [[nodiscard]] CycleTotals Totals(CycleKind kind) const;
  // The program made so much memory in the scope. Pins host memory ahead for the next pause, in steps of a sixteenth.
  void Made(Bytes bytes);
  [[nodiscard]] BackupStatistics Contents() const { return backup_.Statistics(); }
  void FreeUnfinished() { backup_.FreeUnfinished(Now()); }

 private:
  class Call;  // a pause or resume, with all that belongs to one alone (board_call.cpp)

  Coordinator(const CycleContext& context, CallGate& gate, PoolId pool, std::string tag, std::unique_ptr<Copier> lane);
  Status CloseGate(Deadline until);
  // The ledger until this session's part of the cycle ends, because a driver call of another thread may hold it and hang; and
  // why not.
  [[nodiscard]] bool TryLedger() TRY_ACQUIRE(true, ledger_);
  [[nodiscard]] Status NoLedger() const;
  void WantHostMemory() REQUIRES(ledger_);
  [[nodiscard]] bool IsShared() const REQUIRES(ledger_);
  Status RunPhase(const PlannedPhase& planned, CycleKind kind, const Manner& manner,
                  const std::function<bool()>& is_overtaken = {});
  Status CanBegin();  // what is known only when all have arrived
  // A failure as the caller is told: of which tag, and what it leaves; and "call ncclPause again on all ranks".
  [[nodiscard]] Status Told(CycleKind kind, const Status& why, const Status& undone = {}) const;
  [[nodiscard]] std::string Again(CycleKind kind) const { return "call " + NameOf(kind, tag_) + " again on all ranks"; }
  // Of the scope's own memory, ascending. kRefused: a driver call holds the ledger until then.
  [[nodiscard]] Result<std::vector<DeviceOrdinal>> Devices(Deadline until);
  void NoteCopies();
  // What only this session can see. `outsider`: the session that shares memory and is no member.
  [[nodiscard]] Status AllNeighboursAreMembers(SessionId* outsider) const REQUIRES(ledger_);
  [[nodiscard]] Status ImportsCanLeave() const REQUIRES(ledger_);
  [[nodiscard]] Status MulticastsCanLeave() const REQUIRES(ledger_);
  [[nodiscard]] Result<Plan> MakePlan(CycleKind kind);
  Status KeepIfAnyDoes(const std::vector<PeerIdentity>& members);
  void RecordVote(PhaseKind phase, const Status& mine);
  void RecordThreads();  // once a cycle, at its first deadline
  Status RunUndoPhase(CycleKind undo, PhaseKind phase, const std::function<bool()>& is_overtaken);
  void RecordNotBegun(CycleKind kind, std::uint64_t cycle, const Status& why);
  Status GoOn(const PlannedPhase& phase, const Manner& manner, Status why);
  // Records that the cycle is done. `start_ns`: when it began.
  void Conclude(CycleKind kind, const Manner& manner, CycleReport report, std::uint64_t start_ns);
  [[nodiscard]] Result<std::unique_ptr<Assembly>> Assemble(CycleKind kind);
  static CycleMember AsMember(const PeerIdentity& who) { return {who.session, who.rank, who.pid, who.host}; }
  [[nodiscard]] std::uint64_t CycleNumber(CycleKind kind) const REQUIRES(ledger_);
  void Add(CycleKind kind, const CycleReport& report, bool succeeded);

  Ledger& ledger_;
  Peers& peers_;
  CallGate& gate_;
  const Deadlines deadlines_;
  const bool compare_;
  const PoolId pool_;                   // zero: NCCL's memory
  const std::string tag_;               // empty: NCCL's memory
  const std::unique_ptr<Copier> lane_;  // null: the driver copies
  Copier& copier_;
  PinnedSupply& pinned_;
  Backup backup_;
  Executor executor_;
  Bytes made_ GUARDED_BY(ledger_) = 0;  // since measured_ was set
  Bytes measured_ GUARDED_BY(ledger_) = 0;
  mutable std::mutex report_mutex_;
  CycleReport pause_, resume_;
  CycleTotals pauses_, resumes_;
  bool threads_recorded_ = false;
  std::uint64_t paused_at_ns_ = MonotonicNs();  // the last time
  std::mutex copying_mutex_;
  std::map<DeviceOrdinal, std::uint64_t> copying_since_ns_;  // when a cycle failed whose copies may still be under way there
  bool all_keep_ = false;                                    // a member of this cycle keeps all its memory
  bool alone_ = false;                                       // the cycle has no other member
  bool in_use_ = false;                                      // a stream follows the copies of a resume that has not ended
  std::vector<CycleMember> culprits_;                        // other sessions that caused the failure
  std::vector<PeerIdentity> members_;                        // of the cycle when it began, sorted
  std::shared_ptr<board::Board> own_board_;                  // of a tag while nobody shares it
};

}  // namespace amem
