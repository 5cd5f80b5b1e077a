// The simulator: the driver seam where there is no GPU.
//
// Device memory is a memfd, a reserved range is an mmap without access, a mapping is the memfd mapped there, access is
// mprotect, an exported descriptor is a dup of the memfd that other processes import. The CPU can use mapped memory through its
// address, as a kernel would. What is given back is really given back.
//
// It keeps the driver's rules as they were measured (H200, driver 580), and answers a broken one with the driver's CUresult:
//   * a handle is mapped whole: another size or offset is NOT_SUPPORTED (801); a range that is mapped already, or not reserved,
//     INVALID_VALUE (1). Neighbouring reserved ranges count as one.
//   * unmapping a part of a mapping is INVALID_VALUE. What is not mapped in a reserved range is passed over, and unmapping
//     nothing at all succeeds.
//   * access is set for whole mappings: it must begin with one and end with one; a hole between is passed over
//   * a released handle is unknown at once; its memory stays until the last mapping and descriptor are gone
//   * sizes and addresses that are no multiple of the granularity, flags, a range freed with mappings in it: INVALID_VALUE
//   * an unknown handle: INVALID_VALUE (the real driver crashes in Map and Export); an unknown device: INVALID_DEVICE (101)
//   * a foreign descriptor at import: UNKNOWN (999); an imported handle has no handle types, and its export is INVALID_VALUE
//   * access for the host to device memory: NOT_SUPPORTED
//   * more memory on a device than it has, all processes of the world together: OUT_OF_MEMORY (2)
//   * memory touched before access was given: SIGSEGV
// and, of multicast objects, the rules that the CUDA driver's manual states (no multicast object was ever made on hardware):
//   * size, offsets and addresses are multiples of the multicast granularity, and what is bound lies within object and memory:
//     INVALID_VALUE
//   * a device is added once, and no more of them than the object was made for: INVALID_VALUE; memory of a device that was not
//     added: INVALID_DEVICE
//   * nothing is bound and the object is not mapped before all devices were added, by all processes together. The driver lets
//     such a call wait; the simulator answers NOT_READY (600), so that a wrong order shows.
//   * a device's bindings do not overlap; an object that can be shared takes memory that can be shared: INVALID_VALUE
//   * what is unbound must be just what this process bound: INVALID_VALUE (the manual leaves it undefined)
//   * memory that is bound exists until it is unbound, or its process or the object is gone
//   * what needs a context (copies, how much memory is free) opens one on its device for good; Synchronize opens none
// Copies are only queued; until FinishCopies nothing has happened. What is unmapped before its copy is done, and a kernel that
// touches what is not mapped, answer ILLEGAL_ADDRESS (700), and then every call does, because the context is dead.
//
// Thread-safe. In a forked child every call answers NOT_INITIALIZED (3), as CUDA's do.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "journal/base/fork_guard.h"
#include "journal/base/mutex.h"
#include "replay/driver/driver.h"
#include "replay/driver/simulator/world.h"

