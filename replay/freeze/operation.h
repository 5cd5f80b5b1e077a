// Freezing a job, and thawing it: pause by AMem -> lock all -> checkpoint all ... restore all -> unlock all -> resume by AMem.
//
// Both directions start from where each process is, as the driver says, and do what is left. So a tool that died is succeeded
// by another: --continue goes on to what was wanted, --undo goes back to where it began. A step that fails has what was done
// undone: after a failed freeze the job runs, after a failed thaw it is frozen, unless the driver has lost a process, which is
// said. What was begun and done is in the ranks' own journals (FreezeStep), written there by the ranks.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "journal/base/clock.h"
#include "replay/driver/checkpointer.h"
#include "replay/freeze/checks.h"
#include "replay/freeze/freeze_journal.h"

namespace amem {

struct FreezeOptions {
  std::chrono::milliseconds lock_timeout{10'000};
  control::AskOptions asked{.all_tags = true};  // what AMem can take out at the link's speed need not go the driver's way
  FreezeAllowances allowances;
  std::size_t ranks_elsewhere = 0;         // that the launcher counts beside those of the job here
  std::string gpus;                        // of a thaw: ReadGpuPairs
  std::uint64_t began_ns = MonotonicNs();  // of the command, for the times
  control::Progress say = [](const std::string&) {};
};

struct FreezeReport {
  // "frozen", "running", "paused" (as it was before the freeze), "lost" (a process is; the others run), "stuck" (see the
  // failure)
  std::string outcome;
  std::vector<FrozenProcess> processes;
  struct Time {
    // ToText(StepOfFreeze); "checks", all that came before the first; "rest", what was between them. The checks of a freeze are
    // made while the ranks come to their safe point, and are part of its pause.
    std::string step;
    double ms = 0;
  };
  std::vector<Time> times;  // in the order in which the steps were made; the sum is the whole
  std::vector<std::string> lost;
  std::vector<std::string> notes;
};

// Of one thread; it makes the driver's calls for several processes side by side.
class FreezeOperation {
 public:
  FreezeOperation(control::AskedJob& job, Checkpointer& checkpointer, FreezeHost& host, FreezeOptions options)
      : job_(job), checkpointer_(checkpointer), host_(host), options_(std::move(options)) {}

  Status Freeze();
  Status Thaw();
  // After the death of the tool: on to the goal of the last command, or back from it. kNotFound: no operation is unfinished.
  Status Continue() { return Succeed(false); }
  Status Undo() { return Succeed(true); }

  [[nodiscard]] const FreezeReport& report() const { return report_; }

 private:
  using Processes = std::vector<FrozenProcess*>;

  // Who lives. Sets processes_.
  Status FindProcesses();
  // What was done before, as the journals of processes_ say: sets history_, and adds those that were frozen with them and have
  // ended. The states that it read, by process.
  std::vector<Result<State>> ReadJournals();
  Status ReadHistory();
  Status Succeed(bool undo);
  void BeginNew();
  void Measure();
  Status GoOn();
  [[nodiscard]] bool Unfinished() const { return history_ && (history_->outcome.empty() || history_->outcome == "stuck"); }
  [[nodiscard]] bool HasEnded(const FrozenProcess& one) const;  // and is not merely unseen
  Status AskDriver();
  Status Begin(StepOfFreeze first = StepOfFreeze::kBegin);
  Status Towards(FreezeGoal goal);

  Status ToFrozen();
  [[nodiscard]] bool AllArePaused();
  Status Check();
  Status PauseWhenChecked();
  Status NoteTaken();
  Status ToRunning();
  Status RestoreAll();
  Status StayFrozen(const Processes& restored, const Status& why);
  Status ResumeAll();  // if resumes_
  [[nodiscard]] const char* AsBefore() const { return resumes_ ? "the job runs as before" : "the job is paused as before"; }

  // The processes in a state; what cannot be asked or is no more goes to report_.lost, once.
  Processes In(CheckpointState state);
  // Announces a step in the process's journal. Nothing: it may be made. On the way to the freeze, a step that cannot be
  // announced is not made; on the way back it is, because the job counts for more than its journals.
  std::optional<Status> WhyNot(const FrozenProcess& process, StepOfFreeze step);
  // For all of them side by side; `made` is called for each that was done.
  Status Each(StepOfFreeze step, const Processes& whom, const std::function<Status(const FrozenProcess&)>& make,
              const std::function<void(FrozenProcess&)>& made = {});
  // For the job as a whole.
  Status ForAll(StepOfFreeze step, const std::function<Status()>& make);
  void Took(std::string_view step, std::uint64_t since_ns);
  void Lose(const FrozenProcess& process, const std::string& why);
  Status Ended(std::string outcome, const Status& status);

  control::AskedJob& job_;
  Checkpointer& checkpointer_;
  FreezeHost& host_;
  const FreezeOptions options_;
  std::vector<FrozenProcess> processes_;
  std::optional<FreezeStep> history_;  // of a freeze of which something is left
  FreezeJournal journal_{job_, host_};
  std::vector<GpuPair> pairs_;
  FreezeGoal goal_{};
  bool resumes_ = false;  // the way back ends with a resume; false if a freeze is undone of a job that was paused before
  bool checked_ = false;  // the freeze checks passed
  FreezeReport report_;
};

}  // namespace amem
