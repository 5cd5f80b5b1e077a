#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <thread>

#include "journal/base/file.h"
#include "journal/base/process_sight.h"
#include "journal/session_dir.h"
#include "journal/tail.h"
#include "replay/job/pack.h"
#include "replay/job/sessions.h"
#include "replay/tool/command.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {
namespace {

namespace fs = std::filesystem;

// The sessions of a process: those that live, else the newest.
std::vector<fs::path> OfProcess(std::uint64_t pid, const std::vector<fs::path>& sessions) {
  std::vector<fs::path> live, ended;
  for (const fs::path& session : sessions) {
    const Result<Opening> opening = OpeningOf(session);
    if (!opening || static_cast<std::uint64_t>(opening->who.pid) != pid) continue;
    (opening->info.status == SessionStatus::kLive ? live : ended).push_back(session);
  }
  if (live.empty() && !ended.empty()) live.push_back(ended.front());
  return live;
}

// The sessions of each job of which `matches` is true for one; of the latest alone, or of all such jobs.
template <class Matches>
std::vector<fs::path> OfJobs(std::span<const JobTies> ties, bool latest, const Matches& matches) {
  std::vector<fs::path> found;
  for (const auto& job : GroupIntoJobs(ties)) {
    if (std::ranges::none_of(job, [&](std::size_t i) { return matches(ties[i]); })) continue;
    for (const std::size_t i : job) found.push_back(ties[i].directory);
    if (latest) break;
  }
  return found;
}

constexpr std::size_t kLeast = 4;  // letters of a session's id

// The only session whose id begins so.
std::vector<fs::path> BeginningWith(const std::string& name, const std::vector<fs::path>& sessions) {
  std::vector<fs::path> found;
  for (const fs::path& session : sessions)
    if (name.size() >= kLeast && session.filename().string().starts_with(name)) found.push_back(session);
  return found.size() == 1 ? found : std::vector<fs::path>();
}

// Of the journals of this user: the job of a process or of a launcher, or one session.
std::vector<fs::path> SessionsNamed(const std::string& name, bool one_process) {
  const fs::path home[] = {DefaultJournalDirectory()};
  std::vector<fs::path> sessions = FindPlaces(home).sessions;
  std::erase_if(sessions, [](const fs::path& place) { return IsPack(place); });
  for (const fs::path& session : sessions)
    if (session.filename() == name) return {session};
  const std::optional<std::uint64_t> pid = WholeNumber(name);
  if (pid && one_process) {
    std::vector<fs::path> of_process = OfProcess(*pid, sessions);
    if (!of_process.empty()) return of_process;
  }
  std::vector<fs::path> unreadable;
  const std::vector<JobTies> ties = ReadTies(sessions, unreadable);
  std::vector<fs::path> found =
      OfJobs(ties, true, [&](const JobTies& one) { return pid && static_cast<std::uint64_t>(one.who.pid) == *pid; });
  if (!found.empty()) return found;
  found = OfJobs(ties, false, [&](const JobTies& one) {
    return LaunchedAs(one.who, name) || (pid && one.live && DescendsFrom(ProcessOfWriter(one.directory / "tail"), *pid));
  });
  return !found.empty() ? found : BeginningWith(name, sessions);
}

// Where the targets are, as FindSessions of replay/job takes it: what is on standard input is a file in `scratch`, and a pid, a
// job or a session's id the directories of its sessions. What is none of these is complained about.
std::vector<fs::path> PlacesOf(const Targets& targets, ScratchDirectory& scratch) {
  if (targets.names.empty()) return {DefaultJournalDirectory()};
  std::vector<fs::path> places;
  for (const std::string& name : targets.names) {
    std::error_code ignored;
    if (name == "-") {
      const Result<fs::path> file = PackFromStandardInput(scratch);
      if (Went(file.status())) places.push_back(*file);
    } else if (name.find('/') != std::string::npos || fs::exists(name, ignored)) {
      places.emplace_back(name);
    } else if (const std::vector<fs::path> sessions = SessionsNamed(name, targets.one_process); !sessions.empty()) {
      places.insert(places.end(), sessions.begin(), sessions.end());
    } else {
      const char* const nothing =
          !WholeNumber(name) ? "{} is no file or directory here, and no job or session of {}; `amem ls` lists what is there"
          : Variable("AMEM_JOURNAL_DIR") != nullptr
              ? "process {} has no journal in {}, which AMEM_JOURNAL_DIR names, and is no launcher's id of a job: set "
                "it as for that process, or give the directory; `amem ls` lists what is there"
              : "process {} has no journal in {}, and is no launcher's id of a job: set AMEM_JOURNAL_DIR as for that "
                "process, or give the directory; `amem ls` lists what is there";
      Complain(fmt::format(fmt::runtime(nothing), name, DefaultJournalDirectory().string()));
    }
  }
  return places;
}

// The sessions of those ranks; complains where there is none.
std::vector<fs::path> OfRanks(std::vector<fs::path> sessions, const std::vector<std::string>& ranks) {
  const bool any = !sessions.empty();
  std::vector<fs::path> named;
  for (const std::string& rank : ranks)
    if (!WholeNumber(rank) || SessionOfName(rank)) std::ranges::copy(BeginningWith(rank, sessions), std::back_inserter(named));
  std::erase_if(sessions, [&](const fs::path& session) {
    if (std::ranges::find(named, session) != named.end()) return false;
    const Result<Opening> opening = OpeningOf(session);
    return opening.ok() && std::ranges::find(ranks, std::to_string(opening->who.rank)) == ranks.end();
  });
  if (any && sessions.empty()) Complain("--rank: no session here has such a rank; `amem ls` lists them");
  return sessions;
}

// What packs may cost.
constexpr Bytes kMemory = Bytes{256} << 20;
constexpr auto kTime = std::chrono::seconds(10);
constexpr auto kMeasureEvery = std::chrono::milliseconds(10);
#ifdef AMEM_SANITIZED
constexpr Bytes kMore = 8;  // what a sanitizer takes besides
#else
constexpr Bytes kMore = 1;
#endif

Bytes MemoryNow() {
  const std::string statm = FirstLineOf("/proc/self/statm");  // all, what is resident, ...; in pages
  const std::size_t resident_at = statm.find(' ');
  const Bytes resident = resident_at == std::string::npos ? 0 : std::strtoull(statm.c_str() + resident_at, nullptr, 10);
  return resident * static_cast<Bytes>(::getpagesize());
}

// Of all threads. A reader that takes its time, as a person in a pager does, costs none.
std::chrono::nanoseconds ProcessorTime() {
  timespec taken{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &taken);
  return std::chrono::seconds(taken.tv_sec) + std::chrono::nanoseconds(taken.tv_nsec);
}

// From now on the process ends, with a message and kCannotRead, when it takes more than 256 MiB of memory or 10 s of processor
// time, each for every megabyte of the packs among `places`: a pack of a megabyte can hold journals that take hours to fold or
// gigabytes to draw, by accident or because somebody made it so. Without a pack nothing is watched. `scratch` is removed then,
// too.
void LimitWhatIsRead(std::span<const std::filesystem::path> places, ScratchDirectory& scratch) {
  Bytes packs = 0;
  for (const auto& place : places) {
    std::error_code failed;
    if (IsPack(place)) packs += std::filesystem::file_size(place, failed);
  }
  if (packs == 0) return;
  const Bytes times = kMore * (1 + packs / 1'000'000);
  const Result<std::filesystem::path> unpacked = scratch.Get();
  // A quarter is left for what is allocated between two measurements.
  std::thread([memory = times * kMemory / 4 * 3, time = static_cast<std::int64_t>(times) * kTime,
               directory = unpacked ? *unpacked : std::filesystem::path()] {
    const auto end = ProcessorTime() + time;
    for (;; std::this_thread::sleep_for(kMeasureEvery)) {
      const bool too_long = ProcessorTime() >= end;
      if (!too_long && MemoryNow() <= memory) continue;
      const std::string taken = too_long ? fmt::format("after {} s of processor time", time.count())
                                         : fmt::format("with {} of memory taken", FormatBytes(MemoryNow()));
      Complain(fmt::format("stopped {}, which is more than a pack of this size should {}; use --force if you trust its source",
                           taken, too_long ? "take" : "need"));
      // exec ends all other threads. One that unpacks could make the directory anew after it was removed.
      if (!directory.empty())
        ::execl("/bin/sh", "sh", "-c", "/bin/rm -rf -- \"$1\"; exit \"$2\"", "sh", directory.c_str(),
                std::to_string(static_cast<int>(kCannotRead)).c_str(), nullptr);
      ScratchDirectory::Remove(directory);
      ::_exit(kCannotRead);
    }
  }).detach();
}

}  // namespace

