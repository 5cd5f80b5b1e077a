// verify: is what the journals say possible, and do the journals of a job agree with each other?
#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "journal/base/clock.h"
#include "replay/job/event_json.h"
#include "replay/job/postmortem.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

using Json = nlohmann::ordered_json;

std::string BootOfThisHost() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

Result<JournalFindings> Verify(const std::filesystem::path& session, const std::string& boot) {
  const std::uint64_t began = MonotonicNs();
  Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(session);
  if (!reader) return reader.status();
  Result<JournalFindings> found = VerifyJournal(**reader);
  const bool of_this_boot = found.ok() && !boot.empty() && found->state.session.boot_id == boot;
  if (of_this_boot) found->as_of_ns = std::max(found->as_of_ns, began);
  return found;
}

// Names sessions in lines about them.
class Names {
 public:
  explicit Names(const std::vector<JournalFindings>& journals) {
    for (const JournalFindings& journal : journals) names_[journal.info.session] = amem::NameOf(journal);
  }
  std::string Of(const Violation& violation) const {
    const auto name = names_.find(violation.session);
    std::string text = name == names_.end() ? "session " + SessionText(violation.session) : name->second;
    if (violation.seq) text += ", event " + std::to_string(violation.seq.value);
    return text;
  }

 private:
  std::map<SessionId, std::string> names_;
};

Json ToJson(const std::vector<Violation>& violations) {
  Json list = Json::array();
  for (const Violation& v : violations) {
    list.push_back({{"session", SessionText(v.session)}, {"seq", v.seq.value}, {"text", v.text}});
  }
  return list;
}

Json ToJson(const JournalFindings& journal) {
  return {{"session", SessionText(journal.info.session)},
          {"name", amem::NameOf(journal)},
          {"directory", journal.info.directory.string()},
          {"status", ToText(journal.info.status)},
          {"events", journal.events},
          {"whole", journal.whole},
          {"torn_tail", journal.report.torn_tail},
          {"corrupt_records", journal.report.corrupt_records}};
}

void PrintText(Output& out, const std::vector<JournalFindings>& journals, const JobFindings& job) {
  const Names names(journals);
  std::uint64_t events = 0;
  for (const JournalFindings& journal : journals) {
    events += journal.events;
    out << "session " << SessionText(journal.info.session) << "  " << amem::NameOf(journal) << ", "
        << ToText(journal.info.status) << ", " << Grouped(journal.events) << " events"
        << (journal.whole ? "" : " checked, then no further") << "\n";
  }
  for (const Violation& note : job.notes) out << "note: " << names.Of(note) << ": " << note.text << "\n";
  for (const Violation& violation : job.violations)
    out << "VIOLATION: " << names.Of(violation) << ": " << violation.text << "\n";
  out << (job.violations.empty() ? "ok" : "violated") << " journals=" << journals.size() << " events=" << events
      << " references=" << job.references << " violations=" << job.violations.size() << "\n";
}

void PrintJson(Output& out, const std::vector<JournalFindings>& journals, const JobFindings& job) {
  Json list = Json::array();
  for (const JournalFindings& journal : journals) list.push_back(ToJson(journal));
  const Json all = {{"ok", job.violations.empty()},
                    {"journals", std::move(list)},
                    {"references", job.references},
                    {"violations", ToJson(job.violations)},
                    {"notes", ToJson(job.notes)}};
  out << all.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

}  // namespace

int RunVerify(const VerifyOptions& options, Output& out) {
  bool failed = false;
  const std::string boot = BootOfThisHost();
  std::vector<JournalFindings> journals;
  for (const auto& session : FindSessions(options.directories, failed)) {
    Result<JournalFindings> found = Verify(session, boot);
    if (!found) {
      Complain(found.status().message());
      failed = true;
      continue;
    }
    failed |= ComplainAboutDamage(session, found->report);
    journals.push_back(*std::move(found));
  }

  JobFindings job = VerifyJob(journals);
  for (const JournalFindings& journal : journals) {
    job.violations.insert(job.violations.end(), journal.violations.begin(), journal.violations.end());
    job.notes.insert(job.notes.end(), journal.notes.begin(), journal.notes.end());
  }
  const auto order = [](const Violation& a, const Violation& b) {
    return std::pair(a.session, a.seq) < std::pair(b.session, b.seq);
  };
  std::stable_sort(job.violations.begin(), job.violations.end(), order);
  std::stable_sort(job.notes.begin(), job.notes.end(), order);
  if (options.json) {
    PrintJson(out, journals, job);
  } else if (!journals.empty()) {
    PrintText(out, journals, job);
  }
  return !job.violations.empty() ? kViolationFound : failed ? kCannotRead : kFine;
}

}  // namespace amem::tool
