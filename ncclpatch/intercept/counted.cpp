// Memory that stays in place and is counted: pinned host memory, and what is in use of the driver's pools, because addresses
// from a pool cannot be mapped again. What NCCL's pools keep unused goes back to the driver at a pause, because NCCL tells them
// to keep everything.
#include <spdlog/fmt/fmt.h>

#include <chrono>
#include <mutex>
#include <set>
#include <string>

#include "journal/base/deadline.h"
#include "journal/base/mutex.h"
#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/runtime/log.h"

namespace amem::intercept {
namespace {

Address At(const void* pointer) { return Address{reinterpret_cast<std::uint64_t>(pointer)}; }

// A call that allocates, and what it is in the journal: allocated(arguments...).
template <auto allocated>
constexpr auto kNoted = [](CUresult result, auto... arguments) {
  Session* const session = Runtime::Get().session();
  if (session != nullptr && result == CUDA_SUCCESS) session->records().Note(allocated(arguments...));
};
#define AMEM_NOTED(allocated, name) Then<kNoted<allocated>, decltype(name), #name, AMEM_TEXT(name)>
constexpr auto kAllocated = [](void** pointer, size_t bytes, auto... flags) {
  return HostAllocated{At(*pointer), bytes, (0U | ... | flags), false};
};
constexpr auto kRegistered = [](void* pointer, size_t bytes, unsigned flags) {
  return HostAllocated{At(pointer), bytes, flags, true};
};
constexpr auto kFromPool = [](CUdeviceptr* address, size_t bytes, auto...) { return AsyncAllocated{Address{*address}, bytes}; };

// The CUDA runtime asks for these two by old versions. They have no device pointer among their arguments, so one signature
// serves all.
struct MemHostAlloc : AMEM_NOTED(kAllocated, cuMemHostAlloc) {
  static constexpr int kSince = 2020;
};
template <Text Name, int since>
struct FreeHost : InSession<FreeHost<Name, since>, Name> {
  static constexpr int kSince = since;
  static CUresult With(Session& session, const Pass<>& pass, void* pointer) {
    CUresult freed{};
    return FreeNoted(session, HostFreed{At(pointer)}, pass, freed) ? freed : pass();
  }
};

struct MemFreeAsync : InSession<MemFreeAsync, "cuMemFreeAsync"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr address, CUstream) {
    CUresult freed{};
    return FreeNoted(session, AsyncFreed{Address{address}}, pass, freed) ? freed : pass();
  }
};

void NotePoolCall(const char* call, CUresult result) {
  if (Session* session = Runtime::Get().started())
    session->records().Note(PassedThrough{call, "a pool of the driver's", static_cast<std::int32_t>(result)});
}

// Pools that NCCL created in this process. The program's, the devices' default pools and imported ones are not here: others
// allocate from them and may rely on what they keep.
class OwnPools {
 public:
  void Created(CUmemoryPool pool) {
    const std::lock_guard lock(mutex_);
    pools_.insert(pool);
  }

  // Holds the lock over the driver's call, so that no pool is trimmed while it is destroyed. The call may wait for the device.
  template <class MakeCall>
  CUresult Destroy(CUmemoryPool pool, const MakeCall& make_call) {
    const std::lock_guard lock(mutex_);
    const CUresult result = make_call();
    if (result == CUDA_SUCCESS) pools_.erase(pool);
    return result;
  }

  // Trims nothing if a pool's destruction takes longer than a pause should wait.
  void Trim(Session& session) {
    constexpr auto kPatience = std::chrono::milliseconds(100);
    if (!TryLockUntil(mutex_, In(kPatience)))
      return session.records().Note(PassedThrough{"cuMemPoolTrimTo", "no pool was trimmed: one is being destroyed", 0});
    const std::lock_guard lock(mutex_, std::adopt_lock);
    const auto trim = AMEM_DRIVER(cuMemPoolTrimTo);
    if (trim == nullptr) return;
    for (const CUmemoryPool pool : pools_) {
      const cuuint64_t before = Reserved(pool);
      const CUresult result = trim(pool, 0);
      const cuuint64_t after = Reserved(pool);
      const std::string detail =
          fmt::format("trimmed at a pause: a pool of NCCL's kept {} bytes, and keeps {} now", before, after);
      if (result != CUDA_SUCCESS)
        log::Warn(fmt::format("cuMemPoolTrimTo at a pause: the driver answered {}; a pool of NCCL's keeps its {} bytes",
                              static_cast<int>(result), before));
      session.records().Note(PassedThrough{"cuMemPoolTrimTo", detail, static_cast<std::int32_t>(result)});
    }
  }

 private:
  // Bytes that the pool holds of the driver's memory; 0: the driver does not say.
  static cuuint64_t Reserved(CUmemoryPool pool) {
    const auto ask = AMEM_DRIVER(cuMemPoolGetAttribute);
    cuuint64_t bytes = 0;
    if (ask == nullptr || ask(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes) != CUDA_SUCCESS) return 0;
    return bytes;
  }

  std::mutex mutex_;
  std::set<CUmemoryPool> pools_;
};

constexpr auto kCreated = [](CUresult result, const CUmemoryPool* pool, auto) {
  if (result == CUDA_SUCCESS && pool != nullptr) Forever<OwnPools>().Created(*pool);
  NotePoolCall("cuMemPoolCreate", result);
};

struct PoolDestroy : Instead<PoolDestroy, "cuMemPoolDestroy"> {
  static CUresult With(const Pass<>& pass, CUmemoryPool pool) {
    const CUresult result = Forever<OwnPools>().Destroy(pool, pass);
    NotePoolCall(kName, result);
    return result;
  }
};

template <Text Name>
constexpr auto kOnPool = [](CUresult result, auto...) { NotePoolCall(Name.data, result); };
#define AMEM_ON_POOL(name) Then<kOnPool<#name>, decltype(name), #name>

}  // namespace

void TrimPools(Session& session) { Forever<OwnPools>().Trim(session); }

std::span<const replacements::Replacement> CountedReplacements() {
  return replacements::Table<MemHostAlloc, AMEM_NOTED(kAllocated, cuMemAllocHost), FreeHost<"cuMemFreeHost", 2000>,
                             AMEM_NOTED(kRegistered, cuMemHostRegister), FreeHost<"cuMemHostUnregister", 3020>,
                             AMEM_NOTED(kFromPool, cuMemAllocAsync), AMEM_NOTED(kFromPool, cuMemAllocFromPoolAsync),
                             MemFreeAsync, AMEM_THEN(kCreated, cuMemPoolCreate), PoolDestroy, AMEM_ON_POOL(cuMemPoolTrimTo),
                             AMEM_ON_POOL(cuMemPoolSetAttribute), AMEM_ON_POOL(cuMemPoolSetAccess),
                             AMEM_ON_POOL(cuMemPoolExportToShareableHandle), AMEM_ON_POOL(cuMemPoolImportFromShareableHandle),
                             AMEM_ON_POOL(cuMemPoolExportPointer), AMEM_ON_POOL(cuMemPoolImportPointer)>();
}
}  // namespace amem::intercept
