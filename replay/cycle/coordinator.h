// The coordinator makes the pauses and resumes of one scope, phase by phase, with a vote of all members after each. If no other
// session shares memory of a tag, this session is the only member: it asks nobody, and its journal has no votes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "replay/cycle/backup.h"
#include "replay/cycle/between_calls.h"
#include "replay/cycle/call_gate.h"
#include "replay/cycle/cycle_reports.h"
#include "replay/cycle/executor.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/assembly.h"
#include "replay/peers/peers.h"

namespace amem {

// How one pause or resume is made.
struct CycleOptions {
  // Of a pause. Null: it waits until the scope's devices are idle. Otherwise it waits for that moment of a stream only, and
  // hashes and copies contents beside what the program runs (ScanMode::kBeside).
  const StreamMoment* after = nullptr;
  bool keeps = false;  // the pause saves contents, whatever the pool's policy
  // The caller asserts that the GPUs of all hosts of the job are idle, so that no kernel anywhere waits for what a network card
  // here would send. Otherwise what cards hold stays.
  bool hosts_idle = false;
  bool patient = false;  // the resume waits as long as the other members live and stay paused
};

// What the caller of a pause or resume does in the midst of it. The calling thread calls each, without the ledger and with the
// scope's gate closed. Each may take the ledger's lock, or one that comes before it in the lock order and that the caller of
// Cycle does not hold; none may call the coordinator.
struct CycleHooks {
  std::function<void()> gate_closed{};  // the scope's calls are kept out from now on
  // All memory is back and all copies to it are queued (MakeStreamWaitForCopies); only in a resume of memory that nobody
  // shares.
  std::function<void()> copies_queued{};
  // After `copies_queued`, when such a resume fails: whether a stream already waits for its copies. If not, none may from now
  // on, and the resume is undone.
  std::function<bool()> is_followed{};
  std::function<void()> gate_opens{};  // directly before the scope's calls are let in again
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

// What lasts between the pauses and resumes of a scope; what belongs to one of them alone is in its Call. One thread at a time
// calls Cycle; any thread may call the rest.
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
  Status Cycle(CycleKind kind, const CycleOptions& options = {}, const CycleHooks& hooks = {});

  // Call it before memory of the scope is given back: waits for copies that a failed cycle left under way. Any thread.
  Status AwaitCopies() { return unended_.Await(copier(), In(context_.deadlines.call())); }
  // Of the copies that are queued now.
  Status MakeStreamWaitForCopies(void* stream);
  // What the stream holds now; on the scope's first device if the thread has no current context. Empty if the scope holds
  // nothing.
  Result<std::unique_ptr<StreamMoment>> MomentOf(void* stream);
  [[nodiscard]] CycleReport Last(CycleKind kind) const { return reports_.Last(kind); }
  [[nodiscard]] CycleTotals Totals(CycleKind kind) const { return reports_.Totals(kind); }
  // With the ledger: the program made so much memory in the scope. Pins host memory ahead for the next pause.
  void Made(Bytes bytes) { host_memory_.Made(bytes); }
  [[nodiscard]] BackupStatistics Contents() const { return backup_.Statistics(); }
  void FreeUnfinished() { backup_.FreeUnfinished(Now()); }

 private:
  class Call;     // a pause or resume on the board of its set (board_call.cpp)
  class OwnPart;  // what such a call does with this session's memory (own_part.h)

  Coordinator(const CycleContext& context, CallGate& gate, PoolId pool, std::string tag, std::unique_ptr<Copier> lane);
  [[nodiscard]] Copier& copier() { return lane_ != nullptr ? *lane_ : static_cast<Copier&>(context_.driver); }
  [[nodiscard]] bool IsShared() const REQUIRES(context_.ledger);
  // Of the scope's own memory, ascending. kRefused: a driver call holds the ledger until then.
  [[nodiscard]] Result<std::vector<DeviceOrdinal>> Devices(Deadline until);
  // A failure as the caller reads it: of which tag, and what it leaves.
  [[nodiscard]] Status CallerMessage(CycleKind kind, const Status& why, const Status& undone = {}) const;
  [[nodiscard]] Result<std::unique_ptr<Assembly>> Assemble(CycleKind kind);

  const CycleContext context_;
  CallGate& gate_;
  const PoolId pool_;                   // zero: NCCL's memory
  const std::string tag_;               // empty: NCCL's memory
  const std::unique_ptr<Copier> lane_;  // null: the driver copies
  Backup backup_;
  Executor executor_;
  HostMemoryAhead host_memory_;
  CycleReports reports_;
  UnendedCopies unended_;
  bool followed_ = false;                    // a stream follows the copies of a resume that has not ended
  std::shared_ptr<board::Board> own_board_;  // of a tag while nobody shares it
};

}  // namespace amem
