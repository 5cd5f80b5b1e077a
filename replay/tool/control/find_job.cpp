#include <fmt/format.h>

#include <algorithm>
#include <iterator>
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
#include "statemachine/check.h"

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
            fmt::format("pid {} is of a job of {} ranks, and its other ranks cannot be identified yet, because no "
                        "memory or communicator that they share is known: try again later, or name the pids of all: {}{}",
                        PidsOf({job}), RanksOfLauncher(job), PidsOf({probable}), ListOf({probable}))};
  }
  return Status::Ok();
}

// Refused where one shares memory with a session that is not among them, as where its journals are in another directory: that
// one would not be asked, and a pause of the others would wait for it until the deadline.
Status CheckNeighbours(const FoundJob& found, const JobOfLiving& job, const std::filesystem::path& place) {
  std::set<SessionId> asked;
  for (const control::RankPlace& rank : found.ranks) asked.insert(rank.session);
  for (const Living* one : job) {
    for (const auto& [session, peer] : one->ties.shares_with) {
      if (asked.contains(session) || peer.group != one->ties.who.group) continue;
      return {
          Code::kRefused,
          fmt::format("{} shares memory with {}, which is not among those that live by their journals under {}: that "
                      "rank would not be asked, and the others would wait for it until their deadline; name a directory above "
                      "all journals",
                      NameOf(one->ties.who),
                      NameOf({.session = session, .host = peer.host, .pid = peer.pid, .rank = peer.rank}), place.string())};
    }
  }
  return Status::Ok();
}

// What a command line means: where the journals are, who lives there, and whom of them it names.
struct Target {
  enum class Kind : std::uint8_t {
    kPlace,     // a directory, or none: all that live there
    kSession,   // the directory of a session: its job, whose other sessions are beside it
    kRanks,     // pids of ranks, and not what these have started
    kLauncher,  // the pid of a process from which ranks descend, or the launcher's id of a job
  };
  Kind kind = Kind::kPlace;
  std::vector<std::string> names;
  std::filesystem::path under, session;
  std::vector<Living> living;

  [[nodiscard]] std::string what() const { return names.size() == 1 ? names.front() : ""; }
  [[nodiscard]] bool NamesRank(const Living* one) const {
    return std::ranges::any_of(names, [one](const std::string& name) { return Is(one, name); });
  }
  [[nodiscard]] bool Means(const Living* one) const {
    if (kind == Kind::kSession) return one->ties.directory == session;
    if (kind == Kind::kRanks) return NamesRank(one);
    if (kind == Kind::kPlace) return true;
    const auto pid = WholeNumber(what());
    return (pid && DescendsFrom(one->pid, *pid)) || LaunchedAs(one->ties.who, what());
  }
};

Result<Target> ReadTarget(const std::vector<std::string>& names) {
  Target target{.names = names};
  std::error_code missing;
  const bool place = names.size() == 1 && !names.front().empty() && std::filesystem::exists(names.front(), missing);
  target.under = place ? std::filesystem::path(names.front()) : DefaultJournalDirectory();
  AMEM_ASSIGN(target.living, LivingUnder(target.under));
  if (const auto session = place ? SessionNamed(names.front(), target.living) : std::nullopt) {
    target.kind = Target::Kind::kSession;
    target.session = *session;
    target.under = session->parent_path();
    AMEM_ASSIGN(target.living, LivingUnder(target.under));
  }
  NoteLaunches(target.living);
  if (place) return target;
  if (std::ranges::any_of(target.living, [&target](const Living& one) { return target.NamesRank(&one); }))
    target.kind = Target::Kind::kRanks;
  else if (!target.what().empty())
    target.kind = Target::Kind::kLauncher;
  return target;
}

// Who is in two jobs would be asked twice, and who is in none would keep its job waiting.
Status CheckEachHasOneJob(const std::vector<JobOfLiving>& jobs, const std::vector<Living>& living) {
  std::set<const Living*> members;
  std::size_t places = 0;
  for (const JobOfLiving& job : jobs) {
    members.insert(job.begin(), job.end());
    places += job.size();
  }
  AMEM_CHECK(places == members.size());
  AMEM_CHECK(members.size() == living.size());
  return Status::Ok();
}

// Several names are all pids of ranks that live.
Status CheckNames(const Target& target, const std::vector<JobOfLiving>& there) {
  for (const std::string& name : target.names)
    if (std::ranges::none_of(target.living, [&name](const Living& one) { return Is(&one, name); }))
      return {Code::kNotFound,
              fmt::format("{} is the pid of no living rank, and nobody was asked; these live:{}", name, ListOf(there))};
  return Status::Ok();
}

// One number may be the pid of a rank and what a launcher calls another job, as Slurm's ids are numbers: then nobody knows
// which of the two somebody meant who was given it.
Status CheckIsNoIdOfAnother(const std::vector<JobOfLiving>& meant, const Target& target,
                            const std::vector<JobOfLiving>& there) {
  const auto launched_so = [&target](const JobOfLiving& job) {
    return std::ranges::any_of(job, [&target](const Living* one) { return LaunchedAs(one->ties.who, target.what()); });
  };
  if (target.kind != Target::Kind::kRanks || std::ranges::any_of(meant, launched_so)) return Status::Ok();
  std::vector<JobOfLiving> both = meant;
  std::ranges::copy_if(there, std::back_inserter(both), launched_so);
  if (both.size() == meant.size()) return Status::Ok();
  return {Code::kRefused,
          fmt::format("{} is the pid of a rank, and what a launcher calls another job; name one of the two by the pid of its "
                      "launcher, of another of its ranks, or by the directory of a rank's journal:{}",
                      target.what(), ListOf(both))};
}

Status CheckIsOne(const std::vector<JobOfLiving>& meant, const Target& target, const std::vector<JobOfLiving>& there) {
  if (meant.empty())
    return {Code::kNotFound, fmt::format("{} is no rank or launcher of a living job, no directory of journals, and no "
                                         "launcher's id of a job; these live:{}",
                                         target.what(), ListOf(there))};
  if (meant.size() == 1) return Status::Ok();
  return {Code::kRefused, fmt::format("there are {} living jobs, of which nothing says that they belong together; name one by "
                                      "a pid, or all that are meant: {}{}",
                                      meant.size(), PidsOf(meant), ListOf(meant))};
}

}  // namespace

Result<FoundJob> FindJob(const std::vector<std::string>& names, Ties ties) {
  AMEM_ASSIGN(const Target target, ReadTarget(names));
  const std::vector<JobOfLiving> there = JobsOf(target.living, ties);
  AMEM_TRY(CheckEachHasOneJob(there, target.living));
  const bool several = names.size() > 1;  // which are meant, with what is certainly of one job with them
  if (several) AMEM_TRY(CheckNames(target, there));
  std::vector<JobOfLiving> meant = there;
  std::erase_if(meant, [&target](const JobOfLiving& job) {
    return std::ranges::none_of(job, [&target](const Living* one) { return target.Means(one); });
  });
  if (!several) {
    AMEM_TRY(CheckIsOne(meant, target, there));
    AMEM_TRY(CheckIsNoIdOfAnother(meant, target, there));
  }
  JobOfLiving all;
  for (const JobOfLiving& job : meant) all.insert(all.end(), job.begin(), job.end());
  if (ties == Ties::kCertain) AMEM_TRY(CheckNeighbours(Chosen(all), all, target.under));
  if (ties == Ties::kCertain && !several) AMEM_TRY(CheckComplete(all, target.living));
  return Chosen(all);
}

}  // namespace amem::tool
