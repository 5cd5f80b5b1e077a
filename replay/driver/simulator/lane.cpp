// The simulator's lanes, and the calls about the program's streams.
#include "replay/driver/simulator/internal.h"

namespace amem {

class Simulator::Lane final : public SimulatedLane<Copier, Simulator> {
 public:
  using SimulatedLane::SimulatedLane;
  Result<std::unique_ptr<PinnedBuffer>> AllocatePinned(Bytes bytes) override { return sim_.AllocatePinned(bytes); }
};

Result<std::unique_ptr<Copier>> Simulator::OpenLane() {
  AMEM_TRY(Enter(kOpenLane, Failing([] { return "open a lane"; })));
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
  AMEM_TRY(EnterOn(device, call, fail));
  SimulatedStreams* const streams = streams_;
  if (!stream || streams == nullptr || !streams->Capturing(stream)) return {};
  return {Code::kRefused, std::string(kCalls[call]) + ": a stream capture is running there; end it first",
          cuda::kCaptureUnsupported};
}

Result<std::unique_ptr<StreamMoment>> Simulator::MomentIn(DeviceOrdinal device, void* stream) {
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

Status Simulator::AwaitMoment(DeviceOrdinal device, const StreamMoment& moment, Deadline until) {
  const Deadline began = Now();
  AMEM_TRY(OfStream(kAwaitMoment, device));
  const auto* const held = dynamic_cast<const Moment*>(&moment);
  return held == nullptr || AwaitUntil(until, held->passed()) ? Status{} : NotIdle(device, began, "");
}

}  // namespace amem
