// Allocations, mappings, shareable handles and what pointers are. NCCL gets descriptors of tokens, and passes on what its peers
// sent; handles of other types are the driver's.
//
// With AMEM_SCOPE=shared what another library makes by cuMemCreate to be shared by descriptors is a tag's, which is called as
// the library is. It holds AMem's handles, and its descriptors are of tokens, as NCCL's. With AMEM_SCOPE=all private memory, as
// of PyTorch's expandable segments, is so too, and all has the tag of the whole program. What is neither is the driver's, and
// counted.
#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <vector>

#include "ncclpatch/intercept/card_buffers.h"
#include "ncclpatch/intercept/others.h"
#include "ncclpatch/runtime/log.h"
#include "replay/driver/cuda/properties.h"

namespace amem::intercept {
namespace {

struct MemCreate : InSession<MemCreate, "cuMemCreate"> {
  static CUresult With(Session& session, const Pass<>& pass, Handle* handle, size_t bytes,
                       const CUmemAllocationProp* properties, unsigned long long flags) {
    if (handle == nullptr || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (BesideAPause(session)) return PassedOn(session, kName, 0, pass());
    bool for_application = false, for_window = false;
    Origin origin = OriginOfCall(&for_application, &for_window);
    if (for_window) {
      origin.alone = Alone::kNeeded;
    } else if (!for_application && Forever<CardBuffers>().Takes(origin.site)) {
      origin.alone = Alone::kPreferred;
    }
    const auto created = session.nccl().Create(bytes, FromCuda(*properties), flags, origin, for_application);
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
    const auto reserved = session.nccl().Reserve(bytes, alignment, Address{hint}, flags, CaptureCallSite());
    if (!reserved) return ToDriver(kName, reserved.status());
    *address = reserved->value;
    return CUDA_SUCCESS;
  }
};

using MemAddressFree = GivesBack<"cuMemAddressFree", &Session::nccl, &NcclMemory::FreeRange, size_t>;

struct MemGetAddressRange : InSession<MemGetAddressRange, "cuMemGetAddressRange", "cuMemGetAddressRange_v2"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
    const auto range = session.nccl().AddressRange(Address{address});
    // Not journaled, because NCCL asks this about the program's buffers all the time.
    if (range.status().code() == Code::kNotFound) return pass();
    if (!range) return ToDriver(kName, range.status());
    if (base != nullptr) *base = range->first.value;  // the driver also accepts null for either
    if (bytes != nullptr) *bytes = range->second;
    return CUDA_SUCCESS;
  }
};

struct MemRelease : InSession<MemRelease, "cuMemRelease"> {
  static CUresult With(Session& session, const Pass<>& pass, Handle handle) {
    if (!IsGuest(handle)) return PassedOn(session, kName, handle, pass());
    return ToDriver(kName, session.nccl().Release(ToAllocation(handle)));
  }
};

struct MemMap : InSession<MemMap, "cuMemMap"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr address, size_t bytes, size_t offset, Handle handle,
                       unsigned long long flags) {
    if (!IsGuest(handle)) return PassedOn(session, kName, handle, pass());
    return ToDriver(kName, session.nccl().Map(Address{address}, bytes, offset, ToAllocation(handle), flags));
  }
};

using MemUnmap = GivesBack<"cuMemUnmap", &Session::nccl, &NcclMemory::Unmap, size_t>;

struct MemSetAccess : InSession<MemSetAccess, "cuMemSetAccess"> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access,
                       size_t count) {
    if (access == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
    if (BesideAPause(session)) return PassedOn(session, kName, address, pass());
    std::vector<AccessDescriptor> descriptors;
    descriptors.reserve(count);
    for (size_t i = 0; i < count; ++i)
      descriptors.push_back({{static_cast<LocationType>(access[i].location.type), access[i].location.id}, access[i].flags});
    return OrPassOn(session, kName, address, session.nccl().SetAccess(Address{address}, bytes, descriptors), pass);
  }
};

struct MemRetainAllocationHandle : InSession<MemRetainAllocationHandle, "cuMemRetainAllocationHandle"> {
  static CUresult With(Session& session, const Pass<>& pass, Handle* handle, void* address) {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto at = reinterpret_cast<std::uint64_t>(address);
    const auto retained = session.nccl().Retain(Address{at});
    if (!retained) return OrPassOn(session, kName, at, retained.status(), pass);
    *handle = ToGuest(*retained);
    return CUDA_SUCCESS;
  }
};

