// Network cards: a card that memory is registered with holds its pages, so a pause must leave that memory in place
// (Registered).
//
// NCCL registers by address (ibv_reg_mr, with the peer-memory module) or by a dma-buf of an address range. It closes the
// dma-buf's descriptor right after; the registration holds the pages until ibv_dereg_mr.
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

struct Part {
  Address address;
  Bytes bytes = 0;
};

class Registrations {
 public:
  static Registrations& Get() {
    static auto* all = new Registrations;
    return *all;
  }
  void Exported(int descriptor, Part part) {
    const std::lock_guard lock(mutex_);
    exported_[descriptor] = part;
  }
  Part ExportedAs(int descriptor) {
    const std::lock_guard lock(mutex_);
    const auto found = exported_.find(descriptor);
    return found == exported_.end() ? Part{} : found->second;
  }
  // `region` now pins `part`; nothing is recorded if that is not memory of AMem's.
  void Add(void* region, Part part, const char* how) {
    Session* session = Runtime::Get().started();
    if (session == nullptr || region == nullptr || part.bytes == 0) return;
    const std::lock_guard lock(mutex_);
    if (session->NoteRegistration({part.address, part.bytes, how})) regions_[region] = part;
  }
  std::optional<Part> Take(void* region) {
    const std::lock_guard lock(mutex_);
    const auto node = regions_.extract(region);
    if (node.empty()) return std::nullopt;
    return node.mapped();
  }

 private:
  std::mutex mutex_;
  std::map<int, Part> exported_;
  std::map<void*, Part> regions_;
};

struct MemGetHandleForAddressRange {
  static constexpr const char *kName = "cuMemGetHandleForAddressRange", *kExported = kName;
  using Function = CUresult(void*, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long);
  static CUresult Call(Function* real, void* handle, CUdeviceptr address, size_t bytes, CUmemRangeHandleType type,
                       unsigned long long flags) {
    Session* session = Runtime::Get().session();
    if (session != nullptr && session->paused() && session->TouchesPaused(Address{address}, bytes))
      return ToDriver(kName, {Code::kRefused, "that memory is paused; call ncclResume first"});
    const CUresult result = real(handle, address, bytes, type, flags);
    if (session != nullptr && result == CUDA_SUCCESS && handle != nullptr && type == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
      Registrations::Get().Exported(*static_cast<int*>(handle), {Address{address}, bytes});
    return result;
  }
};

Part Plain(void* address, size_t bytes) { return {Address{reinterpret_cast<std::uint64_t>(address)}, bytes}; }

// AMem only passes the protection domain and the region on, so ibverbs' own types are not needed.
struct RegMr {
  static constexpr const char *kName = "ibv_reg_mr", *kExported = kName;
  using Function = void*(void*, void*, size_t, int);
  static void* Call(Function* real, void* domain, void* address, size_t bytes, int access) {
    void* region = real(domain, address, bytes, access);
    Registrations::Get().Add(region, Plain(address, bytes), kName);
    return region;
  }
};

struct RegMrIova2 {
  static constexpr const char *kName = "ibv_reg_mr_iova2", *kExported = kName;
  using Function = void*(void*, void*, size_t, std::uint64_t, unsigned int);
  static void* Call(Function* real, void* domain, void* address, size_t bytes, std::uint64_t iova, unsigned int access) {
    void* region = real(domain, address, bytes, iova, access);
    Registrations::Get().Add(region, Plain(address, bytes), "ibv_reg_mr");
    return region;
  }
};

struct RegDmabufMr {
  static constexpr const char *kName = "ibv_reg_dmabuf_mr", *kExported = kName;
  using Function = void*(void*, std::uint64_t, size_t, std::uint64_t, int, int);
  static void* Call(Function* real, void* domain, std::uint64_t offset, size_t bytes, std::uint64_t iova, int descriptor,
                    int access) {
    const Part whole = Registrations::Get().ExportedAs(descriptor);
    void* region = real(domain, offset, bytes, iova, descriptor, access);
    if (whole.bytes != 0) Registrations::Get().Add(region, {whole.address + offset, bytes}, "dma-buf");
    return region;
  }
};

struct DeregMr {
  static constexpr const char *kName = "ibv_dereg_mr", *kExported = kName;
  using Function = int(void*);
  static int Call(Function* real, void* region) {
    // Taken before the call, because after it another thread may get a region at the same address.
    const std::optional<Part> part = Registrations::Get().Take(region);
    const int result = real(region);
    if (!part) return result;
    if (result != 0)
      Registrations::Get().Add(region, *part, "ibv_reg_mr");  // still pinned: counted once more, which errs on the safe side
    else if (Session* session = Runtime::Get().started())
      session->Note(Deregistered{part->address, part->bytes});
    return result;
  }
};

}  // namespace

std::span<const replacements::Replacement> VerbsReplacements() {
  return replacements::Table<MemGetHandleForAddressRange, RegMr, RegMrIova2, RegDmabufMr, DeregMr>();
}
}  // namespace amem::intercept
