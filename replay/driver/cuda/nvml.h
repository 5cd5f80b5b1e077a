// Which processes hold a GPU's memory, from NVIDIA's management library. Found at run time; without it the answer is empty.
#pragma once

#include <string>
#include <vector>

#include "replay/driver/driver.h"

namespace amem {

// libnvidia-ml.so.1 as dlopen gives it, or null. Opened once and never closed.
void* OpenNvml();
// Empty if `library` is null or does not answer. `uuid` as in CudaDriver::DeviceUuid: "GPU-...".
std::vector<MemoryHolder> HoldersByNvml(void* library, const std::string& uuid);

// By NVML's index; empty if `library` is null or does not answer. NVML stays initialised, because starting it takes longer than
// the answers.
std::vector<GpuInUse> GpusByNvml(void* library);

}  // namespace amem
