// A libnccl.so.2 over shared host memory with ncclPause, ncclResume, ncclCommSuspend and ncclCommResume: enough for the GPU
// programs to be tested where there is no GPU. Each communicator holds 8 MiB of the stand-in driver's memory; a pause gives it
// back. AMEM_FAKE_FAULT makes it misbehave in one way, so that the programs' checks are seen to fail:
//   corrupt   a result is wrong after a resume        leak      each resume keeps 2 MiB more
//   accept    collectives while paused are accepted   crash     rank 1 dies in ncclPause
//   silent    ncclPause does nothing                  hang      (the stand-in driver) streams never finish
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kRanks = 8;
constexpr std::size_t kArea = std::size_t{8} << 20;
constexpr std::size_t kHeld = std::size_t{8} << 20;

struct Shared {
  std::atomic<int> arrived, generation;
  std::atomic<int> pausing;
  int color[kRanks], key[kRanks];
  // Then one area for each rank's contribution, then one for each ordered pair.
};

using Step = std::function<void()>;

thread_local int depth = 0;
thread_local std::vector<Step> writes, reads;
thread_local std::vector<struct Comm*> touched;

bool paused = false;
int resumes = 0;
std::string last_error;
std::vector<struct Comm*> all;

bool Fault(const char* name) {
  const char* fault = getenv("AMEM_FAKE_FAULT");
  return fault != nullptr && strcmp(fault, name) == 0;
}

void Nap() {
  const timespec nap{0, 50'000};
  nanosleep(&nap, nullptr);
}

template <class Function>
Function Driver(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<Function>(dlsym(library, name));
}

CUmemGenericAllocationHandle Hold(int device, std::size_t bytes) {
  CUmemAllocationProp properties{};
  properties.location.id = device;
  CUmemGenericAllocationHandle handle = 0;
  Driver<CUresult (*)(CUmemGenericAllocationHandle*, std::size_t, const CUmemAllocationProp*, unsigned long long)>(
      "cuMemCreate")(&handle, bytes, &properties, 0);
  return handle;
}
void LetGo(CUmemGenericAllocationHandle handle) { Driver<CUresult (*)(CUmemGenericAllocationHandle)>("cuMemRelease")(handle); }

struct Comm {
  std::string id;
  int size = 0, rank = 0, splits = 0, device = 0;
  Shared* shared = nullptr;
  CUmemGenericAllocationHandle held = 0;
  int goal = 0;

  char* Area(int index) const { return reinterpret_cast<char*>(shared) + 4096 + kArea * static_cast<std::size_t>(index); }
  char* Mail(int from, int to) const { return Area(kRanks + from * kRanks + to); }
  void Attach() {
    const std::string path = "/dev/shm/amem-fake-nccl-" + id;
    const int fd = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    const std::size_t bytes = 4096 + kArea * (kRanks + kRanks * kRanks);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) abort();
    shared = static_cast<Shared*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    close(fd);
    held = Hold(device, kHeld);
    all.push_back(this);
  }
  // Once all have it open, so that nothing stays behind whatever happens later.
  void Forget() const { unlink(("/dev/shm/amem-fake-nccl-" + id).c_str()); }
  void Arrive() {
    goal = shared->generation.load() + 1;
    if (shared->arrived.fetch_add(1) + 1 == size) {
      shared->arrived.store(0);
      shared->generation.fetch_add(1);
    }
  }
  void Await() const {
    while (shared->generation.load() < goal) Nap();
  }
};

void Meet() {
  for (Comm* comm : touched) comm->Arrive();
  for (Comm* comm : touched) comm->Await();
}

int Flush() {
  for (const Step& write : writes) write();
  Meet();
  for (const Step& read : reads) read();
  Meet();
  writes.clear();
  reads.clear();
  touched.clear();
  return 0;
}

int Queue(Comm* comm, Step write, Step read) {
  if (paused && !Fault("accept")) return 5;
  if (write) writes.push_back(std::move(write));
  if (read) reads.push_back(std::move(read));
  if (std::find(touched.begin(), touched.end(), comm) == touched.end()) touched.push_back(comm);
  return depth > 0 ? 0 : Flush();
}

void Publish(Comm* comm, const void* send, std::size_t bytes) { memcpy(comm->Area(comm->rank), send, bytes); }

