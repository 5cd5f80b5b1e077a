// The machine under a job: its host memory, its GPUs and their users, and which process is which. Injected, so that tests have
// a machine that is short of something.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "replay/driver/driver.h"
#include "replay/driver/host_memory.h"
#include "statemachine/types.h"

namespace amem {

struct GpuSight {
  std::string uuid;
  MemoryInfo memory;
  Bytes used = 0;  // by processes; less than total - free by what the driver keeps for itself
  std::vector<MemoryHolder> holders;
};

class FreezeHost {
 public:
  virtual ~FreezeHost() = default;
  // By index; empty: there is nobody to ask (no NVML).
  virtual std::vector<GpuSight> GpusInUse() = 0;
  // Nothing: it cannot be read.
  virtual std::optional<HostRoom> RoomFor(pid_t pid) = 0;
  // Field 22 of /proc/PID/stat; 0: there is no such process, or it has ended and waits for its parent.
  virtual std::uint64_t StartTicks(pid_t pid) = 0;
  // The descendants of the process's parent, itself included: what a launcher has started beside a rank.
  virtual std::vector<pid_t> Siblings(pid_t pid) = 0;
  virtual std::string DriverVersion() = 0;  // "580.159.04"; empty: not known
};

std::vector<pid_t> ReadSiblings(pid_t pid);
std::string ReadDriverVersion();  // of the kernel's module

}  // namespace amem