namespace amem {

// The host memory that pinned buffers take, shared by simulators of this process.
struct SimulatedHost {
  explicit SimulatedHost(Bytes bytes) : left(bytes) {}
  std::atomic<Bytes> left;
  std::atomic<bool> exhausted = false;  // more was touched than there is; Linux would have killed a process
};

struct SimulatorOptions {
  std::shared_ptr<SimulatedHost> host;  // null: unlimited memory
  std::filesystem::path world;  // the world's file, shared with other processes; empty: `in_memory`, or a world of its own
  std::shared_ptr<SimulatorWorld> in_memory;    // shared with other simulators of this process
  std::int32_t devices = 4;                     // for a world made here
  Bytes capacity_per_device = Bytes{16} << 30;  // for a world made here
  std::vector<std::int32_t> visible;            // the world's devices by ordinal, like CUDA_VISIBLE_DEVICES; empty: all
  Bytes granularity = Bytes{2} << 20;           // a power of two, at least a page
  Bytes multicast_granularity = 0;              // a power of two; 0: as `granularity`
  bool fabric = false;                          // fabric handles are possible
  bool physical = true;                         // false: the same rules, but addresses are only numbers and copies move nothing
};

// ---- what a simulator holds, for tests

struct SimulatedHandle {
  DriverHandle handle;
  Bytes bytes = 0;
  AllocationProperties properties;
  std::uint32_t references = 0;  // 0: released and still mapped
  std::uint32_t mappings = 0;
  bool imported = false;
  SimulatorWorld::Key memory;  // equal for all handles of all processes on the same memory
  friend bool operator==(const SimulatedHandle&, const SimulatedHandle&) = default;
};
struct SimulatedMapping {
  Address address;
  Bytes bytes = 0;
  DriverHandle handle;
  std::vector<AccessDescriptor> access;  // by location
  SimulatorWorld::Key memory;            // as in SimulatedHandle
  friend bool operator==(const SimulatedMapping&, const SimulatedMapping&) = default;
};
struct SimulatorSnapshot {  // lists in the order of ids or addresses
  std::vector<SimulatedHandle> handles;
  std::vector<Extent> ranges;
  std::vector<SimulatedMapping> mappings;
  friend bool operator==(const SimulatorSnapshot&, const SimulatorSnapshot&) = default;
};

// The streams of a program on the simulator. Thread-safe; called without the simulator's locks.
class SimulatedStreams {
 public:
  virtual ~SimulatedStreams() = default;
  // nullopt: any stream.
  virtual bool Capturing(std::optional<void*> stream) = 0;
  // The result tells whether everything submitted to that stream (nullopt: to all) before this call has ended.
  virtual std::function<bool()> Submitted(std::optional<void*> stream) = 0;
};

// The copies of one lane: the simulator's calls, with the lane's number. `Seam` is Driver or Copier.
template <class Seam, class Sim>
class SimulatedLane : public Seam {
 public:
  using LaneNumber = std::uint32_t;  // 0: the simulator's own
  SimulatedLane(Sim& sim, LaneNumber number) : sim_(sim), number_(number) {}
  [[nodiscard]] std::string Name() const override { return "sim"; }
  Status CopyToHost(DeviceOrdinal device, std::byte* to, Address from, Bytes bytes) override {
    return Queue(Sim::kCopyToHost, device, std::array{Extent{from, bytes, to}});
  }
  Status CopyToDevice(DeviceOrdinal device, Address to, const std::byte* from, Bytes bytes) override {
    return Queue(Sim::kCopyToDevice, device, std::array{Extent{to, bytes, const_cast<std::byte*>(from)}});
  }
  Status Clear(DeviceOrdinal device, Address address, Bytes bytes) override {
    return Queue(Sim::kClear, device, std::array{Extent{address, bytes}});
  }
  Status FinishCopies(DeviceOrdinal device, Deadline until) override { return sim_.Finish(number_, device, until); }
  // All parts of one call are queued, or none. FindNonZero looks at memory as it is, so it refuses (401, ILLEGAL_STATE) while
  // something that writes to the device is queued.
  Result<NonZero> FindNonZero(DeviceOrdinal device, std::span<const Extent> extents, const ContentKey* key, Deadline) override {
    return sim_.Scan(number_, device, extents, key);
  }
  Status Gather(DeviceOrdinal device, std::span<const Extent> all) override { return Queue(Sim::kGather, device, all); }
  Status Scatter(DeviceOrdinal device, std::span<const Extent> all) override { return Queue(Sim::kScatter, device, all); }
  Status ClearAll(DeviceOrdinal device, std::span<const Extent> all) override { return Queue(Sim::kClearAll, device, all); }
  // As where kernels are loaded at first need: once some call in parts was made in that lane.
  [[nodiscard]] bool CanScanNow(DeviceOrdinal) override {
    const MutexLock lock(sim_.mutex_);
    return sim_.kernels_.contains(number_);
  }
  // Without SetStreams there are none: MomentOf, Follow, MakeStreamWaitForCopies and AwaitMoment are counted, may be made to
  // fail, and do nothing else. MakeStreamWaitForCopies waits for the copies itself.
  Result<std::unique_ptr<StreamMoment>> MomentOf(DeviceOrdinal device, void* stream) override {
    return sim_.MomentIn(device, stream);
  }
  Status Follow(DeviceOrdinal device, const StreamMoment& moment) override { return sim_.FollowIn(number_, device, moment); }
  Status MakeStreamWaitForCopies(DeviceOrdinal device, void* stream, Deadline until) override {
    return sim_.MakeStreamWait(number_, device, stream, until);
  }

 protected:
  Sim& sim_;

 private:
  Status Queue(auto call, DeviceOrdinal device, std::span<const Extent> extents) {
    return sim_.Queue(call, number_, device, extents);
  }

