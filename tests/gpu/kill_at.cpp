// amem_kill_at.so: kills the process it is preloaded into (SIGKILL) at an exact point of a pause or resume, on any driver.
//
// NCCL's dlopen("libcuda.so.1"), and so AMem, which uses the driver that NCCL opened, gets this library in place of libcuda.
// Its only entry point of the driver finds the real ones and puts a counter before some; everything else is found in libcuda,
// which it is linked to. While it counts, NCCL has to be idle: its calls come this way as well.
#include <cuda.h>
#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr const char* kCalls[] = {"cuMemCreate",  "cuMemMap",   "cuMemSetAccess",
                                  "cuMemRelease", "cuMemUnmap", "cuMemImportFromShareableHandle"};
constexpr int kCount = sizeof kCalls / sizeof kCalls[0];

std::atomic<unsigned long> counts[kCount];
std::atomic<int> armed_call{-1};
std::atomic<unsigned long> armed_nth{0};

template <class Function>
Function Real(Function& cached, const char* name) {
  if (cached == nullptr) cached = reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
  return cached;
}
void* RealDlopen(const char* file, int mode) {
  static void* (*real)(const char*, int) = nullptr;
  return Real(real, "dlopen")(file, mode);
}

void End() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

void Before(int call) {
  const unsigned long nth = ++counts[call];
  if (call == armed_call.load() && nth == armed_nth.load()) End();
}

// One wrapper for each call, with the call's own arguments.
template <int kCall, class... Arguments>
struct Counted {
  static inline CUresult (*real)(Arguments...) = nullptr;
  static CUresult Run(Arguments... arguments) {
    Before(kCall);
    return real(arguments...);
  }
};
template <int kCall, class... Arguments>
void Put(CUresult (* /*like*/)(Arguments...), void** pointer) {
  Counted<kCall, Arguments...>::real = reinterpret_cast<CUresult (*)(Arguments...)>(*pointer);
  *pointer = reinterpret_cast<void*>(&Counted<kCall, Arguments...>::Run);
}

int IndexOf(const char* name) {
  for (int i = 0; i < kCount; ++i) {
    if (std::strcmp(kCalls[i], name) == 0) return i;
  }
  return -1;
}

}  // namespace

// Counts from here on, and kills before the `nth` such call. "" only counts.
EXPORT void amem_kill_at(const char* call, unsigned long nth) {
  armed_call = -1;
  for (auto& count : counts) count = 0;
  armed_nth = nth;
  armed_call = IndexOf(call);
}
EXPORT unsigned long amem_kill_at_calls(const char* call) {
  const int index = IndexOf(call);
  return index < 0 ? 0 : counts[index].load();
}

#undef cuGetProcAddress
EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** pointer, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult* status) {
  using Find = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  static const Find real = [] {
    void* const library = RealDlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library == nullptr ? nullptr : reinterpret_cast<Find>(dlsym(library, "cuGetProcAddress_v2"));
  }();
  if (real == nullptr) return CUDA_ERROR_NOT_FOUND;
  const CUresult result = real(symbol, pointer, version, flags, status);
  if (result != CUDA_SUCCESS || *pointer == nullptr) return result;
  switch (IndexOf(symbol)) {
    case 0:
      Put<0>(decltype (&cuMemCreate)(nullptr), pointer);
      break;
    case 1:
      Put<1>(decltype (&cuMemMap)(nullptr), pointer);
      break;
    case 2:
      Put<2>(decltype (&cuMemSetAccess)(nullptr), pointer);
      break;
    case 3:
      Put<3>(decltype (&cuMemRelease)(nullptr), pointer);
      break;
    case 4:
      Put<4>(decltype (&cuMemUnmap)(nullptr), pointer);
      break;
    case 5:
      Put<5>(decltype (&cuMemImportFromShareableHandle)(nullptr), pointer);
      break;
    default:
      break;
  }
  return result;
}

EXPORT void* dlopen(const char* file, int mode) {
  Dl_info caller{}, self{};
  if (file != nullptr && std::strcmp(file, "libcuda.so.1") == 0 && dladdr(__builtin_return_address(0), &caller) != 0 &&
      std::strstr(caller.dli_fname, "libnccl.so") != nullptr && dladdr(reinterpret_cast<void*>(&amem_kill_at), &self) != 0)
    return RealDlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  return RealDlopen(file, mode);
}
