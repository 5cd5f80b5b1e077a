// pack: a job's journals as one file, for a bug report; with -x directories of journals from such a file.
#include "replay/job/pack.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "replay/job/names.h"
#include "replay/job/sessions.h"
#include "replay/tool/command.h"
#include "replay/tool/packing/remote.h"
#include "replay/tool/targets.h"

namespace amem::tool {
namespace {

struct PackCommandOptions {
  Targets targets;
  std::filesystem::path output;
  RemoteOptions remote;
  bool anonymous = false, extract = false;
};

// "HOST:DIR" or "HOST:", unless a file or directory here has that name.
bool IsRemote(const std::string& name) {
  std::error_code failed;
  const std::size_t colon = name.find(':');
  return colon != std::string::npos && name.find('/') >= colon && !std::filesystem::exists(name, failed);
}

struct Gathered {
  std::vector<std::filesystem::path> sessions;
  std::size_t hosts = 0;  // that sent any
};

void AddRemote(const std::vector<std::string>& hosts, const PackCommandOptions& options, ScratchDirectory& scratch,
               Gathered& gathered, bool& failed) {
  const Result<std::filesystem::path> place = scratch.Get();
  const std::vector<Fetched> fetched =
      place ? FetchAll(hosts, options.remote, *place) : std::vector(hosts.size(), Fetched{{}, place.status().message()});
  for (std::size_t i = 0; i < fetched.size(); ++i) {
    const auto tell = [&](const std::string& problem) {
      Complain(fmt::format("{}{}{}", hosts[i], hosts[i].ends_with(':') ? " " : ": ", problem));
      failed = true;
    };
    if (!fetched[i].problem.empty()) tell(fetched[i].problem);
    if (fetched[i].place.empty()) continue;
    FoundSessions found = amem::FindSessions(std::vector{fetched[i].place}, scratch);
    std::ranges::for_each(found.problems, tell);
    gathered.hosts += found.sessions.empty() ? 0 : 1;
    std::ranges::move(found.sessions, std::back_inserter(gathered.sessions));
  }
}

int RunExtract(const PackCommandOptions& options, Output& out) {
  if (options.targets.names.size() != 1) return Complain("--extract: give one pack, or - for standard input", kUsage);
  ScratchDirectory scratch;
  const std::filesystem::path given = options.targets.names.front();
  const Result<std::filesystem::path> file = given == "-" ? PackFromStandardInput(scratch) : Result(given);
  if (!file) return Complain(file.status().message());
  const std::filesystem::path usual = given == "-" ? "amem-journals" : given.filename().replace_extension();
  const std::filesystem::path directory = options.output.empty() ? usual : options.output;
  const Result<Unpacked> unpacked = Unpack(*file, directory, options.targets.force);
  if (!unpacked) return Complain(unpacked.status().message());
  for (const std::string& damage : unpacked->damage) Complain("not in it: " + damage);
  for (const auto& session : unpacked->sessions) out << session.string() << "\n";
  return unpacked->damage.empty() ? kFine : kCannotRead;
}

int RunPack(const PackCommandOptions& options, Output& out) {
  if (options.extract) return RunExtract(options, out);
  bool failed = false;
  ScratchDirectory scratch;
  Targets here = options.targets;
  const auto remote = std::stable_partition(here.names.begin(), here.names.end(), std::not_fn(IsRemote));
  const std::vector<std::string> hosts(remote, here.names.end());
  here.names.erase(remote, here.names.end());
  Gathered gathered;
  if (hosts.empty() || !here.names.empty()) gathered.sessions = FindSessions(here, failed);
  if (!hosts.empty()) AddRemote(hosts, options, scratch, gathered, failed);
  if (gathered.sessions.empty())
    return hosts.empty() ? kCannotRead : Complain("no journal came from any host; nothing was written");
  const std::filesystem::path file = options.output.empty() ? "job.amem" : options.output;
  const Result<Packed> packed = Pack(gathered.sessions, file, {.anonymous = options.anonymous});
  if (!packed) return Complain(packed.status().message());
  for (const std::string& damage : packed->damage) Complain("left out: " + damage);
  const std::string of_hosts = gathered.hosts == hosts.size()
                                   ? Plural(hosts.size(), "host")
                                   : fmt::format("{} of {}", gathered.hosts, Plural(hosts.size(), "host"));
  Summarize(packed->to_standard_output, out,
            fmt::format("{}: {}{}, {} events, {}{}", file.string(), Plural(packed->sessions, "session"),
                        hosts.empty() ? "" : " of " + of_hosts, Grouped(packed->events), FormatBytes(packed->file_bytes),
                        options.anonymous ? ", without host names, GPU ids, programs and paths" : ""));
  return failed || !packed->damage.empty() ? kCannotRead : kFine;
}

void AddOptions(Arguments& arguments, PackCommandOptions& options) {
  AddTargets(arguments, options.targets);
  arguments.Add("-o,--output", "FILE", options.output,
                "The file to write, job.amem by default, - for standard output; with -x the directory, named like the pack by "
                "default");
  arguments.Flag("--anonymous", options.anonymous, "Without host names, GPU ids, programs and paths");
  arguments.Flag("-x,--extract", options.extract, "Directories of journals from a pack");
  arguments.Add("--ssh", "COMMAND", options.remote.ssh, "What brings HOST:DIR in place of ssh; may have options");
  arguments.Add("--tool", "PATH", options.remote.tool, "amem-replay there; where it is not installed, tar is used");
  arguments.Flag("--tar", options.remote.tar, "Use tar in any case, as where amem-replay there is too old");
  arguments.Add("--timeout", "SECONDS", options.remote.limit_s, "How long each host may take; 300 by default",
                std::uint64_t{1});
}

}  // namespace

Command PackCommand() {
  return {kHandOnGroup,
          "pack",
          "Journals as one file, also of other hosts; -x: back",
          "  amem pack 4711 -o job.amem\n"
          "  amem pack hostA/journal hostB/journal -o job.amem --anonymous\n"
          "  amem pack node{1..8}: -o job.amem              over ssh; HOST:DIR where journals are elsewhere there\n"
          "  amem pack --ssh \"ssh -p 2222\" me@node1: -o - | amem why -\n"
          "  amem pack -x job.amem -o journals\n"
          "Every command reads a pack like a directory. A host that fails is named, and the others go on. ssh asks nothing "
          "(BatchMode): a key or an agent must let you in.\n",
          [](Arguments& arguments) { return SetUp<PackCommandOptions>(arguments, AddOptions, RunPack); },
          false};
}

}  // namespace amem::tool
