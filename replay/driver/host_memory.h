// How much memory the host can still give a process, and how much of it others are about to take.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "journal/base/errand.h"
#include "journal/base/fork_guard.h"
#include "journal/base/mutex.h"
#include "statemachine/types.h"

namespace amem {

struct HostRoom {
  Bytes bytes = 0;
  std::string limited_by;  // "what the host has available (MemAvailable)", "the memory limit (memory.max) of the cgroup
                           // /sys/fs/cgroup/job"
};

// The least of what the system has available and what the process's control groups (version 1 or 2, with ancestors) leave.
// Memory that the system takes back at need, such as file contents, counts as free. nullopt: unknown. Reads small files.
// `process`: a pid or "self"; `root`: a test's own /proc and /sys.
std::optional<HostRoom> HostMemoryAvailable(const std::filesystem::path& root = "/", const std::string& process = "self");

// What this session is about to take of the host, visible to all sessions of the user, and what they are about to take. Memory
// is missing from HostMemoryAvailable only once it is touched, so ranks that pause together would count on the same free
// memory, and a process that touches too much is killed without an error.
//
// The claims are in one file beside the ranks' sockets, because ranks that share no GPU memory never vote together and still
// share the host. Each session writes only its own place and locks the file for a moment. A claim names its process by pid and
// start time and ends with it; while it cannot be seen whether that process lives, the claim stands. The wait for the lock is
// short, because its holder may be stopped; without the lock, the session goes by what the file says. Nor does a call wait long
// for the file system: while that stands still, the session goes by what the file said last, and the file is written later. If
// there can be no file, a session knows only its own claims. Thread-safe; does nothing in a forked child.
class HostClaims : NoCopies {
 public:
  using Available = std::function<std::optional<HostRoom>()>;
  HostClaims(std::filesystem::path file, Available available);
  ~HostClaims();

  // kOutOfMemory: the claims of all sessions leave less than `bytes` and a reserve. kNoDescriptors, kIo: they cannot be read
  // now. Nothing is claimed then.
  Status Claim(Bytes bytes);
  void EndClaim(Bytes bytes);  // so much of the claim is touched by now, or not needed

 private:
  struct Place;
  class ClaimsFile;
  // Work on the file. Nothing: it has not ended in time; it goes on, and no other is begun before it has ended.
  std::optional<Status> Ask(std::function<Status(ClaimsFile&)> work) REQUIRES(mutex_);

  const Available available_;
  const ForkGuard fork_;
  mutable Mutex mutex_{LockRank::kHostClaims};
  const std::shared_ptr<ClaimsFile> file_;
  std::optional<Errand<Status>> asked_ GUARDED_BY(mutex_);  // that has not ended
};

}  // namespace amem
