// Page-locked host memory. Large buffers are huge pages of our own that the driver only registers: 145 ms per GiB in place of
// cuMemHostAlloc's 290 to 540 (H200 host), nine tenths of it outside the driver.
#include <fmt/format.h>
#include <sys/mman.h>

#include "journal/base/fork_guard.h"
#include "replay/driver/cuda/core.h"
#include "statemachine/event.h"

namespace amem {

constexpr Bytes kHuge = Bytes{2} << 20, kPage = 4096;

// At a multiple of 2 MiB inside a mapping.
class CudaDriver::CudaHostPages final : public HostPages, NoCopies {
 public:
  explicit CudaHostPages(Bytes bytes)
      : mapped_(bytes + kHuge),
        mapping_(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (mapping_ == MAP_FAILED) return;
    const Bytes past = reinterpret_cast<std::uintptr_t>(mapping_) % kHuge;
    data_ = static_cast<std::byte*>(mapping_) + (kHuge - past) % kHuge;
    madvise(mapping_, mapped_, MADV_HUGEPAGE);  // otherwise small pages do
    madvise(mapping_, mapped_, MADV_DONTFORK);  // a child must not get a copy of what the device writes to
    // By its use, and not by MADV_POPULATE_WRITE, which takes the kernel's lock of the whole address space: beside it an mmap
    // of the program took 16 ms in place of 2 us, and a cuMemAlloc 24 to 32 ms in place of 0.1 (H100 host, Linux 6.18, huge
    // pages, `amem-pinning-check --beside-program`). From Linux 6.4 on a page fault locks only this mapping.
    for (Bytes at = 0; at < bytes; at += kPage) const_cast<volatile std::byte&>(data_[at]) = std::byte{};
  }
  ~CudaHostPages() override {
    if (data_ != nullptr && !guard_.InChild()) munmap(mapping_, mapped_);
  }
  [[nodiscard]] std::byte* data() const { return data_; }  // null: the host has no memory

 private:
  const Bytes mapped_;
  void* const mapping_;
  std::byte* data_ = nullptr;
  const ForkGuard guard_;
};

class CudaDriver::CudaPinnedBuffer final : public PinnedBuffer, NoCopies {
 public:
  CudaPinnedBuffer(std::shared_ptr<Core> core, CUcontext context, std::byte* data, Bytes bytes, std::unique_ptr<HostPages> own)
      : core_(std::move(core)), context_(context), data_(data), bytes_(bytes), own_(std::move(own)) {}
  ~CudaPinnedBuffer() override {
    if (guard_.InChild()) return;                     // a forked child has neither the memory nor the driver
    const InContext current(core_->calls, context_);  // if its context is gone, so is the memory
    (own_ == nullptr ? core_->calls.host_free : core_->calls.host_unregister)(data_);
  }
  [[nodiscard]] std::byte* data() override { return data_; }
  [[nodiscard]] Bytes size() const override { return bytes_; }

 private:
  std::shared_ptr<Core> core_;
  CUcontext context_;
  std::byte* data_;
  Bytes bytes_;
  std::unique_ptr<HostPages> own_;  // null: it is the driver's memory
  const ForkGuard guard_;
};

bool CudaDriver::Populates(Bytes bytes) {
  return bytes >= kHuge && core_->calls.host_register != nullptr && core_->calls.host_unregister != nullptr;
}

std::unique_ptr<HostPages> CudaDriver::Populate(Bytes bytes) {
  if (!Populates(bytes)) return nullptr;
  auto pages = std::make_unique<CudaHostPages>(bytes);
  return pages->data() == nullptr ? nullptr : std::move(pages);
}

Result<std::unique_ptr<PinnedBuffer>> CudaDriver::AllocatePinned(Bytes bytes) {
  AMEM_TRY(HostClaims({}, [this] { return HostMemory(); }).Claim(bytes));
  return Pin(nullptr, bytes);
}

Result<std::unique_ptr<PinnedBuffer>> CudaDriver::Pin(std::unique_ptr<HostPages> pages, Bytes bytes) {
  AMEM_ASSIGN(const auto context, core_->HostContext());
  InContext current(core_->calls, context);
  if (pages == nullptr) pages = Populate(bytes);
  if (pages != nullptr && current.ok()) {
    std::byte* const data = static_cast<CudaHostPages&>(*pages).data();
    if (core_->calls.host_register(data, bytes, CU_MEMHOSTREGISTER_PORTABLE) == CUDA_SUCCESS)
      return std::unique_ptr<PinnedBuffer>(std::make_unique<CudaPinnedBuffer>(core_, context, data, bytes, std::move(pages)));
  }
  pages.reset();
  void* data = nullptr;
  current.Call(core_->calls.host_alloc, &data, bytes, CU_MEMHOSTALLOC_PORTABLE);
  if (!current.ok()) return core_->Failure(current.result(), fmt::format("cuMemHostAlloc {} bytes of host memory", bytes));
  return std::unique_ptr<PinnedBuffer>(
      std::make_unique<CudaPinnedBuffer>(core_, context, static_cast<std::byte*>(data), bytes, nullptr));
}

}  // namespace amem
