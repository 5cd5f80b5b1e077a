#include "replay/driver/cuda/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <fstream>

namespace amem {
namespace {

// The few declarations of nvml.h that are needed; it does not come with every toolkit.
struct ProcessInfo {  // nvmlProcessInfo_t since CUDA 11
  unsigned pid;
  unsigned long long used_bytes;  // all ones: not known
  unsigned gpu_instance, compute_instance;
};
constexpr int kSuccess = 0;
constexpr unsigned kProcessesMax = 256;

template <class Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

std::string ProgramOf(unsigned pid) {
  std::string name;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/comm"), name);
  return name;
}

}  // namespace

void* OpenNvml() {
  static void* const library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  return library;
}

std::vector<MemoryHolder> HoldersByNvml(void* library, const std::string& uuid) {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*by_uuid)(const char*, void**) = nullptr;
  int (*processes)(void*, unsigned*, ProcessInfo*) = nullptr;
  if (library == nullptr || !Find(library, "nvmlInit_v2", init) || !Find(library, "nvmlShutdown", shutdown) ||
      !Find(library, "nvmlDeviceGetHandleByUUID", by_uuid) ||
      !Find(library, "nvmlDeviceGetComputeRunningProcesses_v3", processes) || init() != kSuccess) {
    return {};
  }
  std::vector<ProcessInfo> found(kProcessesMax);
  auto count = kProcessesMax;
  void* device = nullptr;
  if (by_uuid(uuid.c_str(), &device) != kSuccess || processes(device, &count, found.data()) != kSuccess) count = 0;
  shutdown();  // counted: others in this process that use it are not disturbed
  found.resize(std::min(count, kProcessesMax));
  std::vector<MemoryHolder> holders;
  for (const ProcessInfo& process : found) {
    const bool known = process.used_bytes != ~0ULL;
    holders.push_back({static_cast<std::int32_t>(process.pid), known ? process.used_bytes : 0, ProgramOf(process.pid)});
  }
  return holders;
}

}  // namespace amem
