// What other libraries allocate with AMEM_SCOPE=shared or all: memory of a tag, which answers as cudaMalloc's does. What is not
// a tag's is only counted.
#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ncclpatch/intercept/others.h"

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

// Memory of a context that the program made goes with it, so that it stays the driver's.
Result<Address> Allocate(std::size_t bytes) {
  const bool all = TakesAll();
  const std::string tag = all ? kProgram : TagOfCaller();
  const auto session = tag.empty() ? Result<Session*>(nullptr) : Runtime::Get().ForPools();
  if (!session || *session == nullptr) return Status{Code::kNotFound, "not a tag's"};
  AMEM_ASSIGN(const auto device, Runtime::Get().CurrentDevice());
  if (all && CurrentContext() != PrimaryContext(device)) return Status{Code::kUnsupported, "not of the primary context"};
  AMEM_ASSIGN(const auto pool, all ? Program(**session) : (*session)->pools().Open(tag, PoolPolicy::kPreserve));
  return (*session)->pools().Allocate(pool, bytes, device);
}

// A stock job never fails because a tag has no room, or is paused: then the driver allocates.
CUresult AllocateOr(const char* call, CUdeviceptr* address, std::size_t bytes, const auto& pass) {
  const auto allocated = address == nullptr || bytes == 0 ? Status{Code::kInvalid, ""} : Allocate(bytes);
  if (allocated) return *address = allocated->value, CUDA_SUCCESS;
  const CUresult result = pass();
  if (result == CUDA_SUCCESS && TakesAll())
    Outside::Quietly([&](Outside& outside) { outside.Add(OutsideKind::kLeft, *address, bytes, call); });
  return result;
}

Result<Session::TagPart> PartAt(CUdeviceptr address) {
  Session* const session = Runtime::Get().started();
  if (session == nullptr || !session->HasTags()) return Status{Code::kNotFound, ""};
  return session->PartOfTag(Address{address});
}

// Streams that are being captured. To wait for a device would break their captures, so what is freed meanwhile is given back by
// a later call.
class Captures {
 public:
  void Begin(CUstream stream) {
    Change([&] { streams_.insert(stream); });
  }
  void End(CUstream stream) {
    if (any_.load()) Change([&] { streams_.erase(stream); });
  }
  // False: no stream is being captured.
  bool Defer(CUdeviceptr address) {
    bool deferred = false;
    if (any_.load())
      Change([&] {
        if (deferred = !streams_.empty(); deferred) freed_.push_back(address);
      });
    return deferred;
  }
  std::vector<CUdeviceptr> TakeFreed() {  // nothing while one is
    std::vector<CUdeviceptr> freed;
    if (any_.load())
      Change([&] {
        if (streams_.empty()) freed.swap(freed_);
      });
    return freed;
  }

 private:
  void Change(const auto& make) {
    const std::lock_guard lock(mutex_);
    make();
    any_.store(!streams_.empty() || !freed_.empty());
  }
  std::atomic<bool> any_{false};  // captures, or what waits for their end
  std::mutex mutex_;
  std::set<CUstream> streams_;
  std::vector<CUdeviceptr> freed_;
};

// As the driver's free, waits for all that may use the memory.
Status FreePart(const Session::TagPart& part) {
  if (Forever<Captures>().Defer(part.address.value)) return {};
  static const auto wait = AMEM_DRIVER(cuCtxSynchronize);
  const CUcontext context = PrimaryContext(part.device);
  const CUresult result = context == nullptr || context == CurrentContext() ? wait() : InContext(context, wait);
  if (result != CUDA_SUCCESS) return {Code::kDriver, "wait for the device", result};  // of an earlier kernel, say
  return Runtime::Get().started()->pools().Free(part.address, std::nullopt);
}
void FreeDeferred() {
  for (const CUdeviceptr address : Forever<Captures>().TakeFreed())
    if (const auto part = PartAt(address)) static_cast<void>(FreePart(*part));
}

struct MemAlloc : Named<"cuMemAlloc", "cuMemAlloc_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr*, size_t), CUdeviceptr* address, size_t bytes) {
    FreeDeferred();
    return AllocateOr(kName, address, bytes, [&] { return real(address, bytes); });
  }
};
struct MemAllocPitch : Named<"cuMemAllocPitch", "cuMemAllocPitch_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr*, size_t*, size_t, size_t, unsigned), CUdeviceptr* address, size_t* pitch,
                       size_t width, size_t height, unsigned element) {
    constexpr std::size_t kRow = 512, kMost = std::numeric_limits<std::size_t>::max() / 2;
    const bool valid = pitch != nullptr && width != 0 && width < kMost && (element == 4 || element == 8 || element == 16);
    const std::size_t row = valid ? (width + kRow - 1) / kRow * kRow : 0;
    const std::size_t bytes = valid && height < kMost / row ? row * height : 0;
    FreeDeferred();
    bool passed = false;
    const CUresult result = AllocateOr(kName, address, bytes, [&] {
      passed = true;
      return real(address, pitch, width, height, element);
    });
    if (!passed) *pitch = row;
    return result;
  }
};
struct MemFree : Named<"cuMemFree", "cuMemFree_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr), CUdeviceptr address) {
    FreeDeferred();
    const auto part = PartAt(address);
    return part && part->address.value == address ? ToDriver(kName, FreePart(*part)) : counted::MemFree::Call(real, address);
  }
};

