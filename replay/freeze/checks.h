// What is checked before a freeze or a thaw touches anything. Every refusal names what stands in the way and the remedy; all
// that is found is said at once.
#pragma once

#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "journal/base/process_sight.h"
#include "replay/control/job.h"
#include "replay/driver/checkpointer.h"
#include "replay/driver/driver.h"
#include "replay/driver/host_memory.h"

namespace amem {

using control::RankProcess;

// The machine under a job: its host memory, its GPUs and their users, and which process is which. Injected, so that tests have
// a machine that is short of something.
class FreezeHost {
 public:
  virtual ~FreezeHost() = default;
  // By index; empty: there is nobody to ask (no NVML).
  virtual std::vector<GpuInUse> GpusInUse() = 0;
  // Nothing: it cannot be read.
  virtual std::optional<HostRoom> RoomFor(pid_t pid) = 0;
  virtual ProcessLife LifeOf(const RankProcess& process) = 0;
  // What a launcher may have started beside a rank, itself included: the descendants of the process's parent. If the parent is
  // the first process of its pid namespace (a container's launcher, or the one that adopts orphans) or outside of it, all
  // processes of the namespace. A failure: they cannot be read.
  virtual Result<std::set<pid_t>> Siblings(pid_t pid) = 0;
  virtual std::string DriverVersion() = 0;  // "580.159.04"; empty: not known
};

Result<std::set<pid_t>> ReadSiblings(pid_t pid);

struct FreezeAllowances {
  bool this_host_only = false;  // the job may have processes on other hosts, which stay as they are
  bool others_stay = false;     // so may processes beside the ranks that use GPUs and are not under AMem
};

// A process of a freeze, with the facts of its own that its journal has (FreezeStep).
struct FrozenProcess {
  RankProcess process;
  std::vector<GpuShare> gpus;
  std::vector<GpuPair> moved;
  std::uint64_t from_ns = 0;
  bool told = false;                // this freeze is in its journal
  bool restore_unanswered = false;  // it was begun, and the tool died before it wrote what came of it
  // The GPU where the contents are now that `gpu` had at the freeze.
  [[nodiscard]] const std::string& NowAt(const std::string& gpu) const;
};

// By process and GPU, from those who hold memory now. A container's NVML may not see its own processes, and a process that is
// nowhere among them is left out.
std::map<pid_t, std::map<std::string, Bytes>> HeldBy(std::span<const GpuInUse> gpus);

// Of sessions that run, with the `states` of their memory: what a pause would leave that the driver cannot take (multicast
// objects, memory that a network card or another process holds, what other libraries share), other processes of the job, and
// whether the host has room for what is on the GPUs. `ranks_elsewhere`: what the launcher says. kRefused; `notes` gets what
// could not be found out.
Status CheckBeforeFreeze(std::span<const Result<State>> states, FreezeHost& host, std::span<const FrozenProcess> processes,
                         const FreezeAllowances& allowances, std::size_t ranks_elsewhere, std::vector<std::string>& notes);
// Of paused sessions: refuses if one still shares device memory, because the driver could not restore that process.
Status CheckWhilePaused(control::AskedJob& job, std::span<FrozenProcess* const> processes);
// Whether each GPU has room for what comes back to it: what the processes had there before they were paused, less what those
// that the driver has not `taken` have there now. kOutOfMemory names who holds it.
Status CheckRoom(FreezeHost& host, std::span<const FrozenProcess> processes, const std::set<pid_t>& taken,
                 std::span<const GpuPair> pairs, std::vector<std::string>& notes);

// From "0=1,1=0", by index or UUID, or "1,0" (the GPU that takes the place of each, in order): pairs that name every GPU. GPUs
// that are not named stay. kInvalid: it is no permutation of GPUs of this host.
Result<std::vector<GpuPair>> ReadGpuPairs(const std::string& text, std::span<const std::string> gpus);

}  // namespace amem
