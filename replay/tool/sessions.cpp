// What the commands share: finding sessions, opening journals, complaining.
#include "replay/job/sessions.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "journal/session_dir.h"
#include "replay/job/fold.h"
#include "replay/job/names.h"
#include "replay/tool/budget.h"
#include "replay/tool/command.h"
#include "replay/tool/targets.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {

std::string running_command;
std::string program_name = "amem";

namespace {

std::vector<std::string> complaints;  // for PrintErrors

constexpr const char* kTargetHelp =
    "Directories of sessions, directories that hold several, parents of those, or packs (- is one on standard input); a pid, a "
    "launcher's id of a job or a session of this user; default: AMEM_JOURNAL_DIR, else /tmp/amem-UID/journal";

constexpr const char* kForceHelp = "Read packs however much they unpack to, and take as much memory and time as it needs";

}  // namespace

std::string AsCalled(std::string text) {
  for (const std::string_view before : {"`", "  ", "| ", "&& "}) {
    const std::string ours = fmt::format("{}amem ", before);
    for (std::size_t at = 0; (at = text.find(ours, at)) != std::string::npos; at += ours.size())
      text.replace(at, ours.size(), fmt::format("{}{} ", before, program_name));
  }
  return text;
}

void AddTargets(Arguments& arguments, Targets& targets) {
  arguments.Add("TARGET", "TARGET", targets.names, kTargetHelp);
  Argument& rank = arguments.Add("--rank", "RANK", targets.ranks,
                                 "Only the sessions of these ranks, as in 2 or 0,3; a session's id for one that has no rank");
  rank.take = [&targets](const std::vector<std::string>& given) -> std::string {
    for (const std::string& word : SplitAtCommas(given))
      if (!SessionOfName(word) && !WholeNumber(word))
        return fmt::format("--rank: \"{}\" is not a rank; give numbers, as in --rank 2 or --rank 0,3", word);
    targets.ranks = given;
    return {};
  };
  arguments.Flag("--force", targets.force, kForceHelp);
}

void AddJson(Arguments& arguments, bool& json, const char* shape) { arguments.Flag("--json", json, shape); }

Exit Complain(const std::string& message, Exit code) {
  Progress::End();
  complaints.push_back(AsCalled(message));
  std::fprintf(stderr, "%s: %s\n", program_name.c_str(), Escaped(complaints.back()).c_str());
  return code;
}

std::vector<std::filesystem::path> FindSessions(const Targets& targets, bool& failed) {
  static ScratchDirectory unpacked;  // removed when the tool ends
  const std::vector<std::filesystem::path> places = PlacesOf(targets, unpacked, failed);
  if (!targets.force) KeepWithinBudget(FindPlaces(places).sessions, unpacked);
  FoundSessions found = amem::FindSessions(places, unpacked, targets.force);
  const char* hint = targets.names.empty() ? " (the default; give a TARGET, or set AMEM_JOURNAL_DIR)" : "";
  for (const std::string& problem : found.problems) Complain(problem + hint);
  failed |= !found.problems.empty();
  if (!targets.ranks.empty()) found.sessions = OfRanks(std::move(found.sessions), targets.ranks, failed);
  Progress::Begin(found.sessions.size(), BytesOf(found.sessions));
  return std::move(found.sessions);
}

std::optional<std::filesystem::path> DirectoryOf(const Targets& targets) {
  if (targets.names.empty()) return DefaultJournalDirectory();
  std::error_code failed;
  const bool directory = targets.names.size() == 1 && std::filesystem::is_directory(targets.names.front(), failed);
  return directory ? std::optional<std::filesystem::path>(targets.names.front()) : std::nullopt;
}

JobSelection SelectSessions(const Targets& targets, bool all, bool& failed) {
  std::vector<std::filesystem::path> sessions = FindSessions(targets, failed);
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

std::vector<std::unique_ptr<JournalReader>> OpenJournals(const Targets& targets, bool& failed) {
  std::vector<std::unique_ptr<JournalReader>> journals;
  for (const auto& session : FindSessions(targets, failed)) {
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

void PrintTable(Output& out, const std::vector<std::vector<std::string>>& rows) {
  const std::vector<std::string> lines = TableLines(rows);
  out.Styled(Output::Style::kHeading, lines.front()) << "\n";
  for (std::size_t i = 1; i < lines.size(); ++i) out << lines[i] << "\n";
}

void PrintParagraph(Output& out, const std::string& text, const std::string& indent) {
  for (const std::string& line : BrokenIntoLines(text, TextWidth() - indent.size())) out << indent << line << "\n";
}

}  // namespace amem::tool
