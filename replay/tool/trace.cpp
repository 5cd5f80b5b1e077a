// trace: a job as a file for ui.perfetto.dev or chrome://tracing.
#include "replay/report/trace.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cctype>
#include <charconv>
#include <cmath>
#include <ctime>
#include <optional>

#include "replay/job/names.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

struct TraceOptions {
  Directories directories;
  std::filesystem::path file;
  std::string from, to;  // as given; empty: the beginning or the end
};

constexpr const char* kTimeHelp =
    "as seconds after the job's first event (12.5), or as a time of the wall clock (2025-11-21 07:34:01.203 UTC)";

// "2025-11-21 07:34:01.203 UTC" as log and why print it; the fraction and "UTC" may be left out.
std::optional<std::int64_t> WallClock(const std::string& text) {
  std::tm date{};
  const char* rest = nullptr;
  for (const char* format : {"%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S"}) {
    if (rest == nullptr) rest = strptime(text.c_str(), format, &date);
  }
  if (rest == nullptr) return std::nullopt;
  std::int64_t fraction_ns = 0;
  if (*rest == '.') {
    for (std::int64_t unit = 100'000'000; std::isdigit(static_cast<unsigned char>(*++rest)) != 0; unit /= 10)
      fraction_ns += unit * (*rest - '0');
  }
  const std::string_view zone(rest);
  if (!zone.empty() && zone != " UTC" && zone != "Z") return std::nullopt;
  return static_cast<std::int64_t>(timegm(&date)) * 1'000'000'000 + fraction_ns;
}

std::optional<std::int64_t> Seconds(const std::string& text) {
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || !(seconds >= 0 && seconds < 9e9)) return std::nullopt;
  return static_cast<std::int64_t>(std::llround(seconds * 1e9));
}

// Empty text is no time, which is fine.
bool ParseTime(const char* option, const std::string& text, std::optional<TraceTime>& time) {
  if (text.empty()) return true;
  if (const auto ns = Seconds(text)) {
    time = TraceTime{*ns, false};
  } else if (const auto wall_ns = WallClock(text)) {
    time = TraceTime{*wall_ns, true};
  } else {
    Complain(fmt::format("{}: \"{}\" is no time; give it {}", option, text, kTimeHelp), kUsage);
    return false;
  }
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
  if (!ParseTime("--from", options.from, window.from) || !ParseTime("--to", options.to, window.to)) return kUsage;
  bool failed = false;
  const std::vector<std::unique_ptr<JournalReader>> journals = OpenJournals(options.directories, failed);
  return journals.empty() ? kCannotRead : DrawTrace(journals, options, window, failed, out);
}

void AddOptions(CLI::App& app, TraceOptions& options) {
  AddDirectories(app, options.directories);
  app.add_option("-o,--output", options.file, kOutputHelp)->type_name("FILE")->required();
  app.add_option("--from", options.from, std::string("Only from this time on, ") + kTimeHelp)->type_name("TIME");
  app.add_option("--to", options.to, "Only up to this time, likewise; what is under way then is drawn up to it")
      ->type_name("TIME");
}

}  // namespace

Command TraceCommand() {
  return {"trace", "A job as a trace for ui.perfetto.dev or chrome://tracing",
          "  amem-replay trace DIR -o job.trace.json\n"
          "  amem-replay trace DIR -o job.trace.json --from 12.5 --to 13\n"
          "  amem-replay trace DIR -o job.trace.json --from '2025-11-21 07:34:01.203 UTC'\n",
          [](CLI::App& app) { return SetUp<TraceOptions>(app, AddOptions, RunTrace); }};
}

}  // namespace amem::tool
