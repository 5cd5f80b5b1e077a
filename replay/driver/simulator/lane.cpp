// The simulator's lanes: copies that are queued and finished apart, and the calls about streams, of which it has none.
#include "replay/driver/simulator/internal.h"

namespace amem {

class Simulator::Lane final : public Copier {
 public:
  Lane(Simulator& sim, LaneNumber number) : sim_(sim), number_(number) { SetPatience(sim.patience()); }
  [[nodiscard]] std::string Name() const override { return sim_.Name(); }
  Result<std::unique_ptr<PinnedBuffer>> AllocatePinned(Bytes bytes) override { return sim_.AllocatePinned(bytes); }
  Status CopyToHost(DeviceOrdinal device, std::byte* to, Address from, Bytes bytes) override {
    return sim_.CopyOne(kCopyToHost, number_, device, {CopyKind::kToHost, from, to, bytes});
  }
  Status CopyToDevice(DeviceOrdinal device, Address to, const std::byte* from, Bytes bytes) override {
    return sim_.CopyOne(kCopyToDevice, number_, device, {CopyKind::kToDevice, to, const_cast<std::byte*>(from), bytes});
  }
  Status Clear(DeviceOrdinal device, Address address, Bytes bytes) override {
    return sim_.CopyOne(kClear, number_, device, {CopyKind::kClear, address, nullptr, bytes});
  }
  Status FinishCopies(DeviceOrdinal device) override { return sim_.Finish(number_, device); }
  Result<NonZero> FindNonZero(DeviceOrdinal device, std::span<const Extent> extents, Bytes block) override {
    return sim_.Look(number_, device, extents, block);
  }
  Status Gather(DeviceOrdinal device, std::byte* to, std::span<const Extent> from) override {
    return sim_.MoveAll(kGather, number_, device, from, to);
  }
  Status Scatter(DeviceOrdinal device, std::span<const Extent> to, const std::byte* from) override {
    return sim_.MoveAll(kScatter, number_, device, to, const_cast<std::byte*>(from));
  }
  Status ClearAll(DeviceOrdinal device, std::span<const Extent> extents) override {
    return sim_.MoveAll(kClearAll, number_, device, extents, nullptr);
  }
  Result<std::unique_ptr<StreamMoment>> MomentOf(DeviceOrdinal device, void* stream) override {
    return sim_.MomentOf(device, stream);
  }
  Status Follow(DeviceOrdinal device, const StreamMoment& moment) override { return sim_.Follow(device, moment); }
  Status Lead(DeviceOrdinal device, void* stream) override { return sim_.Lead(device, stream); }

 private:
  Simulator& sim_;
  const LaneNumber number_;
};

Result<std::unique_ptr<Copier>> Simulator::OpenLane() {
  if (const int result = Enter(kOpenLane)) return SimulatedFailure(result, "open a lane", WhyNotEntered());
  const std::lock_guard lock(mutex_);
  return std::unique_ptr<Copier>(std::make_unique<Lane>(*this, ++lanes_));
}

Status Simulator::OfStream(Call call, DeviceOrdinal device) {
  const auto fail = Failing([&] { return std::string(kCalls[call]) + " device " + std::to_string(device.value); });
  if (const int result = Enter(call)) return fail(result, WhyNotEntered());
  return WorldDevice(device.value) < 0 ? fail(cuda::kInvalidDevice, kNoSuchDevice) : Status{};
}

Result<std::unique_ptr<StreamMoment>> Simulator::MomentOf(DeviceOrdinal device, void*) {
  AMEM_TRY(OfStream(kMomentOf, device));
  return std::make_unique<StreamMoment>();
}
Status Simulator::Follow(DeviceOrdinal device, const StreamMoment&) { return OfStream(kFollow, device); }
Status Simulator::Lead(DeviceOrdinal device, void*) { return OfStream(kLead, device); }
Status Simulator::AwaitStream(DeviceOrdinal device, void*) { return OfStream(kAwaitStream, device); }

}  // namespace amem
