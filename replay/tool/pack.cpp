// pack: a job's journals as one file, for a bug report; with -x directories of journals from such a file.
#include "replay/job/pack.h"

#include <fmt/format.h>

#include <algorithm>

#include "replay/job/names.h"
#include "replay/job/sessions.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

namespace fs = std::filesystem;

struct PackCommandOptions {
  Targets targets;
  fs::path output;
  bool anonymous = false, extract = false;
};

// "HOST:DIR" or "HOST:", as of a version that fetched journals itself, unless a file or directory here has that name.
bool IsOfAnotherHost(const std::string& name) {
  std::error_code failed;
  const std::size_t colon = name.find(':');
  return colon != std::string::npos && name.find('/') >= colon && !fs::exists(name, failed);
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
  const auto& names = options.targets.names;
  if (const auto other = std::ranges::find_if(names, IsOfAnotherHost); other != names.end()) {
    return Complain(
        fmt::format("{} is no file or directory here; of another host: `ssh {} amem pack -o - > {}.amem`, and all such "
                    "files together: `amem why *.amem`",
                    *other, other->substr(0, other->find(':')), other->substr(0, other->find(':'))),
        kUsage);
  }
  const std::vector<fs::path> sessions = FindSessions(options.targets);
  if (sessions.empty()) return kCannotRead;
  const fs::path file = options.output.empty() ? "job.amem" : options.output;
  const Result<Packed> packed = Pack(sessions, file, {.anonymous = options.anonymous});
  if (!packed) return Complain(packed.status().message());
  for (const std::string& damage : packed->damage) Complain("left out: " + damage);
  const std::string line = fmt::format("{}: {}, {} events, {}{}", file.string(), Plural(packed->sessions, "session"),
                                       Grouped(packed->events), FormatBytes(packed->file_bytes),
                                       options.anonymous ? ", without host names, GPU ids, programs and paths" : "");
  packed->to_standard_output ? Note(line) : static_cast<void>(out << line << "\n");
  return ReadAll();
}

void AddOptions(Arguments& arguments, PackCommandOptions& options) {
  arguments.Add("-o,--output", "FILE", options.output,
                "The file to write, job.amem by default, - for standard output; with -x the directory, named like the pack by "
                "default");
  arguments.Flag("--anonymous", options.anonymous,
                 "Leave out names of hosts, GPUs, programs, threads and jobs, and folders of paths");
  arguments.Flag("-x,--extract", options.extract, "Directories of journals from a pack");
}

}  // namespace

Command PackCommand() {
  return WithOptions<PackCommandOptions>(
      {kHandOnGroup, "pack", "Journals as one file; -x: back",
       "  amem pack 4711 -o job.amem\n"
       "  amem pack hostA/journal hostB/journal -o job.amem --anonymous\n"
       "  ssh node1 amem pack -o - > node1.amem          of another host; then amem why node1.amem node2.amem\n"
       "  ssh node1 amem pack -o - | amem why -\n"
       "  amem pack -x job.amem -o journals\n"
       "Every command reads a pack like a directory. The file is readable for you alone.\n",
       false},
      AddOptions, RunPack);
}

}  // namespace amem::tool
