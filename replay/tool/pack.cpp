// pack: a job's journals as one file, for a bug report; with -x directories of journals from such a file.
#include "replay/job/pack.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <thread>

#include "replay/job/names.h"
#include "replay/job/sessions.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

namespace fs = std::filesystem;

// ---- the journals of other hosts, each over ssh ----------------------------------------------------------------------------

struct RemoteOptions {
  std::string ssh = "ssh";           // may have options
  std::string tool = "amem-replay";  // there
  std::uint64_t limit_s = 300;       // for each host
  bool tar = false;                  // also where the tool is
};

// What came from one host.
struct Fetched {
  std::filesystem::path place;  // a pack, or a directory that was unpacked; empty: nothing
  std::string problem;          // empty: none
};
constexpr std::size_t kHostsAtOnce = 32;
constexpr int kTimedOut = 124, kNotFound = 127;  // of timeout(1)

// As one word of a shell.
std::string ShellWord(const std::string& text) {
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

struct Ended {
  int code;                // 128 + N: by signal N
  std::string last_error;  // line on standard error
};

// Runs a command of the shell; what it prints goes to `output`, and errors beside it.
Ended Run(const std::string& command, const fs::path& output, std::uint64_t limit_s) {
  const std::string errors = output.string() + ".err";
  FILE* pipe = ::popen(fmt::format("exec timeout --foreground {} {} </dev/null >{} 2>{}", limit_s, command,
                                   ShellWord(output.string()), ShellWord(errors))
                           .c_str(),
                       "re");
  const int status = pipe == nullptr ? -1 : ::pclose(pipe);
  Ended ended{status == -1 || WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), {}};
  std::string line;
  for (std::ifstream lines(errors); std::getline(lines, line);)
    if (line.find_first_not_of(" \r") != std::string::npos) ended.last_error = line.substr(0, line.find('\r'));
  return ended;
}

// What ssh is to run there: amem-replay pack where it is installed, else tar. Either writes to standard output.
std::string RemoteCommand(const std::string& directory, const RemoteOptions& options) {
  std::string script =
      "d=" + (directory.empty() ? "\"${AMEM_JOURNAL_DIR:-/tmp/amem-$(id -u)/journal}\"" : ShellWord(directory)) +
      "\n[ -d \"$d\" ] || { echo \"there is no directory $d\" >&2; exit 3; }\n";
  if (!options.tar)
    script += "t=" + ShellWord(options.tool) + "\ncommand -v \"$t\" >/dev/null 2>&1 && exec \"$t\" pack \"$d\" -o -\n";
  return "exec sh -c " + ShellWord(script + "cd \"$d\" && exec tar -cf - .\n");  // the login's own shell may be another
}

// The name of an IPv6 address is within brackets.
std::string SshCommand(const std::string& host, const RemoteOptions& options) {
  const std::size_t bracket = host.find(']');
  const std::size_t colon = host.find(':', bracket == std::string::npos ? 0 : bracket);
  std::string name = host.substr(0, colon);
  std::erase_if(name, [](char c) { return c == '[' || c == ']'; });
  return fmt::format("{} -o BatchMode=yes -o ConnectTimeout=10 -- {} {}", options.ssh, ShellWord(name),
                     ShellWord(RemoteCommand(host.substr(colon + 1), options)));
}

std::string Problem(const Ended& ssh, const RemoteOptions& options) {
  if (ssh.code == 0) return {};
  if (ssh.code == kTimedOut) return fmt::format("gave up after {} s (--timeout)", options.limit_s);
  if (ssh.code == kNotFound) return fmt::format("{} could not be started: {}", options.ssh, ssh.last_error);
  return ssh.last_error.empty() ? fmt::format("ended with exit code {}", ssh.code) : ssh.last_error;
}

// Into `file`, with a tar's contents in a directory beside it.
Fetched Fetch(const std::string& host, const RemoteOptions& options, const fs::path& file) {
  std::string problem = Problem(Run(SshCommand(host, options), file, options.limit_s), options);
  std::error_code failed;
  if (fs::file_size(file, failed) == 0 || failed) return {{}, problem.empty() ? "sent nothing" : problem};
  if (IsPack(file)) return {file, std::move(problem)};
  const fs::path directory = file.string() + ".d";
  fs::create_directory(directory, failed);
  const Ended tar =
      Run(fmt::format("tar -xf {} -C {} --no-same-owner", ShellWord(file.string()), ShellWord(directory.string())),
          file.string() + ".out", options.limit_s);
  if (tar.code != 0 && problem.empty()) problem = "what it sent is cut short: " + tar.last_error;
  return {directory, std::move(problem)};
}

// In the order of `hosts`, each HOST:DIR, or HOST: for what is in AMEM_JOURNAL_DIR of the login there, else in
// /tmp/amem-UID/journal. Many at once, into `scratch`.
std::vector<Fetched> FetchAll(const std::vector<std::string>& hosts, const RemoteOptions& options, const fs::path& scratch) {
  std::vector<Fetched> fetched(hosts.size());
  for (std::size_t first = 0; first < hosts.size(); first += kHostsAtOnce) {
    std::vector<std::jthread> threads;
    for (std::size_t i = first; i < std::min(hosts.size(), first + kHostsAtOnce); ++i)
      threads.emplace_back([&, i] { fetched[i] = Fetch(hosts[i], options, scratch / fmt::format("host-{}", i)); });
  }
  return fetched;
}

// ---- the command -----------------------------------------------------------------------------------------------------------

struct PackCommandOptions {
  Targets targets;
  fs::path output;
  RemoteOptions remote;
  bool anonymous = false, extract = false;
};

