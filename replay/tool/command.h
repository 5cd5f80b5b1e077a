// Commands: each reads journals, prints to standard output and returns its exit code. Errors go to stderr, with a remedy.
//
// A new command is a file replay/tool/NAME.cpp, which defines NameCommand(), and its line in the list of main.cpp.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/job/jobs.h"
#include "replay/job/output_file.h"
#include "replay/tool/command_line/arguments.h"
#include "replay/tool/output.h"

namespace amem::tool {

// kViolationFound: verify found a violation, why a failure, run or diff a difference.
enum Exit : int { kFine = 0, kUsage = 1, kCannotRead = 2, kViolationFound = 3 };

struct Command {
  const char* name;
  const char* does;      // one line for the list of commands
  const char* examples;  // lines for its own --help
  // Adds the options to the command line. What it returns is run when the command was chosen, after they were parsed.
  std::function<int(Output&)> (*set_up)(Arguments& arguments);
  bool paged = true;  // false: it writes files, or goes on for long
};

// The set_up of a command that keeps its options in `Options`: `add` adds them, `run` runs with them.
template <class Options>
std::function<int(Output&)> SetUp(Arguments& arguments, void (*add)(Arguments&, Options&),
                                  int (*run)(const Options&, Output&)) {
  const auto options = std::make_shared<Options>();
  add(arguments, *options);
  return [options, run](Output& out) { return run(*options, out); };
}

// ---- shared by the commands (sessions.cpp) ---------------------------------------------------------------------------------

// Places as given: the directory of a session, one that holds several, a parent of such directories, a file that `amem-replay
// pack` made, or "-" for such a file on standard input. None: DefaultJournalDirectory().
using Directories = std::vector<std::filesystem::path>;
void AddDirectories(Arguments& arguments, Directories& directories);
void AddForce(Arguments& arguments);  // as AddDirectories does
void AddJson(Arguments& arguments, bool& json, const char* shape = "One JSON object");

// One line on stderr: "amem-replay: ...". Returns the exit code of a command that ends with it. With --json, a command that
// prints nothing else prints what was complained about (PrintErrors).
Exit Complain(const std::string& message, Exit code = kCannotRead);

// The session directories that `directories` name, each once; packs are unpacked until the tool ends. What cannot be listed is
// complained about and makes `failed` true.
std::vector<std::filesystem::path> FindSessions(const Directories& directories, bool& failed);

// Of those the latest job's, or `all`.
JobSelection SelectSessions(const Directories& directories, bool all, bool& failed);

// What the command line chose, for messages and for "schema" in JSON.
extern std::string running_command;

// Where sessions put their journals unless told otherwise: AMEM_JOURNAL_DIR, else /tmp/amem-UID/journal.
std::filesystem::path DefaultJournalDirectory();

// Opens the journals one after the other and has them read. What cannot be opened or read, or is damaged, is complained about
using ReadOne = std::function<Status(const std::filesystem::path& session, JournalReader& reader, ReadReport& damage)>;
void ForEachJournal(const std::vector<std::filesystem::path>& sessions, bool& failed, const ReadOne& read);
// Opens all of them.
std::vector<std::unique_ptr<JournalReader>> OpenJournals(const Directories& directories, bool& failed);

// Complains about records that could not be read. True if there were any.
bool ComplainAboutDamage(const std::filesystem::path& session, const ReadReport& report);

// What was written to a file, in a line: on stderr when the file is standard output.
void Summarize(bool to_standard_output, Output& out, const std::string& line);
inline constexpr const char* kOutputHelp = "The file to write; - for standard output";
inline constexpr const char* kForceHelp =
    "Read packs however much they unpack to, and take as much memory and time as it needs";

// An object, or an array of objects, each of which then begins with "schema" and "version": the file of that name in schemas/
// describes it. Without a name it is that of the command.
void PrintJson(Output& out, nlohmann::ordered_json json, const char* schema = nullptr);
inline constexpr int kSchemaVersion = 1;  // goes up when a key goes away or means something else
void PrintErrors(Output& out, const std::string& command, int exit_code);
// Broken into lines of a terminal's width, each after `indent`.
void PrintParagraph(Output& out, const std::string& text, const std::string& indent);

}  // namespace amem::tool
