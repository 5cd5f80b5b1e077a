// report: one page for a browser that works without a network: memory over time, pauses, allocations, references, events.
#include "replay/tool/report.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "journal/base/clock.h"
#include "journal/base/unique_fd.h"
#include "replay/diagnosis/diagnosis.h"
#include "replay/job/latest_job.h"
#include "replay/job/names.h"
#include "replay/report/report_json.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

struct ReportOptions {
  Directories directories;
  std::filesystem::path output;
  bool all = false;  // all sessions given, not only those of the latest job
};

Result<SessionTimeline> ReadSession(const std::filesystem::path& session, const TimelineLimits& limits) {
  auto reader = JournalReader::Open(session);
  if (!reader) return reader.status();
  return ReadTimeline(**reader, limits);
}

// Side by side: each journal is its own files.
std::vector<SessionTimeline> ReadAll(const std::vector<std::filesystem::path>& sessions, bool& failed) {
  const TimelineLimits limits = LimitsOf(sessions.size(), {});
  std::vector<Result<SessionTimeline>> read(sessions.size(), Status{});
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < sessions.size(); i = next++) read[i] = ReadSession(sessions[i], limits);
  };
  {
    std::vector<std::jthread> threads;
    const std::size_t enough = std::min<std::size_t>(sessions.size(), std::max(1U, std::thread::hardware_concurrency()));
    while (threads.size() + 1 < enough) threads.emplace_back(work);
    work();
  }
  std::vector<SessionTimeline> timelines;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    if (!read[i]) Complain(read[i].status().message());
    if (!read[i] || ComplainAboutDamage(sessions[i], read[i]->damage)) failed = true;
    if (read[i]) timelines.push_back(*std::move(read[i]));
  }
  return timelines;
}

Status Write(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return {Code::kIo, std::strerror(errno)};
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return {};
}

// The page is written beside its place first, so that no reader finds half a page.
Status WriteFile(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::path unfinished = path;
  unfinished += fmt::format(".unfinished-{}", ::getpid());
  Status status;
  {
    const UniqueFd file(::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    status = file ? Write(file.get(), text) : Status{Code::kIo, std::strerror(errno)};
  }
  if (status && ::rename(unfinished.c_str(), path.c_str()) != 0) status = Status{Code::kIo, std::strerror(errno)};
  if (status) return {};
  ::unlink(unfinished.c_str());
  return {status.code(), fmt::format("write {}: {}; name a file that can be written with -o", path.string(), status.message())};
}

int RunReport(const ReportOptions& options, Output& out) {
  bool failed = false;
  JobSelection jobs;
  jobs.latest = FindSessions(options.directories, failed);
  if (!options.all) jobs = SelectLatestJob(jobs.latest);
  std::vector<SessionTimeline> timelines = ReadAll(jobs.latest, failed);
  if (timelines.empty()) return kCannotRead;
  JobTimeline job = JoinTimelines(std::move(timelines));
  Result<Verdict> verdict = Diagnose(jobs.latest);
  if (!verdict) {
    Complain(verdict.status().message());
    return kCannotRead;
  }
  if (!jobs.earlier.empty()) {
    job.notes.push_back(fmt::format("{} of earlier jobs in the same directories were left aside; --all takes them in.",
                                    Plural(jobs.earlier.size(), "session")));
  }
  std::uint64_t events = 0;
  for (const SessionTimeline& s : job.sessions) events += s.events;
  const std::size_t sessions = job.sessions.size();
  const std::string page = ReportPage(ReportTemplate(), std::move(job), *verdict, {}, AMEM_VERSION, DateText(RealtimeNs()));
  if (options.output == "-") {
    out << page;
    return failed ? kCannotRead : kFine;
  }
  if (const Status written = WriteFile(options.output, page); !written) {
    Complain(written.message());
    return kCannotRead;
  }
  out << fmt::format("{}: {}, {} events, {:.2f} MB\n", options.output.string(), Plural(sessions, "session"), Grouped(events),
                     static_cast<double>(page.size()) / 1e6);
  return failed ? kCannotRead : kFine;
}

void AddOptions(CLI::App& app, ReportOptions& options) {
  AddDirectories(app, options.directories);
  app.add_option("-o,--output", options.output, "The file to write; - for standard output")
      ->type_name("FILE.html")
      ->default_val("amem-report.html");
  app.add_flag("--all", options.all, "All sessions, not only those of the latest job");
}

}  // namespace

Command ReportCommand() {
  return {"report", "One page for a browser: memory over time, pauses, allocations, references, events",
          "  amem-replay report /tmp/amem-1000/journal -o job.html     all sessions of this host\n"
          "  amem-replay report hostA/journal hostB/journal -o job.html\n"
          "The file needs no network and no other file. Long journals are summed up; the page says what it leaves out.\n",
          [](CLI::App& app) { return SetUp<ReportOptions>(app, AddOptions, RunReport); }};
}

}  // namespace amem::tool
