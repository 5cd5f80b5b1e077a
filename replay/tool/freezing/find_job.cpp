#include "replay/tool/freezing/find_job.h"

#include <algorithm>
#include <charconv>

#include "journal/base/file.h"
#include "replay/control/job_control.h"
#include "replay/freeze/host.h"
#include "replay/job/sessions.h"
#include "replay/tool/command.h"

namespace amem::tool {

Result<std::vector<std::filesystem::path>> FindJobHere(const std::string& job) {
  std::int32_t pid = 0;
  const auto parsed = std::from_chars(job.data(), job.data() + job.size(), pid);
  const bool is_pid = !job.empty() && parsed.ec == std::errc() && parsed.ptr == job.data() + job.size();
  const std::filesystem::path place = job.empty() || is_pid ? DefaultJournalDirectory() : std::filesystem::path(job);
  const FoundSessions found = FindPlaces(std::span(&place, 1));
  std::vector<std::filesystem::path> chosen;
  for (const control::RankLook& look : control::LookAt(found.sessions)) {
    if (!look.alive) continue;
    bool wanted = !is_pid || look.pid == pid;
    for (pid_t at = look.pid; !wanted && at > 1; at = ParentOf(at)) wanted = at == pid;
    if (wanted) chosen.push_back(look.directory);
  }
  if (chosen.empty()) return Status(Code::kNotFound, "no living job " + job + " in " + place.string());
  return chosen;
}

}  // namespace amem::tool
