#include "replay/tool/control/find_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include "journal/base/process_stat.h"
#include "replay/job/jobs.h"
#include "replay/job/sessions.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

struct Living {
  std::filesystem::path directory;
  JobTies ties;
};
using JobOfLiving = std::vector<const Living*>;

Result<std::vector<Living>> LivingUnder(const std::filesystem::path& place) {
  const std::filesystem::path places[] = {place};
  const FoundSessions found = FindPlaces(places);
  std::vector<Living> living;
  for (const auto& session : found.sessions) {
    if (!std::filesystem::is_directory(session)) continue;
    Result<JobTies> ties = ReadTies(session);
    if (ties.ok() && ties->live) living.push_back({session, *std::move(ties)});
  }
  if (!living.empty()) return living;
  return Status{
      Code::kNotFound,
      fmt::format("no process under {} lives{}", place.string(),
                  found.problems.empty() ? ": give the directory of its journals, or set AMEM_JOURNAL_DIR as for the job"
                                         : "; " + found.problems.front())};
}

std::vector<JobOfLiving> JobsOf(const std::vector<Living>& living) {
  std::vector<JobTies> ties;
  for (const Living& one : living) ties.push_back(one.ties);
  std::vector<JobOfLiving> jobs;
  for (const auto& members : GroupIntoJobs(ties)) {
    JobOfLiving& job = jobs.emplace_back();
    for (const std::size_t i : members) job.push_back(&living[i]);
  }
  return jobs;
}

std::optional<std::uint64_t> Number(const std::string& text) {
  std::uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  return !text.empty() && parsed.ec == std::errc() && parsed.ptr == end ? std::optional(number) : std::nullopt;
}

std::int32_t ParentOf(std::int32_t pid) {
  const auto stat = ReadProcessStat(pid);
  return stat ? stat->parent : 0;
}

bool DescendsFrom(std::int32_t pid, std::uint64_t ancestor) {
  constexpr int kDeepest = 64;
  for (int depth = 0; pid > 1 && depth < kDeepest; ++depth, pid = ParentOf(pid))
    if (static_cast<std::uint64_t>(pid) == ancestor) return true;
  return false;
}

// The value of a variable that tells jobs apart.
bool LaunchedAs(const SessionOpened& who, const std::string& id) {
  constexpr std::string_view kOfJob[] = {
      "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
      "LSB_JOBID",    "PBS_JOBID",           "FLUX_JOB_ID"};
  return std::ranges::any_of(who.launcher, [&](const std::string& variable) {
    return std::ranges::any_of(kOfJob, [&](std::string_view name) { return variable == fmt::format("{}={}", name, id); });
  });
}

std::size_t RanksOfLauncher(const JobOfLiving& job) {
  for (const std::string& variable : job.front()->ties.who.launcher)
    if (variable.starts_with("WORLD_SIZE=")) return Number(variable.substr(variable.find('=') + 1)).value_or(0);
  return 0;
}

FoundJob Chosen(const JobOfLiving& job) {
  FoundJob found;
  for (const Living* one : job) found.directories.push_back(one->directory);
  const std::size_t ranks = RanksOfLauncher(job);
  found.elsewhere = ranks > job.size() ? ranks - job.size() : 0;
  return found;
}

std::string ListOf(const std::vector<JobOfLiving>& jobs) {
  std::string text;
  for (const JobOfLiving& job : jobs) {
    std::set<std::int32_t> pids;
    for (const Living* one : job) pids.insert(one->ties.who.pid);
    text += fmt::format("\n  pid {} in {}", fmt::join(pids, ", "), job.front()->directory.parent_path().string());
    if (!job.front()->ties.who.launcher.empty()) text += fmt::format(" ({})", fmt::join(job.front()->ties.who.launcher, " "));
  }
  return text;
}

// The directory of the only session found, without links, if `what` names it rather than a folder above: the directory itself
// in any spelling (a shell completes it with a slash), or a file in it.
std::optional<std::filesystem::path> SessionNamed(const std::string& what, const std::vector<Living>& living) {
  if (living.size() != 1) return std::nullopt;
  std::error_code failed;
  const auto session = std::filesystem::canonical(living.front().directory, failed);
  if (failed) return std::nullopt;
  const auto named = std::filesystem::canonical(what, failed);
  return !failed && (named == session || named.parent_path() == session) ? std::optional(session) : std::nullopt;
}

}  // namespace

Result<FoundJob> FindJob(const std::string& what) {
  std::error_code missing;
  const bool place = !what.empty() && std::filesystem::exists(what, missing);
  const auto number = Number(what);
  Result<std::vector<Living>> living = LivingUnder(place ? std::filesystem::path(what) : DefaultJournalDirectory());
  // Of one session's directory the job is meant, whose other sessions lie beside it.
  std::optional<std::int32_t> of_session;
  if (const auto session = place && living.ok() ? SessionNamed(what, *living) : std::nullopt) {
    of_session = living->front().ties.who.pid;
    living = LivingUnder(session->parent_path());
  }
  if (!living.ok()) return living.status();
  std::vector<JobOfLiving> jobs = JobsOf(*living);
  if (!what.empty() && (!place || of_session)) {
    std::erase_if(jobs, [&](const JobOfLiving& job) {
      return std::ranges::none_of(job, [&](const Living* one) {
        if (of_session) return one->ties.who.pid == *of_session;
        return (number && DescendsFrom(one->ties.who.pid, *number)) || LaunchedAs(one->ties.who, what);
      });
    });
  }
  if (jobs.empty())
    return Status{Code::kNotFound, fmt::format("{} is no rank or launcher of a living job, no directory of journals, and no "
                                               "launcher's id of a job; these live:{}",
                                               what, ListOf(JobsOf(*living)))};
  if (jobs.size() > 1)
    return Status{Code::kRefused, fmt::format("there are {} living jobs; name one by a pid:{}", jobs.size(), ListOf(jobs))};
  return Chosen(jobs.front());
}

}  // namespace amem::tool
