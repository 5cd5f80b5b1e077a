#include "replay/driver/cuda/nvml.h"

#include <dlfcn.h>

#include <algorithm>

#include "journal/base/file.h"

namespace amem {
namespace {

// The few declarations that are needed, because not every toolkit has nvml.h.
struct ProcessInfo {  // nvmlProcessInfo_t since CUDA 11
  unsigned pid;
  unsigned long long used_bytes;  // all ones: unknown
  unsigned gpu_instance, compute_instance;
};
constexpr int kSuccess = 0;
constexpr unsigned kProcessesMax = 256;

template <class Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

std::string ProgramOf(unsigned pid) { return FirstLineOf("/proc/" + std::to_string(pid) + "/comm"); }

struct MemoryNumbers {  // nvmlMemory_t
  unsigned long long total, free, used;
};
struct MemoryNumbers2 {  // nvmlMemory_v2_t, which tells reserved from used
  unsigned version;
  unsigned long long total, reserved, free, used;
};
constexpr unsigned kMemoryVersion2 = sizeof(MemoryNumbers2) | 2U << 24;
constexpr unsigned kUuidLength = 96;

struct NvmlCalls {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*by_uuid)(const char*, void**) = nullptr;
  int (*processes)(void*, unsigned*, ProcessInfo*) = nullptr;
};

// Initialises NVML. The caller shuts it down; NVML counts this, so other users in the process are not disturbed.
bool StartNvml(void* library, NvmlCalls& calls) {
  return library != nullptr && Find(library, "nvmlInit_v2", calls.init) && Find(library, "nvmlShutdown", calls.shutdown) &&
         Find(library, "nvmlDeviceGetHandleByUUID", calls.by_uuid) &&
         Find(library, "nvmlDeviceGetComputeRunningProcesses_v3", calls.processes) && calls.init() == kSuccess;
}

bool ListHolders(const NvmlCalls& calls, void* device, std::vector<MemoryHolder>& holders) {
  std::vector<ProcessInfo> found(kProcessesMax);
  auto count = kProcessesMax;
  if (calls.processes(device, &count, found.data()) != kSuccess) return false;
  found.resize(std::min(count, kProcessesMax));
  for (const ProcessInfo& process : found) {
    const bool known = process.used_bytes != ~0ULL;
    holders.push_back({static_cast<std::int32_t>(process.pid), known ? process.used_bytes : 0, ProgramOf(process.pid)});
  }
  return true;
}

}  // namespace

void* OpenNvml() {
  static void* const library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  return library;
}

std::vector<MemoryHolder> HoldersByNvml(void* library, const std::string& uuid) {
  NvmlCalls calls;
  if (!StartNvml(library, calls)) return {};
  std::vector<MemoryHolder> holders;
  void* device = nullptr;
  if (calls.by_uuid(uuid.c_str(), &device) == kSuccess) ListHolders(calls, device, holders);
  calls.shutdown();
  return holders;
}

std::vector<GpuInUse> GpusByNvml(void* library) {
  int (*count_of)(unsigned*) = nullptr;
  int (*by_index)(unsigned, void**) = nullptr;
  int (*uuid_of)(void*, char*, unsigned) = nullptr;
  int (*memory_of)(void*, MemoryNumbers*) = nullptr;
  int (*memory2_of)(void*, MemoryNumbers2*) = nullptr;
  static NvmlCalls calls;
  static const bool started = StartNvml(library, calls);
  if (!started || !Find(library, "nvmlDeviceGetCount_v2", count_of) ||
      !Find(library, "nvmlDeviceGetHandleByIndex_v2", by_index) || !Find(library, "nvmlDeviceGetUUID", uuid_of) ||
      !Find(library, "nvmlDeviceGetMemoryInfo", memory_of)) {
    return {};
  }
  std::vector<GpuInUse> gpus;
  unsigned count = 0;
  if (count_of(&count) != kSuccess) count = 0;
  for (unsigned index = 0; index < count; ++index) {
    void* device = nullptr;
    char uuid[kUuidLength] = {};
    MemoryNumbers memory{};
    if (by_index(index, &device) != kSuccess || uuid_of(device, uuid, kUuidLength) != kSuccess ||
        memory_of(device, &memory) != kSuccess) {
      continue;  // lost, or another user's MIG instance
    }
    MemoryNumbers2 exact{};
    exact.version = kMemoryVersion2;
    if (!Find(library, "nvmlDeviceGetMemoryInfo_v2", memory2_of) || memory2_of(device, &exact) != kSuccess)
      exact.used = memory.used;
    GpuInUse gpu{.uuid = uuid, .memory = {.free = memory.free, .total = memory.total}, .used = exact.used, .holders = {}};
    gpu.holders_known = ListHolders(calls, device, gpu.holders);
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

}  // namespace amem
