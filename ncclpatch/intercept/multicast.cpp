// NVLS multicast objects: NCCL holds AMem's ids; each call is made with the driver's handles and recorded.

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

// Nothing may be added to a multicast object while memory is paused. Taking memory from it is freeing, which always works.
bool Paused(Session& session, const char* call, CUresult& result) {
  if (!session.paused()) return false;
  result = ToDriver(call, {Code::kRefused, "memory is paused; call ncclResume first"});
  return true;
}

struct RealHandle {
  CUmemGenericAllocationHandle handle = 0;
  size_t offset = 0;  // where NCCL's memory begins in it
};

// The driver's handle behind NCCL's. A handle that is not AMem's is returned unchanged; zero: AMem's, and gone.
RealHandle Real(Session& session, CUmemGenericAllocationHandle handle) {
  if (!IsGuest(handle)) return {handle, 0};
  const auto [real, offset] = session.Backing(ToAllocation(handle));
  return {real.value, offset};
}

// Makes the call with the driver's handle, and records `event` if it worked and the object is AMem's.
template <class MakeCall, class MakeEvent>
CUresult OnObject(const char* call, CUmemGenericAllocationHandle object, const MakeCall& make_call, const MakeEvent& make_event,
                  bool also_paused = false) {
  Session* session = Runtime::Get().session();
  if (session == nullptr) return make_call(static_cast<Session*>(nullptr), object);
  const auto gate = session->EnterCall();
  CUresult result{};
  if (!also_paused && Paused(*session, call, result)) return result;
  const CUmemGenericAllocationHandle real = Real(*session, object).handle;
  if (real == 0) return CUDA_ERROR_INVALID_HANDLE;
  result = make_call(session, real);
  if (!IsGuest(object)) return PassedOn(*session, call, object, result);
  if (result == CUDA_SUCCESS) session->Note(make_event(ToAllocation(object)));
  return result;
}

struct MulticastCreate : InSession<MulticastCreate, "cuMulticastCreate"> {
  static CUresult With(Session& session, const Pass<>& pass, CUmemGenericAllocationHandle* handle,
                       const CUmulticastObjectProp* properties) {
    if (handle == nullptr || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto gate = session.EnterCall();
    CUresult result{};
    if (Paused(session, kName, result)) return result;
    if (result = pass(); result != CUDA_SUCCESS) return result;
    *handle = ToGuest(session.NoteMulticast({{},
                                             properties->size,
                                             properties->numDevices,
                                             static_cast<std::uint32_t>(properties->handleTypes),
                                             properties->flags,
                                             DriverHandle{*handle}}));
    return CUDA_SUCCESS;
  }
};

struct MulticastAddDevice : Named<"cuMulticastAddDevice"> {
  using Function = CUresult(CUmemGenericAllocationHandle, CUdevice);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle object, CUdevice device) {
    return OnObject(
        kName, object, [&](Session*, CUmemGenericAllocationHandle handle) { return real(handle, device); },
        [&](AllocationId id) {
          return MulticastDeviceAdded{id, DeviceOrdinal{device}};
        });
  }
};

// Calls `make_call(object, memory, memory_offset)` with the driver's handles.
template <class MakeCall>
CUresult BindMemory(const char* call, CUmemGenericAllocationHandle object, size_t object_offset,
                    CUmemGenericAllocationHandle memory, size_t memory_offset, size_t bytes, const MakeCall& make_call) {
  const auto bind = [&](Session* session, CUmemGenericAllocationHandle handle) {
    const auto tag = session != nullptr && IsGuest(memory) ? session->EnterTagOf(ToAllocation(memory)) : Session::InTags{};
    if (tag.paused) return RefusedWhilePaused(call);
    if (session != nullptr && IsGuest(memory)) session->PrepareBind(ToAllocation(memory));
    const RealHandle known = session == nullptr ? RealHandle{memory, 0} : Real(*session, memory);
    return known.handle == 0 ? CUDA_ERROR_INVALID_HANDLE : make_call(handle, known.handle, known.offset + memory_offset);
  };
  return OnObject(call, object, bind, [&](AllocationId id) {
    return MulticastBound{id,    object_offset, IsGuest(memory) ? ToAllocation(memory) : AllocationId{}, memory_offset,
                          bytes, Address{}};
  });
}

