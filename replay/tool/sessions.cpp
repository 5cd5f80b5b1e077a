// What the commands share: finding sessions, naming them, complaining.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "replay/job/pack.h"
#include "replay/job/scratch_directory.h"
#include "replay/tool/command.h"

namespace amem::tool {

void Complain(const std::string& message) { std::fprintf(stderr, "amem-replay: %s\n", message.c_str()); }

namespace {

Result<std::vector<std::filesystem::path>> UnpackSessions(const std::filesystem::path& file, bool& failed) {
  static ScratchDirectory scratch;  // until the end of the program
  static int packs = 0;
  const Result<std::filesystem::path> directory = scratch.Get();
  if (!directory) return directory.status();
  Result<Unpacked> unpacked = Unpack(file, *directory / std::to_string(++packs));
  if (!unpacked) return unpacked.status();
  for (const std::string& damage : unpacked->damage) Complain(damage);
  failed |= !unpacked->damage.empty();
  return std::move(unpacked->sessions);
}

}  // namespace

std::vector<std::filesystem::path> FindSessions(const Directories& directories, bool& failed) {
  std::vector<std::filesystem::path> sessions;
  for (const auto& directory : directories) {
    Result<std::vector<std::filesystem::path>> listed =
        IsPack(directory) ? UnpackSessions(directory, failed) : ListSessions(directory);
    if (!listed) {
      Complain(listed.status().message());
      failed = true;
      continue;
    }
    if (listed->empty()) {
      Complain(
          "no session under " + directory.string() +
          ": give a session's directory (it holds data.mdb) or one that holds several; `amem-replay ls` shows this user's");
      failed = true;
    }
    for (auto& session : *listed) {
      if (std::find(sessions.begin(), sessions.end(), session) == sessions.end()) sessions.push_back(std::move(session));
    }
  }
  return sessions;
}

std::filesystem::path DefaultDirectory() {
  if (const char* set = std::getenv("AMEM_JOURNAL_DIR"); set && *set) return set;
  return "/tmp/amem-" + std::to_string(::getuid()) + "/journal";
}

Result<SessionOpened> OpeningOf(JournalReader& reader, const JournalInfo& info) {
  std::optional<SessionOpened> opening;
  if (info.first.value == 1) {
    const Result<ReadReport> read = reader.Read(info.first, info.first, [&opening](const Event& event) {
      if (const auto* e = std::get_if<SessionOpened>(&event.body)) {
        opening = *e;
        // Written by a test or an early crash: relative times then count from the first event.
        if (opening->monotonic_ns == 0) opening->monotonic_ns = event.time_ns;
      }
      return false;
    });
    if (!read) return read.status();
  } else if (info.first) {
    Result<State> state = reader.StateAt(info.first);
    if (!state) return state.status();
    opening = state->session;
  }
  if (!opening) opening = SessionOpened{.session = info.session, .pid = info.pid};
  return *std::move(opening);
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

bool ComplainAboutDamage(const std::filesystem::path& session, const ReadReport& report) {
  if (report.corrupt_records == 0) return false;
  Complain(session.string() + ": " + Grouped(report.corrupt_records) + " damaged " +
           (report.corrupt_records == 1 ? "record was" : "records were") + " left out: " + report.corruption);
  return true;
}

}  // namespace amem::tool
