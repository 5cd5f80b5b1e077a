// What one step of a plan asks of the driver: the one redo, for the executor and for `amem-replay run`.
#pragma once

#include <map>
#include <set>
#include <string>
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
  [[nodiscard]] virtual DriverHandle HandleOf(AllocationId allocation) const = 0;  // zero if there is none
  // Where a recorded address lies on this driver.
  [[nodiscard]] virtual Address Here(Address recorded) const { return recorded; }
  // What the owner of an import hands out: the descriptor, and of a multicast object which it is.
  virtual Result<SharedAllocation> Shared(const Step& import) = 0;
  // Whether a device is still to be added to a multicast object.
  [[nodiscard]] virtual bool Lacks(AllocationId multicast, DeviceOrdinal device) const {
    return static_cast<void>(multicast), static_cast<void>(device), true;
  }
  // Steps that copy contents: kScan, kSave, kBeginRestore, kRestore.
  virtual Status Copy(const Step& step) = 0;
  // When waits for a device end.
  [[nodiscard]] virtual Deadline until() const = 0;
};

// What a step works on, as it was when the step began.
struct StepTarget {
  std::string tag;  // of the pool whose step it is; empty: NCCL's
  Address address;  // on this driver
  DriverHandle handle;
  Bytes bytes = 0;
  AllocationProperties properties;
  std::uint64_t flags = 0;
  Mapping mapping;
  bool stands_in = false;  // the memory replaces that of an owner who was lost, or an object that lost a member
  bool multicast = false;  // a multicast object, for this many devices
  std::uint32_t devices = 0;
  bool lacks_device = false;  // kAddDevice: it is not there yet
  MulticastBinding binding;   // kBind
  DriverHandle bound;         // the memory that is to be bound by its handle, and where in it that begins
  Bytes bound_offset = 0;
};

// Not for several threads at once.
class StepPerformer {
 public:
  // Both must outlive the performer. `pool`: whose steps these are; zero: NCCL's.
  StepPerformer(Driver& driver, StepSide& side, PoolId pool = {}) : driver_(driver), side_(side), pool_(pool) {}

  // With the side's state held still. kNotFound: the allocation or mapping does not exist.
  [[nodiscard]] Result<StepTarget> TargetOf(const Step& step) const;
  // Makes the driver's calls. The result is the new handle, if the step makes one. Only kVerify looks at the side's state.
  Result<DriverHandle> Perform(const Step& step, const StepTarget& target);
  // Ordinary memory is there in place of what the allocation was.
  [[nodiscard]] bool StandsIn(AllocationId allocation) const { return standing_in_.contains(allocation); }
  // After a phase: the pieces that stand in for lost memory are shared within one.
  void EndPhase() { pieces_.clear(); }

 private:
  Status CheckMemory(const Step& step, const StepTarget& target);
  void FindBinding(const Step& step, StepTarget& target) const;
  Result<DriverHandle> Create(const Step& step, const StepTarget& target);
  Result<DriverHandle> Import(const Step& step);
  Status AddDevice(const Step& step, const StepTarget& target);
  Status Bind(const Step& step, const StepTarget& target);
  Result<DriverHandle> StandIn(const Step& step);
  Status Map(const Step& step, const StepTarget& target);
  Status SetAccess(const Step& step, const StepTarget& target);
  Status Verify() const;

  Driver& driver_;
  StepSide& side_;
  const PoolId pool_;
  std::map<std::pair<DeviceOrdinal, Bytes>, UniqueFd> pieces_;  // that stand in, by device and size
  std::map<AllocationId, DeviceOrdinal> standing_in_;           // on which device, until they are released
};

}  // namespace amem
