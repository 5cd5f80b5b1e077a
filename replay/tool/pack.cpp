// pack and unpack: a job's journals as one file, for a bug report.
#include "replay/job/pack.h"

#include <fmt/format.h>

#include "replay/job/names.h"
#include "replay/tool/command.h"
#include "replay/tool/places.h"

namespace amem::tool {
namespace {

struct PackCommandOptions {
  Directories directories;
  std::filesystem::path file;
  bool anonymous = false;
};

int RunPack(const PackCommandOptions& options, Output& out) {
  bool failed = false;
  const std::vector<std::filesystem::path> sessions = FindSessions(options.directories, failed);
  if (sessions.empty()) return kCannotRead;
  const Result<Packed> packed = Pack(sessions, options.file, {.anonymous = options.anonymous});
  if (!packed) return Complain(packed.status().message());
  for (const std::string& damage : packed->damage) Complain("left out: " + damage);
  Summarize(packed->to_standard_output, out,
            fmt::format("{}: {}, {} events, {}{}", options.file.string(), Plural(packed->sessions, "session"),
                        Grouped(packed->events), FormatBytes(packed->file_bytes),
                        options.anonymous ? ", without host names, GPU ids and paths" : ""));
  return failed || !packed->damage.empty() ? kCannotRead : kFine;
}

void AddOptions(Arguments& arguments, PackCommandOptions& options) {
  AddDirectories(arguments, options.directories);
  arguments.Add("-o,--output", "FILE", options.file, kOutputHelp).Required();
  arguments.Flag("--anonymous", options.anonymous, "Without host names, GPU ids and paths");
}

struct UnpackOptions {
  std::filesystem::path file, directory;
  bool force = false;
};

int RunUnpack(const UnpackOptions& options, Output& out) {
  ScratchDirectory scratch;
  const Result<std::filesystem::path> file = options.file == "-" ? PackFromStandardInput(scratch) : Result(options.file);
  if (!file) return Complain(file.status().message());
  const Result<Unpacked> unpacked = Unpack(*file, options.directory, options.force);
  if (!unpacked) return Complain(unpacked.status().message());
  for (const std::string& damage : unpacked->damage) Complain("not in it: " + damage);
  for (const auto& session : unpacked->sessions) out << session.string() << "\n";
  return unpacked->damage.empty() ? kFine : kCannotRead;
}

void AddOptions(Arguments& arguments, UnpackOptions& options) {
  arguments.Add("FILE", "FILE", options.file, "What `amem-replay pack` wrote; - for standard input").Required();
  arguments.Add("-o,--output", "DIR", options.directory, "Where the sessions' directories go")
      .Required()
      .Offers(Completes::kDirectories);
  arguments.Flag("--force", options.force, kForceHelp);
}

}  // namespace

Command PackCommand() {
  return {"pack", "A job's journals as one compressed file, for a bug report; every command reads it like a directory",
          "  amem-replay pack /tmp/amem-1000/journal -o job.amem\n"
          "  amem-replay pack hostA/journal hostB/journal -o job.amem --anonymous\n"
          "  amem-replay why job.amem\n",
          [](Arguments& arguments) { return SetUp<PackCommandOptions>(arguments, AddOptions, RunPack); }, false};
}

Command UnpackCommand() {
  return {"unpack", "Directories of journals from a packed file", "  amem-replay unpack job.amem -o journals\n",
          [](Arguments& arguments) { return SetUp<UnpackOptions>(arguments, AddOptions, RunUnpack); }, false};
}

}  // namespace amem::tool
