// One rank of a job for the end-to-end tests: does the commands of its command line in order, as a user's program would, and
// prints "command: result" for each. "1:pause" is for rank 1 only, "0,2:pause" for ranks 0 and 2, "!1:pause" for all but
// rank 1. Some commands have an argument: "sleep=300". Knows NCCL and AMem by name only (dlopen, dlsym), like a Python program
// does.
//
// Environment: RANK, WORLD (ranks), JOB (unique id of the communicator), BARRIER (a file of 8 bytes, shared),
//   JOB_ON_FAILURE (what a program does whose pause or resume failed: "exit", as an exception that nobody catches; default: it
//   goes on), JOB_NCCL (library to load; default libnccl.so.2), JOB_AMEM (for the command attach), JOB_ONE_SHOT (for share).
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/scenarios/job_kinds.h"

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

// "pass through=BYTES", of memory that AMEM_SCOPE=all leaves to the driver.
std::string PassThrough(const std::string& size) {
  CUdeviceptr memory = 0;
  const std::size_t bytes = std::stoul(size);
  return std::to_string(
      reinterpret_cast<decltype(&cuMemAllocAsync)>(dlsym(g_cuda, "cuMemAllocAsync"))(&memory, bytes, nullptr));
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

// Two in one group.
std::string InitTwo() {
  static int made = 0;
  int answer = Function<int()>("ncclGroupStart")();
  std::array<Comm, 2> two{};
  for (Comm& one : two) {
    ncclUniqueId id{};
    std::snprintf(id.internal, sizeof id.internal, "%s-two-%d", Text("JOB", "job"), made++);
    if (answer == 0) answer = Function<int(Comm*, int, ncclUniqueId, int)>("ncclCommInitRank")(&one, kWorld, id, kRank);
  }
  if (const int ended = Function<int()>("ncclGroupEnd")(); answer == 0) answer = ended;
  g_comms.insert(g_comms.end(), two.begin(), two.end());
  return std::to_string(answer);
}

// The other of the last two is the last one from now on.
std::string Swap() {
  std::swap(g_comms.at(g_comms.size() - 1), g_comms.at(g_comms.size() - 2));
  return "0";
}

// The first two ranks make one without the others.
std::string InitPart() {
  if (kRank >= 2) return "0";
  ncclUniqueId id{};
  std::snprintf(id.internal, sizeof id.internal, "%s-part", Text("JOB", "job"));
  g_comms.push_back(nullptr);
  return std::to_string(Function<int(Comm*, int, ncclUniqueId, int)>("ncclCommInitRank")(&g_comms.back(), 2, id, kRank));
}

std::uint64_t HashOf(std::span<const float> values) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const float value : values) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    hash = (hash ^ bits) * 1099511628211ULL;
  }
  return hash;
}

// Sums whose order shows in the last bits. `last`: this rank wants to stop; any_wants_to_stop: a rank wanted, known to all at
// once.
struct Reduced {
  std::string sum;
  bool any_wants_to_stop = false;
};
// `around`: what is called before and after the all-reduce; its texts come first in the sum.
using Around = std::pair<std::function<std::string()>, std::function<std::string()>>;
Reduced ReduceOf(std::size_t count, bool last, const Around& around = {}) {
  std::vector<float> input(count), output(count);
  std::uint32_t random = 12345U + static_cast<std::uint32_t>(kRank);
  for (float& value : input) {
    random = random * 1664525U + 1013904223U;
    value = static_cast<float>(random >> 8) * 1.1e-3F;
  }
  input.front() = last ? 1.0F : 0.0F;
  using AllReduce = int(const void*, void*, std::size_t, int, int, Comm, void*);
  std::string said = around.first ? around.first() : "";
  const int code = Function<AllReduce>("ncclAllReduce")(input.data(), output.data(), count, 7, 0, g_comms.back(), nullptr);
  if (around.second) said += around.second();
  if (code != 0) return {said + "failed " + std::to_string(code), true};
  return {said + "sum " + std::to_string(HashOf(std::span<const float>(output).subspan(1))), output.front() != 0.0F};
}

