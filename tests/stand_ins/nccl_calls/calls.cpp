// A libnccl that has NCCL's calls and no memory: communicators are made at once, at the end of a group, or in a thread of the
// library, and where NCCL would allocate, a test is called back. It counts which calls reached it, and which of them came from
// libamem_nccl.so.
//
// Built with CALLS_SUSPEND, it has NCCL 2.29's suspend; CALLS_VERSION is its version.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#ifndef CALLS_VERSION
#define CALLS_VERSION 22105
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))
#define COUNT() Count(__func__, __builtin_return_address(0))

struct ncclComm {
  std::uint64_t hash = 0;
  int rank = 0, ranks = 1, device = 0, splits = 0;
  std::atomic<int> state{0};  // a result; 7: it is being made
  std::atomic<bool> held{false};
};

namespace {

struct Counter {
  int calls = 0, through_amem = 0;
};
std::mutex g_mutex;
std::map<std::string, Counter>& Counters() {
  static std::map<std::string, Counter> counters;
  return counters;
}

void Count(const char* name, const void* from) {
  Dl_info caller{};
  const bool amem = dladdr(from, &caller) != 0 && std::strstr(caller.dli_fname, "libamem_nccl") != nullptr;
  const std::lock_guard lock(g_mutex);
  ++Counters()[name].calls;
  Counters()[name].through_amem += amem ? 1 : 0;
}

std::atomic<void (*)(const char*)> g_probe{nullptr};
std::atomic<bool> g_late{false}, g_hold{false}, g_ends_fail{false};
std::atomic<int> g_in_background{0};  // communicators that a thread of the library makes
void Allocate(const char* where) {
  if (auto* probe = g_probe.load()) probe(where);
}

struct UniqueId {
  char bytes[128];
};
struct Configuration {  // as in nccl.h
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

// As NCCL computes it up to 2.25, and later.
#ifndef CALLS_SUSPEND
std::uint64_t HashOf(const UniqueId& id) {
  std::uint64_t hash = 5381;
  for (const char byte : id.bytes) hash = (hash << 5) + hash ^ static_cast<std::uint64_t>(byte);
  return hash;
}
#else
std::uint64_t HashOf(const UniqueId& id) {
  std::uint64_t a[2] = {1 ^ sizeof id, 1}, words[16];
  std::memcpy(words, &id, sizeof id);
  for (const std::uint64_t word : words) {
    a[0] += a[1];
    a[1] ^= a[0];
    for (int i = 0; i < 2; ++i) a[i] = (a[i] ^ a[i] >> (31 + i)) * (i == 0 ? 0x9de62bbc8cef3ce3U : 0x485cd6311b599e79U);
    a[0] += word;
  }
  const std::uint64_t mixed = (a[0] ^ a[0] >> 31) * 0xbac3bd562846de6b + a[1];
  return (mixed ^ mixed >> 32) * 0x995a187a14e7b445;
}
#endif

struct Job {
  ncclComm* comm;
  ncclComm** out;
  bool fails, in_background, late;
};
thread_local int t_depth = 0;
thread_local std::vector<Job> t_jobs;
thread_local std::vector<ncclComm*> t_used;
thread_local int t_error = 0;  // the first of the open group

// The answer of a call that is wrong. In a group the end has it as well.
int Refused(int error) {
  if (t_depth > 0 && t_error == 0) t_error = error;
  return error;
}

void* RunProxy(void*) {
  Allocate("proxy");
  return nullptr;
}

void* RunPointer(void*) {
  Allocate("pointer");
  return nullptr;
}
// As a C++ library starts a thread that was compiled into another: through a pointer, which is an import of its own.
int (*volatile g_create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) = nullptr;

void* RunJob(void* argument) {
  auto* job = static_cast<Job*>(argument);
  Allocate("init");
  pthread_t other{};
  g_create = &pthread_create;
  g_create(&other, nullptr, &RunPointer, nullptr);
  pthread_join(other, nullptr);
  std::thread([] { Allocate("standard"); }).join();
  pthread_t proxy{};
  pthread_create(&proxy, nullptr, &RunProxy, nullptr);
  pthread_join(proxy, nullptr);
  while (job->comm->held) sched_yield();
  if (!job->in_background) return nullptr;
  while (job->late && g_late) sched_yield();
  if (job->late) *job->out = job->comm;
  job->comm->state = job->fails ? 3 : 0;
  delete job;
  --g_in_background;
  return nullptr;
}

int RunJobs() {
  int result = 0;
  std::vector<Job> jobs;
  jobs.swap(t_jobs);
  if (const int error = std::exchange(t_error, 0)) {
    for (const Job& job : jobs) {
      *job.out = nullptr;
      delete job.comm;
    }
    t_used.clear();
    return error;
  }
  std::vector<pthread_t> threads;
  for (Job& job : jobs) {
    pthread_t thread{};
    if (job.in_background) {
      job.comm->state = 7;
      if (!job.late) *job.out = job.comm;
      ++g_in_background;
      pthread_create(&thread, nullptr, &RunJob, new Job(job));
      pthread_detach(thread);
      if (result == 0) result = 7;
      continue;
    }
    pthread_create(&thread, nullptr, &RunJob, &job);
    threads.push_back(thread);
  }
  for (const pthread_t thread : threads) pthread_join(thread, nullptr);
  for (const Job& job : jobs) {
    if (job.fails) result = 3;
    if (job.in_background) continue;
    *job.out = job.fails ? nullptr : job.comm;
    if (job.fails) delete job.comm;
  }
  for (ncclComm* used : t_used) {
    (void)used;
    Allocate("group");
  }
  t_used.clear();
  return result;
}

int Make(ncclComm** out, int ranks, int rank, std::uint64_t hash, const void* config, bool fails) {
  auto* comm = new ncclComm;
  comm->hash = hash;
  comm->rank = rank;
  comm->ranks = ranks;
  comm->device = rank;
  comm->held = g_hold.load();
  const auto* configuration = static_cast<const Configuration*>(config);
  const bool in_background = configuration != nullptr && configuration->blocking == 0;
  if (!g_late) *out = comm;
  t_jobs.push_back({comm, out, fails, in_background, g_late.load()});
  return t_depth > 0 ? 0 : RunJobs();
}

int Use(ncclComm* comm, const char* what) {
  Allocate(t_depth > 0 ? "asks" : what);  // in a group NCCL asks about the stream, and launches at its end
  if (t_depth > 0) t_used.push_back(comm);
  return 0;
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
  *version = CALLS_VERSION;
  return 0;
}
EXPORT int ncclGetUniqueId(UniqueId* id) {
  COUNT();
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->bytes, sizeof id->bytes, "\xf0\xe1id %d", Counters()["ncclGetUniqueId"].calls);
  return 0;
}
EXPORT int ncclCommInitRankConfig(ncclComm** comm, int ranks, UniqueId id, int rank, void* config) {
  COUNT();
  return Make(comm, ranks, rank, HashOf(id), config, id.bytes[0] == 'F');
}
EXPORT int ncclCommInitRank(ncclComm** comm, int ranks, UniqueId id, int rank) {
  COUNT();
  return Make(comm, ranks, rank, HashOf(id), nullptr, id.bytes[0] == 'F');
}
// The same function under NCCL's other name, as its binary has it.
extern "C" __attribute__((visibility("default"), alias("ncclCommInitRank"))) int pncclCommInitRank(ncclComm**, int, UniqueId,
                                                                                                   int);
EXPORT int ncclCommInitRankScalable(ncclComm** comm, int ranks, int rank, int, UniqueId* ids, void* config) {
  COUNT();
  return Make(comm, ranks, rank, HashOf(ids[0]), config, false);
}
EXPORT int ncclCommInitAll(ncclComm** comms, int count, const int*) {
  COUNT();
  ++t_depth;
  for (int i = 0; i < count; ++i) Make(&comms[i], count, i, 4711, nullptr, false);
  --t_depth;
  return RunJobs();
}
EXPORT int ncclCommSplit(ncclComm* parent, int color, int key, ncclComm** comm, void* config) {
  constexpr int kBadColor = 4444, kFailingColor = 3333;
  COUNT();
  if (color == kBadColor || comm == nullptr) return Refused(4);  // an argument that is wrong on this rank alone
  if (color < 0) {
    *comm = nullptr;
    return 0;
  }
  return Make(comm, 1, key, parent->hash * 31 + static_cast<unsigned>(++parent->splits), config, color == kFailingColor);
}
EXPORT int ncclCommShrink(ncclComm* parent, int*, int count, ncclComm** comm, void* config, int) {
  COUNT();
  return Make(comm, parent->ranks - count, parent->rank, parent->hash * 37, config, false);
}
EXPORT int ncclCommGrow(ncclComm* parent, int ranks, const UniqueId*, int rank, ncclComm** comm, void* config) {
  COUNT();
  return Make(comm, ranks, parent != nullptr ? parent->rank : rank, 41 * static_cast<unsigned>(ranks), config, false);
}
EXPORT int ncclCommFinalize(ncclComm*) {
  COUNT();
  return 0;
}
EXPORT int ncclCommDestroy(ncclComm* comm) {
  COUNT();
  if (comm == nullptr) return 4;
  if (g_ends_fail) return 3;
  delete comm;
  return 0;
}
EXPORT int ncclCommAbort(ncclComm* comm) {
  COUNT();
  if (g_ends_fail) return 3;
  delete comm;
  return 0;
}
EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* error) {
  *error = comm->state;
  return 0;
}
EXPORT int ncclCommUserRank(const ncclComm* comm, int* rank) {
  *rank = comm->rank;
  return comm->state;
}
EXPORT int ncclCommCount(const ncclComm* comm, int* count) {
  *count = comm->ranks;
  return comm->state;
}
EXPORT int ncclCommCuDevice(const ncclComm* comm, int* device) {
  *device = comm->device;
  return comm->state;
}
EXPORT int ncclGroupStart() {
  ++t_depth;
  return 0;
}
EXPORT int ncclGroupEnd() {
  if (t_depth == 0) return 5;
  return --t_depth > 0 ? 0 : RunJobs();
}
EXPORT int ncclGroupSimulateEnd(void*) {
  if (t_depth == 0) return 5;
  --t_depth;
  t_used.clear();
  return std::exchange(t_error, 0);
}
EXPORT int ncclAllReduce(const void*, void*, std::size_t, int, int, ncclComm* comm, void*) { return Use(comm, "all-reduce"); }
EXPORT int ncclCommWindowRegister(ncclComm* comm, void*, std::size_t, void**, int) { return Use(comm, "window"); }
EXPORT int ncclAllGather(const void*, void*, std::size_t, int, ncclComm* comm, void*) { return Use(comm, "all-gather"); }
EXPORT int ncclBroadcast(const void*, void*, std::size_t, int, int, ncclComm* comm, void*) { return Use(comm, "broadcast"); }
EXPORT int ncclBcast(void*, std::size_t, int, int, ncclComm* comm, void*) { return Use(comm, "bcast"); }
EXPORT int ncclReduce(const void*, void*, std::size_t, int, int, int, ncclComm* comm, void*) { return Use(comm, "reduce"); }
EXPORT int ncclAlltoAll(const void*, void*, std::size_t, int, ncclComm* comm, void*) { return Use(comm, "all-to-all"); }
EXPORT int ncclGather(const void*, void*, std::size_t, int, int, ncclComm* comm, void*) { return Use(comm, "gather"); }
EXPORT int ncclScatter(const void*, void*, std::size_t, int, int, ncclComm* comm, void*) { return Use(comm, "scatter"); }
EXPORT int ncclSend(const void*, std::size_t, int, int, ncclComm* comm, void*) { return Use(comm, "send"); }
EXPORT int ncclRecv(void*, std::size_t, int, int, ncclComm* comm, void*) { return Use(comm, "recv"); }
EXPORT int ncclPutSignal(const void*, std::size_t, int, int, void*, std::size_t, int, int, unsigned, ncclComm* comm, void*) {
  return Use(comm, "put-signal");
}
EXPORT int ncclSignal(int, int, int, unsigned, ncclComm* comm, void*) { return Use(comm, "signal"); }
EXPORT int ncclWaitSignal(int, void*, ncclComm* comm, void*) { return Use(comm, "wait-signal"); }
EXPORT int ncclCommRegister(ncclComm* comm, void*, std::size_t, void**) { return Use(comm, "register"); }
EXPORT int ncclCommDeregister(ncclComm* comm, void*) { return Use(comm, "deregister"); }
EXPORT int ncclCommWindowDeregister(ncclComm* comm, void*) { return Use(comm, "window deregister"); }
EXPORT int ncclDevCommCreate(ncclComm* comm, const void*, void*) { return Use(comm, "device communicator"); }
EXPORT int ncclDevCommDestroy(ncclComm* comm, const void*) { return Use(comm, "device communicator destroy"); }

