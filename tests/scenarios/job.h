// Running jobs of several rank processes (job_rank.cpp) on the stand-ins for the driver and NCCL, for the end-to-end tests.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace amem::job {

struct Rank {
  int status = 0;  // exit status, or 256 + the signal that killed it
  std::string out, err;
  // What the `nth` run of a command printed; "(not run)" if it was not.
  [[nodiscard]] std::string Said(const std::string& command, int nth = 0) const;
};

using Environment = std::map<std::string, std::string>;

// A directory of its own for each job: journals, the simulated world, patched copies. Removed at the end.
class Job {
 public:
  Job();
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  Environment environment;                    // added to what the ranks get
  std::map<int, Environment> environment_of;  // of one rank, besides
  [[nodiscard]] const std::filesystem::path& directory() const { return directory_; }
  [[nodiscard]] std::filesystem::path journals() const { return directory_ / "journal"; }
  // Runs the commands in `ranks` processes at once and waits for them, at most a minute and a half.
  std::vector<Rank> Run(int ranks, const std::vector<std::string>& commands);

  // Run in parts, for a test that looks at the job while it runs. Start once; the ranks' processes, in order; what a rank has
  // printed so far; and waiting for all, who are killed when the time is up.
  void Start(int ranks, const std::vector<std::string>& commands);
  [[nodiscard]] const std::vector<pid_t>& processes() const { return children_; }
  [[nodiscard]] Rank SoFar(int rank) const;
  std::vector<Rank> Finish(std::chrono::milliseconds patience);

 private:
  std::filesystem::path directory_;
  std::vector<pid_t> children_;
};

// Any program, its output, its status.
Rank RunProgram(const std::vector<std::string>& command, const Environment& environment, const std::filesystem::path& scratch);

}  // namespace amem::job