struct MemGetAllocationPropertiesFromHandle
    : InSession<MemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle"> {
  static CUresult With(Session& session, const Pass<>& pass, CUmemAllocationProp* properties, Handle handle) {
    if (!IsGuest(handle)) return PassedOn(session, kName, handle, pass());
    if (properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto known = session.nccl().Properties(ToAllocation(handle));
    if (!known) return ToDriver(kName, known.status());
    *properties = ToCuda(*known);
    return CUDA_SUCCESS;
  }
};

// The driver's handle for another host, where nobody can ask this process over a socket. The memory stays in place.
CUresult HandOut(Session& session, CUresult (*real)(void*, Handle, CUmemAllocationHandleType, unsigned long long),
                 void* shareable, Handle handle, CUmemAllocationHandleType type, unsigned long long flags) {
  constexpr const char* kName = "cuMemExportToShareableHandle";
  const AllocationId id = ToAllocation(handle);
  const auto inside = session.calls().EnterCall();
  const InTags tag = session.calls().EnterTagOf(id);
  if (tag.paused) return RefusedWhilePaused(kName);
  if (tag.gates.empty() && session.paused()) return AnswerPaused(kName);
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
  const CUresult result = real(shareable, session.nccl().Backing(id).first.value, type, flags);
  if (result != CUDA_SUCCESS) return result;
  session.records().Note(Exported{id, static_cast<std::uint32_t>(type), OtherLibrary()});
  if (OfAnother::now == 0) Runtime::Get().NoteForeignSharing();
  return result;
}

struct MemExportToShareableHandle : Named<"cuMemExportToShareableHandle"> {
  using Function = decltype(cuMemExportToShareableHandle);
  static CUresult Call(Function* real, void* shareable, Handle handle, CUmemAllocationHandleType type,
                       unsigned long long flags) {
    Session* session = Runtime::Get().session();
    if (session == nullptr) return real(shareable, handle, type, flags);
    if (!IsGuest(handle)) return PassedOn(*session, kName, handle, real(shareable, handle, type, flags));
    if (shareable == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return HandOut(*session, real, shareable, handle, type, flags);
    auto token = session->sharing().Export(ToAllocation(handle));
    if (!token) return ToDriver(kName, token.status());
    *static_cast<int*>(shareable) = token->Release();
    return CUDA_SUCCESS;
  }
};

struct MemImportFromShareableHandle : InSession<MemImportFromShareableHandle, "cuMemImportFromShareableHandle"> {
  static CUresult With(Session& session, const Pass<>& pass, Handle* handle, void* shareable, CUmemAllocationHandleType type) {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto subject = reinterpret_cast<std::uint64_t>(shareable);  // the descriptor, or a pointer to 64 bytes
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
      Runtime::Get().NoteForeignSharing();
      return PassedOn(session, kName, subject, pass());
    }
    if (BesideAPause(session)) return PassedOn(session, kName, subject, pass());
    const auto imported = session.sharing().Import(static_cast<int>(subject), OriginOfCall());
    if (!imported) return OrPassOn(session, kName, subject, imported.status(), pass);
    *handle = ToGuest(*imported);
    return CUDA_SUCCESS;
  }
};

// What NCCL asks about a pointer: ncclMemFree asks for its device, even while the memory is paused.
struct PointerGetAttribute : Instead<PointerGetAttribute, "cuPointerGetAttribute"> {
  static CUresult With(const Pass<>& pass, void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    const CUresult result = pass();
    Session* session = Runtime::Get().started();
    if (result == CUDA_SUCCESS || data == nullptr || session == nullptr) return result;
    const auto paused = session->nccl().PausedAt(Address{pointer});
    const auto range = paused ? session->nccl().AddressRange(Address{pointer}) : paused.status();
    if (!range) return result;
    const bool known =
        attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
            ? SetTo<std::uint64_t>(data, paused->handle_types)
            : AnswerPointer(attribute, pointer, DeviceOrdinal{paused->location.id}, {range->first, range->second}, data);
    return known ? CUDA_SUCCESS : result;
  }
};

// ---- of other libraries

namespace handles {

int DescriptorIn(const void* shareable) { return static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)); }

