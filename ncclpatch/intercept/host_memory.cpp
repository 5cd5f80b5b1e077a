// Memory that AMem only counts: pinned host memory and asynchronous pools.
//
// A free is recorded before the driver makes it, because right after that another thread may get the same address; one that
// fails is recorded as allocated again.
#include <array>
#include <optional>

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

Address At(const void* pointer) { return Address{reinterpret_cast<std::uint64_t>(pointer)}; }

template <class Real>
CUresult FreeHost(Real* real, void* pointer) {
  Session* session = Runtime::Get().session();
  if (session == nullptr) return real(pointer);
  std::optional<HostAllocation> known;
  {
    const auto lock = session->ledger().Lock();
    const auto& host = session->ledger().state().host;
    if (const auto found = host.find(At(pointer)); found != host.end()) {
      known = found->second;
      session->ledger().Record(HostFreed{At(pointer)});
    }
  }
  const CUresult result = real(pointer);
  if (known && result != CUDA_SUCCESS) session->Note(HostAllocated{At(pointer), known->bytes, known->flags, known->registered});
  return result;
}

struct MemHostAlloc {
  static constexpr const char *kName = "cuMemHostAlloc", *kExported = kName;
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
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(address, stream);
    std::optional<Bytes> known;
    {
      const auto lock = session->ledger().Lock();
      const auto& async = session->ledger().state().async;
      if (const auto found = async.find(Address{address}); found != async.end()) {
        known = found->second;
        session->ledger().Record(AsyncFreed{Address{address}});
      }
    }
    const CUresult result = real(address, stream);
    if (known && result != CUDA_SUCCESS) session->Note(AsyncAllocated{Address{address}, *known});
    return result;
  }
};

}  // namespace

std::span<const symbols::Replacement> HostMemoryReplacements() {
  static const std::array table = {symbols::Replace<MemHostAlloc>(),          symbols::Replace<MemAllocHost>(),
                                   symbols::Replace<MemFreeHost>(),           symbols::Replace<MemHostRegister>(),
                                   symbols::Replace<MemHostUnregister>(),     symbols::Replace<MemAllocAsync>(),
                                   symbols::Replace<MemAllocFromPoolAsync>(), symbols::Replace<MemFreeAsync>()};
  return table;
}
}  // namespace amem::intercept
