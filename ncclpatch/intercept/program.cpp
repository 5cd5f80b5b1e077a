// What other libraries allocate with AMEM_SCOPE=shared or all: memory of a tag, which answers as cudaMalloc's does. What is not
// a tag's is only counted.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "ncclpatch/intercept/others.h"
#include "ncclpatch/nccl/graphs.h"

namespace amem::intercept {
namespace {
namespace program {

constinit std::atomic<bool> g_all{false};

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

Result<PoolId> Program(Session& session) {
  static std::atomic<std::uint32_t> known{0};  // the runtime has one session at most
  if (const std::uint32_t id = known.load(std::memory_order_acquire); id != 0) return PoolId{id};
  AMEM_ASSIGN(const auto pool, session.pools().Open(kProgram, PoolPolicy::kPreserve, true));
  known.store(pool.value, std::memory_order_release);
  return pool;
}

// What is smaller stays the driver's: a driver handle of its own would take this much.
constexpr Bytes kOwnAllocation = Bytes{2} << 20;

// As AMem's own table has it.
void* Function(const char* name) {
  const auto get = hook::DriverFunction<decltype(cuGetProcAddress)>("cuGetProcAddress_v2");
  void* found = nullptr;
  CUdriverProcAddressQueryResult why{};
  return get != nullptr && get(name, &found, 12000, 0, &why) == CUDA_SUCCESS ? found : nullptr;
}

// Whether cuMemAlloc is another interposer's, which limits what the process may have, and does not see AMem's cuMemCreate. Then
// all is allocated through it, and stays.
bool IsLimited(void* alloc) {
  const auto of_driver = [](const void* function) {
    ElfImage image;
    return function == nullptr || !ElfImage::Containing(function, &image) ||
           std::string_view(image.soname()).starts_with("libcuda.so");
  };
  static std::atomic<void*> looked_at{nullptr};
  static std::atomic<bool> limited{false};
  if (looked_at.load(std::memory_order_acquire) == alloc) return limited.load(std::memory_order_relaxed);
  const void* const create = Function("cuMemCreate");
  limited.store(!of_driver(alloc) && of_driver(create));
  looked_at.store(alloc, std::memory_order_release);
  return limited.load();
}

// One byte of the driver's stands for each allocation here. It is allocated and freed by the program's own calls, so that what
// these answer is the driver's answer: without a context, while streams are captured, after an error that stays.
class Witnesses {
 public:
  static CUresult Make(CUdeviceptr* witness) {
    static const auto make = AMEM_DRIVER(cuMemAlloc);
    return make == nullptr ? CUDA_ERROR_NOT_SUPPORTED : make(witness, 1);
  }
  static CUresult Free(CUdeviceptr witness) {
    static const auto free = AMEM_DRIVER(cuMemFree);
    return free(witness);
  }
  struct Byte {
    CUdeviceptr address = 0;  // 0: there is none
    CUcontext context = nullptr;
  };
  void Put(Address memory, const Byte& byte) {
    const std::lock_guard lock(mutex_);
    all_[memory] = byte;
  }
  Byte Take(Address memory) {
    const std::lock_guard lock(mutex_);
    const auto found = all_.extract(memory);
    return found.empty() ? Byte() : found.mapped();
  }
  void EndOf(CUcontext context) {  // another may get their addresses
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [&](const auto& one) { return one.second.context == context; });
  }

