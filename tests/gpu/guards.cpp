// Memory of a tag, and AMem's own, beside libraries and contexts that AMem knows nothing of: on a GPU or on the stand-in
// driver.
//
//   LD_PRELOAD=libamem_nccl.so amem-guards CHECK [--mib N]
//
//   own-context      the program pauses a tag in a context of its own, destroys that context, and pauses again
//   primary-context  the control: the same in the primary context
//   retained         a library retains a tag's memory, exports and imports it, and maps it a second time: both mappings must be
//                    the same memory after a pause and a resume; what is only retained and released must leave the GPU
//   dma-buf          a library makes a dma-buf of a tag's memory, which then must stay
//   imported         a library that imports the driver's functions and ibv_reg_mr, or looks that up (libholder.so), retains and
//                    registers it; imported-later: it is loaded after the first tag
//   attribute        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, which libraries set before they register memory
//
// Prints what it saw, and last "ok" or "FAIL: why". Exit code 0, 1, or 77 where it cannot run.
#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/gpu/failure.h"

namespace amem::gpu {
namespace {

using Handle = CUmemGenericAllocationHandle;

#define NAME_OF(name) #name  // of the version that the header chooses
#define DRIVER(name) InDriver<decltype(name)>(NAME_OF(name))
template <class F>
F* InDriver(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Skip("this host has no libcuda.so.1");
  auto* const found = reinterpret_cast<F*>(dlsym(library, name));
  if (found == nullptr) throw Skip(std::string("this driver has no ") + name);
  return found;
}
void Call(int result, const std::string& tried) {
  if (result != 0) throw Failure(tried + ": " + std::to_string(result));
}
void Must(bool holds, const char* otherwise) {
  if (!holds) throw Failure(otherwise);
}

template <class F>
F* OfAmem(const char* name) {
  auto* const found = reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name));
  if (found == nullptr) throw Skip("libamem_nccl.so is not preloaded");
  return found;
}
int Cycle(const char* call, const char* tag) {
  const bool pause = std::strcmp(call, "amem_pause") == 0;
  const int result = pause ? OfAmem<int(const char* const*, size_t, unsigned, void*)>(call)(&tag, 1, 0, nullptr)
                           : OfAmem<int(const char* const*, size_t, unsigned, int)>(call)(&tag, 1, 0, 0);
  if (result != 0) std::printf("%s(%s): %d, %s\n", call, tag, result, OfAmem<const char*()>("amem_last_error")());
  return result;
}
void Pause(const char* tag) { Call(Cycle("amem_pause", tag), std::string("pause of tag ") + tag); }
void Resume(const char* tag) { Call(Cycle("amem_resume", tag), std::string("resume of tag ") + tag); }
CUdeviceptr Allocate(const char* tag, size_t bytes) {
  Call(OfAmem<int(const char*, int)>("amem_pool")(tag, 0), "amem_pool");
  Call(OfAmem<int(const char*)>("amem_pool_enter")(tag), "amem_pool_enter");
  void* const memory = OfAmem<void*(ssize_t, int, void*)>("amem_alloc")(static_cast<ssize_t>(bytes), 0, nullptr);
  Call(OfAmem<int()>("amem_pool_leave")(), "amem_pool_leave");
  Must(memory != nullptr, "amem_alloc gave nothing");
  return reinterpret_cast<CUdeviceptr>(memory);
}

struct Memory {
  size_t bytes = 0, resident = 0, kept = 0;
  std::map<std::string, size_t> held_by;
};
Memory Of(const char* tag) {
  std::vector<char> text(1 << 20);
  size_t length = text.size();
  Call(OfAmem<int(const char*, char*, size_t*)>("amem_json")("memory", text.data(), &length), "amem_json");
  const auto memory = nlohmann::json::parse(text.data());
  for (const auto& one : memory["tags"])
    if (one["tag"] == tag)
      return {one.at("bytes"), one.at("resident_bytes"), one.at("kept_bytes"),
              one.value("held_by", std::map<std::string, size_t>())};
  throw Failure(std::string("amem_json knows no tag ") + tag);
}
void Print(const char* when, const Memory& m) {
  std::printf("%s: %zu MiB, resident %zu, kept %zu", when, m.bytes >> 20, m.resident >> 20, m.kept >> 20);
  for (const auto& [library, bytes] : m.held_by) std::printf("; %zu held by %s", bytes >> 20, library.c_str());
  std::printf("\n");
}
// A pause leaves all of the tag's memory where it is, and says for whom.
void Stays(const char* tag, const std::string& library) {
  Pause(tag);
  const Memory paused = Of(tag);
  Print("paused", paused);
  Resume(tag);
  Must(paused.resident == paused.bytes && paused.kept == paused.bytes, "the pause took memory that a library holds");
  Must(library.empty() ? !paused.held_by.empty() : paused.held_by.contains(library), "the library that holds it is not named");
}
void Leaves(const char* tag) {
  Pause(tag);
  const Memory paused = Of(tag);
  Print("paused", paused);
  Resume(tag);
  Must(paused.resident == 0, "nobody holds the memory any more, and a pause left it");
}

