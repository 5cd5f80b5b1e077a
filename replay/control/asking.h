// The inside of JobControl: the pages of a job, and what is done with all of them together.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "replay/control/job_control.h"
#include "replay/control/page.h"

namespace amem::control {

using Clock = std::chrono::steady_clock;

class Asking {
 public:
  struct Rank {
    std::filesystem::path directory;
    MappedPage page;
  };

  static Result<Asking> Open(std::span<const std::filesystem::path> session_directories);
  Asking(Asking&&) noexcept = default;
  Asking& operator=(Asking&&) noexcept = default;

  Status Pause(const AskOptions& options, const Progress& progress);
  Status Resume(std::chrono::milliseconds deadline, const Progress& progress);
  Status LeaveNote(SessionId session, const FrozenNote& note);
  void Withdraw();  // what nobody has begun to carry out
  [[nodiscard]] const std::vector<Rank>& ranks() const { return ranks_; }

 private:
  explicit Asking(std::vector<Rank> ranks) : ranks_(std::move(ranks)) {}

  enum class Coming { kAll, kNotYet, kOnceMore };
  void Post(Ask ask, bool all_tags, Stage stage);
  void SetStage(Stage stage);
  void TellTheRest();
  void Beat();  // the tool lives and is not stopped
  [[nodiscard]] bool IsAbout(const Rank& rank) const;
  [[nodiscard]] bool Has(const Rank& rank, Phase phase) const { return IsAbout(rank) && PhaseOf(rank) == phase; }
  [[nodiscard]] static Phase PhaseOf(const Rank& rank);
  [[nodiscard]] static OwnPause OwnPauseOf(const Rank& rank);
  [[nodiscard]] bool HasCome(const Rank& rank) const;
  [[nodiscard]] bool HasDone(const Rank& rank, Stage stage) const;
  Status AgreeOnStep(const AskOptions& options);
  [[nodiscard]] Coming Look() const;
  Status AwaitAll(const AskOptions& options, const Progress& progress);
  Status AwaitStage(Stage stage, Clock::time_point until);
  Status UndoPause(const Status& why);
  Status AwaitResumed(Stage stage, Clock::time_point until);
  [[nodiscard]] Status DidNotCome(std::chrono::milliseconds deadline) const;
  [[nodiscard]] Status FirstFailure(Ask asked) const;

  std::vector<Rank> ranks_;
  std::vector<const Rank*> resuming_;  // those that a resume waits for
  std::uint64_t request_ = 0;          // the number of the last one that was posted
  std::uint64_t target_ = 0;
  bool standing_ = true;  // nothing is to be withdrawn
};

}  // namespace amem::control