void AddTargets(Arguments& arguments, Targets& targets) {
  arguments.Add("TARGET", "TARGET", targets.names,
                "Directories of sessions, directories that hold several, parents of those, or packs (- is one on standard "
                "input); a pid, a "
                "launcher's id of a job or a session of this user; default: AMEM_JOURNAL_DIR, else /tmp/amem-UID/journal");
  const auto take = [&targets](const std::vector<std::string>& given) -> std::string {
    targets.ranks = Split(fmt::format("{}", fmt::join(given, ",")), ',');  // "0,3" and "0" "3" are the same
    for (const std::string& word : targets.ranks)
      if (!WholeNumber(word) && (word.size() < kLeast || word.find_first_not_of("0123456789abcdef") != word.npos))
        return fmt::format("--rank: \"{}\" is not a rank; give numbers, as in --rank 2 or --rank 0,3", word);
    return {};
  };
  arguments
      .Take("--rank", "RANK",
            "Only the sessions of these ranks, as in 2 or 0,3; a session's id, or how one begins, for one that has no rank",
            take)
      .several = true;
  arguments.Flag("--force", targets.force,
                 "Read packs however much they unpack to, and take as much memory and time as it needs");
}

static std::string Quoted(const std::string& word) {
  constexpr std::string_view kPlain = "-_./:,=@%+#";
  const bool plain = std::ranges::all_of(
      word, [&](unsigned char c) { return std::isalnum(c) != 0 || kPlain.find(static_cast<char>(c)) != kPlain.npos; });
  if (plain && !word.empty() && !word.starts_with('#')) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string CommandOn(const char* command, const Targets& targets, const std::string& options) {
  if (std::ranges::find(targets.names, "-") != targets.names.end()) return {};
  std::string line = fmt::format("{} {}", program_name, command);
  for (const std::string& name : targets.names) line += " " + Quoted(name);
  if (!targets.ranks.empty()) line += fmt::format(" --rank {}", fmt::join(targets.ranks, ","));
  if (targets.force) line += " --force";
  return line + (options.empty() ? "" : " ") + options;
}

std::vector<std::filesystem::path> FindSessions(const Targets& targets, std::vector<std::string>* unread) {
  static ScratchDirectory unpacked;  // removed when the tool ends
  const std::vector<std::filesystem::path> places = PlacesOf(targets, unpacked);
  if (!targets.force) LimitWhatIsRead(FindPlaces(places).sessions, unpacked);
  FoundSessions found = amem::FindSessions(places, unpacked, targets.force);
  const char* const hint = !targets.names.empty()                    ? ""
                           : Variable("AMEM_JOURNAL_DIR") != nullptr ? " (AMEM_JOURNAL_DIR names it)"
                                                                     : " (the default; give a TARGET, or set AMEM_JOURNAL_DIR)";
  for (const std::string& damage : found.damage) Complain(damage);
  for (const std::string& problem : found.problems) Complain(problem + hint);
  if (unread != nullptr) *unread = std::move(found.problems);
  if (!targets.ranks.empty()) found.sessions = OfRanks(std::move(found.sessions), targets.ranks);
  Bytes on_disk = 0;  // what cannot be looked at counts as nothing
  for (const auto& session : found.sessions) {
    struct stat data {};
    if (::stat((session / "data.mdb").c_str(), &data) == 0) on_disk += static_cast<Bytes>(data.st_blocks) * 512;
  }
  Progress::Begin(found.sessions.size(), on_disk);
  return std::move(found.sessions);
}

JobSelection SelectSessions(const Targets& targets, bool all, std::vector<std::string>* unread) {
  std::vector<std::filesystem::path> sessions = FindSessions(targets, unread);
  return all ? JobSelection{.latest = std::move(sessions), .earlier = {}} : SelectLatestJob(sessions);
}

std::vector<std::unique_ptr<JournalReader>> OpenJournals(const Targets& targets) {
  std::vector<std::unique_ptr<JournalReader>> journals;
  for (const auto& session : FindSessions(targets)) {
    Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(session);
    if (Went(reader.status())) journals.push_back(*std::move(reader));
  }
  return journals;
}

static Status CopyStandardInput(const fs::path& file) {
  constexpr Bytes kMost = Bytes{4} << 30;
  AMEM_ASSIGN(const auto to, File::Open(file, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW));
  std::vector<char> buffer(std::size_t{1} << 16);
  for (Bytes copied = 0; copied <= kMost;) {
    const ssize_t n = ::read(STDIN_FILENO, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return {Code::kIo, ErrnoText(errno)};
    if (n == 0) return copied != 0 ? Status{} : Status{Code::kInvalid, "it is empty: what was to write it has failed"};
    AMEM_TRY(to.Write({buffer.data(), static_cast<std::size_t>(n)}));
    copied += static_cast<Bytes>(n);
  }
  return {Code::kRefused, fmt::format("it is larger than {}; give it as a file", FormatBytes(kMost))};
}

Result<std::filesystem::path> PackFromStandardInput(ScratchDirectory& scratch) {
  if (::isatty(STDIN_FILENO) != 0)
    return Status{Code::kInvalid,
                  "- is a pack on standard input, and that is a terminal: pipe one in, as in `ssh HOST amem-replay pack -o - | "
                  "amem why -`"};
  AMEM_ASSIGN(const auto folder, scratch.New());
  std::error_code failed;
  if (!fs::create_directory(folder, failed)) return SystemFailure("make directory", folder, failed.value());
  fs::path file = folder / kStandardInputFile;
  AMEM_TRY(CopyStandardInput(file).Within("read a pack from standard input (TMPDIR names where it goes)"));
  if (!IsPack(file)) return Status{Code::kInvalid, "what is on standard input is not what `amem pack` writes"};
  return file;
}

bool LivesNow(const JournalInfo& info) { return info.status == SessionStatus::kLive && PackedAt(info.directory) == 0; }

std::string_view StatusText(const JournalInfo& info) { return PackedAt(info.directory) != 0 ? "packed" : ToText(info.status); }

bool LaunchedAs(const SessionOpened& who, const std::string& id) {
  constexpr std::string_view kOfJob[] = {
      "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
      "LSB_JOBID",    "PBS_JOBID",           "FLUX_JOB_ID"};
  return std::ranges::any_of(who.launcher, [&](const std::string& variable) {
    return std::ranges::any_of(kOfJob, [&](std::string_view name) { return variable == fmt::format("{}={}", name, id); });
  });
}

bool DescendsFrom(std::int32_t pid, std::uint64_t ancestor) {
  constexpr int kDeepest = 64;
  for (int depth = 0; pid > 0 && depth < kDeepest; ++depth, pid = ParentOf(pid))
    if (static_cast<std::uint64_t>(pid) == ancestor) return true;
  return false;
}

}  // namespace amem::tool