CUcontext OpenPrimary() {
  CUcontext primary = nullptr;
  if (DRIVER(cuInit)(0) != 0) throw Skip("this host has no GPU");
  Call(DRIVER(cuDevicePrimaryCtxRetain)(&primary, 0), "cuDevicePrimaryCtxRetain");
  Call(DRIVER(cuCtxSetCurrent)(primary), "cuCtxSetCurrent");
  return primary;
}

void Crashed(int signal) {
  static const char kText[] = "FAIL: a fatal signal inside AMem\n";
  static_cast<void>(!write(1, kText, sizeof kText - 1));
  _exit(signal == 0 ? 0 : kExitFail);
}

void Contexts(size_t bytes, bool own_one) {
  for (const int one : {SIGSEGV, SIGBUS, SIGABRT}) std::signal(one, Crashed);
  const CUcontext primary = OpenPrimary();
  CUcontext own = nullptr, popped = nullptr;
  Call(InDriver<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&own, 0, 0), "cuCtxCreate");
  Call(DRIVER(cuCtxPopCurrent)(&popped), "cuCtxPopCurrent");
  const CUdeviceptr memory = Allocate("mine", bytes);
  std::vector<unsigned> host(bytes / sizeof(unsigned)), back(host.size());
  // Runs of zeros, so that the contents are copied in parts.
  const auto fill = [&](unsigned seed) {
    for (size_t i = 0; i < host.size(); ++i) host[i] = i % 3 != 0 ? static_cast<unsigned>(i * 2654435761U) + seed : 0;
    Call(DRIVER(cuMemcpyHtoD)(memory, host.data(), bytes), "cuMemcpyHtoD");
    Call(DRIVER(cuCtxSynchronize)(), "cuCtxSynchronize");
  };
  const auto compare = [&] {
    Call(DRIVER(cuMemcpyDtoH)(back.data(), memory, bytes), "cuMemcpyDtoH");
    Must(host == back, "contents differ after a pause and a resume");
  };
  fill(1);
  Call(DRIVER(cuCtxSetCurrent)(own_one ? own : primary), "cuCtxSetCurrent");  // before AMem has pinned ahead
  Pause("mine");
  Resume("mine");
  Call(DRIVER(cuCtxSetCurrent)(primary), "cuCtxSetCurrent");
  compare();
  Call(InDriver<CUresult(CUcontext)>("cuCtxDestroy_v2")(own), "cuCtxDestroy");
  for (unsigned cycle = 2; cycle < 5; ++cycle) {
    fill(cycle);
    Pause("mine");
    Resume("mine");
    compare();
    Call(DRIVER(cuCtxSynchronize)(), "cuCtxSynchronize: the primary context is lost");
  }
  std::printf("4 cycles with equal contents, 3 of them after cuCtxDestroy\n");
}

