// Shareable handles: NCCL gets descriptors of tokens, and passes on what its peers sent. Handles of other types are the
// driver's.

#include <spdlog/fmt/fmt.h>

#include "ncclpatch/intercept/memory.h"
#include "ncclpatch/runtime/log.h"

namespace amem::intercept {
namespace {

// The driver's handle for another host, where nobody can ask this process over a socket. The memory stays in place.
CUresult HandOut(Session& session,
                 CUresult (*real)(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long),
                 void* shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                 unsigned long long flags) {
  constexpr const char* kName = "cuMemExportToShareableHandle";
  const AllocationId id = ToAllocation(handle);
  const auto inside = session.EnterCall();
  if (session.paused()) return AnswerPaused(kName);
  const bool rebuilt = session.Inspect([&](const State& state) {
    auto* const found = FindIn(state.allocations, id);
    return found != nullptr && found->rebuilt();
  });
  if (rebuilt)
    return ToDriver(kName, {Code::kUnsupported,
                            fmt::format("a multicast object that pauses release cannot be shared by a handle of "
                                        "type {} (8 is fabric); set AMEM_NVLS=keep",
                                        static_cast<int>(type)),
                            CUDA_ERROR_NOT_SUPPORTED});
  const CUresult result = real(shareable, session.Backing(id).first.value, type, flags);
  if (result != CUDA_SUCCESS) return result;
  session.Note(Exported{id, static_cast<std::uint32_t>(type)});
  if (OfAnother::now == 0) Runtime::Get().NoteForeignSharing();
  return result;
}

struct MemImportFromShareableHandle : InSession<MemImportFromShareableHandle, "cuMemImportFromShareableHandle"> {
  static CUresult With(Session& session, const Pass<>& pass, CUmemGenericAllocationHandle* handle, void* shareable,
                       CUmemAllocationHandleType type) {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto subject = reinterpret_cast<std::uint64_t>(shareable);  // the descriptor, or a pointer to 64 bytes
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
      Runtime::Get().NoteForeignSharing();
      return PassedOn(session, kName, subject, pass());
    }
    if (BesideAPause(session)) return PassedOn(session, kName, subject, pass());
    const auto imported = session.Import(static_cast<int>(subject), OriginOfCall());
    if (!imported) return OrPassOn(session, kName, subject, imported.status(), pass);
    *handle = ToGuest(*imported);
    return CUDA_SUCCESS;
  }
};

}  // namespace

CUresult MemExportToShareableHandle::Call(Function* real, void* shareable, CUmemGenericAllocationHandle handle,
                                          CUmemAllocationHandleType type, unsigned long long flags) {
  Session* session = Runtime::Get().session();
  if (session == nullptr) return real(shareable, handle, type, flags);
  if (!IsGuest(handle)) return PassedOn(*session, kName, handle, real(shareable, handle, type, flags));
  if (shareable == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return HandOut(*session, real, shareable, handle, type, flags);
  auto token = session->Export(ToAllocation(handle));
  if (!token) return ToDriver(kName, token.status());
  *static_cast<int*>(shareable) = token->Release();
  return CUDA_SUCCESS;
}

std::span<const replacements::Replacement> SharingReplacements() {
  return replacements::Table<MemExportToShareableHandle, MemImportFromShareableHandle>();
}
}  // namespace amem::intercept
