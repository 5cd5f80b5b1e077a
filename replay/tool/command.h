// Commands: each reads journals, prints to standard output and returns its exit code. Errors go to stderr, with a remedy.
//
// A new command is a file replay/tool/NAME.cpp, which defines NameCommand(), and its line in the list of main.cpp. The text of
// messages, help and examples calls the program `amem`; AsCalled puts the name in by which it was started.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/job/jobs.h"
#include "replay/job/opening.h"
#include "replay/job/output_file.h"
#include "replay/tool/command_line/arguments.h"
#include "replay/tool/output.h"

namespace amem::tool {

using Json = nlohmann::ordered_json;

// kViolationFound: verify found a violation, why a failure, run or diff a difference.
enum Exit : int { kFine = 0, kUsage = 1, kCannotRead = 2, kViolationFound = 3 };

// The groups of --help.
inline constexpr const char* kFailureGroup = "A failure";
inline constexpr const char* kLivingGroup = "A living job";
inline constexpr const char* kMemoryGroup = "Memory";
inline constexpr const char* kExpertGroup = "Experts";
inline constexpr const char* kHandOnGroup = "To hand on";

struct Command {
  const char* group;
  std::string name;
  const char* does;      // a short line for the list of commands
  const char* examples;  // lines for its own --help: commands with two blanks before them, and sentences
  bool paged = true;     // false: it writes files, or goes on for long
  Arguments arguments = {};
  std::function<int(Output&)> run = {};  // with what the arguments were given
};

struct Targets;
void AddTargets(Arguments& arguments, Targets& targets);

// A command that keeps its options in `Options`: `add` adds them to its arguments, behind its targets; `run` runs with them.
template <class Options>
Command WithOptions(Command command, void (*add)(Arguments&, Options&), int (*run)(const Options&, Output&)) {
  const auto options = std::make_shared<Options>();
  if constexpr (requires { options->targets; }) AddTargets(command.arguments, options->targets);
  add(command.arguments, *options);
  command.run = [options, run](Output& out) { return run(*options, out); };
  return command;
}

// ---- shared by the commands (sessions.cpp) ---------------------------------------------------------------------------------

// "amem" or "amem-replay", which is the same program without the commands of the Python package.
extern std::string program_name;
std::string AsCalled(std::string text);  // of ours: names the program as it was called

void AddJson(Arguments& arguments, bool& json, const char* shape = "One JSON object");

// One line on stderr: "amem-replay: ...". Returns the exit code of a command that ends with it. With --json, a command that
// prints nothing else prints what was complained about (PrintErrors).
Exit Complain(const std::string& message, Exit code = kCannotRead);
bool Went(const Status& status);  // complains of a failure
// What ends the commands that print what could be read: whether something could not.
[[nodiscard]] bool AnyComplaint();
[[nodiscard]] inline Exit ReadAll() { return AnyComplaint() ? kCannotRead : kFine; }

// What the command line chose, for messages and for "schema" in JSON.
extern std::string running_command;

const char* Variable(const char* name);  // of the environment; null: unset or empty
// Where sessions put their journals unless told otherwise: AMEM_JOURNAL_DIR, else /tmp/amem-UID/journal.
std::filesystem::path DefaultJournalDirectory();
std::filesystem::path DefaultSocketDirectory();  // AMEM_SOCKET_DIR, or /tmp/amem-UID/sockets

// Opens the journals one after the other and has them read. What cannot be opened or read, or is damaged, is complained about
using ReadOne = std::function<Status(JournalReader& reader, ReadReport& damage)>;
void ForEachJournal(const std::vector<std::filesystem::path>& sessions, const ReadOne& read);
Result<Opening> OpeningOf(const std::filesystem::path& session);

// Complains about records that could not be read.
void ComplainAboutDamage(const std::filesystem::path& session, const ReadReport& report);

void Note(const std::string& line);  // on stderr, as it is
// An object, or an array of objects, each of which then begins with "schema" and "version": the file of that name in schemas/
// describes it. Without a name it is that of the command.
void PrintJson(Output& out, Json json, const char* schema = nullptr, int indent = 2);
inline constexpr int kSchemaVersion = 1;  // goes up when a key goes away or means something else
void PrintErrors(Output& out, const std::string& command, int exit_code);
// Rows, the first with the headings, in columns as wide as what is in them.
void PrintTable(Output& out, const std::vector<std::vector<std::string>>& rows);
// Broken into lines of a terminal's width, each after `indent`.
void PrintParagraph(Output& out, const std::string& text, const std::string& indent);

// ---- what a command is given, made into directories of sessions (targets.cpp) ----------------------------------------------

// What a command is given to read. Each name is the directory of a session, one that holds several, a parent of such
// directories or of packs; a file that `amem pack` made, or "-" for such a file on standard input; or, of the journals in
// DefaultJournalDirectory(), the pid of a rank or of its launcher, the launcher's id of a job, or a session. A pid or a
// launcher's id means all sessions of that job. No name: all in DefaultJournalDirectory().
struct Targets {
  std::vector<std::string> names;
  std::vector<std::string> ranks;  // or ids of sessions; empty: all
  bool one_process = false;        // a pid means that process, and not its job
  bool force = false;              // packs however much they unpack to
};

// A command about the same targets, to paste into a shell: "amem log DIR --merge". Empty: one was on standard input.
std::string CommandOn(const char* command, const Targets& targets, const std::string& options);

// The session directories that are meant, each once; packs are unpacked until the tool ends. What cannot be found is complained
// about, and of that what holds journals that could not be read is `unread`, for Diagnose.
std::vector<std::filesystem::path> FindSessions(const Targets& targets, std::vector<std::string>* unread = nullptr);
// Opens all of them.
std::vector<std::unique_ptr<JournalReader>> OpenJournals(const Targets& targets);
// Of them the latest job's, or `all`.
JobSelection SelectSessions(const Targets& targets, bool all, std::vector<std::string>* unread = nullptr);

// What is on standard input, as a file in `scratch`. kInvalid: standard input is a terminal, or not what `pack` writes.
Result<std::filesystem::path> PackFromStandardInput(ScratchDirectory& scratch);

// Whether its process lives. Of a pack only whether it lived then can be known.
bool LivesNow(const JournalInfo& info);
std::string_view StatusText(const JournalInfo& info);  // "packed" where it lived when it was packed

// Whether the launcher calls the job so, in a variable that tells jobs apart.
bool LaunchedAs(const SessionOpened& who, const std::string& id);
bool DescendsFrom(std::int32_t pid, std::uint64_t ancestor);

// ---- positions in journals as people give them (position.cpp) ---------------------------------------------------------------

// "#1200", "2#1200", "12.5", "90 s", "10 min ago", "2026-11-21 20:20:58".
struct Position {
  std::string text = {};                   // as it was given
  std::optional<std::int32_t> rank = {};   // of RANK#SEQ: whose journal
  std::optional<SequenceNumber> seq = {};  // nothing: it is a time
  bool wall = false;                       // nanoseconds since 1970; else nanoseconds since the opening
  std::uint64_t ns = 0;
};

inline constexpr const char* kPosition = "POSITION";  // how --help calls one
// An option that takes one. Dates and times are local, unless a zone is behind them.
Argument& AddPosition(Arguments& arguments, const char* name, std::vector<Position>& target, const char* help);

// The journal that a position is in: that of its rank, or the only one. kInvalid: it does not say.
Result<JournalReader*> JournalOf(const Position& position, std::span<const std::unique_ptr<JournalReader>> journals);
// The last event that is not behind the position. kInvalid: all are.
Result<SequenceNumber> EventAt(const Position& position, JournalReader& reader);
// Likewise of an option's only position; nothing: it was not given.
Result<std::optional<SequenceNumber>> EventAt(const std::vector<Position>& position, JournalReader& reader);
// The same in nanoseconds since 1970.
Result<std::uint64_t> WallTimeOf(SequenceNumber seq, JournalReader& reader);

// ---- commands that are options of another one ------------------------------------------------------------------------------

int PrintLive(const std::vector<std::string>& job, bool json, Output& out);  // control/pause.cpp: `amem ls --live`
// Of `amem state`: lifecycle, memory and tags; `when`: "now", of what is held.
void PrintLifecycleAndMemory(Output& out, const State& state, std::string_view when);

}  // namespace amem::tool