 private:
  std::mutex mutex_;
  std::map<Address, Byte> all_;
};

struct Place {
  Session* session = nullptr;
  PoolId pool;
  DeviceOrdinal device;
};
// Where memory of the caller's belongs; a failure: to the driver. Memory of a context that the program made goes with it.
Result<Place> PlaceFor(Bytes bytes, void* alloc) {
  if (bytes < kOwnAllocation || bytes >= ChunkSpace::kTooMany) return Status{Code::kNotFound, "not of a size"};
  const bool all = TakesAll();
  const std::string tag = all ? kProgram : TagOfCaller();
  const auto session = tag.empty() || IsLimited(alloc) ? Result<Session*>(nullptr) : Runtime::Get().ForPools();
  if (!session || *session == nullptr) return Status{Code::kNotFound, "not a tag's"};
  AMEM_ASSIGN(const auto device, Runtime::Get().CurrentDevice());
  if (CurrentContext() != PrimaryContext(device)) return Status{Code::kUnsupported, "not of the primary context"};
  AMEM_ASSIGN(const auto pool, all ? Program(**session) : (*session)->pools().Open(tag, PoolPolicy::kPreserve, true));
  return Place{*session, pool, device};
}

void IsNotDeferred(CUdeviceptr address);  // what was freed there before is gone otherwise

// False: the driver must allocate, because the tag has no room, or is paused. A stock job never fails of that.
bool AllocateAt(const Place& place, CUdeviceptr witness, Bytes bytes, CUdeviceptr* address) {
  const auto allocated = place.session->pools().Allocate(place.pool, bytes, place.device);
  if (!allocated) return static_cast<void>(Witnesses::Free(witness)), false;
  Forever<Witnesses>().Put(*allocated, {witness, CurrentContext()});
  IsNotDeferred(allocated->value);
  *address = allocated->value;
  return true;
}

CUresult Left(const char* call, CUresult result, const CUdeviceptr* address, std::size_t bytes) {
  if (result == CUDA_SUCCESS && TakesAll())
    Outside::Quietly([&](Outside& outside) { outside.Add(OutsideKind::kLeft, *address, bytes, call); });
  return result;
}

Result<TagPart> PartAt(CUdeviceptr address) {
  Session* const session = Runtime::Get().started();
  if (session == nullptr || !session->calls().HasTags()) return Status{Code::kNotFound, ""};
  return session->records().PartOfTag(Address{address});
}
// The same, or what another process's IPC handle opened there.
Result<TagPart> SharedPartAt(CUdeviceptr address) {
  auto part = PartAt(address);
  return part || Runtime::Get().started() == nullptr ? part : Runtime::Get().started()->legacy().OpenedAt(Address{address});
}

// Captures that the program has begun. To wait for a device would break them, so that what is freed meanwhile is given back by
// a later call. Which of them go on, the driver is asked.
class Captures {
 public:
  struct Capture {
    CUcontext context = nullptr;  // that it goes with
    cuuint64_t number = 0;        // as NumberOn has it, where it was asked for
  };
  void Begin(CUstream stream) { Put(stream, {ContextOf(stream)}); }
  void Put(CUstream stream, const Capture& capture) {
    const Key key = KeyOf(stream);
    if (key.thread != 0) EndWithThread();
    Change([&] { streams_[key] = capture; });
  }
  // Of the driver, of a capture that goes on. It says it of no broken one.
  void AskForNumber(CUstream stream) {
    const cuuint64_t number = NumberOn(stream);
    Change([&] {
      if (const auto found = streams_.find(KeyOf(stream)); found != streams_.end()) found->second.number = number;
    });
  }
  std::optional<Capture> End(CUstream stream) {
    std::optional<Capture> ended;
    if (any_.load())
      Change([&] {
        if (const auto node = streams_.extract(KeyOf(stream)); !node.empty()) ended = node.mapped();
      });
    return ended;
  }
  void EndOf(CUcontext context) {
    if (any_.load()) Change([&] { std::erase_if(streams_, [&](const auto& one) { return one.second.context == context; }); });
  }
  void EndOfThread(pid_t thread) {
    if (any_.load()) Change([&] { std::erase_if(streams_, [&](const auto& one) { return one.first.thread == thread; }); });
  }
  // False: no stream is being captured.
  bool Defer(CUdeviceptr address) {
    bool deferred = false;
    if (any_.load())
      Change([&] {
        Prune();
        if (deferred = !streams_.empty(); deferred) freed_.insert(address);
      });
    return deferred;
  }
  void Taken(CUdeviceptr address) {
    if (any_.load()) Change([&] { freed_.erase(address); });
  }
  bool IsDeferred(CUdeviceptr address) {
    bool is = false;
    if (any_.load()) Change([&] { is = freed_.contains(address); });
    return is;
  }
  std::set<CUdeviceptr> TakeFreed() {  // nothing while one is
    std::set<CUdeviceptr> freed;
    if (any_.load())
      Change([&] {
        if (!freed_.empty()) Prune();
        if (streams_.empty()) freed.swap(freed_);
      });
    return freed;
  }

