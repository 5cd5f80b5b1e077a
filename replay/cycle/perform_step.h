// The driver calls of one step of a plan, for the executor and for replays.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "replay/driver/driver.h"
#include "replay/peers/peers.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

// What differs between a live session and its replay.
class StepSide {
 public:
  virtual ~StepSide() = default;
  [[nodiscard]] virtual const State& state() const = 0;
  [[nodiscard]] virtual DriverHandle HandleOf(AllocationId allocation) const = 0;  // zero: none
  // The device whose memory stands in for an allocation; nothing: it is itself.
  [[nodiscard]] virtual std::optional<DeviceOrdinal> SubstituteOf(AllocationId allocation) const = 0;
  // Where a recorded address lies on this driver.
  [[nodiscard]] virtual Address Here(Address recorded) const { return recorded; }
  // What an import's owner hands out: the descriptor, and which version of a multicast object it is.
  virtual Result<SharedAllocation> Shared(const Step& import) = 0;
  // Whether a device must still be added to a multicast object.
  [[nodiscard]] virtual bool Lacks(AllocationId multicast, DeviceOrdinal device) const {
    return static_cast<void>(multicast), static_cast<void>(device), true;
  }
  // Steps that copy contents: kScan, kSave, kBeginRestore, kRestore.
  virtual Status Copy(const Step& step) = 0;
  // Steps with network cards: kDrain, kDeregister, kRegister. A replay has no cards.
  virtual Status OnNetwork(const Step& step) { return static_cast<void>(step), Status{}; }
  // The deadline for waits.
  [[nodiscard]] virtual Deadline until() const = 0;
  // Whether the other members go on without this step, so that its wait may be broken off.
  [[nodiscard]] virtual bool IsOvertaken() const { return false; }
};

// kOutOfMemory: a device has less than `needed` free; says who holds memory there, and ends with what to do `then`.
Status CheckFreeMemory(Driver& driver, DeviceOrdinal device, Bytes needed, std::string_view then);

// What a step needs to know of a multicast object.
struct MulticastTarget {
  std::uint32_t devices = 0;  // that it is for; zero: it is another session's
  bool lacks_device = false;  // kAddDevice: the device is not added yet
  MulticastBinding binding;   // kBind
  DriverHandle bound;         // the memory to bind, and its offset in the handle
  Bytes bound_offset = 0;
};

// What a step works on, as it was when the step began.
struct StepTarget {
  std::string tag;  // the step's pool; empty: NCCL's
  Address address;  // on this driver
  DriverHandle handle;
  Bytes bytes = 0;
  AllocationProperties properties;
  std::uint64_t flags = 0;
  Mapping mapping;
  // The device whose memory stands in for a lost owner's, or for an object that lost a member. Of a kCreate step: the device on
  // which it makes that memory.
  std::optional<DeviceOrdinal> stands_in;
  std::optional<MulticastTarget> multicast;  // it is a multicast object, or an import of one
};

// Maps the piece that stands in for an allocation of `whole` bytes over and over, or not at all.
Status MapRepeatedly(Driver& driver, Address address, Bytes whole, DriverHandle piece, std::uint64_t flags);

// For one thread at a time.
class StepPerformer {
 public:
  // Both must outlive the performer. `pool`: whose steps these are; zero: NCCL's.
  StepPerformer(Driver& driver, StepSide& side, PoolId pool = {}) : driver_(driver), side_(side), pool_(pool) {}

  // The caller keeps the side's state from changing. kNotFound: the allocation or mapping does not exist.
  [[nodiscard]] Result<StepTarget> TargetOf(const Step& step) const;
  // Makes the driver's calls. Returns the new handle, if the step makes one. Only kVerify reads the side's state.
  Result<DriverHandle> Perform(const Step& step, const StepTarget& target);
  // Ends a phase: imports of one phase share the pieces that stand in for lost memory.
  void EndPhase() { pieces_.clear(); }

 private:
  [[nodiscard]] MulticastTarget MulticastOf(const Step& step) const;
  Result<DriverHandle> Create(const Step& step, const StepTarget& target);
  Status Bind(const Step& step, const StepTarget& target);
  Result<DriverHandle> CreateSubstitute(const Step& step);
  Status Map(const StepTarget& target);
  Status SetAccess(const StepTarget& target);
  Status Verify() const;

  Driver& driver_;
  StepSide& side_;
  const PoolId pool_;
  std::map<std::pair<DeviceOrdinal, Bytes>, UniqueFd> pieces_;  // pieces that stand in, by device and size
};

}  // namespace amem
