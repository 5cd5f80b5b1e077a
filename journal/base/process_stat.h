// What /proc/PID/stat says of a process or a thread, and which pid namespace that number belongs to.
//
// Callable from any thread. Nothing is allocated beyond the text, and nothing waits for the process that is looked at.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace amem {

struct ProcessStat {
  std::string name;               // as ps shows it; may hold any character
  char state = '?';               // 'R', 'S', 'D', 'T', 'Z' and others of proc(5)
  pid_t parent = 0;               // 0: outside this pid namespace
  bool exiting = false;           // it is on its way out, and may still look alive otherwise
  std::uint64_t start_ticks = 0;  // since boot, field 22: with the pid it names one process, also when the pid is reused
  int exit_status = 0;            // as of wait; 0 also where this process may not see it

  // What is left of it waits for its parent only.
  [[nodiscard]] bool ended() const { return state == 'Z' || state == 'X'; }
};

// `directory`: "/proc/17", "/proc/self/task/18". nullopt: there is no such process, or it cannot be read.
std::optional<ProcessStat> ReadProcessStat(const std::filesystem::path& directory);
std::optional<ProcessStat> ReadProcessStat(pid_t pid);

// Its start_ticks; 0: there is no such process, or it has ended.
std::uint64_t StartTicks(pid_t pid);

pid_t ParentOf(pid_t pid);  // 0: not known

// The pid namespace of this process, by inode; 0: unknown.
std::uint64_t PidNamespace();

}  // namespace amem
