// report: one page for a browser that works without a network: memory over time, pauses, allocations, references, events.
#include "replay/tool/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>

#include "journal/base/clock.h"
#include "journal/session_dir.h"
#include "replay/diagnosis/diagnosis.h"
#include "replay/job/fold.h"
#include "replay/job/names.h"
#include "replay/report/report_json.h"
#include "replay/tool/command.h"
#include "replay/tool/position.h"

namespace amem::tool {
namespace {

struct ReportOptions {
  Targets targets;
  std::filesystem::path output;
  bool all = false;  // all sessions given, not only those of the latest job
  bool perfetto = false;
  std::string from, to;  // with perfetto
};

// What is wrong with the journals goes to standard error. Leaves out those that could not be read.
bool Complained(const std::vector<std::filesystem::path>& sessions, std::vector<SessionTimeline>& timelines) {
  bool complained = false;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    if (timelines[i].info.session) {
      complained |= ComplainAboutDamage(sessions[i], timelines[i].damage);
    } else {
      const auto reader = JournalReader::Open(sessions[i]);
      Complain(reader ? sessions[i].string() + " could not be read" : reader.status().message());
      complained = true;
    }
  }
  std::erase_if(timelines, [](const SessionTimeline& timeline) { return !timeline.info.session; });
  return complained;
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

int RunReport(const ReportOptions& options, Output& out) {
  const std::filesystem::path path = !options.output.empty() ? options.output
                                     : options.perfetto      ? "amem-trace.json"
                                                             : "amem-report.html";
  if (options.perfetto) return RunTrace({options.targets, path, options.from, options.to}, out);
  if (!options.from.empty() || !options.to.empty()) return Complain("--from and --to are for --perfetto", kUsage);
  bool failed = false;
  const JobSelection jobs = SelectSessions(options.targets, options.all, failed);
  if (jobs.latest.empty()) return kCannotRead;
  std::vector<SessionTimeline> timelines(jobs.latest.size());
  const TimelineLimits limits = LimitsOf(timelines.size(), {});
  const Result<Verdict> verdict = Diagnose(jobs.latest, [&](std::size_t session, StoryBuilder& story) {
    return CollectTimeline(timelines[session], limits, story);
  });
  failed |= Complained(jobs.latest, timelines);
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
  auto file = OutputFile::Open(path);
  if (!file) return Complain(file.status().message());
  file->Write(page);
  if (const Status written = file->Commit(); !written) return Complain(written.message());
  Summarize(file->is_standard_output(), out,
            fmt::format("{}: {}, {} events, {:.2f} MB", path.string(), Plural(sessions, "session"), Grouped(events),
                        static_cast<double>(page.size()) / 1e6));
  return failed ? kCannotRead : kFine;
}

void AddOptions(Arguments& arguments, ReportOptions& options) {
  AddTargets(arguments, options.targets);
  arguments.Add("-o,--output", "FILE", options.output,
                "The file to write, amem-report.html or amem-trace.json by default; - for standard output");
  arguments.Flag("--all", options.all, "All sessions, not only those of the latest job");
  arguments.Flag("--perfetto", options.perfetto,
                 "A trace of all sessions for ui.perfetto.dev or chrome://tracing, in place of the page");
  arguments.Add(
      "--from", kPosition, options.from,
      "With --perfetto: only from there on: seconds after the job's first event, a date and time, \"5 min ago\", or an "
      "event (2#115: of rank 2)");
  arguments.Add("--to", kPosition, options.to, "Only up to there, likewise; what is under way then is drawn up to it");
}

}  // namespace

Command ReportCommand() {
  return {
      kFailureGroup,
      "report",
      "A page for a browser; --perfetto: a trace",
      "  amem report                                              the latest job of this host\n"
      "  amem report hostA/journal hostB/journal -o job.html      of these journals the latest job; --all: all of them\n"
      "  amem report DIR --perfetto -o job.trace.json\n"
      "  amem report DIR --perfetto --from 12.5 --to 13\n"
      "  amem report DIR --perfetto --from '2025-11-21 07:34:01.203 UTC' --to 2#115\n"
      "The page has memory over time, pauses, allocations, references and events. It needs no network and no other file. Long "
      "journals are summed up; the page says what it leaves out.\n",
      [](Arguments& arguments) { return SetUp<ReportOptions>(arguments, AddOptions, RunReport); },
      false};
}

}  // namespace amem::tool
