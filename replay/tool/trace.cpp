// trace: a job as a file for ui.perfetto.dev or chrome://tracing.
#include "replay/report/trace.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <fstream>

#include "replay/job/names.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

struct TraceOptions {
  Directories directories;
  std::filesystem::path file;
};

int RunTrace(const TraceOptions& options, Output& out) {
  bool failed = false;
  const std::vector<std::unique_ptr<JournalReader>> journals = OpenJournals(options.directories, failed);
  if (journals.empty()) return kCannotRead;
  std::ofstream file(options.file, std::ios::binary | std::ios::trunc);
  const Result<TraceSummary> summary = WriteTrace(
      journals, [&file](std::string_view text) { file.write(text.data(), static_cast<std::streamsize>(text.size())); });
  file.close();
  if (!summary || !file)
    return Complain(summary ? "write " + options.file.string() + ": it failed; is the disk full, the directory there?"
                            : summary.status().message());
  for (const std::string& incomplete : summary->incomplete) Complain(incomplete);
  out << fmt::format("{}: {}, {} slices, {} references; open it in https://ui.perfetto.dev\n", options.file.string(),
                     Plural(summary->sessions, "session"), Grouped(summary->slices), Grouped(summary->arrows));
  return failed || !summary->incomplete.empty() ? kCannotRead : kFine;
}

void AddOptions(CLI::App& app, TraceOptions& options) {
  AddDirectories(app, options.directories);
  app.add_option("-o,--output", options.file, "The file to write")->type_name("FILE")->required();
}

}  // namespace

Command TraceCommand() {
  return {"trace", "A job as a trace for ui.perfetto.dev or chrome://tracing", "  amem-replay trace DIR -o job.trace.json\n",
          [](CLI::App& app) { return SetUp<TraceOptions>(app, AddOptions, RunTrace); }};
}

}  // namespace amem::tool
