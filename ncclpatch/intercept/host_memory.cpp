// Memory that AMem only counts: pinned host memory and what is allocated from asynchronous pools.

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

Address At(const void* pointer) { return Address{reinterpret_cast<std::uint64_t>(pointer)}; }

CUresult FreeHost(CUresult (*real)(void*), void* pointer) {
  return FreeNoted(HostFreed{At(pointer)}, [&] { return real(pointer); });
}

// The CUDA runtime asks for these by the versions that brought them, which are older than most of what AMem replaces; they have
// no device pointer among their arguments, and so one signature for all versions.
struct MemHostAlloc {
  static constexpr const char *kName = "cuMemHostAlloc", *kExported = kName;
  static constexpr int kSince = 2020;
  using Function = CUresult(void**, size_t, unsigned int);
  static CUresult Call(Function* real, void** pointer, size_t bytes, unsigned int flags) {
    Session* session = Runtime::Get().session();
    const CUresult result = real(pointer, bytes, flags);
    if (session != nullptr && result == CUDA_SUCCESS) session->Note(HostAllocated{At(*pointer), bytes, flags, false});
    return result;
  }
};

struct MemAllocHost {
  static constexpr const char *kName = "cuMemAllocHost", *kExported = "cuMemAllocHost_v2";
  using Function = CUresult(void**, size_t);
  static CUresult Call(Function* real, void** pointer, size_t bytes) {
    Session* session = Runtime::Get().session();
    const CUresult result = real(pointer, bytes);
    if (session != nullptr && result == CUDA_SUCCESS) session->Note(HostAllocated{At(*pointer), bytes, 0, false});
    return result;
  }
};

struct MemFreeHost {
  static constexpr const char *kName = "cuMemFreeHost", *kExported = kName;
  static constexpr int kSince = 2000;
  using Function = CUresult(void*);
  static CUresult Call(Function* real, void* pointer) { return FreeHost(real, pointer); }
};

struct MemHostRegister {
  static constexpr const char *kName = "cuMemHostRegister", *kExported = "cuMemHostRegister_v2";
  using Function = CUresult(void*, size_t, unsigned int);
  static CUresult Call(Function* real, void* pointer, size_t bytes, unsigned int flags) {
    Session* session = Runtime::Get().session();
    const CUresult result = real(pointer, bytes, flags);
    if (session != nullptr && result == CUDA_SUCCESS) session->Note(HostAllocated{At(pointer), bytes, flags, true});
    return result;
  }
};

struct MemHostUnregister {
  static constexpr const char *kName = "cuMemHostUnregister", *kExported = kName;
  using Function = CUresult(void*);
  static CUresult Call(Function* real, void* pointer) { return FreeHost(real, pointer); }
};

struct MemAllocAsync {
  static constexpr const char *kName = "cuMemAllocAsync", *kExported = kName;
  using Function = CUresult(CUdeviceptr*, size_t, CUstream);
  static CUresult Call(Function* real, CUdeviceptr* address, size_t bytes, CUstream stream) {
    Session* session = Runtime::Get().session();
    const CUresult result = real(address, bytes, stream);
    if (session != nullptr && result == CUDA_SUCCESS) session->Note(AsyncAllocated{Address{*address}, bytes});
    return result;
  }
};

struct MemAllocFromPoolAsync {
  static constexpr const char *kName = "cuMemAllocFromPoolAsync", *kExported = kName;
  using Function = CUresult(CUdeviceptr*, size_t, CUmemoryPool, CUstream);
  static CUresult Call(Function* real, CUdeviceptr* address, size_t bytes, CUmemoryPool pool, CUstream stream) {
    Session* session = Runtime::Get().session();
    const CUresult result = real(address, bytes, pool, stream);
    if (session != nullptr && result == CUDA_SUCCESS) session->Note(AsyncAllocated{Address{*address}, bytes});
    return result;
  }
};

struct MemFreeAsync {
  static constexpr const char *kName = "cuMemFreeAsync", *kExported = kName;
  using Function = CUresult(CUdeviceptr, CUstream);
  static CUresult Call(Function* real, CUdeviceptr address, CUstream stream) {
    return FreeNoted(AsyncFreed{Address{address}}, [&] { return real(address, stream); });
  }
};

}  // namespace

std::span<const replacements::Replacement> HostMemoryReplacements() {
  return replacements::Table<MemHostAlloc, MemAllocHost, MemFreeHost, MemHostRegister, MemHostUnregister, MemAllocAsync,
                             MemAllocFromPoolAsync, MemFreeAsync>();
}
}  // namespace amem::intercept
