// pack and unpack: a job's journals as one file, for a bug report.
#include "replay/job/pack.h"

#include "replay/tool/command.h"

namespace amem::tool {

int RunPack(const PackCommandOptions& options, Output& out) {
  bool failed = false;
  const std::vector<std::filesystem::path> sessions = FindSessions(options.directories, failed);
  if (sessions.empty()) return kCannotRead;
  const Result<Packed> packed = Pack(sessions, options.file, {.anonymous = options.anonymous});
  if (!packed) {
    Complain(packed.status().message());
    return kCannotRead;
  }
  for (const std::string& damage : packed->damage) Complain("left out: " + damage);
  out << options.file.string() << ": " << Grouped(packed->sessions) << (packed->sessions == 1 ? " session, " : " sessions, ")
      << Grouped(packed->events) << " events, " << FormatBytes(packed->file_bytes)
      << (options.anonymous ? ", without host names, GPU ids and paths" : "") << "\n";
  return failed || !packed->damage.empty() ? kCannotRead : kFine;
}

int RunUnpack(const UnpackOptions& options, Output& out) {
  const Result<Unpacked> unpacked = Unpack(options.file, options.directory);
  if (!unpacked) {
    Complain(unpacked.status().message());
    return kCannotRead;
  }
  for (const std::string& damage : unpacked->damage) Complain("not in it: " + damage);
  for (const auto& session : unpacked->sessions) out << session.string() << "\n";
  return unpacked->damage.empty() ? kFine : kCannotRead;
}

}  // namespace amem::tool
