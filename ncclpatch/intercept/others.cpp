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
#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

// By these a library begins to share.
constexpr std::array kSharing = {"cuIpcGetMemHandle",
                                 "cuIpcOpenMemHandle",
                                 "cuIpcOpenMemHandle_v2",
                                 "cuMemExportToShareableHandle",
                                 "cuMemImportFromShareableHandle",
                                 "cuMulticastCreate",
                                 "cuMemPoolExportToShareableHandle",
                                 "cuMemPoolImportFromShareableHandle"};

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
  Taken Drop(OutsideKind kind, std::uint64_t key, std::int64_t uses = std::numeric_limits<std::int64_t>::max()) {
    Taken taken;
    if (count_.load(std::memory_order_relaxed) == 0) return taken;
    Change([&] {
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

  // Something could not be counted.
  void Miss() { missed_.store(true); }

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
  static constexpr std::array kOfHandles = {OutsideKind::kHandleExport, OutsideKind::kHandleImport, OutsideKind::kMulticast};

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
    changed_ = true;
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
  static Others::Taken Take(Others& others, CUdeviceptr pointer) { return others.Drop(OutsideKind::kIpcExport, pointer); }
};
struct IpcOpen : Begins<IpcOpen, decltype(cuIpcOpenMemHandle), "cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2"> {
  static void Made(Others& others, const CUdeviceptr* pointer, const CUipcMemHandle&, unsigned) {
    others.Add(OutsideKind::kIpcImport, *pointer, AllocationAt(*pointer).bytes);
  }
};
struct IpcClose : Ends<IpcClose, decltype(cuIpcCloseMemHandle), "cuIpcCloseMemHandle"> {
  static Others::Taken Take(Others& others, CUdeviceptr pointer) { return others.Drop(OutsideKind::kIpcImport, pointer, 1); }
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
    Others::Taken taken = others.Drop(OutsideKind::kPoolExport, KeyOf(pool));
    return taken.pieces.empty() ? others.Drop(OutsideKind::kPoolImport, KeyOf(pool)) : taken;
  }
};

std::span<const replacements::Replacement> Table() {
  return replacements::Table<IpcGet, MemFree, IpcOpen, IpcClose, Export, Import, MulticastCreate, Retain, Release, Map, Unmap,
                             PoolExport, PoolImport, PoolDestroy>();
}

}  // namespace counted
// With AMEM_SCOPE=shared: what a library that imports functions of cudaIpc gets from cudaMalloc is a tag's, which is called as
// the library is. Its handles carry tokens, and who opens one has the memory under the same tag, so that all pause it together.
// What is not under a tag is only counted.
namespace shared {

// "libone_shot" of libone_shot.so.1; empty: the library shares nothing. Python's ctypes imports no function of CUDA's.
std::string TagOfCaller() {
  constexpr std::array kByRuntime = {"cudaIpcGetMemHandle", "cudaIpcOpenMemHandle"};
  ElfImage image;
  if (!CallingImage(&image)) return {};
  const auto imports = [&](const char* function) { return static_cast<bool>(image.ImportSlot(function)); };
  const std::string name = FileName(image), stem = name.substr(0, name.find('.'));
  const bool shares = stem == "_ctypes" || std::ranges::any_of(kByRuntime, imports) || std::ranges::any_of(kSharing, imports);
  return shares ? stem : std::string();
}

// Null: there is none, and the driver answers.
Session* TheSession() {
  const auto session = Runtime::Get().ForPools();
  return session ? *session : nullptr;
}

Result<Address> Allocate(size_t bytes) {
  const std::string tag = TagOfCaller();
  Session* const session = tag.empty() ? nullptr : TheSession();
  if (session == nullptr) return Status{Code::kNotFound, "not a tag's"};
  AMEM_ASSIGN(const auto device, Runtime::Get().CurrentDevice());
  AMEM_ASSIGN(const auto pool, session->pools().Open(tag, PoolPolicy::kPreserve));
  return session->pools().Allocate(pool, bytes, device);
}

struct MemAlloc : Named<"cuMemAlloc", "cuMemAlloc_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr*, size_t), CUdeviceptr* address, size_t bytes) {
    if (address == nullptr || bytes == 0) return real(address, bytes);
    const auto allocated = Allocate(bytes);
    if (!allocated) return real(address, bytes);  // a stock job never fails because a tag has no room, or is paused
    *address = allocated->value;
    return CUDA_SUCCESS;
  }
};
struct MemFree : Named<"cuMemFree", "cuMemFree_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr), CUdeviceptr address) {
    Session* const session = Runtime::Get().started();
    const bool ours = session != nullptr && session->PartOfTag(Address{address}).ok();
    if (!ours) return counted::MemFree::Call(real, address);
    // As the driver does, which waits for all that may use it; only the default stream is known here.
    if (const auto wait = DriverFunction<decltype(cuCtxSynchronize)>("cuCtxSynchronize"); wait != nullptr) wait();
    return ToDriver(kName, session->pools().Free(Address{address}, nullptr));
  }
};
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
    std::array<std::byte, sizeof handle.reserved> token;
    std::memcpy(token.data(), handle.reserved, token.size());
    return session->LegacyImport(token, device, Origin(), true);
  }
};
struct IpcClose : Named<"cuIpcCloseMemHandle"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr), CUdeviceptr address) {
    Session* const session = Runtime::Get().started();
    const Status closed = session == nullptr ? Status{Code::kNotFound, "no session"} : session->LegacyClose(Address{address});
    return closed.code() == Code::kNotFound ? counted::IpcClose::Call(real, address) : ToDriver(kName, closed);
  }
};

