// trace: a job as a file for ui.perfetto.dev or chrome://tracing.
#include "replay/report/trace.h"

#include <fstream>

#include "replay/tool/command.h"

namespace amem::tool {

int RunTrace(const TraceOptions& options, Output& out) {
  bool failed = false;
  std::vector<std::unique_ptr<JournalReader>> journals;
  for (const auto& session : FindSessions(options.directories, failed)) {
    auto reader = JournalReader::Open(session);
    if (!reader) {
      Complain(reader.status().message());
      failed = true;
      continue;
    }
    journals.push_back(*std::move(reader));
  }
  if (journals.empty()) return kCannotRead;
  std::ofstream file(options.file, std::ios::binary | std::ios::trunc);
  const Result<TraceSummary> summary = WriteTrace(
      journals, [&file](std::string_view text) { file.write(text.data(), static_cast<std::streamsize>(text.size())); });
  file.close();
  if (!summary || !file) {
    Complain(summary ? "write " + options.file.string() + ": it failed; is the disk full, the directory there?"
                     : summary.status().message());
    return kCannotRead;
  }
  out << options.file.string() << ": " << Grouped(summary->sessions) << (summary->sessions == 1 ? " session, " : " sessions, ")
      << Grouped(summary->slices) << " slices, " << Grouped(summary->arrows)
      << " references; open it in https://ui.perfetto.dev\n";
  return failed ? kCannotRead : kFine;
}

}  // namespace amem::tool
