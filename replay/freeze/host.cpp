#include "replay/freeze/host.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <sstream>

#include "journal/base/file.h"

namespace amem {
namespace {

std::optional<Bytes> NumberIn(const std::string& text) {
  Bytes number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  return parsed.ec == std::errc() ? std::optional(number) : std::nullopt;
}

// The number behind `key` in lines of "key number".
std::optional<Bytes> ValueOf(const std::string& lines, const std::string& key) {
  std::istringstream in(lines);
  std::string word;
  for (std::string line; std::getline(in, line);) {
    std::istringstream parts(line);
    Bytes number = 0;
    if (parts >> word >> number && word == key) return number;
  }
  return std::nullopt;
}

std::optional<HostRoom> RoomInCgroup(const std::string& root, std::string group) {
  std::optional<HostRoom> least;
  while (true) {
    const std::string folder = root + "/sys/fs/cgroup" + (group == "/" ? "" : group);
    const auto most = NumberIn(ReadSmallFile(folder + "/memory.max"));  // "max": no limit, and no number
    const auto current = NumberIn(ReadSmallFile(folder + "/memory.current"));
    if (most && current) {
      // Pages of files that nobody has used lately are given up before anything is refused.
      const Bytes cached = ValueOf(ReadSmallFile(folder + "/memory.stat", 16384), "inactive_file").value_or(0);
      const Bytes used = *current - std::min(*current, cached);
      const Bytes room = *most - std::min(*most, used);
      if (!least || room < least->bytes) least = HostRoom{room, "the memory limit of the cgroup " + folder};
    }
    const auto slash = group.rfind('/');
    if (group.empty() || group == "/" || slash == std::string::npos) return least;
    group.resize(slash);
    if (group.empty()) group = "/";
  }
}

// The fields of /proc/PID/stat from the third on; the name before them may hold anything.
std::vector<std::string> StatFields(pid_t pid) {
  const std::string text = ReadSmallFile("/proc/" + std::to_string(pid) + "/stat");
  const auto after = text.rfind(')');
  if (after == std::string::npos) return {};
  std::istringstream in(text.substr(after + 1));
  std::vector<std::string> fields;
  for (std::string field; in >> field;) fields.push_back(field);
  return fields;
}

pid_t ParentOf(pid_t pid) {
  const auto fields = StatFields(pid);
  return fields.size() > 1 ? static_cast<pid_t>(NumberIn(fields[1]).value_or(0)) : 0;
}

}  // namespace

std::optional<HostRoom> ReadHostRoom(const std::string& root, pid_t pid) {
  std::optional<HostRoom> room;
  if (const auto kib = ValueOf(ReadSmallFile(root + "/proc/meminfo", 16384), "MemAvailable:")) {
    room = HostRoom{*kib << 10, "what the host has available (MemAvailable)"};
  }
  std::istringstream groups(ReadSmallFile(root + "/proc/" + std::to_string(pid) + "/cgroup"));
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::")) continue;  // the unified hierarchy; version 1 has been gone for long
    const auto in_group = RoomInCgroup(root, line.substr(3));
    if (in_group && (!room || in_group->bytes < room->bytes)) room = in_group;
  }
  return room;
}

std::uint64_t ReadStartTicks(pid_t pid) {
  constexpr std::size_t kState = 0, kStart = 19;  // fields 3 and 22
  const auto fields = StatFields(pid);
  if (fields.size() <= kStart || fields[kState] == "Z" || fields[kState] == "X") return 0;
  return NumberIn(fields[kStart]).value_or(0);
}

std::vector<pid_t> ReadSiblings(pid_t pid) {
  const pid_t launcher = ParentOf(pid);
  if (launcher <= 1) return {pid};
  std::multimap<pid_t, pid_t> children;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const auto number = NumberIn(entry.path().filename().string());
    if (number) children.emplace(ParentOf(static_cast<pid_t>(*number)), static_cast<pid_t>(*number));
  }
  std::vector<pid_t> found = {launcher};
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto [begin, end] = children.equal_range(found[i]);
    for (auto it = begin; it != end; ++it) found.push_back(it->second);
  }
  return found;
}

}  // namespace amem
