// Calls of other libraries: what they share by cudaIpc, what they get of the driver with AMEM_SCOPE=all, what a reset takes
// from them, and the tables of each scope.
#include "ncclpatch/intercept/others.h"

#include <pthread.h>

#include <chrono>
#include <cstring>

namespace amem::intercept {

// The allocation that contains `pointer`.
static Extent AllocationAt(CUdeviceptr pointer) {
  CUdeviceptr base = pointer;
  std::size_t bytes = 0;
  const auto ask = AMEM_DRIVER(cuMemGetAddressRange);
  if (ask == nullptr || ask(&base, &bytes, pointer) != CUDA_SUCCESS) return {Address{pointer}, 0};
  return {Address{base}, bytes};
}
namespace counted {
namespace {

constexpr auto kIpcGot = [](Outside& outside, CUipcMemHandle*, CUdeviceptr pointer) {
  const Extent whole = AllocationAt(pointer);
  outside.Add(OutsideKind::kIpcExport, whole.address.value, whole.bytes);
};
constexpr auto kIpcOpened = [](Outside& outside, const CUdeviceptr* pointer, auto...) {
  outside.Add(OutsideKind::kIpcImport, *pointer, AllocationAt(*pointer).bytes);
};
constexpr auto kIpcClosed = [](Outside& outside, CUdeviceptr pointer) { return outside.Drop(pointer, 1); };
constexpr auto kPoolExported = [](Outside& outside, const void*, CUmemoryPool pool, auto...) {
  outside.Add(OutsideKind::kPoolExport, KeyOf(pool), 0);
};
constexpr auto kPoolImported = [](Outside& outside, const CUmemoryPool* pool, auto...) {
  outside.Add(OutsideKind::kPoolImport, KeyOf(*pool), 0);
};
constexpr auto kDestroyed = [](Outside& outside, CUcontext context) { return outside.DropOf(context); };
constexpr auto kReset = [](Outside& outside, CUdevice device) { return outside.DropOf(PrimaryContext(DeviceOrdinal{device})); };

// The driver gives no such handle of mapped memory today; if one does, nobody says who opens it.
struct IpcGet : AMEM_BEGINS(kIpcGot, cuIpcGetMemHandle) {
  static CUresult Call(Function* real, CUipcMemHandle* handle, CUdeviceptr address) {
    const OfAnother caller;
    const Registering gate(kName, {Address{address}, 1});
    const CUresult result = Then::Call(real, handle, address);
    if (result == CUDA_SUCCESS && gate.concerns())
      Runtime::Get().started()->records().NoteHandedOut(Address{address}, CU_MEM_HANDLE_TYPE_NONE, CallingLibrary());
    return result;
  }
};
// An array holds the pages that are mapped into it, so they stay from then on.
struct MapArray : Named<"cuMemMapArrayAsync"> {
  using Function = decltype(cuMemMapArrayAsync);
  static CUresult Call(Function* real, CUarrayMapInfo* list, unsigned count, CUstream stream) {
    Session* const session = list == nullptr ? nullptr : Runtime::Get().started();
    if (session == nullptr) return real(list, count, stream);
    const OfAnother caller;
    std::vector<CUarrayMapInfo> drivers(list, list + count);
    std::vector<AllocationId> ours;
    const auto for_each = [&](const auto& use) {
      for (CUarrayMapInfo& one : drivers) {
        if (one.memOperationType != CU_MEM_OPERATION_TYPE_MAP || one.memHandleType != CU_MEM_HANDLE_TYPE_GENERIC) continue;
        const CUmemGenericAllocationHandle handle = one.memHandle.memHandle;
        const DriverHandle theirs{handle};
        use(one, IsGuest(handle) ? ToAllocation(handle) : session->records().AllocationOf(theirs));
      }
    };
    for_each([&](const CUarrayMapInfo&, AllocationId id) {
      if (id) ours.push_back(id);
    });
    if (ours.empty()) return real(list, count, stream);
    const auto nccl = session->calls().EnterCall();
    const InTags tags = session->calls().EnterTagsOf(ours, kName);
    bool known = true;
    for_each([&](CUarrayMapInfo& one, AllocationId) {
      if (!IsGuest(one.memHandle.memHandle)) return;
      const auto [handle, begin] = session->nccl().Backing(ToAllocation(one.memHandle.memHandle));
      known = known && handle;
      one.memHandle.memHandle = handle.value;
      one.offset += begin;
    });
    if (!known) return tags.paused || session->paused() ? RefusedWhilePaused(kName) : CUDA_ERROR_INVALID_HANDLE;
    const CUresult result = real(drivers.data(), count, stream);
    for (const AllocationId id : ours)
      if (result == CUDA_SUCCESS) session->records().NoteHandedOut(id, CU_MEM_HANDLE_TYPE_NONE, CallingLibrary());
    return result;
  }
};
using IpcClose = AMEM_ENDS(kIpcClosed, cuIpcCloseMemHandle);
struct IpcOpen : AMEM_BEGINS(kIpcOpened, cuIpcOpenMemHandle) {
  static CUresult Call(Function* real, CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) {
    return NameScopes(kName, Decode(std::as_bytes(std::span(handle.reserved))), Then::Call(real, pointer, handle, flags));
  }
};
// What AMem itself has in a primary context goes with it, too.
struct Reset : AMEM_ENDS(kReset, cuDevicePrimaryCtxReset) {
  static CUresult Call(Function* real, CUdevice device) {
    const DeviceOrdinal ordinal{device};
    const CUcontext context = PrimaryContext(ordinal);
    Session* const session = context == nullptr ? nullptr : Runtime::Get().started();
    if (session != nullptr) {
      InContext(context, [] { return AMEM_DRIVER(cuCtxSynchronize)(); });
      session->devices().Forget(ordinal);
    }
    ContextEnded(context);
    const CUresult result = Ends::Call(real, device);
    ForgetPrimaryContext(ordinal);
    if (session != nullptr) session->devices().Forget(ordinal);  // what other threads have made there meanwhile
    return result;
  }
};

// The last of the program's references takes the context along, and with it what is AMem's there.
struct PrimaryRelease : Named<"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2"> {
  static CUresult Call(CUresult (*real)(CUdevice), CUdevice device) {
    const DeviceOrdinal ordinal{device};
    Session* const session = Runtime::Get().started();
    const CUcontext context = session == nullptr ? nullptr : PrimaryContext(ordinal);
    if (context == nullptr) return real(device);
    const auto released = session->devices().ReleaseContext(ordinal, [&] { return static_cast<int>(real(device)); });
    const auto result = static_cast<CUresult>(released.result);
    if (!released.gone && IsActive(ordinal)) return result;
    ContextEnded(context);
    Forever<Outside>().DropOf(context);
    ForgetPrimaryContext(ordinal);
    return result;
  }
  static bool IsActive(DeviceOrdinal device) {
    static const auto state = AMEM_DRIVER(cuDevicePrimaryCtxGetState);
    unsigned flags = 0;
    int active = 1;
    return state == nullptr || state(device.value, &flags, &active) != CUDA_SUCCESS || active != 0;
  }
};
struct ContextDestroy : AMEM_ENDS(kDestroyed, cuCtxDestroy) {
  static CUresult Call(Function* real, CUcontext context) {
    const CUresult result = Ends::Call(real, context);
    if (result == CUDA_SUCCESS) ContextEnded(context);
    return result;
  }
};

std::span<const replacements::Replacement> Table() {
  return replacements::Table<IpcGet, MemFree, IpcOpen, IpcClose, Export, Import,
                             AMEM_BEGINS(kGot<OutsideKind::kMulticast>, cuMulticastCreate), Retain, Release, Map, Unmap,
                             MapArray, AMEM_BEGINS(kPoolExported, cuMemPoolExportToShareableHandle),
                             AMEM_BEGINS(kPoolImported, cuMemPoolImportFromShareableHandle),
                             AMEM_ENDS(kFreed, cuMemPoolDestroy), ContextDestroy, PrimaryRelease, Reset>();
}

}  // namespace
}  // namespace counted
namespace {
// With AMEM_SCOPE=all: private memory that is no tag's, by the function that made it.
namespace left {

Bytes BytesIn(auto...) { return 0; }  // of arrays, nobody says how many
template <class... A>
Bytes BytesIn(size_t bytes, A...) {
  return bytes;
}
template <Text Name>
constexpr auto kMade = [](Outside& outside, const auto* made, auto... rest) {
  outside.Add(OutsideKind::kLeft, KeyOf(*made), BytesIn(rest...), Name.data);
};
#define AMEM_LEFT(name) Then<kBegun<kMade<#name>>, decltype(name), #name, AMEM_TEXT(name)>

std::span<const replacements::Replacement> Table() {
  using counted::kFreed;
  return replacements::Table<AMEM_LEFT(cuMemAllocManaged), AMEM_LEFT(cuMemAllocAsync), AMEM_LEFT(cuMemAllocFromPoolAsync),
                             AMEM_LEFT(cuArrayCreate), AMEM_LEFT(cuArray3DCreate), AMEM_LEFT(cuMipmappedArrayCreate),
                             AMEM_ENDS(kFreed, cuArrayDestroy), AMEM_ENDS(kFreed, cuMipmappedArrayDestroy)>();
}

}  // namespace left
// With AMEM_SCOPE=shared or all: what is a tag's (program.cpp) has handles that carry tokens, and who opens one has the memory
// under the same tag, so that all pause it together. What is not under a tag is only counted.
namespace shared {

Status NoSession() { return {Code::kNotFound, "no session"}; }

struct IpcGet : counted::IpcGet {
  static CUresult Call(Function* real, CUipcMemHandle* handle, CUdeviceptr address) {
    Session* const session = Runtime::Get().started();
    const auto token = session == nullptr ? NoSession() : session->legacy().ExportPart(Address{address});
    if (handle == nullptr || token.status().code() == Code::kNotFound) return Then::Call(real, handle, address);
    if (!token) return ToDriver(kName, token.status());
    std::memcpy(handle->reserved, token->data(), token->size());
    return CUDA_SUCCESS;
  }
};
struct IpcOpen : counted::IpcOpen {
  static CUresult Call(Function* real, CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
    const auto opened = Open(handle);
    if (opened.status().code() == Code::kInvalid) return CUDA_ERROR_INVALID_CONTEXT;  // a process cannot open its own
    if (address == nullptr || opened.status().code() == Code::kNotFound)
      return counted::IpcOpen::Call(real, address, handle, flags);
    if (!opened) return ToDriver(kName, opened.status());
    *address = opened->value;
    return CUDA_SUCCESS;
  }
  static Result<Address> Open(const CUipcMemHandle& handle) {
    const auto session = Runtime::Get().ForPools();
    if (!session || *session == nullptr) return NoSession();
    AMEM_ASSIGN(const auto device, Runtime::Get().CurrentDevice());
    const auto token = Decode(std::as_bytes(std::span(handle.reserved)));
    if (token && token->session == (*session)->id()) return Status{Code::kInvalid, "its own"};
    return (*session)->legacy().Import(std::as_bytes(std::span(handle.reserved)), device, Origin(), true);
  }
};
struct IpcClose : counted::IpcClose {
  static CUresult Call(Function* real, CUdeviceptr address) {
    Session* const session = Runtime::Get().started();
    const Status closed = session == nullptr ? NoSession() : session->legacy().Close(Address{address});
    return closed.code() == Code::kNotFound ? Ends::Call(real, address) : ToDriver(kName, closed);
  }
};

}  // namespace shared
}  // namespace

// Before there is a session a process may fork and go on; later its children are inert.
Outside::Outside() {
  constexpr auto kUnlock = [] { Forever<Outside>().mutex_.unlock(); };
  pthread_atfork([] { Forever<Outside>().mutex_.lock(); }, kUnlock, kUnlock);
}

// Each pause asks, and a process of PyTorch's has some hundred libraries.
void Outside::FindLibrariesPastAmem() {
  const std::uint64_t imports = hook::ImportCount();
  {
    const std::lock_guard lock(mutex_);
    if (surveyed_at_ == imports) return;
  }
  std::vector<std::string> found = hook::PastAmem(kSharing);
  const std::lock_guard lock(mutex_);
  past_amem_ = std::move(found);
  surveyed_at_ = imports;
}

void Outside::JournalChanges(Session& session, bool wait) {
  constexpr std::chrono::milliseconds kSoon{10};
  std::unique_lock order(journaling_, std::defer_lock);
  if (!wait && !order.try_lock()) return;
  if (wait) order.lock();
  std::map<Who, OutsideShare> now = Sums();
  std::vector<EventBody> news;
  for (const auto& [who, share] : journaled_)
    if (!now.contains(who)) news.emplace_back(SharedOutside{who.first, who.second, 0, 0});
  for (const auto& [who, share] : now)
    if (const auto before = journaled_.find(who); before == journaled_.end() || before->second != share)
      news.emplace_back(SharedOutside{who.first, who.second, share.pieces, share.bytes});
  if (news.empty() || (!wait && !session.records().TryNote(news, kSoon))) return;
  for (EventBody& event : wait ? news : std::vector<EventBody>()) session.records().Note(std::move(event));
  journaled_ = std::move(now);
}

std::map<Outside::Who, OutsideShare> Outside::Sums() {
  const std::lock_guard lock(mutex_);
  std::map<Who, OutsideShare> sums = sums_;
  for (const std::string& library : past_amem_) sums[{library, OutsideKind::kUnseen}] = {1, 0};
  if (missed_.load() || !hook::InterceptsOthers()) sums[{"", OutsideKind::kUnseen}] = {1, 0};
  return sums;
}

const replacements::Tables& CountingTables() {
  static const std::array all = {GetProcAddressReplacements(replacements::Caller::kOther), VerbsOfOthers(), BindsOfOthers(),
                                 EndpointsOfOthers(), counted::Table()};
  static const replacements::Tables tables(all);
  return tables;
}

const replacements::Tables& GuardTables() {
  using namespace counted;
  static const std::array all = {GetProcAddressReplacements(replacements::Caller::kOther), VerbsOfOthers(), BindsOfOthers(),
                                 EndpointsOfOthers(),
                                 replacements::Table<IpcGet, MapArray, Export, Retain, Release, counted::Map, Unmap, Reset>()};
  static const replacements::Tables tables(all);
  return tables;
}

void Guard() {
  hook::ReachOthers(GuardTables(), true);
  hook::PatchAtLoad();
}

const replacements::Tables& WiderTables(LibraryScope scope) {
  constexpr std::size_t kOfAll = 3;  // the first tables
  static const std::array all = {ProgramReplacements(),
                                 left::Table(),
                                 GraphsOfOthers(),
                                 TaggedReplacements(),
                                 replacements::Table<shared::IpcGet, shared::IpcOpen, shared::IpcClose>(),
                                 HandleReplacements(),
                                 BindsOfOthers(),
                                 EndpointsOfOthers(),
                                 VerbsOfOthers(),
                                 GetProcAddressReplacements(replacements::Caller::kOther),
                                 counted::Table()};
  static const replacements::Tables of_all(all), of_shared(all.data() + kOfAll, all.size() - kOfAll);
  return scope == LibraryScope::kAll ? of_all : of_shared;
}

void JournalOthers(Session& session, bool wait) {
  if (!wait) return Forever<Outside>().JournalChanges(session, false);
  hook::PatchIfLoaded();
  Forever<Registrations>().DropClosed();
  OpenProgram(session);
  Forever<Outside>().FindLibrariesPastAmem();
  Forever<Outside>().JournalChanges(session);
}

}  // namespace amem::intercept
