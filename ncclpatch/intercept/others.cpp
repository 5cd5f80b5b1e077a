// Other libraries' calls that share device memory with other processes. Each is made as it is; what it shares is counted for
// the journal (SharedOutside), so that a freeze can refuse by name what the driver could not restore.
#include "ncclpatch/intercept/others.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ncclpatch/hook/call_site.h"
#include "ncclpatch/hook/hook.h"
#include "ncclpatch/intercept/memory.h"

namespace amem::intercept {
namespace {

std::uint64_t KeyOf(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// The allocation that contains `pointer`.
Extent AllocationAt(CUdeviceptr pointer) {
  CUdeviceptr base = pointer;
  std::size_t bytes = 0;
  const auto ask = DriverFunction<decltype(cuMemGetAddressRange)>("cuMemGetAddressRange_v2");
  if (ask == nullptr || ask(&base, &bytes, pointer) != CUDA_SUCCESS) return {Address{pointer}, 0};
  return {Address{base}, bytes};
}

// All that other libraries share now: pieces, each by its address, handle or pool. Memory behind a handle is shared until the
// last reference and the last mapping that this process has of it are gone.
class Others {
 public:
  static Others& Get() {
    static auto* all = new Others;  // never destroyed, because other libraries call after main has returned
    return *all;
  }

  struct Piece {
    std::string library;
    Bytes bytes = 0;
    std::int64_t uses = 1;  // what was opened twice must be closed twice
  };
  using Pieces = std::map<std::pair<OutsideKind, std::uint64_t>, Piece>;
  struct Memory {
    std::int64_t references = 1;  // by create, import and retain; the first was made before it was seen here
    std::int64_t mappings = 0;
    Bytes bytes = 0;
  };
  struct Mapping {
    Bytes bytes = 0;
    std::uint64_t handle = 0;
  };
  // What a call is about to end. It is taken out first, because another thread may get the same address or handle as soon as
  // the driver has let go of it, and put back if the driver refuses.
  struct Taken {
    std::vector<Pieces::value_type> pieces;
    std::vector<std::pair<std::uint64_t, Memory>> memory;
    std::vector<std::pair<CUdeviceptr, Mapping>> mappings;
  };

  void Add(OutsideKind kind, std::uint64_t key, Bytes bytes) {
    Piece piece{CallingLibrary(), bytes};
    Change([&] { AddPiece({kind, key}, piece); });
  }
  void AddLeft(const char* function, std::uint64_t key, Bytes bytes) {
    Piece piece{function, bytes};
    Change([&] { AddPiece({OutsideKind::kLeft, key}, piece); });
  }
  void AddHandle(OutsideKind kind, std::uint64_t handle) {
    Piece piece{CallingLibrary()};
    Change([&] {
      piece.bytes = memory_[handle].bytes;
      AddPiece({kind, handle}, piece);
    });
  }
  void Refer(std::uint64_t handle) {
    const std::lock_guard lock(mutex_);
    if (const auto [at, fresh] = memory_.try_emplace(handle); !fresh) ++at->second.references;
  }
  void Map(CUdeviceptr address, Bytes bytes, std::uint64_t handle) {
    Change([&] {
      mappings_[address] = {bytes, handle};
      Memory& memory = memory_[handle];
      ++memory.mappings;
      if (std::exchange(memory.bytes, bytes) == bytes) return;  // a handle is mapped whole
      for (const OutsideKind kind : kOfHandles) {
        const auto at = pieces_.find({kind, handle});
        if (at == pieces_.end()) continue;
        Count(*at, -1);
        at->second.bytes = bytes;
        Count(*at, 1);
      }
    });
  }
  // `uses`: at most so many; what was exported is shared no more after one free.
  Taken Drop(std::initializer_list<OutsideKind> kinds, std::uint64_t key,
             std::int64_t uses = std::numeric_limits<std::int64_t>::max()) {
    Taken taken;
    if (count_.load(std::memory_order_relaxed) == 0) return taken;
    Change([&] {
      for (const OutsideKind kind : kinds)
        if (const auto at = pieces_.find({kind, key}); at != pieces_.end()) TakePiece(at, uses, taken);
    });
    return taken;
  }
  Taken Unmap(CUdeviceptr begin, Bytes bytes) {
    Taken taken;
    Change([&] {
      const auto first = mappings_.lower_bound(begin), last = mappings_.lower_bound(begin + bytes);
      taken.mappings.assign(first, last);
      mappings_.erase(first, last);
      for (const auto& [address, mapping] : taken.mappings) LetGo(mapping.handle, 0, 1, taken);
    });
    return taken;
  }
  Taken Release(std::uint64_t handle) {
    Taken taken;
    Change([&] { LetGo(handle, 1, 0, taken); });
    return taken;
  }
  void PutBack(const Taken& taken) {
    Change([&] {
      for (const auto& [what, piece] : taken.pieces) AddPiece(what, piece);
      for (const auto& [handle, memory] : taken.memory) memory_[handle] = memory;
      for (const auto& [address, mapping] : taken.mappings) mappings_[address] = mapping;
    });
  }

  void Miss() { missed_.store(true); }  // something could not be counted
  void LookForThosePastAmem() {
    std::vector<std::string> found = hook::PastAmem(kSharing);
    const std::lock_guard lock(mutex_);
    past_amem_ = std::move(found);
  }
  // The last that is told is the latest.
  void Tell(Session& session) {
    const std::lock_guard order(telling_);
    std::map<Who, OutsideShare> now = Sums();
    for (const auto& [who, share] : told_)
      if (!now.contains(who)) session.Note(SharedOutside{who.first, who.second, 0, 0});
    for (const auto& [who, share] : now)
      if (const auto before = told_.find(who); before == told_.end() || before->second != share)
        session.Note(SharedOutside{who.first, who.second, share.pieces, share.bytes});
    told_ = std::move(now);
  }

 private:
  using Who = std::pair<std::string, OutsideKind>;
  static constexpr std::array kOfHandles = {OutsideKind::kHandleExport, OutsideKind::kHandleImport, OutsideKind::kMulticast,
                                            OutsideKind::kLeft};

  // Before there is a session a process may fork and go on; later its children are inert.
  Others() {
    pthread_atfork([] { Get().mutex_.lock(); }, [] { Get().mutex_.unlock(); }, [] { Get().mutex_.unlock(); });
  }

  template <class Make>
  void Change(const Make& make) {
    {
      const std::lock_guard lock(mutex_);
      changed_ = false;
      make();
      count_.store(pieces_.size());
      if (!changed_) return;
    }
    if (Session* session = Runtime::Get().started()) Tell(*session);
  }
  void Count(const Pieces::value_type& piece, int sign) {
    const Who who{piece.second.library, piece.first.first};
    OutsideShare& sum = sums_[who];
    sum.pieces += static_cast<std::uint64_t>(sign);
    sum.bytes += static_cast<std::uint64_t>(sign) * piece.second.bytes;
    if (sum.pieces == 0) sums_.erase(who);
    changed_ = changed_ || who.second != OutsideKind::kLeft;  // which is told before pauses only, because it changes so often
  }
  void AddPiece(const Pieces::key_type& what, const Piece& piece) {
    const auto [at, fresh] = pieces_.try_emplace(what, piece);
    fresh ? Count(*at, 1) : void(at->second.uses += piece.uses);
  }
  void TakePiece(Pieces::iterator at, std::int64_t uses, Taken& taken) {
    uses = std::min(uses, at->second.uses);
    taken.pieces.emplace_back(at->first, Piece{at->second.library, at->second.bytes, uses});
    if ((at->second.uses -= uses) > 0) return;
    Count(*at, -1);
    pieces_.erase(at);
  }
  void LetGo(std::uint64_t handle, int references, int mappings, Taken& taken) {
    const auto found = memory_.find(handle);
    if (found == memory_.end()) return;
    taken.memory.emplace_back(*found);
    found->second.references -= references;
    found->second.mappings -= mappings;
    if (found->second.references > 0 || found->second.mappings > 0) return;
    memory_.erase(found);
    for (const OutsideKind kind : kOfHandles)
      if (const auto at = pieces_.find({kind, handle}); at != pieces_.end()) TakePiece(at, at->second.uses, taken);
  }
  std::map<Who, OutsideShare> Sums() {
    const std::lock_guard lock(mutex_);
    std::map<Who, OutsideShare> sums = sums_;
    for (const std::string& library : past_amem_) sums[{library, OutsideKind::kUnseen}] = {1, 0};
    if (missed_.load() || !hook::HearsOthers()) sums[{"", OutsideKind::kUnseen}] = {1, 0};
    return sums;
  }

  std::atomic<bool> missed_{false};
  std::atomic<std::size_t> count_{0};  // of pieces
  std::mutex mutex_;                   // over all that follows; nothing is called while it is held, so that no fork waits long
  Pieces pieces_;
  std::map<std::uint64_t, Memory> memory_;  // by handle
  std::map<CUdeviceptr, Mapping> mappings_;
  std::map<Who, OutsideShare> sums_;  // of pieces
  bool changed_ = false;              // these
  std::vector<std::string> past_amem_;
  std::mutex telling_;
  std::map<Who, OutsideShare> told_;
};

// Counting must not keep a call from its caller.
template <class Count>
void Quietly(const Count& count) {
  try {
    count(Others::Get());
  } catch (const std::exception&) {
    Others::Get().Miss();
  }
}

// A call that begins something: Self::Made(others, arguments...) counts it after it was made.
template <class Self, class F, Text Name, Text Exported = Name>
struct Begins : Named<Name, Exported> {
  using Function = F;
  template <class... A>
  static CUresult Call(F* real, A... arguments) {
    const CUresult result = real(arguments...);
    if (result == CUDA_SUCCESS) Quietly([&](Others& others) { Self::Made(others, arguments...); });
    return result;
  }
};
// A call that ends something: Self::Take(others, arguments...) gives what.
template <class Self, class F, Text Name, Text Exported = Name>
struct Ends : Named<Name, Exported> {
  using Function = F;
  template <class... A>
  static CUresult Call(F* real, A... arguments) {
    Others::Taken taken;
    Quietly([&](Others& others) { taken = Self::Take(others, arguments...); });
    const CUresult result = real(arguments...);
    if (result != CUDA_SUCCESS) Quietly([&](Others& others) { others.PutBack(taken); });
    return result;
  }
};

namespace counted {

struct IpcGet : Begins<IpcGet, decltype(cuIpcGetMemHandle), "cuIpcGetMemHandle"> {
  static void Made(Others& others, CUipcMemHandle*, CUdeviceptr pointer) {
    const Extent whole = AllocationAt(pointer);
    others.Add(OutsideKind::kIpcExport, whole.address.value, whole.bytes);
  }
};
struct MemFree : Ends<MemFree, decltype(cuMemFree), "cuMemFree", "cuMemFree_v2"> {
  static Others::Taken Take(Others& others, CUdeviceptr pointer) {
    return others.Drop({OutsideKind::kIpcExport, OutsideKind::kLeft}, pointer);
  }
};
struct IpcOpen : Begins<IpcOpen, decltype(cuIpcOpenMemHandle), "cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2"> {
  static void Made(Others& others, const CUdeviceptr* pointer, const CUipcMemHandle&, unsigned) {
    others.Add(OutsideKind::kIpcImport, *pointer, AllocationAt(*pointer).bytes);
  }
  static CUresult Call(Function* real, CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) {
    return NameScopes(kName, Decode(std::as_bytes(std::span(handle.reserved))), Begins::Call(real, pointer, handle, flags));
  }
};
struct IpcClose : Ends<IpcClose, decltype(cuIpcCloseMemHandle), "cuIpcCloseMemHandle"> {
  static Others::Taken Take(Others& others, CUdeviceptr pointer) { return others.Drop({OutsideKind::kIpcImport}, pointer, 1); }
};

struct Export : Begins<Export, decltype(cuMemExportToShareableHandle), "cuMemExportToShareableHandle"> {
  static void Made(Others& others, const void*, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                   unsigned long long) {
    others.AddHandle(OutsideKind::kHandleExport, handle);
  }
};
struct Import : Begins<Import, decltype(cuMemImportFromShareableHandle), "cuMemImportFromShareableHandle"> {
  static void Made(Others& others, const CUmemGenericAllocationHandle* handle, const void*, CUmemAllocationHandleType) {
    others.Refer(*handle);
    others.AddHandle(OutsideKind::kHandleImport, *handle);
  }
  static CUresult Call(Function* real, CUmemGenericAllocationHandle* handle, void* shareable, CUmemAllocationHandleType type) {
    return NameScopes(kName, TokenIn(shareable, type), Begins::Call(real, handle, shareable, type));
  }
};
struct MulticastCreate : Begins<MulticastCreate, decltype(cuMulticastCreate), "cuMulticastCreate"> {
  static void Made(Others& others, const CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp*) {
    others.Refer(*handle);
    others.AddHandle(OutsideKind::kMulticast, *handle);
  }
};
struct Retain : Begins<Retain, decltype(cuMemRetainAllocationHandle), "cuMemRetainAllocationHandle"> {
  static void Made(Others& others, const CUmemGenericAllocationHandle* handle, const void*) { others.Refer(*handle); }
};
struct Release : Ends<Release, decltype(cuMemRelease), "cuMemRelease"> {
  static Others::Taken Take(Others& others, CUmemGenericAllocationHandle handle) { return others.Release(handle); }
};
struct Map : Begins<Map, decltype(cuMemMap), "cuMemMap"> {
  static void Made(Others& others, CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                   unsigned long long) {
    others.Map(address, bytes, handle);
  }
};
struct Unmap : Ends<Unmap, decltype(cuMemUnmap), "cuMemUnmap"> {
  static Others::Taken Take(Others& others, CUdeviceptr address, size_t bytes) { return others.Unmap(address, bytes); }
};

struct PoolExport : Begins<PoolExport, decltype(cuMemPoolExportToShareableHandle), "cuMemPoolExportToShareableHandle"> {
  static void Made(Others& others, const void*, CUmemoryPool pool, CUmemAllocationHandleType, unsigned long long) {
    others.Add(OutsideKind::kPoolExport, KeyOf(pool), 0);
  }
};
struct PoolImport : Begins<PoolImport, decltype(cuMemPoolImportFromShareableHandle), "cuMemPoolImportFromShareableHandle"> {
  static void Made(Others& others, const CUmemoryPool* pool, const void*, CUmemAllocationHandleType, unsigned long long) {
    others.Add(OutsideKind::kPoolImport, KeyOf(*pool), 0);
  }
};
struct PoolDestroy : Ends<PoolDestroy, decltype(cuMemPoolDestroy), "cuMemPoolDestroy"> {
  static Others::Taken Take(Others& others, CUmemoryPool pool) {
    return others.Drop({OutsideKind::kPoolExport, OutsideKind::kPoolImport}, KeyOf(pool));
  }
};

std::span<const replacements::Replacement> Table() {
  return replacements::Table<IpcGet, MemFree, IpcOpen, IpcClose, Export, Import, MulticastCreate, Retain, Release, Map, Unmap,
                             PoolExport, PoolImport, PoolDestroy>();
}

}  // namespace counted
// With AMEM_SCOPE=all: private memory that is no tag's, by the function that made it.
namespace left {

struct Managed : Begins<Managed, decltype(cuMemAllocManaged), "cuMemAllocManaged"> {
  static void Made(Others& others, const CUdeviceptr* pointer, size_t bytes, unsigned) {
    others.AddLeft(kName, *pointer, bytes);
  }
};
struct Async : Begins<Async, decltype(cuMemAllocAsync), "cuMemAllocAsync"> {
  static void Made(Others& others, const CUdeviceptr* pointer, size_t bytes, CUstream) {
    others.AddLeft(kName, *pointer, bytes);
  }
};
struct FromPool : Begins<FromPool, decltype(cuMemAllocFromPoolAsync), "cuMemAllocFromPoolAsync"> {
  static void Made(Others& others, const CUdeviceptr* pointer, size_t bytes, CUmemoryPool, CUstream) {
    others.AddLeft(kName, *pointer, bytes);
  }
};
struct FreeAsync : Ends<FreeAsync, decltype(cuMemFreeAsync), "cuMemFreeAsync"> {
  static Others::Taken Take(Others& others, CUdeviceptr pointer, CUstream) {
    return others.Drop({OutsideKind::kLeft}, pointer);
  }
};
template <Text Name, Text Exported, class F>
struct ArrayMade : Begins<ArrayMade<Name, Exported, F>, F, Name, Exported> {
  static void Made(Others& others, const auto* array, const auto&...) { others.AddLeft(Name.data, KeyOf(*array), 0); }
};
template <Text Name, class F>
struct ArrayGone : Ends<ArrayGone<Name, F>, F, Name> {
  static Others::Taken Take(Others& others, const auto& array) { return others.Drop({OutsideKind::kLeft}, KeyOf(array)); }
};
struct Create : Begins<Create, decltype(cuMemCreate), "cuMemCreate"> {
  static void Made(Others& others, const CUmemGenericAllocationHandle* handle, size_t bytes,
                   const CUmemAllocationProp* properties, unsigned long long) {
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return;
    others.Refer(*handle);
    others.AddLeft(kName, *handle, bytes);
  }
  static CUresult Call(Function* real, Handle* handle, size_t bytes, const CUmemAllocationProp* properties,
                       unsigned long long flags) {
    return CreateShared(handle, bytes, properties, flags) ? CUDA_SUCCESS : Begins::Call(real, handle, bytes, properties, flags);
  }
};

std::span<const replacements::Replacement> Table() {
  return replacements::Table<Managed, Async, FromPool, FreeAsync, Create,
                             ArrayMade<"cuArrayCreate", "cuArrayCreate_v2", decltype(cuArrayCreate)>,
                             ArrayMade<"cuArray3DCreate", "cuArray3DCreate_v2", decltype(cuArray3DCreate)>,
                             ArrayMade<"cuMipmappedArrayCreate", "cuMipmappedArrayCreate", decltype(cuMipmappedArrayCreate)>,
                             ArrayGone<"cuArrayDestroy", decltype(cuArrayDestroy)>,
                             ArrayGone<"cuMipmappedArrayDestroy", decltype(cuMipmappedArrayDestroy)>>();
}

}  // namespace left
// With AMEM_SCOPE=shared or all: what is a tag's (program.cpp) has handles that carry tokens, and who opens one has the memory
// under the same tag, so that all pause it together. What is not under a tag is only counted.
namespace shared {

// Null: there is none, and the driver answers.
Session* TheSession() {
  const auto session = Runtime::Get().ForPools();
  return session ? *session : nullptr;
}

struct IpcGet : Named<"cuIpcGetMemHandle"> {
  static CUresult Call(CUresult (*real)(CUipcMemHandle*, CUdeviceptr), CUipcMemHandle* handle, CUdeviceptr address) {
    Session* const session = Runtime::Get().started();
    const auto token = session == nullptr ? Status{Code::kNotFound, "no session"} : session->ExportPart(Address{address});
    if (handle == nullptr || token.status().code() == Code::kNotFound) return counted::IpcGet::Call(real, handle, address);
    if (!token) return ToDriver(kName, token.status());
    std::memcpy(handle->reserved, token->data(), token->size());
    return CUDA_SUCCESS;
  }
};
struct IpcOpen : Named<"cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr*, CUipcMemHandle, unsigned), CUdeviceptr* address, CUipcMemHandle handle,
                       unsigned flags) {
    const auto opened = Open(handle);
    if (address == nullptr || opened.status().code() == Code::kNotFound)
      return counted::IpcOpen::Call(real, address, handle, flags);
    if (!opened) return ToDriver(kName, opened.status());
    *address = opened->value;
    return CUDA_SUCCESS;
  }
  static Result<Address> Open(const CUipcMemHandle& handle) {
    Session* const session = TheSession();
    if (session == nullptr) return Status{Code::kNotFound, "no session"};
    AMEM_ASSIGN(const auto device, Runtime::Get().CurrentDevice());
    return session->LegacyImport(std::as_bytes(std::span(handle.reserved)), device, Origin(), true);
  }
};
struct IpcClose : Named<"cuIpcCloseMemHandle"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr), CUdeviceptr address) {
    Session* const session = Runtime::Get().started();
    const Status closed = session == nullptr ? Status{Code::kNotFound, "no session"} : session->LegacyClose(Address{address});
    return closed.code() == Code::kNotFound ? counted::IpcClose::Call(real, address) : ToDriver(kName, closed);
  }
};

}  // namespace shared
}  // namespace

