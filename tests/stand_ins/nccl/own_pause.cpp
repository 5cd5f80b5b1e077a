// The stand-in for NCCL that pauses and resumes by itself, so that the GPU programs are tested without AMem: each communicator
// holds 8 MiB of device memory, which a pause gives back. STAND_IN_FAULT makes it misbehave in one way, so that the programs'
// checks are seen to fail:
//   corrupt   a result is wrong after a resume        leak      each resume keeps 2 MiB more
//   accept    collectives while paused are accepted   crash     rank 1 dies in ncclPause
//   silent    ncclPause does nothing                  hang      (the stand-in for the driver) streams never finish
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "tests/stand_ins/nccl/nccl.h"

namespace stand_in {
namespace {

constexpr size_t kHeldBytes = size_t{8} << 20, kLeakedBytes = size_t{2} << 20;

bool paused = false;
int resumes = 0;
std::string last_error;
std::vector<Comm*> all;

bool Fault(const char* name) {
  const char* fault = std::getenv("STAND_IN_FAULT");
  return fault != nullptr && std::strcmp(fault, name) == 0;
}

int Number(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

Result Create(const Comm& comm, size_t bytes, CUmemGenericAllocationHandle& handle) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, comm.device};
  CU(comm.cu->create(&handle, bytes, &properties, 0));
  return kSuccess;
}

void Release(Comm& comm) {
  if (comm.held != 0) comm.cu->release(comm.held);
  comm.held = 0;
}

// All processes of the largest communicator must come to a pause.
Result AwaitProcesses() {
  const auto world = std::max_element(all.begin(), all.end(), [](Comm* a, Comm* b) { return a->ranks < b->ranks; });
  const int processes = Number("WORLD_SIZE", 1);
  if (world == all.end() || processes == 1) return kSuccess;
  std::atomic<int>& pausing = (*world)->exchange->pausing;
  const int complete = (pausing.fetch_add(1) / processes + 1) * processes;
  const auto deadline = Clock::now() + std::chrono::milliseconds(Number("AMEM_TIMEOUT_MS", 60'000));
  while (pausing.load() < complete) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (Clock::now() < deadline) continue;
    pausing.fetch_sub(1);
    last_error = "pause: a rank did not come";
    return kRemote;
  }
  return kSuccess;
}

}  // namespace

Result Hold(Comm& comm) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  all.push_back(&comm);
  return Create(comm, kHeldBytes, comm.held);
}

void LetGo(Comm& comm) {
  std::erase(all, &comm);
  Release(comm);
}

bool IsPaused() { return paused && !Fault("accept"); }

void Corrupt(float* result, size_t count) {
  if (resumes > 0 && Fault("corrupt")) reinterpret_cast<std::uint32_t*>(result)[count - 1] ^= 1;
}

EXPORT int ncclPause(Comm**) {
  if (paused || Fault("silent")) return kSuccess;
  if (Fault("crash") && Number("RANK", 0) == 1) raise(SIGSEGV);
  TRY(AwaitProcesses());
  for (Comm* comm : all) Release(*comm);
  paused = true;
  return kSuccess;
}

EXPORT int ncclResume(Comm**) {
  if (!paused) return kSuccess;
  for (Comm* comm : all) TRY(Create(*comm, kHeldBytes, comm->held));
  paused = false;
  ++resumes;
  CUmemGenericAllocationHandle leaked = 0;
  return Fault("leak") && !all.empty() ? Create(*all[0], kLeakedBytes, leaked) : kSuccess;
}

EXPORT int ncclMemStats() { return kSuccess; }
EXPORT int ncclSetGroupID(int) { return kSuccess; }
EXPORT int ncclGetGroupID(int* group) {
  *group = 0;
  return kSuccess;
}
EXPORT const char* amem_last_error() { return last_error.c_str(); }
EXPORT int amem_json(const char* /*what*/, char* buffer, size_t* length) {
  const size_t held = kHeldBytes * all.size();
  const std::string text = "{\"own_device_bytes\": " + std::to_string(held) +
                           ", \"own_device_resident_bytes\": " + std::to_string(paused ? 0 : held) +
                           ", \"released_bytes\": " + std::to_string(paused ? held : 0) + ", \"kept_bytes\": {}}";
  const size_t room = *length;
  *length = text.size() + 1;
  if (buffer == nullptr) return kSuccess;
  if (room < *length) return kInvalidArgument;
  std::memcpy(buffer, text.c_str(), text.size() + 1);
  return kSuccess;
}

#ifdef STAND_IN_SUSPENDS  // as NCCL 2.29.7 does by itself
EXPORT int ncclCommSuspend(Comm* comm, int) {
  Release(*comm);
  return kSuccess;
}
EXPORT int ncclCommResume(Comm* comm) { return Create(*comm, kHeldBytes, comm->held); }
#endif

}  // namespace stand_in
