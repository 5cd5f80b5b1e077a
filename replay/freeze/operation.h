// Freezing a job, and thawing it: pause by AMem -> lock all -> checkpoint all ... restore all -> unlock all -> resume by AMem.
//
// Both directions start from where each process is, as the driver says, and do what is left. So a tool that died is succeeded
// by another: --continue goes on to what was wanted, --undo goes back to where it began. A step that fails has what was done
// undone: after a failed freeze the job runs, after a failed thaw it is frozen, unless the driver has lost a process, which is
// said.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "journal/base/clock.h"
#include "replay/driver/checkpointer.h"
#include "replay/freeze/checks.h"
#include "replay/freeze/host.h"
#include "replay/freeze/job.h"
#include "replay/freeze/operation_journal.h"

namespace amem {

struct FreezeOptions {
  std::chrono::milliseconds lock_timeout{10'000};
  FreezeAllowances allowances;
  std::size_t ranks_elsewhere = 0;  // that the launcher counts beside those of the job here
  std::string gpus;                 // of a thaw: ReadGpuPairs
  std::uint64_t began_ns = 0;       // MonotonicNs() of the command, for the times; 0: of the operation
  Say say = [](const std::string&) {};
};

struct FreezeReport {
  // "frozen", "running", "paused" (as it was before the freeze), "lost" (a process is; the others run), "stuck" (see the
  // failure)
  std::string outcome;
  std::filesystem::path journal;
  std::vector<FrozenProcess> processes;
  struct Time {
    // ToText(FreezeStep); "checks", all that came before the first; "rest", what was between them. The checks of a freeze are
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
  FreezeOperation(FreezableJob& job, Checkpointer& checkpointer, FreezeHost& host, FreezeOptions options)
      : job_(job),
        checkpointer_(checkpointer),
        host_(host),
        options_(std::move(options)),
        began_ns_(options_.began_ns != 0 ? options_.began_ns : MonotonicNs()) {}

  Status Freeze();
  Status Thaw();
  // After the death of the tool: on to the goal of the last command, or back from it. kNotFound: no operation is unfinished.
  Status Continue();
  Status Undo();

  [[nodiscard]] const FreezeReport& report() const { return report_; }

 private:
  using Processes = std::vector<FrozenProcess*>;

  // Who there is, and what was done before. Sets processes_ and history_.
  Status LookAround();
  Status BeginNew();
  Status OpenOld();
  Status AnswerRestores();
  bool Unfinished();
  Status AskDriver();
  Status Towards(FreezeGoal goal);

  Status ToFrozen();
  [[nodiscard]] bool AllArePaused();
  Status PauseAll();
  Status CheckAndBegin();
  Status PauseWhenChecked();
  Status PauseBeforeAsking();
  Status NoteTaken();
  Status CheckpointAll();
  Status ToRunning();
  Status RestoreAll();
  Status StayFrozen(const Processes& restored, const Status& why);
  Status ResumeAll();  // if resumes_
  [[nodiscard]] const char* AsBefore() const { return resumes_ ? "the job runs as before" : "the job is paused as before"; }
  Status IsNotFrozen();

  // The processes in a state; what cannot be asked or is no more goes to report_.lost, once.
  Processes In(CheckpointState state);
  Status Each(FreezeStep step, const Processes& whom, const std::function<Status(const FrozenProcess&)>& make);
  Status Step(FreezeStep step, FrozenProcess& process, const std::function<Status(const FrozenProcess&)>& make);
  // For one process: from where its GPUs' contents are now.
  [[nodiscard]] std::vector<GpuPair> PairsOf(const FrozenProcess& process) const;
  void Took(std::string_view step, std::uint64_t since_ns);
  void Lose(const FrozenProcess& process, const std::string& why);
  [[nodiscard]] std::string MovedText() const;
  Status Ended(std::string outcome, const Status& status);

  FreezableJob& job_;
  Checkpointer& checkpointer_;
  FreezeHost& host_;
  const FreezeOptions options_;
  std::vector<FrozenProcess> processes_;
  std::optional<FreezeHistory> history_;
  std::vector<GpuPair> pairs_;
  FreezeGoal goal_{};
  bool resumes_ = false;  // on the way back: not where the job was paused before the freeze, which that leaves as it was
  std::unique_ptr<FreezeJournal> journal_;
  std::uint64_t began_ns_ = 0;
  FreezeReport report_;
};

}  // namespace amem
