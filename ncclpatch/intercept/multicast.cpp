// NVLS multicast objects: NCCL holds AMem's ids; each call is made with the driver's handles and recorded.

#include <tuple>

#include "ncclpatch/intercept/registrations.h"

namespace amem::intercept {
namespace {

// The driver's handle behind NCCL's, and where NCCL's memory begins in it. A handle that is not AMem's is returned unchanged;
// zero: AMem's, and gone.
std::pair<DriverHandle, Bytes> Real(Session& session, CUmemGenericAllocationHandle handle) {
  return IsGuest(handle) ? session.nccl().Backing(ToAllocation(handle)) : std::pair(DriverHandle{handle}, Bytes{0});
}

// Makes the call with the driver's handle, and records `event` if it worked and the object is AMem's.
template <class MakeCall, class MakeEvent>
CUresult OnObject(const char* call, CUmemGenericAllocationHandle object, const MakeCall& make_call, const MakeEvent& make_event,
                  bool also_paused = false) {
  Session* session = OfAnother::now > 0 ? Runtime::Get().started() : Runtime::Get().session();
  if (session == nullptr) return make_call(static_cast<Session*>(nullptr), object);
  const auto gate = session->calls().EnterCall();
  // Taking memory from an object is freeing, which always works.
  if (!also_paused && IsGuest(object) && session->paused()) return AnswerPaused(call);
  const CUmemGenericAllocationHandle real = Real(*session, object).first.value;
  if (real == 0) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult result = make_call(session, real);
  if (!IsGuest(object)) return PassedOn(*session, call, object, result);
  if (result == CUDA_SUCCESS) session->records().Note(make_event(ToAllocation(object)));
  return result;
}

// Bound to an object that pauses know nothing of, it must stay: the object holds its very pages.
CUresult BoundOutside(Session* session, CUmemGenericAllocationHandle object, AllocationId memory, CUresult result) {
  if (session != nullptr && memory && !IsGuest(object) && result == CUDA_SUCCESS)
    session->records().NoteHandedOut(memory, CU_MEM_HANDLE_TYPE_NONE, OtherLibrary());
  return result;
}

struct MulticastCreate : InSession<MulticastCreate, "cuMulticastCreate"> {
  static CUresult With(Session& session, const Pass<>& pass, CUmemGenericAllocationHandle* handle,
                       const CUmulticastObjectProp* properties) {
    if (handle == nullptr || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto gate = session.calls().EnterCall();
    if (session.paused()) return AnswerPaused(kName);
    if (const CUresult result = pass(); result != CUDA_SUCCESS) return result;
    *handle = ToGuest(session.nccl().NoteMulticast({{},
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

// CUDA 13.1 inserted the device after the object's handle, under the same names.
constexpr int kWithDevice = 13010;
using replacements::kFirst, replacements::kNoBound;
using Handle = CUmemGenericAllocationHandle;

template <Text Exported, int since, int before, class... Device>
struct BindMem : Named<"cuMulticastBindMem", Exported, since, before> {
  using Function = CUresult(Handle, Device..., size_t, Handle, size_t, size_t, unsigned long long);
  static CUresult Call(Function* real, Handle object, Device... device, size_t object_offset, Handle memory,
                       size_t memory_offset, size_t bytes, unsigned long long flags) {
    const char* const call = BindMem::kName;
    const AllocationId guest = IsGuest(memory) ? ToAllocation(memory) : AllocationId{};
    Session* const running = guest || OfAnother::now == 0 ? nullptr : Runtime::Get().started();
    const AllocationId behind = running == nullptr ? guest : running->records().AllocationOf(DriverHandle{memory});
    const auto bind = [&](Session* session, Handle handle) {
      const auto tag = session != nullptr && behind ? session->calls().EnterTagOf(behind) : InTags{};
      if (tag.paused) return RefusedWhilePaused(call);
      if (session != nullptr && guest) session->nccl().PrepareBind(guest);
      const auto [known, begin] = session == nullptr ? std::pair(DriverHandle{memory}, Bytes{0}) : Real(*session, memory);
      if (!known) return session != nullptr && session->paused() ? AnswerPaused(call) : CUDA_ERROR_INVALID_HANDLE;
      return BoundOutside(session, object, behind,
                          real(handle, device..., object_offset, known.value, begin + memory_offset, bytes, flags));
    };
    return OnObject(call, object, bind,
                    [&](AllocationId id) { return MulticastBound{id, object_offset, guest, memory_offset, bytes, Address{}}; });
  }
};
using MulticastBindMem = BindMem<"cuMulticastBindMem", kFirst, kWithDevice>;
using MulticastBindMem2 = BindMem<"cuMulticastBindMem_v2", kWithDevice, kNoBound, CUdevice>;

template <Text Exported, int since, int before, class... Device>
struct BindAddr : Named<"cuMulticastBindAddr", Exported, since, before> {
  using Function = CUresult(Handle, Device..., size_t, CUdeviceptr, size_t, unsigned long long);
  static CUresult Call(Function* real, Handle object, Device... device, size_t offset, CUdeviceptr address, size_t bytes,
                       unsigned long long flags) {
    const char* const call = BindAddr::kName;
    const auto bind = [&](Session* session, Handle handle) {
      const auto tags = session == nullptr ? InTags{} : session->calls().EnterTags({Address{address}, bytes}, call);
      if (tags.paused) return RefusedWhilePaused(call);
      const auto memory = [&](const State& state) {
        const auto mapping = state.MappingAt(Address{address});
        return mapping == state.mappings.end() ? AllocationId{} : mapping->second.allocation;
      };
      return BoundOutside(session, object, session == nullptr ? AllocationId{} : session->Inspect(memory),
                          real(handle, device..., offset, address, bytes, flags));
    };
    return OnObject(call, object, bind,
                    [&](AllocationId id) { return MulticastBound{id, offset, AllocationId{}, 0, bytes, Address{address}}; });
  }
};
using MulticastBindAddr = BindAddr<"cuMulticastBindAddr", kFirst, kWithDevice>;
using MulticastBindAddr2 = BindAddr<"cuMulticastBindAddr_v2", kWithDevice, kNoBound, CUdevice>;

// Whether such a call of another library, with or without the device, is about memory of AMem's.
constexpr auto kBindsMemory = [](Session& session, Handle, auto... rest) {
  const Handle memory = std::get<sizeof...(rest) - 4>(std::tuple(rest...));
  return IsGuest(memory) || session.records().AllocationOf(DriverHandle{memory});
};
constexpr auto kBindsAddress = [](Session& session, Handle, auto... rest) {
  const std::tuple all(rest...);
  return session.records().Manages({Address{std::get<sizeof...(rest) - 3>(all)}, std::get<sizeof...(rest) - 2>(all)});
};

struct MulticastUnbind : Named<"cuMulticastUnbind"> {
  using Function = CUresult(CUmemGenericAllocationHandle, CUdevice, size_t, size_t);
  static CUresult Call(Function* real, CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t bytes) {
    Session* session = Runtime::Get().session();
    if (session != nullptr && IsGuest(object)) {
      const auto gate = session->calls().EnterCall();
      if (session->nccl().ForgetUnbound(ToAllocation(object), DeviceOrdinal{device}, offset, bytes)) return CUDA_SUCCESS;
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

std::span<const replacements::Replacement> BindsOfOthers() {
  return replacements::Table<Either<MulticastBindMem, kBindsMemory>, Either<MulticastBindMem2, kBindsMemory>,
                             Either<MulticastBindAddr, kBindsAddress>, Either<MulticastBindAddr2, kBindsAddress>>();
}

std::span<const replacements::Replacement> MulticastReplacements() {
  return replacements::Table<MulticastCreate, MulticastAddDevice, MulticastBindMem, MulticastBindMem2, MulticastBindAddr,
                             MulticastBindAddr2, MulticastUnbind>();
}
}  // namespace amem::intercept
