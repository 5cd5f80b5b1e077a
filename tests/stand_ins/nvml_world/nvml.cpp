// NVIDIA's management library for the GPUs of a simulated world (AMEM_SIM_WORLD and the like, as the stand-in libcuda reads
// them): how much of each is free, and which processes hold it.
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "tests/stand_ins/checkpoint/world_checkpoint.h"

namespace {

struct ProcessInfo {
  unsigned pid;
  unsigned long long used_bytes;
  unsigned gpu_instance, compute_instance;
};
struct MemoryNumbers {
  unsigned long long total, free, used;
};

std::uint64_t Setting(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 10);
}

amem::SimulatorWorld* World() {
  static const std::shared_ptr<amem::SimulatorWorld> world = [] {
    const char* path = std::getenv("AMEM_SIM_WORLD");
    if (path == nullptr) return std::shared_ptr<amem::SimulatorWorld>();
    auto opened = amem::SimulatorWorld::Open(path, static_cast<std::int32_t>(Setting("AMEM_SIM_DEVICES", 4)),
                                             Setting("AMEM_SIM_CAPACITY_MIB", 16384) << 20);
    return opened.ok() ? *opened : nullptr;
  }();
  return world.get();
}

constexpr int kNotFound = 6, kTooSmall = 7, kFailed = 999;
// Devices are told apart by handles that are one more than their number.
int NumberOf(void* device) { return static_cast<int>(reinterpret_cast<std::intptr_t>(device)) - 1; }

}  // namespace

#define NVML_CALL extern "C" __attribute__((visibility("default"))) int

NVML_CALL nvmlInit_v2() { return World() == nullptr ? kFailed : 0; }
NVML_CALL nvmlShutdown() { return 0; }
NVML_CALL nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(World()->devices());
  return 0;
}
NVML_CALL nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<std::intptr_t>(index) + 1);  // NOLINT(performance-no-int-to-ptr)
  return 0;
}
NVML_CALL nvmlDeviceGetUUID(void* device, char* text, unsigned length) {
  std::snprintf(text, length, "GPU-51000000-0000-4000-8000-%012d", NumberOf(device));  // as the simulator's
  return 0;
}
NVML_CALL nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  for (int number = 0; number < World()->devices(); ++number) {
    char text[96];
    nvmlDeviceGetHandleByIndex_v2(static_cast<unsigned>(number), device);
    nvmlDeviceGetUUID(*device, text, sizeof text);
    if (std::strcmp(text, uuid) == 0) return 0;
  }
  return kNotFound;
}
NVML_CALL nvmlDeviceGetMemoryInfo(void* device, MemoryNumbers* memory) {
  memory->total = World()->capacity();
  memory->used = World()->InUse(NumberOf(device));
  memory->free = memory->total - memory->used;
  return 0;
}
NVML_CALL nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, ProcessInfo* found) {
  const auto uses = amem::checkpoint::UsesOf(*World(), NumberOf(device));
  if (*count < uses.size()) return kTooSmall;
  *count = static_cast<unsigned>(uses.size());
  for (std::size_t i = 0; i < uses.size(); ++i) found[i] = {static_cast<unsigned>(uses[i].pid), uses[i].bytes, ~0U, ~0U};
  return 0;
}
