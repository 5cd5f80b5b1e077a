// The coordinator: the pauses and resumes of one scope, which is NCCL's memory or a tag's. Each goes phase by phase, with a
// vote of all members after each phase. Where no other session shares memory of a tag, this session is the only member: it
// asks nobody, and its journal has no votes.
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

#include "replay/cycle/backup.h"
#include "replay/cycle/call_gate.h"
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

// How one pause or resume is made.
struct Manner {
  // Of a pause. Null: waits until the devices of the scope are idle, and looks for what is not zero. Else contents are copied
  // whole, without kernels, after that moment of a stream, and no other stream is waited for.
  const StreamMoment* after = nullptr;
  bool patient = false;  // a resume waits as long as the other members, which live, stay paused
  // Of a resume whose memory nobody shares: all of it is back, and all copies to it are queued (Lead).
  std::function<void()> queued;
  std::function<void()> kept_out;  // the scope's calls are kept out from here
  std::function<void()> ended;     // and until this has returned
};

// What the coordinators of a session have in common. All must outlive them.
struct CycleContext {
  Ledger& ledger;
  Driver& driver;
  Peers& peers;
  PinnedSupply& pinned;
  Deadlines deadlines{};
  bool compare = false;  // at the end of each resume, all contents with what was saved of them
};

// Cycle and what it consists of are for one thread at a time, everything else for any.
class Coordinator {
 public:
  // Of NCCL's memory, which the driver itself copies. `gate`, which must outlive it: of the calls that touch the scope's
  // memory.
  Coordinator(const CycleContext& context, CallGate& gate);
  // Of the tag of a pool, whose copies have a lane of their own.
  static Result<std::unique_ptr<Coordinator>> OfTag(const CycleContext& context, CallGate& gate, PoolId pool, std::string tag);

  // A whole pause or resume: nothing where the scope stands so already, else Arrive, the gate, and Run. It can be called again
  // after a failure: what was done has been undone then as far as the driver allowed, no contents are lost, and the message
  // names the tag, or the rank, and the reason.
  Status Cycle(CycleKind kind, const Manner& manner = {});

  // Waits for all members of the set. NCCL's own calls go on meanwhile: a peer may still need something of this process.
  Result<std::unique_ptr<Round>> Arrive(CycleKind kind, Deadline until, bool patient = false);
  // In place of Run, when this session cannot take part: all members are told why, and the cycle fails before it has begun.
  Status Refuse(CycleKind kind, std::unique_ptr<Round> round, const Status& why);
  // With the scope's calls kept out.
  Status Run(CycleKind kind, Round& round, const Manner& manner = {});
  // Before memory of the scope is given back: waits for copies that a pause or resume which failed has left under way. Any
  // thread.
  Status AwaitCopies();
  // Lets a stream wait for the copies that are queued now.
  Status Lead(void* stream);
  // What the stream holds now. On the scope's first device, if the thread has no current context. Of a scope that holds nothing
  // it stands for nothing.
  Result<std::unique_ptr<StreamMoment>> MomentOf(void* stream);
  [[nodiscard]] CycleReport Last(CycleKind kind) const;
  [[nodiscard]] CycleTotals Totals(CycleKind kind) const;
  // Of all members of the last cycle that failed, the one with the lowest id that is not the culprit; true also where the cycle
  // had not begun, because then the members are not known to each other.
  [[nodiscard]] bool speaks() const { return speaks_; }
  // So much memory of the scope was made; with the ledger's lock. Host memory is pinned ahead for what a pause would save now,
  // in steps of a sixteenth.
  void Made(Bytes bytes);
  [[nodiscard]] BackupStatistics Contents() const { return backup_.Statistics(); }

 private:
  Coordinator(const CycleContext& context, CallGate& gate, PoolId pool, std::string tag, std::unique_ptr<Copier> lane,
              const BackupOptions& options);
  Status CloseGate(Deadline until);
  void WantHostMemory() REQUIRES(ledger_);
  [[nodiscard]] bool Alone(const Round& round) const { return pool_ && round.Members().size() == 1; }
  [[nodiscard]] bool IsShared() const REQUIRES(ledger_);  // with another session; with the ledger's lock
  Status RunPhase(const PlannedPhase& planned, CycleKind kind, const Manner& manner);
  Status CanBegin();  // what is known once all have arrived
  // For messages: "pause of tag weights: " or nothing, what a failure leaves, and "call ncclPause again on all ranks".
  [[nodiscard]] std::string Doing(CycleKind kind) const;
  [[nodiscard]] std::string After(CycleKind kind, const Status& undone) const;
  [[nodiscard]] std::string Again(CycleKind kind) const { return "call " + NameOf(kind, tag_) + " again on all ranks"; }
  [[nodiscard]] std::vector<DeviceOrdinal> Devices();  // of own memory of the scope, ascending
  Status JournalIntact();
  // What only this session can see, and no other member would notice: with the ledger's lock held, both.
  // Its failure is of that session, which shares memory and is no member.
  [[nodiscard]] Status AllNeighboursAreMembers(SessionId* outsider) const REQUIRES(ledger_);
  [[nodiscard]] Status ImportsCanLeave() const REQUIRES(ledger_);
  [[nodiscard]] Status MulticastsCanLeave() const REQUIRES(ledger_);
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
  void KeepIfAnyDoes(const std::vector<PeerIdentity>& members);
  void RecordVote(PhaseKind phase, const Status& mine);
  // Which member speaks for all, and because of whom the cycle fails.
  void NoteFailure(const Round& round, SessionId culprit);
  void RecordThreads();  // once a cycle, at its first deadline
  Status RunUndoPhase(CycleKind undo, PhaseKind phase);
  [[nodiscard]] Status TeamsAreWhole() const;
  void RecordNotBegun(CycleKind kind, std::uint64_t cycle, const Status& why);
  Status GiveUp(CycleKind kind, Round& round, std::uint64_t cycle, const Status& why);
  Status RunPhases(CycleKind kind, Round& round, const Manner& manner, CycleReport& report);
  Status Undo(CycleKind failed, Round& round);
  [[nodiscard]] std::uint64_t CycleNumber(CycleKind kind);
  void Add(CycleKind kind, const CycleReport& report, bool succeeded);

  Ledger& ledger_;
  Peers& peers_;
  CallGate& gate_;
  const Deadlines deadlines_;
  const bool compare_;
  const PoolId pool_;                   // zero: NCCL's memory
  const std::string tag_;               // empty: the same
  const std::unique_ptr<Copier> lane_;  // null: the driver copies
  Copier& copier_;
  PinnedSupply& pinned_;
  Backup backup_;
  Executor executor_;
  Bytes made_ GUARDED_BY(ledger_) = 0;  // since the scope was measured
  Bytes measured_ GUARDED_BY(ledger_) = 0;
  mutable std::mutex report_mutex_;
  CycleReport pause_, resume_;
  CycleTotals pauses_, resumes_;
  bool threads_recorded_ = false;
  std::uint64_t arriving_ = 0;  // the number of the cycle for which this session has come
  std::atomic<bool> speaks_ = true;
  std::atomic<std::uint64_t> copying_since_ns_ = 0;  // a cycle failed then, and its copies may still be under way
  bool all_keep_ = false;                            // a member of this cycle keeps everything
  bool alone_ = false;                               // Alone, of the round that is under way
  std::vector<CycleMember> culprits_;                // of the cycle that fails, other than this session
};

}  // namespace amem
