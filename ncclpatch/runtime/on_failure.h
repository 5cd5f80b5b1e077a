// What is done about a pause or resume that failed: where to read on, for its message, and the command of AMEM_ON_FAILURE.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace amem {

struct FailureReport {
  std::string message;
  std::filesystem::path journals;               // the directory that holds those of the sessions
  std::vector<std::filesystem::path> sessions;  // those of them that may have taken part
  std::string name;                             // a file name for the pack, without its ending
};

// "; journal DIR/SESSION; to see why: amem-replay why DIR". The command is the end of the message, quoted for a shell.
std::string WhereToReadOn(const std::filesystem::path& session_directory);

// Where packs of the journals in that directory go: beside it, so that nobody takes them for journals of more jobs.
std::filesystem::path PackDirectory(const std::filesystem::path& journals);

// Runs AMEM_ON_FAILURE=COMMAND once for each failure that it is given.
//
// A program of its own runs it, in a session of its own, so that no signal to the job's process group reaches it: /bin/sh,
// which packs the journals where it finds amem-replay (a minute at most), and then becomes COMMAND. It gets /dev/null for
// input, the job's stderr for output, and the environment of the job when it loaded AMem, without LD_PRELOAD, and without
// folders in PATH and LD_LIBRARY_PATH that are not absolute: nothing that lies in the job's current directory is run or loaded
// unasked.
class OnFailure {
 public:
  // Once, while one thread runs. An empty command: nothing will be run. `pack_directory`: where packs go; made when there is
  // one. `replay`: amem-replay, a relative path as seen from the current directory now, or a name in PATH; empty: it is looked
  // for beside this library, then in PATH.
  void Configure(const std::string& command, const std::string& replay, const std::filesystem::path& pack_directory,
                 const char* const* environment);
  // Starts the command and does not wait for it: a thread takes its exit status when it ends. From any thread. Returns why it
  // could not be started; empty: it was, or there is none.
  [[nodiscard]] std::string Run(const FailureReport& report) const;

 private:
  std::string command_, replay_;
  std::filesystem::path pack_directory_;
  std::vector<std::string> environment_;
};

}  // namespace amem
