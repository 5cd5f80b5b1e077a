// Another program for a while: what runs on a host over ssh, and tar.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "statemachine/types.h"

namespace amem::tool {

struct Finished {
  int exit_code = -1;      // 128 + N: ended by signal N
  bool timed_out = false;  // it was ended because it took too long
  std::string errors;      // the last lines that it wrote to stderr
};
// Runs argv[0], found in PATH, with standard output going to the file. kIo: it could not be started.
Result<Finished> RunProgram(const std::vector<std::string>& argv, const std::filesystem::path& output,
                            std::chrono::seconds limit);

// The journals of a host: "user@host", or "user@host:DIR" where they are elsewhere there.
struct RemoteHost {
  std::string name;
  std::string directory;  // empty: AMEM_JOURNAL_DIR of the login there, else /tmp/amem-UID/journal
};
RemoteHost ParseHost(const std::string& text);
// What ssh is to run there: amem-replay pack where it is installed, else tar. Either writes to standard output.
std::string RemoteCommand(const RemoteHost& host, const std::string& tool, bool tar);

}  // namespace amem::tool
