// The driver seam: the calls that AMem makes on GPU memory, implemented by CUDA and by the simulator.
//
// Any thread may call any method. Waits for a device have deadlines, because the driver's own have none. A failure is
// Code::kDriver or kOutOfMemory with the CUresult in Status::driver_result, and nothing has changed then. The caller owns the
// handles and ranges it gets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "journal/base/deadline.h"
#include "journal/base/unique_fd.h"
#include "replay/driver/content_hash.h"
#include "replay/driver/host_memory.h"
#include "statemachine/event_cycle.h"
#include "statemachine/types.h"

namespace amem {

// The CUresults that AMem produces or distinguishes.
namespace cuda {
inline constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kNoDevice = 100,
                     kInvalidDevice = 101, kOperatingSystem = 304, kInvalidHandle = 400, kIllegalState = 401, kNotReady = 600,
                     kIllegalAddress = 700, kNotPermitted = 800, kNotSupported = 801, kCaptureUnsupported = 900, kTimeout = 909,
                     kUnknown = 999;
}

struct MemoryInfo {
  Bytes free = 0;
  Bytes total = 0;
};

// A GPU of this machine, even if CUDA does not show it to this process.
struct GpuInUse {
  std::string uuid;
  MemoryInfo memory;
  Bytes used = 0;              // by processes; what the driver reserves is neither free nor used
  bool holders_known = false;  // in a container NVML may not see the processes
  std::vector<MemoryHolder> holders;
};
// Without the process `self`, the largest first.
std::vector<MemoryHolder> Others(std::vector<MemoryHolder> holders, std::int32_t self);
// " (pid 7, python3, holds 3 072 MiB; pid 8 holds some)": the largest of them except the process `self`; or nothing.
std::string ToText(std::vector<MemoryHolder> holders, std::int32_t self);

// Page-locked host memory for copies, freed by its destructor.
class PinnedBuffer {
 public:
  virtual ~PinnedBuffer() = default;
  [[nodiscard]] virtual std::byte* data() = 0;
  [[nodiscard]] virtual Bytes size() const = 0;
};

// Host memory that can be pinned, freed by its destructor.
class HostPages {
 public:
  virtual ~HostPages() = default;
};

// A part of device memory, and the part of a PinnedBuffer to or from which Gather or Scatter copies it.
struct Extent {
  Address address;
  Bytes bytes = 0;
  std::byte* host = nullptr;
  friend bool operator==(const Extent&, const Extent&) = default;
};

// What some extents hold, extent by extent, in units of kUnitBytes that are counted from the start of each; the last unit of an
// extent may be part only.
struct NonZero {
  std::vector<std::uint32_t> pages;  // of every unit, which of its pages have a byte that is not zero
  std::vector<ContentHash> hashes;   // of every unit, if they were asked for
  std::string unscanned;             // not empty: why the contents were not looked at; there are no hashes, and all pages count
};

NonZero Unscanned(std::span<const Extent> extents, std::string why);

// CUmulticastObjectProp.
struct MulticastProperties {
  Bytes bytes = 0;            // that can be bound for each device
  std::uint32_t devices = 0;  // that all processes together must add before memory is bound or the object mapped
  std::uint32_t handle_types = 0;
  std::uint64_t flags = 0;
};

// What a stream held at one moment, freed by its destructor. An empty one stands for nothing.
class StreamMoment {
 public:
  virtual ~StreamMoment() = default;
};

// The copies of contents. Several are independent of each other (Driver::OpenLane): none waits for what another has queued, and
// the marks of one mean nothing to another.
class Copier {
 public:
  virtual ~Copier() = default;
  [[nodiscard]] virtual std::string Name() const = 0;  // "cuda" or "sim", for reports
  // What the host has left for memory that is pinned here; nullopt: unknown, so that nothing is refused.
  [[nodiscard]] virtual std::optional<HostRoom> HostMemory() { return HostMemoryAvailable(); }
  // Copies are queued per device in order and complete at FinishCopies(device). The addresses must be mapped with access for
  // `device`; the host side must lie in a PinnedBuffer.
  virtual Result<std::unique_ptr<PinnedBuffer>> AllocatePinned(Bytes bytes) = 0;
  // The same in two parts. Populate makes no driver call, and may be called by several threads at once; null: the host has no
  // memory. Neither asks whether the host has enough (HostClaims). Pin holds up driver calls of other threads for a moment;
  // null for `pages` is like AllocatePinned.
  [[nodiscard]] virtual bool Populates(Bytes bytes) { return static_cast<void>(bytes), false; }  // it can, and gains by it
  virtual std::unique_ptr<HostPages> Populate(Bytes bytes) { return static_cast<void>(bytes), nullptr; }
  virtual Result<std::unique_ptr<PinnedBuffer>> Pin(std::unique_ptr<HostPages> pages, Bytes bytes) {
    return static_cast<void>(pages), AllocatePinned(bytes);
  }
  virtual Status CopyToHost(DeviceOrdinal device, std::byte* to, Address from, Bytes bytes) = 0;
  virtual Status CopyToDevice(DeviceOrdinal device, Address to, const std::byte* from, Bytes bytes) = 0;
  virtual Status Clear(DeviceOrdinal device, Address address, Bytes bytes) = 0;
  virtual Status FinishCopies(DeviceOrdinal device, Deadline until) = 0;

