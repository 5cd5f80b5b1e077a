// collect: the journals of a job's hosts, in one pack.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>

#include "replay/job/names.h"
#include "replay/job/pack.h"
#include "replay/job/sessions.h"
#include "replay/tool/collect/remote.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

constexpr std::size_t kHostsAtOnce = 16;

struct CollectOptions {
  std::vector<std::string> hosts;
  std::filesystem::path file;
  std::string directory, tool = "amem-replay";
  std::uint64_t limit_s = 300;
  bool tar = false, anonymous = false;
};

// What came from one host.
struct Fetched {
  std::filesystem::path place;  // a pack, or a directory that was unpacked; empty: nothing
  std::string problem;          // empty: none
};

std::string LastLine(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' ')) text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

std::string Problem(const Finished& ran, const CollectOptions& options) {
  if (ran.timed_out) return fmt::format("gave up after {} s (--timeout)", options.limit_s);
  const std::string said = LastLine(ran.errors);
  if (ran.exit_code == 127)
    return "ssh could not be started" + (said.empty() ? ": AMEM_SSH names another program" : ": " + said);
  return said.empty() ? fmt::format("ended with exit code {}", ran.exit_code) : said;
}

// A tar's contents, in a directory beside it.
Fetched Untar(const std::filesystem::path& file, std::string problem, const CollectOptions& options) {
  const std::filesystem::path directory = file.string() + ".d";
  std::error_code failed;
  std::filesystem::create_directory(directory, failed);
  const Result<Finished> ran = RunProgram({"tar", "-xf", file.string(), "-C", directory.string(), "--no-same-owner"},
                                          file.string() + ".out", std::chrono::seconds(options.limit_s));
  if (!ran) return {{}, ran.status().message()};
  if (ran->exit_code != 0 && problem.empty()) problem = "what it sent is cut short: " + LastLine(ran->errors);
  return {directory, std::move(problem)};
}

Fetched Fetch(const std::string& given, const std::filesystem::path& file, const CollectOptions& options) {
  RemoteHost host = ParseHost(given);
  if (host.directory.empty()) host.directory = options.directory;
  if (host.name.empty() || host.name.starts_with('-')) return {{}, "is no host name"};
  // The shell takes AMEM_SSH apart, which may have options.
  const Result<Finished> ran =
      RunProgram({"sh", "-c", "exec ${AMEM_SSH:-ssh} -o BatchMode=yes -o ConnectTimeout=10 -- \"$1\" \"$2\"", "sh", host.name,
                  RemoteCommand(host, options.tool, options.tar)},
                 file, std::chrono::seconds(options.limit_s));
  if (!ran) return {{}, ran.status().message()};
  std::error_code failed;
  const bool any = std::filesystem::file_size(file, failed) != 0 && !failed;
  std::string problem = ran->exit_code == 0 && !ran->timed_out ? "" : Problem(*ran, options);
  if (!any) return {{}, problem.empty() ? "sent nothing" : problem};
  if (IsPack(file)) return {file, problem};
  return Untar(file, problem, options);
}

std::vector<Fetched> FetchAll(const CollectOptions& options, const std::filesystem::path& scratch) {
  std::vector<Fetched> fetched(options.hosts.size());
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < fetched.size(); i = next++)
      fetched[i] = Fetch(options.hosts[i], scratch / fmt::format("host-{}", i), options);
  };
  std::vector<std::jthread> threads;
  while (threads.size() < std::min(kHostsAtOnce, fetched.size())) threads.emplace_back(work);
  threads.clear();
  return fetched;
}

int RunCollect(const CollectOptions& options, Output& out) {
  bool failed = false;
  ScratchDirectory scratch;
  const Result<std::filesystem::path> place = scratch.Get();
  if (!place) return Complain(place.status().message());
  const std::vector<Fetched> fetched = FetchAll(options, *place);
  std::vector<std::filesystem::path> sessions;
  std::size_t hosts = 0;
  for (std::size_t i = 0; i < fetched.size(); ++i) {
    const auto tell = [&](const std::string& problem) {
      Complain(fmt::format("{}: {}", options.hosts[i], problem));
      failed = true;
    };
    if (!fetched[i].problem.empty()) tell(fetched[i].problem);
    if (fetched[i].place.empty()) continue;
    FoundSessions found = amem::FindSessions(std::vector{fetched[i].place}, scratch);
    std::ranges::for_each(found.problems, tell);
    hosts += found.sessions.empty() ? 0 : 1;
    std::ranges::move(found.sessions, std::back_inserter(sessions));
  }
  if (sessions.empty()) return Complain("no journal came from any host; nothing was written");
  const Result<Packed> packed = Pack(sessions, options.file, {.anonymous = options.anonymous});
  if (!packed) return Complain(packed.status().message());
  for (const std::string& damage : packed->damage) Complain("left out: " + damage);
  Summarize(packed->to_standard_output, out,
            fmt::format("{}: {} of {}, {} events, {}", options.file.string(), Plural(packed->sessions, "session"),
                        hosts == options.hosts.size() ? Plural(hosts, "host")
                                                      : fmt::format("{} of {}", hosts, Plural(options.hosts.size(), "host")),
                        Grouped(packed->events), FormatBytes(packed->file_bytes)));
  return failed || !packed->damage.empty() ? kCannotRead : kFine;
}

void AddOptions(Arguments& arguments, CollectOptions& options) {
  arguments.Add("HOST", "HOST", options.hosts, "Hosts as ssh knows them, HOST:DIR where journals are elsewhere there")
      .Required();
  arguments.Add("-o,--output", "FILE", options.file, kOutputHelp).Required();
  arguments.Add("--directory", "DIR", options.directory,
                "Where journals are there; default: AMEM_JOURNAL_DIR of the login, else /tmp/amem-UID/journal");
  arguments.Add("--tool", "PATH", options.tool, "amem-replay there; where it is not installed, tar is used");
  arguments.Flag("--tar", options.tar, "Use tar in any case, as where amem-replay there is too old");
  arguments.Add("--timeout", "SECONDS", options.limit_s, "How long each host may take; 300 by default", std::uint64_t{1});
  arguments.Flag("--anonymous", options.anonymous, "Without host names, GPU ids and paths");
}

}  // namespace

Command CollectCommand() {
  return {"collect", "The journals of many hosts over ssh, as one pack; a host that fails is named, and the others go on",
          "  amem-replay collect node1 node2 node3 -o job.amem\n"
          "  amem-replay collect node{1..8}:/data/journal -o job.amem && amem-replay why job.amem\n"
          "  AMEM_SSH=\"ssh -p 2222\" amem-replay collect me@node1 -o - | amem-replay why -\n"
          "ssh asks nothing (BatchMode): a key or an agent must let you in.\n",
          [](Arguments& arguments) { return SetUp<CollectOptions>(arguments, AddOptions, RunCollect); }, false};
}

}  // namespace amem::tool