void Sum(Comm* comm, float* out, std::size_t from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    float total = 0;
    for (int rank = 0; rank < comm->size; ++rank) total += reinterpret_cast<float*>(comm->Area(rank))[from + i];
    out[i] = total;
  }
  if (resumes > 0 && Fault("corrupt")) reinterpret_cast<std::uint32_t*>(out)[count - 1] ^= 1;
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
  *version = 22809;
  return 0;
}
struct Id {
  char text[128];
};
EXPORT int ncclGetUniqueId(Id* id) {
  static int made = 0;
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  snprintf(id->text, sizeof id->text, "%d-%d-%ld", getpid(), made++, now.tv_nsec);
  return 0;
}
EXPORT int ncclCommInitRank(Comm** out, int size, Id id, int rank) {
  auto* comm = new Comm;
  comm->id = id.text;
  comm->size = size;
  comm->rank = rank;
  if (Driver<CUresult (*)(CUdevice*)>("cuCtxGetDevice")(&comm->device) != CUDA_SUCCESS) return 1;
  comm->Attach();
  *out = comm;
  touched.push_back(comm);
  reads.push_back([comm] { comm->Forget(); });
  return depth > 0 ? 0 : Flush();
}
EXPORT int ncclCommSplit(Comm* parent, int color, int key, Comm** out, void*) {
  Shared* shared = parent->shared;
  shared->color[parent->rank] = color;
  shared->key[parent->rank] = key;
  parent->Arrive();
  parent->Await();
  auto* comm = new Comm;
  comm->device = parent->device;
  for (int rank = 0; rank < parent->size; ++rank) {
    if (shared->color[rank] != color) continue;
    if (shared->key[rank] < key) ++comm->rank;
    ++comm->size;
  }
  comm->id = parent->id + "-s" + std::to_string(parent->splits++) + "-" + std::to_string(color);
  comm->Attach();
  parent->Arrive();
  parent->Await();
  comm->Forget();
  *out = comm;
  return 0;
}
EXPORT int ncclCommDestroy(Comm* comm) {
  if (comm->held != 0) LetGo(comm->held);
  munmap(comm->shared, 4096 + kArea * (kRanks + kRanks * kRanks));
  all.erase(std::find(all.begin(), all.end(), comm));
  delete comm;
  return 0;
}
EXPORT int ncclCommAbort(Comm* comm) { return ncclCommDestroy(comm); }
EXPORT int ncclCommGetAsyncError(Comm*, int* error) {
  *error = 0;
  return 0;
}
EXPORT const char* ncclGetErrorString(int result) {
  return result == 0 ? "no error" : result == 5 ? "invalid usage" : "some error";
}
EXPORT const char* ncclGetLastError(Comm*) { return ""; }
EXPORT int ncclGroupStart() {
  ++depth;
  return 0;
}
EXPORT int ncclGroupEnd() { return --depth > 0 ? 0 : Flush(); }

EXPORT int ncclAllReduce(const void* send, void* receive, std::size_t count, int, int, Comm* comm, CUstream) {
  return Queue(
      comm, [=] { Publish(comm, send, count * 4); }, [=] { Sum(comm, static_cast<float*>(receive), 0, count); });
}
EXPORT int ncclAllGather(const void* send, void* receive, std::size_t count, int, Comm* comm, CUstream) {
  return Queue(
      comm, [=] { Publish(comm, send, count * 4); },
      [=] {
        for (int rank = 0; rank < comm->size; ++rank)
          memcpy(static_cast<float*>(receive) + static_cast<std::size_t>(rank) * count, comm->Area(rank), count * 4);
      });
}
EXPORT int ncclReduceScatter(const void* send, void* receive, std::size_t count, int, int, Comm* comm, CUstream) {
  return Queue(
      comm, [=] { Publish(comm, send, count * 4 * static_cast<std::size_t>(comm->size)); },
      [=] { Sum(comm, static_cast<float*>(receive), static_cast<std::size_t>(comm->rank) * count, count); });
}
EXPORT int ncclBroadcast(const void* send, void* receive, std::size_t count, int, int root, Comm* comm, CUstream) {
  return Queue(
      comm,
      [=] {
        if (comm->rank == root) Publish(comm, send, count * 4);
      },
      [=] { memcpy(receive, comm->Area(root), count * 4); });
}
// Outside a group a message lies in the mail until it is received, as a small one does in NCCL's buffers.
EXPORT int ncclSend(const void* send, std::size_t count, int, int peer, Comm* comm, CUstream) {
  if (depth == 0 && !paused) memcpy(comm->Mail(comm->rank, peer), send, count * 4);
  if (depth == 0) return paused ? 5 : 0;
  return Queue(
      comm, [=] { memcpy(comm->Mail(comm->rank, peer), send, count * 4); }, nullptr);
}
EXPORT int ncclRecv(void* receive, std::size_t count, int, int peer, Comm* comm, CUstream) {
  if (depth == 0 && !paused) memcpy(receive, comm->Mail(peer, comm->rank), count * 4);
  if (depth == 0) return paused ? 5 : 0;
  return Queue(comm, nullptr, [=] { memcpy(receive, comm->Mail(peer, comm->rank), count * 4); });
}
EXPORT int ncclMemAlloc(void** memory, std::size_t bytes) {
  return static_cast<int>(
      Driver<CUresult (*)(CUdeviceptr*, std::size_t)>("cuMemAlloc_v2")(reinterpret_cast<CUdeviceptr*>(memory), bytes));
}
EXPORT int ncclMemFree(void* memory) {
  return static_cast<int>(Driver<CUresult (*)(CUdeviceptr)>("cuMemFree_v2")(reinterpret_cast<CUdeviceptr>(memory)));
}

