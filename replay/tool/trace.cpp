// trace: a job as a file for ui.perfetto.dev or chrome://tracing.
#include "replay/report/trace.h"

#include <fmt/format.h>

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
  auto file = OutputFile::Open(options.file);
  if (!file) return Complain(file.status().message());
  const Result<TraceSummary> summary = WriteTrace(journals, [&file](std::string_view text) { file->Write(text); });
  const Status written = summary ? file->Commit() : summary.status();
  if (!written) return Complain(written.message());
  for (const std::string& incomplete : summary->incomplete) Complain(incomplete);
  Summarize(file->is_standard_output(), out,
            fmt::format("{}: {}, {} slices, {} references; open it in https://ui.perfetto.dev", options.file.string(),
                        Plural(summary->sessions, "session"), Grouped(summary->slices), Grouped(summary->arrows)));
  return failed || !summary->incomplete.empty() ? kCannotRead : kFine;
}

void AddOptions(Arguments& arguments, TraceOptions& options) {
  AddDirectories(arguments, options.directories);
  arguments.Add("-o,--output", "FILE", options.file, kOutputHelp).Required();
}

}  // namespace

Command TraceCommand() {
  return {"trace", "A job as a trace for ui.perfetto.dev or chrome://tracing", "  amem-replay trace DIR -o job.trace.json\n",
          [](Arguments& arguments) { return SetUp<TraceOptions>(arguments, AddOptions, RunTrace); }, false};
}

}  // namespace amem::tool
