// The tool's side of requests from outside: the processes of one job on this host, asked to pause and to resume.
//
// Each session with a journal has a page of shared memory, the file `control` in its directory (page.h). A JobControl holds the
// lock of each of its job's pages for as long as it lives, so that there is one request at a time; when the tool dies the locks
// go with it, and a request that nobody has begun to carry out is void. Of one thread.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "replay/control/page.h"
#include "statemachine/types.h"

namespace amem::control {

// What is known of a rank from outside. Nothing here waits for the rank.
struct RankLook {
  SessionId session;
  pid_t pid = 0;
  std::uint64_t start_ticks = 0;  // field 22 of /proc/PID/stat: with the pid it names one process, also when the pid is reused
  std::string rank_name;          // "rank 2", or "pid 4711" where no launcher gave it a number
  std::filesystem::path directory;
  bool alive = false;
  Phase phase{};
  std::uint64_t steps = 0;         // safe points passed
  bool paused_by_program = false;  // the program's own pause holds
  std::string doing;               // a sentence for people
  Bytes freed = 0;                 // by the last pause from outside
  Bytes held = 0;                  // GPU memory that AMem knows of and that is resident, as the rank last reported it
};

struct AskOptions {
  std::chrono::milliseconds deadline{60'000};
  std::optional<std::uint64_t> at_step;  // the same on each host of a job
  bool all_tags = false;                 // the program's tags as well, before NCCL's memory
  // What the caller has still to find out while the ranks come; asked every millisecond, by the thread that asks for the pause.
  // Nothing: it does not know yet. Nothing is paused before it says ok; a failure withdraws the request, and is its answer.
  std::function<std::optional<Status>()> may_pause;
};

// Written to the rank's journal when it resumes: its process was frozen by the driver, and is back. Times are CLOCK_MONOTONIC.
struct FrozenNote {
  std::uint64_t from_ns = 0, to_ns = 0;
  Bytes bytes = 0;         // that the driver moved out of the process's GPUs
  std::string moved_gpus;  // "GPU-a -> GPU-b, ..."; empty: each came back to its own
};

using Progress = std::function<void(const std::string& sentence)>;

class JobControl {
 public:
  // Takes the locks. kRefused: another request is under way (the message names its pid), a page belongs to another user or to
  // another version of AMem, or a process has no page. Sessions whose process has ended are left out; kNotFound: none is left.
  static Result<JobControl> Open(std::span<const std::filesystem::path> session_directories);
  JobControl(JobControl&&) noexcept;
  JobControl& operator=(JobControl&&) noexcept;
  ~JobControl();  // withdraws a request that nobody has begun to carry out, and gives the locks back; a pause that holds stays

  [[nodiscard]] std::vector<RankLook> Look();

  // All or nothing. Ok when every rank is paused, also if it was before. The failure names the ranks that did not come, with
  // what each is doing, or the rank whose pause failed, with its message; then every rank runs as before.
  Status Pause(const AskOptions& options, const Progress& progress = {});
  // Ok when every rank has its memory back, or was never paused. Ranks that their program paused stay so until it resumes them.
  // After a failure everything is still paused, with the contents kept, and it can be called again.
  Status Resume(std::chrono::milliseconds deadline, const Progress& progress = {});
  // The rank writes it down as it resumes. kNotFound: no session of this job.
  Status LeaveNote(SessionId session, const FrozenNote& note);

 private:
  struct Implementation;
  explicit JobControl(std::unique_ptr<Implementation> implementation);
  std::unique_ptr<Implementation> implementation_;
};

// The same look without taking locks: for commands that only show. What cannot be looked at is left out.
[[nodiscard]] std::vector<RankLook> LookAt(std::span<const std::filesystem::path> session_directories);

}  // namespace amem::control
