// What a freeze needs of a job: its processes, and their pause and resume by AMem. The tool's asks the ranks (replay/control);
// tests have their own.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

// One process of a job. Two processes are never taken for each other: a number that was used again has another start.
struct RankProcess {
  SessionId session;
  pid_t pid = 0;
  std::uint64_t start_ticks = 0;    // field 22 of /proc/PID/stat
  std::string name;                 // "rank 1", for messages
  std::filesystem::path directory;  // of its journal
  friend bool Same(const RankProcess& a, const RankProcess& b) { return a.pid == b.pid && a.start_ticks == b.start_ticks; }
};

struct RankSight {
  RankProcess process;
  bool alive = false;
  bool paused = false;  // NCCL's memory and all tags are out
  std::string doing;    // in words
};

using Say = std::function<void(const std::string& progress)>;
// Nothing: not known yet. A failure: the pause must not be.
using MayPause = std::function<std::optional<Status>()>;

class FreezableJob {
 public:
  virtual ~FreezableJob() = default;
  virtual std::vector<RankSight> Look() = 0;
  // All ranks, with all tags, at one safe point; all or nothing. Ranks that are paused already stay so. `may_pause` is asked
  // again and again while the ranks come, until it says something; nothing is paused before it says ok, and its failure is the
  // answer.
  virtual Status Pause(const Say& say, const MayPause& may_pause) = 0;
  virtual Status Resume(const Say& say) = 0;
  // Ok: it is in the rank's own journal, Frozen or FreezeStep.
  virtual Status LeaveNote(SessionId session, EventBody note) = 0;
  // What the session's journal says of its memory now.
  virtual Result<State> MemoryOf(const RankProcess& process) = 0;
};

}  // namespace amem