  // In parts. The same demands as above, and the device is idle but for copies (the first call of all loads kernels,
  // which would wait for what runs); addresses, of the host too, and sizes are multiples of 4096. Gather, Scatter and ClearAll
  // come after the copies, clears and ClearAlls that were queued before them; they do not wait for one another otherwise, and
  // nothing that is queued later waits for them: FinishCopies does, and gives back what they needed on the device. They work,
  // slower, where that cannot be had. The defaults use the calls above.
  //
  // Looks at the extents after all copies and clears queued before, and hashes them by `key`, unless it is null; waits for the
  // answer.
  virtual Result<NonZero> FindNonZero(DeviceOrdinal device, std::span<const Extent> extents, const ContentKey* key,
                                      Deadline until) = 0;
  // Whether FindNonZero can look at once: it has loaded its kernels.
  [[nodiscard]] virtual bool CanScanNow(DeviceOrdinal device) = 0;
  virtual Status Gather(DeviceOrdinal device, std::span<const Extent> extents);   // to the host
  virtual Status Scatter(DeviceOrdinal device, std::span<const Extent> extents);  // the reverse
  virtual Status ClearAll(DeviceOrdinal device, std::span<const Extent> extents);
  // Marks what is queued on the device so far; numbers that ascend, and are good until FinishCopies. Await returns once all
  // before the mark is done. The defaults mark nothing, and wait for everything.
  virtual Result<std::uint64_t> Mark(DeviceOrdinal) { return std::uint64_t{0}; }
  virtual Status Await(DeviceOrdinal device, std::uint64_t, Deadline until) { return FinishCopies(device, until); }

