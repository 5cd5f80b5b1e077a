// What is written of a freeze or thaw into the ranks' own journals, step by step, so that another tool can go on if this one
// dies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "replay/freeze/checks.h"
#include "statemachine/event_cycle.h"

namespace amem {

enum class FreezeGoal : std::uint8_t { kFrozen, kRunning };
AMEM_NAMES(FreezeGoal, kRunning, "goal", "frozen", "running");
enum class StepOfFreeze : std::uint8_t { kBegin, kPause, kLock, kCheckpoint, kRestore, kUnlock, kResume };
AMEM_NAMES(StepOfFreeze, kResume, "step", "begin", "pause", "lock", "checkpoint", "restore", "unlock", "resume");

class FreezeJournal {
 public:
  FreezeJournal(control::AskedJob& job, FreezeHost& host) : job_(job), host_(host) {}

  // A freeze that begins, of these processes; or one that was begun, as the journals have it.
  void BeginNew(FreezeGoal goal, const std::vector<FrozenProcess>& processes);
  void GoOnWith(FreezeStep told) { is_ = std::move(told); }
  void SetPauses() { is_.pauses = true; }  // AMem's pause is a part of it
  // A command of that freeze; the first step is announced to all.
  Status BeginCommand(const std::vector<FrozenProcess>& processes, FreezeGoal goal, const std::vector<GpuPair>& pairs,
                      StepOfFreeze first);
  Status End(const std::vector<FrozenProcess>& processes, const std::string& outcome, const std::string& message);

  void BeginStep(StepOfFreeze step) { last_ = step; }
  Status Note(const FrozenProcess& process, StepOfFreeze step, bool done);
  Status NoteAll(const std::vector<FrozenProcess>& processes, StepOfFreeze step, bool done);

 private:
  control::AskedJob& job_;
  FreezeHost& host_;
  FreezeStep is_;  // but for what is each process's own
  StepOfFreeze last_{};
};

}  // namespace amem
