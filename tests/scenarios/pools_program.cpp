// A program that uses AMem's pools by the C interface, on the stand-in for the driver and without NCCL. Its argument names what
// it does; it prints "fine", or what was not as it should be.
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ncclpatch/amem.h"
#include "tests/stand_ins/cuda/control.h"

// So many copies of a tag's name of this thread's until there is no memory for one; negative: there is always memory.
static constinit thread_local int t_names_spared = -1;
static constexpr std::size_t kLongName = 900;  // in the copies' size nothing else is allocated

// Not inlined, so that the compiler finds each `new` and `delete` of one kind.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  const bool is_name = bytes > kLongName && bytes < kLongName + 100;
  return is_name && t_names_spared-- == 0 ? nullptr : std::malloc(bytes);
}
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* const memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace {

constexpr ssize_t kMiB = 1 << 20;

#define EXPECT(condition)                                                                              \
  do {                                                                                                 \
    if (!(condition)) {                                                                                \
      std::printf("line %d: %s is not so; last error: %s\n", __LINE__, #condition, amem_last_error()); \
      std::exit(1);                                                                                    \
    }                                                                                                  \
  } while (false)

template <class Function>
Function* InDriver(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  auto* const found = reinterpret_cast<Function*>(dlsym(library, name));
  EXPECT(found != nullptr);
  return found;
}
#define NAME_OF(name) #name  // of the version that the header chooses
#define DRIVER(name) InDriver<decltype(name)>(NAME_OF(name))

int Pause(std::vector<const char*> tags, unsigned flags = 0, void* stream = nullptr) {
  return amem_pause(tags.data(), tags.size(), flags, stream);
}
int Resume(std::vector<const char*> tags, unsigned flags = 0, int priority = 0) {
  return amem_resume(tags.data(), tags.size(), flags, priority);
}
bool Says(const char* text) { return std::strstr(amem_last_error(), text) != nullptr; }
std::string Memory() {
  std::size_t length = 0;
  EXPECT(amem_json(AMEM_MEMORY, nullptr, &length) == 0);
  std::string text(length + 4096, '\0');
  length = text.size();
  EXPECT(amem_json(AMEM_MEMORY, text.data(), &length) == 0);
  text.resize(length - 1);
  return text;
}
bool Shows(const std::string& part) { return Memory().find(part) != std::string::npos; }

struct Block {
  unsigned char* at = nullptr;
  ssize_t bytes = 0;
  int seed = 0;
};
unsigned char ByteAt(const Block& block, ssize_t i) {
  return static_cast<unsigned char>((i * 2654435761U + static_cast<unsigned>(block.seed)) >> 7);
}
Block Take(const char* tag, ssize_t bytes, int seed) {
  EXPECT(amem_pool_enter(tag) == 0);
  Block block{static_cast<unsigned char*>(amem_alloc(bytes, 0, nullptr)), bytes, seed};
  EXPECT(amem_pool_leave() == 0);
  EXPECT(block.at != nullptr);
  for (ssize_t i = 0; i < bytes; i += 97) block.at[i] = ByteAt(block, i);
  return block;
}
bool Holds(const Block& block) {
  for (ssize_t i = 0; i < block.bytes; i += 97) {
    if (block.at[i] != ByteAt(block, i)) return false;
  }
  return true;
}
void Give(const Block& block) { amem_free(block.at, block.bytes, 0, nullptr); }
std::uint64_t InUse(int device = 0) { return DRIVER(stand_in_cuda_bytes_in_use)(device); }
void FailNext(const char* call, std::uint64_t nth, int result) {
  EXPECT(DRIVER(stand_in_cuda_fail_next)(call, nth, result) == 0);
}

void Cycles() {
  EXPECT(amem_pool("weights", AMEM_PRESERVE) == 0);
  EXPECT(amem_pool("cache", AMEM_DISCARD) == 0);
  const Block small = Take("weights", 5 * kMiB, 1), large = Take("weights", 140 * kMiB, 2), cache = Take("cache", 20 * kMiB, 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT(Pause({"weights", "cache"}) == 0);
    EXPECT(InUse() == 0);
    EXPECT(Shows("\"state\":\"paused\""));
    EXPECT(Resume({"cache", "weights"}) == 0);
    EXPECT(Holds(small) && Holds(large));
    cache.at[5] = 1;  // is there
  }
  EXPECT(Shows("\"tag\":\"weights\"") && Shows("\"tag\":\"nccl\"") && Shows("\"tag\":\"user\""));
  for (const Block& block : {small, large, cache}) Give(block);
  EXPECT(InUse() == 0);
}

// With AMEM_ENABLE=0: memory is there, and nothing fails.
void Off() {
  EXPECT(amem_pool("weights", AMEM_PRESERVE) == 0);
  const Block block = Take("weights", 4 * kMiB, 1);
  EXPECT(Pause({"weights", "nobody"}) == 0);
  EXPECT(Holds(block));
  EXPECT(Resume({"weights"}) == 0);
  EXPECT(amem_wait("weights", 0, nullptr) == 0);
  EXPECT(amem_wait("weights", AMEM_ON_STREAM, nullptr) == 0);
  EXPECT(Shows("switched off"));
  Give(block);
  EXPECT(InUse() == 0);
  CUcontext context = nullptr;
  EXPECT(DRIVER(cuCtxGetCurrent)(&context) == CUDA_SUCCESS && context == nullptr);  // as before
  void* const nothing = amem_alloc(0, 0, nullptr);
  void* const second = amem_alloc(kMiB, 1, nullptr);
  EXPECT(nothing != nullptr && second != nullptr && InUse(1) >= kMiB);
  EXPECT(amem_alloc(ssize_t{1} << 50, 0, nullptr) == nullptr && Says("the driver answered 2"));  // and is not logged
  amem_free(nothing, 0, 0, nullptr);
  amem_free(second, kMiB, 1, nullptr);
  EXPECT(InUse() == 0 && InUse(1) == 0);
  amem_free(second, kMiB, 1, nullptr);  // is logged: the driver may have given that address to somebody else
}

// With AMEM_ENABLE=0 and without a GPU: every function succeeds and changes nothing. Only memory is what there is.
void Nothing() {
  std::size_t length = 0;
  int group = -1;
  EXPECT(ncclPause(nullptr) == 0 && ncclResume(nullptr) == 0 && ncclMemStats() == 0 && amem_attach() == 0);
  EXPECT(ncclSetGroupID(3) == 0 && ncclGetGroupID(&group) == 0);
  EXPECT(amem_json(AMEM_STATS, nullptr, &length) == 0 && amem_json(AMEM_MEMORY, nullptr, &length) == 0);
  EXPECT(amem_trim_pinned(0) == 0 && amem_pool("weights", AMEM_DISCARD) == 0);
  EXPECT(amem_pool_enter("weights") == 0 && amem_pool_leave() == 0);
  for (const unsigned flags : {0U, AMEM_NO_WAIT}) {
    EXPECT(Pause({"weights", "nccl"}, flags) == 0 && Resume({"nccl", "weights"}, flags) == 0);
  }
  const amem_want_id want = amem_want();
  const char* const tags[] = {"nccl", "unheard of"};
  EXPECT(amem_want_pause(want, tags, 2, 0, nullptr) == 0 && amem_want_resume(want, tags, 2, 0, 0) == 0);
  EXPECT(amem_want_resume(want, tags, 2, AMEM_LET_GO, 0) == 0 && amem_resume(tags, 2, AMEM_ONLY_ASK, 0) == 0);
  EXPECT(amem_wait("weights", 0, nullptr) == 0 && amem_wait("weights", AMEM_ON_STREAM, nullptr) == 0);
  for (const unsigned how : {0U, AMEM_BEGIN, AMEM_GO_ON, AMEM_BEFORE_RESUME, AMEM_BEFORE_PAUSE}) {
    EXPECT(amem_safepoint(how) == 0);
  }
  EXPECT(Says("") && *amem_last_error() == '\0');
}

// ---- who wants what paused

int PauseFor(amem_want_id want, std::vector<const char*> tags) {
  return amem_want_pause(want, tags.data(), tags.size(), 0, nullptr);
}
int ResumeFor(amem_want_id want, std::vector<const char*> tags, unsigned flags = 0) {
  return amem_want_resume(want, tags.data(), tags.size(), flags, 0);
}

void Wants() {
  EXPECT(amem_pool("a", AMEM_PRESERVE) == 0 && amem_pool("b", AMEM_PRESERVE) == 0);
  const Block a = Take("a", 4 * kMiB, 1), b = Take("b", 4 * kMiB, 2);
  const amem_want_id first = amem_want(), second = amem_want();
  EXPECT(first != AMEM_PLAIN && second != first);
  // It stays paused until the last want ends, in whichever order.
  EXPECT(PauseFor(first, {"a"}) == 0 && PauseFor(second, {"a"}) == 0 && Pause({"a"}) == 0 && Pause({"a"}) == 0);
  EXPECT(ResumeFor(first, {"a"}) == 0 && Shows("\"state\":\"paused\""));
  EXPECT(Resume({"a"}) == 5 && Says("tag a stays paused, because another part of the program (a block of amem.paused, a "
                                    "rollout, an adapter) still requires the pause"));
  EXPECT(Shows("\"state\":\"paused\""));
  EXPECT(ResumeFor(second, {"a"}) == 0 && !Shows("\"state\":\"paused\"") &&
         Holds(a));  // and the plain calls' went with their resume
  // A plain pause stays when a block ends, and counts once.
  EXPECT(Pause({"a"}) == 0 && Pause({"a"}) == 0 && PauseFor(first, {"a", "b"}) == 0);
  EXPECT(ResumeFor(first, {"a", "b"}) == 0 && Shows("\"state\":\"paused\"") && Holds(b));
  EXPECT(Resume({"a"}) == 0 && Holds(a));
  // What fails names nothing: neither the tag that this call paused, nor the one that was paused already.
  EXPECT(PauseFor(second, {"a"}) == 0);
  EXPECT(amem_pool_enter("b") == 0 && PauseFor(first, {"a", "b"}) == 5 && amem_pool_leave() == 0);
  EXPECT(ResumeFor(second, {"a"}) == 0 && Holds(a));
  EXPECT(amem_pool_enter("b") == 0 && Pause({"a", "b"}) == 5 && amem_pool_leave() == 0 && Holds(a));
  // A want whose resume fails has ended all the same, and any want's resume tries again.
  EXPECT(PauseFor(first, {"a"}) == 0);
  FailNext("Create", 1, 2);
  EXPECT(ResumeFor(first, {"a"}) == 1 && Shows("\"state\":\"paused\""));
  EXPECT(Resume({"a"}) == 0 && Holds(a));
  // Also of tags that it did not reach, and if the call is wrong: who ends a want does not come again with it.
  EXPECT(amem_pool("c", AMEM_PRESERVE) == 0);
  const Block c = Take("c", 4 * kMiB, 3);
  EXPECT(PauseFor(first, {"a", "b", "c"}) == 0);
  FailNext("Create", 2, 2);
  EXPECT(ResumeFor(first, {"a", "b", "c"}) == 1 && Says("tag a was paused again"));
  EXPECT(Resume({"c"}) == 0 && Holds(c) && Resume({"a", "b", "c"}) == 0 && Holds(a) && Holds(b));
  EXPECT(PauseFor(first, {"a"}) == 0 && ResumeFor(first, {"unheard of", "a"}) == 4 && Shows("\"state\":\"paused\""));
  EXPECT(Resume({"a"}) == 0 && Holds(a));
  EXPECT(PauseFor(first, {"a"}) == 0 && ResumeFor(first, {"a"}, AMEM_ON_STREAM) == 4 && Shows("\"state\":\"paused\""));
  EXPECT(Resume({"a"}) == 0 && Holds(a));
  EXPECT(PauseFor(first, {"a"}) == 0 && ResumeFor(first, {"unheard of", "a"}, AMEM_LET_GO) == 4);
  EXPECT(Resume({"a"}) == 0 && Holds(a));
  // Letting go resumes nothing.
  EXPECT(PauseFor(first, {"a"}) == 0 && ResumeFor(first, {"a"}, AMEM_LET_GO) == 0 && Shows("\"state\":\"paused\""));
  EXPECT(PauseFor(second, {"a"}) == 0 && ResumeFor(second, {"a"}) == 0 && Holds(a));
  // A pause that was not waited for and failed leaves nothing behind.
  FailNext("Unmap", 1, 999);
  EXPECT(Pause({"a"}, AMEM_NO_WAIT) == 0 && amem_wait("a", 0, nullptr) != 0 && Holds(a));
  EXPECT(PauseFor(first, {"a"}) == 0 && ResumeFor(first, {"a"}) == 0 && Holds(a));
  Give(a), Give(b), Give(c);
}

// A call that fails because there is no memory for the name of a tag, also between two tags, leaves no want: else nobody could
// resume what is paused.
void WithoutMemory() {
  const std::string long_a(kLongName, 'a'), long_b(kLongName, 'b');
  const char* const tags[] = {long_a.c_str(), long_b.c_str()};
  EXPECT(amem_pool(tags[0], AMEM_PRESERVE) == 0 && amem_pool(tags[1], AMEM_PRESERVE) == 0);
  const Block a = Take(tags[0], 4 * kMiB, 1), b = Take(tags[1], 4 * kMiB, 2);
  const std::uint64_t all = InUse();
  const amem_want_id want = amem_want();
  for (const bool pauses : {true, false}) {
    int failures = 0;
    for (bool lacked = true; lacked; ++failures) {
      EXPECT(pauses || amem_want_pause(want, tags, 2, 0, nullptr) == 0);
      t_names_spared = failures;
      const bool failed = (pauses ? amem_want_pause(want, tags, 2, 0, nullptr) : amem_want_resume(want, tags, 2, 0, 0)) != 0;
      lacked = std::exchange(t_names_spared, -1) < 0;
      EXPECT((lacked || !failed) && InUse() == (failed == pauses ? all : 0));
      EXPECT(failed || !pauses || amem_want_resume(want, tags, 2, 0, 0) == 0);
      EXPECT(amem_resume(tags, 2, 0, 0) == 0 && Holds(a) && Holds(b));
    }
    EXPECT(failures > 4);
  }
  Give(a), Give(b);
}

// Each thread finds the memory away for as long as it wants that, whatever the others do.
void WantsOfThreads() {
  EXPECT(amem_pool("a", AMEM_PRESERVE) == 0);
  const Block block = Take("a", 2 * kMiB, 1);
  const auto work = [](int thread) {
    const amem_want_id want = amem_want();
    for (int i = 0; i < 60; ++i) {
      EXPECT(PauseFor(want, {"a"}) == 0);
      if (i % 3 == thread) {
        EXPECT(ResumeFor(amem_want(), {"a"}) == 0);  // of one that names nothing
      }
      if (i % 7 == 0) std::this_thread::yield();
      EXPECT(InUse() == 0);
      EXPECT(ResumeFor(want, {"a"}) == 0);
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) threads.emplace_back(work, thread);
  for (std::thread& thread : threads) thread.join();
  EXPECT(Holds(block));
  Give(block);
}

void WrongUse() {
  EXPECT(Pause({"weights"}) == 4 && Says("known: nccl"));
  EXPECT(amem_pool(nullptr, 0) == 4);
  EXPECT(amem_pool("weights", 2) == 4 && Says("AMEM_DISCARD"));
  EXPECT(amem_pool("nccl", 0) == 4 && amem_pool("user", 0) == 4 && amem_pool("", 0) == 4);
  EXPECT(amem_pool("weights", AMEM_PRESERVE) == 0 && amem_pool("weights", AMEM_PRESERVE) == 0);
  EXPECT(amem_pool("weights", AMEM_DISCARD) == 4 && Says("preserve"));
  EXPECT(amem_pool_enter("wieghts") == 4 && Says("known: weights, nccl"));
  EXPECT(amem_pool_leave() == 5);
  EXPECT(Pause({"weights", "wieghts"}) == 4);
  EXPECT(Shows("\"state\":\"resident\",\"tag\":\"weights\""));
  EXPECT(Pause({"user"}) == 4 && Says("AMEM_USER_MEMORY") && Pause({nullptr}) == 4 && amem_pause(nullptr, 1, 0, nullptr) == 4);
  EXPECT(Pause({"weights"}, 64) == 4 && Resume({"weights"}, AMEM_ON_STREAM) == 4);
  EXPECT(amem_pause(nullptr, 0, 0, nullptr) == 0);
  EXPECT(amem_alloc(-1, 0, nullptr) == nullptr && Says("cannot be -1 bytes"));
  EXPECT(amem_alloc(kMiB, 77, nullptr) == nullptr);
  EXPECT(amem_wait("wieghts", 0, nullptr) == 4 && amem_wait(nullptr, 0, nullptr) == 4 && amem_wait("nccl", 0, nullptr) == 0);
  const Block block = Take("weights", kMiB, 1);
  amem_free(block.at + 512, 0, 0, nullptr);  // counted, logged once, left alone
  amem_free(block.at + 1024, 0, 0, nullptr);
  amem_free(nullptr, 0, 0, nullptr);
  EXPECT(Holds(block));
  EXPECT(Pause({"weights"}) == 0);
  EXPECT(amem_pool_enter("weights") == 5 && Says("weights is paused"));
  EXPECT(amem_pool_leave() == 5);
  EXPECT(amem_wait("weights", AMEM_ON_STREAM, nullptr) == 5 && Says("resume it first"));
  EXPECT(Resume({"weights"}) == 0);
  std::size_t length = 4;
  char few[4];
  EXPECT(amem_json(AMEM_MEMORY, few, &length) == 4 && Says("amem_json: the buffer has 4 bytes"));
  EXPECT(amem_json(AMEM_MEMORY, few, nullptr) == 4 && amem_json("what", few, &length) == 4 && Says("known: stats, memory"));
}

// As PyTorch sees it: null, and after something was freed it works. AMEM_SIM_CAPACITY_MIB=256
void OutOfMemory() {
  EXPECT(amem_pool("weights", AMEM_PRESERVE) == 0);
  const Block block = Take("weights", 200 * kMiB, 1);
  EXPECT(amem_pool_enter("weights") == 0);
  EXPECT(amem_alloc(100 * kMiB, 0, nullptr) == nullptr && Says("100 MiB") && Says("weights"));
  void* const rest = amem_alloc(50 * kMiB, 0, nullptr);
  EXPECT(rest != nullptr);
  EXPECT(amem_pool_leave() == 0);
  EXPECT(Holds(block));
  Give(block);
  Give(Take("weights", 190 * kMiB, 1));
  amem_free(rest, 0, 0, nullptr);
}

void WithoutWaiting() {
  EXPECT(amem_pool("weights", AMEM_PRESERVE) == 0 && amem_pool("optimizer", AMEM_PRESERVE) == 0);
  const Block weights = Take("weights", 5 * kMiB, 1), optimizer = Take("optimizer", 50 * kMiB, 2);
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  EXPECT(DRIVER(cuDevicePrimaryCtxRetain)(&context, 0) == CUDA_SUCCESS);
  EXPECT(DRIVER(cuCtxSetCurrent)(context) == CUDA_SUCCESS);
  EXPECT(DRIVER(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
  for (int i = 0; i < 3; ++i) {
    EXPECT(Pause({"weights", "optimizer"}, AMEM_NO_WAIT | AMEM_ON_STREAM, i == 0 ? nullptr : stream) == 0);
    EXPECT(amem_wait("weights", 0, nullptr) == 0 && amem_wait("optimizer", 0, nullptr) == 0);
    EXPECT(InUse() == 0);
    EXPECT(Resume({"optimizer"}, AMEM_NO_WAIT, -1) == 0 && Resume({"weights"}, AMEM_NO_WAIT, 1) == 0);
    EXPECT(amem_wait("weights", AMEM_ON_STREAM, stream) == 0 && amem_wait("weights", AMEM_ON_STREAM, nullptr) == 0);
    EXPECT(amem_wait("weights", 0, nullptr) == 0);
    EXPECT(Holds(weights));
    EXPECT(amem_wait("optimizer", 0, nullptr) == 0);
    EXPECT(Holds(optimizer));
  }
  EXPECT(DRIVER(cuStreamBeginCapture)(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == CUDA_SUCCESS);
  EXPECT(Pause({"weights"}, AMEM_ON_STREAM, stream) == 5 && Says("capture"));
  // A tag without memory has no moment to wait for. Its pause has begun when the next one's is refused, and nobody waits.
  EXPECT(amem_pool("empty", AMEM_PRESERVE) == 0);
  EXPECT(Pause({"empty", "weights"}, AMEM_NO_WAIT | AMEM_ON_STREAM, stream) == 5 && Says("tag empty is being resumed again"));
  EXPECT(amem_wait("empty", 0, nullptr) == 0 && Shows("\"state\":\"resident\",\"tag\":\"empty\""));
  CUgraph graph = nullptr;
  EXPECT(DRIVER(cuStreamEndCapture)(stream, &graph) == CUDA_SUCCESS);
  EXPECT(Pause({"weights"}) == 0);
  FailNext("Create", 1, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT(Resume({"weights"}, AMEM_NO_WAIT) == 0);
  EXPECT(amem_wait("weights", 0, nullptr) == 1 && Says("stays paused, with its contents kept") && Says("amem-replay why"));
  EXPECT(amem_wait("weights", 0, nullptr) == 0);
  EXPECT(Resume({"weights"}) == 0);
  EXPECT(Holds(weights));
}

// Of several tags, all or none.
void Together() {
  EXPECT(amem_pool("a", AMEM_PRESERVE) == 0 && amem_pool("b", AMEM_PRESERVE) == 0 && amem_pool("c", AMEM_PRESERVE) == 0);
  const Block a = Take("a", kMiB, 1), b = Take("b", kMiB, 2), c = Take("c", kMiB, 3);
  EXPECT(Pause({"c"}) == 0);
  FailNext("Unmap", 2, CUDA_ERROR_UNKNOWN);
  EXPECT(Pause({"c", "a", "b"}) == 1 && Says("of tag b") && Says("tag a was resumed again"));
  EXPECT(Holds(a) && Holds(b));
  EXPECT(Shows("\"state\":\"paused\",\"tag\":\"c\""));
  EXPECT(Pause({"a", "b"}) == 0);
  FailNext("Map", 2, CUDA_ERROR_UNKNOWN);
  EXPECT(Resume({"a", "b"}) == 1 && Says("of tag b") && Says("tag a was paused again"));
  EXPECT(InUse() == 0);
  EXPECT(Resume({"a", "b", "c"}) == 0);
  EXPECT(Holds(a) && Holds(b) && Holds(c));
  FailNext("Unmap", 3, CUDA_ERROR_UNKNOWN);
  EXPECT(Pause({"a", "b", "c"}) == 1 && Says("; tag b was resumed again; tag a was resumed again"));  // the last one first
  EXPECT(Holds(a) && Holds(b) && Holds(c));
  // What somebody else was resuming already, or had asked for, is not paused again.
  EXPECT(Pause({"a", "b"}) == 0 && DRIVER(stand_in_cuda_at)("Map", 1, "sleep=300") == 0);
  FailNext("Create", 2, CUDA_ERROR_UNKNOWN);
  EXPECT(Resume({"a"}, AMEM_NO_WAIT) == 0);
  EXPECT(Resume({"a", "b"}) == 1 && Says("of tag b") && !Says("tag a"));
  EXPECT(Holds(a) && Resume({"b"}) == 0 && Holds(b));
  // Nor is what somebody else had asked to pause resumed.
  EXPECT(DRIVER(stand_in_cuda_at)("Unmap", 1, "sleep=300") == 0);
  FailNext("Unmap", 2, CUDA_ERROR_UNKNOWN);
  EXPECT(Pause({"a"}, AMEM_NO_WAIT) == 0);
  EXPECT(Pause({"a", "b"}) == 1 && Says("of tag b") && !Says("tag a"));
  EXPECT(Shows("\"state\":\"paused\",\"tag\":\"a\"") && Holds(b) && Resume({"a"}) == 0 && Holds(a));
}

// What is asked for while the thread is busy is done by priority: the second to map memory is what has the higher one. And a
// call that does not wait does not tell of failures.
void Priorities() {
  EXPECT(amem_pool("a", AMEM_PRESERVE) == 0 && amem_pool("b", AMEM_PRESERVE) == 0 && amem_pool("c", AMEM_PRESERVE) == 0);
  const Block a = Take("a", 200 * kMiB, 1), b = Take("b", kMiB, 2), c = Take("c", kMiB, 3);
  EXPECT(Pause({"a", "b", "c"}) == 0);
  FailNext("Map", 2, CUDA_ERROR_UNKNOWN);
  EXPECT(Resume({"a"}, AMEM_NO_WAIT, 2) == 0);  // the thread may not have begun it yet
  EXPECT(Resume({"b"}, AMEM_NO_WAIT, -1) == 0 && Resume({"c"}, AMEM_NO_WAIT, 1) == 0);
  EXPECT(amem_wait("a", 0, nullptr) == 0 && amem_wait("b", 0, nullptr) == 0 && amem_wait("c", 0, nullptr) == 1);
  EXPECT(Holds(a) && Holds(b));
  EXPECT(Resume({"c"}) == 0 && Holds(c));
}

void Nested() {
  EXPECT(amem_pool("outer", AMEM_PRESERVE) == 0 && amem_pool("inner", AMEM_PRESERVE) == 0);
  EXPECT(amem_pool_enter("outer") == 0);
  Give(Take("inner", kMiB, 1));
  const Block inner = Take("inner", kMiB, 2);
  EXPECT(Pause({"outer"}) == 5 && Says("a thread is inside"));
  EXPECT(Pause({"inner"}) == 0);  // left again
  EXPECT(amem_pool_enter("inner") == 5);
  EXPECT(Resume({"inner"}) == 0 && Holds(inner) && amem_pool_leave() == 0);
  std::thread([] { EXPECT(amem_pool_enter("outer") == 0); }).join();
  EXPECT(Pause({"outer"}) == 0);  // a thread that has ended is inside no more
  const Block of_default{static_cast<unsigned char*>(amem_alloc(kMiB, 0, nullptr)), kMiB, 3};
  EXPECT(of_default.at != nullptr && Pause({"default"}) == 0);
  EXPECT(amem_alloc(kMiB, 0, nullptr) == nullptr && Says("default is paused"));
  EXPECT(Resume({"outer", "default"}) == 0);
}

void Threads() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      const std::string tag = "tag" + std::to_string(t);
      EXPECT(amem_pool(tag.c_str(), AMEM_PRESERVE) == 0);
      for (int i = 0; i < 10; ++i) {
        const Block block = Take(tag.c_str(), (1 + i) * kMiB, t);
        EXPECT(Pause({tag.c_str()}) == 0 && Resume({tag.c_str()}) == 0);
        EXPECT(Holds(block));
        Give(block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(InUse() == 0);
}

void Forked() {
  EXPECT(amem_pool("weights", AMEM_PRESERVE) == 0);
  const Block block = Take("weights", kMiB, 1);
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    amem_free(block.at, 0, 0, nullptr);
    std::vector<const char*> tags{"weights"};
    if (amem_pause(tags.data(), 1, 0, nullptr) != 5 || amem_alloc(kMiB, 0, nullptr) != nullptr) _exit(1);
    // The ledger is the parent's, of which a thread may have been at it.
    _exit(amem_want_resume(1, tags.data(), 1, AMEM_LET_GO, 0) == 5 && amem_want_resume(1, tags.data(), 1, 0, 0) == 5 ? 0 : 1);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  EXPECT(Pause({"weights"}) == 0 && Resume({"weights"}) == 0);
  EXPECT(Holds(block));
}

// With STAND_IN_FAULT=fork. What libcuda forks while it starts comes here, too, and cannot use AMem.
void ForkedByCudaItself() {
  pthread_atfork(nullptr, nullptr, [] {
    if (amem_pool("weights", AMEM_PRESERVE) != 5 || !Says("forked")) _exit(1);
  });
  Cycles();
}

// With LOCAL_WORLD_SIZE: of the host's memory each rank pins its share.
void Crowded() {
  EXPECT(amem_pool("weights", AMEM_PRESERVE) == 0);
  const Block block = Take("weights", 64 * kMiB, 1);
  CUcontext context = nullptr;
  EXPECT(DRIVER(cuDevicePrimaryCtxRetain)(&context, 0) == CUDA_SUCCESS);
  usleep(250'000);  // in which memory is pinned ahead of a pause
  EXPECT(DRIVER(stand_in_cuda_pinned)(context) < 64 * kMiB);
  EXPECT(Pause({"weights"}) == 0 && Resume({"weights"}) == 0 && Holds(block));
}

void DefaultTag() {
  Block block{static_cast<unsigned char*>(amem_alloc(kMiB, 0, nullptr)), kMiB, 4};
  EXPECT(block.at != nullptr);
  for (ssize_t i = 0; i < kMiB; i += 97) block.at[i] = ByteAt(block, i);
  EXPECT(Pause({"default"}) == 0 && InUse() == 0);
  EXPECT(Resume({"default"}) == 0 && Holds(block));
  EXPECT(Pause({"nccl", "default"}) == 0 && Resume({"default", "nccl"}) == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> all{{"cycles", Cycles},
                                                         {"off", Off},
                                                         {"nothing", Nothing},
                                                         {"wants", Wants},
                                                         {"wants-of-threads", WantsOfThreads},
                                                         {"without-memory", WithoutMemory},
                                                         {"wrong-use", WrongUse},
                                                         {"out-of-memory", OutOfMemory},
                                                         {"without-waiting", WithoutWaiting},
                                                         {"together", Together},
                                                         {"priorities", Priorities},
                                                         {"nested", Nested},
                                                         {"threads", Threads},
                                                         {"forked", Forked},
                                                         {"forked-by-cuda", ForkedByCudaItself},
                                                         {"crowded", Crowded},
                                                         {"default-tag", DefaultTag}};
  const auto chosen = argc == 2 ? all.find(argv[1]) : all.end();
  if (chosen == all.end()) return 2;
  chosen->second();
  std::puts("fine");
  return 0;
}