  // Copies beside streams of the program. kRefused: the stream is being captured, or cannot be asked about it.
  // What the stream holds now; `device` is where a null stream belongs when the thread has no current context.
  virtual Result<std::unique_ptr<StreamMoment>> MomentOf(DeviceOrdinal device, void* stream) = 0;
  // What is queued on the device from now on begins when all that `moment` stands for is done.
  virtual Status Follow(DeviceOrdinal device, const StreamMoment& moment) = 0;
  // What is submitted to the stream from now on begins when all is done that is queued on the device so far.
  virtual Status MakeStreamWaitForCopies(DeviceOrdinal device, void* stream, Deadline until) = 0;
};

class Driver : public Copier {
 public:
  virtual Result<DriverHandle> Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags) = 0;
  virtual Status Release(DriverHandle handle) = 0;
  virtual Result<Address> Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags) = 0;
  virtual Status FreeRange(Address address, Bytes bytes) = 0;
  virtual Status Map(Address address, Bytes bytes, Bytes offset, DriverHandle handle, std::uint64_t flags) = 0;
  virtual Status Unmap(Address address, Bytes bytes) = 0;
  virtual Status SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access) = 0;
  virtual Result<UniqueFd> Export(DriverHandle handle) = 0;             // a POSIX descriptor with its own reference
  virtual Result<DriverHandle> Import(const UniqueFd& descriptor) = 0;  // the descriptor stays the caller's
  virtual Result<Bytes> Granularity(const AllocationProperties& properties) = 0;

  // Multicast objects (NVLS) are released, exported, imported and mapped like memory. A driver without them answers 801.
  virtual Result<DriverHandle> CreateMulticast(const MulticastProperties& properties) = 0;
  virtual Status AddDevice(DriverHandle multicast, DeviceOrdinal device) = 0;
  // `bytes` of `memory`, from `memory_offset` on, at `offset` of the object; all three are multiples of MulticastGranularity.
  virtual Status BindMemory(DriverHandle multicast, Bytes offset, DriverHandle memory, Bytes memory_offset, Bytes bytes) = 0;
  virtual Status BindAddress(DriverHandle multicast, Bytes offset, Address address, Bytes bytes) = 0;
  virtual Status Unbind(DriverHandle multicast, DeviceOrdinal device, Bytes offset, Bytes bytes) = 0;  // exactly what was bound
  virtual Result<Bytes> MulticastGranularity() = 0;  // the least, for objects shared as descriptors

  virtual Result<MemoryInfo> Memory(DeviceOrdinal device) = 0;
  // As far as it can be known: a container does not see processes outside. For messages; takes milliseconds.
  virtual std::vector<MemoryHolder> MemoryHolders(DeviceOrdinal) { return {}; }
  virtual Result<int> DeviceCount() = 0;
  virtual Result<std::string> DeviceUuid(DeviceOrdinal device) = 0;
  virtual std::string Version() = 0;
  // Waits until all that this process submitted to the device is done; opens no context there. kRefused: a stream capture is
  // running, or the work did not end in time.
  // `breaks_off`: asked while it waits; true: it waits no longer (BrokenOff).
  virtual Status Synchronize(DeviceOrdinal device, Deadline until, const std::function<bool()>& breaks_off = {}) = 0;
  // The program submits work to that stream by that call. Synchronize also waits for the stream's context, and its message
  // names the last such call. Cheap if repeated for the same context.
  virtual void NoteStream(const char* call, void* stream) { static_cast<void>(call), static_cast<void>(stream); }
  // The program is about to destroy the device's primary context, with all that the driver keeps in it: what is there of this
  // object's is given up, and made anew when it is needed.
  virtual void ForgetContext(DeviceOrdinal device) { static_cast<void>(device); }
  // Makes a call of the program's that gives up a reference to the device's primary context, while the driver object has none
  // of its own, so that the answer and what becomes of the context are as without it. `gone`: the context is no more.
  struct Released {
    int result = 0;
    bool gone = false;
  };
  virtual Released ReleaseContext(DeviceOrdinal device, const std::function<int()>& release) {
    static_cast<void>(device);
    return {release(), false};
  }
  // Waits until all that `moment` stands for is done. kRefused: it did not end in time.
  virtual Status AwaitMoment(DeviceOrdinal device, const StreamMoment& moment, Deadline until) = 0;
  // An independent copier on the same memory, which must not outlive the driver.
  virtual Result<std::unique_ptr<Copier>> OpenLane() = 0;
};

// The failures of waits that reached their deadline. `details`: "(...)" or nothing.
Status NotIdle(DeviceOrdinal device, Deadline began, const std::string& details);
Status BrokenOff(DeviceOrdinal device);
Status CopiesNotDone(DeviceOrdinal device, Deadline began);

// For messages: "0x7f00, 4096 bytes", "handle 0x1f", and "cuMulticastUnbind 4096 bytes at 0 of handle 0x1f".
std::string InRange(Address address, Bytes bytes);
std::string OfHandle(DriverHandle handle);
std::string OfBinding(const char* call, DriverHandle multicast, Bytes offset, Bytes bytes);

// Memory of a device that can be exported, and all access to it.
inline AllocationProperties PropertiesOn(DeviceOrdinal device, std::uint8_t rdma = 0) {
  return {.handle_types = 1, .location = {LocationType::kDevice, device.value}, .gpu_direct_rdma = rdma};
}
inline AccessDescriptor ReadWrite(DeviceOrdinal device) { return {{LocationType::kDevice, device.value}, 3}; }

}  // namespace amem
