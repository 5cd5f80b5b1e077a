// report: one page for a browser that works without a network: memory over time, pauses, allocations, references, events.
#include "replay/tool/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>

#include "journal/base/clock.h"
#include "replay/diagnosis/diagnosis.h"
#include "replay/job/clock.h"
#include "replay/job/names.h"
#include "replay/job/sessions.h"
#include "replay/report/report_json.h"
#include "replay/report/shortages.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

struct ReportOptions {
  Directories directories;
  std::filesystem::path output = "amem-report.html";
  bool all = false;  // all sessions given, not only those of the latest job
};

Result<SessionTimeline> ReadWithPresent(const std::filesystem::path& session, const TimelineLimits& limits) {
  const ThisHost began = ThisHost::Now();
  const auto reader = JournalReader::Open(session);
  if (!reader) return reader.status();
  Result<SessionTimeline> timeline = ReadTimeline(**reader, limits);
  if (!timeline) return timeline;
  const std::uint64_t present_ns = PresentOf(timeline->info, timeline->who, began);
  if (present_ns != 0) timeline->as_of_ns = std::max(timeline->last_ns, present_ns);
  return timeline;
}

std::vector<SessionTimeline> ReadAll(const std::vector<std::filesystem::path>& sessions, bool& failed) {
  const TimelineLimits limits = LimitsOf(sessions.size(), {});
  std::vector<Result<SessionTimeline>> read(sessions.size(), Status{});
  SideBySide(sessions.size(), [&](std::size_t i) { read[i] = ReadWithPresent(sessions[i], limits); });
  std::vector<SessionTimeline> timelines;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    if (!read[i]) Complain(read[i].status().message());
    if (!read[i] || ComplainAboutDamage(sessions[i], read[i]->damage)) failed = true;
    if (read[i]) timelines.push_back(*std::move(read[i]));
  }
  return timelines;
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
  bool failed = false;
  const JobSelection jobs = SelectSessions(options.directories, options.all, failed);
  std::vector<SessionTimeline> timelines = ReadAll(jobs.latest, failed);
  if (timelines.empty()) return kCannotRead;
  JobTimeline job = JoinTimelines(std::move(timelines));
  AddShortages(job);
  Result<Verdict> verdict = Diagnose(jobs.latest);
  if (!verdict) return Complain(verdict.status().message());
  if (!jobs.earlier.empty()) {
    job.notes.push_back(fmt::format("{} of earlier jobs in the same directories were left aside; --all takes them in.",
                                    Plural(jobs.earlier.size(), "session")));
  }
  std::uint64_t events = 0;
  for (const SessionTimeline& s : job.sessions) events += s.events;
  const std::size_t sessions = job.sessions.size();
  const std::string page = ReportPage(ReportTemplate(), std::move(job), *verdict, {}, AMEM_VERSION, DateText(RealtimeNs()));
  auto file = OutputFile::Open(options.output);
  if (!file) return Complain(file.status().message());
  file->Write(page);
  if (const Status written = file->Commit(); !written) return Complain(written.message());
  Summarize(file->is_standard_output(), out,
            fmt::format("{}: {}, {} events, {:.2f} MB", options.output.string(), Plural(sessions, "session"), Grouped(events),
                        static_cast<double>(page.size()) / 1e6));
  return failed ? kCannotRead : kFine;
}

constexpr const char* kReportOutputHelp = "The file to write, amem-report.html by default; - for standard output";

void AddOptions(Arguments& arguments, ReportOptions& options) {
  AddDirectories(arguments, options.directories);
  arguments.Add("-o,--output", "FILE.html", options.output, kReportOutputHelp);
  arguments.Flag("--all", options.all, "All sessions, not only those of the latest job");
}

}  // namespace

Command ReportCommand() {
  return {"report", "One page for a browser: memory over time, pauses, allocations, references, events",
          "  amem-replay report /tmp/amem-1000/journal -o job.html     all sessions of this host\n"
          "  amem-replay report hostA/journal hostB/journal -o job.html\n"
          "The file needs no network and no other file. Long journals are summed up; the page says what it leaves out.\n",
          [](Arguments& arguments) { return SetUp<ReportOptions>(arguments, AddOptions, RunReport); }, false};
}

}  // namespace amem::tool
