// One session of a rerun: its state, its driver, its handles; and what its events and the memory of others come from.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include "journal/journal.h"
#include "replay/cycle/perform_step.h"
#include "replay/driver/simulator/simulator.h"
#include "replay/peers/peers.h"
#include "replay/rerun/rank.h"
#include "statemachine/apply.h"

namespace amem {

inline constexpr Bytes kPlenty = Bytes{1} << 42;  // of memory has each simulated device, unless it is limited

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
  [[nodiscard]] std::optional<DeviceOrdinal> StandsIn(AllocationId allocation) const override;
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
  std::map<AllocationId, DeviceOrdinal> stand_ins_;  // memory of that device stands in for it
  std::map<PoolId, Status> step_results_;            // of the step that was begun last, for NCCL and each pool
  struct Elsewhere {
    Bytes bytes = 0;
    Address here;
  };
  std::map<Address, Elsewhere> elsewhere_;  // by the address that was recorded
  std::set<SessionId> killed_;
  Counts counts_;
};

// Stands for the sessions whose journals a rerun was not given: memory that others import from them is made up when it is first
// asked for.
class AbsentOwner {
 public:
  AbsentOwner() = default;
  // `driver` must outlive it. With `own_device`, all memory is made on that driver's first device, whatever the journal says.
  AbsentOwner(Driver& driver, bool own_device) : driver_(&driver), own_device_(own_device) {}

  Result<UniqueFd> Export(const RemoteAllocation& remote, const Allocation& as_imported) {
    DriverHandle& handle = handles_[remote];
    if (!handle) {
      AllocationProperties properties = as_imported.properties;
      properties.handle_types = 1;
      if (own_device_ && properties.location.type == LocationType::kDevice) properties.location.id = 0;
      AMEM_ASSIGN(const auto created, driver_->Create(as_imported.bytes, properties, 0));
      handle = created;
    }
    return driver_->Export(handle);
  }

 private:
  Driver* driver_ = nullptr;
  bool own_device_ = false;
  std::map<RemoteAllocation, DriverHandle> handles_;
};

// The events of a journal, read as they are needed.
class EventStream {
 public:
  EventStream(JournalReader& reader, SequenceNumber from, SequenceNumber to)
      : reader_(reader), next_(from.value), to_(to.value) {}

  // Null at the end, or when reading failed (status()).
  const Event* Peek() {
    while (waiting_.empty() && next_ <= to_ && status_.ok()) {
      const std::uint64_t last = std::min(to_, next_ + kAtOnce - 1);
      const auto read = reader_.Read(SequenceNumber{next_}, SequenceNumber{last}, [this](const Event& event) {
        waiting_.push_back(event);
        return true;
      });
      if (!read) status_ = read.status();
      if (read && read->corrupt_records != 0) status_ = {Code::kCorrupt, read->corruption};
      next_ = last + 1;
    }
    return waiting_.empty() ? nullptr : &waiting_.front();
  }
  void Pop() { waiting_.pop_front(); }
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  static constexpr std::uint64_t kAtOnce = 4096;
  JournalReader& reader_;
  std::uint64_t next_, to_;
  std::deque<Event> waiting_;
  Status status_;
};

}  // namespace amem
