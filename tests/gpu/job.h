// Runs one job of several processes, each started anew from this program, and never waits for ever.
//
// The parent makes a shared region, starts the children (fork and exec: a library that is inert in forked children must see a
// process of its own), watches them, and ends them all at the deadline. Children meet at barriers in the shared region; a
// barrier gives up when another rank failed or the deadline passed, and says which ranks did not come and what they were doing.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/gpu/apis.h"

namespace amem::gpu {

inline constexpr int kMaxProcesses = 64;

double Now();  // seconds, CLOCK_MONOTONIC: comparable between the processes of one host

struct SharedRegion;

// What a child process has of its job.
class Child {
 public:
  Child(int region_fd, int rank);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int processes() const;
  [[nodiscard]] double deadline() const;

  // What this rank is doing, shown when it hangs.
  void Stage(const std::string& text);
  // Throws Aborted when another rank ended, Failure at the deadline.
  void Barrier(const char* name);
  // The victim of the job (JobSpec::victim) has ended: this rank no longer waits for it. Every other rank calls this.
  void Without(int rank);
  // Rank 0 of a new communicator makes the id, and all ranks get it. Collective over all ranks of the job; one id for each
  // entry of `makers`: the rank that calls `make` for it.
  std::vector<ncclUniqueId> ExchangeIds(const std::vector<int>& makers, const std::function<ncclUniqueId()>& make);
  // The largest `value` of all ranks. Collective.
  double Maximum(double value);
  double Minimum(double value);
  // A connected SOCK_SEQPACKET descriptor to another rank.
  [[nodiscard]] int Socket(int peer) const;
  // The rank's result, JSON text, for the parent.
  void Result(const std::string& json);

  // For the top of main.
  void Failed(const std::string& text);
  void Skipped(const std::string& text);
  void Gone(const std::string& text);

 private:
  SharedRegion* region_ = nullptr;
  int rank_ = 0;
  int ended_ = -1;  // see Without
};

struct JobSpec {
  std::string name;
  int processes = 1;
  double time_limit_s = 120;
  std::vector<std::string> arguments;              // for the children's main, after the job's own
  std::map<std::string, std::string> environment;  // added to the parent's
  std::string log_path;                            // children's output is appended here; "" = none kept
  bool verbose = false;                            // children write to our stderr
  int victim = -1;                                 // this rank must end by SIGKILL, and all others well
};

enum class Outcome { kPass, kFail, kSkipped };
const char* OutcomeText(Outcome outcome);

struct JobResult {
  Outcome outcome = Outcome::kFail;
  std::string reason;                // empty when passed
  std::vector<std::string> results;  // by rank; what Child::Result got
  double seconds = 0;
};

JobResult RunJob(const JobSpec& spec);

// The child's side of main: true when `argv` starts with the job's own arguments, which are removed.
bool IsChild(int& argc, char**& argv, int& region_fd, int& rank);
// Runs `body` and turns its exceptions into the slot's text and the exit code.
int RunChild(int region_fd, int rank, const std::function<void(Child&)>& body);

// Exit code 2 with a message unless NVLS is off: multicast objects must never be made on a shared host.
bool RefusedForNvls(const char* program);

}  // namespace amem::gpu
