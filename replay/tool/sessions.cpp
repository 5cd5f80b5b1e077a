// What the commands share: finding sessions, opening journals, complaining.
#include "replay/job/sessions.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "replay/job/fold.h"
#include "replay/tool/budget.h"
#include "replay/tool/command.h"
#include "replay/tool/places.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {

std::string running_command;

namespace {

bool force = false;                   // --force, of whatever command
std::vector<std::string> complaints;  // for PrintErrors

constexpr const char* kDirectoryHelp =
    "Directories of sessions, directories that hold several, parents of those, or packs; - is a pack on standard input; "
    "default: "
    "AMEM_JOURNAL_DIR, else /tmp/amem-UID/journal";

// With "-" replaced by a file that has what is on standard input, and nothing by the default.
Directories Places(const Directories& given, ScratchDirectory& scratch, bool& failed) {
  if (given.empty()) return {DefaultJournalDirectory()};
  Directories places;
  for (const auto& place : given) {
    const Result<std::filesystem::path> file = place == "-" ? PackFromStandardInput(scratch) : Result(place);
    if (!file) Complain(file.status().message());
    failed |= !file.ok();
    if (file) places.push_back(*file);
  }
  return places;
}

}  // namespace

void AddDirectories(Arguments& arguments, Directories& directories) {
  arguments.Add("DIR", "DIR", directories, kDirectoryHelp);
  AddForce(arguments);
}

void AddForce(Arguments& arguments) { arguments.Flag("--force", force, kForceHelp); }

void AddJson(Arguments& arguments, bool& json, const char* shape) { arguments.Flag("--json", json, shape); }

Exit Complain(const std::string& message, Exit code) {
  Progress::End();
  complaints.push_back(message);
  std::fprintf(stderr, "amem-replay: %s\n", Escaped(message).c_str());
  return code;
}

std::vector<std::filesystem::path> FindSessions(const Directories& directories, bool& failed) {
  static ScratchDirectory unpacked;  // removed when the tool ends
  const Directories places = Places(directories, unpacked, failed);
  if (!force) KeepWithinBudget(FindPlaces(places).sessions, unpacked);
  FoundSessions found = amem::FindSessions(places, unpacked, force);
  const char* hint = directories.empty() ? " (the default; give a DIR, or set AMEM_JOURNAL_DIR)" : "";
  for (const std::string& problem : found.problems) Complain(problem + hint);
  failed |= !found.problems.empty();
  Progress::Begin(found.sessions.size(), BytesOf(found.sessions));
  return std::move(found.sessions);
}

JobSelection SelectSessions(const Directories& directories, bool all, bool& failed) {
  std::vector<std::filesystem::path> sessions = FindSessions(directories, failed);
  return all ? JobSelection{.latest = std::move(sessions), .earlier = {}} : SelectLatestJob(sessions);
}

std::filesystem::path DefaultJournalDirectory() {
  if (const char* set = std::getenv("AMEM_JOURNAL_DIR"); set && *set) return set;
  return fmt::format("/tmp/amem-{}/journal", ::getuid());
}

void ForEachJournal(const std::vector<std::filesystem::path>& sessions, bool& failed, const ReadOne& read) {
  for (const auto& session : sessions) {
    const Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(session);
    ReadReport damage;
    const Status done = reader ? read(session, **reader, damage) : reader.status();
    if (!done) Complain(done.message());
    failed |= !done.ok();
    failed |= ComplainAboutDamage(session, damage);
    Progress::OneDone();
  }
}

std::vector<std::unique_ptr<JournalReader>> OpenJournals(const Directories& directories, bool& failed) {
  std::vector<std::unique_ptr<JournalReader>> journals;
  for (const auto& session : FindSessions(directories, failed)) {
    Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(session);
    if (!reader) Complain(reader.status().message());
    failed |= !reader.ok();
    if (reader) journals.push_back(*std::move(reader));
  }
  return journals;
}

bool ComplainAboutDamage(const std::filesystem::path& session, const ReadReport& report) {
  if (report.corrupt_records == 0) return false;
  Complain(fmt::format("{}: {}", session.string(), DamageText(report)));
  return true;
}

void Summarize(bool to_standard_output, Output& out, const std::string& line) {
  if (to_standard_output) {
    std::fprintf(stderr, "%s\n", Escaped(line).c_str());
  } else {
    out << line << "\n";
  }
}

void PrintJson(Output& out, nlohmann::ordered_json json, const char* schema) {
  const auto label = [&](nlohmann::ordered_json& object) {
    nlohmann::ordered_json labelled = {{"schema", fmt::format("amem-replay/{}", schema != nullptr ? schema : running_command)},
                                       {"version", kSchemaVersion}};
    for (auto& [key, value] : object.items()) labelled[key] = std::move(value);
    object = std::move(labelled);
  };
  if (json.is_object()) label(json);
  if (json.is_array()) std::ranges::for_each(json, label);
  // Strings in a journal come from elsewhere; bytes that are not UTF-8 are replaced.
  out.Verbatim(json.dump(2, ' ', true, nlohmann::json::error_handler_t::replace)) << "\n";
}

void PrintErrors(Output& out, const std::string& command, int exit_code) {
  PrintJson(out, {{"command", command}, {"exit", exit_code}, {"errors", complaints}}, "error");
}

void PrintParagraph(Output& out, const std::string& text, const std::string& indent) {
  for (const std::string& line : BrokenIntoLines(text, TextWidth() - indent.size())) out << indent << line << "\n";
}

}  // namespace amem::tool
