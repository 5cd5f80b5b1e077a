// What one pause or resume does with this session's memory: the phases of its plan, and of the opposite plan for an undo.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "journal/base/no_copies.h"
#include "replay/cycle/coordinator.h"
#include "replay/cycle/cycle_journal.h"

namespace amem {

// ---- reasons, which only this session can see, to refuse a pause once all members have come (can_begin.cpp)

// A peer may have imported memory after the members were found and before this session's part of the round began. `outsider`:
// the session that shares memory and is no member. `again`: what to call.
Status AllNeighboursAreMembers(const State& state, PoolId pool, const std::string& again, SessionId* outsider);
Status ImportsCanLeave(const State& state, PoolId pool, const std::string& again);
Status MulticastsCanLeave(const State& state);

class Coordinator::OwnPart : NoCopies {
 public:
  // All must outlive it.
  OwnPart(Coordinator& scope, const CycleCall& call) : scope_(scope), call_(call), ledger_(scope.context_.ledger) {}
  ~OwnPart() { OpenGate(); }  // also where the call ended for want of memory

  // Keeps the scope's calls out, and readies the executor.
  Status CloseGate(Deadline until);
  void OpenGate();  // if it is closed
  // Once CycleBegun is recorded.
  Status MakePlan();
  // A phase of the plan. `is_overtaken`: as Executor::Run.
  Status Forward(PhaseKind phase, const std::function<bool()>& is_overtaken);
  // A phase of the opposite plan, from wherever this session is.
  Status Backward(PhaseKind phase, const std::function<bool()>& is_overtaken);
  // The last part of the undo of a resume.
  Status ReleaseAgain();
  // Several ranks may lack device memory, and each says so in its own journal.
  void CheckMemoryToo();
  // All members have succeeded: records that, and prepares the scope for its next call. `began_ns`: when all had come.
  // Returns where the scope is now.
  CycleProgress Conclude(CycleReport report, std::uint64_t began_ns);
  // Tidies up after a failed pause: what cannot be finished now is left to the next call.
  void EndCopies();
  // `undisturbed`: nobody can have written to the memory since its contents were hashed.
  void ForgetSave(bool undisturbed);
  void NoteCopies();
  [[nodiscard]] PhaseKind phase() const { return phase_; }  // the last one that it began

 private:
  [[nodiscard]] Status CanRun(PhaseKind phase) const;
  Status RunPhase(const PlannedPhase& planned, const CycleHooks& hooks, const std::function<bool()>& is_overtaken = {});
  Status GoOn(const PlannedPhase& phase, Status why);
  [[nodiscard]] Result<Plan> PlanOf(CycleKind kind);
  [[nodiscard]] const PeerIdentity* Keeper() const;  // a member that leaves all its memory in place; null: none does
  Status LeaveAllInPlaceIfAnyDoes();
  Status CanBegin();

  Coordinator& scope_;
  const CycleCall& call_;
  Ledger& ledger_;
  std::optional<OpenAtEnd> closed_;  // the gate
  Plan plan_;                        // of the way forward
  PhaseKind phase_{};
};

}  // namespace amem
