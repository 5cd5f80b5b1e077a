// Page-locked host memory. Large buffers are huge pages of our own that the driver only registers: a third of the time that
// cuMemHostAlloc takes (measured on an H200 host: 145 against 290 to 540 ms per GiB), and all but a tenth of it outside the
// driver.
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>

#include "journal/base/fork_guard.h"
#include "replay/driver/cuda/core.h"

namespace amem {
namespace {

constexpr Bytes kHuge = Bytes{2} << 20;

// Memory that is there, at a multiple of 2 MiB inside the mapping.
struct Populated {
  void* mapping = MAP_FAILED;
  Bytes mapped = 0;
  std::byte* data = nullptr;
};

Populated Populate(Bytes bytes) {
  Populated memory;
  memory.mapped = bytes + kHuge;
  memory.mapping = mmap(nullptr, memory.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory.mapping == MAP_FAILED) return memory;
  const Bytes past = reinterpret_cast<std::uintptr_t>(memory.mapping) % kHuge;
  memory.data = static_cast<std::byte*>(memory.mapping) + (kHuge - past) % kHuge;
  madvise(memory.mapping, memory.mapped, MADV_HUGEPAGE);  // where there are none, small ones do
  madvise(memory.mapping, memory.mapped, MADV_DONTFORK);  // what the device writes to must not become a child's copy
  // Piece by piece: the process can map nothing else meanwhile.
  for (Bytes done = 0; done < bytes; done += kHuge) {
    const Bytes piece = std::min(bytes - done, kHuge);
#ifdef MADV_POPULATE_WRITE
    if (madvise(memory.data + done, piece, MADV_POPULATE_WRITE) == 0) continue;
#endif
    for (Bytes at = done; at < done + piece; at += 4096) const_cast<volatile std::byte&>(memory.data[at]) = std::byte{};
  }
  return memory;
}

}  // namespace

class CudaDriver::CudaPinnedBuffer final : public PinnedBuffer {
 public:
  CudaPinnedBuffer(std::shared_ptr<Core> core, CUcontext context, std::byte* data, Bytes bytes, Populated own)
      : core_(std::move(core)), context_(context), data_(data), bytes_(bytes), own_(own) {}
  ~CudaPinnedBuffer() override {
    if (guard_.InChild()) return;  // a forked child has neither the memory nor the driver
    const RelaxedCapture relaxed(core_->calls);
    const CurrentContext current(core_->calls, context_);  // if its context is gone, so is the memory
    if (own_.data == nullptr) {
      core_->calls.host_free(data_);
    } else {
      core_->calls.host_unregister(data_);
      munmap(own_.mapping, own_.mapped);
    }
  }
  CudaPinnedBuffer(const CudaPinnedBuffer&) = delete;
  CudaPinnedBuffer& operator=(const CudaPinnedBuffer&) = delete;
  [[nodiscard]] std::byte* data() override { return data_; }
  [[nodiscard]] Bytes size() const override { return bytes_; }

 private:
  std::shared_ptr<Core> core_;
  CUcontext context_;
  std::byte* data_;
  Bytes bytes_;
  Populated own_;  // nothing: the driver's memory
  const ForkGuard guard_;
};

Result<std::unique_ptr<PinnedBuffer>> CudaDriver::AllocatePinned(Bytes bytes) {
  return AllocatePinnedQuietly(bytes, [] {});
}

Result<std::unique_ptr<PinnedBuffer>> CudaDriver::AllocatePinnedQuietly(Bytes bytes, const std::function<void()>& quiet) {
  const auto context = core_->AnyContext();
  if (!context.ok()) return context.status();
  const bool large = bytes >= kHuge && core_->calls.host_register != nullptr && core_->calls.host_unregister != nullptr;
  const Populated own = large ? Populate(bytes) : Populated{};
  quiet();
  const RelaxedCapture relaxed(core_->calls);
  const CurrentContext current(core_->calls, *context);
  if (own.data != nullptr) {
    if (current.result() == CUDA_SUCCESS) {
      const CUresult registered = core_->calls.host_register(own.data, bytes, CU_MEMHOSTREGISTER_PORTABLE);
      if (registered == CUDA_SUCCESS) {
        return std::unique_ptr<PinnedBuffer>(std::make_unique<CudaPinnedBuffer>(core_, *context, own.data, bytes, own));
      }
    }
    munmap(own.mapping, own.mapped);
  }
  void* data = nullptr;
  CUresult result = current.result();
  if (result == CUDA_SUCCESS) result = core_->calls.host_alloc(&data, bytes, CU_MEMHOSTALLOC_PORTABLE);
  if (result != CUDA_SUCCESS) {
    return core_->Failure(result, fmt::format("cuMemHostAlloc {} bytes of host memory", bytes));
  }
  return std::unique_ptr<PinnedBuffer>(
      std::make_unique<CudaPinnedBuffer>(core_, *context, static_cast<std::byte*>(data), bytes, Populated{}));
}

}  // namespace amem
