// A job as a tool asks it from outside: its processes on this host, to pause and to resume. JobControl asks the ranks over
// their sockets; tests of tools implement a job of their own.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "replay/peers/requests.h"
#include "statemachine/account.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem::control {

std::string_view ToText(Phase phase);

// One process of a job. Two processes are never confused: if a pid was reused, the start time differs.
struct RankProcess {
  SessionId session;
  pid_t pid = 0;
  std::uint64_t start_ticks = 0;    // field 22 of /proc/PID/stat
  std::string name;                 // "rank 2", or "pid 4711" where no launcher gave it a number
  std::filesystem::path directory;  // of its journal
  friend bool Same(const RankProcess& a, const RankProcess& b) { return a.pid == b.pid && a.start_ticks == b.start_ticks; }
};

// What is known of a rank from outside.
struct RankView {
  RankProcess process;
  std::int32_t rank = -1;          // -1: no launcher gave it a number
  bool alive = true;               // and in contact with this program
  bool heard = false;              // its status is known
  RankStatus is;                   // as it said last
  std::optional<Account> account;  // where the tool has read the rank's journal
  static constexpr const char* kHasEnded = "has ended";
  std::string lost = kHasEnded;  // if it is not alive: that, or that only the connection to it is known to have ended

  [[nodiscard]] bool has_ended() const { return !alive && lost == kHasEnded; }
  [[nodiscard]] std::string_view phase() const { return heard ? ToText(is.phase) : "silent"; }
  [[nodiscard]] bool paused_by_program() const { return is.own_pause == OwnPause::kPaused; }
  // In words: "is paused, waits in safe point 12 for a resume".
  [[nodiscard]] std::string Doing() const;
};

// Where a rank is stopped.
enum class Where : std::uint8_t {
  kAtSafepoint,
  kBetweenLaunches,
};

struct AskOptions {
  std::chrono::milliseconds deadline{60'000};
  std::optional<std::uint64_t> at_step;  // the same on each host of a job
  bool all_tags = false;                 // the program's tags as well, before NCCL's memory
  Where where{};
  bool parks = false;  // between launches, with nothing released
  // Leaves out the tags if the job stops between launches: for a caller that takes all memory anyway (freeze).
  bool tags_at_safepoint_only = false;
  std::chrono::milliseconds progress_every{1'000};
  // What the caller has still to find out while the ranks come; asked every millisecond, by the thread that asks for the pause.
  // Nothing: it does not know yet. Nothing is paused before it says ok; a failure withdraws the request, and is its answer.
  std::function<std::optional<Status>()> may_pause;
};

using Progress = std::function<void(const std::string& sentence)>;

class AskedJob {
 public:
  virtual ~AskedJob() = default;
  [[nodiscard]] virtual std::vector<RankView> Ranks() = 0;
  // All or nothing. Ok when every rank is paused, also if it was before. The failure names the ranks that did not come, with
  // what each is doing, or the rank whose pause failed, with its message; then every rank runs as before.
  virtual Status Pause(const AskOptions& options, const Progress& progress) = 0;
  // Ok when every rank has its memory back, or was never paused. Ranks that their program paused stay so until it resumes them.
  // After a failure everything is still paused, with the contents kept, and it can be called again.
  virtual Status Resume(std::chrono::milliseconds deadline, const Progress& progress) = 0;
  // The rank has it in its journal when this returns ok: a Frozen or a FreezeStep. kNotFound: no session of this job.
  virtual Status LeaveNote(SessionId session, EventBody note) = 0;
  // What the session's journal says of its memory now.
  virtual Result<State> MemoryOf(const RankProcess& process) = 0;
};

}  // namespace amem::control
