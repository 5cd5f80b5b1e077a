// One rank of a job for the end-to-end tests: does the commands of its command line in order, as a user's program would, and
// prints "command: result" for each. "1:pause" is for rank 1 only. Knows NCCL and AMem by name only (dlopen, dlsym), like a
// Python program does.
//
// Environment: RANK, WORLD (ranks), JOB (unique id of the communicator), BARRIER (a file of 8 bytes, shared),
//   JOB_NCCL (library to load; default libnccl.so.2), JOB_AMEM (for the command attach).
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

struct ncclUniqueId {
  char internal[128];
};
using Comm = void*;

int Number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}
const char* Text(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : text;
}

const int kRank = Number("RANK", 0), kWorld = Number("WORLD", 1);
void* g_cuda = nullptr;
void* g_nccl = nullptr;
void* g_amem = nullptr;
std::vector<Comm> g_comms;  // init adds one, destroy takes the last

// As ctypes finds it: in the library that was asked, then anywhere.
template <class F>
F* Function(const char* name) {
  for (void* library : {g_nccl, g_amem, g_cuda, static_cast<void*>(RTLD_DEFAULT)}) {
    if (library == nullptr && name[0] != 'a' && name[0] != 'n') continue;
    if (void* found = dlsym(library, name)) return reinterpret_cast<F*>(found);
  }
  std::printf("%s: missing\n", name);
  std::fflush(stdout);
  _exit(3);
}

std::string LastError() { return Function<const char*()>("amem_last_error")(); }
std::string WithReason(int code) { return std::to_string(code) + (code == 0 ? "" : " " + LastError()); }

std::string StartCuda() {
  g_cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (g_cuda == nullptr) return dlerror();
  const auto symbol = [](const char* name) { return dlsym(g_cuda, name); };
  CUcontext context = nullptr;
  int result = reinterpret_cast<decltype(&cuInit)>(symbol("cuInit"))(0);
  if (result == 0)
    result = reinterpret_cast<decltype(&cuDevicePrimaryCtxRetain)>(symbol("cuDevicePrimaryCtxRetain"))(&context, kRank);
  if (result == 0) result = reinterpret_cast<decltype(&cuCtxSetCurrent)>(symbol("cuCtxSetCurrent"))(context);
  return std::to_string(result);
}

std::string LoadNccl() {
  g_nccl = dlopen(Text("JOB_NCCL", "libnccl.so.2"), RTLD_LAZY | RTLD_LOCAL);
  return g_nccl == nullptr ? dlerror() : "0";
}

std::string Attach() {
  g_amem = dlopen(Text("JOB_AMEM", "libamem_nccl.so"), RTLD_LAZY | RTLD_LOCAL);
  if (g_amem == nullptr) return dlerror();
  return WithReason(Function<int()>("amem_attach")());
}

std::string Init() {
  static int made = 0;
  ncclUniqueId id{};
  std::snprintf(id.internal, sizeof id.internal, "%s-%d", Text("JOB", "job"), made++);
  g_comms.push_back(nullptr);
  return std::to_string(Function<int(Comm*, int, ncclUniqueId, int)>("ncclCommInitRank")(&g_comms.back(), kWorld, id, kRank));
}

std::uint64_t HashOf(const std::vector<float>& values) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const float value : values) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    hash = (hash ^ bits) * 1099511628211ULL;
  }
  return hash;
}

// Two chunks through the ring; sums whose order shows in the last bits.
std::string Reduce() {
  constexpr std::size_t kCount = 700'000;
  std::vector<float> input(kCount), output(kCount);
  std::uint32_t random = 12345U + static_cast<std::uint32_t>(kRank);
  for (float& value : input) {
    random = random * 1664525U + 1013904223U;
    value = static_cast<float>(random >> 8) * 1.1e-3F;
  }
  using AllReduce = int(const void*, void*, std::size_t, int, int, Comm, void*);
  const int code = Function<AllReduce>("ncclAllReduce")(input.data(), output.data(), kCount, 7, 0, g_comms.back(), nullptr);
  return code == 0 ? "sum " + std::to_string(HashOf(output)) : "failed " + std::to_string(code);
}

// Memory of the program in a symmetric window of the last communicator.
constexpr std::size_t kWindowBytes = std::size_t{4} << 20;
void* g_window_memory = nullptr;
void* g_window = nullptr;

