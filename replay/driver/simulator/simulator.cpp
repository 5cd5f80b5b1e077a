#include "replay/driver/simulator/simulator.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <thread>

#include "replay/driver/result_names.h"
#include "replay/driver/simulator/internal.h"

namespace amem {

constexpr std::uint64_t kFirstHandle = 0x5100000001;  // unlike ids and addresses, so that a mix-up shows
constexpr std::uint64_t kFirstNumberedAddress = 0x500000000000;

Result<std::unique_ptr<Simulator>> Simulator::Open(SimulatorOptions options) {
  if (!std::has_single_bit(options.granularity) || options.granularity < 4096) {
    return Status(Code::kInvalid, fmt::format("simulator with a granularity of {} bytes: give a power of two, at least 4096",
                                              options.granularity));
  }
  if (options.multicast_granularity == 0) options.multicast_granularity = options.granularity;
  std::shared_ptr<SimulatorWorld> world = options.in_memory;
  if (!options.world.empty()) {
    AMEM_ASSIGN(world, SimulatorWorld::Open(options.world, options.devices, options.capacity_per_device));
  } else if (!world) {
    AMEM_ASSIGN(world, SimulatorWorld::InMemory(options.devices, options.capacity_per_device));
  }
  for (const std::int32_t device : options.visible) {
    if (device < 0 || device >= world->devices()) {
      return Status(Code::kInvalid,
                    fmt::format("simulator with device {} visible: the world has {}", device, world->devices()));
    }
  }
  AMEM_ASSIGN(const auto member, world->Attach());
  return std::unique_ptr<Simulator>(new Simulator(std::move(options), std::move(world), member));
}

Simulator::Simulator(SimulatorOptions options, std::shared_ptr<SimulatorWorld> world, std::uint32_t member)
    : SimulatedLane(*this, 0),
      options_(std::move(options)),
      world_(std::move(world)),
      member_(member),
      visible_(options_.visible),
      next_handle_(kFirstHandle),
      next_address_(kFirstNumberedAddress),
      pinned_(std::make_shared<PinnedRegistry>()) {
  if (!visible_.empty()) return;
  visible_.resize(static_cast<std::size_t>(world_->devices()));
  std::iota(visible_.begin(), visible_.end(), 0);
}

Simulator::~Simulator() {
  if (guard_.InChild()) return;  // a forked child owns nothing of this
  if (options_.physical) {
    for (const auto& [address, bytes] : ranges_) munmap(Pointer(address), bytes);
  }
  mappings_.clear();
  memories_.clear();
  world_->Detach(member_);
}

int Simulator::Enter(Call call) {
  const std::uint64_t count = counts_[call].fetch_add(1, std::memory_order_relaxed) + 1;
  if (guard_.InChild()) return cuda::kNotInitialized;
  if (dead_) return cuda::kIllegalAddress;
  Faults* const faults = faults_.load(std::memory_order_acquire);
  return faults == nullptr ? 0 : faults->Of(call, count);
}

std::int32_t Simulator::WorldDevice(std::int32_t ordinal) const {
  if (ordinal < 0 || static_cast<std::size_t>(ordinal) >= visible_.size()) return -1;
  return world_->DeviceNow(member_, visible_[static_cast<std::size_t>(ordinal)]);
}

int Simulator::CheckProperties(const AllocationProperties& properties) const {
  if (properties.type != 1 || (properties.handle_types & ~(kPosixDescriptor | kFabric)) != 0) return cuda::kInvalidValue;
  if ((properties.handle_types & kFabric) != 0 && !options_.fabric)
    return cuda::kNotPermitted;  // as without access to an IMEX channel
  const LocationType type = properties.location.type;
  if (type == LocationType::kInvalid || type > LocationType::kHostNumaCurrent) return cuda::kInvalidValue;
  return type == LocationType::kDevice && WorldDevice(properties.location.id) < 0 ? cuda::kInvalidDevice : 0;
}

Result<Bytes> Simulator::Granularity(const AllocationProperties& properties) {
  const auto fail = Failing([&] { return "cuMemGetAllocationGranularity"; });
  AMEM_TRY(Enter(kGranularity, fail));
  if (const int result = CheckProperties(properties)) return fail(result, "these properties cannot be had");
  return options_.granularity;
}

Result<MemoryInfo> Simulator::Memory(DeviceOrdinal device) {
  const auto fail = Failing([&] { return "cuMemGetInfo device " + std::to_string(device.value); });
  AMEM_TRY(EnterOn(device, kMemory, fail));
  OpenContext(device);
  const Bytes total = world_->capacity(), used = world_->InUse(WorldDevice(device.value));
  return MemoryInfo{.free = total - std::min(total, used), .total = total};
}

void Simulator::OpenContext(DeviceOrdinal device) {
  const MutexLock lock(mutex_);
  contexts_.insert(device);
}

Result<int> Simulator::DeviceCount() {
  AMEM_TRY(Enter(kDeviceCount, Failing([] { return "cuDeviceGetCount"; })));
  return static_cast<int>(visible_.size());
}

Result<std::string> Simulator::DeviceUuid(DeviceOrdinal device) {
  const auto fail = Failing([&] { return "cuDeviceGetUuid device " + std::to_string(device.value); });
  AMEM_TRY(EnterOn(device, kDeviceUuid, fail));
  return fmt::format("GPU-51000000-0000-4000-8000-{:012}", WorldDevice(device.value));
}

Status Simulator::Synchronize(DeviceOrdinal device, Deadline until, const std::function<bool()>& breaks_off) {
  const Deadline began = Now();
  const auto fail = Failing([&] { return "cuCtxSynchronize device " + std::to_string(device.value); });
  AMEM_TRY(EnterOn(device, kSynchronize, fail));
  SimulatedStreams* const streams = streams_;
  if (capturing_ || (streams != nullptr && streams->Capturing({})))
    return fail(cuda::kCaptureUnsupported, "a stream capture is running; end it first");
  const auto done = streams != nullptr ? streams->Submitted({}) : [] { return true; };
  bool broken_off = false;
  const auto idle = [&] {
    const bool is_idle = work_ != Work::kOfProgram && done();
    broken_off = !is_idle && breaks_off && breaks_off();
    return is_idle || broken_off;
  };
  if (!AwaitUntil(until, idle)) return NotIdle(device, began, "");
  return broken_off ? BrokenOff(device) : Status{};
}

bool Simulator::AwaitUntil(Deadline until, const std::function<bool()>& idle) {
  while (!idle()) {
    if (Passed(until)) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

std::string Errno(const std::string& tried) { return tried + ": " + std::strerror(errno); }

Status SimulatedFailure(int result, std::string_view tried, std::string_view why) {
  return {CodeOfResult(result),
          fmt::format("{}: {} from the simulator{}{}", tried, CudaErrorText(result), why.empty() ? "" : ": ", why), result};
}

// ---- lanes, and the calls about the program's streams

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

struct Simulator::Moment final : StreamMoment {
  explicit Moment(std::function<bool()> has_passed) : passed(std::move(has_passed)) {}
  const std::function<bool()> passed;
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
  if (const auto* const held = dynamic_cast<const Moment*>(&moment)) follows_[{lane, device}].push_back(held->passed);
  return {};
}

// The copies are done before this returns, so the stream goes on behind them.
Status Simulator::MakeStreamWait(LaneNumber lane, DeviceOrdinal device, void* stream, Deadline until) {
  AMEM_TRY(OfStream(kMakeStreamWaitForCopies, device, stream));
  return streams_ == nullptr ? Status{} : Drain(lane, device, until);
}

Status Simulator::AwaitMoment(DeviceOrdinal device, const StreamMoment& moment, Deadline until) {
  const Deadline began = Now();
  AMEM_TRY(OfStream(kAwaitMoment, device));
  const auto* const held = dynamic_cast<const Moment*>(&moment);
  return held == nullptr || AwaitUntil(until, held->passed) ? Status{} : NotIdle(device, began, "");
}

}  // namespace amem