// "HOST:DIR" or "HOST:", unless a file or directory here has that name.
bool IsRemote(const std::string& name) {
  std::error_code failed;
  const std::size_t colon = name.find(':');
  return colon != std::string::npos && name.find('/') >= colon && !fs::exists(name, failed);
}

// Adds the sessions of the hosts; returns how many sent any.
std::size_t AddRemote(const std::vector<std::string>& hosts, const PackCommandOptions& options, ScratchDirectory& scratch,
                      std::vector<fs::path>& sessions) {
  std::size_t sent = 0;
  const Result<fs::path> place = scratch.Get();
  const std::vector<Fetched> fetched =
      place ? FetchAll(hosts, options.remote, *place) : std::vector(hosts.size(), Fetched{{}, place.status().message()});
  for (std::size_t i = 0; i < fetched.size(); ++i) {
    const auto tell = [&host = hosts[i]](const std::string& problem) {
      Complain(fmt::format("{}{}{}", host, host.ends_with(':') ? " " : ": ", problem));
    };
    if (!fetched[i].problem.empty()) tell(fetched[i].problem);
    if (fetched[i].place.empty()) continue;
    FoundSessions found = amem::FindSessions(std::vector{fetched[i].place}, scratch);
    std::ranges::for_each(found.problems, tell);
    sent += found.sessions.empty() ? 0 : 1;
    std::ranges::move(found.sessions, std::back_inserter(sessions));
  }
  return sent;
}

int RunExtract(const PackCommandOptions& options, Output& out) {
  if (options.targets.names.size() != 1) return Complain("--extract: give one pack, or - for standard input", kUsage);
  ScratchDirectory scratch;
  const fs::path given = options.targets.names.front();
  const Result<fs::path> file = given == "-" ? PackFromStandardInput(scratch) : Result(given);
  if (!file) return Complain(file.status().message());
  const fs::path usual = given == "-" ? "amem-journals" : given.filename().replace_extension();
  const fs::path directory = options.output.empty() ? usual : options.output;
  const Result<Unpacked> unpacked = Unpack(*file, directory, options.targets.force);
  if (!unpacked) return Complain(unpacked.status().message());
  for (const std::string& damage : unpacked->damage) Complain("not in it: " + damage);
  for (const auto& session : unpacked->sessions) out << session.string() << "\n";
  return ReadAll();
}

int RunPack(const PackCommandOptions& options, Output& out) {
  if (options.extract) return RunExtract(options, out);
  ScratchDirectory scratch;
  Targets here = options.targets;
  const auto remote = std::stable_partition(here.names.begin(), here.names.end(), std::not_fn(IsRemote));
  const std::vector<std::string> hosts(remote, here.names.end());
  here.names.erase(remote, here.names.end());
  std::vector<fs::path> sessions;
  if (hosts.empty() || !here.names.empty()) sessions = FindSessions(here);
  const std::size_t sent = hosts.empty() ? 0 : AddRemote(hosts, options, scratch, sessions);
  if (sessions.empty()) return hosts.empty() ? kCannotRead : Complain("no journal came from any host; nothing was written");
  const fs::path file = options.output.empty() ? "job.amem" : options.output;
  const Result<Packed> packed = Pack(sessions, file, {.anonymous = options.anonymous});
  if (!packed) return Complain(packed.status().message());
  for (const std::string& damage : packed->damage) Complain("left out: " + damage);
  const std::string of_hosts =
      sent == hosts.size() ? Plural(hosts.size(), "host") : fmt::format("{} of {}", sent, Plural(hosts.size(), "host"));
  const std::string line =
      fmt::format("{}: {}{}, {} events, {}{}", file.string(), Plural(packed->sessions, "session"),
                  hosts.empty() ? "" : " of " + of_hosts, Grouped(packed->events), FormatBytes(packed->file_bytes),
                  options.anonymous ? ", without host names, GPU ids, programs and paths" : "");
  packed->to_standard_output ? Note(line) : static_cast<void>(out << line << "\n");
  return ReadAll();
}

void AddOptions(Arguments& arguments, PackCommandOptions& options) {
  arguments.Add("-o,--output", "FILE", options.output,
                "The file to write, job.amem by default, - for standard output; with -x the directory, named like the pack by "
                "default");
  arguments.Flag("--anonymous", options.anonymous, "Without host names, GPU ids, programs and paths");
  arguments.Flag("-x,--extract", options.extract, "Directories of journals from a pack");
  arguments.Add("--ssh", "COMMAND", options.remote.ssh, "What brings HOST:DIR in place of ssh; may have options");
  arguments.Add("--tool", "PATH", options.remote.tool, "amem-replay there; where it is not installed, tar is used");
  arguments.Flag("--tar", options.remote.tar, "Use tar in any case, as where amem-replay there is too old");
  arguments.Add("--timeout", "SECONDS", options.remote.limit_s, "How long each host may take; 300 by default", 1);
}

}  // namespace

Command PackCommand() {
  return WithOptions<PackCommandOptions>(
      {kHandOnGroup, "pack", "Journals as one file, also of other hosts; -x: back",
       "  amem pack 4711 -o job.amem\n"
       "  amem pack hostA/journal hostB/journal -o job.amem --anonymous\n"
       "  amem pack node{1..8}: -o job.amem              over ssh; HOST:DIR where journals are elsewhere there\n"
       "  amem pack --ssh \"ssh -p 2222\" me@node1: -o - | amem why -\n"
       "  amem pack -x job.amem -o journals\n"
       "Every command reads a pack like a directory. A host that fails is named, and the others go on. ssh asks nothing "
       "(BatchMode): a key or an agent must let you in.\n",
       false},
      AddOptions, RunPack);
}

}  // namespace amem::tool
