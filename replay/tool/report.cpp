// report: one page for a browser that works without a network: memory over time, pauses, allocations, references, events. With
// --perfetto a file for ui.perfetto.dev or chrome://tracing.
#include <fmt/format.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "journal/base/clock.h"
#include "replay/diagnosis/diagnosis.h"
#include "replay/job/names.h"
#include "replay/report/report_json.h"
#include "replay/report/trace.h"
#include "replay/tool/command.h"

namespace amem::tool {

// The page without data: replay/report/page/, put together when the tool was built (replay/report/page.cmake).
std::string_view ReportTemplate();

namespace {

struct ReportOptions {
  Targets targets;
  std::filesystem::path output;
  bool all = false;  // all sessions given, not only those of the latest job
  bool perfetto = false;
  std::vector<Position> from, to;  // with perfetto
};

// What is wrong with the journals goes to standard error. Leaves out those that could not be read.
void ComplainOf(const std::vector<std::filesystem::path>& sessions, std::vector<SessionTimeline>& timelines) {
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    if (timelines[i].info.session) {
      ComplainAboutDamage(sessions[i], timelines[i].damage);
    } else if (Went(JournalReader::Open(sessions[i]).status())) {
      Complain(sessions[i].string() + " could not be read");
    }
  }
  std::erase_if(timelines, [](const SessionTimeline& timeline) { return !timeline.info.session; });
}

// Who held a device when its memory ran out.
void AddShortages(JobTimeline& job) {
  std::map<std::size_t, std::unique_ptr<JournalReader>> readers;
  FindShortages(job, [&](std::size_t session) {
    const auto known = readers.find(session);
    if (known != readers.end()) return known->second.get();
    auto reader = JournalReader::Open(job.sessions[session].info.directory);
    return readers.emplace(session, reader ? *std::move(reader) : nullptr).first->second.get();
  });
}

// Writes the file whole, and says in a line what is in it.
Status WriteFile(const std::filesystem::path& path, Output& out, const std::function<Result<std::string>(OutputFile&)>& write) {
  AMEM_ASSIGN(auto file, OutputFile::Open(path));
  AMEM_ASSIGN(const auto what, write(file));
  AMEM_TRY(file.Commit());
  const std::string line = fmt::format("{}: {}", path.string(), what);
  file.is_standard_output() ? Note(line) : static_cast<void>(out << line << "\n");
  return {};
}

// What an option's position is in the trace; nothing: it was not given.
Result<std::optional<TraceTime>> TimeOf(const std::vector<Position>& position,
                                        std::span<const std::unique_ptr<JournalReader>> journals) {
  if (position.empty()) return std::optional<TraceTime>();
  const Position& p = position.front();
  if (!p.seq) return std::optional(TraceTime{static_cast<std::int64_t>(p.ns), p.wall});
  AMEM_ASSIGN(const auto journal, JournalOf(p, journals));
  AMEM_ASSIGN(const auto wall_ns, WallTimeOf(*p.seq, *journal));
  return std::optional(TraceTime{static_cast<std::int64_t>(wall_ns), true});
}

int RunTrace(const ReportOptions& options, const std::filesystem::path& path, Output& out) {
  const std::vector<std::unique_ptr<JournalReader>> journals = OpenJournals(options.targets);
  const Result<std::optional<TraceTime>> from = TimeOf(options.from, journals), to = TimeOf(options.to, journals);
  if (!from || !to) return Complain((from ? to : from).status().message(), kUsage);
  if (journals.empty()) return kCannotRead;
  TraceSummary summary;
  Status drawn;
  const Status written = WriteFile(path, out, [&](OutputFile& file) -> Result<std::string> {
    auto trace = WriteTrace(journals, [&file](std::string_view text) { file.Write(text); }, {*from, *to});
    drawn = trace.status();
    if (!trace) return drawn;
    summary = *std::move(trace);
    return fmt::format("{}, {} slices, {} references; open it in https://ui.perfetto.dev", Plural(summary.sessions, "session"),
                       Grouped(summary.slices), Grouped(summary.arrows));
  });
  if (drawn.code() == Code::kInvalid) return Complain("report: " + drawn.message(), kUsage);
  if (!Went(written)) return kCannotRead;
  for (const std::string& incomplete : summary.incomplete) Complain(incomplete);
  const Exit code = ReadAll();
  if (summary.events == 0 && (*from || *to))
    Complain(fmt::format("no event lies in that time; the job's events are from 0 to {} s after its first",
                         static_cast<double>(summary.duration_ns) / 1e9));
  return code;
}

int RunReport(const ReportOptions& options, Output& out) {
  const std::filesystem::path path = !options.output.empty() ? options.output
                                     : options.perfetto      ? "amem-trace.json"
                                                             : "amem-report.html";
  if (options.perfetto) return RunTrace(options, path, out);
  if (!options.from.empty() || !options.to.empty()) return Complain("--from and --to are for --perfetto", kUsage);
  std::vector<std::string> unread;
  const JobSelection jobs = SelectSessions(options.targets, options.all, &unread);
  if (jobs.latest.empty()) return kCannotRead;
  std::vector<SessionTimeline> timelines(jobs.latest.size());
  const TimelineLimits limits = LimitsOf(timelines.size(), {});
  const Result<Verdict> verdict = Diagnose(jobs.latest, unread, [&](std::size_t session, StoryBuilder& story) {
    return CollectTimeline(timelines[session], limits, story);
  });
  ComplainOf(jobs.latest, timelines);
  if (!verdict) return timelines.empty() ? kCannotRead : Complain(verdict.status().message());
  JobTimeline job = JoinTimelines(std::move(timelines));
  AddShortages(job);
  if (!jobs.earlier.empty()) {
    job.notes.push_back(fmt::format("{} of earlier jobs in the same directories were left aside; --all takes them in.",
                                    Plural(jobs.earlier.size(), "session")));
  }
  std::uint64_t events = 0;
  for (const SessionTimeline& s : job.sessions) events += s.events;
  const std::size_t sessions = job.sessions.size();
  const std::string page = ReportPage(ReportTemplate(), std::move(job), *verdict, {}, AMEM_VERSION, DateText(RealtimeNs()));
  Went(WriteFile(path, out, [&](OutputFile& file) {
    file.Write(page);
    return Result(fmt::format("{}, {} events, {:.2f} MB", Plural(sessions, "session"), Grouped(events),
                              static_cast<double>(page.size()) / 1e6));
  }));
  return ReadAll();
}

void AddOptions(Arguments& arguments, ReportOptions& options) {
  arguments.Add("-o,--output", "FILE", options.output,
                "The file to write, amem-report.html or amem-trace.json by default; - for standard output");
  arguments.Flag("--all", options.all, "All sessions, not only those of the latest job");
  arguments.Flag("--perfetto", options.perfetto,
                 "A trace of all sessions for ui.perfetto.dev or chrome://tracing, in place of the page");
  AddPosition(
      arguments, "--from", options.from,
      "With --perfetto: only from this position on: seconds after the job's first event, a date and time, \"5 min ago\", or an "
      "event (2#115: of rank 2)");
  AddPosition(arguments, "--to", options.to,
              "With --perfetto: only up to this position; what is under way then is drawn up to it");
}

}  // namespace

Command ReportCommand() {
  return WithOptions<ReportOptions>(
      {kFailureGroup, "report", "A page for a browser; --perfetto: a trace",
       "  amem report                                              the latest job of this host\n"
       "  amem report hostA/journal hostB/journal -o job.html      of these journals the latest job; --all: all of them\n"
       "  amem report DIR --perfetto -o job.trace.json\n"
       "  amem report DIR --perfetto --from 12.5 --to 13\n"
       "  amem report DIR --perfetto --from '2025-11-21 07:34:01.203 UTC' --to 2#115\n"
       "The page has memory over time, pauses, allocations, references and events. It needs no network and no other file. Long "
       "journals are summed up; the page says what it leaves out.\n",
       false},
      AddOptions, RunReport);
}

}  // namespace amem::tool