 private:
  struct Key {
    CUstream stream = nullptr;
    pid_t thread = 0;  // of a thread's own default stream
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  static void EndWithThread() {
    struct Ends {
      const pid_t thread = gettid();
      ~Ends() { Forever<Captures>().EndOfThread(thread); }
    };
    thread_local const Ends ends;
    static_cast<void>(ends);
  }
  static bool IsThreads(CUstream stream) { return stream == nullptr || stream == CU_STREAM_PER_THREAD; }
  static Key KeyOf(CUstream stream) { return IsThreads(stream) ? Key{nullptr, gettid()} : Key{stream, 0}; }
  static CUcontext ContextOf(CUstream stream) {
    static const auto ask = AMEM_DRIVER(cuStreamGetCtx);
    CUcontext context = nullptr;
    return IsThreads(stream) || ask == nullptr || ask(stream, &context) != CUDA_SUCCESS ? CurrentContext() : context;
  }
  // Those that ended unseen; another thread's own stream cannot be asked for.
  void Prune() {
    std::erase_if(streams_, [](const auto& one) { return one.first.thread == 0 && !IsCaptured(one.first.stream); });
  }
  void Change(const auto& make) {
    const std::lock_guard lock(mutex_);
    make();
    any_.store(!streams_.empty() || !freed_.empty());
  }

 public:
  // A begin may fail because the stream is being captured already, and an end because another thread has to call it.
  static bool IsCaptured(CUstream stream) {
    static const auto ask = AMEM_DRIVER(cuStreamIsCapturing);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return ask != nullptr && ask(IsThreads(stream) ? CU_STREAM_PER_THREAD : stream, &status) == CUDA_SUCCESS &&
           status != CU_STREAM_CAPTURE_STATUS_NONE;
  }
  // Of the capture, which no other of the process has. 0: the driver does not say it, as of one that is broken.
  static cuuint64_t NumberOn(CUstream stream) {
    using Ask = CUresult(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**, size_t*);
    static const auto ask = hook::DriverFunction<Ask>("cuStreamGetCaptureInfo_v2");
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t number = 0;
    const CUstream on = IsThreads(stream) ? CU_STREAM_PER_THREAD : stream;
    return ask != nullptr && ask(on, &status, &number, nullptr, nullptr, nullptr) == CUDA_SUCCESS &&
                   status == CU_STREAM_CAPTURE_STATUS_ACTIVE
               ? number
               : 0;
  }

