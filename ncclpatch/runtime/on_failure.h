// What happens after a failed pause or resume: where to read on, for the message, and the command of AMEM_ON_FAILURE.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace amem {

struct FailureReport {
  std::string message;
  std::filesystem::path journals;               // the directory of the sessions' journals
  std::vector<std::filesystem::path> sessions;  // journals of sessions that may have taken part
  std::string name;                             // a file name for the pack, without ending
};

// "; journal DIR/SESSION; to see why: amem-replay why DIR". The command ends the message and is quoted for a shell.
std::string WhereToReadOn(const std::filesystem::path& session_directory);

// Where packs of that directory's journals go: beside it, so that nobody takes them for journals.
std::filesystem::path PackDirectory(const std::filesystem::path& journals);

// Runs AMEM_ON_FAILURE=COMMAND once for each failure.
//
// /bin/sh runs it in a session of its own, so that signals to the job's process group do not reach it. It packs the journals if
// it finds amem-replay (within a minute), and then becomes COMMAND. Input is /dev/null, output the job's stderr. The
// environment is the job's at the time when it loaded AMem, without LD_PRELOAD, and without relative folders in PATH and
// LD_LIBRARY_PATH, so that nothing in the current directory is run or loaded.
class OnFailure {
 public:
  // Once, while one thread runs. `command` empty: nothing will run. `pack_directory`: made when there is a pack. `replay`:
  // amem-replay, a path relative to the present directory or a name in PATH; empty: looked for beside this library, then in
  // PATH.
  void Configure(const std::string& command, const std::string& replay, const std::filesystem::path& pack_directory,
                 const char* const* environment);
  // Starts the command without waiting; a thread takes its exit status. Any thread. Returns why it could not start; empty: it
  // did, or there is none.
  [[nodiscard]] std::string Run(const FailureReport& report) const;

 private:
  std::string command_, replay_;
  std::filesystem::path pack_directory_;
  std::vector<std::string> environment_;
};

}  // namespace amem
