// One process under AMem: the stand-in driver and NCCL are loaded, NCCL has called the driver, and a session runs.
#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <thread>

#include "ncclpatch/intercept/registrations.h"

namespace amem::test {

// Stands for a function of the driver, counts its calls and answers `result`.
template <class F>
struct Recorded;
template <class R, class... A>
struct Recorded<R(A...)> {
  static inline int calls = 0;
  static inline R result{};
  static R Real(A...) {
    ++calls;
    return result;
  }
};

// Stands for a function that does not return before it is released.
template <class F>
struct Held;
template <class R, class... A>
struct Held<R(A...)> {
  static inline std::atomic<int> inside{0};
  static inline std::atomic<bool> released{false};
  static inline R result{};
  static R Real(A...) {
    for (++inside; !released; std::this_thread::yield()) {
    }
    return result;
  }
  static void Reset() {
    inside = 0;
    released = false;
  }
  static void Release() { released = true; }
  static void AwaitInside(int calls) {
    while (inside < calls) std::this_thread::yield();
  }
};

class Intercepted : public ::testing::Test {
 protected:
  static constexpr Bytes kBytes = Bytes{2} << 20;

  static void SetUpTestSuite() {
    static const bool started = Start();
    ASSERT_TRUE(started);
  }
  // Memory as a program gets it from ncclMemAlloc: a mapping of its own, which a pause takes.
  void SetUp() override { ASSERT_EQ(nccl_alloc_(&memory_, kBytes), 0); }
  void TearDown() override {
    EXPECT_TRUE(session().Resume().ok());
    EXPECT_EQ(nccl_free_(memory_), 0);
    EXPECT_TRUE(session().CopyState().broken.empty()) << session().CopyState().broken;
  }

  static void* AllocateAnother() {
    void* memory = nullptr;
    EXPECT_EQ(nccl_alloc_(&memory, kBytes), 0);
    return memory;
  }
  static int Free(void* memory) { return nccl_free_(memory); }
  void FreeAndAllocate() {
    ASSERT_EQ(nccl_free_(memory_), 0);
    ASSERT_EQ(nccl_alloc_(&memory_, kBytes), 0);
  }

  static Session& session() { return *Runtime::Get().started(); }
  [[nodiscard]] CUdeviceptr memory() const { return reinterpret_cast<CUdeviceptr>(memory_); }
  [[nodiscard]] Allocation AllocationOfMemory() const {
    const State state = session().CopyState();
    return state.allocations.at(state.MappingAt(Address{memory()})->second.allocation);
  }

  // Begins a pause, which a call that is held by the driver must keep from taking memory; `release` ends that call. Whether the
  // pause ended nevertheless before that. Without a gate it takes some milliseconds.
  template <class Release>
  static bool APauseGoesOnBefore(const Release& release) {
    constexpr std::chrono::milliseconds kLong{200};
    std::atomic<bool> paused{false};
    std::thread pauses([&] {
      EXPECT_TRUE(session().Pause().ok());
      paused = true;
    });
    const auto until = std::chrono::steady_clock::now() + kLong;
    while (!paused && !session().paused() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    const bool went_on = paused || session().paused();
    release();
    pauses.join();
    return went_on;
  }
  // What the caller gets in place of `real`, which the driver would give for that name.
  using Caller = replacements::Caller;
  template <class F>
  static F* Replace(const char* name, F* real, int cuda_version = 13000, Caller caller = Caller::kNccl) {
    bool replaced = false;
    void* entry = replacements::Bind(name, cuda_version, reinterpret_cast<void*>(real), &replaced, caller);
    EXPECT_TRUE(replaced) << name;
    return reinterpret_cast<F*>(entry);
  }
  // What another library gets in place of `real`.
  template <class F>
  static F* ForOthers(const char* name, F* real) {
    return Replace(name, real, 13000, Caller::kOther);
  }
  template <class F>
  static F* OfDriver(const char* name, const char* exported) {
    return ForOthers(name, Plain<F>(exported));
  }
  // What NCCL gets of the stand-in driver.
  template <class F>
  static F* Driver(const char* name) {
    const auto get = reinterpret_cast<decltype(cuGetProcAddress)*>(dlsym(driver_, "cuGetProcAddress_v2"));
    void* real = nullptr;
    EXPECT_EQ(get(name, &real, 13000, 0, nullptr), CUDA_SUCCESS) << name;
    return Replace(name, reinterpret_cast<F*>(real));
  }
  // The stand-in driver's own function.
  template <class F>
  static F* Plain(const char* name) {
    return reinterpret_cast<F*>(dlsym(driver_, name));
  }
  template <class F>
  static F* Nccl(const char* name) {
    return reinterpret_cast<F*>(dlsym(nccl_, name));
  }
  // Counts by kind, of all events that this session has recorded.
  template <class Kind>
  static std::uint64_t Count() {
    return session().CopyState().totals.events[EventBody(Kind{}).index()];
  }

 private:
  static bool Start() {
    static std::string directory = (std::filesystem::temp_directory_path() / "amem-intercept-XXXXXX").string();
    if (mkdtemp(directory.data()) == nullptr) return false;
    std::atexit([] { std::filesystem::remove_all(directory); });  // after the session, which is closed by a later atexit
    setenv("AMEM_JOURNAL_DIR", directory.c_str(), 1);
    setenv("AMEM_LOG", "off", 1);
    setenv("AMEM_SIM_FABRIC", "1", 1);
    setenv("AMEM_USER_MEMORY", "release", 1);
    driver_ = dlopen(AMEM_STAND_INS "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    nccl_ = dlopen(AMEM_STAND_INS "/libnccl.so.2", RTLD_LAZY | RTLD_LOCAL);
    if (driver_ == nullptr || nccl_ == nullptr) return false;
    replacements::Install(intercept::Tables());
    replacements::Install(&intercept::WrapPlugin);
    EXPECT_TRUE(Runtime::Get().Attach().ok());
    const auto call = [](const char* name, auto* type) { return reinterpret_cast<decltype(type)>(dlsym(driver_, name)); };
    CUcontext context = nullptr;
    EXPECT_EQ(call("cuInit", static_cast<decltype(cuInit)*>(nullptr))(0), CUDA_SUCCESS);
    EXPECT_EQ(call("cuDevicePrimaryCtxRetain", static_cast<decltype(cuDevicePrimaryCtxRetain)*>(nullptr))(&context, 0),
              CUDA_SUCCESS);
    EXPECT_EQ(call("cuCtxSetCurrent", static_cast<decltype(cuCtxSetCurrent)*>(nullptr))(context), CUDA_SUCCESS);
    nccl_alloc_ = reinterpret_cast<int (*)(void**, size_t)>(dlsym(nccl_, "ncclMemAlloc"));
    nccl_free_ = reinterpret_cast<int (*)(void*)>(dlsym(nccl_, "ncclMemFree"));
    void* first = nullptr;
    return nccl_alloc_(&first, kBytes) == 0 && nccl_free_(first) == 0 && Runtime::Get().started() != nullptr;
  }

  static inline void *driver_ = nullptr, *nccl_ = nullptr;
  static inline int (*nccl_alloc_)(void**, size_t) = nullptr;
  static inline int (*nccl_free_)(void*) = nullptr;
  void* memory_ = nullptr;
};

}  // namespace amem::test

// The stand-in driver's own function of that name in cuda.h, and what another library gets in place of it.
#define PLAIN(name) Plain<decltype(name)>(AMEM_TEXT(name))
#define OF_DRIVER(name) OfDriver<decltype(name)>(#name, AMEM_TEXT(name))
