// The commands of the tool: each reads journals, prints to `out`, and returns its exit code. Errors go to stderr, with a
// remedy.
//
// A new command is a struct of its options, a function here, a file amem_replay_NAME.cpp, and its line in amem_replay_main.cpp.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/job/names.h"
#include "replay/tool/output.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem::tool {

enum Exit : int { kFine = 0, kUsage = 1, kCannotRead = 2, kViolationFound = 3 };

// kViolationFound: verify found a violation, why a failure, run a difference.
// Directories as given: each is a session's, or holds several. Or a file that `amem-replay pack` made.
using Directories = std::vector<std::filesystem::path>;

struct InfoOptions {
  Directories directories;
  bool json = false;
};
struct LogOptions {
  Directories directories;
  bool json = false;
  std::vector<std::string> kinds;  // empty: all
  std::optional<std::uint64_t> allocation;
  std::optional<std::uint64_t> from, to;  // sequence numbers, both included
  std::optional<double> since, until;     // seconds after the session's opening
  std::optional<std::uint64_t> last;      // only so many, after all other filters
};
struct StateOptions {
  std::filesystem::path directory;
  std::optional<std::uint64_t> at;
  bool json = false;
};
struct VerifyOptions {
  Directories directories;
  bool json = false;
};
struct ListOptions {
  std::filesystem::path directory;  // empty: where sessions of this user put their journals
  bool json = false;
};

struct WhyOptions {
  Directories directories;
  bool all = false;  // all sessions given, not only those of the latest job
  bool json = false;
};
struct PackCommandOptions {
  Directories directories;
  std::filesystem::path file;
  bool anonymous = false;
};
struct UnpackOptions {
  std::filesystem::path file, directory;
};
struct RunOptions {
  Directories directories;
  std::string until;                // "SEQ", or "RANK:SEQ"
  std::vector<std::string> memory;  // "DEVICE=BYTES"
  std::string driver = "sim";       // or "cuda"
  bool processes = false;
  bool json = false;
};
struct DiffOptions {
  std::string a, b;  // "DIR", "DIR@SEQ"; the second also "@SEQ"
  bool json = false;
};
struct RefsOptions {
  Directories directories;
  bool dot = false, json = false;
};
struct TopOptions {
  Directories directories;
  std::string by = "site";  // "site", "peer", "size", "age"
  std::optional<std::uint64_t> at;
  std::size_t limit = 20;
  bool json = false;
};
struct TailOptions {
  std::string what;  // a pid or a directory
  std::uint64_t last = 10;
  std::uint32_t interval_ms = 200;
  bool json = false;
};
struct TraceOptions {
  Directories directories;
  std::filesystem::path file;
};

int RunInfo(const InfoOptions& options, Output& out);
int RunLog(const LogOptions& options, Output& out);
int RunState(const StateOptions& options, Output& out);
int RunVerify(const VerifyOptions& options, Output& out);
int RunList(const ListOptions& options, Output& out);
int RunWhy(const WhyOptions& options, Output& out);
int RunRun(const RunOptions& options, Output& out);
int RunDiff(const DiffOptions& options, Output& out);
int RunRefs(const RefsOptions& options, Output& out);
int RunTop(const TopOptions& options, Output& out);
int RunTail(const TailOptions& options, Output& out);
int RunTrace(const TraceOptions& options, Output& out);
int RunPack(const PackCommandOptions& options, Output& out);
int RunUnpack(const UnpackOptions& options, Output& out);

// ---- shared by the commands (amem_replay_sessions.cpp) ----------------------------------------------------------------------

// One line on stderr: "amem-replay: ...".
void Complain(const std::string& message);

// The session directories that `directories` name, each once; packs are unpacked until the tool ends. What cannot be listed is
// complained about and makes `failed` true.
std::vector<std::filesystem::path> FindSessions(const Directories& directories, bool& failed);

// Where sessions put their journals unless told otherwise: AMEM_JOURNAL_DIR, else /tmp/amem-UID/journal.
std::filesystem::path DefaultDirectory();

// Who opened the session and when; from the first event, or from the snapshot if that is gone.
Result<SessionOpened> OpeningOf(JournalReader& reader, const JournalInfo& info);

// Broken into lines of a terminal's width, each after `indent`.
void PrintParagraph(Output& out, const std::string& text, const std::string& indent);

// Complains about records that could not be read. True if there were any.
bool ComplainAboutDamage(const std::filesystem::path& session, const ReadReport& report);

}  // namespace amem::tool