// A part of a tag answers as memory of cudaMalloc does: its own range, and not its chunk's.
struct AddressRange : Named<"cuMemGetAddressRange", "cuMemGetAddressRange_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr*, size_t*, CUdeviceptr), CUdeviceptr* base, size_t* bytes,
                       CUdeviceptr address) {
    Session* const session = Runtime::Get().started();
    const auto part = session == nullptr ? Status{Code::kNotFound, "no session"} : session->PartOfTag(Address{address});
    if (!part) return real(base, bytes, address);
    if (base != nullptr) *base = part->address.value;
    if (bytes != nullptr) *bytes = part->bytes;
    return CUDA_SUCCESS;
  }
};
struct PointerAttribute : Named<"cuPointerGetAttribute"> {
  static CUresult Call(CUresult (*real)(void*, CUpointer_attribute, CUdeviceptr), void* data, CUpointer_attribute attribute,
                       CUdeviceptr address) {
    const bool of_range = attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR || attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE;
    Session* const session = of_range && data != nullptr ? Runtime::Get().started() : nullptr;
    const auto part = session == nullptr ? Status{Code::kNotFound, "no session"} : session->PartOfTag(Address{address});
    if (!part) return real(data, attribute, address);
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE) {
      *static_cast<size_t*>(data) = part->bytes;
    } else {
      *static_cast<CUdeviceptr*>(data) = part->address.value;
    }
    return CUDA_SUCCESS;
  }
};

}  // namespace shared
}  // namespace

const replacements::Tables& CountingTables() {
  static const std::array all = {GetProcAddressReplacements(replacements::Caller::kOther), counted::Table()};
  static const replacements::Tables tables(all);
  return tables;
}

const replacements::Tables& SharingTables() {
  static const std::array all = {replacements::Table<shared::MemAlloc, shared::MemFree, shared::IpcGet, shared::IpcOpen,
                                                     shared::IpcClose, shared::AddressRange, shared::PointerAttribute>(),
                                 GetProcAddressReplacements(replacements::Caller::kOther), counted::Table()};
  static const replacements::Tables tables(all);
  return tables;
}

void TellOfOthers(Session& session) {
  Others::Get().LookForThosePastAmem();
  Others::Get().Tell(session);
}

}  // namespace amem::intercept