  const LaneNumber number_;
};

class Simulator final : public SimulatedLane<Driver, Simulator> {
 public:
  // Methods that can be made to fail, by name ("Create"), in the order of driver.h.
  // clang-format off
#define AMEM_SIMULATED_CALLS(X)                                                                                  \
  X(Create) X(Release) X(Reserve) X(FreeRange) X(Map) X(Unmap) X(SetAccess) X(Export) X(Import) X(Granularity)   \
  X(CreateMulticast) X(AddDevice) X(BindMemory) X(BindAddress) X(Unbind) X(MulticastGranularity)                 \
  X(Memory) X(DeviceCount) X(DeviceUuid) X(Synchronize) X(AllocatePinned) X(CopyToHost) X(CopyToDevice) X(Clear) \
  X(FinishCopies) X(FindNonZero) X(Gather) X(Scatter) X(ClearAll) X(MomentOf) X(Follow) X(MakeStreamWaitForCopies) X(AwaitMoment)   \
  X(OpenLane)
// clang-format on
#define AMEM_NAME(call) std::string_view(#call),
  static constexpr std::array kCalls = {AMEM_SIMULATED_CALLS(AMEM_NAME)};
#undef AMEM_NAME

  static Result<std::unique_ptr<Simulator>> Open(SimulatorOptions options);
  ~Simulator() override;  // gives everything back, except pinned buffers

  // ---- Driver
  Result<DriverHandle> Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags) override;
  Status Release(DriverHandle handle) override;
  Result<Address> Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags) override;
  Status FreeRange(Address address, Bytes bytes) override;
  Status Map(Address address, Bytes bytes, Bytes offset, DriverHandle handle, std::uint64_t flags) override;
  Status Unmap(Address address, Bytes bytes) override;
  Status SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access) override;
  Result<UniqueFd> Export(DriverHandle handle) override { return ExportAs(handle, 1); }
  Result<UniqueFd> ExportAs(DriverHandle handle, std::uint32_t type);  // CUmemAllocationHandleType
  Result<DriverHandle> Import(const UniqueFd& descriptor) override;
  Result<Bytes> Granularity(const AllocationProperties& properties) override;
  Result<DriverHandle> CreateMulticast(const MulticastProperties& properties) override;
  Status AddDevice(DriverHandle multicast, DeviceOrdinal device) override;
  Status BindMemory(DriverHandle multicast, Bytes offset, DriverHandle memory, Bytes memory_offset, Bytes bytes) override;
  Status BindAddress(DriverHandle multicast, Bytes offset, Address address, Bytes bytes) override;
  Status Unbind(DriverHandle multicast, DeviceOrdinal device, Bytes offset, Bytes bytes) override;
  Result<Bytes> MulticastGranularity() override;
  Result<MemoryInfo> Memory(DeviceOrdinal device) override;
  Result<int> DeviceCount() override;
  Result<std::string> DeviceUuid(DeviceOrdinal device) override;
  std::string Version() override { return "simulator 1"; }
  Status Synchronize(DeviceOrdinal device, Deadline until, const std::function<bool()>& breaks_off = {}) override;
  [[nodiscard]] std::optional<HostRoom> HostMemory() override;
  Result<std::unique_ptr<PinnedBuffer>> AllocatePinned(Bytes bytes) override;
  Released ReleaseContext(DeviceOrdinal, const std::function<int()>& release) override {
    const int result = release();
    return {result, result == 0};  // each reference is the last one
  }
  Status AwaitMoment(DeviceOrdinal device, const StreamMoment& moment, Deadline until) override;
  // Its calls are counted with the simulator's own, and fail like those.
  Result<std::unique_ptr<Copier>> OpenLane() override;

  Result<SimulatedMapping> MappingAt(Address address);  // kNotFound

  // All below is for tests and the stand-in driver; what has no body here is in tests/stand_ins/simulator.
  // ---- what the driver can and AMem does not need (for programs that use the simulator as a driver)
  Result<DriverHandle> Retain(Address address);  // adds a reference to the handle mapped there
  Result<AllocationProperties> PropertiesOf(DriverHandle handle);
  Result<Extent> RangeAt(Address address);  // kNotFound

  // What a kernel does: the answer tells whether the device may use that memory.
  Status KernelReads(DeviceOrdinal device, Address from, std::span<std::byte> to);
  Status KernelWrites(DeviceOrdinal device, Address to, std::span<const std::byte> from);

  // ---- what it holds, what it counted, and how it is made to fail
  [[nodiscard]] SimulatorSnapshot Snapshot() const;
  [[nodiscard]] Bytes BytesInUse(DeviceOrdinal device) const;          // by all processes of the world
  [[nodiscard]] std::size_t QueuedCopies(DeviceOrdinal device) const;  // in all lanes
  // Devices where calls needed a context, which the real driver would keep.
  [[nodiscard]] std::set<DeviceOrdinal> ContextsOpened() const;
  [[nodiscard]] std::uint64_t Calls(std::string_view call) const;  // including failed ones
  [[nodiscard]] const std::shared_ptr<SimulatorWorld>& world() const { return world_; }
  [[nodiscard]] std::uint32_t member() const { return member_; }  // in the world

  // The nth next call of that name (1: the next) fails with `result` and does nothing. kInvalid: no such call.
  Status FailNext(std::string_view call, std::uint64_t nth, int result);
  void ForgetPlannedFailures();  // that have not happened yet
  // Called before every call, without locks, with its name and count, including this one; it may wait or use the simulator. Any
  // result but 0 makes the call fail. An empty function removes it.
  using Hook = std::function<int(std::string_view call, std::uint64_t count)>;
  void SetHook(Hook hook);
  // Every call of that name takes this much longer. kInvalid: no such call.
  Status SetLatency(std::string_view call, std::chrono::nanoseconds latency);
  void SetCapturing(bool capturing) { capturing_ = capturing; }  // Synchronize is refused meanwhile
  // Work on all devices that does not end until kNone is set; Synchronize or FinishCopies wait for it.
  enum class Work : std::uint8_t { kNone, kOfProgram, kCopies };
  void SetWork(Work work) { work_ = work; }
  // No device can access another's memory, like GPUs without a link.
  void SetApart() { apart_ = true; }
  void SetStreams(SimulatedStreams* streams) { streams_ = streams; }  // null: none; set it before the first call about one
  [[nodiscard]] Bytes PinnedBytes() const;                            // in all pinned buffers

 private:
  template <class, class>
  friend class SimulatedLane;
