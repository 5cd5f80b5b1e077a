// With AMEM_SCOPE=shared: what another library makes by cuMemCreate to be shared by descriptors is a tag's, which is called as
// the library is. It holds AMem's handles, and its descriptors are of tokens, as NCCL's. With AMEM_SCOPE=all private memory, as
// of PyTorch's expandable segments, is so too, and all has the tag of the whole program. What is neither is the driver's, and
// counted.
#include <spdlog/fmt/fmt.h>

#include "ncclpatch/hook/call_site.h"
#include "ncclpatch/intercept/memory.h"
#include "ncclpatch/intercept/others.h"
#include "ncclpatch/runtime/log.h"

namespace amem::intercept {
namespace {
namespace handles {

int DescriptorIn(const void* shareable) { return static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)); }

struct Create : Named<"cuMemCreate"> {
  static CUresult Call(decltype(cuMemCreate)* real, Handle* handle, size_t bytes, const CUmemAllocationProp* properties,
                       unsigned long long flags) {
    return CreateShared(handle, bytes, properties, flags) ? CUDA_SUCCESS : real(handle, bytes, properties, flags);
  }
};

struct Import : Named<"cuMemImportFromShareableHandle"> {
  static CUresult Call(decltype(cuMemImportFromShareableHandle)* real, Handle* handle, void* shareable,
                       CUmemAllocationHandleType type) {
    const auto session = handle != nullptr && TokenIn(shareable, type) ? Runtime::Get().ForPools() : Result<Session*>(nullptr);
    if (!session || *session == nullptr) return ImportCounted(real, handle, shareable, type);
    const OfAnother caller;
    const auto imported = (*session)->Import(DescriptorIn(shareable), Origin(), true);
    if (!imported) return ToDriver(kName, imported.status());
    *handle = ToGuest(*imported);
    return CUDA_SUCCESS;
  }
};

// A call as NCCL's if it is about memory of a tag, otherwise `theirs`; null: the driver's.
template <class Ours, auto is_ours, auto theirs = nullptr>
struct Either : Ours {
  template <class R, class... A>
  static R Call(R (*real)(A...), std::type_identity_t<A>... arguments) {
    Session* const session = Runtime::Get().started();
    const OfAnother caller;
    if (session != nullptr && is_ours(*session, arguments...)) return Ours::Call(real, arguments...);
    if constexpr (theirs == nullptr) {
      return real(arguments...);
    } else {
      return theirs(real, arguments...);
    }
  }
};
constexpr auto kFirst = [](Session&, Handle handle) { return IsGuest(handle); };
constexpr auto kSecond = [](Session&, const void*, Handle handle, auto...) { return IsGuest(handle); };
constexpr auto kMapped = [](Session&, CUdeviceptr, size_t, size_t, Handle handle, auto) { return IsGuest(handle); };
constexpr auto kWithin = [](Session& session, CUdeviceptr address, size_t bytes, auto...) {
  return session.HandlesOfTags(Address{address}, bytes) > 0;
};
// What cudaMalloc gave has no such handle, and a tag's part is as that.
struct Retain : Named<"cuMemRetainAllocationHandle"> {
  static CUresult Call(decltype(cuMemRetainAllocationHandle)* real, Handle* handle, void* address) {
    Session* const session = Runtime::Get().started();
    const Address at{reinterpret_cast<std::uint64_t>(address)};
    if (session == nullptr || !session->HasTags()) return RetainCounted(real, handle, address);
    if (session->HandlesOfTags(at, 1) > 0) return MemRetainAllocationHandle::Call(real, handle, address);
    return session->PartOfTag(at).ok() ? CUDA_ERROR_INVALID_VALUE : RetainCounted(real, handle, address);
  }
};
struct Unmap : Named<"cuMemUnmap"> {
  static CUresult Call(decltype(cuMemUnmap)* real, CUdeviceptr address, size_t bytes) {
    Session* const session = Runtime::Get().started();
    const Bytes ours = session == nullptr ? 0 : session->HandlesOfTags(Address{address}, bytes);
    const OfAnother caller;
    const CUresult result = ours == 0 ? CUDA_SUCCESS : MemUnmap::Call(real, address, bytes);
    return result != CUDA_SUCCESS || ours == bytes ? result : UnmapCounted(real, address, bytes);  // what is the driver's
  }
};

}  // namespace handles
}  // namespace

bool CreateShared(Handle* handle, size_t bytes, const CUmemAllocationProp* properties, unsigned long long flags) {
  const bool on_device = handle != nullptr && properties != nullptr && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  const bool shared = on_device && (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
  const bool is_private = on_device && properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE;
  const auto session = shared || (is_private && TakesAll()) ? Runtime::Get().ForPools() : Result<Session*>(nullptr);
  if (!session || *session == nullptr) return false;
  const std::string library = TakesAll() ? kProgram : CallingLibrary(), tag = library.substr(0, library.find('.'));
  const auto made = (*session)->Create(bytes, FromDriver(*properties), flags, Origin(), false, false, tag);
  if (made) *handle = ToGuest(*made);
  return made.ok();  // or the tag is paused, or the driver says it again
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
    session->Note(PassedThrough{call, why, static_cast<std::int32_t>(result)});
  log::Error(
      fmt::format("{} by {}: it is given {}, and in this process AMEM_SCOPE is nccl, or AMem has no session; set "
                  "AMEM_SCOPE alike for all processes of the job (amem run --scope)",
                  call, CallingLibrary(), why));
  return result;
}

std::span<const replacements::Replacement> HandleReplacements() {
  using namespace handles;
  return replacements::Table<Create, Import, Unmap, Either<MemExportToShareableHandle, kSecond, &ExportCounted>,
                             Either<MemRelease, kFirst, &ReleaseCounted>, Either<MemMap, kMapped, &MapCounted>, Retain,
                             Either<MemSetAccess, kWithin>, Either<MemGetAllocationPropertiesFromHandle, kSecond>>();
}
}  // namespace amem::intercept
