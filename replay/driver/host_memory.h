// How much memory the host can still give a process, and how much of that others are about to take.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "journal/base/fork_guard.h"
#include "journal/base/mutex.h"
#include "journal/base/unique_fd.h"
#include "statemachine/types.h"

namespace amem {

struct HostRoom {
  Bytes bytes = 0;
  std::string limited_by;  // "what the host has available (MemAvailable)", "the memory limit (memory.max) of the cgroup
                           // /sys/fs/cgroup/job"
};

// The least of what the system has available and of what the process's control groups (version 1 or 2, each with all that it
// lies in) leave. What the system takes back at need, such as contents of files, is not counted as used. nullopt: nothing of
// this can be known. Reads some small files. `process`: its number, or "self". `root`: of a test's own /proc and /sys.
std::optional<HostRoom> HostMemoryAvailable(const std::filesystem::path& root = "/", const std::string& process = "self");

// What this session is about to take, told to all sessions of the user on this host, and what they are about to take. Memory is
// missing from HostMemoryAvailable only once it was touched, so that ranks which pause together would all count on the same
// free memory, and one that touches more than there is gets no error: it is killed.
//
// The claims are in one file of the host in the directory of the ranks' sockets, because ranks that share no memory with each
// other never vote together, and still share the host. Each session has a place there, which it alone writes. The file is
// locked for the moment of a claim. A claim names its process by pid and start time, and goes with it: nothing is cleaned up
// after a kill. The wait for the lock is short, as its holder may be stopped; who does not get it goes by what the file says.
// Where there can be no file, a session knows its own claims only. Thread-safe; in a forked child it does nothing.
class HostClaims {
 public:
  using Available = std::function<std::optional<HostRoom>()>;
  HostClaims(std::filesystem::path file, Available available) : path_(std::move(file)), available_(std::move(available)) {}
  ~HostClaims();
  HostClaims(const HostClaims&) = delete;
  HostClaims& operator=(const HostClaims&) = delete;

  // kOutOfMemory, and nothing is claimed: with the claims of all there would not be `bytes` and a little more.
  Status Claim(Bytes bytes);
  void Settle(Bytes bytes);  // so much of what was claimed was touched by now, or is not needed
  [[nodiscard]] Bytes claimed() const;

 private:
  struct Place;
  void Open() REQUIRES(mutex_);
  void FindPlace() REQUIRES(mutex_);
  [[nodiscard]] Bytes OfOthers() const REQUIRES(mutex_);
  void Write() const REQUIRES(mutex_);

  const std::filesystem::path path_;
  const Available available_;
  const ForkGuard fork_;
  mutable Mutex mutex_{LockRank::kHostClaims};
  UniqueFd file_ GUARDED_BY(mutex_);
  std::optional<std::size_t> place_ GUARDED_BY(mutex_);
  Bytes claimed_ GUARDED_BY(mutex_) = 0;
};

}  // namespace amem
