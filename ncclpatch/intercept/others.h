// What other libraries of the process allocate, what they share with other processes past AMem, what they hold of AMem's
// memory, and what AMEM_SCOPE=all leaves to the driver. Each call past AMem is made as it is; what it begins and ends is
// counted for the journal (SharedOutside), so that a freeze can refuse by name what the driver could not restore, and a pause's
// leftovers have names.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ncclpatch/intercept/registrations.h"
#include "ncclpatch/runtime/options.h"
#include "replay/peers/token.h"

namespace amem::intercept {

// For replacements::Install: what other libraries get with AMEM_SCOPE=nccl. All calls are made as they are, and counted.
const replacements::Tables& CountingTables();
// Of these, the calls by which a library gets hold of memory, gives it up, or finds such calls. From the first tag on they are
// replaced in other libraries' import tables in every scope, because memory that somebody holds must not move.
const replacements::Tables& GuardTables();
void Guard();  // hook::ReachOthers with these
// The same with AMEM_SCOPE=shared: what a library that imports functions of cudaIpc gets from cudaMalloc belongs to a tag named
// after the library. With AMEM_SCOPE=all the memory of every library belongs to the tag `program`.
const replacements::Tables& WiderTables(LibraryScope scope);
void Widen(LibraryScope scope);  // installs them

// Tells the session what other libraries share (SharedOutside), and which of them share by calls that AMem does not see. For
// Runtime::Above. Without `wait` only the first, and only if that can be done soon.
void JournalOthers(Session& session, bool wait = true);

// By these a library begins to share.
inline constexpr std::array kSharing = {"cuIpcGetMemHandle",
                                        "cuIpcOpenMemHandle",
                                        "cuIpcOpenMemHandle_v2",
                                        "cuMemExportToShareableHandle",
                                        "cuMemImportFromShareableHandle",
                                        "cuMulticastCreate",
                                        "cuMemPoolExportToShareableHandle",
                                        "cuMemPoolImportFromShareableHandle"};

// program.cpp: memory of tags; with AMEM_SCOPE=all also the second table.
std::span<const replacements::Replacement> TaggedReplacements();
std::span<const replacements::Replacement> ProgramReplacements();
inline constexpr const char* kProgram = "program";  // the tag of everything, with AMEM_SCOPE=all
bool TakesAll();                                    // whether that is so
void OpenProgram(Session& session);
bool IsTagsPart(CUdeviceptr address);  // that it is memory of a tag's as cuMemAlloc gives it
void ContextEnded(CUcontext context);  // what is known of its captures and memory ends with it

// graphs.cpp: with AMEM_SCOPE=all.
std::span<const replacements::Replacement> GraphsOfOthers();

// memory.cpp: handles of cuMemCreate, which are a tag's; private ones with AMEM_SCOPE=all.
std::span<const replacements::Replacement> HandleReplacements();

using Handle = CUmemGenericAllocationHandle;

// All that is counted now: pieces, each by its address, handle or pool. Memory behind a handle is shared until the last
// reference and the last mapping that this process has of it are gone.
class Outside {
 public:
  using Who = std::pair<std::string, OutsideKind>;
  struct Piece {
    std::string library;
    Bytes bytes = 0;
    CUcontext context = nullptr;  // goes with it; null: with none
    std::int64_t uses = 1;        // what was opened twice must be closed twice
  };
  using Pieces = std::map<std::pair<std::uint64_t, OutsideKind>, Piece>;
  struct Memory {
    std::int64_t references = 1;  // by create, import and retain; the first was made before it was seen here
    std::int64_t mappings = 0;
    Bytes bytes = 0;
    Registrations::Held held;  // AMem's memory that a library has retained
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
    std::vector<Registrations::Held> held;  // whose last reference and mapping end
  };