// A part of a tag answers as memory of cudaMalloc does, also while it is paused: its own range, and not its chunk's.
struct AddressRange : Named<"cuMemGetAddressRange", "cuMemGetAddressRange_v2"> {
  static CUresult Call(CUresult (*real)(CUdeviceptr*, size_t*, CUdeviceptr), CUdeviceptr* base, size_t* bytes,
                       CUdeviceptr address) {
    const auto part = PartAt(address);
    if (!part) return real(base, bytes, address);
    if (base != nullptr) *base = part->address.value;
    if (bytes != nullptr) *bytes = part->bytes;
    return CUDA_SUCCESS;
  }
};

// `asked`: the driver has answered, so that the value has the width that it wrote.
bool Answer(const Session::TagPart& part, CUpointer_attribute attribute, CUdeviceptr pointer, bool asked, void* data) {
  if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) return SetTo(data, PrimaryContext(part.device));
  if (attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) return asked && SetTo<std::uint8_t>(data, 1);
  if (attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES) return asked && SetTo<std::uint8_t>(data, 0);
  return AnswerPointer(attribute, pointer, part.device, {part.address, part.bytes}, data);
}
struct PointerAttribute : Named<"cuPointerGetAttribute"> {
  static CUresult Call(CUresult (*real)(void*, CUpointer_attribute, CUdeviceptr), void* data, CUpointer_attribute attribute,
                       CUdeviceptr pointer) {
    const CUresult result = real(data, attribute, pointer);
    const auto part = data == nullptr ? Status{Code::kInvalid, ""} : PartAt(pointer);
    return part && Answer(*part, attribute, pointer, result == CUDA_SUCCESS, data) ? CUDA_SUCCESS : result;
  }
};
// Of memory that is not there the driver says nothing, and succeeds.
constexpr auto kAttributesGot = [](CUresult result, unsigned count, const CUpointer_attribute* attributes, void** data,
                                   CUdeviceptr pointer) {
  const auto part = result != CUDA_SUCCESS ? Status{Code::kInvalid, ""} : PartAt(pointer);
  for (unsigned i = 0; part && i < count; ++i) Answer(*part, attributes[i], pointer, true, data[i]);
};

// What the program's chunks have free it can allocate, as free memory of the driver's.
constexpr auto kInfoGot = [](CUresult result, size_t* free, const size_t* total) {
  Session* const session = Runtime::Get().started();
  const auto device = Runtime::Get().CurrentDevice();
  if (result != CUDA_SUCCESS || session == nullptr || !device) return;
  if (const auto pool = Program(*session)) *free = std::min(*total, *free + session->pools().Unused(*pool, *device));
};
// cudaMalloc memory is accessible to every device that peer access was enabled on.
constexpr auto kPeerEnabled = [](CUresult result, auto...) {
  const bool enabled = result == CUDA_SUCCESS || result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  const auto device = Runtime::Get().CurrentDevice();
  const auto session = enabled && device ? Runtime::Get().ForPools() : Result<Session*>(nullptr);
  if (session && *session != nullptr) (*session)->pools().OpenTo(*device);
};

// A begin may fail because the stream is being captured already, and an end because another thread has to call it.
bool IsCaptured(CUstream stream) {
  static const auto ask = AMEM_DRIVER(cuStreamIsCapturing);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return ask != nullptr && ask(stream, &status) == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

template <Text Name, Text Exported, class F>
struct BeginsCapture : Named<Name, Exported> {
  using Function = F;
  template <class... A>
  static CUresult Call(F* real, CUstream stream, A... arguments) {
    Forever<Captures>().Begin(stream);
    const CUresult result = real(stream, arguments...);
    if (result != CUDA_SUCCESS && !IsCaptured(stream)) Forever<Captures>().End(stream);
    return result;
  }
};
using BeginCapture = BeginsCapture<"cuStreamBeginCapture", "cuStreamBeginCapture_v2", decltype(cuStreamBeginCapture)>;
using BeginCaptureToGraph =
    BeginsCapture<"cuStreamBeginCaptureToGraph", "cuStreamBeginCaptureToGraph",
                  CUresult(CUstream, CUgraph, const CUgraphNode*, const CUgraphEdgeData*, size_t, CUstreamCaptureMode)>;
constexpr auto kCaptureEnded = [](CUresult result, CUstream stream, auto) {
  if (result == CUDA_SUCCESS || !IsCaptured(stream)) Forever<Captures>().End(stream);
};
struct StreamDestroy : Named<"cuStreamDestroy", "cuStreamDestroy_v2"> {
  static CUresult Call(CUresult (*real)(CUstream), CUstream stream) {
    Forever<Captures>().End(stream);
    return real(stream);
  }
};

}  // namespace program
}  // namespace

std::span<const replacements::Replacement> TaggedReplacements() {
  using namespace program;
  return replacements::Table<program::MemAlloc, program::MemFree, AddressRange, PointerAttribute,
                             AMEM_THEN(kAttributesGot, cuPointerGetAttributes), BeginCapture, BeginCaptureToGraph,
                             AMEM_THEN(kCaptureEnded, cuStreamEndCapture), StreamDestroy>();
}
std::span<const replacements::Replacement> ProgramReplacements() {
  using namespace program;
  return replacements::Table<MemAllocPitch, AMEM_THEN(kInfoGot, cuMemGetInfo),
                             AMEM_THEN(kPeerEnabled, cuCtxEnablePeerAccess)>();
}

bool TakesAll() { return program::g_all.load(std::memory_order_relaxed); }

void Widen(LibraryScope scope) {
  program::g_all.store(scope == LibraryScope::kAll);
  replacements::Install(WiderTables(scope), replacements::Caller::kOther);
}

void OpenProgram(Session& session) {
  if (TakesAll()) static_cast<void>(program::Program(session));
}

}  // namespace amem::intercept
