// verify: is what the journals say possible, and do the journals of a job agree with each other?
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/job/fold.h"
#include "replay/job/names.h"
#include "replay/job/postmortem.h"
#include "replay/job/sessions.h"
#include "replay/tool/answer.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

struct VerifyOptions {
  Targets targets;
  bool json = false;
};

bool IsWhole(const JournalFindings& journal) { return journal.report.whole(); }

void PrintText(Output& out, const std::vector<JournalFindings>& journals, const JobFindings& job) {
  JobNames names;
  for (const JournalFindings& journal : journals) names.Add(journal.who);
  const auto place = [&names](const Violation& v) {
    return v.seq ? fmt::format("{}, event {}", names.Name(v.session), v.seq.value) : names.Name(v.session);
  };
  std::uint64_t events = 0;
  for (const JournalFindings& journal : journals) {
    events += journal.events;
    out << "session " << SessionText(journal.info.session) << "  " << NameOf(journal.who) << ", " << ToText(journal.info.status)
        << ", " << Grouped(journal.events) << " events" << (journal.whole ? "" : " checked, then no further") << "\n";
  }
  for (const Violation& note : job.notes) out << "note: " << place(note) << ": " << note.text << "\n";
  for (const Violation& violation : job.violations)
    out.Styled(Output::Style::kBad, "VIOLATION: ") << place(violation) << ": " << violation.text << "\n";
  const bool whole = std::ranges::all_of(journals, IsWhole);
  out << (!job.violations.empty() ? "violated"
          : whole                 ? "ok"
                                  : "incomplete")
      << " journals=" << journals.size() << " events=" << events << " references=" << job.references
      << " violations=" << job.violations.size() << "\n";
}

struct JournalRow {
  JournalInfo info{};
  std::string name{};
  std::uint64_t events = 0;
  bool whole = false;
  ReadReport report{};
};
template <class To>
void WriteFields(To& to, const JournalRow& journal) {
  to("session", journal.info.session);
  to("name", journal.name);
  to("directory", PlaceOf(journal.info.directory));
  to("status", std::string(ToText(journal.info.status)));
  to("events", journal.events);
  to("whole", journal.whole);
  to("torn_tail", journal.report.torn_tail);
  to("corrupt_records", journal.report.corrupt_records);
  to("incomplete", journal.report.whole() ? std::nullopt : std::optional(DamageText(journal.report)),
     "What could not be read of it, also of the pack that it came from; null: it was read whole");
}
struct ViolationRow {
  Violation is;
};
template <class To>
void WriteFields(To& to, const ViolationRow& row) {
  to("session", row.is.session);
  to("seq", row.is.seq);
  to("text", row.is.text);
}
struct VerifyAnswer {
  static constexpr const char* kSchema = "verify";
  static constexpr const char* kTitle = "amem verify --json";
  static constexpr const char* kMeaning = "Whether journals are consistent in themselves and with each other.";
  std::vector<JournalRow> journals{};
  JobFindings job{};
};
template <class To>
void WriteFields(To& to, const VerifyAnswer& answer) {
  const bool certain = !answer.job.violations.empty() ||
                       std::ranges::all_of(answer.journals, [](const JournalRow& row) { return row.report.whole(); });
  const auto rows = [](const std::vector<Violation>& list) {
    std::vector<ViolationRow> told;
    for (const Violation& one : list) told.push_back({one});
    return told;
  };
  to("ok", certain ? std::optional(answer.job.violations.empty()) : std::nullopt,
     "There is no violation; null: there is none in what could be read, which is not all");
  to("journals", answer.journals);
  to("references", answer.job.references);
  to("violations", rows(answer.job.violations), "Contradictions; seq 0: about no single event");
  to("notes", rows(answer.job.notes), "Findings that are no contradiction, such as what a crash explains");
}

VerifyAnswer AnswerOf(const std::vector<JournalFindings>& journals, const JobFindings& job) {
  VerifyAnswer answer{{}, job};
  for (const JournalFindings& j : journals) answer.journals.push_back({j.info, NameOf(j.who), j.events, j.whole, j.report});
  return answer;
}

int RunVerify(const VerifyOptions& options, Output& out) {
  std::vector<JournalFindings> journals;
  ForEachJournal(FindSessions(options.targets), [&](JournalReader& reader, ReadReport& damage) -> Status {
    AMEM_ASSIGN(auto found, VerifyJournal(reader));
    damage = found.report;
    journals.push_back(std::move(found));
    return {};
  });

  JobFindings job = VerifyJob(journals);
  for (const JournalFindings& journal : journals) {
    job.violations.insert(job.violations.end(), journal.violations.begin(), journal.violations.end());
    job.notes.insert(job.notes.end(), journal.notes.begin(), journal.notes.end());
  }
  for (auto* list : {&job.violations, &job.notes})
    std::ranges::stable_sort(*list, {}, [](const Violation& one) { return std::pair(one.session, one.seq); });
  if (journals.empty()) return kCannotRead;  // nothing is well of which nothing is known
  options.json ? PrintAnswer(out, AnswerOf(journals, job)) : PrintText(out, journals, job);
  return !job.violations.empty() ? kViolationFound : ReadAll();
}

void AddOptions(Arguments& arguments, VerifyOptions& options) { AddJson(arguments, options.json); }

}  // namespace

Json VerifySchema() { return SchemaOf<VerifyAnswer>(); }

Command VerifyCommand() {
  return WithOptions<VerifyOptions>({kExpertGroup, "verify", "Checks journals, and the references between them",
                                     "  amem verify /tmp/amem-1000/journal    all ranks that ran on this host\n"
                                     "  amem verify hostA/journal hostB/journal --json\n"},
                                    AddOptions, RunVerify);
}

}  // namespace amem::tool