 private:
  std::atomic<bool> any_{false};  // captures, or what waits for their end
  std::mutex mutex_;
  std::map<Key, Capture> streams_;
  std::set<CUdeviceptr> freed_;
};

void IsNotDeferred(CUdeviceptr address) { Forever<Captures>().Taken(address); }

// As the driver's free, waits for all that may use the memory.
CUresult WaitFor(const TagPart& part) {
  static const auto wait = AMEM_DRIVER(cuCtxSynchronize);
  const CUcontext context = PrimaryContext(part.device);
  return context == nullptr || context == CurrentContext() ? wait() : InContext(context, wait);
}
CUresult FreePart(const char* call, const TagPart& part) {
  if (Forever<Captures>().Defer(part.address.value)) return CUDA_SUCCESS;
  const CUresult waited = WaitFor(part);
  if (waited != CUDA_SUCCESS) return waited;  // of an earlier kernel, say
  return ToDriver(call, Runtime::Get().started()->pools().Free(part.address, std::nullopt));
}
void FreeDeferred(const char* call) {
  for (const CUdeviceptr address : Forever<Captures>().TakeFreed())
    if (const auto part = PartAt(address)) static_cast<void>(FreePart(call, *part));
}
// Frees the byte that stands for the memory by the program's own call; what that answers is the answer.
CUresult FreeWitness(Address memory, const auto& free) {
  const Witnesses::Byte witness = Forever<Witnesses>().Take(memory);
  const CUresult result = witness.address == 0 ? CUDA_SUCCESS : free(witness.address);
  if (result != CUDA_SUCCESS) Forever<Witnesses>().Put(memory, witness);
  return result;
}

struct MemAlloc : Named<"cuMemAlloc", "cuMemAlloc_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr*, size_t), CUdeviceptr* address, size_t bytes) {
    FreeDeferred(kName);
    const auto place = address == nullptr ? Status{Code::kInvalid, ""} : PlaceFor(bytes, reinterpret_cast<void*>(real));
    CUdeviceptr witness = 0;
    if (const CUresult refused = place ? Witnesses::Make(&witness) : CUDA_SUCCESS; refused != CUDA_SUCCESS) return refused;
    if (place && AllocateAt(*place, witness, bytes, address)) return CUDA_SUCCESS;
    return Left(kName, real(address, bytes), address, bytes);
  }
};
// How far apart the driver would put rows is asked of it, by one short row.
struct MemAllocPitch : Named<"cuMemAllocPitch", "cuMemAllocPitch_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr*, size_t*, size_t, size_t, unsigned), CUdeviceptr* address, size_t* pitch,
                       size_t width, size_t height, unsigned element) {
    constexpr std::size_t kRow = 512, kShort = 4096;
    const auto rounded = [](std::size_t bytes) { return (bytes + kRow - 1) / kRow * kRow; };
    FreeDeferred(kName);
    const bool sizes = address != nullptr && pitch != nullptr && width != 0 && width < ChunkSpace::kTooMany &&
                       height < ChunkSpace::kTooMany / rounded(width);
    const Bytes bytes = sizes ? rounded(width) * height : 0;
    const auto place = sizes ? PlaceFor(bytes, reinterpret_cast<void*>(real)) : Status{Code::kInvalid, ""};
    CUdeviceptr witness = 0;
    std::size_t row = 0;
    if (place && real(&witness, &row, std::min(width, kShort), 1, element) == CUDA_SUCCESS) {
      if (row != rounded(std::min(width, kShort)))
        static_cast<void>(Witnesses::Free(witness));
      else if (AllocateAt(*place, witness, bytes, address))
        return *pitch = rounded(width), CUDA_SUCCESS;
    }
    return Left(kName, real(address, pitch, width, height, element), address, bytes);
  }
};
struct MemFree : Named<"cuMemFree", "cuMemFree_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr), CUdeviceptr address) {
    FreeDeferred(kName);
    const auto part = PartAt(address);
    if (!part || part->address.value != address) return counted::MemFree::Call(real, address);
    if (Forever<Captures>().IsDeferred(address)) return CUDA_ERROR_INVALID_VALUE;  // it is freed already
    const CUresult freed = FreeWitness(part->address, [](CUdeviceptr witness) { return Witnesses::Free(witness); });
    return freed == CUDA_SUCCESS ? FreePart(kName, *part) : freed;
  }
};
// Also takes what cuMemAlloc gave. The driver refuses that while the stream is captured, and so it does with the byte that
// stands for it.
struct MemFreeAsync : Named<"cuMemFreeAsync"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr, CUstream), CUdeviceptr address, CUstream stream) {
    FreeDeferred(kName);
    const auto part = PartAt(address);
    if (!part || part->address.value != address) return Theirs::Call(real, address, stream);
    if (Forever<Captures>().IsDeferred(address)) return CUDA_ERROR_INVALID_VALUE;
    const CUresult freed = FreeWitness(part->address, [&](CUdeviceptr witness) { return real(witness, stream); });
    if (freed != CUDA_SUCCESS || Forever<Captures>().Defer(address)) return freed;
    return ToDriver(kName, Runtime::Get().started()->pools().Free(part->address, stream));
  }
  using Theirs = AMEM_ENDS(counted::kFreed, cuMemFreeAsync);
};