void Retained(size_t bytes) {
  OpenPrimary();
  const CUdeviceptr memory = Allocate("mine", bytes);
  Call(DRIVER(cuMemsetD8)(memory, 0x11, bytes), "cuMemsetD8");
  Handle handle = 0, again = 0, imported = 0;
  const int retained = DRIVER(cuMemRetainAllocationHandle)(&handle, reinterpret_cast<void*>(memory));
  if (retained != 0) {  // with AMEM_SCOPE=shared or all a tag's memory answers as cudaMalloc's
    std::printf("cuMemRetainAllocationHandle: %d, as of memory that cudaMalloc gave\n", retained);
    return Leaves("mine");
  }
  Call(DRIVER(cuMemRetainAllocationHandle)(&again, reinterpret_cast<void*>(memory)), "cuMemRetainAllocationHandle");
  std::printf("retained twice: handles %s\n", handle == again ? "are equal" : "differ");
  Call(DRIVER(cuMemRelease)(again), "cuMemRelease");
  Stays("mine", "");
  Call(DRIVER(cuMemRelease)(handle), "cuMemRelease");
  Leaves("mine");

  Call(DRIVER(cuMemRetainAllocationHandle)(&handle, reinterpret_cast<void*>(memory)), "cuMemRetainAllocationHandle");
  CUdeviceptr base = 0, second = 0;
  size_t whole = 0;
  Call(DRIVER(cuMemGetAddressRange)(&base, &whole, memory), "cuMemGetAddressRange");
  int descriptor = -1;
  Call(DRIVER(cuMemExportToShareableHandle)(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
       "cuMemExportToShareableHandle");
  Call(DRIVER(cuMemImportFromShareableHandle)(&imported, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
       "cuMemImportFromShareableHandle");
  Call(DRIVER(cuMemAddressReserve)(&second, whole, 0, 0, 0), "cuMemAddressReserve");
  Call(DRIVER(cuMemMap)(second, whole, 0, imported, 0), "cuMemMap");
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  Call(DRIVER(cuMemSetAccess)(second, whole, &access, 1), "cuMemSetAccess");
  Call(DRIVER(cuMemRelease)(handle), "cuMemRelease");
  Stays("mine", "");
  unsigned char seen = 0;
  Call(DRIVER(cuMemsetD8)(memory, 0x22, bytes), "cuMemsetD8");
  Call(DRIVER(cuCtxSynchronize)(), "cuCtxSynchronize");
  Call(DRIVER(cuMemcpyDtoH)(&seen, second + (memory - base), 1), "cuMemcpyDtoH");
  Must(seen == 0x22, "the two mappings are different memory after a pause and a resume");
}

void DmaBuf(size_t bytes) {
  OpenPrimary();
  const CUdeviceptr memory = Allocate("mine", bytes);
  int descriptor = -1;
  const int made = DRIVER(cuMemGetHandleForAddressRange)(&descriptor, memory, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  if (made != 0) throw Skip("cuMemGetHandleForAddressRange: " + std::to_string(made) + ": no dma-buf can be made here");
  Stays("mine", "");
}

void Imported(size_t bytes, bool later) {
  OpenPrimary();
  if (later) Allocate("earlier", bytes);
  const std::string path = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "holder/libholder.so";
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Failure(std::string("dlopen: ") + dlerror());
  const auto in = [&](const char* name, auto* type) { return reinterpret_cast<decltype(type)>(dlsym(library, name)); };
  const auto retain = in("holder_retain", static_cast<int (*)(Handle*, void*)>(nullptr));
  const auto release = in("holder_release", static_cast<int (*)(Handle)>(nullptr));
  const auto enroll = in("holder_register", static_cast<void* (*)(int, void*, size_t)>(nullptr));
  const auto unregister = in("holder_deregister", static_cast<int (*)(void*)>(nullptr));
  const CUdeviceptr memory = Allocate("mine", bytes);
  void* const address = reinterpret_cast<void*>(memory);
  for (const int way : {0, 1, 2}) {  // the import, dlsym, dlvsym
    void* const region = enroll(way, address, bytes);
    Must(region != nullptr, "ibv_reg_mr gave nothing");
    Stays("mine", "libholder.so");
    Call(unregister(region), "ibv_dereg_mr");
    Leaves("mine");
  }
  Handle handle = 0;
  if (const int retained = retain(&handle, address); retained != 0) {
    std::printf("cuMemRetainAllocationHandle: %d, as of memory that cudaMalloc gave\n", retained);
    return;
  }
  Stays("mine", "libholder.so");
  Call(release(handle), "cuMemRelease");
  Leaves("mine");
}

void Attribute(size_t bytes) {
  OpenPrimary();
  const CUdeviceptr memory = Allocate("mine", bytes);
  unsigned yes = 1, before = 0, after = 0;
  const int set = DRIVER(cuPointerSetAttribute)(&yes, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory);
  const int got = DRIVER(cuPointerGetAttribute)(&before, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory);
  Pause("mine");
  Resume("mine");
  static_cast<void>(DRIVER(cuPointerGetAttribute)(&after, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory));
  std::printf("set: %d, get: %d; before a pause %u, after the resume %u\n", set, got, before & 1, after & 1);
  Must(set != 0 || got != 0 || (before & 1) == (after & 1), "the attribute is lost in a pause and a resume");
}

int Main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  alarm(120);
  const std::string check = argc > 1 ? argv[1] : "";
  const size_t bytes = (argc == 4 && std::strcmp(argv[2], "--mib") == 0 ? std::stoul(argv[3]) : 256) << 20;
  try {
    if (check == "own-context" || check == "primary-context")
      Contexts(bytes, check == "own-context");
    else if (check == "retained")
      Retained(bytes);
    else if (check == "dma-buf")
      DmaBuf(bytes);
    else if (check == "imported" || check == "imported-later")
      Imported(bytes, check == "imported-later");
    else if (check == "attribute")
      Attribute(bytes);
    else
      return std::printf(
                 "usage: amem-guards own-context|primary-context|retained|dma-buf|imported|imported-later|attribute [--mib "
                 "N]\n"),
             kExitUsage;
  } catch (const Skip& why) {
    std::printf("SKIPPED: %s\n", why.what());
    return kExitSkipped;
  } catch (const std::exception& why) {
    std::printf("FAIL: %s\n", why.what());
    return kExitFail;
  }
  std::printf("ok\n");
  return kExitPass;
}

}  // namespace
}  // namespace amem::gpu

int main(int argc, char** argv) { return amem::gpu::Main(argc, argv); }
