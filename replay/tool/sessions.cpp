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
#include "replay/tool/command.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {

std::string running_command;
std::string program_name = "amem";
static std::vector<std::string> complaints;  // for PrintErrors

std::string AsCalled(std::string text) {
  for (const std::string_view before : {"`", "  ", "| ", "&& "}) {
    const std::string ours = fmt::format("{}amem ", before);
    for (std::size_t at = 0; (at = text.find(ours, at)) != std::string::npos; at += ours.size())
      text.replace(at, ours.size(), fmt::format("{}{} ", before, program_name));
  }
  return text;
}

void AddTargets(Arguments& arguments, Targets& targets) {
  arguments.Add("TARGET", "TARGET", targets.names,
                "Directories of sessions, directories that hold several, parents of those, or packs (- is one on standard "
                "input); a pid, a "
                "launcher's id of a job or a session of this user; default: AMEM_JOURNAL_DIR, else /tmp/amem-UID/journal");
  const auto take = [&targets](const std::vector<std::string>& given) -> std::string {
    targets.ranks = Split(fmt::format("{}", fmt::join(given, ",")), ',');  // "0,3" and "0" "3" are the same
    for (const std::string& word : targets.ranks)
      if (!SessionOfName(word) && !WholeNumber(word))
        return fmt::format("--rank: \"{}\" is not a rank; give numbers, as in --rank 2 or --rank 0,3", word);
    return {};
  };
  arguments
      .Take("--rank", "RANK", "Only the sessions of these ranks, as in 2 or 0,3; a session's id for one that has no rank", take)
      .several = true;
  arguments.Flag("--force", targets.force,
                 "Read packs however much they unpack to, and take as much memory and time as it needs");
}

void AddJson(Arguments& arguments, bool& json, const char* shape) { arguments.Flag("--json", json, shape); }

Exit Complain(const std::string& message, Exit code) {
  Progress::End();
  complaints.push_back(AsCalled(message));
  std::fprintf(stderr, "%s: %s\n", program_name.c_str(), Escaped(complaints.back()).c_str());
  return code;
}

bool AnyComplaint() { return !complaints.empty(); }

bool Went(const Status& status) {
  if (!status.ok()) Complain(status.message());
  return status.ok();
}

std::vector<std::filesystem::path> FindSessions(const Targets& targets) {
  static ScratchDirectory unpacked;  // removed when the tool ends
  const std::vector<std::filesystem::path> places = PlacesOf(targets, unpacked);
  if (!targets.force) KeepWithinBudget(FindPlaces(places).sessions, unpacked);
  FoundSessions found = amem::FindSessions(places, unpacked, targets.force);
  const char* hint = targets.names.empty() ? " (the default; give a TARGET, or set AMEM_JOURNAL_DIR)" : "";
  for (const std::string& problem : found.problems) Complain(problem + hint);
  if (!targets.ranks.empty()) found.sessions = OfRanks(std::move(found.sessions), targets.ranks);
  Progress::Begin(found.sessions.size(), BytesOf(found.sessions));
  return std::move(found.sessions);
}

std::optional<std::filesystem::path> DirectoryOf(const Targets& targets) {
  if (targets.names.empty()) return DefaultJournalDirectory();
  std::error_code failed;
  const bool directory = targets.names.size() == 1 && std::filesystem::is_directory(targets.names.front(), failed);
  return directory ? std::optional<std::filesystem::path>(targets.names.front()) : std::nullopt;
}

JobSelection SelectSessions(const Targets& targets, bool all) {
  std::vector<std::filesystem::path> sessions = FindSessions(targets);
  return all ? JobSelection{.latest = std::move(sessions), .earlier = {}} : SelectLatestJob(sessions);
}

const char* Variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

std::filesystem::path DefaultJournalDirectory() {
  if (const char* set = Variable("AMEM_JOURNAL_DIR")) return set;
  return fmt::format("/tmp/amem-{}/journal", ::getuid());
}

std::filesystem::path DefaultSocketDirectory() {
  if (const char* set = Variable("AMEM_SOCKET_DIR")) return set;
  return fmt::format("/tmp/amem-{}/sockets", ::getuid());
}

void ForEachJournal(const std::vector<std::filesystem::path>& sessions, const ReadOne& read) {
  for (const auto& session : sessions) {
    const Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(session);
    ReadReport damage;
    Went(reader ? read(**reader, damage) : reader.status());
    ComplainAboutDamage(session, damage);
    Progress::OneDone();
  }
}

std::vector<std::unique_ptr<JournalReader>> OpenJournals(const Targets& targets) {
  std::vector<std::unique_ptr<JournalReader>> journals;
  for (const auto& session : FindSessions(targets)) {
    Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(session);
    if (Went(reader.status())) journals.push_back(*std::move(reader));
  }
  return journals;
}

Result<Opening> OpeningOf(const std::filesystem::path& session) {
  AMEM_ASSIGN(const auto reader, JournalReader::Open(session));
  return ReadOpening(*reader);
}

Result<State> StateIn(const std::filesystem::path& session) {
  AMEM_ASSIGN(const auto reader, JournalReader::Open(session));
  return reader->StateAt(std::nullopt);
}

void ComplainAboutDamage(const std::filesystem::path& session, const ReadReport& report) {
  if (report.corrupt_records != 0) Complain(fmt::format("{}: {}", session.string(), DamageText(report)));
}

void Note(const std::string& line) { std::fprintf(stderr, "%s\n", Escaped(line).c_str()); }

void PrintJson(Output& out, Json json, const char* schema, int indent) {
  const auto label = [&](Json& object) {
    Json labelled = {{"schema", fmt::format("amem-replay/{}", schema != nullptr ? schema : running_command)},
                     {"version", kSchemaVersion}};
    for (auto& [key, value] : object.items()) labelled[key] = std::move(value);
    object = std::move(labelled);
  };
  if (json.is_object()) label(json);
  if (json.is_array()) std::ranges::for_each(json, label);
  // Strings in a journal come from elsewhere; bytes that are not UTF-8 are replaced.
  out.Verbatim(json.dump(indent, ' ', true, nlohmann::ordered_json::error_handler_t::replace)) << "\n";
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