const replacements::Tables& CountingTables() {
  static const std::array all = {GetProcAddressReplacements(replacements::Caller::kOther), counted::Table()};
  static const replacements::Tables tables(all);
  return tables;
}

const replacements::Tables& WiderTables(LibraryScope scope) {
  constexpr std::size_t kOfAll = 2;  // the first tables
  static const std::array all = {
      ProgramReplacements(), left::Table(),
      TaggedReplacements(),  replacements::Table<shared::IpcGet, shared::IpcOpen, shared::IpcClose>(),
      HandleReplacements(),  BindReplacements(),
      VerbsReplacements(),   GetProcAddressReplacements(replacements::Caller::kOther),
      counted::Table()};
  static const replacements::Tables of_all(all), of_shared(all.data() + kOfAll, all.size() - kOfAll);
  return scope == LibraryScope::kAll ? of_all : of_shared;
}

CUresult FreeCounted(CUresult (*real)(CUdeviceptr), CUdeviceptr address) { return counted::MemFree::Call(real, address); }

void CountLeft(const char* function, std::uint64_t key, Bytes bytes) {
  Quietly([&](Others& others) { others.AddLeft(function, key, bytes); });
}

CUresult ExportCounted(decltype(cuMemExportToShareableHandle)* real, void* shareable, Handle handle,
                       CUmemAllocationHandleType type, unsigned long long flags) {
  return counted::Export::Call(real, shareable, handle, type, flags);
}
CUresult ImportCounted(decltype(cuMemImportFromShareableHandle)* real, Handle* handle, void* shareable,
                       CUmemAllocationHandleType type) {
  return counted::Import::Call(real, handle, shareable, type);
}
CUresult RetainCounted(decltype(cuMemRetainAllocationHandle)* real, Handle* handle, void* address) {
  return counted::Retain::Call(real, handle, address);
}
CUresult ReleaseCounted(decltype(cuMemRelease)* real, Handle handle) { return counted::Release::Call(real, handle); }
CUresult MapCounted(decltype(cuMemMap)* real, CUdeviceptr at, size_t bytes, size_t offset, Handle handle,
                    unsigned long long flags) {
  return counted::Map::Call(real, at, bytes, offset, handle, flags);
}
CUresult UnmapCounted(decltype(cuMemUnmap)* real, CUdeviceptr at, size_t bytes) {
  return counted::Unmap::Call(real, at, bytes);
}

void TellOfOthers(Session& session) {
  OpenProgram(session);
  Others::Get().LookForThosePastAmem();
  Others::Get().Tell(session);
}

}  // namespace amem::intercept
