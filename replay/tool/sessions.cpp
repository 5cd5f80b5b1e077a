// What the commands share: finding sessions, opening journals, complaining.
#include "replay/job/sessions.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>

#include "replay/job/fold.h"
#include "replay/tool/budget.h"
#include "replay/tool/command.h"

namespace amem::tool {

namespace {

bool force = false;  // --force, of whatever command

}  // namespace

void AddDirectories(CLI::App& app, Directories& directories) {
  app.add_option("DIR", directories, "Directories of sessions, or directories that hold several")->required();
  AddForce(app);
}

void AddForce(CLI::App& app) { app.add_flag("--force", force, kForceHelp); }

void AddJson(CLI::App& app, bool& json, const char* shape) { app.add_flag("--json", json, shape); }

Exit Complain(const std::string& message, Exit code) {
  std::fprintf(stderr, "amem-replay: %s\n", Escaped(message).c_str());
  return code;
}

std::vector<std::filesystem::path> FindSessions(const Directories& directories, bool& failed) {
  static ScratchDirectory unpacked;  // removed when the tool ends
  if (!force) KeepWithinBudget(directories, unpacked);
  FoundSessions found = amem::FindSessions(directories, unpacked, force);
  for (const std::string& problem : found.problems) Complain(problem);
  failed |= !found.problems.empty();
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

void PrintJson(Output& out, const nlohmann::ordered_json& json) {
  // Strings in a journal come from elsewhere; bytes that are not UTF-8 are replaced.
  out.Verbatim(json.dump(2, ' ', true, nlohmann::json::error_handler_t::replace)) << "\n";
}

void PrintParagraph(Output& out, const std::string& text, const std::string& indent) {
  constexpr std::size_t kWidth = 100;
  std::istringstream words(text);
  std::size_t column = 0;
  for (std::string word; std::getline(words, word, ' ');) {
    const bool fits = column != 0 && column + 1 + word.size() <= kWidth;
    if (column != 0 && !fits) out << "\n";
    out << (fits ? " " : indent) << word;
    column = (fits ? column + 1 : indent.size()) + word.size();
  }
  out << "\n";
}

}  // namespace amem::tool