// Makes memory that is to be shared by descriptors under the caller's tag. False: it is not, or the driver must answer.
bool CreateShared(Handle* handle, size_t bytes, const CUmemAllocationProp* properties, unsigned long long flags) {
  const bool on_device = handle != nullptr && properties != nullptr && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  const bool shared = on_device && (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
  const bool is_private = on_device && properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE;
  const auto session = shared || (is_private && TakesAll()) ? Runtime::Get().ForPools() : Result<Session*>(nullptr);
  if (!session || *session == nullptr) return false;
  const std::string library = TakesAll() ? kProgram : CallingLibrary(), tag = library.substr(0, library.find('.'));
  const auto made = (*session)->nccl().Create(bytes, FromCuda(*properties), flags, Origin(), false, tag);
  if (made) *handle = ToGuest(*made);
  return made.ok();  // or the tag is paused, or the driver says it again
}
constexpr auto kCreated = [](Outside& outside, const Handle* handle, size_t bytes, const CUmemAllocationProp* properties,
                             auto) {
  if (!TakesAll() || properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return;
  outside.Refer(*handle);
  outside.AddHandle(OutsideKind::kLeft, *handle, bytes, "cuMemCreate");
};
struct Create : AMEM_BEGINS(kCreated, cuMemCreate) {
  static CUresult Call(Function* real, Handle* handle, size_t bytes, const CUmemAllocationProp* properties,
                       unsigned long long flags) {
    return CreateShared(handle, bytes, properties, flags) ? CUDA_SUCCESS : Then::Call(real, handle, bytes, properties, flags);
  }
};

struct Import : Named<"cuMemImportFromShareableHandle"> {
  static CUresult Call(decltype(cuMemImportFromShareableHandle)* real, Handle* handle, void* shareable,
                       CUmemAllocationHandleType type) {
    const auto session = handle != nullptr && TokenIn(shareable, type) ? Runtime::Get().ForPools() : Result<Session*>(nullptr);
    if (!session || *session == nullptr) return counted::Import::Call(real, handle, shareable, type);
    const OfAnother caller;
    const auto imported = (*session)->sharing().Import(DescriptorIn(shareable), Origin(), true);
    if (!imported) return ToDriver(kName, imported.status());
    *handle = ToGuest(*imported);
    return CUDA_SUCCESS;
  }
};

constexpr auto kFirst = [](Session&, Handle handle) { return IsGuest(handle); };
constexpr auto kSecond = [](Session&, const void*, Handle handle, auto...) { return IsGuest(handle); };
constexpr auto kMapped = [](Session&, CUdeviceptr, size_t, size_t, Handle handle, auto) { return IsGuest(handle); };
constexpr auto kWithin = [](Session& session, CUdeviceptr address, size_t bytes, auto...) {
  return session.records().HandlesOfTags(Address{address}, bytes) > 0;
};
// What cudaMalloc gave has no such handle, and a tag's part is as that.
struct Retain : Named<"cuMemRetainAllocationHandle"> {
  static CUresult Call(decltype(cuMemRetainAllocationHandle)* real, Handle* handle, void* address) {
    Session* const session = Runtime::Get().started();
    const Address at{reinterpret_cast<std::uint64_t>(address)};
    if (session == nullptr || !session->calls().HasTags()) return counted::Retain::Call(real, handle, address);
    if (session->records().HandlesOfTags(at, 1) > 0) return MemRetainAllocationHandle::Call(real, handle, address);
    return session->records().PartOfTag(at).ok() ? CUDA_ERROR_INVALID_VALUE : counted::Retain::Call(real, handle, address);
  }
};
// What cudaMalloc gave is not unmapped, opened to others or given up as an address range, and a tag's part is as that.
struct Unmap : Named<"cuMemUnmap"> {
  static CUresult Call(decltype(cuMemUnmap)* real, CUdeviceptr address, size_t bytes) {
    if (IsTagsPart(address)) return CUDA_ERROR_INVALID_VALUE;
    Session* const session = Runtime::Get().started();
    const Bytes ours = session == nullptr ? 0 : session->records().HandlesOfTags(Address{address}, bytes);
    const OfAnother caller;
    const CUresult result = ours == 0 ? CUDA_SUCCESS : MemUnmap::Call(real, address, bytes);
    return result != CUDA_SUCCESS || ours == bytes ? result
                                                   : counted::Unmap::Call(real, address, bytes);  // what is the driver's
  }
};

constexpr auto kTagsPart = [](CUdeviceptr address) { return IsTagsPart(address); };
template <auto where, class F, Text Name, class Theirs = void>
struct NotOfParts : Named<Name> {
  using Function = F;
  template <class... A>
  static CUresult Call(F* real, A... arguments) {
    if (where(arguments...)) return CUDA_ERROR_INVALID_VALUE;
    if constexpr (std::is_void_v<Theirs>) {
      return real(arguments...);
    } else {
      return Theirs::Call(real, arguments...);
    }
  }
};
constexpr auto kFirstIs = [](CUdeviceptr address, auto...) { return kTagsPart(address); };
using SetAccess = NotOfParts<kFirstIs, decltype(cuMemSetAccess), "cuMemSetAccess", Either<MemSetAccess, kWithin>>;
// Of what cudaMalloc gave the driver names no access, and succeeds.
struct GetAccess : Named<"cuMemGetAccess"> {
  static CUresult Call(decltype(cuMemGetAccess)* real, unsigned long long* flags, const CUmemLocation* location,
                       CUdeviceptr address) {
    if (flags == nullptr || location == nullptr || !IsTagsPart(address)) return real(flags, location, address);
    *flags = 0;
    return CUDA_SUCCESS;
  }
};
using AddressFree = NotOfParts<kFirstIs, decltype(cuMemAddressFree), "cuMemAddressFree">;

// The driver's own descriptor, for what takes one that AMem's token is not: memory of a graphics library. It holds the memory
// beyond what AMem sees, which stays in place from then on.
struct ImportExternal : Named<"cuImportExternalMemory"> {
  using Function = decltype(cuImportExternalMemory);
  static CUresult Call(Function* real, CUexternalMemory* memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC* wanted) {
    const bool descriptor = wanted != nullptr && wanted->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD;
    const auto token = descriptor ? ReadTokenDescriptor(wanted->handle.fd) : Status{Code::kNotFound, ""};
    Session* const session = Runtime::Get().started();
    static const auto export_of = AMEM_DRIVER(cuMemExportToShareableHandle);
    if (!token || session == nullptr || token->session != session->id() || export_of == nullptr) return real(memory, wanted);
    const DriverHandle handle = session->nccl().Backing(token->allocation).first;
    const HandingOut out(handle.value);
    if (!handle || session->nccl().Backing(token->allocation).first != handle)
      return CUDA_ERROR_NOT_READY;  // a pause took it meanwhile
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC drivers = *wanted;
    CUresult result = export_of(&drivers.handle.fd, handle.value, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result != CUDA_SUCCESS) return result;
    result = real(memory, &drivers);
    close(result == CUDA_SUCCESS ? wanted->handle.fd : drivers.handle.fd);  // the driver keeps what it takes
    return out.Done(result, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  }
};

}  // namespace handles
}  // namespace

bool AnswerPointer(CUpointer_attribute attribute, CUdeviceptr pointer, DeviceOrdinal device, const Extent& range, void* data) {
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) return SetTo<unsigned>(data, CU_MEMORYTYPE_DEVICE);
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return SetTo(data, pointer);
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) return SetTo<int>(data, device.value);
  if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) return SetTo<CUdeviceptr>(data, range.address.value);
  return attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE && SetTo<std::size_t>(data, range.bytes);
}

