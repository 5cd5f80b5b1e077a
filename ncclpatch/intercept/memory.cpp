// Address ranges, allocations and mappings.
#include <vector>

#include "ncclpatch/hook/call_site.h"
#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

struct MemCreate {
  static constexpr const char *kName = "cuMemCreate", *kExported = kName;
  using Function = CUresult(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle* handle, size_t bytes,
                       const CUmemAllocationProp* properties, unsigned long long flags) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(handle, bytes, properties, flags);
    if (handle == nullptr || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (BesideAPause(*session)) return PassedOn(*session, kName, 0, real(handle, bytes, properties, flags));
    bool for_application = false, for_window = false;
    const Origin origin = OriginOfCall(&for_application, &for_window);
    const auto created = session->Create(bytes, FromDriver(*properties), flags, origin, for_application, for_window);
    if (!created) return ToDriver(kName, created.status());
    *handle = ToGuest(*created);
    return CUDA_SUCCESS;
  }
};

struct MemRelease {
  static constexpr const char *kName = "cuMemRelease", *kExported = kName;
  using Function = CUresult(CUmemGenericAllocationHandle);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle handle) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(handle);
    if (!IsGuest(handle)) return PassedOn(*session, kName, handle, real(handle));
    return ToDriver(kName, session->Release(ToAllocation(handle)));
  }
};

struct MemAddressReserve {
  static constexpr const char *kName = "cuMemAddressReserve", *kExported = kName;
  using Function = CUresult(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long);
  static CUresult Call(Function* real, CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr hint,
                       unsigned long long flags) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(address, bytes, alignment, hint, flags);
    if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (BesideAPause(*session)) return PassedOn(*session, kName, hint, real(address, bytes, alignment, hint, flags));
    const auto reserved = session->Reserve(bytes, alignment, Address{hint}, flags, CaptureCallSite());
    if (!reserved) return ToDriver(kName, reserved.status());
    *address = reserved->value;
    return CUDA_SUCCESS;
  }
};

struct MemAddressFree {
  static constexpr const char *kName = "cuMemAddressFree", *kExported = kName;
  using Function = CUresult(CUdeviceptr, size_t);
  static CUresult Call(Function* real, CUdeviceptr address, size_t bytes) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(address, bytes);
    const Status status = session->FreeRange(Address{address}, bytes);
    if (status.code() == Code::kNotFound) return PassedOn(*session, kName, address, real(address, bytes));
    return ToDriver(kName, status);
  }
};

struct MemMap {
  static constexpr const char *kName = "cuMemMap", *kExported = kName;
  using Function = CUresult(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
  static CUresult Call(Function* real, CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                       unsigned long long flags) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(address, bytes, offset, handle, flags);
    if (!IsGuest(handle)) return PassedOn(*session, kName, handle, real(address, bytes, offset, handle, flags));
    return ToDriver(kName, session->Map(Address{address}, bytes, offset, ToAllocation(handle), flags));
  }
};

struct MemUnmap {
  static constexpr const char *kName = "cuMemUnmap", *kExported = kName;
  using Function = CUresult(CUdeviceptr, size_t);
  static CUresult Call(Function* real, CUdeviceptr address, size_t bytes) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(address, bytes);
    const Status status = session->Unmap(Address{address}, bytes);
    if (status.code() == Code::kNotFound) return PassedOn(*session, kName, address, real(address, bytes));
    return ToDriver(kName, status);
  }
};

struct MemSetAccess {
  static constexpr const char *kName = "cuMemSetAccess", *kExported = kName;
  using Function = CUresult(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t);
  static CUresult Call(Function* real, CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(address, bytes, access, count);
    if (access == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
    if (BesideAPause(*session)) return PassedOn(*session, kName, address, real(address, bytes, access, count));
    std::vector<AccessDescriptor> descriptors;
    descriptors.reserve(count);
    for (size_t i = 0; i < count; ++i)
      descriptors.push_back({{static_cast<LocationType>(access[i].location.type), access[i].location.id}, access[i].flags});
    const Status status = session->SetAccess(Address{address}, bytes, descriptors);
    if (status.code() == Code::kNotFound) return PassedOn(*session, kName, address, real(address, bytes, access, count));
    return ToDriver(kName, status);
  }
};

struct MemRetainAllocationHandle {
  static constexpr const char *kName = "cuMemRetainAllocationHandle", *kExported = kName;
  using Function = CUresult(CUmemGenericAllocationHandle*, void*);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle* handle, void* address) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(handle, address);
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto at = reinterpret_cast<std::uint64_t>(address);
    const auto retained = session->Retain(Address{at});
    if (retained.status().code() == Code::kNotFound) return PassedOn(*session, kName, at, real(handle, address));
    if (!retained) return ToDriver(kName, retained.status());
    *handle = ToGuest(*retained);
    return CUDA_SUCCESS;
  }
};

struct MemGetAllocationPropertiesFromHandle {
  static constexpr const char *kName = "cuMemGetAllocationPropertiesFromHandle", *kExported = kName;
  using Function = CUresult(CUmemAllocationProp*, CUmemGenericAllocationHandle);
  static CUresult Call(Function* real, CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(properties, handle);
    if (!IsGuest(handle)) return PassedOn(*session, kName, handle, real(properties, handle));
    if (properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto known = session->Properties(ToAllocation(handle));
    if (!known) return ToDriver(kName, known.status());
    *properties = ToDriver(*known);
    return CUDA_SUCCESS;
  }
};

struct MemGetAddressRange {
  static constexpr const char *kName = "cuMemGetAddressRange", *kExported = "cuMemGetAddressRange_v2";
  using Function = CUresult(CUdeviceptr*, size_t*, CUdeviceptr);
  static CUresult Call(Function* real, CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(base, bytes, address);
    const auto range = session->AddressRange(Address{address});
    // NCCL asks this about the program's buffers all the time, so it is not journaled.
    if (range.status().code() == Code::kNotFound) return real(base, bytes, address);
    if (!range) return ToDriver(kName, range.status());
    if (base != nullptr) *base = range->first.value;  // the driver accepts null for either, too
    if (bytes != nullptr) *bytes = range->second;
    return CUDA_SUCCESS;
  }
};

}  // namespace

std::span<const replacements::Replacement> MemoryReplacements() {
  return replacements::Table<MemCreate, MemRelease, MemAddressReserve, MemAddressFree, MemMap, MemUnmap, MemSetAccess,
                             MemRetainAllocationHandle, MemGetAllocationPropertiesFromHandle, MemGetAddressRange>();
}
}  // namespace amem::intercept