// Two chunks through the ring.
std::string Reduce() { return ReduceOf(700'000, false).sum; }

// An all-reduce of a step of which there are many. All ranks stop at the same one, soon after the file JOB_STOP exists.
Reduced ReduceOfStep() {
  constexpr std::size_t kCount = 2'000;
  return ReduceOf(kCount, access(Text("JOB_STOP", ""), F_OK) == 0);
}

// "send=COUNT" floats to the next rank, "receive=COUNT" from the one before; each message has other values.
constexpr int kFloat = 7;
float Sent(int from, int message, std::size_t at) {
  return static_cast<float>((at * 2654435761U + static_cast<std::size_t>(from) * 97 + static_cast<std::size_t>(message) * 31) %
                            100'003);
}
std::string Send(const std::string& text) {
  static int message = 0;
  std::vector<float> values(std::stoul(text));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = Sent(kRank, message, i);
  ++message;
  using Transfer = int(const void*, std::size_t, int, int, Comm, void*);
  return std::to_string(
      Function<Transfer>("ncclSend")(values.data(), values.size(), kFloat, (kRank + 1) % kWorld, g_comms.back(), nullptr));
}
std::string Receive(const std::string& text) {
  static int message = 0;
  const int from = (kRank + kWorld - 1) % kWorld;
  std::vector<float> values(std::stoul(text));
  using Transfer = int(void*, std::size_t, int, int, Comm, void*);
  if (const int code = Function<Transfer>("ncclRecv")(values.data(), values.size(), kFloat, from, g_comms.back(), nullptr);
      code != 0)
    return "failed " + std::to_string(code);
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i] != Sent(from, message, i))
      return "element " + std::to_string(i) + " of message " + std::to_string(message) + " differs";
  ++message;
  return "as sent";
}

// The stand-in card of this process. "faults=TEXT": as in AMEM_SIM_CARD_FAULTS.
template <class F>
F* OfCard(const char* name) {
  return reinterpret_cast<F*>(dlsym(dlopen("libibverbs.so.1", RTLD_NOW), name));
}
std::string PlanFaults(const std::string& text) {
  OfCard<void(const char*)>("amem_card_fault")(text.c_str());
  return "0";
}
std::string Card(const std::string& which) {
  std::uint64_t counts[6];
  OfCard<void(std::uint64_t*)>("amem_card_counts")(counts);
  const std::map<std::string, int> names = {{"bytes", 0},           {"regions", 1},  {"registrations", 2},
                                            {"deregistrations", 3}, {"requests", 4}, {"findings", 5}};
  return std::to_string(counts[names.at(which)]);
}

// Nanoseconds of a poll and of a post.
std::string TimeVerbs() {
  const auto time = Function<double(Comm, int)>("stand_in_nccl_time_verbs");
  const double poll = time(g_comms.back(), 0), post = time(g_comms.back(), 1);
  return std::to_string(poll) + " " + std::to_string(post);
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
// By a thread that is in the call when this returns; Join has its answer.
std::optional<std::future<std::string>> g_beside;
std::string ResumeLastBeside() {
  g_beside = std::async(std::launch::async, [] { return ServedResume(g_comms.back()); });
  const bool waits = g_beside->wait_for(std::chrono::milliseconds(300)) == std::future_status::timeout;
  return waits ? "waits" : "has ended";
}
std::string Join() { return g_beside->get(); }
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

// Whoever calls keeps his device, whatever a group has done; said only where it is not so.
void* Context() {
  void* context = nullptr;
  reinterpret_cast<int (*)(void**)>(dlsym(g_cuda, "cuCtxGetCurrent"))(&context);
  return context;
}
std::string InContext(const std::function<std::string()>& calls) {
  void* const before = Context();
  const std::string said = calls();
  return (Context() == before ? "" : "in another context: ") + said;
}

// A group of the last communicator's all-reduce with resumes of all before it, or with suspends of all after it.
std::string ReduceInGroup(bool resumes) {
  const auto start = [] { return std::to_string(Function<int()>("ncclGroupStart")()) + " "; };
  const auto end = [] { return WithReason(Function<int()>("ncclGroupEnd")()) + " "; };
  const auto all = [](const std::function<std::string(Comm)>& call) {
    std::string text;
    for (const Comm comm : g_comms) text += call(comm) + " ";
    return text;
  };
  if (resumes) return ReduceOf(700'000, false, {[&] { return start() + all(ServedResume); }, end}).sum;
  return ReduceOf(700'000, false, {start, [&] { return all(ServedSuspend) + end(); }}).sum;
}

// A group that resumes the last and suspends `other`, as it was called. Then whether `other` is suspended.
std::string ResumeLastSuspend(const char* name, Comm other) {
  Function<int()>("ncclGroupStart")();
  const std::string calls = ServedResume(g_comms.back()) + " " + ServedSuspend(other);
  const int end = Function<int()>("ncclGroupEnd")();
  std::uint64_t suspended = 9;
  using Ask = int(Comm, int, std::uint64_t*);
  Function<Ask>("ncclCommMemStats")(other, 1, &suspended);
  return calls + " " + std::to_string(end) + " " + name + " " + std::to_string(suspended);
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
  const auto stats = Function<int(const char*, char*, std::size_t*)>("amem_json");
  std::size_t length = 0;
  if (const int code = stats("stats", nullptr, &length); code != 0) return WithReason(code);
  std::vector<char> text(length);
  const int code = stats("stats", text.data(), &length);
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

// Tensors of the program under tags: one whose contents a pause saves, and one whose contents it would forget.
unsigned char *g_weights = nullptr, *g_cache = nullptr;
std::string OpenTags() {
  const auto take = [](const char* tag, int policy) {
    const int opened = Function<int(const char*, int)>("amem_pool")(tag, policy);
    const int entered = Function<int(const char*)>("amem_pool_enter")(tag);
    auto* const memory =
        static_cast<unsigned char*>(Function<void*(ssize_t, int, void*)>("amem_alloc")(kTensor, kRank, nullptr));
    Function<int()>("amem_pool_leave")();
    return opened == 0 && entered == 0 ? memory : nullptr;
  };
  g_weights = take("weights", 0);
  g_cache = take("workspace", 1);
  if (g_weights == nullptr || g_cache == nullptr) return LastError();
  for (std::size_t i = 0; i < kTensor; ++i) g_weights[i] = g_cache[i] = Written(i);
  return "0";
}
std::string PauseWeightsLater() {
  constexpr unsigned kNoWait = 1;
  const char* const tags[] = {"weights"};
  return std::to_string(
      Function<int(const char* const*, std::size_t, unsigned, void*)>("amem_pause")(tags, 1, kNoWait, nullptr));
}
// How tag weights stands; then it is resumed.
std::string BringWeightsBack() {
  std::string text(1 << 16, '\0');
  std::size_t length = text.size();
  if (const int code = Function<int(const char*, char*, std::size_t*)>("amem_json")("memory", text.data(), &length); code != 0)
    return WithReason(code);
  const bool paused = text.find(R"("state":"paused","tag":"weights")") != std::string::npos;
  const char* const tags[] = {"weights"};
  const int code = Function<int(const char* const*, std::size_t, unsigned, int)>("amem_resume")(tags, 1, 0, 0);
  return code != 0 ? WithReason(code) : paused ? "was paused" : text.substr(0, length);
}
std::string ReadTags() {
  for (std::size_t i = 0; i < kTensor; ++i)
    if (g_weights[i] != Written(i) || g_cache[i] != Written(i)) return "byte " + std::to_string(i) + " differs";
  return "as written";
}

// A program that computes on them.
std::string ReadTagsUntilStop() {
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
    if (const bool ends = access(Text("JOB_STOP", ""), F_OK) == 0; ends || ReadTags() != "as written") return ReadTags();
}

// "steps=100,4": so many steps of an all-reduce, at most so many milliseconds of work, and a safe point; fewer where JOB_STOP
// is.
std::string Steps(const std::string& text) {
  const long count = std::atol(text.c_str()), most_ms = std::atol(text.c_str() + text.find(',') + 1);
  const auto safepoint = Function<int(unsigned)>("amem_safepoint");
  const std::string first = ReduceOfStep().sum, whole = Reduce();
  std::uint32_t random = static_cast<std::uint32_t>(getpid());
  for (long step = 0; step < count; ++step) {
    random = random * 1664525U + 1013904223U;
    std::this_thread::sleep_for(std::chrono::microseconds((random >> 8) % (most_ms * 1000 + 1)));
    const Reduced now = ReduceOfStep();
    if (now.sum != first) return "step " + std::to_string(step) + ": " + now.sum + " for " + first;
    if (now.any_wants_to_stop) break;
    if (const int code = safepoint(0); code != 0) return "safe point " + std::to_string(step) + ": " + WithReason(code);
  }
  const std::string last = Reduce();
  return last == whole ? last : "at the end: " + last + " for " + whole;
}
// A program that has begun to use CUDA, and neither NCCL nor a tag.
std::string OnlySafepoints() {
  const auto safepoint = Function<int(unsigned)>("amem_safepoint");
  while (access(Text("JOB_STOP", ""), F_OK) != 0) {
    if (const int code = safepoint(0); code != 0) return WithReason(code);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return "0";
}
// What a safe point costs when nothing is asked.
std::string TimeSafepoints() {
  constexpr int kCount = 2'000'000;
  const auto safepoint = Function<int(unsigned)>("amem_safepoint");
  const auto from = std::chrono::steady_clock::now();
  for (int i = 0; i < kCount; ++i)
    if (safepoint(0) != 0) return "failed";
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - from;
  return std::to_string(static_cast<int>(took.count() / kCount * 10) / 10.0);
}
// Nobody can ask the child, and its safe points are its own.
std::string ForkSafepoints() {
  const auto safepoint = Function<int(unsigned)>("amem_safepoint");
  const pid_t child = fork();
  if (child == 0) _exit(safepoint(0) + safepoint(0) + safepoint(0));
  int status = 0;
  waitpid(child, &status, 0);
  return std::to_string(status);
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

std::string Abort() {
  const Comm last = g_comms.back();
  g_comms.pop_back();
  return std::to_string(Function<int(Comm)>("ncclCommAbort")(last));
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

// As NCCL looks up its network plugin: one of a version that AMem does not know.
std::string LoadPlugin() {
  void* const plugin = dlopen(Text("PLUGIN", ""), RTLD_NOW | RTLD_LOCAL);
  return Function<void*(void*, const char*)>("stand_in_nccl_look_up")(plugin, "ncclNetPlugin_v99") == nullptr ? "1" : "0";
}

std::string ShareByFabric() { return std::to_string(Function<int()>("stand_in_nccl_share_by_fabric")()); }

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

// ---- another library that shares memory between ranks

template <class F>
F* OneShot(const char* name) {
  static void* const library = dlopen(Text("JOB_ONE_SHOT", ""), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::printf("%s\n", dlerror());
  return library == nullptr ? nullptr : reinterpret_cast<F*>(dlsym(library, name));
}
unsigned char Shared(std::size_t at) { return static_cast<unsigned char>(at * 7 >> 2); }

// "share=ipc" or "share=handle": the first rank shares what it has written, and the others read it there.
std::string Share(const std::string& how) {
  const std::string file = std::string(Text("BARRIER", "")) + ".shared";
  const int by_handle = how == "handle" ? 1 : 0;
  CUipcMemHandle token{};
  std::size_t bytes = 0;
  int result = 0;
  if (kRank == 0) {
    result = OneShot<int(int, int, CUipcMemHandle*)>("one_shot_share")(kRank, by_handle, &token);
    unsigned char* const memory = OneShot<unsigned char*(std::size_t*)>("one_shot_memory")(&bytes);
    for (std::size_t i = 0; result == 0 && i < bytes; ++i) memory[i] = Shared(i);
    std::ofstream(file, std::ios::binary).write(token.reserved, sizeof token.reserved);
  }
  Barrier();
  if (kRank != 0) {
    std::ifstream(file, std::ios::binary).read(token.reserved, sizeof token.reserved);
    result = OneShot<int(int, int, const CUipcMemHandle*)>("one_shot_open")(kRank, by_handle, &token);
  }
  Barrier();
  OneShot<int()>("one_shot_all_have_it")();
  return std::to_string(result);
}
std::string ReadShared() {
  std::size_t bytes = 0;
  const unsigned char* const memory = OneShot<unsigned char*(std::size_t*)>("one_shot_memory")(&bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    if (memory[i] != Shared(i)) return "byte " + std::to_string(i) + " differs";
  return "as shared";
}
// "pause tag=libone_shot", "resume tag=libone_shot".
std::string PauseTag(const std::string& tag) {
  const char* const tags[] = {tag.c_str()};
  return WithReason(Function<int(const char* const*, std::size_t, unsigned, void*)>("amem_pause")(tags, 1, 0, nullptr));
}
std::string ResumeTag(const std::string& tag) {
  const char* const tags[] = {tag.c_str()};
  return WithReason(Function<int(const char* const*, std::size_t, unsigned, int)>("amem_resume")(tags, 1, 0, 0));
}

std::string Unshare() { return std::to_string(OneShot<int()>("one_shot_free")()); }

std::string AfterCycle(const char* name, int code) {
  std::string text = WithReason(code);
  if (code == 0 || std::strcmp(Text("JOB_ON_FAILURE", ""), "exit") != 0) return text;
  std::printf("%s: %s\n", name, text.c_str());
  std::exit(1);
}
std::string Pause() { return AfterCycle("pause", Function<int(Comm*)>("ncclPause")(nullptr)); }
// The caller has made sure that the GPUs of all hosts are idle, by a barrier before.
std::string PauseIdle() {
  constexpr unsigned kHostsIdle = 32;
  const char* const nccl = "nccl";
  return AfterCycle("pause idle", Function<int(const char* const*, std::size_t, unsigned, void*)>("amem_pause")(
                                      &nccl, 1, kHostsIdle, nullptr));
}
// A plain resume waits for ranks that are paused as long as it takes; a job that is to fail has a deadline.
std::string Resume() {
  if (std::strcmp(Text("JOB_RESUMES_IN_TIME", ""), "1") != 0)
    return AfterCycle("resume", Function<int(Comm*)>("ncclResume")(nullptr));
  constexpr unsigned kInTime = 4;
  const char* const nccl = "nccl";
  return AfterCycle("resume",
                    Function<int(const char* const*, std::size_t, unsigned, int)>("amem_resume")(&nccl, 1, kInTime, 0));
}
std::string PrintStats() { return WithReason(Function<int()>("ncclMemStats")()); }

std::string Trim() { return WithReason(Function<int(std::size_t)>("amem_trim_pinned")(0)); }

std::string Group(const std::string& wanted) {
  int group = -1;
  const int set = Function<int(int)>("ncclSetGroupID")(wanted.empty() ? 7 : std::atoi(wanted.c_str()));
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

// ---- what goes wrong in a job ------------------------------------------------------------------------------------------

volatile std::sig_atomic_t g_interrupted = 0;

// As Python does on Ctrl-C: the exception is raised when the running call has come back.
void ExitIfInterrupted() {
  if (g_interrupted != 0) std::exit(130);
}

std::string Sleep(const std::string& milliseconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(std::atol(milliseconds.c_str()));
  while (std::chrono::steady_clock::now() < until) {
    ExitIfInterrupted();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return "0";
}
// Whatever the rank does with the rest of its time, it makes no more calls.
std::string Linger(const std::string&) { return Sleep("600000"); }

std::string Do(const std::string& action) {
  return std::to_string(reinterpret_cast<int (*)(const char*)>(dlsym(g_cuda, "stand_in_cuda_do"))(action.c_str()));
}
// "at=Create,3,KILL": in the third call of that name from now on.
std::string At(const std::string& text) {
  const auto first = text.find(','), second = text.find(',', first + 1);
  const std::string call = text.substr(0, first), action = text.substr(second + 1);
  const auto nth = static_cast<std::uint64_t>(std::atol(text.substr(first + 1).c_str()));
  const auto arm = reinterpret_cast<int (*)(const char*, std::uint64_t, const char*)>(dlsym(g_cuda, "stand_in_cuda_at"));
  return std::to_string(arm(call.c_str(), nth, action.c_str()));
}

// "later=300,STOP": another thread does it after so many milliseconds, whatever this one is in by then.
std::string Later(const std::string& text) {
  const auto comma = text.find(',');
  std::thread([milliseconds = std::atol(text.c_str()), action = text.substr(comma + 1)] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    Do(action);
  }).detach();
  return "0";
}

// Takes this rank's device memory, all but so many MiB, past AMem, as another library or another process would.
std::string Hog(const std::string& left_mib) {
  const auto symbol = [](const char* name) { return dlsym(g_cuda, name); };
  std::size_t free = 0, total = 0;
  if (reinterpret_cast<decltype(&cuMemGetInfo)>(symbol("cuMemGetInfo_v2"))(&free, &total) != CUDA_SUCCESS) return "info";
  const std::size_t left = static_cast<std::size_t>(std::atol(left_mib.c_str())) << 20;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, kRank};
  CUmemGenericAllocationHandle handle = 0;
  const auto create = reinterpret_cast<decltype(&cuMemCreate)>(symbol("cuMemCreate"));
  return free <= left ? "nothing left" : std::to_string(create(&handle, free - left, &properties, 0));
}

// Uses up this process's descriptors, all but so many.
std::string TakeDescriptors(const std::string& left) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = 256;
  setrlimit(RLIMIT_NOFILE, &limit);
  std::vector<int> taken;
  for (int descriptor = open("/dev/null", O_RDONLY); descriptor >= 0; descriptor = open("/dev/null", O_RDONLY))
    taken.push_back(descriptor);
  for (int i = std::atoi(left.c_str()); i > 0 && !taken.empty(); --i) {
    close(taken.back());
    taken.pop_back();
  }
  return "0";
}

// Fills the disk of the journal, which the preloaded stand-in for it then knows.
std::string FillDisk(const std::string&) {
  const int file = open(Text("STAND_IN_FULL_DISK", ""), O_CREAT | O_WRONLY, 0600);
  return std::to_string(close(file));
}

// The program's work on its device does not end any more.
std::string StayBusy(const std::string&) {
  CUcontext context = nullptr;
  reinterpret_cast<decltype(&cuCtxGetCurrent)>(dlsym(g_cuda, "cuCtxGetCurrent"))(&context);
  reinterpret_cast<void (*)(void*, int)>(dlsym(g_cuda, "stand_in_cuda_set_busy"))(context, 3);
  return "0";
}

// ---- training that is asked from outside ---------------------------------------------------------------------------------

unsigned char* g_own = nullptr;  // device memory that is neither NCCL's nor under a tag
constexpr std::size_t kOwnBytes = std::size_t{32} << 20;

std::string AllocateOwn() {
  CUdeviceptr pointer = 0;
  const auto allocate = reinterpret_cast<decltype(&cuMemAlloc)>(dlsym(g_cuda, "cuMemAlloc_v2"));
  if (const int result = allocate(&pointer, kOwnBytes); result != 0) return std::to_string(result);
  g_own = reinterpret_cast<unsigned char*>(pointer);
  for (std::size_t i = 0; i < kOwnBytes; ++i) g_own[i] = static_cast<unsigned char>(i * 13 + static_cast<std::size_t>(kRank));
  return "0";
}

// A driver call, then a look at the device's memory: what a kernel would do.
bool OwnIsWhole() {
  std::size_t free = 0, total = 0;
  reinterpret_cast<decltype(&cuMemGetInfo)>(dlsym(g_cuda, "cuMemGetInfo_v2"))(&free, &total);
  for (std::size_t i = 0; g_own != nullptr && i < kOwnBytes; i += 509)
    if (g_own[i] != static_cast<unsigned char>(i * 13 + static_cast<std::size_t>(kRank))) return false;
  return true;
}

// Steps with a safe point each, until the file JOB_STOP exists. In the file JOB_STEPS and the rank stands how many are done.
// Where the file JOB_HALT and the rank exists the process stops, outside of all calls of the driver: the stand-in's lock is
// another's.
std::string Train(const std::string&) {
  const std::string steps_file = std::string(Text("JOB_STEPS", "")) + std::to_string(kRank);
  const std::string halt_file = std::string(Text("JOB_HALT", "")) + std::to_string(kRank);
  const auto safepoint = Function<int(unsigned)>("amem_safepoint");
  const std::string first = ReduceOfStep().sum;
  for (long step = 1;; ++step) {
    if (unlink(halt_file.c_str()) == 0) raise(SIGSTOP);
    const Reduced now = ReduceOfStep();
    if (now.sum != first) return "step " + std::to_string(step) + ": " + now.sum + " and not " + first;
    if (!OwnIsWhole()) return "step " + std::to_string(step) + ": device memory differs";
    std::ofstream(steps_file + ".next") << step << "\n";
    std::rename((steps_file + ".next").c_str(), steps_file.c_str());  // a reader finds a number at any time
    if (now.any_wants_to_stop) return Reduce();
    if (const int code = safepoint(0); code != 0) return "safepoint " + WithReason(code);
    ExitIfInterrupted();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

// Allocates and frees by NCCL, which AMem journals, every ten milliseconds for so many: "count median longest", in
// microseconds.
std::string TimeCalls(const std::string& milliseconds) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::int64_t> took;
  for (const auto end = Clock::now() + std::chrono::milliseconds(std::stoi(milliseconds)); Clock::now() < end;) {
    void* memory = nullptr;
    const auto began = Clock::now();
    int code = Function<int(void**, std::size_t)>("ncclMemAlloc")(&memory, std::size_t{2} << 20);
    if (code == 0) code = Function<int(void*)>("ncclMemFree")(memory);
    if (code != 0) return "failed " + std::to_string(code);
    took.push_back(std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began).count());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::ranges::sort(took);
  return std::to_string(took.size()) + " " + std::to_string(took[took.size() / 2]) + " " + std::to_string(took.back());
}

std::string Await(const std::string& file) {
  for (int waited = 0; access(file.c_str(), F_OK) != 0; ++waited) {
    if (waited > 60'000) return "time-out";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return "0";
}

const std::map<std::string, std::function<std::string(const std::string&)>> kCommandsWithArgument = {
    {"calls", TimeCalls},
    {"kind", [](const std::string& what) { return job_kinds::Run(g_nccl, what); }},
    {"await", Await},
    {"train", Train},
    {"sleep", Sleep},
    {"steps", Steps},
    {"linger", Linger},
    {"do", Do},
    {"at", At},
    {"later", Later},
    {"hog", Hog},
    {"descriptors", TakeDescriptors},
    {"fill disk", FillDisk},
    {"busy", StayBusy},
    {"group", Group},
    {"share", Share},
    {"send", Send},
    {"receive", Receive},
    {"faults", PlanFaults},
    {"card", Card},
    {"pass through", PassThrough},
    {"pause tag", PauseTag},
    {"resume tag", ResumeTag},
};

// The ranks that "1", "0,2" and "!1" stand for.
bool IsFor(std::string ranks) {
  const bool all_but = ranks.starts_with('!');
  if (all_but) ranks.erase(0, 1);
  return (("," + ranks + ",").find("," + std::to_string(kRank) + ",") != std::string::npos) != all_but;
}

const std::map<std::string, std::function<std::string()>> kCommands = {
    {"cuda", StartCuda},
    {"load", LoadNccl},
    {"attach", Attach},
    {"init", Init},
    {"init two", InitTwo},
    {"swap", Swap},
    {"init part", InitPart},
    {"reduce", Reduce},
    {"barrier", Barrier},
    {"bytes", BytesInUse},
    {"gone", BytesGone},
    {"stats", Stats},
    {"malloc", Malloc},
    {"fork", Fork},
    {"foreign", ImportForeign},
    {"plugin", LoadPlugin},
    {"fabric", ShareByFabric},
    {"drivers", ImportDrivers},
    {"destroy", Destroy},
    {"abort", Abort},
    {"pause", Pause},
    {"pause idle", PauseIdle},
    {"resume", Resume},
    {"memstats", PrintStats},
    {"dlsym", OthersDlsym},
    {"die", Die},
    {"tags", OpenTags},
    {"read tags", ReadTags},
    {"read tags until the stop", ReadTagsUntilStop},
    {"pause weights later", PauseWeightsLater},
    {"bring weights back", BringWeightsBack},
    {"only safe points", OnlySafepoints},
    {"time safepoints", TimeSafepoints},
    {"time verbs", TimeVerbs},
    {"fork safepoints", ForkSafepoints},
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
    {"resume last beside", ResumeLastBeside},
    {"join", Join},
    {"resume last", [] { return ServedResume(g_comms.back()); }},
    {"suspend null", [] { return ServedSuspend(nullptr); }},
    {"resume null", [] { return ServedResume(nullptr); }},
    {"suspend all", [] { return InContext([] { return InGroup(ServedSuspend); }); }},
    {"resume all", [] { return InContext([] { return InGroup(ServedResume); }); }},
    {"resume last, suspend first", [] { return ResumeLastSuspend("first", g_comms.front()); }},
    {"resume last, suspend last", [] { return ResumeLastSuspend("last", g_comms.back()); }},
    {"resume all and reduce", [] { return InContext([] { return ReduceInGroup(true); }); }},
    {"reduce and suspend all", [] { return InContext([] { return ReduceInGroup(false); }); }},
    {"figures", Figures},
    {"child", Child},
    {"hang", Hang},
    {"own", AllocateOwn},
    {"read shared", ReadShared},
    {"unshare", Unshare},
};

}  // namespace

int main(int argc, char** argv) {
  signal(SIGINT, [](int) { g_interrupted = 1; });
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // what one all-reduce frees serves the next: new pages are most of its time
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i];
    if (const auto colon = name.find(':'); colon != std::string::npos) {
      if (!IsFor(name.substr(0, colon))) continue;
      name = name.substr(colon + 1);
    }
    const auto equals = name.find('=');
    const std::string said = name.substr(0, equals), argument = equals == std::string::npos ? "" : name.substr(equals + 1);
    const auto command = kCommands.find(said);
    const auto with_argument = kCommandsWithArgument.find(said);
    if (command == kCommands.end() && with_argument == kCommandsWithArgument.end()) return 2;
    std::printf("%s: %s\n", said.c_str(),
                (command != kCommands.end() ? command->second() : with_argument->second(argument)).c_str());
    std::fflush(stdout);
    ExitIfInterrupted();
  }
  return 0;
}
