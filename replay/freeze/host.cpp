#include "replay/freeze/host.h"

#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "journal/base/process_stat.h"

namespace amem {

std::set<pid_t> ReadSiblings(pid_t pid) {
  const pid_t launcher = ParentOf(pid);
  if (launcher <= 1) return {pid};
  std::multimap<pid_t, pid_t> children;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    pid_t child = 0;  // other entries are no numbers
    if (std::from_chars(name.data(), name.data() + name.size(), child).ec == std::errc())
      children.emplace(ParentOf(child), child);
  }
  std::vector<pid_t> found = {launcher};
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto [begin, end] = children.equal_range(found[i]);
    for (auto it = begin; it != end; ++it) found.push_back(it->second);
  }
  return {found.begin(), found.end()};
}

std::string ReadDriverVersion() {
  std::string version;
  std::ifstream("/sys/module/nvidia/version") >> version;
  return version;
}

}  // namespace amem
