// The simulator's lanes, and the calls about the program's streams.
#include "replay/driver/simulator/internal.h"

namespace amem {

class Simulator::Lane final : public Copier {
 public:
  Lane(Simulator& sim, LaneNumber number) : sim_(sim), number_(number) {}
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
  Status FinishCopies(DeviceOrdinal device, Deadline until) override { return sim_.Finish(number_, device, until); }
  Result<NonZero> FindNonZero(DeviceOrdinal device, std::span<const Extent> extents, const ContentKey& key, Deadline) override {
    return sim_.Look(number_, device, extents, key);
  }
  [[nodiscard]] bool CanLook(DeviceOrdinal) override { return sim_.HasKernels(number_); }
  Status Gather(DeviceOrdinal device, std::span<const Extent> extents) override {
    return sim_.MoveAll(kGather, number_, device, extents);
  }
  Status Scatter(DeviceOrdinal device, std::span<const Extent> extents) override {
    return sim_.MoveAll(kScatter, number_, device, extents);
  }
  Status ClearAll(DeviceOrdinal device, std::span<const Extent> extents) override {
    return sim_.MoveAll(kClearAll, number_, device, extents);
  }
  Result<std::unique_ptr<StreamMoment>> MomentOf(DeviceOrdinal device, void* stream) override {
    return sim_.MomentOf(device, stream);
  }
  Status Follow(DeviceOrdinal device, const StreamMoment& moment) override { return sim_.FollowIn(number_, device, moment); }
  Status Lead(DeviceOrdinal device, void* stream, Deadline until) override {
    return sim_.LeadFrom(number_, device, stream, until);
  }

 private:
  Simulator& sim_;
  const LaneNumber number_;
};

Result<std::unique_ptr<Copier>> Simulator::OpenLane() {
  if (const int result = Enter(kOpenLane)) return SimulatedFailure(result, "open a lane", WhyNotEntered());
  const MutexLock lock(mutex_);
  return std::unique_ptr<Copier>(std::make_unique<Lane>(*this, ++lanes_));
}

class Simulator::Moment final : public StreamMoment {
 public:
  explicit Moment(std::function<bool()> passed) : passed_(std::move(passed)) {}
  [[nodiscard]] const std::function<bool()>& passed() const { return passed_; }

 private:
  const std::function<bool()> passed_;
};

// kRefused while the stream is being captured.
Status Simulator::OfStream(Call call, DeviceOrdinal device, std::optional<void*> stream) {
  const auto fail = Failing([&] { return std::string(kCalls[call]) + " device " + std::to_string(device.value); });
  if (const int result = Enter(call)) return fail(result, WhyNotEntered());
  if (WorldDevice(device.value) < 0) return fail(cuda::kInvalidDevice, kNoSuchDevice);
  SimulatedStreams* const streams = streams_;
  if (!stream || streams == nullptr || !streams->Capturing(stream)) return {};
  return {Code::kRefused, std::string(kCalls[call]) + ": a stream capture is running there; end it first",
          cuda::kCaptureUnsupported};
}

Result<std::unique_ptr<StreamMoment>> Simulator::MomentOf(DeviceOrdinal device, void* stream) {
  AMEM_TRY(OfStream(kMomentOf, device, stream));
  SimulatedStreams* const streams = streams_;
  if (streams == nullptr) return std::make_unique<StreamMoment>();
  return std::unique_ptr<StreamMoment>(std::make_unique<Moment>(streams->Submitted(stream)));
}

Status Simulator::FollowIn(LaneNumber lane, DeviceOrdinal device, const StreamMoment& moment) {
  AMEM_TRY(OfStream(kFollow, device));
  const MutexLock lock(mutex_);
  if (const auto* const held = dynamic_cast<const Moment*>(&moment)) follows_[{lane, device}].push_back(held->passed());
  return {};
}

// The copies are done before this returns, so the stream goes on behind them.
Status Simulator::LeadFrom(LaneNumber lane, DeviceOrdinal device, void* stream, Deadline until) {
  AMEM_TRY(OfStream(kLead, device, stream));
  return streams_ == nullptr ? Status{} : Drain(lane, device, until);
}

Status Simulator::Follow(DeviceOrdinal device, const StreamMoment& moment) { return FollowIn(0, device, moment); }
Status Simulator::Lead(DeviceOrdinal device, void* stream, Deadline until) { return LeadFrom(0, device, stream, until); }

Status Simulator::AwaitMoment(DeviceOrdinal device, const StreamMoment& moment, Deadline until) {
  const Deadline began = Now();
  AMEM_TRY(OfStream(kAwaitMoment, device));
  const auto* const held = dynamic_cast<const Moment*>(&moment);
  return held == nullptr || AwaitUntil(until, held->passed()) ? Status{} : NotIdle(device, began, "");
}

}  // namespace amem
