#include "tests/stand_ins/verbs/gpu.h"

#include <cuda.h>
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <string_view>

namespace amem::card {
namespace {

// The driver's own functions, by libc's own dlsym: a card is no library of the process, and AMem does not see what it does.
// Null: the process has no driver, and no GPU memory.
template <class Function>
Function* Find(const char* name) {
  using Dlsym = void*(void*, const char*);
  static auto* const find = reinterpret_cast<Dlsym*>(::dlvsym(::dlopen("libc.so.6", RTLD_LAZY), "dlsym", "GLIBC_2.34"));
  static void* const library = ::dlopen("libcuda.so.1", RTLD_LAZY);
  return library == nullptr || find == nullptr ? nullptr : reinterpret_cast<Function*>(find(library, name));
}
#define DRIVER(name, exported) decltype(::name)* const name = Find<decltype(::name)>(exported)

struct Driver {
  DRIVER(cuInit, "cuInit");
  DRIVER(cuPointerGetAttribute, "cuPointerGetAttribute");
  DRIVER(cuMemGetAddressRange, "cuMemGetAddressRange_v2");
  DRIVER(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle");
  DRIVER(cuMemRelease, "cuMemRelease");
  DRIVER(cuMemExportToShareableHandle, "cuMemExportToShareableHandle");
  DRIVER(cuMemAddressReserve, "cuMemAddressReserve");
  DRIVER(cuMemAddressFree, "cuMemAddressFree");
  DRIVER(cuMemMap, "cuMemMap");
  DRIVER(cuMemUnmap, "cuMemUnmap");
  DRIVER(cuMemSetAccess, "cuMemSetAccess");
  // As of CUDA 12; the header may declare a later form.
  CUresult (*const cuCtxCreate2)(CUcontext*, unsigned,
                                 CUdevice) = Find<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2");
  DRIVER(cuCtxGetCurrent, "cuCtxGetCurrent");
  DRIVER(cuCtxSetCurrent, "cuCtxSetCurrent");
  DRIVER(cuStreamCreate, "cuStreamCreate");
  DRIVER(cuStreamSynchronize, "cuStreamSynchronize");
  DRIVER(cuMemcpyAsync, "cuMemcpyAsync");
  DRIVER(cuMemHostAlloc, "cuMemHostAlloc");
  DRIVER(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  [[nodiscard]] bool usable() const { return cuThreadExchangeStreamCaptureMode != nullptr && cuInit(0) == CUDA_SUCCESS; }
};
#undef DRIVER
const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

constexpr std::size_t kBounceBytes = std::size_t{4} << 20;
constexpr int kMostDevices = 64;

// Of each device: a stream that waits for no other one, and pinned memory to copy through. Made with the first registration,
// because the driver may not give either while a kernel runs that waits for the card.
struct Lane {
  std::mutex guard;
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  void* bounce = nullptr;
};
Lane& LaneOf(int device) {
  static auto& lanes = *new std::array<Lane, kMostDevices>;
  return lanes.at(static_cast<std::size_t>(device));
}

// Makes the lane's context the calling thread's; false: the driver refused.
bool Enter(Lane& lane, int device) {
  const Driver& driver = TheDriver();
  // The program may capture a graph meanwhile; the card's calls are none of it.
  thread_local const bool relaxed = [&] {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    return driver.cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
  }();
  static_cast<void>(relaxed);
  if (lane.context == nullptr && driver.cuCtxCreate2(&lane.context, 0, device) != CUDA_SUCCESS) return false;
  return driver.cuCtxSetCurrent(lane.context) == CUDA_SUCCESS;
}

bool Prepare(int device) {
  const Driver& driver = TheDriver();
  if (device < 0 || device >= kMostDevices) return false;
  Lane& lane = LaneOf(device);
  const std::lock_guard lock(lane.guard);
  if (lane.bounce != nullptr) return true;
  CUcontext before = nullptr;
  if (driver.cuCtxGetCurrent(&before) != CUDA_SUCCESS || !Enter(lane, device)) return false;
  const bool made = driver.cuStreamCreate(&lane.stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
                    driver.cuMemHostAlloc(&lane.bounce, kBounceBytes, CU_MEMHOSTALLOC_PORTABLE) == CUDA_SUCCESS;
  driver.cuCtxSetCurrent(before);
  return made;
}

// On the simulator memory is a file, and a dma-buf is that file, so a dma-buf of other memory than lies at the address is
// noticed. On a GPU nothing tells of what memory a dma-buf is.
bool IsOfOther(int dma_buf, CUmemGenericAllocationHandle handle) {
  std::array<char, 32> name{};
  const std::string link = "/proc/self/fd/" + std::to_string(dma_buf);
  if (dma_buf < 0 || ::readlink(link.c_str(), name.data(), name.size() - 1) < 0 ||
      !std::string_view(name.data()).starts_with("/memfd:"))
    return false;
  int memory = -1;
  if (TheDriver().cuMemExportToShareableHandle(&memory, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS)
    return false;
  struct stat one {
  }, other{};
  const bool differ = ::fstat(dma_buf, &one) != 0 || ::fstat(memory, &other) != 0 || one.st_ino != other.st_ino;
  ::close(memory);
  return differ;
}

// Memory of cudaMalloc has no handle on a GPU; that of the simulator has one, which maps more than was asked for.
bool HasNoHandle(CUdeviceptr address) {
  int legacy = 0;
  return TheDriver().cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address) == CUDA_SUCCESS &&
         legacy != 0;
}

}  // namespace

std::optional<std::string> Pages::Open(std::uint64_t address, std::uint64_t bytes, int dma_buf, std::unique_ptr<Pages>& pages) {
  const Driver& driver = TheDriver();
  unsigned type = 0;
  if (!driver.usable() || driver.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) != CUDA_SUCCESS ||
      type != CU_MEMORYTYPE_DEVICE)
    return std::nullopt;
  std::unique_ptr<Pages> opened(new Pages);
  if (driver.cuPointerGetAttribute(&opened->device_, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) != CUDA_SUCCESS)
    return "the driver does not say of which device the memory is";
  if (!Prepare(opened->device_)) return "the driver gives the card no stream or no pinned memory";
  for (std::uint64_t at = address; at < address + bytes;) {
    CUdeviceptr base = 0;
    std::size_t size = 0;
    if (driver.cuMemGetAddressRange(&base, &size, at) != CUDA_SUCCESS) return "no memory is mapped in a part of the range";
    Piece piece{at, std::min(address + bytes, std::uint64_t{base} + size) - at, at, 0, 0, 0};
    CUmemGenericAllocationHandle handle = 0;
    if (!HasNoHandle(at) && driver.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(at)) == CUDA_SUCCESS) {
      const std::string refused = opened->Map(piece, base, size, handle);
      if (refused.empty() && IsOfOther(dma_buf, handle)) {
        opened->pieces_.push_back(piece);  // and is given back with it
        return "the dma-buf is of other memory than lies at the address";
      }
      if (!refused.empty()) return refused;
    }
    at += piece.bytes;
    opened->pieces_.push_back(piece);
  }
  pages = std::move(opened);
  return std::nullopt;
}

std::string Pages::Map(Piece& piece, std::uint64_t base, std::uint64_t size, std::uint64_t handle) {
  const Driver& driver = TheDriver();
  CUdeviceptr second = 0;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device_;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (driver.cuMemAddressReserve(&second, size, 0, 0, 0) != CUDA_SUCCESS) {
    driver.cuMemRelease(handle);
    return "no address range for a second mapping";
  }
  const bool mapped = driver.cuMemMap(second, size, 0, handle, 0) == CUDA_SUCCESS;
  if (!mapped || driver.cuMemSetAccess(second, size, &access, 1) != CUDA_SUCCESS) {
    if (mapped) driver.cuMemUnmap(second, size);
    driver.cuMemAddressFree(second, size);
    driver.cuMemRelease(handle);
    return "the memory cannot be mapped a second time";
  }
  piece.second = second + (piece.address - base);
  piece.reserved = second;
  piece.mapped = size;
  piece.handle = handle;
  return {};
}

Pages::~Pages() {
  const Driver& driver = TheDriver();
  for (const Piece& piece : pieces_) {
    if (piece.handle == 0) continue;
    driver.cuMemUnmap(piece.reserved, piece.mapped);
    driver.cuMemAddressFree(piece.reserved, piece.mapped);
    driver.cuMemRelease(piece.handle);
  }
}

bool Pages::StillMapped() const {
  const Driver& driver = TheDriver();
  return std::ranges::all_of(pieces_, [&](const Piece& piece) {
    CUmemGenericAllocationHandle now = 0;
    if (piece.handle == 0) return true;
    if (driver.cuMemRetainAllocationHandle(&now, reinterpret_cast<void*>(piece.address)) != CUDA_SUCCESS) return false;
    driver.cuMemRelease(now);
    return now == piece.handle;
  });
}

bool Pages::Copy(std::uint64_t offset, void* host, std::size_t bytes, bool to_gpu) {
  const Driver& driver = TheDriver();
  Lane& lane = LaneOf(device_);
  const std::lock_guard lock(lane.guard);
  if (!Enter(lane, device_)) return false;
  auto* at = static_cast<std::byte*>(host);
  std::uint64_t begins = 0;
  for (const Piece& piece : pieces_) {
    for (; bytes > 0 && offset >= begins && offset < begins + piece.bytes;) {
      const std::uint64_t gpu = piece.second + (offset - begins);
      const std::size_t now = std::min({bytes, kBounceBytes, static_cast<std::size_t>(begins + piece.bytes - offset)});
      const auto bounce = reinterpret_cast<std::uint64_t>(lane.bounce);
      if (to_gpu) std::memcpy(lane.bounce, at, now);
      if (driver.cuMemcpyAsync(to_gpu ? gpu : bounce, to_gpu ? bounce : gpu, now, lane.stream) != CUDA_SUCCESS ||
          driver.cuStreamSynchronize(lane.stream) != CUDA_SUCCESS)
        return false;
      if (!to_gpu) std::memcpy(at, lane.bounce, now);
      at += now;
      offset += now;
      bytes -= now;
    }
    begins += piece.bytes;
  }
  return bytes == 0;
}

}  // namespace amem::card
