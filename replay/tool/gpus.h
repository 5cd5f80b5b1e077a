// Whose memory the GPUs of this machine hold now, as NVML and the journals of living processes have it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "replay/driver/cuda/nvml.h"
#include "replay/tool/command.h"

namespace amem::tool {

// What a living process with AMem has on one GPU.
struct ProcessOnGpu {
  std::int32_t pid = 0;
  std::string name;
  std::map<std::string, Bytes> tags;  // on the GPU now
  Bytes paused = 0;                   // would be there, and is not
};

struct GpuShare {
  std::string whose;
  Bytes bytes = 0;
};
// What is used of the GPU, share by share. They add up to that, unless processes are said to hold more than is used.
std::vector<GpuShare> SharesOf(const GpuInUse& gpu, const std::vector<ProcessOnGpu>& ours);

// Prints it for every GPU; the exit code.
int PrintGpus(const std::vector<std::filesystem::path>& sessions, Output& out);

}  // namespace amem::tool
