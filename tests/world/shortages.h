// What the system denies a rank's process for a while: address space, threads, room on the disk of its journal.
#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/world/page.h"
#include "tests/world/settings.h"

namespace amem::world {

// Whether a failure says that the system denied something, so that a program must live with it while there is a shortage.
bool NamesAShortage(Code code, std::string_view failure);

// One at a time, at random moments, in a process that may change the limits of the ranks. Owned by whoever started them; one
// thread.
class Shortages {
 public:
  // `journals` becomes a small file system of its own where that is possible. Without settings.shortages nothing happens.
  Shortages(const Settings& settings, std::shared_ptr<Page> page, std::filesystem::path journals);
  ~Shortages();
  Shortages(const Shortages&) = delete;
  Shortages& operator=(const Shortages&) = delete;

  // Begins or ends one when it is time. `ranks`: their processes, 0 for those that have ended.
  void Advance(const std::vector<pid_t>& ranks);
  void End();

 private:
  enum class Kind : std::uint8_t { kAddressSpace, kThreads, kDisk };
  struct Limit {  // that was lowered, and how it was before
    pid_t pid;
    __rlimit_resource resource;
    rlimit before;
  };
  void Begin(const std::vector<pid_t>& ranks);
  bool Lower(pid_t pid, __rlimit_resource resource, rlim_t to);
  bool FillDisk();
  std::chrono::milliseconds Pick(int from_ms, int to_ms);

  const Settings settings_;
  const std::shared_ptr<Page> page_;
  const std::filesystem::path journals_;
  std::mt19937_64 random_;
  bool disk_is_its_own_ = false;
  std::optional<Limit> lowered_;
  std::chrono::steady_clock::time_point next_;
};

}  // namespace amem::world
