// Calls on AMem's handles and mappings. NCCL makes them, and with AMEM_SCOPE=shared other libraries do for memory under tags.
#pragma once

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {

struct MemRelease : InSession<MemRelease, "cuMemRelease"> {
  static CUresult With(Session& session, const Pass<>& pass, CUmemGenericAllocationHandle handle);
};
struct MemMap : InSession<MemMap, "cuMemMap"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr address, size_t bytes, size_t offset,
                       CUmemGenericAllocationHandle handle, unsigned long long flags);
};
struct MemUnmap : InSession<MemUnmap, "cuMemUnmap"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr address, size_t bytes);
};
struct MemSetAccess : InSession<MemSetAccess, "cuMemSetAccess"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access,
                       size_t count);
};
struct MemRetainAllocationHandle : InSession<MemRetainAllocationHandle, "cuMemRetainAllocationHandle"> {
  static CUresult With(Session& session, const Pass<>& pass, CUmemGenericAllocationHandle* handle, void* address);
};
struct MemGetAllocationPropertiesFromHandle
    : InSession<MemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle"> {
  static CUresult With(Session& session, const Pass<>& pass, CUmemAllocationProp* properties,
                       CUmemGenericAllocationHandle handle);
};
struct MemExportToShareableHandle : Named<"cuMemExportToShareableHandle"> {
  using Function = CUresult(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long);
  static CUresult Call(Function* real, void* shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                       unsigned long long flags);
};

// Binds by handle and by address, which translate AMem's handles. What is bound to an object of the driver's stays in place.
std::span<const replacements::Replacement> BindReplacements();

}  // namespace amem::intercept