// CUDA 13.1 inserted the device after the object's handle, under the same names.
constexpr int kWithDevice = 13010;

struct MulticastBindMem : Named<"cuMulticastBindMem"> {
  static constexpr int kBefore = kWithDevice;
  using Handle = CUmemGenericAllocationHandle;
  using Function = CUresult(Handle, size_t, Handle, size_t, size_t, unsigned long long);
  static CUresult Call(Function* real, Handle object, size_t object_offset, Handle memory, size_t memory_offset, size_t bytes,
                       unsigned long long flags) {
    return BindMemory(kName, object, object_offset, memory, memory_offset, bytes,
                      [&](Handle o, Handle m, size_t offset) { return real(o, object_offset, m, offset, bytes, flags); });
  }
};

struct MulticastBindMem2 : Named<"cuMulticastBindMem", "cuMulticastBindMem_v2"> {
  static constexpr int kSince = kWithDevice;
  using Handle = CUmemGenericAllocationHandle;
  using Function = CUresult(Handle, CUdevice, size_t, Handle, size_t, size_t, unsigned long long);
  static CUresult Call(Function* real, Handle object, CUdevice device, size_t object_offset, Handle memory,
                       size_t memory_offset, size_t bytes, unsigned long long flags) {
    return BindMemory(kName, object, object_offset, memory, memory_offset, bytes, [&](Handle o, Handle m, size_t offset) {
      return real(o, device, object_offset, m, offset, bytes, flags);
    });
  }
};

template <class MakeCall>
CUresult BindAddress(const char* call, CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t bytes,
                     const MakeCall& make_call) {
  return OnObject(
      call, object,
      [&](Session* session, CUmemGenericAllocationHandle handle) {
        const auto tags = session == nullptr ? Session::InTags{} : session->EnterTags({Address{address}, bytes}, call);
        return tags.paused ? RefusedWhilePaused(call) : make_call(handle);
      },
      [&](AllocationId id) { return MulticastBound{id, offset, AllocationId{}, 0, bytes, Address{address}}; });
}

struct MulticastBindAddr : Named<"cuMulticastBindAddr"> {
  static constexpr int kBefore = kWithDevice;
  using Function = CUresult(CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t, unsigned long long);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t bytes,
                       unsigned long long flags) {
    return BindAddress(kName, object, offset, address, bytes,
                       [&](auto handle) { return real(handle, offset, address, bytes, flags); });
  }
};

struct MulticastBindAddr2 : Named<"cuMulticastBindAddr", "cuMulticastBindAddr_v2"> {
  static constexpr int kSince = kWithDevice;
  using Function = CUresult(CUmemGenericAllocationHandle, CUdevice, size_t, CUdeviceptr, size_t, unsigned long long);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUdeviceptr address,
                       size_t bytes, unsigned long long flags) {
    return BindAddress(kName, object, offset, address, bytes,
                       [&](auto handle) { return real(handle, device, offset, address, bytes, flags); });
  }
};

struct MulticastUnbind : Named<"cuMulticastUnbind"> {
  using Function = CUresult(CUmemGenericAllocationHandle, CUdevice, size_t, size_t);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t bytes) {
    Session* session = Runtime::Get().session();
    if (session != nullptr && IsGuest(object)) {
      const auto gate = session->EnterCall();
      if (session->ForgetUnbound(ToAllocation(object), DeviceOrdinal{device}, offset, bytes)) return CUDA_SUCCESS;
    }
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
  return replacements::Table<MulticastCreate, MulticastAddDevice, MulticastBindMem, MulticastBindMem2, MulticastBindAddr,
                             MulticastBindAddr2, MulticastUnbind>();
}
}  // namespace amem::intercept