std::string OpenWindow() {
  const int made = Function<int(void**, std::size_t)>("ncclMemAlloc")(&g_window_memory, kWindowBytes);
  if (made != 0) return "malloc " + std::to_string(made);
  auto* values = static_cast<float*>(g_window_memory);
  for (std::size_t i = 0; i < kWindowBytes / sizeof(float); ++i)
    values[i] = static_cast<float>((i * 2654435761U + static_cast<std::size_t>(kRank) * 97) % 100'003) * 1.1e-3F;
  using Register = int(Comm, void*, std::size_t, void**, int);
  return std::to_string(
      Function<Register>("ncclCommWindowRegister")(g_comms.back(), g_window_memory, kWindowBytes, &g_window, 1));
}
std::string ReduceWindow() {
  std::vector<float> output(kWindowBytes / sizeof(float));
  using AllReduce = int(const void*, void*, std::size_t, int, int, Comm, void*);
  const int code =
      Function<AllReduce>("ncclAllReduce")(g_window_memory, output.data(), output.size(), 7, 0, g_comms.back(), nullptr);
  return code == 0 ? "sum " + std::to_string(HashOf(output)) : "failed " + std::to_string(code);
}
std::string CloseWindow() {
  const int closed = Function<int(Comm, void*)>("ncclCommWindowDeregister")(g_comms.back(), g_window);
  return std::to_string(closed) + std::to_string(Function<int(void*)>("ncclMemFree")(g_window_memory));
}

std::string Suspend() { return std::to_string(Function<int(Comm)>("stand_in_nccl_suspend")(g_comms.back())); }
std::string Unsuspend() { return std::to_string(Function<int(Comm)>("stand_in_nccl_resume")(g_comms.back())); }

// As a program does that was written against NCCL 2.29 and knows nothing of AMem; "first" and "last" of its communicators.
std::string ServedSuspend(Comm comm) { return WithReason(Function<int(Comm, int)>("ncclCommSuspend")(comm, 1)); }
std::string ServedResume(Comm comm) { return WithReason(Function<int(Comm)>("ncclCommResume")(comm)); }
std::string Figures() {
  std::string text;
  for (int figure = 0; figure < 4; ++figure) {
    std::uint64_t value = 0;
    using Ask = int(Comm, int, std::uint64_t*);
    if (const int code = Function<Ask>("ncclCommMemStats")(g_comms.back(), figure, &value); code != 0) return WithReason(code);
    text += (figure == 0 ? "" : " ") + std::to_string(value);
  }
  return text;
}
// All at once: NCCL's way for one thread that has several communicators.
std::string InGroup(const std::function<std::string(Comm)>& call) {
  if (const int code = Function<int()>("ncclGroupStart")(); code != 0) return "start " + std::to_string(code);
  std::string text;
  for (const Comm comm : g_comms) text += call(comm) + ", ";
  return text + WithReason(Function<int()>("ncclGroupEnd")());
}

std::string Barrier() {
  const int fd = open(Text("BARRIER", ""), O_RDWR);
  auto* count = static_cast<std::atomic<std::uint64_t>*>(mmap(nullptr, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  close(fd);
  if (count == MAP_FAILED) return "failed";
  const std::uint64_t target =
      (count->fetch_add(1) / static_cast<std::uint64_t>(kWorld) + 1) * static_cast<std::uint64_t>(kWorld);
  for (int waited = 0; count->load() < target; ++waited) {
    if (waited > 60'000) return "time-out";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  munmap(count, 8);
  return "0";
}

std::string BytesInUse() {
  return std::to_string(reinterpret_cast<std::uint64_t (*)(int)>(dlsym(g_cuda, "stand_in_cuda_bytes_in_use"))(kRank));
}

// A peer drops its last reference by a message, which comes a moment later.
std::string BytesGone() {
  for (int waited = 0; waited < 10'000 && BytesInUse() != "0"; ++waited)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return BytesInUse();
}

std::string Stats() {
  const auto stats = Function<int(char*, std::size_t*)>("amem_stats_json");
  std::size_t length = 0;
  if (const int code = stats(nullptr, &length); code != 0) return WithReason(code);
  std::vector<char> text(length);
  const int code = stats(text.data(), &length);
  return code == 0 ? std::string(text.data()) : WithReason(code);
}

constexpr std::size_t kTensor = std::size_t{2} << 20;
unsigned char* g_tensor = nullptr;  // of ncclMemAlloc

std::string Malloc() {
  void* pointer = nullptr;
  const int result = Function<int(void**, std::size_t)>("ncclMemAlloc")(&pointer, kTensor);
  g_tensor = static_cast<unsigned char*>(pointer);
  return std::to_string(result);
}
std::string Free() { return std::to_string(Function<int(void*)>("ncclMemFree")(g_tensor)); }
// As a kernel of the program: it writes other bytes each time, or reads what was written last.
std::size_t g_writes = 0;
unsigned char Written(std::size_t at) { return static_cast<unsigned char>((at * 31 >> 3) + g_writes); }
std::string Write() {
  ++g_writes;
  for (std::size_t i = 0; i < kTensor; ++i) g_tensor[i] = Written(i);
  return "0";
}
std::string Read() {
  for (std::size_t i = 0; i < kTensor; ++i)
    if (g_tensor[i] != Written(i)) return "byte " + std::to_string(i) + " differs";
  return "as written";
}

// A forked child calls ncclPause. AMem does nothing in it and says so.
std::string Fork() {
  const pid_t child = fork();
  if (child == 0) {
    const int code = Function<int(Comm*)>("ncclPause")(nullptr);
    std::printf("child pause: %s\n", WithReason(code).c_str());
    std::fflush(stdout);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return std::to_string(status);
}

std::string Destroy() {
  const Comm last = g_comms.back();
  g_comms.pop_back();
  return std::to_string(Function<int(Comm)>("ncclCommDestroy")(last));
}

// Goes on in a forked child, whose fate is this process's.
std::string Child() {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) return "0";
  int status = 0;
  waitpid(child, &status, 0);
  _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 100);
}

// Leaves a thread in a driver call of NCCL's that does not return, and gives it time to get there.
std::string Hang() {
  std::thread([] { Destroy(); }).detach();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  return "0";
}

std::string ImportForeign() {
  const int descriptor = open("/dev/null", O_RDONLY);
  return std::to_string(Function<int(int)>("stand_in_nccl_import")(descriptor));
}

// Imports a descriptor that another library of this process made with the driver, past AMem.
std::string ImportDrivers() {
  const auto symbol = [](const char* name) { return dlsym(g_cuda, name); };
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, kRank};
  CUmemGenericAllocationHandle handle = 0;
  int descriptor = -1;
  if (reinterpret_cast<decltype(&cuMemCreate)>(symbol("cuMemCreate"))(&handle, 2U << 20, &properties, 0) != CUDA_SUCCESS)
    return "create";
  if (reinterpret_cast<decltype(&cuMemExportToShareableHandle)>(symbol("cuMemExportToShareableHandle"))(
          &descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS)
    return "export";
  return std::to_string(Function<int(int)>("stand_in_nccl_import")(descriptor));
}

std::string Pause() { return WithReason(Function<int(Comm*)>("ncclPause")(nullptr)); }
std::string Resume() { return WithReason(Function<int(Comm*)>("ncclResume")(nullptr)); }
std::string PrintStats() { return WithReason(Function<int()>("ncclMemStats")()); }

std::string Trim() { return WithReason(Function<int(std::size_t)>("amem_trim_pinned")(0)); }

std::string Group() {
  int group = -1;
  const int set = Function<int(int)>("ncclSetGroupID")(7);
  const int get = Function<int(int*)>("ncclGetGroupID")(&group);
  return std::to_string(set) + std::to_string(get) + " " + std::to_string(group);
}

// What other code of the process gets from dlsym, which AMem must leave alone: it may answer NCCL only.
std::string OthersDlsym() {
  void* mine = dlsym(RTLD_DEFAULT, "cuMemCreate");
  void* next = dlsym(RTLD_NEXT, "malloc");
  void* from_cuda = dlsym(g_cuda, "cuMemCreate");
  Dl_info info{};
  const bool is_cudas = dladdr(from_cuda, &info) != 0 && std::strstr(info.dli_fname, "libcuda.so.1") != nullptr;
  const bool is_libcs = dladdr(next, &info) != 0 && std::strstr(info.dli_fname, "libc.so.6") != nullptr;
  return std::string(mine == nullptr ? "not global, " : "global, ") + (is_cudas ? "cuda's, " : "NOT cuda's, ") +
         (is_libcs ? "libc's" : "NOT libc's");
}

std::string Die() {
  std::fflush(stdout);
  kill(getpid(), 9);
  return "";
}

const std::map<std::string, std::function<std::string()>> kCommands = {
    {"cuda", StartCuda},
    {"load", LoadNccl},
    {"attach", Attach},
    {"init", Init},
    {"reduce", Reduce},
    {"barrier", Barrier},
    {"bytes", BytesInUse},
    {"gone", BytesGone},
    {"stats", Stats},
    {"malloc", Malloc},
    {"fork", Fork},
    {"foreign", ImportForeign},
    {"drivers", ImportDrivers},
    {"destroy", Destroy},
    {"pause", Pause},
    {"resume", Resume},
    {"memstats", PrintStats},
    {"group", Group},
    {"dlsym", OthersDlsym},
    {"die", Die},
    {"exit", [] { return std::exit(3), std::string(); }},
    {"trim", Trim},
    {"free", Free},
    {"write", Write},
    {"read", Read},
    {"window", OpenWindow},
    {"symmetric", ReduceWindow},
    {"unwindow", CloseWindow},
    {"suspend", Suspend},
    {"unsuspend", Unsuspend},
    {"suspend first", [] { return ServedSuspend(g_comms.front()); }},
    {"suspend last", [] { return ServedSuspend(g_comms.back()); }},
    {"resume first", [] { return ServedResume(g_comms.front()); }},
    {"resume last", [] { return ServedResume(g_comms.back()); }},
    {"suspend null", [] { return ServedSuspend(nullptr); }},
    {"resume null", [] { return ServedResume(nullptr); }},
    {"suspend all", [] { return InGroup(ServedSuspend); }},
    {"resume all", [] { return InGroup(ServedResume); }},
    {"figures", Figures},
    {"child", Child},
    {"hang", Hang},
};

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i];
    if (const auto colon = name.find(':'); colon != std::string::npos) {  // "1:pause": rank 1 only
      if (std::atoi(name.c_str()) != kRank) continue;
      name = name.substr(colon + 1);
    }
    const auto command = kCommands.find(name);
    if (command == kCommands.end()) return 2;
    std::printf("%s: %s\n", name.c_str(), command->second().c_str());
    std::fflush(stdout);
  }
  return 0;
}
