// The driver seam over the real CUDA driver, which is found at run time: nothing of CUDA is linked.
//
// A failure's message has the driver's own name and description of the error, the call and its arguments.
// Calls that need a context use the device's primary context, retained once at first need (which makes one of some hundred MiB
// where the process has none yet), and a stream of our own that does not wait for the legacy stream; the thread's current
// context is left as it was. Page-locked host memory, tables, modules and streams belong to a primary context that is retained
// here (Core::HostContext), so they outlive every context that the program makes and destroys.
// Calls are made in relaxed capture mode, so that a capture of another thread goes on undisturbed.
// Multicast objects are never made here.
//
// Device ordinals are CUDA's in this process (after CUDA_VISIBLE_DEVICES). Thread-safe. After a fork the child's calls fail
// with NOT_INITIALIZED. Pinned buffers may outlive the driver object.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "replay/driver/driver.h"

namespace amem {

class CudaDriver final : public Driver {
 public:
  using Resolve = std::function<void*(const char* symbol)>;  // null: there is no such symbol

  // Only "cuGetProcAddress_v2" is asked of `resolve`; everything else comes through that. kUnsupported names what is missing.
  // The driver is initialised (cuInit) by the first call that is made, not here.
  static Result<std::unique_ptr<CudaDriver>> Load(const Resolve& resolve);
  // From libcuda.so.1, as the dynamic linker finds it. kUnsupported: this host has none.
  static Result<std::unique_ptr<CudaDriver>> LoadSystem();
  ~CudaDriver() override;

  [[nodiscard]] std::string Name() const override { return "cuda"; }
  Result<DriverHandle> Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags) override;
  Status Release(DriverHandle handle) override;
  Result<Address> Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags) override;
  Status FreeRange(Address address, Bytes bytes) override;
  Status Map(Address address, Bytes bytes, Bytes offset, DriverHandle handle, std::uint64_t flags) override;
  Status Unmap(Address address, Bytes bytes) override;
  Status SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access) override;
  Result<UniqueFd> Export(DriverHandle handle) override;
  Result<DriverHandle> Import(const UniqueFd& descriptor) override;
  Result<Bytes> Granularity(const AllocationProperties& properties) override;
  // Not run on hardware yet, but for MulticastGranularity, which makes nothing.
  Result<DriverHandle> CreateMulticast(const MulticastProperties& properties) override;
  Status AddDevice(DriverHandle multicast, DeviceOrdinal device) override;
  Status BindMemory(DriverHandle multicast, Bytes offset, DriverHandle memory, Bytes memory_offset, Bytes bytes) override;
  Status BindAddress(DriverHandle multicast, Bytes offset, Address address, Bytes bytes) override;
  Status Unbind(DriverHandle multicast, DeviceOrdinal device, Bytes offset, Bytes bytes) override;
  Result<Bytes> MulticastGranularity() override;
  Result<MemoryInfo> Memory(DeviceOrdinal device) override;
  std::vector<MemoryHolder> MemoryHolders(DeviceOrdinal device) override;
  Result<int> DeviceCount() override;
  Result<std::string> DeviceUuid(DeviceOrdinal device) override;
  std::string Version() override;  // "13.0", the CUDA version of the driver; empty if it does not say
  // Of the primary context, if this process has one on the device, and of all that NoteStream has seen. kRefused, with 900: a
  // capture is running. One on a stream that waits for the legacy stream is found first and goes on; one on a non-blocking
  // stream is found by the driver, which breaks that capture (measured; it offers no other way to ask).
  Status Synchronize(DeviceOrdinal device, Deadline until, const std::function<bool()>& breaks_off = {}) override;
  void NoteStream(const char* call, void* stream) override;
  void ForgetContext(DeviceOrdinal device) override;
  Released ReleaseContext(DeviceOrdinal device, const std::function<int()>& release) override;
  Result<std::unique_ptr<PinnedBuffer>> AllocatePinned(Bytes bytes) override;
  [[nodiscard]] bool Populates(Bytes bytes) override;
  std::unique_ptr<HostPages> Populate(Bytes bytes) override;
  Result<std::unique_ptr<PinnedBuffer>> Pin(std::unique_ptr<HostPages> pages, Bytes bytes) override;
  Status CopyToHost(DeviceOrdinal device, std::byte* to, Address from, Bytes bytes) override;
  Status CopyToDevice(DeviceOrdinal device, Address to, const std::byte* from, Bytes bytes) override;
  Status Clear(DeviceOrdinal device, Address address, Bytes bytes) override;
  Status FinishCopies(DeviceOrdinal device, Deadline until) override;
  Result<NonZero> FindNonZero(DeviceOrdinal device, std::span<const Extent> extents, const ContentKey* key,
                              Deadline until) override;
  [[nodiscard]] bool CanScanNow(DeviceOrdinal device) override;
  Status Gather(DeviceOrdinal device, std::span<const Extent> extents) override;
  Status Scatter(DeviceOrdinal device, std::span<const Extent> extents) override;
  Status ClearAll(DeviceOrdinal device, std::span<const Extent> extents) override;
  Result<std::uint64_t> Mark(DeviceOrdinal device) override;
  Status Await(DeviceOrdinal device, std::uint64_t mark, Deadline until) override;
  // Null, and CUDA's two handles for default streams, belong to the thread's current context. A capture is asked about and not
  // disturbed.
  Result<std::unique_ptr<StreamMoment>> MomentOf(DeviceOrdinal device, void* stream) override;
  Status Follow(DeviceOrdinal device, const StreamMoment& moment) override;
  Status MakeStreamWaitForCopies(DeviceOrdinal device, void* stream, Deadline until) override;
  Status AwaitMoment(DeviceOrdinal device, const StreamMoment& moment, Deadline until) override;
  // With streams of its own, and without a buffer on the device: what it copies in parts goes there directly. Its FindNonZero
  // does not wait for what its CopyToHost has queued.
  Result<std::unique_ptr<Copier>> OpenLane() override;

 private:
  class Core;
  class IdleWait;
  class NonZeroCopier;
  class CudaHostPages;
  class CudaPinnedBuffer;
  struct CudaStreamMoment;
  explicit CudaDriver(std::shared_ptr<Core> core, bool is_lane = false);
  Status OnStream(DeviceOrdinal device, const char* call, Address address, Bytes bytes,
                  const std::function<int(void* stream)>& submit);
  // Calls use(stream) in a context where the stream's handle means what it means to the program. `after`: whether to refuse if
  // a capture has begun since the first check, because an event that was recorded into a capture must not be queried.
  enum class Capture : std::uint8_t { kRefused, kAllowed };
  Status OnProgramStream(DeviceOrdinal device, const char* call, void* stream, const std::function<int(void* stream)>& use,
                         Capture after = Capture::kAllowed);

  std::shared_ptr<Core> core_;
  std::unique_ptr<IdleWait> idle_;
  std::unique_ptr<NonZeroCopier> nonzero_;
  const bool is_lane_;
};

}  // namespace amem
