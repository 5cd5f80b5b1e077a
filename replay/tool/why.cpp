// why: what went wrong with the last pause or resume of a job, and what to do.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "replay/diagnosis/diagnosis.h"
#include "replay/diagnosis/roster.h"
#include "replay/diagnosis/verdict_json.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

struct WhyOptions {
  Directories directories;
  bool all = false;  // all sessions given, not only those of the latest job
  bool json = false;
};

// "rank 2    event 17   +0.003215s  CAUSE  step failed: ..."; the same from several ranks is one line.
// Times count from `first`.
void PrintEvidence(Output& out, const std::vector<Evidence>& evidence, std::uint64_t first) {
  std::vector<bool> said(evidence.size());
  for (std::size_t i = 0; i < evidence.size(); ++i) {
    const Evidence& e = evidence[i];
    if (said[i]) continue;
    std::string who = e.rank < 0 ? SessionText(e.session) : fmt::format("rank {}", e.rank);
    std::string events = e.seq ? fmt::format("event {}", e.seq.value) : "";
    for (std::size_t other = i + 1; other < evidence.size(); ++other) {
      if (evidence[other].text != e.text || evidence[other].role != e.role || evidence[other].rank < 0) continue;
      said[other] = true;
      who += fmt::format(",{}", evidence[other].rank);
      if (evidence[other].seq) events += fmt::format(",{}", evidence[other].seq.value);
    }
    out << "  ";
    out.Left(who, 12).Left(" " + events, 22);
    out.Left(e.wall_ns == 0 || e.wall_ns < first ? " " : " +" + DurationText(e.wall_ns - first), 11);
    out.Left(e.role == Evidence::Role::kCause ? " CAUSE" : " " + std::string(ToText(e.role)), 13) << " " << e.text << "\n";
  }
}

void PrintText(Output& out, const Verdict& verdict) {
  out.Styled(verdict.healthy() ? Output::Style::kGood : Output::Style::kBad, verdict.headline + ".") << "\n\n";
  PrintParagraph(out, verdict.summary, "");
  if (const std::string remedy = ToText(verdict.remedy); !remedy.empty()) {
    out << "\n";
    PrintParagraph(out, "To do: " + remedy + ".", "");
  }
  if (!verdict.evidence.empty()) {
    const auto timed = std::ranges::find_if(verdict.evidence, [](const Evidence& e) { return e.wall_ns != 0; });
    const std::uint64_t first = timed == verdict.evidence.end() ? 0 : timed->wall_ns;
    out << "\nEvidence (times count from " << WallText(first) << "; `amem-replay log DIR --from SEQ` shows what is around)\n";
    PrintEvidence(out, verdict.evidence, first);
  }
  if (!verdict.notes.empty() || !verdict.damage.empty()) out << "\n";
  for (const std::string& note : verdict.notes) PrintParagraph(out, "Note: " + note + ".", "  ");
  for (const std::string& damage : verdict.damage) PrintParagraph(out, "Not readable: " + damage + ".", "  ");
}

int RunWhy(const WhyOptions& options, Output& out) {
  bool failed = false;
  const JobSelection jobs = SelectSessions(options.directories, options.all, failed);
  Result<Verdict> verdict = Diagnose(jobs.latest);
  if (!verdict) return Complain(verdict.status().message());
  if (!jobs.earlier.empty()) {
    verdict->notes.push_back(fmt::format(
        "{} sessions of earlier jobs in the same directories were left aside (--all takes them in)", jobs.earlier.size()));
  }
  for (const std::string& damage : verdict->damage) Complain(damage);
  options.json ? PrintJson(out, ToJson(*verdict)) : PrintText(out, *verdict);
  return failed || !verdict->damage.empty() ? kCannotRead : verdict->healthy() ? kFine : kViolationFound;
}

void AddOptions(Arguments& arguments, WhyOptions& options) {
  AddDirectories(arguments, options.directories);
  arguments.Flag("--all", options.all, "All sessions, not only those of the latest job");
  AddJson(arguments, options.json);
}

}  // namespace

Command WhyCommand() {
  return {"why", "What went wrong with a job's last pause or resume: which rank, step and allocation, and what to do",
          "  amem-replay why /tmp/amem-1000/journal    the latest job of this host, running or dead\n"
          "  amem-replay why hostA/journal hostB/journal\n"
          "  amem-replay why --json DIR | jq -r .kind\n",
          [](Arguments& arguments) { return SetUp<WhyOptions>(arguments, AddOptions, RunWhy); }};
}

}  // namespace amem::tool
