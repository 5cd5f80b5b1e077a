// Address ranges, allocations and mappings.
#include "ncclpatch/intercept/memory.h"

#include <vector>

#include "ncclpatch/hook/call_site.h"

namespace amem::intercept {
namespace {

struct MemCreate : InSession<MemCreate, "cuMemCreate"> {
  static CUresult With(Session& session, const Pass<>& pass, CUmemGenericAllocationHandle* handle, size_t bytes,
                       const CUmemAllocationProp* properties, unsigned long long flags) {
    if (handle == nullptr || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (BesideAPause(session)) return PassedOn(session, kName, 0, pass());
    bool for_application = false, for_window = false;
    const Origin origin = OriginOfCall(&for_application, &for_window);
    const auto created = session.Create(bytes, FromDriver(*properties), flags, origin, for_application, for_window);
    if (!created) return ToDriver(kName, created.status());
    *handle = ToGuest(*created);
    return CUDA_SUCCESS;
  }
};

struct MemAddressReserve : InSession<MemAddressReserve, "cuMemAddressReserve"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr* address, size_t bytes, size_t alignment,
                       CUdeviceptr hint, unsigned long long flags) {
    if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (BesideAPause(session)) return PassedOn(session, kName, hint, pass());
    const auto reserved = session.Reserve(bytes, alignment, Address{hint}, flags, CaptureCallSite());
    if (!reserved) return ToDriver(kName, reserved.status());
    *address = reserved->value;
    return CUDA_SUCCESS;
  }
};

struct MemAddressFree : InSession<MemAddressFree, "cuMemAddressFree"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr address, size_t bytes) {
    return OrPassOn(session, kName, address, session.FreeRange(Address{address}, bytes), pass);
  }
};

struct MemGetAddressRange : InSession<MemGetAddressRange, "cuMemGetAddressRange", "cuMemGetAddressRange_v2"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
    const auto range = session.AddressRange(Address{address});
    // Not journaled, because NCCL asks this about the program's buffers all the time.
    if (range.status().code() == Code::kNotFound) return pass();
    if (!range) return ToDriver(kName, range.status());
    if (base != nullptr) *base = range->first.value;  // the driver also accepts null for either
    if (bytes != nullptr) *bytes = range->second;
    return CUDA_SUCCESS;
  }
};

}  // namespace

CUresult MemRelease::With(Session& session, const Pass<>& pass, CUmemGenericAllocationHandle handle) {
  if (!IsGuest(handle)) return PassedOn(session, kName, handle, pass());
  return ToDriver(kName, session.Release(ToAllocation(handle)));
}

CUresult MemMap::With(Session& session, const Pass<>& pass, CUdeviceptr address, size_t bytes, size_t offset,
                      CUmemGenericAllocationHandle handle, unsigned long long flags) {
  if (!IsGuest(handle)) return PassedOn(session, kName, handle, pass());
  return ToDriver(kName, session.Map(Address{address}, bytes, offset, ToAllocation(handle), flags));
}

CUresult MemUnmap::With(Session& session, const Pass<>& pass, CUdeviceptr address, size_t bytes) {
  return OrPassOn(session, kName, address, session.Unmap(Address{address}, bytes), pass);
}

CUresult MemSetAccess::With(Session& session, const Pass<>& pass, CUdeviceptr address, size_t bytes,
                            const CUmemAccessDesc* access, size_t count) {
  if (access == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  if (BesideAPause(session)) return PassedOn(session, kName, address, pass());
  std::vector<AccessDescriptor> descriptors;
  descriptors.reserve(count);
  for (size_t i = 0; i < count; ++i)
    descriptors.push_back({{static_cast<LocationType>(access[i].location.type), access[i].location.id}, access[i].flags});
  return OrPassOn(session, kName, address, session.SetAccess(Address{address}, bytes, descriptors), pass);
}

CUresult MemRetainAllocationHandle::With(Session& session, const Pass<>& pass, CUmemGenericAllocationHandle* handle,
                                         void* address) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto at = reinterpret_cast<std::uint64_t>(address);
  const auto retained = session.Retain(Address{at});
  if (!retained) return OrPassOn(session, kName, at, retained.status(), pass);
  *handle = ToGuest(*retained);
  return CUDA_SUCCESS;
}

CUresult MemGetAllocationPropertiesFromHandle::With(Session& session, const Pass<>& pass, CUmemAllocationProp* properties,
                                                    CUmemGenericAllocationHandle handle) {
  if (!IsGuest(handle)) return PassedOn(session, kName, handle, pass());
  if (properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto known = session.Properties(ToAllocation(handle));
  if (!known) return ToDriver(kName, known.status());
  *properties = ToDriver(*known);
  return CUDA_SUCCESS;
}

std::span<const replacements::Replacement> MemoryReplacements() {
  return replacements::Table<MemCreate, MemRelease, MemAddressReserve, MemAddressFree, MemMap, MemUnmap, MemSetAccess,
                             MemRetainAllocationHandle, MemGetAllocationPropertiesFromHandle, MemGetAddressRange>();
}
}  // namespace amem::intercept