// A part of a tag answers as memory of cudaMalloc does, also while it is paused: its own range, and not its chunk's.
struct AddressRange : Named<"cuMemGetAddressRange", "cuMemGetAddressRange_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr*, size_t*, CUdeviceptr), CUdeviceptr* base, size_t* bytes,
                       CUdeviceptr address) {
    const auto part = SharedPartAt(address);
    if (!part) return real(base, bytes, address);
    if (base != nullptr) *base = part->address.value;
    if (bytes != nullptr) *bytes = part->bytes;
    return CUDA_SUCCESS;
  }
};

// `asked`: the driver has answered, so that the value has the width that it wrote.
bool Answer(const TagPart& part, CUpointer_attribute attribute, CUdeviceptr pointer, bool asked, void* data) {
  if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) return SetTo(data, PrimaryContext(part.device));
  if (attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
    return asked && SetTo<std::uint8_t>(data, part.opened ? 0 : 1);
  if (attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES) return asked && SetTo<std::uint8_t>(data, 0);
  return AnswerPointer(attribute, pointer, part.device, {part.address, part.bytes}, data);
}
struct PointerAttribute : Named<"cuPointerGetAttribute"> {
  static CUresult Call(CUresult (*real)(void*, CUpointer_attribute, CUdeviceptr), void* data, CUpointer_attribute attribute,
                       CUdeviceptr pointer) {
    const CUresult result = real(data, attribute, pointer);
    const auto part = data == nullptr ? Status{Code::kInvalid, ""} : SharedPartAt(pointer);
    return part && Answer(*part, attribute, pointer, result == CUDA_SUCCESS, data) ? CUDA_SUCCESS : result;
  }
};
// Of memory that is not there the driver says nothing, and succeeds.
constexpr auto kAttributesGot = [](CUresult result, unsigned count, const CUpointer_attribute* attributes, void** data,
                                   CUdeviceptr pointer) {
  const auto part = result != CUDA_SUCCESS ? Status{Code::kInvalid, ""} : SharedPartAt(pointer);
  for (unsigned i = 0; part && i < count; ++i) Answer(*part, attributes[i], pointer, true, data[i]);
};

// cudaMalloc memory is accessible to every device that peer access was enabled on.
constexpr auto kPeerEnabled = [](CUresult result, auto...) {
  const bool enabled = result == CUDA_SUCCESS || result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  const auto device = Runtime::Get().CurrentDevice();
  const auto session = enabled && device ? Runtime::Get().ForPools() : Result<Session*>(nullptr);
  if (session && *session != nullptr) (*session)->pools().OpenTo(*device);
};

template <Text Name, Text Exported, class F>
struct BeginsCapture : Named<Name, Exported> {
  using Function = F;
  template <class... A>
  static CUresult Call(F* real, CUstream stream, A... arguments) {
    Forever<Captures>().Begin(stream);
    const CUresult result = real(stream, arguments...);
    if (result == CUDA_SUCCESS && TakesAll()) Forever<Captures>().AskForNumber(stream);
    if (result != CUDA_SUCCESS && !Captures::IsCaptured(stream)) Forever<Captures>().End(stream);
    return result;
  }
};
using BeginCapture = BeginsCapture<"cuStreamBeginCapture", "cuStreamBeginCapture_v2", decltype(cuStreamBeginCapture)>;
using BeginCaptureToGraph =
    BeginsCapture<"cuStreamBeginCaptureToGraph", "cuStreamBeginCaptureToGraph",
                  CUresult(CUstream, CUgraph, const CUgraphNode*, const CUgraphEdgeData*, size_t, CUstreamCaptureMode)>;
