// Drivers on the simulator that can do less, or more.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "replay/driver/simulator/simulator.h"

namespace amem::test {

// A driver without kernels, streams, lanes and multicast objects: for the rest, the defaults of the seam.
class PlainDriver : public Driver {
 public:
  explicit PlainDriver(Simulator& sim) : sim_(sim) {}
  std::string Name() const override { return "plain"; }
  Result<DriverHandle> Create(Bytes b, const AllocationProperties& p, std::uint64_t f) override { return sim_.Create(b, p, f); }
  Status Release(DriverHandle h) override { return sim_.Release(h); }
  Result<Address> Reserve(Bytes b, Bytes a, Address h, std::uint64_t f) override { return sim_.Reserve(b, a, h, f); }
  Status FreeRange(Address a, Bytes b) override { return sim_.FreeRange(a, b); }
  Status Map(Address a, Bytes b, Bytes o, DriverHandle h, std::uint64_t f) override { return sim_.Map(a, b, o, h, f); }
  Status Unmap(Address a, Bytes b) override { return sim_.Unmap(a, b); }
  Status SetAccess(Address a, Bytes b, std::span<const AccessDescriptor> d) override { return sim_.SetAccess(a, b, d); }
  Result<UniqueFd> Export(DriverHandle h) override { return sim_.Export(h); }
  Result<DriverHandle> Import(const UniqueFd& d) override { return sim_.Import(d); }
  Result<Bytes> Granularity(const AllocationProperties& p) override { return sim_.Granularity(p); }
  Result<MemoryInfo> Memory(DeviceOrdinal d) override { return sim_.Memory(d); }
  Result<int> DeviceCount() override { return sim_.DeviceCount(); }
  Result<std::string> DeviceUuid(DeviceOrdinal d) override { return sim_.DeviceUuid(d); }
  std::string Version() override { return sim_.Version(); }
  Status Synchronize(DeviceOrdinal d, Deadline u, const std::function<bool()>& b) override { return sim_.Synchronize(d, u, b); }
  Result<std::unique_ptr<PinnedBuffer>> AllocatePinned(Bytes b) override { return sim_.AllocatePinned(b); }
  Status CopyToHost(DeviceOrdinal d, std::byte* t, Address f, Bytes b) override { return sim_.CopyToHost(d, t, f, b); }
  Status CopyToDevice(DeviceOrdinal d, Address t, const std::byte* f, Bytes b) override {
    return sim_.CopyToDevice(d, t, f, b);
  }
  Status Clear(DeviceOrdinal d, Address a, Bytes b) override { return sim_.Clear(d, a, b); }
  std::optional<HostRoom> HostMemory() override { return sim_.HostMemory(); }
  Status FinishCopies(DeviceOrdinal d, Deadline u) override { return sim_.FinishCopies(d, u); }
  Result<NonZero> FindNonZero(DeviceOrdinal, std::span<const Extent> e, const ContentKey*, Deadline) override {
    return Unscanned(e, "the plain driver does not look at contents");
  }
  bool CanScanNow(DeviceOrdinal) override { return true; }
  Result<std::unique_ptr<StreamMoment>> MomentOf(DeviceOrdinal, void*) override { return std::make_unique<StreamMoment>(); }
  Status Follow(DeviceOrdinal, const StreamMoment&) override { return {}; }
  Status MakeStreamWaitForCopies(DeviceOrdinal d, void*, Deadline u) override { return FinishCopies(d, u); }
  Status AwaitMoment(DeviceOrdinal, const StreamMoment&, Deadline) override { return {}; }
  Result<std::unique_ptr<Copier>> OpenLane() override { return Lacking("lanes"); }
  Result<DriverHandle> CreateMulticast(const MulticastProperties&) override { return Lacking("multicast objects"); }
  Status AddDevice(DriverHandle, DeviceOrdinal) override { return Lacking("multicast objects"); }
  Status BindMemory(DriverHandle, Bytes, DriverHandle, Bytes, Bytes) override { return Lacking("multicast objects"); }
  Status BindAddress(DriverHandle, Bytes, Address, Bytes) override { return Lacking("multicast objects"); }
  Status Unbind(DriverHandle, DeviceOrdinal, Bytes, Bytes) override { return Lacking("multicast objects"); }
  Result<Bytes> MulticastGranularity() override { return Lacking("multicast objects"); }

 protected:
  static Status Lacking(const std::string& what) {
    return {Code::kUnsupported, "this driver has no " + what, cuda::kNotSupported};
  }
  Simulator& sim_;
};

// Pins in two parts, as the CUDA driver does, and counts them.
class PopulatingDriver final : public PlainDriver {
 public:
  PopulatingDriver(Simulator& sim, std::chrono::milliseconds each) : PlainDriver(sim), each_(each) {}
  [[nodiscard]] bool Populates(Bytes) override { return true; }
  std::unique_ptr<HostPages> Populate(Bytes) override {
    const std::size_t now = ++under_way_;
    for (std::size_t most = at_once_; most < now && !at_once_.compare_exchange_weak(most, now);) {
    }
    std::this_thread::sleep_for(each_);
    --under_way_;
    ++populated_;
    return std::make_unique<Pages>(pages_);
  }
  Result<std::unique_ptr<PinnedBuffer>> Pin(std::unique_ptr<HostPages> pages, Bytes bytes) override {
    if (pages == nullptr) pages = Populate(bytes);
    ++pinned_populated_;
    return AllocatePinned(bytes);
  }
  [[nodiscard]] std::size_t populated() const { return populated_; }                // so far
  [[nodiscard]] std::size_t pinned_populated() const { return pinned_populated_; }  // so far
  [[nodiscard]] std::size_t at_once() const { return at_once_; }                    // threads that populated, at most
  [[nodiscard]] std::size_t pages() const { return pages_; }                        // that are there and not pinned

 private:
  class Pages final : public HostPages {
   public:
    explicit Pages(std::atomic<std::size_t>& count) : count_(count) { ++count_; }
    ~Pages() override { --count_; }

   private:
    std::atomic<std::size_t>& count_;
  };

  const std::chrono::milliseconds each_;
  std::atomic<std::size_t> under_way_ = 0, at_once_ = 0, populated_ = 0, pinned_populated_ = 0, pages_ = 0;
};

}  // namespace amem::test
