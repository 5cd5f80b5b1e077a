// How much memory the host can still give a process, and how much of it others are about to take.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "journal/base/fork_guard.h"
#include "journal/base/mutex.h"
#include "journal/base/process_sight.h"
#include "journal/base/unique_fd.h"
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
// short, because its holder may be stopped; without the lock, the session goes by what the file says. If there can be no file,
// a session knows only its own claims. Thread-safe; does nothing in a forked child.
class HostClaims : NoCopies {
 public:
  using Available = std::function<std::optional<HostRoom>()>;
  HostClaims(std::filesystem::path file, Available available)
      : path_(std::move(file)), available_(std::move(available)), self_(OwnProcess()) {}
  ~HostClaims();

  // kOutOfMemory: the claims of all sessions leave less than `bytes` and a reserve. kNoDescriptors, kIo: they cannot be read
  // now. Nothing is claimed then.
  Status Claim(Bytes bytes);
  void Settle(Bytes bytes);  // so much of the claim is touched by now, or not needed

 private:
  struct Place;
  Status Open() REQUIRES(mutex_);
  Bytes OfOthers() REQUIRES(mutex_);
  void Write() const REQUIRES(mutex_);

  const std::filesystem::path path_;
  const Available available_;
  const ProcessIdentity self_;  // read while there are descriptors
  const ForkGuard fork_;
  mutable Mutex mutex_{LockRank::kHostClaims};
  UniqueFd file_ GUARDED_BY(mutex_);
  std::optional<std::size_t> place_ GUARDED_BY(mutex_);
  Bytes claimed_ GUARDED_BY(mutex_) = 0;
};

}  // namespace amem