struct EndCapture : Named<"cuStreamEndCapture"> {
  static CUresult Call(CUresult (*real)(CUstream, CUgraph*), CUstream stream, CUgraph* graph) {
    const bool is_followed = TakesAll() && Captures::IsCaptured(stream);
    cuuint64_t capture = is_followed ? Captures::NumberOn(stream) : 0;
    const CUresult result = real(stream, graph);
    if (result != CUDA_SUCCESS && Captures::IsCaptured(stream)) return result;
    const auto known = Forever<Captures>().End(stream);
    if (!is_followed) return result;
    if (capture == 0 && known) capture = known->number;
    const bool has_graph = result == CUDA_SUCCESS && graph != nullptr && *graph != nullptr;
    has_graph ? nccl::launches::graphs::CaptureEnded(*graph, capture) : nccl::launches::graphs::CaptureFailed(capture);
    return result;
  }
};
// Of a stream that AMem waits for in a stop. The question must not break another thread's capture.
bool IsDone(CUstream stream) {
  static const auto exchange = AMEM_DRIVER(cuThreadExchangeStreamCaptureMode);
  static const auto query = AMEM_DRIVER(cuStreamQuery);
  if (exchange == nullptr || query == nullptr || Captures::IsCaptured(stream)) return false;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  if (exchange(&mode) != CUDA_SUCCESS) return false;
  const CUresult result = query(stream);
  exchange(&mode);
  return result == CUDA_SUCCESS;
}
struct StreamDestroy : Named<"cuStreamDestroy", "cuStreamDestroy_v2"> {
  static CUresult Call(CUresult (*real)(CUstream), CUstream stream) {
    const auto capture = Forever<Captures>().End(stream);
    CUresult result = CUDA_ERROR_ILLEGAL_STATE;
    if (!nccl::launches::IsAwaited(stream)) {
      result = real(stream);
    } else {  // in a stop it waits as a launch does: AMem may be about to use the stream
      static_cast<void>(nccl::launches::Pass("cuStreamDestroy", nullptr, [&]() noexcept {
        const bool is_done = IsDone(stream);
        nccl::launches::StreamEnding ending(stream);
        result = real(stream);
        ending.Done(result == CUDA_SUCCESS, is_done);
        return result == CUDA_SUCCESS ? nccl::kSuccess : nccl::kInvalidUsage;
      }));
    }
    if (result != CUDA_SUCCESS && capture) Forever<Captures>().Put(stream, *capture);
    return result;
  }
};

}  // namespace program
}  // namespace

std::span<const replacements::Replacement> TaggedReplacements() {
  using namespace program;
  return replacements::Table<program::MemAlloc, program::MemFree, AddressRange, PointerAttribute,
                             AMEM_THEN(kAttributesGot, cuPointerGetAttributes), BeginCapture, BeginCaptureToGraph, EndCapture,
                             StreamDestroy, program::MemFreeAsync>();
}
std::span<const replacements::Replacement> ProgramReplacements() {
  using namespace program;
  return replacements::Table<MemAllocPitch, AMEM_THEN(kPeerEnabled, cuCtxEnablePeerAccess)>();
}

bool IsTagsPart(CUdeviceptr address) { return program::PartAt(address).ok(); }
void ContextEnded(CUcontext context) {
  Forever<program::Captures>().EndOf(context);
  Forever<program::Witnesses>().EndOf(context);
}

bool TakesAll() { return program::g_all.load(std::memory_order_relaxed); }

void Widen(LibraryScope scope) {
  program::g_all.store(scope == LibraryScope::kAll);
  if (scope == LibraryScope::kAll) nccl::launches::graphs::Follow();
  replacements::Install(WiderTables(scope), replacements::Caller::kOther);
}

void OpenProgram(Session& session) {
  if (TakesAll()) static_cast<void>(program::Program(session));
}

}  // namespace amem::intercept
