// verify: is what the journals say possible, and do the journals of a job agree with each other?
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/job/fold.h"
#include "replay/job/names.h"
#include "replay/job/postmortem.h"
#include "replay/job/sessions.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

struct VerifyOptions {
  Targets targets;
  bool json = false;
};

bool IsWhole(const JournalFindings& journal) { return journal.report.whole(); }

Json ToJson(const std::vector<Violation>& violations) {
  Json list = Json::array();
  for (const Violation& v : violations)
    list.push_back({{"session", SessionText(v.session)}, {"seq", v.seq.value}, {"text", v.text}});
  return list;
}

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

Json ToJson(const std::vector<JournalFindings>& journals, const JobFindings& job) {
  Json list = Json::array();
  for (const JournalFindings& journal : journals)
    list.push_back({{"session", SessionText(journal.info.session)},
                    {"name", NameOf(journal.who)},
                    {"directory", PlaceOf(journal.info.directory)},
                    {"status", ToText(journal.info.status)},
                    {"events", journal.events},
                    {"whole", journal.whole},
                    {"torn_tail", journal.report.torn_tail},
                    {"corrupt_records", journal.report.corrupt_records},
                    {"incomplete", IsWhole(journal) ? Json(nullptr) : Json(DamageText(journal.report))}});
  const bool certain = !job.violations.empty() || std::ranges::all_of(journals, IsWhole);
  return {{"ok", certain ? Json(job.violations.empty()) : Json(nullptr)},
          {"journals", std::move(list)},
          {"references", job.references},
          {"violations", ToJson(job.violations)},
          {"notes", ToJson(job.notes)}};
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
  options.json ? PrintJson(out, ToJson(journals, job)) : PrintText(out, journals, job);
  return !job.violations.empty() ? kViolationFound : ReadAll();
}

void AddOptions(Arguments& arguments, VerifyOptions& options) { AddJson(arguments, options.json); }

}  // namespace

Command VerifyCommand() {
  return WithOptions<VerifyOptions>({kExpertGroup, "verify", "Checks journals, and the references between them",
                                     "  amem verify /tmp/amem-1000/journal    all ranks that ran on this host\n"
                                     "  amem verify hostA/journal hostB/journal --json\n"},
                                    AddOptions, RunVerify);
}

}  // namespace amem::tool
