// The machine under a job: its host memory, its GPUs and their users, and which process is which. Injected, so that tests have
// a machine that is short of something.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "replay/driver/driver.h"
#include "replay/driver/host_memory.h"
#include "statemachine/types.h"

namespace amem {

class FreezeHost {
 public:
  virtual ~FreezeHost() = default;
  // By index; empty: there is nobody to ask (no NVML).
  virtual std::vector<GpuInUse> GpusInUse() = 0;
  // Nothing: it cannot be read.
  virtual std::optional<HostRoom> RoomFor(pid_t pid) = 0;
  // Field 22 of /proc/PID/stat; 0: there is no such process, or it has ended and waits for its parent.
  virtual std::uint64_t StartTicks(pid_t pid) = 0;
  // The descendants of the process's parent, itself included: what a launcher has started beside a rank.
  virtual std::set<pid_t> Siblings(pid_t pid) = 0;
  virtual std::string DriverVersion() = 0;  // "580.159.04"; empty: not known
};

std::set<pid_t> ReadSiblings(pid_t pid);
std::string ReadDriverVersion();  // of the kernel's module

}  // namespace amem