  void Add(OutsideKind kind, std::uint64_t key, Bytes bytes, std::string by = CallingLibrary()) {
    Change([&, piece = Piece{std::move(by), bytes, CurrentContext()}] { AddPiece({key, kind}, piece); });
  }
  void AddHandle(OutsideKind kind, Handle handle, Bytes bytes = 0, std::string by = CallingLibrary()) {
    Change([&, piece = Piece{std::move(by)}]() mutable {
      piece.bytes = std::max(bytes, memory_[handle].bytes);
      AddPiece({handle, kind}, piece);
    });
  }
  void Refer(Handle handle) {
    const std::lock_guard lock(mutex_);
    if (const auto [at, fresh] = memory_.try_emplace(handle); !fresh) ++at->second.references;
  }
  // What Refer has counted is AMem's memory, which stays until the library has let go of it: all of this process's references
  // and mappings count for the first library that retained it.
  void Hold(Handle handle, const Extent& part, const std::string& library) {
    const std::lock_guard lock(mutex_);
    auto* const memory = FindIn(memory_, handle);
    if (memory == nullptr || !memory->held.parts.empty()) return;
    if (Registrations::Note(part, "cuMemRetainAllocationHandle", library)) memory->held = {{part}, library};
  }
  void Map(CUdeviceptr address, Bytes bytes, Handle handle) {
    Change([&] {
      mappings_[address] = {bytes, handle};
      Memory& memory = memory_[handle];
      ++memory.mappings;
      if (std::exchange(memory.bytes, bytes) == bytes) return;  // a handle is mapped whole
      for (auto at = First(handle); at != pieces_.end() && at->first.first == handle; ++at) {
        Count(*at, -1);
        at->second.bytes = bytes;
        Count(*at, 1);
      }
    });
  }
  // `uses`: at most so many; what was exported is shared no more after one free.
  Taken Drop(std::uint64_t key, std::int64_t uses = kAll) {
    Taken taken;
    if (count_.load(std::memory_order_relaxed) != 0) Change([&] { TakeAll(key, uses, taken); });
    return taken;
  }
  Taken DropOf(CUcontext context) {
    Taken taken;
    Change([&] {
      for (auto at = pieces_.begin(); at != pieces_.end();)
        if (const auto piece = at++; context != nullptr && piece->second.context == context) TakePiece(piece, kAll, taken);
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
  Taken Release(Handle handle) {
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

  // Counts, or notes that something could not be counted: that must not keep a call from its caller.
  static void Quietly(const auto& count) {
    try {
      count(Forever<Outside>());
    } catch (const std::exception&) {
      Forever<Outside>().missed_.store(true);
    }
  }
  void FindLibrariesPastAmem();
  // The last that is journaled is the latest. Without `wait` nothing is, where a lock cannot be had soon.
  void JournalChanges(Session& session, bool wait = true);
  std::map<Who, OutsideShare> Sums();

 private:
  static constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();
  friend Outside& Forever<Outside>();
  Outside();

  template <class Make>
  void Change(Make&& make) {
    {
      const std::lock_guard lock(mutex_);
      changed_ = false;
      make();
      count_.store(pieces_.size());
      if (!changed_) return;
    }
    if (Session* session = Runtime::Get().started()) JournalChanges(*session);
  }
  Pieces::iterator First(std::uint64_t key) { return pieces_.lower_bound({key, OutsideKind{}}); }
  void Count(const Pieces::value_type& piece, int sign) {
    const Who who{piece.second.library, piece.first.second};
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
    taken.pieces.emplace_back(*at);
    taken.pieces.back().second.uses = uses = std::min(uses, at->second.uses);
    if ((at->second.uses -= uses) > 0) return;
    Count(*at, -1);
    pieces_.erase(at);
  }
  void TakeAll(std::uint64_t key, std::int64_t uses, Taken& taken) {
    for (auto at = First(key); at != pieces_.end() && at->first.first == key;) TakePiece(at++, uses, taken);
  }
  void LetGo(std::uint64_t handle, int references, int mappings, Taken& taken) {
    const auto found = memory_.find(handle);
    if (found == memory_.end()) return;
    taken.memory.emplace_back(*found);
    found->second.references -= references;
    found->second.mappings -= mappings;
    if (found->second.references > 0 || found->second.mappings > 0) return;
    if (!found->second.held.parts.empty()) taken.held.push_back(found->second.held);
    memory_.erase(found);
    TakeAll(handle, kAll, taken);
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
  std::uint64_t surveyed_at_ = std::numeric_limits<std::uint64_t>::max();  // hook::ImportCount
  std::mutex journaling_;
  std::map<Who, OutsideShare> journaled_;
};

// A call that begins something: made(outside, arguments...) counts it after it was made.
template <auto made>
inline constexpr auto kBegun = [](CUresult result, auto... arguments) {
  if (result == CUDA_SUCCESS) Outside::Quietly([&](Outside& outside) { made(outside, arguments...); });
};
// A call that ends something: take(outside, arguments...) gives what.
template <auto take, class F, Text Name, Text Exported = Name>
struct Ends : Named<Name, Exported> {
  using Function = F;
  template <class... A>
  static CUresult Call(F* real, A... arguments) {
    Outside::Taken taken;
    std::vector<Extent> held;
    Outside::Quietly([&](Outside& outside) {
      taken = take(outside, arguments...);
      for (const Registrations::Held& one : taken.held) held.insert(held.end(), one.parts.begin(), one.parts.end());
    });
    const Still still = HoldStill(held);
    const CUresult result = real(arguments...);
    Outside::Quietly([&](Outside& outside) {
      if (result != CUDA_SUCCESS) return outside.PutBack(taken);
      for (const Registrations::Held& one : taken.held) Registrations::Forget(one.parts, one.library);
    });
    return result;
  }
};
#define AMEM_BEGINS(made, name) Then<kBegun<made>, decltype(name), #name, AMEM_TEXT(name)>
#define AMEM_ENDS(take, name) Ends<take, decltype(name), #name, AMEM_TEXT(name)>

// Says which scopes differ if the driver could not open a token; gives `result`.
CUresult NameScopes(const char* call, const Result<Token>& token, CUresult result);
Result<Token> TokenIn(const void* shareable, CUmemAllocationHandleType type);  // kNotFound: no token

inline std::uint64_t KeyOf(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }
inline std::uint64_t KeyOf(CUdeviceptr pointer) { return pointer; }

// The calls on memory that is not a tag's.
namespace counted {

inline constexpr auto kFreed = [](Outside& outside, const auto& what, auto...) { return outside.Drop(KeyOf(what)); };
inline constexpr auto kExported = [](Outside& outside, const void*, Handle handle, auto...) {
  outside.AddHandle(OutsideKind::kHandleExport, handle);
};
template <OutsideKind kind>
inline constexpr auto kGot = [](Outside& outside, const Handle* handle, auto...) {
  outside.Refer(*handle);
  outside.AddHandle(kind, *handle);
};
inline constexpr auto kRetained = [](Outside& outside, const Handle* handle, auto...) { outside.Refer(*handle); };
inline constexpr auto kReleased = [](Outside& outside, Handle handle) { return outside.Release(handle); };
inline constexpr auto kMapped = [](Outside& outside, CUdeviceptr address, size_t bytes, size_t, Handle handle, auto) {
  outside.Map(address, bytes, handle);
};
inline constexpr auto kUnmapped = [](Outside& outside, CUdeviceptr address, size_t bytes) {
  return outside.Unmap(address, bytes);
};

using MemFree = AMEM_ENDS(kFreed, cuMemFree);
// Whoever opens what was exported is never known, so AMem's memory stays from then on.
struct Export : AMEM_BEGINS(kExported, cuMemExportToShareableHandle) {
  static CUresult Call(Function* real, void* shareable, Handle handle, CUmemAllocationHandleType type,
                       unsigned long long flags) {
    const HandingOut out(handle);
    return out.Done(Then::Call(real, shareable, handle, type, flags), type);
  }
};
struct Retain : AMEM_BEGINS(kRetained, cuMemRetainAllocationHandle) {
  static CUresult Call(Function* real, Handle* handle, void* address) {
    const OfAnother caller;
    const Registering gate(kName, PartAt(address, 1));
    const CUresult result = Then::Call(real, handle, address);
    if (result != CUDA_SUCCESS || !gate.concerns()) return result;
    const Extent whole = Runtime::Get().started()->records().MappingAt(PartAt(address, 1).address);
    Outside::Quietly([&](Outside& outside) { outside.Hold(*handle, whole, CallingLibrary()); });
    return result;
  }
};
using Release = AMEM_ENDS(kReleased, cuMemRelease);
using Map = AMEM_BEGINS(kMapped, cuMemMap);
using Unmap = AMEM_ENDS(kUnmapped, cuMemUnmap);
struct Import : AMEM_BEGINS(kGot<OutsideKind::kHandleImport>, cuMemImportFromShareableHandle) {
  static CUresult Call(Function* real, Handle* handle, void* shareable, CUmemAllocationHandleType type) {
    return NameScopes(kName, TokenIn(shareable, type), Then::Call(real, handle, shareable, type));
  }
};

}  // namespace counted
}  // namespace amem::intercept
