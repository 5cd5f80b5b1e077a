#include "replay/driver/host_memory.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace amem {
namespace {

constexpr Bytes kLeft = Bytes{256} << 20;

std::optional<Bytes> NumberIn(const std::filesystem::path& file) {
  std::ifstream in(file);
  Bytes value = 0;
  if (!(in >> value)) return std::nullopt;  // not there, or "max"
  return value;
}

// The number behind a word at the beginning of a line.
std::optional<Bytes> NumberBehind(const std::filesystem::path& file, const std::string& word) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(word)) continue;
    try {
      return std::stoull(line.substr(word.size()));
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

// What a group has used counts file contents that nobody uses just now, and that the system takes back at need.
void ConsiderGroup(const std::filesystem::path& group, const char* limit, const char* usage, const char* reclaimable,
                   std::optional<HostRoom>& least) {
  const auto most = NumberIn(group / limit), used = NumberIn(group / usage);
  if (!most || !used) return;
  const Bytes idle = NumberBehind(group / "memory.stat", reclaimable).value_or(0);
  const Bytes taken = *used - std::min(*used, idle);
  const Bytes left = *most - std::min(*most, taken);
  if (!least || left < least->bytes) least = HostRoom{left, "the memory limit of the cgroup " + group.string()};
}

// The group and all that it lies in.
void ConsiderGroups(const std::filesystem::path& mount, const std::string& own, const char* limit, const char* usage,
                    const char* reclaimable, std::optional<HostRoom>& least) {
  std::filesystem::path group(own.empty() ? "/" : own);
  while (true) {
    ConsiderGroup(mount / group.relative_path(), limit, usage, reclaimable, least);
    if (group == group.root_path()) return;
    group = group.parent_path();
  }
}

}  // namespace

std::optional<HostRoom> HostMemoryAvailable(const std::filesystem::path& root, const std::string& process) {
  std::optional<HostRoom> least;
  if (const auto kib = NumberBehind(root / "proc/meminfo", "MemAvailable:"))
    least = HostRoom{*kib << 10, "what the host has available (MemAvailable)"};
  std::ifstream groups(root / "proc" / process / "cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t names = line.find(':'), path = line.find(':', names + 1);
    if (names == std::string::npos || path == std::string::npos) continue;
    const std::string controllers = line.substr(names + 1, path - names - 1), own = line.substr(path + 1);
    if (controllers.empty())
      ConsiderGroups(root / "sys/fs/cgroup", own, "memory.max", "memory.current", "inactive_file ", least);
    if (("," + controllers + ",").find(",memory,") != std::string::npos)
      ConsiderGroups(root / "sys/fs/cgroup/memory", own, "memory.limit_in_bytes", "memory.usage_in_bytes",
                     "total_inactive_file ", least);
  }
  return least;
}

bool HostHasRoom(Bytes bytes, const std::filesystem::path& root) {
  const auto available = HostMemoryAvailable(root);
  return !available || available->bytes >= bytes + kLeft;
}

}  // namespace amem
