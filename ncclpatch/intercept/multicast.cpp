// NVLS multicast objects: NCCL holds ids of ours for them, too; each call is made with the driver's handles and recorded.

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

// This version does not rebuild multicast objects, so nothing may be added to one while memory is paused. Taking memory from
// one is freeing, which works at any time; what is bound stays in a pause.
bool Paused(Session& session, const char* call, CUresult& result) {
  if (!session.paused()) return false;
  result = ToDriver(call, {Code::kRefused, "memory is paused; call ncclResume first"});
  return true;
}

struct RealHandle {
  CUmemGenericAllocationHandle handle = 0;
  size_t offset = 0;  // in it, where NCCL's begins
};

// The driver's handle behind a handle of NCCL's. A handle that is not AMem's stays as it is; zero: AMem's, and gone.
RealHandle Real(Session& session, CUmemGenericAllocationHandle handle) {
  if (!IsGuest(handle)) return {handle, 0};
  const auto [real, offset] = session.Backing(ToAllocation(handle));
  return {real.value, offset};
}

// Makes the call with the driver's handle, and records `event` if it worked and the multicast object is ours.
template <class MakeCall, class MakeEvent>
CUresult OnObject(const char* call, CUmemGenericAllocationHandle object, const MakeCall& make_call, const MakeEvent& make_event,
                  bool also_paused = false) {
  Session* session = Runtime::Get().session();
  if (session == nullptr) return make_call(static_cast<Session*>(nullptr), object);
  CUresult result{};
  if (!also_paused && Paused(*session, call, result)) return result;
  const CUmemGenericAllocationHandle real = Real(*session, object).handle;
  if (real == 0) return CUDA_ERROR_INVALID_HANDLE;
  result = make_call(session, real);
  if (!IsGuest(object)) return PassedOn(*session, call, object, result);
  if (result == CUDA_SUCCESS) session->Note(make_event(ToAllocation(object)));
  return result;
}

struct MulticastCreate {
  static constexpr const char *kName = "cuMulticastCreate", *kExported = kName;
  using Function = CUresult(CUmemGenericAllocationHandle*, const CUmulticastObjectProp*);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp* properties) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(handle, properties);
    if (handle == nullptr || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUresult result{};
    if (Paused(*session, kName, result)) return result;
    if (result = real(handle, properties); result != CUDA_SUCCESS) return result;
    *handle = ToGuest(session->NoteMulticast({{},
                                              properties->size,
                                              properties->numDevices,
                                              static_cast<std::uint32_t>(properties->handleTypes),
                                              properties->flags,
                                              DriverHandle{*handle}}));
    return CUDA_SUCCESS;
  }
};

struct MulticastAddDevice {
  static constexpr const char *kName = "cuMulticastAddDevice", *kExported = kName;
  using Function = CUresult(CUmemGenericAllocationHandle, CUdevice);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle object, CUdevice device) {
    return OnObject(
        kName, object, [&](Session*, CUmemGenericAllocationHandle handle) { return real(handle, device); },
        [&](AllocationId id) {
          return MulticastDeviceAdded{id, DeviceOrdinal{device}};
        });
  }
};

struct MulticastBindMem {
  static constexpr const char *kName = "cuMulticastBindMem", *kExported = kName;
  using Function = CUresult(CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t,
                            unsigned long long);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle object, size_t object_offset,
                       CUmemGenericAllocationHandle memory, size_t memory_offset, size_t bytes, unsigned long long flags) {
    const auto bind = [&](Session* session, CUmemGenericAllocationHandle handle) {
      const RealHandle known = session == nullptr ? RealHandle{memory, 0} : Real(*session, memory);
      return known.handle == 0 ? CUDA_ERROR_INVALID_HANDLE
                               : real(handle, object_offset, known.handle, known.offset + memory_offset, bytes, flags);
    };
    return OnObject(kName, object, bind, [&](AllocationId id) {
      return MulticastBound{id,    object_offset, IsGuest(memory) ? ToAllocation(memory) : AllocationId{}, memory_offset,
                            bytes, Address{}};
    });
  }
};

struct MulticastBindAddr {
  static constexpr const char *kName = "cuMulticastBindAddr", *kExported = kName;
  using Function = CUresult(CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t, unsigned long long);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t bytes,
                       unsigned long long flags) {
    return OnObject(
        kName, object,
        [&](Session*, CUmemGenericAllocationHandle handle) { return real(handle, offset, address, bytes, flags); },
        [&](AllocationId id) { return MulticastBound{id, offset, AllocationId{}, 0, bytes, Address{address}}; });
  }
};

struct MulticastUnbind {
  static constexpr const char *kName = "cuMulticastUnbind", *kExported = kName;
  using Function = CUresult(CUmemGenericAllocationHandle, CUdevice, size_t, size_t);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t bytes) {
    return OnObject(
        kName, object, [&](Session*, CUmemGenericAllocationHandle handle) { return real(handle, device, offset, bytes); },
        [&](AllocationId id) {
          return MulticastUnbound{id, DeviceOrdinal{device}, offset, bytes};
        },
        true);
  }
};

}  // namespace

std::span<const replacements::Replacement> MulticastReplacements() {
  return replacements::Table<MulticastCreate, MulticastAddDevice, MulticastBindMem, MulticastBindAddr, MulticastUnbind>();
}
}  // namespace amem::intercept
