// trace: a job as a file for ui.perfetto.dev or chrome://tracing.
#include "replay/report/trace.h"

#include <fmt/format.h>

#include <optional>

#include "journal/base/clock.h"
#include "replay/job/names.h"
#include "replay/tool/command.h"
#include "replay/tool/events/moment.h"

namespace amem::tool {
namespace {

struct TraceOptions {
  Directories directories;
  std::filesystem::path file;
  std::string from, to;  // as given; empty: the beginning or the end
};

// Empty text is no time, which is fine.
bool UnderstandTime(const char* option, const std::string& text, std::optional<TraceTime>& time) {
  if (text.empty()) return true;
  const std::optional<GivenTime> given = ParseTime(text, RealtimeNs());
  if (!given) {
    Complain(fmt::format("{}: \"{}\" is not a time; {}", option, text, kTimesKnown), kUsage);
    return false;
  }
  time = TraceTime{static_cast<std::int64_t>(given->ns), given->wall};
  return true;
}

int DrawTrace(const std::vector<std::unique_ptr<JournalReader>>& journals, const TraceOptions& options,
              const TraceWindow& window, bool failed, Output& out) {
  auto file = OutputFile::Open(options.file);
  if (!file) return Complain(file.status().message());
  const Result<TraceSummary> summary = WriteTrace(
      journals, [&file](std::string_view text) { file->Write(text); }, window);
  if (!summary && summary.status().code() == Code::kInvalid) return Complain("trace: " + summary.status().message(), kUsage);
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

int RunTrace(const TraceOptions& options, Output& out) {
  TraceWindow window;
  if (!UnderstandTime("--from", options.from, window.from) || !UnderstandTime("--to", options.to, window.to)) return kUsage;
  bool failed = false;
  const std::vector<std::unique_ptr<JournalReader>> journals = OpenJournals(options.directories, failed);
  return journals.empty() ? kCannotRead : DrawTrace(journals, options, window, failed, out);
}

void AddOptions(Arguments& arguments, TraceOptions& options) {
  AddDirectories(arguments, options.directories);
  arguments.Add("-o,--output", "FILE", options.file, kOutputHelp).Required();
  arguments.Add("--from", "TIME", options.from,
                "Only from this time on: seconds after the job's first event, a date and time, or \"5 min ago\"");
  arguments.Add("--to", "TIME", options.to, "Only up to this time, likewise; what is under way then is drawn up to it");
}

}  // namespace

Command TraceCommand() {
  return {"trace", "A job as a trace for ui.perfetto.dev or chrome://tracing",
          "  amem-replay trace DIR -o job.trace.json\n"
          "  amem-replay trace DIR -o job.trace.json --from 12.5 --to 13\n"
          "  amem-replay trace DIR -o job.trace.json --from '2025-11-21 07:34:01.203 UTC'\n",
          [](Arguments& arguments) { return SetUp<TraceOptions>(arguments, AddOptions, RunTrace); }, false};
}

}  // namespace amem::tool
