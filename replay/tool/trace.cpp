// report --perfetto: a job as a file for ui.perfetto.dev or chrome://tracing.
#include "replay/report/trace.h"

#include <fmt/format.h>

#include <optional>

#include "replay/job/names.h"
#include "replay/tool/command.h"
#include "replay/tool/position.h"

namespace amem::tool {
namespace {

// What a position is in the trace; empty text is none, which is fine. False: it is complained about.
bool UnderstandTime(const char* option, const std::string& text, std::span<const std::unique_ptr<JournalReader>> journals,
                    std::optional<TraceTime>& time) {
  if (text.empty()) return true;
  const Result<Position> position = UnderstandPosition(option, text);
  if (position && !position->seq) {
    time = TraceTime{static_cast<std::int64_t>(position->ns), position->wall};
    return true;
  }
  const Result<JournalReader*> journal = position ? JournalOf(*position, journals) : position.status();
  const Result<std::uint64_t> wall_ns = journal ? WallTimeOf(*position->seq, **journal) : journal.status();
  if (wall_ns) time = TraceTime{static_cast<std::int64_t>(*wall_ns), true};
  if (!wall_ns) Complain(wall_ns.status().message(), kUsage);
  return wall_ns.ok();
}

int DrawTrace(const std::vector<std::unique_ptr<JournalReader>>& journals, const TraceOptions& options,
              const TraceWindow& window, bool failed, Output& out) {
  auto file = OutputFile::Open(options.file);
  if (!file) return Complain(file.status().message());
  const Result<TraceSummary> summary = WriteTrace(
      journals, [&file](std::string_view text) { file->Write(text); }, window);
  if (!summary && summary.status().code() == Code::kInvalid) return Complain("report: " + summary.status().message(), kUsage);
  const Status written = summary ? file->Commit() : summary.status();
  if (!written) return Complain(written.message());
  for (const std::string& incomplete : summary->incomplete) Complain(incomplete);
  Summarize(file->is_standard_output(), out,
            fmt::format("{}: {}, {} slices, {} references; open it in https://ui.perfetto.dev", options.file.string(),
                        Plural(summary->sessions, "session"), Grouped(summary->slices), Grouped(summary->arrows)));
  if (summary->events == 0 && (window.from || window.to))
    Complain(fmt::format("no event lies in that time; the job's events are from 0 to {} s after its first",
                         static_cast<double>(summary->duration_ns) / 1e9));
  return failed || !summary->incomplete.empty() ? kCannotRead : kFine;
}

}  // namespace

int RunTrace(const TraceOptions& options, Output& out) {
  bool failed = false;
  TraceWindow window;
  const std::vector<std::unique_ptr<JournalReader>> journals = OpenJournals(options.targets, failed);
  const bool understood =
      UnderstandTime("--from", options.from, journals, window.from) && UnderstandTime("--to", options.to, journals, window.to);
  if (!understood) return kUsage;
  return journals.empty() ? kCannotRead : DrawTrace(journals, options, window, failed, out);
}

}  // namespace amem::tool
