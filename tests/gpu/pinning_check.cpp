// amem-pinning-check: how fast contents of the device can reach host memory that nobody has pinned yet.
//
// It needs one GPU and some 2 GiB of its memory, and neither NCCL nor AMem. Measures, for one GiB: pinning alone, in as many
// ways as there are; pinning by several threads beside the copies that wait for it; a small pinned ring from which threads
// copy on into ordinary memory; and what calls of a program take while memory is provided beside it (with --beside-program only
// that). It also tries what the driver says of a context that was destroyed. Exit code 77: no GPU.
#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kMiB = 1 << 20, kGiB = 1 << 30, kHuge = 2 * kMiB, kChunk = 16 * kMiB, kChunks = kGiB / kChunk;

void* Library() {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return library;
}
template <class F>
F* Find(const char* name) {
  void* found = dlsym(Library(), name);
  if (found == nullptr) std::printf("libcuda has no %s\n", name);
  return reinterpret_cast<F*>(found);
}
#define NAME_OF(symbol) #symbol
#define EXPANDED(symbol) NAME_OF(symbol)  // cuda.h maps some names to their newest variants
#define CALL(name) (*Find<decltype(name)>(EXPANDED(name)))

double Ms(const std::function<void()>& work) {
  const auto began = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
}
void Check(int result, const char* doing) {
  if (result == 0) return;
  std::printf("FAILED %s: CUresult %d\n", doing, result);
  std::exit(1);
}
std::string FirstLine(const char* path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

// Address space for a GiB of huge pages, none of which is there yet.
struct Space {
  Space() : mapping(mmap(nullptr, kGiB + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    const auto past = reinterpret_cast<std::uintptr_t>(mapping) % kHuge;
    data = static_cast<char*>(mapping) + (kHuge - past) % kHuge;
    madvise(data, kGiB, MADV_HUGEPAGE);
  }
  ~Space() { munmap(mapping, kGiB + kHuge); }
  Space(const Space&) = delete;
  Space& operator=(const Space&) = delete;
  void* mapping;
  char* data;
};

void Populate(char* at, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes; done += kHuge) {
#ifdef MADV_POPULATE_WRITE
    if (madvise(at + done, kHuge, MADV_POPULATE_WRITE) == 0) continue;
#endif
    for (std::size_t i = 0; i < kHuge; i += 4096) static_cast<volatile char*>(at)[done + i] = 0;
  }
}

// work(i) for every i below `count`, by some threads.
void InParallel(int threads, std::size_t count, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([&] {
      for (std::size_t i; (i = next.fetch_add(1)) < count;) work(i);
    });
  }
  for (std::thread& one : all) one.join();
}