Result<Token> TokenIn(const void* shareable, CUmemAllocationHandleType type) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return Status{Code::kNotFound, "no descriptor"};
  return ReadTokenDescriptor(handles::DescriptorIn(shareable));
}

// The process that made it has a wider scope: only there do other libraries get tokens.
CUresult NameScopes(const char* call, const Result<Token>& token, CUresult result) {
  if (!token || result == CUDA_SUCCESS) return result;
  const std::string why = fmt::format("a handle that AMem made in process {}, which has AMEM_SCOPE=shared or all", token->pid);
  if (Session* const session = Runtime::Get().started())
    session->records().Note(PassedThrough{call, why, static_cast<std::int32_t>(result)});
  log::Error(
      fmt::format("{} by {}: it is given {}, and in this process AMEM_SCOPE is nccl, or AMem has no session; set "
                  "AMEM_SCOPE alike for all processes of the job (amem run --scope)",
                  call, CallingLibrary(), why));
  return result;
}

std::span<const replacements::Replacement> MemoryReplacements() {
  return replacements::Table<MemCreate, MemRelease, MemAddressReserve, MemAddressFree, MemMap, MemUnmap, MemSetAccess,
                             MemRetainAllocationHandle, MemGetAllocationPropertiesFromHandle, MemGetAddressRange,
                             MemExportToShareableHandle, MemImportFromShareableHandle, PointerGetAttribute>();
}
std::span<const replacements::Replacement> HandleReplacements() {
  using namespace handles;
  return replacements::Table<Create, Import, Unmap, Either<MemExportToShareableHandle, kSecond, counted::Export>,
                             Either<MemRelease, kFirst, counted::Release>, Either<MemMap, kMapped, counted::Map>, Retain,
                             SetAccess, GetAccess, AddressFree, ImportExternal,
                             Either<MemGetAllocationPropertiesFromHandle, kSecond>>();
}
}  // namespace amem::intercept
