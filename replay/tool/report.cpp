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

// Of a journal that was packed while its process lived, the present is the moment of packing (pack.h).
void SetPresentOf(SessionTimeline& timeline, const ThisHost& began) {
  std::string word;
  std::uint64_t packed_ns = 0;
  if (std::ifstream(timeline.info.directory / "status") >> word >> packed_ns && word == "live") {
    timeline.info.status = SessionStatus::kLive;
    timeline.as_of_ns = std::max(timeline.last_ns, packed_ns);
  } else if (timeline.info.status == SessionStatus::kLive && began.Wrote(timeline.who)) {
    timeline.as_of_ns = std::max(timeline.last_ns, began.now_ns);
  }
}

Result<SessionTimeline> ReadWithPresent(const std::filesystem::path& session, const TimelineLimits& limits) {
  const ThisHost began = ThisHost::Now();
  const auto reader = JournalReader::Open(session);
  if (!reader) return reader.status();
  Result<SessionTimeline> timeline = ReadTimeline(**reader, limits);
  if (timeline) SetPresentOf(*timeline, began);
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
