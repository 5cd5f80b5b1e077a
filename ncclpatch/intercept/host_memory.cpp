// Memory that AMem only counts: pinned host memory, and allocations from driver pools.

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

Address At(const void* pointer) { return Address{reinterpret_cast<std::uint64_t>(pointer)}; }

CUresult Noted(Session& session, const Pass<>& pass, const auto& allocated) {
  const CUresult result = pass();
  if (result == CUDA_SUCCESS) session.Note(allocated());
  return result;
}

CUresult FreeHost(const Pass<>& pass, const void* pointer) { return FreeNoted(HostFreed{At(pointer)}, pass); }

// The CUDA runtime asks for these by old versions. They have no device pointer among their arguments, so one signature serves
// all.
struct MemHostAlloc : InSession<MemHostAlloc, "cuMemHostAlloc"> {
  static constexpr int kSince = 2020;
  static CUresult With(Session& session, const Pass<>& pass, void** pointer, size_t bytes, unsigned int flags) {
    return Noted(session, pass, [&] { return HostAllocated{At(*pointer), bytes, flags, false}; });
  }
};

struct MemAllocHost : InSession<MemAllocHost, "cuMemAllocHost", "cuMemAllocHost_v2"> {
  static CUresult With(Session& session, const Pass<>& pass, void** pointer, size_t bytes) {
    return Noted(session, pass, [&] { return HostAllocated{At(*pointer), bytes, 0, false}; });
  }
};

struct MemFreeHost : Instead<MemFreeHost, "cuMemFreeHost"> {
  static constexpr int kSince = 2000;
  static CUresult With(const Pass<>& pass, void* pointer) { return FreeHost(pass, pointer); }
};

struct MemHostRegister : InSession<MemHostRegister, "cuMemHostRegister", "cuMemHostRegister_v2"> {
  static CUresult With(Session& session, const Pass<>& pass, void* pointer, size_t bytes, unsigned int flags) {
    return Noted(session, pass, [&] { return HostAllocated{At(pointer), bytes, flags, true}; });
  }
};

struct MemHostUnregister : Instead<MemHostUnregister, "cuMemHostUnregister"> {
  static CUresult With(const Pass<>& pass, void* pointer) { return FreeHost(pass, pointer); }
};

struct MemAllocAsync : InSession<MemAllocAsync, "cuMemAllocAsync"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr* address, size_t bytes, CUstream) {
    return Noted(session, pass, [&] { return AsyncAllocated{Address{*address}, bytes}; });
  }
};

struct MemAllocFromPoolAsync : InSession<MemAllocFromPoolAsync, "cuMemAllocFromPoolAsync"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr* address, size_t bytes, CUmemoryPool, CUstream) {
    return Noted(session, pass, [&] { return AsyncAllocated{Address{*address}, bytes}; });
  }
};

struct MemFreeAsync : Instead<MemFreeAsync, "cuMemFreeAsync"> {
  static CUresult With(const Pass<>& pass, CUdeviceptr address, CUstream) {
    return FreeNoted(AsyncFreed{Address{address}}, pass);
  }
};

}  // namespace

std::span<const replacements::Replacement> HostMemoryReplacements() {
  return replacements::Table<MemHostAlloc, MemAllocHost, MemFreeHost, MemHostRegister, MemHostUnregister, MemAllocAsync,
                             MemAllocFromPoolAsync, MemFreeAsync>();
}
}  // namespace amem::intercept
