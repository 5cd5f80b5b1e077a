// Shareable handles: NCCL gets descriptors of tokens, and gives back what its peers sent.

#include <spdlog/fmt/fmt.h>

#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/runtime/log.h"

namespace amem::intercept {
namespace {

struct MemExportToShareableHandle {
  static constexpr const char *kName = "cuMemExportToShareableHandle", *kExported = kName;
  using Function = CUresult(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long);
  static CUresult Call(Function* real, void* shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                       unsigned long long flags) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(shareable, handle, type, flags);
    if (!IsGuest(handle)) return PassedOn(*session, kName, handle, real(shareable, handle, type, flags));
    if (shareable == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
      session->Note(PassedThrough{kName, fmt::format("handle type {}", static_cast<int>(type)), CUDA_ERROR_NOT_SUPPORTED});
      log::Warn(
          fmt::format("{}: this version of AMem does not share handles of type {} (8 is fabric); NCCL gets "
                      "CUDA_ERROR_NOT_SUPPORTED",
                      kName, static_cast<int>(type)));
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    auto token = session->Export(ToAllocation(handle));
    if (!token) return ToDriver(kName, token.status());
    *static_cast<int*>(shareable) = token->Release();
    return CUDA_SUCCESS;
  }
};

struct MemImportFromShareableHandle {
  static constexpr const char *kName = "cuMemImportFromShareableHandle", *kExported = kName;
  using Function = CUresult(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle* handle, void* shareable, CUmemAllocationHandleType type) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(handle, shareable, type);
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto subject = reinterpret_cast<std::uint64_t>(shareable);  // the descriptor itself, or a pointer to 64 bytes
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
      return PassedOn(*session, kName, subject, real(handle, shareable, type));
    const auto imported = session->Import(static_cast<int>(subject), OriginOfCall());
    if (imported.status().code() == Code::kNotFound) return PassedOn(*session, kName, subject, real(handle, shareable, type));
    if (!imported) return ToDriver(kName, imported.status());
    *handle = ToGuest(*imported);
    return CUDA_SUCCESS;
  }
};

}  // namespace

std::span<const replacements::Replacement> SharingReplacements() {
  return replacements::Table<MemExportToShareableHandle, MemImportFromShareableHandle>();
}
}  // namespace amem::intercept
