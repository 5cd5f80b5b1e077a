// The journal of a freeze: what was begun and what was done, so that another tool can finish it or undo it when this one has
// died.
//
//   JOURNALS/freeze-ID.journal    mode 0600; lines "CRC JSON", the CRC-32C of the JSON in 8 hex digits
//
// A line is on disk (fdatasync) before the step that it announces is made, and again after it. A line that the tool's death has
// torn is the last one, and is left out. A thaw goes on in the journal of its freeze. The driver knows better in which state a
// process is; this journal knows which processes they are, what was wanted, and how much room they need.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "journal/base/unique_fd.h"
#include "replay/driver/checkpointer.h"
#include "replay/freeze/job.h"

namespace amem {

// A process of the operation, with what it held on each GPU (by UUID) before it was paused, and when the driver took it.
struct FrozenProcess {
  RankProcess process;
  std::map<std::string, Bytes> before_pause, taken;
  std::uint64_t from_ns = 0;  // when its checkpoint was done; 0: it was not
  // Where restores have put what was on a GPU, by the UUID that it had at the freeze; not there: where it was.
  std::map<std::string, std::string> moved;
  bool restore_unanswered = false;  // it was begun, and the tool died before it wrote what came of it
};

enum class FreezeGoal : std::uint8_t { kFrozen, kRunning };
enum class FreezeStep : std::uint8_t { kPause, kLock, kCheckpoint, kRestore, kUnlock, kResume };
std::string_view ToText(FreezeGoal goal);
std::string_view ToText(FreezeStep step);

// The operation as its journal tells it.
struct FreezeHistory {
  std::filesystem::path path;
  std::uint64_t begun_ns = 0;  // RealtimeNs
  std::vector<FrozenProcess> processes;
  FreezeGoal goal{};           // of the last command
  std::vector<GpuPair> pairs;  // of the last restore that was asked for
  bool ended = false;          // the last command came to its end
  std::string outcome;         // then: as FreezeReport's
  bool pauses = false;         // it has begun to pause the job, which was not paused before
};
// Nothing is left of it: the job runs, or is paused as it was before.
inline bool IsBack(const FreezeHistory& history) {
  return history.ended && (history.outcome == "running" || history.outcome == "paused");
}

// It came to its end with the job off its GPUs, whose calls of the driver wait until a thaw.
inline bool IsFrozen(const FreezeHistory& history) { return history.ended && history.outcome == "frozen"; }

class FreezeJournal {
 public:
  // A new operation on these processes, in the directory of their journals.
  static Result<std::unique_ptr<FreezeJournal>> Make(const std::filesystem::path& directory,
                                                     std::span<const FrozenProcess> processes);
  // Goes on with one that exists.
  static Result<std::unique_ptr<FreezeJournal>> Open(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

  // From any thread. kIo: the line is not on disk for certain.
  Status Begin(FreezeGoal goal, std::span<const GpuPair> pairs);
  Status BeginStep(FreezeStep step, pid_t pid);  // 0: all processes together
  Status EndStep(FreezeStep step, pid_t pid, const Status& result);
  Status Taken(pid_t pid, const std::map<std::string, Bytes>& bytes);  // just before it is locked
  Status End(std::string_view outcome, std::string_view message);

 private:
  FreezeJournal(std::filesystem::path path, UniqueFd file) : path_(std::move(path)), file_(std::move(file)) {}
  Status Write(const std::string& json);

  const std::filesystem::path path_;
  std::mutex mutex_;
  const UniqueFd file_;
};

// kCorrupt: a line in its middle is damaged, or it is not of this version.
Result<FreezeHistory> ReadFreezeJournal(const std::filesystem::path& path);
// The last operation in that directory with a process that is `concerned`; nothing: there is none. What cannot be read is left
// out.
std::optional<FreezeHistory> LatestFreeze(const std::filesystem::path& directory,
                                          const std::function<bool(const RankProcess&)>& concerned);

}  // namespace amem