EXPORT int ncclMemAlloc(void** memory, std::size_t bytes) {
  *memory = std::malloc(bytes);
  return 0;
}
EXPORT int ncclMemFree(void* memory) {
  std::free(memory);
  return 0;
}

#ifdef CALLS_SUSPEND
EXPORT int ncclCommSuspend(ncclComm*, int) {
  COUNT();
  return 0;
}
EXPORT int ncclCommResume(ncclComm*) {
  COUNT();
  return 0;
}
EXPORT int ncclCommMemStats(ncclComm*, int, std::uint64_t* value) {
  COUNT();
  *value = 0;
  return 0;
}
#endif

// ---- for tests -----------------------------------------------------------------------------------------------------------

// Is called where NCCL would allocate, with what it is doing.
EXPORT void stand_in_probe(void (*probe)(const char*)) { g_probe = probe; }
// Addresses are written at the end of a group, and not at once.
EXPORT void stand_in_write_late(int late) { g_late = late != 0; }
// Communicators that are begun from now on are not made before they are let go.
// The next ends of communicators, which then stay as they are.
EXPORT void stand_in_fail_ends(int fail) { g_ends_fail = fail != 0; }
EXPORT void stand_in_hold(int hold) { g_hold = hold != 0; }
EXPORT void stand_in_let_go(ncclComm* comm) { comm->held = false; }
EXPORT void stand_in_await_background() {
  while (g_in_background != 0) sched_yield();
}
// How many calls reached this library, in all and by way of libamem_nccl.so.
EXPORT int stand_in_calls(const char* name, int through_amem) {
  const std::lock_guard lock(g_mutex);
  return through_amem != 0 ? Counters()[name].through_amem : Counters()[name].calls;
}
// A communicator that no call of NCCL's was seen to make.
EXPORT ncclComm* stand_in_unseen() { return new ncclComm; }
EXPORT void* stand_in_look_up(const char* name) { return dlsym(RTLD_DEFAULT, name); }
EXPORT std::uint64_t stand_in_hash(const ncclComm* comm) { return comm->hash; }
EXPORT int stand_in_empty(const void*, void*, std::size_t, int, int, ncclComm*, void*) { return 0; }
EXPORT int ncclReduceScatter(const void*, void*, std::size_t, int, int, ncclComm*, void*) { return 0; }
