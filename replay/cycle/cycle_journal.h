// Journals one pause or resume of this session. A driver call of another thread may hold the ledger and hang, so each wait for
// the ledger is bounded; for records that the call can do without, to a moment.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "replay/cycle/executor.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "statemachine/event_cycle.h"

namespace amem {

struct CycleOptions;
struct CycleHooks;

// One pause or resume: what was asked for, and who takes part.
struct CycleCall {
  const CycleKind kind;
  const CycleOptions& options;
  const CycleHooks& hooks;
  std::uint64_t cycle = 0;
  std::vector<PeerIdentity> members{};  // when all had come, sorted
  bool alone = false;                   // a tag that nobody shares: there are no votes
};

constexpr std::chrono::milliseconds kToRecord{100};  // to wait for the ledger; after that the fact is not recorded

// A driver call of another thread holds the ledger.
Status LedgerIsHeld(const Ledger& ledger);
// A check (AMEM_CHECK) that has failed breaks the session as well, so that its next pause is refused with that text.
Status Latched(Ledger& ledger, Status check);
// Of the pause or resume that begins now, or of the one that is under way.
std::uint64_t NumberOf(CycleKind kind, const State& state, PoolId pool);
CycleProgress ProgressOf(const State& state, PoolId pool);

class CycleJournal {
 public:
  // All must outlive it.
  CycleJournal(Ledger& ledger, const Executor& executor, CycleCall& call, PoolId pool)
      : ledger_(ledger), executor_(executor), call_(call), pool_(pool) {}

  // ---- without the ledger
  void Vote(PhaseKind phase, const Status& mine);
  void Threads();                    // once a call, at its first deadline
  void NotBegun(const Status& why);  // the call failed before CycleBegun
  // kBroken and others: the session has no journal any more, so it must not pause.
  [[nodiscard]] Status CanPause();
  void NameCulprits(std::vector<CycleMember> culprits) { culprits_ = std::move(culprits); }

  // ---- with the ledger
  // True: something is left to do of an earlier call whose undo failed. Fails, and nothing has begun, without memory for it.
  Result<bool> Begun();
  void Decided(PhaseKind phase, const Status& why);

  [[nodiscard]] CycleFailed FailedAs(const Status& told, const Status& why, const Status& undone = {}) const {
    return {call_.kind, call_.cycle, undone.ok(), told.message(), why.code(), why.driver_result(), culprits_, pool_};
  }
  static CycleMember AsMember(const PeerIdentity& who) { return {who.session, who.rank, who.pid, who.host}; }

 private:
  Ledger& ledger_;
  const Executor& executor_;
  CycleCall& call_;
  const PoolId pool_;
  std::vector<CycleMember> culprits_;  // other sessions that caused the failure
  bool has_threads_ = false;
};

}  // namespace amem
