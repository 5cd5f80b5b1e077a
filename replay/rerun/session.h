// One session of a rerun: its state, its driver, its handles.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>

#include "replay/cycle/perform_step.h"
#include "replay/driver/simulator/simulator.h"
#include "replay/peers/peers.h"
#include "replay/rerun/rank.h"
#include "statemachine/apply.h"

namespace amem {

// Gets the descriptor of an allocation from its owner.
using ExportRemote = std::function<Result<UniqueFd>(const RemoteAllocation& remote, const Allocation& as_imported)>;

// The descriptor alone.
Result<UniqueFd> DescriptorOf(Result<SharedAllocation> shared);

class RerunSession final : public RerunRank, private StepSide {
 public:
  // On the simulator every address must be where it was, and the simulator's own mappings are compared, too.
  RerunSession(std::unique_ptr<Simulator> driver, ExportRemote export_remote)
      : simulator_(driver.get()), driver_(std::move(driver)), export_remote_(std::move(export_remote)) {}
  RerunSession(std::unique_ptr<Driver> driver, ExportRemote export_remote)
      : driver_(std::move(driver)), export_remote_(std::move(export_remote)) {}

  void StartFrom(State state) { recorded_ = std::move(state); }
  // Sessions that were killed at some time. In the job a request could reach them too late; here they always answer.
  void SetKilled(std::set<SessionId> killed) { killed_ = std::move(killed); }
  Status BuildOwn() override;
  Status BuildImports() override;
  Outcome Take(const Event& event, bool now) override;  // at once
  Outcome Settle() override { return {}; }
  Status Compare() override;
  Status LeaveOnly(DeviceOrdinal device, Bytes bytes) override;
  [[nodiscard]] const State& recorded() const override { return recorded_; }
  [[nodiscard]] Counts counts() const override { return counts_; }

  Result<SharedAllocation> Share(AllocationId allocation);

 private:
  // StepSide
  [[nodiscard]] const State& state() const override { return recorded_; }
  [[nodiscard]] DriverHandle HandleOf(AllocationId allocation) const override;
  [[nodiscard]] Address Here(Address recorded) const override;
  Result<SharedAllocation> Shared(const Step& import) override;
  Status Copy(const Step&) override { return {}; }  // contents are not replayed
  [[nodiscard]] Deadline until() const override { return In(std::chrono::minutes(1)); }

  Status Reserve(Address at, const Range& range);
  [[nodiscard]] bool CameTooLate(const StepFailed& failed) const;
  [[nodiscard]] bool IsMulticast(AllocationId allocation) const;
  Status Repeat(const Event& event);
  Driver& Call();  // counts a call
  [[nodiscard]] const Allocation* Recorded(AllocationId id) const { return FindIn(recorded_.allocations, id); }
  Status Perform(const Step& step);
  Status Create(AllocationId allocation, Bytes bytes, const AllocationProperties& properties, std::uint64_t flags);
  Status Drop(AllocationId allocation);  // its handle, if it has one
  Status Import(AllocationId allocation, const RemoteAllocation& remote, const Allocation& as_imported);
  Status Place(bool own);
  [[nodiscard]] bool IsMapped(Address address, Bytes bytes) const;  // in the simulator

  Simulator* simulator_ = nullptr;  // the driver, if it is one
  std::unique_ptr<Driver> driver_;
  StepPerformer performer_{*driver_, *this};
  ExportRemote export_remote_;
  State recorded_;
  std::map<AllocationId, DriverHandle> handles_;
  std::map<PoolId, Status> step_results_;  // of the step that was begun last, for NCCL and each pool
  struct Elsewhere {
    Bytes bytes = 0;
    Address here;
  };
  std::map<Address, Elsewhere> elsewhere_;  // by the address that was recorded
  std::set<SessionId> killed_;
  Counts counts_;
};

}  // namespace amem