// ---- pause and resume ----------------------------------------------------------------------------------------------------

EXPORT int ncclPause(Comm**) {
  if (paused || Fault("silent")) return 0;
  if (Fault("crash") && getenv("RANK") != nullptr && atoi(getenv("RANK")) == 1) raise(SIGSEGV);
  // All processes of the largest communicator must come.
  Comm* world = nullptr;
  for (Comm* comm : all) {
    if (world == nullptr || comm->size > world->size) world = comm;
  }
  const char* processes = getenv("WORLD_SIZE");
  const int expected = processes != nullptr ? atoi(processes) : 1;
  if (world != nullptr && expected > 1) {
    const char* limit = getenv("AMEM_TIMEOUT_MS");
    const int limit_ms = limit != nullptr ? atoi(limit) : 60'000;
    const int mine = world->shared->pausing.fetch_add(1);
    const int complete = (mine / expected + 1) * expected;
    for (int waited = 0; world->shared->pausing.load() < complete; ++waited) {
      Nap();
      if (waited > limit_ms * 9) {
        world->shared->pausing.fetch_sub(1);
        last_error = "pause: a rank did not come";
        return 6;
      }
    }
  }
  for (Comm* comm : all) {
    LetGo(comm->held);
    comm->held = 0;
  }
  paused = true;
  return 0;
}
EXPORT int ncclResume(Comm**) {
  if (!paused) return 0;
  for (Comm* comm : all) comm->held = Hold(comm->device, kHeld);
  paused = false;
  ++resumes;
  if (Fault("leak")) Hold(all.empty() ? 0 : all[0]->device, 2 << 20);
  return 0;
}
EXPORT int ncclMemStats() { return 0; }
EXPORT int ncclSetGroupID(int) { return 0; }
EXPORT int ncclGetGroupID(int* group) {
  *group = 0;
  return 0;
}
EXPORT const char* amem_last_error() { return last_error.c_str(); }
EXPORT int amem_stats_json(char* buffer, std::size_t* length) {
  const std::size_t held = kHeld * all.size();
  const std::string text = "{\"own_device_bytes\": " + std::to_string(held) +
                           ", \"own_device_resident_bytes\": " + std::to_string(paused ? 0 : held) +
                           ", \"released_bytes\": " + std::to_string(paused ? held : 0) + ", \"kept_bytes\": {}}";
  const std::size_t room = *length;
  *length = text.size() + 1;
  if (buffer == nullptr) return 0;
  if (room < *length) return 4;
  memcpy(buffer, text.c_str(), text.size() + 1);
  return 0;
}
#ifdef AMEM_FAKE_NATIVE
EXPORT int ncclCommSuspend(Comm* comm, int) {
  LetGo(comm->held);
  comm->held = 0;
  return 0;
}
EXPORT int ncclCommResume(Comm* comm) {
  comm->held = Hold(comm->device, kHeld);
  return 0;
}
#endif
