// The claims that amem-gpu-test checks, and what they share. Each claim is a function that runs on every rank of a job of its
// own; it returns when the claim holds there, and throws Failure or Skip.
#pragma once

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tests/gpu/options.h"
#include "tests/gpu/workload.h"

namespace amem::gpu {

using Json = nlohmann::ordered_json;

struct Options : CommonOptions {
  std::string stock, amem_lib;
  int cycles = 20, leak_cycles = 200, churn = 3, churn_rounds = 20;
  double budget_s = 0;
  bool list = false;
  std::vector<std::string> only;
  std::string golden, pack;
  std::string child_test;  // name of the test that a rank runs
};

// Where one rank is killed, by amem_kill_at.so.
struct KillPoint {
  bool in_pause = false;
  const char* call = "";   // before this driver call of AMem's:
  bool last = false;       // the last of them, else the first
  double share = 0;        // of the time that a whole pause or resume takes; used where calls cannot be counted
  int victim = 0;          // below zero: counted from the end
  bool once_more = false;  // the others resume without it before they clean up, else they clean up at once
  [[nodiscard]] int Victim(int processes) const { return victim < 0 ? processes + victim : std::min(victim, processes - 1); }
};

struct Rank {
  const Options& options;
  Child& child;
  const Nccl& nccl;
  Amem amem;
  const KillPoint* kill = nullptr;
  Json details = Json::object();  // shown beside the result

  void Expect(bool holds, const std::string& otherwise) const {
    if (!holds) throw Failure(otherwise);
  }
  void Pause(const std::string& when = "") {
    child.Stage("ncclPause " + when);
    amem.Check(amem.Pause(nullptr), nccl, "ncclPause " + when);
  }
  void Resume(const std::string& when = "") {
    child.Stage("ncclResume " + when);
    amem.Check(amem.Resume(nullptr), nccl, "ncclResume " + when);
  }
};

double MibBetween(std::uint64_t more, std::uint64_t less);

// `small`: LL, LL128 and a little of Simple are enough where a claim is not about the protocols.
Workload MakeWorkload(Rank& rank, bool single_process = false, bool small = true);
std::vector<int> World(const Rank& rank);
void ExpectSame(const Workload& work, const std::vector<std::uint64_t>& now, const std::vector<std::uint64_t>& before,
                const std::string& when);

struct Freed {  // free bytes of each device
  std::vector<std::uint64_t> running, paused;
  [[nodiscard]] double LeastMib() const;
};

// Pause, look at the memory with every rank paused, resume. Collective.
Freed Cycle(Rank& rank, const Workload& work, const std::string& when);

Json Stats(const Rank& rank);  // null: the library offers none

// claim_use.cpp: what a program may do before, during and after a pause
void Communicators(Rank& rank);
void UserMemory(Rank& rank);
void WhilePaused(Rank& rank);
void RefusedWhilePaused(Rank& rank);
void Idempotent(Rank& rank);
void BeforeAnyCommunicator(Rank& rank);
void WorkInFlight(Rank& rank);
void MessageOnItsWay(Rank& rank);
void OtherThread(Rank& rank);

// claim_addresses.cpp: memory at addresses of NCCL's own choosing
void SymmetricWindows(Rank& rank);
void OwnSuspend(Rank& rank);

// claim_cycles.cpp: results and memory over many cycles
void ReferenceWorkload(Rank& rank);
void SingleProcess(Rank& rank);
void Legacy(Rank& rank);
void BoundNow(Rank& rank);
void Preloaded(Rank& rank);
void Churn(Rank& rank);
void ManyCycles(Rank& rank);

// claim_failures.cpp: ranks that come late, stay away, have no memory or are killed
void LateRank(Rank& rank);
void AbsentRank(Rank& rank);
void DeviceThatWaits(Rank& rank);
void OutOfMemory(Rank& rank);
void ResumesLate(Rank& rank);
void KilledRank(Rank& rank);
// Kills the victim in its next pause or resume; the others get their error.
void PauseOrResumeAndKill(Rank& rank);

// golden_jobs.cpp: what a journal of a real run looks like, healthy and in each kind of failure
inline constexpr int kGoldenRank = 2;  // the rank that is short of memory, dies, or stays away
void GoldenHealthy(Rank& rank);
void GoldenOutOfMemory(Rank& rank);
void GoldenKilled(Rank& rank);
void GoldenNeverCame(Rank& rank);

}  // namespace amem::gpu