#define AMEM_CONSTANT(call) k##call,
  enum Call : std::size_t { AMEM_SIMULATED_CALLS(AMEM_CONSTANT) };
#undef AMEM_CONSTANT
  struct Physical;  // memory, as this simulator holds it
  struct Mapped {
    Bytes bytes = 0;
    std::shared_ptr<Physical> memory;
    std::vector<AccessDescriptor> access;
  };
  struct PinnedRegistry;
  class SimulatedPinnedBuffer;
  enum class CopyKind : std::uint8_t { kToHost, kToDevice, kClear, kKernelReads, kKernelWrites };
  struct Copy {
    CopyKind kind{};
    Address device_address;
    std::byte* host = nullptr;
    Bytes bytes = 0;
  };
  struct Piece {  // one mapping's part of a copy
    std::shared_ptr<Physical> memory;
    Bytes offset = 0, bytes = 0;
    friend bool operator==(const Piece&, const Piece&) = default;
  };
  struct Faults {  // that tests plan
    virtual ~Faults() = default;
    virtual int Of(Call call, std::uint64_t count) = 0;  // as Hook
  };
  struct PlannedFaults;
  PlannedFaults& Plan();

  Simulator(SimulatorOptions options, std::shared_ptr<SimulatorWorld> world, std::uint32_t member);

  // Begins every call. Returns 0, or the CUresult that it must fail with; with `fail`, as a Status. EnterOn also checks the
  // device.
  int Enter(Call call);
  Status Enter(Call call, const auto& fail) {
    const int result = Enter(call);
    return result == 0 ? Status{}
                       : fail(result, guard_.InChild() ? "a forked child cannot use its parent's GPU memory"
                                      : dead_          ? "an access to what is not mapped has killed the context"
                                                       : "a test asked for this failure");
  }
  Status EnterOn(DeviceOrdinal device, Call call, const auto& fail) {
    AMEM_TRY(Enter(call, fail));
    return WorldDevice(device.value) < 0 ? fail(cuda::kInvalidDevice, "there is no such device") : Status{};
  }

  [[nodiscard]] std::int32_t WorldDevice(std::int32_t ordinal) const;  // -1: none
  [[nodiscard]] bool Granular(std::uint64_t value) const { return (value & (options_.granularity - 1)) == 0; }
  [[nodiscard]] bool MulticastGranular(std::uint64_t value) const {
    return (value & (options_.multicast_granularity - 1)) == 0;
  }
  // The second part says what is wrong.
  std::pair<int, std::string_view> Bind(DriverHandle multicast, Bytes offset, const std::shared_ptr<Physical>& memory,
                                        Bytes memory_offset, Bytes bytes) REQUIRES(mutex_);
  int CheckProperties(const AllocationProperties& properties) const;
  std::shared_ptr<Physical> Find(DriverHandle handle) const REQUIRES(mutex_);  // null: unknown or released
  DriverHandle Adopt(std::shared_ptr<Physical> memory) REQUIRES(mutex_);
  void ForgetIfUnused(const std::shared_ptr<Physical>& memory) REQUIRES(mutex_);
  Status EnsureDescriptor(Physical& memory) const REQUIRES(mutex_);
  using Mappings = std::map<Address, Mapped>;
  [[nodiscard]] bool Splits(Address address, Bytes bytes) const REQUIRES(mutex_);  // a mapping lies partly inside
  [[nodiscard]] Mappings::iterator End(Address address, Bytes bytes) REQUIRES(mutex_) {
    return mappings_.lower_bound(address + bytes);
  }
  int ChangeAccess(Address address, Mapped& mapping, std::span<const AccessDescriptor> access) const REQUIRES(mutex_);
  [[nodiscard]] bool Reserved(Address address, Bytes bytes) const REQUIRES(mutex_);
  // Addresses that are only numbers, and mmap's.
  Address ReserveNumbers(Bytes bytes, Bytes alignment, Address hint) REQUIRES(mutex_);
  static Result<Address> ReserveAddresses(Bytes bytes, Bytes alignment, Address hint);

  void OpenContext(DeviceOrdinal device);
  class Lane;
  struct Moment;
  Result<std::unique_ptr<StreamMoment>> MomentIn(DeviceOrdinal device, void* stream);
  Status Queue(Call call, LaneNumber lane, DeviceOrdinal device, std::span<const Extent> extents);
  Status Finish(LaneNumber lane, DeviceOrdinal device, Deadline until);
  Result<NonZero> Scan(LaneNumber lane, DeviceOrdinal device, std::span<const Extent> extents, const ContentKey* key);
  Status OfStream(Call call, DeviceOrdinal device, std::optional<void*> stream = {});
  Status FollowIn(LaneNumber lane, DeviceOrdinal device, const StreamMoment& moment);
  Status MakeStreamWait(LaneNumber lane, DeviceOrdinal device, void* stream, Deadline until);
  Status Drain(LaneNumber lane, DeviceOrdinal device, Deadline until);  // performs queued copies
  Status Kernel(DeviceOrdinal device, const Copy& access);
  Result<std::vector<Piece>> Resolve(DeviceOrdinal device, const Copy& copy) const REQUIRES(mutex_);
  Result<std::vector<Piece>> LockAndResolve(DeviceOrdinal device, const Copy& copy) const;
  static Status Perform(const Copy& copy, const std::vector<Piece>& pieces);
  [[nodiscard]] static bool AwaitUntil(Deadline until, const std::function<bool()>& idle);

  const SimulatorOptions options_;
  const std::shared_ptr<SimulatorWorld> world_;
  const std::uint32_t member_;
  const ForkGuard guard_;
  std::vector<std::int32_t> visible_;

  Mutex finishing_{LockRank::kDriverCopies};  // one FinishCopies at a time, because it waits for other threads' copies too
  mutable Mutex mutex_{LockRank::kDriverState};
  std::uint64_t next_handle_ GUARDED_BY(mutex_);
  std::uint64_t next_address_ GUARDED_BY(mutex_) = 0;                                         // used without physical memory
  std::unordered_map<std::uint64_t, std::shared_ptr<Physical>> memories_ GUARDED_BY(mutex_);  // by handle; kept while mapped
  std::map<Address, Bytes> ranges_ GUARDED_BY(mutex_);
  Mappings mappings_ GUARDED_BY(mutex_);
  std::map<std::pair<LaneNumber, DeviceOrdinal>, std::vector<Copy>> queued_ GUARDED_BY(mutex_);
  std::map<std::pair<LaneNumber, DeviceOrdinal>, std::vector<std::function<bool()>>> follows_
      GUARDED_BY(mutex_);                            // before what is queued
  LaneNumber lanes_ GUARDED_BY(mutex_) = 0;          // opened so far
  std::set<LaneNumber> kernels_ GUARDED_BY(mutex_);  // that have loaded theirs
  std::set<DeviceOrdinal> contexts_ GUARDED_BY(mutex_);
  std::shared_ptr<PinnedRegistry> pinned_;
  std::atomic<bool> capturing_ = false;
  std::atomic<Work> work_ = Work::kNone;
  std::atomic<bool> apart_{false};
  std::atomic<SimulatedStreams*> streams_ = nullptr;
  std::atomic<bool> dead_ = false;  // the context is dead after an access to unmapped memory

  std::array<std::atomic<std::uint64_t>, kCalls.size()> counts_{};
  std::unique_ptr<Faults> planned_ GUARDED_BY(mutex_);
  std::atomic<Faults*> faults_ = nullptr;  // these; null: no call is made to fail
};

}  // namespace amem
