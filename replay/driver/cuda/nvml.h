// Which processes hold the memory of a GPU, from NVIDIA's management library, which comes with the driver. Found at run time;
// without it the answer is empty.
#pragma once

#include <string>
#include <vector>

#include "replay/driver/driver.h"

namespace amem {

// libnvidia-ml.so.1 as dlopen gives it, or null. Opened once and never closed.
void* OpenNvml();
// Empty where `library` is null or does not answer. `uuid` as in CudaDriver::DeviceUuid: "GPU-...".
std::vector<MemoryHolder> HoldersByNvml(void* library, const std::string& uuid);

// A GPU of this machine, whether or not CUDA shows it to this process.
struct GpuInUse {
  std::string uuid;
  MemoryInfo memory;
  Bytes used = 0;              // by processes: what the driver has reserved for itself is neither free nor used
  bool holders_known = false;  // NVML told who holds it; in a container it may not see the processes
  std::vector<MemoryHolder> holders;
};
// By NVML's index; empty where `library` is null or does not answer. NVML stays initialised for the process's life: to start it
// takes longer than all that is asked of it.
std::vector<GpuInUse> GpusByNvml(void* library);

}  // namespace amem
