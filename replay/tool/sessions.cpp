// What the commands share: finding sessions, opening journals, complaining.
#include "replay/job/sessions.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "replay/job/fold.h"
#include "replay/tool/command.h"

namespace amem::tool {

void AddDirectories(CLI::App& app, Directories& directories) {
  app.add_option("DIR", directories, "Directories of sessions, or directories that hold several")->required();
}

void AddJson(CLI::App& app, bool& json, const char* shape) { app.add_flag("--json", json, shape); }

void Complain(const std::string& message) { std::fprintf(stderr, "amem-replay: %s\n", message.c_str()); }

std::vector<std::filesystem::path> FindSessions(const Directories& directories, bool& failed) {
  static SessionFinder finder;  // what it unpacked is removed when the tool ends
  SessionFinder::Found found = finder.Find(directories);
  for (const std::string& problem : found.problems) Complain(problem);
  failed |= !found.problems.empty();
  return std::move(found.sessions);
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

void PrintJson(Output& out, const nlohmann::ordered_json& json) {
  // Strings in a journal come from elsewhere; bytes that are not UTF-8 are replaced.
  out << json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

void PrintParagraph(Output& out, const std::string& text, const std::string& indent) {
  constexpr std::size_t kWidth = 100;
  std::size_t at = 0, column = 0;
  while (at < text.size()) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    const std::size_t word = end - at;
    if (column != 0 && column + 1 + word > kWidth) {
      out << "\n";
      column = 0;
    }
    if (column == 0) {
      out << indent;
      column = indent.size();
    } else {
      out << " ";
      ++column;
    }
    out << std::string_view(text).substr(at, word);
    column += word;
    at = end + 1;
  }
  out << "\n";
}

}  // namespace amem::tool
