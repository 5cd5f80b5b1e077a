#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "journal/base/file.h"
#include "journal/base/process_sight.h"
#include "journal/session_dir.h"
#include "journal/tail.h"
#include "replay/job/names.h"
#include "replay/job/sessions.h"
#include "replay/tool/control/request.h"

namespace amem::tool {
namespace {

struct Living {
  JobTies ties;
  std::int32_t pid = 0;  // as seen from here; 0: of another pid namespace, where its number may be another process's here
};
using JobOfLiving = std::vector<const Living*>;

Result<std::vector<Living>> LivingUnder(const std::filesystem::path& place) {
  const std::filesystem::path places[] = {place};
  const FoundSessions found = FindPlaces(places);
  std::vector<Living> living;
  for (const auto& session : found.sessions) {
    if (!std::filesystem::is_directory(session) || PackedAt(session) != 0) continue;  // what lived when it was packed
    Result<JobTies> ties = ReadTies(session);
    if (ties.ok() && ties->live) living.push_back({*std::move(ties), ProcessOfWriter(session / "tail")});
  }
  if (!living.empty()) return living;
  return Status{Code::kNotFound, fmt::format("no process under {} lives{}", place.string(),
                                             !found.problems.empty() ? "; " + found.problems.front()
                                             : Variable("AMEM_JOURNAL_DIR") != nullptr
                                                 ? ": give the directory of its journals (AMEM_JOURNAL_DIR may be "
                                                   "another one in the job)"
                                                 : ": give the directory of its journals, or set AMEM_JOURNAL_DIR as "
                                                   "for the job")};
}

std::vector<JobOfLiving> JobsOf(const std::vector<Living>& living, Ties certainty) {
  std::vector<JobTies> ties;
  for (const Living& one : living) ties.push_back(one.ties);
  std::vector<JobOfLiving> jobs;
  for (const auto& members : GroupIntoJobs(ties, certainty)) {
    JobOfLiving& job = jobs.emplace_back();
    for (const std::size_t i : members) job.push_back(&living[i]);
  }
  return jobs;
}

std::string VariableOf(const SessionOpened& who, std::string_view name) {
  for (const std::string& variable : who.launcher)
    if (variable.starts_with(name) && variable.substr(name.size()).starts_with('=')) return variable.substr(name.size() + 1);
  return {};
}

// The first process of a pid namespace gets those whose parent has ended, and may be a launcher itself (docker run IMAGE
// torchrun).
bool IsTorchrun(std::int32_t parent) {
  if (parent != 1) return parent > 1;
  const std::string program = ProgramIn(ReadSmallFile("/proc/1/cmdline"));
  return program.find("torchrun") != std::string::npos || program.find("torch.distributed") != std::string::npos;
}

// What all ranks have in common that one launcher started at one time, and nobody else; empty: not known. torchrun's id is
// "none" unless it is given one, so that its process is a part of it; Slurm and PMIx number each start.
std::string LaunchOf(const Living& rank) {
  const SessionOpened& who = rank.ties.who;
  const std::string elastic = VariableOf(who, "TORCHELASTIC_RUN_ID");
  if (const std::int32_t parent = ParentOf(rank.pid); !elastic.empty())
    return IsTorchrun(parent) ? fmt::format("torchrun {} {} {}", elastic, VariableOf(who, "TORCHELASTIC_RESTART_COUNT"), parent)
                              : "";
  const std::string job = VariableOf(who, "SLURM_JOB_ID"), step = VariableOf(who, "SLURM_STEP_ID");
  if (!job.empty() && !step.empty()) return fmt::format("slurm {} {} {}", job, step, VariableOf(who, "SLURM_RESTART_COUNT"));
  const std::string space = VariableOf(who, "PMIX_NAMESPACE");
  return space.empty() ? "" : "pmix " + space;
}

// A rank twice in one launch means that some processes inherited its environment: then it tells nothing.
void NoteLaunches(std::vector<Living>& living) {
  std::map<std::string, std::multiset<std::int32_t>> ranks;
  for (Living& one : living) ranks[one.ties.launch = LaunchOf(one)].insert(one.ties.who.rank);
  for (Living& one : living) {
    const auto& of_launch = ranks[one.ties.launch];
    const bool twice = std::ranges::adjacent_find(of_launch) != of_launch.end();
    if (twice || of_launch.contains(-1)) one.ties.launch.clear();
  }
}

std::size_t RanksOfLauncher(const JobOfLiving& job) {
  return WholeNumber(VariableOf(job.front()->ties.who, "WORLD_SIZE")).value_or(0);
}

FoundJob Chosen(const JobOfLiving& job) {
  FoundJob found;
  for (const Living* one : job) found.ranks.push_back({one->ties.who.session, one->ties.directory, one->ties.who.rank});
  const std::size_t ranks = RanksOfLauncher(job);
  found.elsewhere = ranks > job.size() ? ranks - job.size() : 0;
  return found;
}

std::string ListOf(const std::vector<JobOfLiving>& jobs) {
  std::string text;
  for (const JobOfLiving& job : jobs) {
    std::set<std::string> pids;
    for (const Living* one : job)
      pids.insert(one->pid != 0 ? std::to_string(one->pid) : fmt::format("{} of another pid namespace", one->ties.who.pid));
    text += fmt::format("\n  pid {} in {}", fmt::join(pids, ", "), job.front()->ties.directory.parent_path().string());
    if (!job.front()->ties.who.launcher.empty()) text += fmt::format(" ({})", fmt::join(job.front()->ties.who.launcher, " "));
  }
  return text;
}

// The directory of the only session found, without links, if `what` names it rather than a folder above: the directory itself
// in any spelling (a shell completes it with a slash), or a file in it.
std::optional<std::filesystem::path> SessionNamed(const std::string& what, const std::vector<Living>& living) {
  if (living.size() != 1) return std::nullopt;
  std::error_code failed;
  const auto session = std::filesystem::canonical(living.front().ties.directory, failed);
  if (failed) return std::nullopt;
  const auto named = std::filesystem::canonical(what, failed);
  return !failed && (named == session || named.parent_path() == session) ? std::optional(session) : std::nullopt;
}

bool Is(const Living* one, const std::string& name) {
  const std::optional<std::uint64_t> pid = WholeNumber(name);
  return pid && one->pid != 0 && static_cast<std::uint64_t>(one->pid) == *pid;
}

std::string PidsOf(const std::vector<JobOfLiving>& jobs) {
  std::set<std::int32_t> pids;
  for (const JobOfLiving& job : jobs)
    for (const Living* one : job) pids.insert(one->pid != 0 ? one->pid : one->ties.who.pid);
  return fmt::format("{}", fmt::join(pids, " "));
}

// Refused where the launcher counts more ranks than are certainly of this job, and some of this host may be those: a part of a
// job that stands still has the rest wait for it.
Status CheckComplete(const JobOfLiving& job, const std::vector<Living>& living) {
  if (RanksOfLauncher(job) <= job.size()) return Status::Ok();
  for (const JobOfLiving& probable : JobsOf(living, Ties::kProbable)) {
    if (probable.size() <= job.size() || std::ranges::find(probable, job.front()) == probable.end()) continue;
    return {Code::kRefused,
            fmt::format("pid {} is of a job of {} ranks, and nothing says for certain which of these are the others, "
                        "because they have not met yet: ask again later, or name all that are meant: {}{}",
                        PidsOf({job}), RanksOfLauncher(job), PidsOf({probable}), ListOf({probable}))};
  }
  return Status::Ok();
}

// Refused where one shares memory with a session that is not among them, as where its journals lie elsewhere: nobody would ask
// that one, and a pause of the others would wait for it until the deadline.
Status CheckNeighbours(const FoundJob& found, const JobOfLiving& job, const std::filesystem::path& place) {
  std::set<SessionId> asked;
  for (const control::RankPlace& rank : found.ranks) asked.insert(rank.session);
  for (const Living* one : job) {
    for (const auto& [session, peer] : one->ties.shares_with) {
      if (asked.contains(session) || peer.group != one->ties.who.group) continue;
      return {
          Code::kRefused,
          fmt::format("{} shares memory with {}, which is not among those that live by their journals under {}: nobody would "
                      "ask it, and the others would stand still until their deadline; name a directory above all journals",
                      NameOf(one->ties.who),
                      NameOf({.session = session, .host = peer.host, .pid = peer.pid, .rank = peer.rank}), place.string())};
    }
  }
  return Status::Ok();
}

}  // namespace

Result<FoundJob> FindJob(const std::vector<std::string>& names, Ties ties) {
  const std::string what = names.size() == 1 ? names.front() : "";
  std::error_code missing;
  const bool place = !what.empty() && std::filesystem::exists(what, missing);
  std::filesystem::path under = place ? std::filesystem::path(what) : DefaultJournalDirectory();
  Result<std::vector<Living>> living = LivingUnder(under);
  // Of one session's directory the job is meant, whose other sessions lie beside it.
  const auto session = place && living.ok() ? SessionNamed(what, *living) : std::nullopt;
  if (session) living = LivingUnder(under = session->parent_path());
  if (!living.ok()) return living.status();
  NoteLaunches(*living);
  std::vector<JobOfLiving> jobs = JobsOf(*living, ties);
  for (const std::string& name : names)
    if (names.size() > 1 && std::ranges::none_of(*living, [&](const Living& one) { return Is(&one, name); }))
      return Status{Code::kNotFound,
                    fmt::format("{} is the pid of no living rank, and nobody was asked; these live:{}", name, ListOf(jobs))};
  const auto is_rank = [&names](const Living* one) {
    return std::ranges::any_of(names, [one](const std::string& name) { return Is(one, name); });
  };
  const bool ranks = std::ranges::any_of(*living, [&](const Living& one) { return is_rank(&one); });
  const auto meant = [&, pid = WholeNumber(what)](const Living* one) {
    if (session) return one->ties.directory == *session;
    if (place || (what.empty() && !ranks)) return true;
    if (ranks) return is_rank(one);  // and not what it has started
    return (pid && DescendsFrom(one->pid, *pid)) || LaunchedAs(one->ties.who, what);
  };
  std::erase_if(jobs, [&](const JobOfLiving& job) { return std::ranges::none_of(job, meant); });
  if (names.size() > 1) {  // those, and what is certainly of one job with them
    JobOfLiving all;
    for (const JobOfLiving& job : jobs) all.insert(all.end(), job.begin(), job.end());
    if (ties == Ties::kCertain) AMEM_TRY(CheckNeighbours(Chosen(all), all, under));
    return Chosen(all);
  }
  if (jobs.empty())
    return Status{Code::kNotFound, fmt::format("{} is no rank or launcher of a living job, no directory of journals, and no "
                                               "launcher's id of a job; these live:{}",
                                               what, ListOf(JobsOf(*living, ties)))};
  if (jobs.size() > 1)
    return Status{Code::kRefused,
                  fmt::format("there are {} living jobs, of which nothing says that they belong together; name one by "
                              "a pid, or all that are meant: {}{}",
                              jobs.size(), PidsOf(jobs), ListOf(jobs))};
  if (ties == Ties::kCertain) {
    AMEM_TRY(CheckNeighbours(Chosen(jobs.front()), jobs.front(), under));
    AMEM_TRY(CheckComplete(jobs.front(), *living));
  }
  return Chosen(jobs.front());
}

}  // namespace amem::tool
