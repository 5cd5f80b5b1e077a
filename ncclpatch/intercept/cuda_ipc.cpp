// cuMemAlloc and cuIpc*: what NCCL uses with NCCL_CUMEM_ENABLE=0.
#include <spdlog/fmt/fmt.h>

#include <cstring>
#include <span>

#include "ncclpatch/intercept/card_buffers.h"
#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/runtime/log.h"

namespace amem::intercept {
namespace {

// Memory that AMem cannot back stays the driver's and is counted with the reason.
CUresult AllocateUnmanaged(Session& session, const Status& why, const Pass<>& pass, const CUdeviceptr* address, size_t bytes,
                           const Origin& origin) {
  const CUresult result = pass();
  if (result == CUDA_SUCCESS)
    session.records().Note(
        LegacyAllocated{Address{*address}, bytes, AllocationId{}, 0, why.message(), origin.site, origin.communicator});
  return result;
}

struct MemAlloc : InSession<MemAlloc, "cuMemAlloc", "cuMemAlloc_v2"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr* address, size_t bytes) {
    if (bytes == 0) return pass();
    if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (BesideAPause(session)) return PassedOn(session, kName, 0, pass());
    bool for_application = false;
    Origin origin = OriginOfCall(&for_application);
    if (!for_application && Forever<CardBuffers>().Takes(origin.site)) origin.alone = Alone::kPreferred;
    const auto device = Runtime::Get().CurrentDevice();
    if (!device) return AllocateUnmanaged(session, device.status(), pass, address, bytes, origin);
    const auto allocated = session.legacy().Allocate(bytes, *device, origin, for_application);
    if (allocated.status().code() == Code::kUnsupported)
      return AllocateUnmanaged(session, allocated.status(), pass, address, bytes, origin);
    if (!allocated) return ToDriver(kName, allocated.status());
    *address = allocated->value;
    return CUDA_SUCCESS;
  }
};

struct MemFree : InSession<MemFree, "cuMemFree", "cuMemFree_v2"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr address) {
    if (address == 0) return pass();
    CUresult freed{};
    const bool counted = FreeNoted(session, LegacyFreed{Address{address}}, pass, freed) ||
                         FreeNoted(session, AsyncFreed{Address{address}}, pass, freed);  // cudaFree takes memory of pools too
    if (counted) return freed;
    return OrPassOn(session, kName, address, session.legacy().Free(Address{address}), pass);
  }
};

struct IpcGetMemHandle : InSession<IpcGetMemHandle, "cuIpcGetMemHandle"> {
  static constexpr const char* kNoHandle =
      "memory of a tag (amem_alloc) has no CUDA IPC handle; let another process import a copy that was made outside the tag";
  static CUresult With(Session& session, const Pass<>& pass, CUipcMemHandle* handle, CUdeviceptr address) {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto token = session.legacy().Export(Address{address});
    if (token.status().code() == Code::kNotFound) {
      const CUresult result = PassedOn(session, kName, address, pass());
      const bool of_tag = session.Inspect([&](const State& state) { return !state.PoolsIn(Address{address}, 1).empty(); });
      if (result != CUDA_SUCCESS && of_tag) log::Error(fmt::format("{} {}: {}", kName, Hex(address), kNoHandle));
      return result;
    }
    if (!token) return ToDriver(kName, token.status());
    static_assert(sizeof handle->reserved == sizeof *token);
    std::memcpy(handle->reserved, token->data(), token->size());
    return CUDA_SUCCESS;
  }
};

struct IpcOpenMemHandle : InSession<IpcOpenMemHandle, "cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr* address, CUipcMemHandle handle, unsigned int) {
    if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (BesideAPause(session)) return PassedOn(session, kName, 0, pass());
    const auto device = Runtime::Get().CurrentDevice();
    if (!device) return ToDriver(kName, device.status());
    const auto opened = session.legacy().Import(std::as_bytes(std::span(handle.reserved)), *device, OriginOfCall());
    if (!opened) return OrPassOn(session, kName, 0, opened.status(), pass);
    *address = opened->value;
    return CUDA_SUCCESS;
  }
};

using IpcCloseMemHandle = GivesBack<"cuIpcCloseMemHandle", &Session::legacy, &LegacyMemory::Close>;

}  // namespace

std::span<const replacements::Replacement> CudaIpcReplacements() {
  return replacements::Table<MemAlloc, MemFree, IpcGetMemHandle, IpcOpenMemHandle, IpcCloseMemHandle>();
}
}  // namespace amem::intercept
