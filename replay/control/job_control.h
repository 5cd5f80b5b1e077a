// The tool's side of requests from outside: the processes of one job on this host, asked to pause and to resume.
//
// Each rank is asked over its session's socket. A JobControl is the only one whose orders the ranks take, for as long as it
// lives; when the tool dies its connections end, and a request that nobody has begun to carry out is void. Of one thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "replay/control/rank_link.h"
#include "replay/peers/requests.h"
#include "statemachine/event.h"

namespace amem::control {

// Memory that a pause leaves on the GPUs.
struct Staying {
  std::string what;
  std::optional<std::uint64_t> pieces;  // where they are counted
  Bytes bytes = 0;
};

// What is known of a rank from outside.
struct RankLook {
  SessionId session;
  pid_t pid = 0;
  std::uint64_t start_ticks = 0;  // field 22 of /proc/PID/stat: with the pid it names one process, also when the pid is reused
  std::int32_t rank = -1;         // -1: no launcher gave it a number
  std::string rank_name;          // "rank 2", or "pid 4711" where no launcher gave it a number
  std::filesystem::path directory;
  bool alive = false;
  std::string_view phase;          // as Phase, or "silent": it does not answer
  std::uint64_t steps = 0;         // safe points passed
  bool paused = false;             // by a request
  bool paused_by_program = false;  // the program's own pause holds
  std::string doing;               // a sentence for people
  Bytes freed = 0;                 // by the last pause from outside
  Bytes held = 0;                  // GPU memory that AMem knows of and that is resident, as the rank last reported it
  std::vector<Staying> stays{};    // where the tool has read the rank's journal
};

struct AskOptions {
  std::chrono::milliseconds deadline{60'000};
  std::optional<std::uint64_t> at_step;  // the same on each host of a job
  bool all_tags = false;                 // the program's tags as well, before NCCL's memory
  // What the caller has still to find out while the ranks come; asked every millisecond, by the thread that asks for the pause.
  // Nothing: it does not know yet. Nothing is paused before it says ok; a failure withdraws the request, and is its answer.
  std::function<std::optional<Status>()> may_pause;
};

using Progress = std::function<void(const std::string& sentence)>;

class JobControl {
 public:
  // kRefused: another request is under way (the message names its pid), or a process cannot be asked. Sessions whose process
  // has ended are left out; kNotFound: none is left. Waits until what a tool that died has left has come to its end.
  static Result<JobControl> Open(const std::vector<RankPlace>& ranks, const std::filesystem::path& socket_directory);

  [[nodiscard]] std::vector<RankLook> Look();

  // All or nothing. Ok when every rank is paused, also if it was before. The failure names the ranks that did not come, with
  // what each is doing, or the rank whose pause failed, with its message; then every rank runs as before.
  Status Pause(const AskOptions& options, const Progress& progress = {});
  // Ok when every rank has its memory back, or was never paused. Ranks that their program paused stay so until it resumes them.
  // After a failure everything is still paused, with the contents kept, and it can be called again.
  Status Resume(std::chrono::milliseconds deadline, const Progress& progress = {});
  // The rank has it in its journal when this returns ok: a Frozen or a FreezeStep. kNotFound: no session of this job.
  Status LeaveNote(SessionId session, EventBody note);

 private:
  JobControl(std::unique_ptr<ToolSockets> sockets, std::vector<RankLink> ranks)
      : sockets_(std::move(sockets)), ranks_(std::move(ranks)) {}

  enum class Coming { kAll, kNotYet, kOnceMore };
  void Refresh();  // hears from all ranks how they stand now
  void AwaitEndOfEarlier();
  void Post(Ask ask, bool all_tags, Stage stage);
  void SetStage(Stage stage);
  void Withdraw();  // what nobody has begun to carry out
  void GiveAll();
  void Wait(std::chrono::milliseconds most);  // until something comes
  bool AwaitAnswers(std::chrono::milliseconds most);
  [[nodiscard]] bool AllAnswered() const;
  [[nodiscard]] bool IsAbout(const RankLink& rank) const { return rank.standing().about == order_.request; }
  [[nodiscard]] bool Has(const RankLink& rank, Phase phase) const { return IsAbout(rank) && rank.standing().phase == phase; }
  [[nodiscard]] bool HasCome(const RankLink& rank) const;
  [[nodiscard]] bool HasDone(const RankLink& rank, Stage stage) const;
  [[nodiscard]] bool HasGivenUp(const RankLink& rank) const;  // because this tool was silent for too long
  Status AgreeOnStep(const AskOptions& options);
  [[nodiscard]] Coming HowTheyCome() const;
  Status AwaitAll(const AskOptions& options, const Progress& progress);
  Status AwaitStage(Stage stage);
  Status UndoPause(const Status& why);
  Status AwaitResumed(Stage stage, Deadline until);
  [[nodiscard]] Status DidNotCome(std::chrono::milliseconds deadline) const;
  [[nodiscard]] Status FirstFailure(Ask asked) const;

  std::unique_ptr<ToolSockets> sockets_;  // outlives the ranks' connections
  std::vector<RankLink> ranks_;
  std::vector<const RankLink*> resuming_;  // those that a resume waits for
  Order order_;                            // the last one
  bool standing_ = true;                   // nothing is to be withdrawn
  Deadline next_beat_ = Now();
};

// The same look without keeping others from asking: for commands that only show. What cannot be looked at is left out.
[[nodiscard]] std::vector<RankLook> LookAt(const std::vector<RankPlace>& ranks, const std::filesystem::path& socket_directory);
std::string_view ToText(Phase phase);

}  // namespace amem::control