class Gpu {
 public:
  Gpu() {
    Check(CALL(cuDevicePrimaryCtxRetain)(&context_, 0), "cuDevicePrimaryCtxRetain");
    Current();
    Check(CALL(cuStreamCreate)(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    Check(CALL(cuMemAlloc)(&memory_, kGiB), "cuMemAlloc");
  }
  void Current() const { Check(CALL(cuCtxSetCurrent)(context_), "cuCtxSetCurrent"); }
  void Register(char* at, std::size_t bytes) const {
    static auto* const call = &CALL(cuMemHostRegister);
    Check(call(at, bytes, CU_MEMHOSTREGISTER_PORTABLE), "cuMemHostRegister");
  }
  void Unregister(char* at) const { Check(CALL(cuMemHostUnregister)(at), "cuMemHostUnregister"); }
  void Copy(char* to, std::size_t from, std::size_t bytes) const {
    static auto* const call = &CALL(cuMemcpyDtoHAsync);
    Check(call(to, memory_ + from, bytes, stream_), "cuMemcpyDtoHAsync");
  }
  void Wait() const { Check(CALL(cuStreamSynchronize)(stream_), "cuStreamSynchronize"); }
  CUevent Mark() const {
    CUevent event = nullptr;
    Check(CALL(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    Check(CALL(cuEventRecord)(event, stream_), "cuEventRecord");
    return event;
  }
  static void Await(CUevent event) { Check(CALL(cuEventSynchronize)(event), "cuEventSynchronize"); }

 private:
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUdeviceptr memory_ = 0;
};

void Alone(const Gpu& gpu) {
  std::vector<void*> allocated(kChunks);
  const double alloc = Ms([&] {
    for (void*& one : allocated) Check(CALL(cuMemHostAlloc)(&one, kChunk, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
  });
  const double free = Ms([&] {
    for (void* one : allocated) CALL(cuMemFreeHost)(one);
  });
  std::printf("alone: cuMemHostAlloc in pieces of 16 MiB %.1f ms, free %.1f ms\n", alloc, free);
  for (const int threads : {1, 2, 4, 8, 16}) {
    for (const std::size_t piece : {16 * kMiB, 64 * kMiB, kGiB}) {
      const Space space;
      const double populate =
          Ms([&] { InParallel(threads, kChunks, [&](std::size_t i) { Populate(space.data + i * kChunk, kChunk); }); });
      const double registered = Ms([&] {
        InParallel(std::min<int>(threads, static_cast<int>(kGiB / piece)), kGiB / piece, [&](std::size_t i) {
          gpu.Current();
          gpu.Register(space.data + i * piece, piece);
        });
      });
      const double unregister = Ms([&] {
        for (std::size_t i = 0; i < kGiB / piece; ++i) gpu.Unregister(space.data + i * piece);
      });
      std::printf("alone: %2d threads, pieces of %4zu MiB: populate %.1f ms, register %.1f ms, unregister %.1f ms\n", threads,
                  piece / kMiB, populate, registered, unregister);
    }
  }
}

// Threads populate and register; the copy of a piece begins as soon as it is there.
void Beside(const Gpu& gpu, int threads, bool register_in_threads, std::size_t piece) {
  const Space space;
  const std::size_t count = kGiB / piece;
  std::vector<std::atomic<int>> ready(count);
  double pinned = 0;
  const double all = Ms([&] {
    std::thread pinning([&] {
      pinned = Ms([&] {
        InParallel(threads, count, [&](std::size_t i) {
          Populate(space.data + i * piece, piece);
          if (register_in_threads) {
            gpu.Current();
            gpu.Register(space.data + i * piece, piece);
          }
          ready[i].store(1);
        });
      });
    });
    for (std::size_t i = 0; i < count; ++i) {
      while (ready[i].load() == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
      if (!register_in_threads) gpu.Register(space.data + i * piece, piece);
      gpu.Copy(space.data + i * piece, i * piece, piece);
    }
    pinning.join();
    gpu.Wait();
  });
  for (std::size_t i = 0; i < count; ++i) gpu.Unregister(space.data + i * piece);
  std::printf("beside copies: %2d threads populate%s, pieces of %3zu MiB: pinned after %.1f ms, copied after %.1f ms\n",
              threads, register_in_threads ? " and register" : ", one registers", piece / kMiB, pinned, all);
}

// A ring of pinned pieces; threads copy on into memory that is not pinned.
void Ring(const Gpu& gpu, int threads, bool populated) {
  constexpr std::size_t kPiece = 8 * kMiB, kPieces = kGiB / kPiece, kRing = 8;
  const Space ring, target;
  Populate(ring.data, kRing * kPiece);
  gpu.Register(ring.data, kRing * kPiece);
  if (populated) InParallel(8, kChunks, [&](std::size_t i) { Populate(target.data + i * kChunk, kChunk); });
  std::vector<std::atomic<int>> queued(kPieces), done(kPieces);
  std::vector<CUevent> events(kPieces);
  const double all = Ms([&] {
    std::thread copying([&] {
      InParallel(threads, kPieces, [&](std::size_t i) {
        gpu.Current();
        while (queued[i].load() == 0) std::this_thread::yield();
        Gpu::Await(events[i]);
        std::memcpy(target.data + i * kPiece, ring.data + i % kRing * kPiece, kPiece);
        done[i].store(1);
      });
    });
    for (std::size_t i = 0; i < kPieces; ++i) {
      while (i >= kRing && done[i - kRing].load() == 0) std::this_thread::yield();
      gpu.Copy(ring.data + i % kRing * kPiece, i * kPiece, kPiece);
      events[i] = gpu.Mark();
      queued[i].store(1);
    }
    copying.join();
  });
  gpu.Unregister(ring.data);
  std::printf("ring of 8 x 8 MiB, %2d threads, into memory that is %s: %.1f ms\n", threads,
              populated ? "populated" : "not there yet", all);
}

void Ordinary(const Gpu& gpu) {
  const Space target;
  const double fresh = Ms([&] {
    gpu.Copy(target.data, 0, kGiB);
    gpu.Wait();
  });
  const double again = Ms([&] {
    gpu.Copy(target.data, 0, kGiB);
    gpu.Wait();
  });
  std::printf("the driver's own copy to memory that is not pinned: not there yet %.1f ms, populated %.1f ms\n", fresh, again);
}

// How memory is provided while the program goes on: what the program's own calls take meanwhile. Those that change its address
// space wait for the kernel's lock of it, and those of the driver for the driver's.
enum class Way { kNothing, kPopulate, kTouch, kPopulateWithGaps, kTouchWithGaps, kRegister };
constexpr const char* kWays[] = {
    "nothing", "MADV_POPULATE_WRITE", "touching", "MADV_POPULATE_WRITE with gaps", "touching with gaps", "registering"};

void ProvideBy(const Gpu& gpu, Way way, char* at, std::size_t bytes) {
  if (way == Way::kRegister) {
    gpu.Register(at, bytes);
    return;
  }
  for (std::size_t done = 0; done < bytes; done += kHuge) {
    if (way == Way::kPopulate || way == Way::kPopulateWithGaps) {
      Populate(at + done, kHuge);
    } else {
      for (std::size_t i = 0; i < kHuge; i += 4096) static_cast<volatile char*>(at)[done + i] = 0;
    }
    if (way >= Way::kPopulateWithGaps) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void BesideProgram(const Gpu& gpu, Way way, int threads) {
  constexpr std::size_t kPiece = 32 * kMiB, kPieces = 2 * kGiB / kPiece;
  const Space spaces[2];
  if (way == Way::kRegister)
    InParallel(4, kPieces, [&](std::size_t i) { Populate(spaces[i % 2].data + i / 2 * kPiece, kPiece); });
  struct Call {
    const char* what;
    std::function<void()> work;
    std::vector<double> took;
  };
  CUdeviceptr small = 0;
  Check(CALL(cuMemAlloc)(&small, kHuge), "cuMemAlloc");
  static auto* const set = &CALL(cuMemsetD8Async);
  static auto* const allocate = &CALL(cuMemAlloc);
  static auto* const release = &CALL(cuMemFree);
  std::vector<Call> calls;
  calls.push_back({"mmap, first use, and munmap",
                   [] {
                     void* const some = mmap(nullptr, kMiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                     for (std::size_t i = 0; i < 16; ++i) static_cast<volatile char*>(some)[i * 4096] = 1;
                     munmap(some, kMiB);
                   },
                   {}});
  calls.push_back({"memset",
                   [&] {
                     Check(set(small, 1, 4096, nullptr), "cuMemsetD8Async");
                     Check(CALL(cuStreamSynchronize)(nullptr), "cuStreamSynchronize");
                   },
                   {}});
  calls.push_back({"cuMemAlloc and cuMemFree",
                   [&] {
                     CUdeviceptr some = 0;
                     Check(allocate(&some, 32 * kMiB), "cuMemAlloc");
                     Check(release(some), "cuMemFree");
                   },
                   {}});
  std::atomic<bool> over{way == Way::kNothing};
  double provided = 0;
  std::thread providing([&] {
    if (way == Way::kNothing) return;
    provided = Ms([&] {
      InParallel(threads, kPieces, [&](std::size_t i) {
        gpu.Current();
        ProvideBy(gpu, way, spaces[i % 2].data + i / 2 * kPiece, kPiece);
      });
    });
    over = true;
  });
  const auto began = std::chrono::steady_clock::now();
  const auto goes_on = [&] {
    return way == Way::kNothing ? std::chrono::steady_clock::now() - began < std::chrono::milliseconds(300) : !over.load();
  };
  do {
    for (Call& call : calls) call.took.push_back(Ms(call.work));
  } while (goes_on());
  providing.join();
  Check(CALL(cuMemFree)(small), "cuMemFree");
  if (way == Way::kRegister)
    for (std::size_t i = 0; i < kPieces; ++i) gpu.Unregister(spaces[i % 2].data + i / 2 * kPiece);
  std::printf("beside a program: %d threads, %-30s 2 GiB in %5.0f ms; median, 9 of 10 below, worst ms:", threads,
              kWays[static_cast<int>(way)], provided);
  for (Call& call : calls) {
    std::sort(call.took.begin(), call.took.end());
    const auto at = [&](double part) {
      return call.took[static_cast<std::size_t>(part * static_cast<double>(call.took.size() - 1))];
    };
    std::printf("  %s %.3f %.3f %.2f (%zu)", call.what, at(0.5), at(0.9), at(1), call.took.size());
  }
  std::printf("\n");
}

// In a child, because nobody promises that it does not crash.
void DestroyedContext() {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    Check(CALL(cuInit)(0), "cuInit");
    CUcontext primary = nullptr, own = nullptr;
    Check(CALL(cuDevicePrimaryCtxRetain)(&primary, 0), "cuDevicePrimaryCtxRetain");
    using Create = CUresult(CUcontext*, unsigned, CUdevice);
    auto* const create = reinterpret_cast<Create*>(dlsym(Library(), "cuCtxCreate_v2"));
    using Destroy = CUresult(CUcontext);
    auto* const destroy = reinterpret_cast<Destroy*>(dlsym(Library(), "cuCtxDestroy_v2"));
    using Push = CUresult(CUcontext);
    auto* const push = reinterpret_cast<Push*>(dlsym(Library(), "cuCtxPushCurrent_v2"));
    Check(create(&own, 0, 0), "cuCtxCreate");
    CUstream stream = nullptr;
    Check(CALL(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    CUcontext of_stream = nullptr;
    const int asked = CALL(cuStreamGetCtx)(stream, &of_stream);
    std::printf("cuStreamGetCtx: CUresult %d, %s\n", asked, of_stream == own ? "the context" : "another context");
    Check(destroy(own), "cuCtxDestroy");
    const int pushed = push(own);
    const int synchronized = pushed == 0 ? static_cast<int>(CALL(cuCtxSynchronize)()) : -1;
    std::printf("a destroyed context: cuCtxPushCurrent CUresult %d, cuCtxSynchronize %d\n", pushed, synchronized);
    std::fflush(stdout);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status)) std::printf("a destroyed context: the process died by signal %d\n", WTERMSIG(status));
}

}  // namespace

int main(int argc, char** argv) {
  const bool beside_only = argc == 2 && std::string(argv[1]) == "--beside-program";
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (Library() == nullptr) {
    std::printf("WAIVED: this host has no libcuda.so.1\n");
    return 77;
  }
  DestroyedContext();
  if (CALL(cuInit)(0) != CUDA_SUCCESS) {
    std::printf("WAIVED: this host has no GPU\n");
    return 77;
  }
  std::printf("%u processors; huge pages: %s\n", std::thread::hardware_concurrency(),
              FirstLine("/sys/kernel/mm/transparent_hugepage/enabled").c_str());
  const Gpu gpu;
  for (int round = 0; round < 2; ++round) {
    BesideProgram(gpu, Way::kNothing, 0);
    for (const int threads : {1, 2, 4, 8})
      for (const Way way : {Way::kPopulate, Way::kTouch, Way::kPopulateWithGaps, Way::kTouchWithGaps, Way::kRegister})
        BesideProgram(gpu, way, threads);
    if (beside_only) continue;
    Alone(gpu);
    for (const int threads : {1, 2, 4, 6, 8, 12}) {
      for (const std::size_t piece : {8 * kMiB, 16 * kMiB, 32 * kMiB}) {
        Beside(gpu, threads, true, piece);
        Beside(gpu, threads, false, piece);
      }
    }
    for (const int threads : {2, 4, 8}) {
      Ring(gpu, threads, false);
      Ring(gpu, threads, true);
    }
    Ordinary(gpu);
  }
  return 0;
}
