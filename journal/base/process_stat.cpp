#include "journal/base/process_stat.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>

#include "journal/base/file.h"

namespace amem {

std::optional<ProcessStat> ReadProcessStat(const std::filesystem::path& directory) {
  // Numbers of fields in proc(5). The name is in parentheses and may hold parentheses itself, so they count from the last one.
  constexpr int kState = 3, kParent = 4, kFlags = 9, kStartTime = 22, kExitCode = 52;
  constexpr unsigned long kExiting = 0x4;  // PF_EXITING
  const std::string text = ReadSmallFile(directory / "stat");
  const std::size_t open = text.find('('), close = text.rfind(')');
  if (open == std::string::npos || close == std::string::npos || close < open) return std::nullopt;
  ProcessStat stat;
  stat.name = text.substr(open + 1, close - open - 1);
  int field = kState;
  for (std::size_t at = close + 2; at < text.size(); ++field) {
    const char* first = text.data() + at;
    if (field == kState) stat.state = *first;
    if (field == kParent) stat.parent = static_cast<pid_t>(std::strtol(first, nullptr, 10));
    if (field == kFlags) stat.exiting = (std::strtoul(first, nullptr, 10) & kExiting) != 0;
    if (field == kStartTime) stat.start_ticks = std::strtoull(first, nullptr, 10);
    if (field == kExitCode) stat.exit_status = static_cast<int>(std::strtol(first, nullptr, 10));
    at = std::min(text.find(' ', at), text.size()) + 1;
  }
  return stat;
}

// By its first thread, which says the same: qemu-user shows a process a /proc/PID/stat of its own, with another start than
// others see.
std::optional<ProcessStat> ReadProcessStat(pid_t pid) { return ReadProcessStat(fmt::format("/proc/{0}/task/{0}", pid)); }

std::uint64_t StartTicks(pid_t pid) {
  const auto stat = ReadProcessStat(pid);
  return stat && !stat->ended() ? stat->start_ticks : 0;
}

pid_t ParentOf(pid_t pid) {
  const auto stat = ReadProcessStat(pid);
  return stat ? stat->parent : 0;
}

std::uint64_t PidNamespace() {
  struct stat found {};
  return ::stat("/proc/self/ns/pid", &found) == 0 ? static_cast<std::uint64_t>(found.st_ino) : 0;
}

}  // namespace amem
