// why: what went wrong with the last pause or resume of a job, and what to do.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "replay/diagnosis/diagnosis.h"
#include "replay/diagnosis/verdict_form.h"
#include "replay/job/names.h"
#include "replay/tool/answer.h"
#include "replay/tool/command.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {
namespace {

struct WhyOptions {
  Targets targets;
  bool all = false;  // all sessions given as one job
  bool json = false;
};

constexpr std::size_t kEventsMost = 8;  // whose numbers are printed

// Without the end that the summary says already.
std::string Shortened(const std::string& text, const std::string& summary) {
  constexpr std::size_t kShort = 40;
  for (std::size_t at = text.rfind(": "); at != std::string::npos && at != 0; at = text.rfind(": ", at - 1)) {
    const std::string end = text.substr(at + 2);
    if (end.size() >= kShort) return summary.find(end) == std::string::npos ? text : text.substr(0, at);
  }
  return text;
}

// "rank 2    event 17   +0.003215s  CAUSE  step failed: ..."; the same from several ranks is one line.
// Times count from `first`.
void PrintEvidence(Output& out, const Verdict& verdict, std::uint64_t first) {
  const std::vector<Evidence>& evidence = verdict.evidence;
  std::vector<bool> said(evidence.size());
  for (std::size_t i = 0; i < evidence.size(); ++i) {
    const Evidence& e = evidence[i];
    if (said[i]) continue;
    std::vector<std::int32_t> ranks{e.rank};
    std::string events = e.seq ? fmt::format("event {}", e.seq.value) : "";
    for (std::size_t other = i + 1; other < evidence.size(); ++other) {
      if (evidence[other].text != e.text || evidence[other].role != e.role || evidence[other].rank < 0) continue;
      said[other] = true;
      ranks.push_back(evidence[other].rank);
      if (!evidence[other].seq || ranks.size() > kEventsMost + 1) continue;
      events += ranks.size() > kEventsMost ? std::string(",...") : fmt::format(",{}", evidence[other].seq.value);
    }
    std::ranges::sort(ranks);
    const std::string who = e.rank < 0 ? SessionText(e.session) : fmt::format("rank {}", fmt::join(InRanges(ranks), ","));
    const std::string when = e.wall_ns == 0 || e.wall_ns < first ? "" : "+" + DurationText(e.wall_ns - first);
    const std::string_view role = e.role == Evidence::Role::kCause ? "CAUSE" : ToText(e.role);
    const std::string line =
        fmt::format("{:<10} {:<15} {:<8} {:<11} {}", who, events, when, role, Shortened(e.text, verdict.summary));
    out << fmt::format("  {}\n", fmt::join(BrokenIntoLines(line, TextWidth() - 6), "\n      "));
  }
}

// The log around the first fact that the verdict rests on; empty: there is none. `several`: jobs, so that a rank's number may
// stand for more than one.
std::string LogAround(const Verdict& verdict, const Targets& targets, bool several) {
  constexpr std::uint64_t kAround = 10;
  const auto at =
      std::ranges::find_if(verdict.evidence, [](const Evidence& e) { return e.role == Evidence::Role::kCause && e.seq; });
  const auto any = std::ranges::find_if(verdict.evidence, [](const Evidence& e) { return static_cast<bool>(e.seq); });
  const auto fact = at != verdict.evidence.end() ? at : any;
  if (fact == verdict.evidence.end()) return {};
  const std::uint64_t seq = fact->seq.value, from = seq - std::min(seq - 1, kAround), to = seq + kAround;
  if (!several && fact->rank >= 0)
    return CommandOn("log", targets, fmt::format("--merge --from={0}#{1} --to={0}#{2}", fact->rank, from, to));
  Targets one = targets;
  one.ranks = {SessionText(fact->session)};
  return CommandOn("log", one, fmt::format("--from=#{} --to=#{}", from, to));
}

void PrintText(Output& out, const Verdict& verdict, const std::string& around) {
  out.Styled(verdict.healthy() ? Output::Style::kGood : Output::Style::kBad, verdict.headline + ".") << "\n\n";
  PrintParagraph(out, verdict.summary, "");
  if (const std::string remedy = verdict.RemedyText(); !remedy.empty()) {
    out << "\n";
    PrintParagraph(out, "To do: " + remedy + ".", "");
  }
  if (!verdict.evidence.empty()) {
    const auto timed = std::ranges::find_if(verdict.evidence, [](const Evidence& e) { return e.wall_ns != 0; });
    const std::uint64_t first = timed == verdict.evidence.end() ? 0 : timed->wall_ns;
    out << "\n";
    PrintParagraph(out, "Evidence (times count from " + WallText(first) + (around.empty() ? ")" : "), and what is around it:"),
                   "");
    if (!around.empty()) out << "  " << around << "\n";
    PrintEvidence(out, verdict, first);
  }
  if (!verdict.notes.empty() || !verdict.damage.empty()) out << "\n";
  for (const std::string& note : verdict.notes) PrintParagraph(out, "Note: " + note + ".", "  ");
  for (const std::string& damage : verdict.damage) PrintParagraph(out, "Not readable: " + damage + ".", "  ");
}

// The jobs beside the first: failures in full, as far as they are few, the others in a line each.
void PrintOthers(Output& out, std::span<const Verdict> others, const Targets& targets) {
  constexpr std::size_t kInFullMost = 4;
  std::vector<const Verdict*> in_full, in_a_line;
  for (const Verdict& other : others)
    (!other.healthy() && in_full.size() < kInFullMost ? in_full : in_a_line).push_back(&other);
  for (const Verdict* other : in_full) {
    out << "\n---- Another job: " << other->job << " ----\n\n";
    PrintText(out, *other, LogAround(*other, targets, true));
  }
  for (const Verdict* other : in_a_line) {
    out << "\n";
    PrintParagraph(out, fmt::format("Another job ({}): {}.", other->job, other->headline), "");
  }
}

struct WhyAnswer {
  static constexpr const char* kSchema = "why";
  static constexpr const char* kTitle = "amem why --json";
  static constexpr const char* kMeaning = "What went wrong with the last pause or resume of a job. What is not known is null.";
  Verdict verdict{};
  std::vector<Verdict> others{};
};
template <class To>
void WriteFields(To& to, const WhyAnswer& answer) {
  WriteFields(to, answer.verdict);
  to("other_jobs", answer.others, "Verdicts on the other jobs in these places");
}

Result<std::vector<Verdict>> Judge(const std::vector<std::filesystem::path>& sessions, const std::vector<std::string>& unread,
                                   bool as_one) {
  if (!as_one) return DiagnoseJobs(sessions, unread);
  AMEM_ASSIGN(auto verdict, Diagnose(sessions, unread));
  return std::vector{std::move(verdict)};
}

int RunWhy(const WhyOptions& options, Output& out) {
  std::vector<std::string> unread;
  const std::vector<std::filesystem::path> sessions = FindSessions(options.targets, &unread);
  Result<std::vector<Verdict>> verdicts = Judge(sessions, unread, options.all);
  if (!verdicts) return Complain(verdicts.status().message());
  for (const Verdict& verdict : *verdicts)
    for (const std::string& damage : verdict.damage) Complain(damage);
  const Verdict& first = verdicts->front();
  const std::span<const Verdict> others = std::span(*verdicts).subspan(1);
  if (options.json) {
    PrintAnswer(out, WhyAnswer{first, {others.begin(), others.end()}});
  } else {
    PrintText(out, first, LogAround(first, options.targets, !others.empty()));
    PrintOthers(out, others, options.targets);
  }
  return AnyComplaint() ? kCannotRead : first.healthy() ? kFine : kViolationFound;
}

void AddOptions(Arguments& arguments, WhyOptions& options) {
  arguments.Flag("--all", options.all, "Take all sessions for one job, whatever ties them together");
  AddJson(arguments, options.json);
}

}  // namespace

Json WhySchema() { return SchemaOf<WhyAnswer>(); }

Command WhyCommand() {
  return WithOptions<WhyOptions>(
      {kFailureGroup, "why", "What went wrong, and what to do",
       "  amem why                                   the jobs of this host, running or dead, the newest failure first\n"
       "  amem why 4711                              the job of that process\n"
       "  amem why hostA/journal hostB/journal\n"
       "  amem why --json DIR | jq -r .kind\n"
       "Who made a pause slow: `amem report --perfetto`, a track for each rank.\n"},
      AddOptions, RunWhy);
}

}  // namespace amem::tool
