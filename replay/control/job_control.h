// The tool's side of requests from outside: the processes of one job on this host, asked to pause and to resume.
//
// Each rank is asked over its session's socket. While a JobControl lives, the ranks take only its orders. When the tool dies
// its connections end: a pause that no rank has been ordered to complete is void, and a resume goes on on each rank that has
// the order. For one thread.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "replay/control/job.h"
#include "replay/control/rank_link.h"
#include "statemachine/agreement/launches.h"

namespace amem::control {

class JobControl final : public AskedJob {
 public:
  // kRefused: another request is under way (the message names its pid), or a process cannot be asked. Sessions whose process
  // has ended are left out; kNotFound: none is left. Waits, about a minute at most, until a request that a dead tool left under
  // way has ended.
  static Result<JobControl> Open(const std::vector<RankPlace>& ranks, const std::filesystem::path& socket_directory);

  [[nodiscard]] std::vector<RankView> Ranks() override;
  Status Pause(const AskOptions& options, const Progress& progress = {}) override;
  Status Resume(std::chrono::milliseconds deadline, const Progress& progress = {}) override;
  Status LeaveNote(SessionId session, EventBody note) override;
  Result<State> MemoryOf(const RankProcess& process) override;

 private:
  static constexpr std::chrono::milliseconds kSlice{50};  // of a wait; what comes is taken at once
  // Between requests that are put again, longer each time.
  static constexpr std::chrono::milliseconds kFirstBetween{10}, kMostBetween{500};

  JobControl(std::unique_ptr<ToolSockets> sockets, std::vector<RankLink> ranks)
      : sockets_(std::move(sockets)), ranks_(std::move(ranks)) {}

  enum class Coming { kAll, kNotYet, kOnceMore };
  // Whether the pause is to take the program's tags. A failure: what is paused already excludes the pause.
  [[nodiscard]] Result<bool> TakesTags(const AskOptions& options) const;
  // A stop between launches (stop_launches.cpp): ok when all ranks have stopped there.
  [[nodiscard]] Result<bool> StopsBetweenLaunches(const AskOptions& options) const;
  Status StopLaunches(const AskOptions& options, const agreement::LaunchOrder& closes, Deadline until,
                      const Progress& progress);
  // What the ranks say of their launches. A failure: one of them cannot be stopped so, or has ended or failed.
  struct LaunchReadings {
    std::vector<std::size_t> ranks;  // whose: those that are to stop
    std::vector<agreement::LaunchReading> of_ranks;
    bool all_hold = false;  // their launches
    bool all_came = false;
  };
  [[nodiscard]] std::vector<std::size_t> ThatAreToStop() const;
  [[nodiscard]] std::string WhoIsPaused() const;
  [[nodiscard]] Result<LaunchReadings> ReadLaunches() const;
  void GiveLaunches(const agreement::LaunchStop& stop, std::span<const std::size_t> to, bool parks);
  [[nodiscard]] Status AreNotAtTargets(const agreement::LaunchStop& stop, std::chrono::milliseconds deadline) const;
  void AwaitEndOfEarlier();
  void Post(Ask ask, bool all_tags, Stage stage, const agreement::LaunchOrder& launches = {});
  void PostOnceMore(bool tags, const agreement::LaunchOrder& launches, std::chrono::milliseconds& between);
  void SetStage(Stage stage);
  void Withdraw();  // what nobody has begun to carry out
  void GiveAll();
  void Wait(std::chrono::milliseconds most);  // until something comes
  [[nodiscard]] bool AllAnswered() const;     // that live
  [[nodiscard]] bool IsAbout(const RankLink& rank) const { return rank->is.about == order_.request; }
  [[nodiscard]] bool Has(const RankLink& rank, Phase phase) const { return IsAbout(rank) && rank->is.phase == phase; }
  [[nodiscard]] bool HasCome(const RankLink& rank) const;
  [[nodiscard]] bool HasDone(const RankLink& rank, Stage stage) const;
  [[nodiscard]] static bool Runs(const RankLink& rank);       // as far as is known
  [[nodiscard]] bool HasGivenUp(const RankLink& rank) const;  // because this tool was silent for too long
  Status AgreeOnStep(const AskOptions& options);
  [[nodiscard]] bool SomeWaitForOthers() const;
  [[nodiscard]] Coming HowTheyCome() const;
  Status AwaitAll(const AskOptions& options, bool tags, Deadline until, const Progress& progress);
  // Waits until `done` is true of all ranks; a failure of `done` or of a rank ends the wait. Null: all have done it; otherwise
  // a rank that has not done it in time.
  Result<const RankLink*> AwaitRanks(Ask asked, Deadline until, const std::function<Result<bool>(const RankLink&)>& done);
  Status AwaitStage(Stage stage);
  Status UndoPause(const Status& why);
  void PauseAgainWhatIsPaused(bool tags);  // after a resume that failed
  [[nodiscard]] Status DidNotCome(std::chrono::milliseconds deadline) const;
  [[nodiscard]] static Status LostContact(const RankLink& rank);  // of one that HasGivenUp
  [[nodiscard]] Status FirstFailure(Ask asked) const;

  std::unique_ptr<ToolSockets> sockets_;  // outlives the ranks' connections
  std::vector<RankLink> ranks_;
  Order order_;              // the last one
  bool irrevocable_ = true;  // nothing is to be withdrawn
  Deadline next_beat_ = Now();
};

// The same without keeping others from asking: for commands that only show. Ranks that cannot be asked are left out.
[[nodiscard]] std::vector<RankView> RanksAt(const std::vector<RankPlace>& ranks, const std::filesystem::path& socket_directory);

}  // namespace amem::control
