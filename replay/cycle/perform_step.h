// What one step of a plan asks of the driver: the one redo, for the executor and for `amem-replay run`.
#pragma once

#include <map>
#include <set>
#include <utility>

#include "replay/driver/driver.h"
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
  // The owner's descriptor of an import.
  virtual Result<UniqueFd> Descriptor(const Step& import) = 0;
  // Steps that copy contents: kScan, kSave, kBeginRestore, kRestore.
  virtual Status Copy(const Step& step) = 0;
};

// What a step works on, as it was when the step began.
struct StepTarget {
  Address address;  // on this driver
  DriverHandle handle;
  Bytes bytes = 0;
  AllocationProperties properties;
  std::uint64_t flags = 0;
  Mapping mapping;
  bool stands_in = false;  // the memory replaces that of an owner who was lost
};

// Not for several threads at once.
class StepPerformer {
 public:
  // Both must outlive the performer.
  StepPerformer(Driver& driver, StepSide& side) : driver_(driver), side_(side) {}

  // With the side's state held still. kNotFound: the allocation or mapping does not exist.
  [[nodiscard]] Result<StepTarget> TargetOf(const Step& step) const;
  // Makes the driver's calls. The result is the new handle, if the step makes one. Only kVerify looks at the side's state.
  Result<DriverHandle> Perform(const Step& step, const StepTarget& target);
  // After a phase: the pieces that stand in for lost memory are shared within one.
  void EndPhase() { pieces_.clear(); }

 private:
  Status CheckMemory(const Step& step);
  Result<DriverHandle> Import(const Step& step);
  Result<DriverHandle> StandIn(const Step& step);
  Status Map(const Step& step, const StepTarget& target);
  Status SetAccess(const Step& step, const StepTarget& target);
  Status Verify() const;

  Driver& driver_;
  StepSide& side_;
  std::map<std::pair<DeviceOrdinal, Bytes>, UniqueFd> pieces_;  // that stand in, by device and size
  std::map<AllocationId, DeviceOrdinal> standing_in_;           // on which device, until they are released
};

}  // namespace amem
