// One session of a rerun: its state, its driver, its handles; and what its events and the memory of others come from. All
// sessions are in one process, each with a simulator of its own on one simulated host, and a descriptor goes from driver to
// driver.
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
#include "statemachine/apply.h"

namespace amem {

inline constexpr Bytes kPlenty = Bytes{1} << 42;  // of memory has each simulated device, unless it is limited

// Gets the descriptor of an allocation from its owner.
using ExportRemote = std::function<Result<UniqueFd>(const RemoteAllocation& remote, const Allocation& as_imported)>;

// The descriptor alone.
Result<UniqueFd> DescriptorOf(Result<SharedAllocation> shared);

class RerunSession final : private StepSide {
 public:
  struct Outcome {
    Status mismatch;          // the event cannot follow, or its result differs; the message is the replayed side
    std::string what;         // was compared: "result of step ..."
    bool reproduced = false;  // a failure that was recorded happened again
  };
  struct Counts {
    std::uint64_t events = 0, calls = 0, steps = 0;
  };

  RerunSession(std::unique_ptr<Simulator> driver, ExportRemote export_remote)
      : driver_(std::move(driver)), export_remote_(std::move(export_remote)) {}

  void StartFrom(State state) { recorded_ = std::move(state); }
  // Sessions that were killed at some time. In the job a request could reach them too late; here they always answer.
  void SetKilled(std::set<SessionId> killed) { killed_ = std::move(killed); }
  // Builds what the session began with, from its snapshot: own memory of all sessions first, so that it can be imported.
  Status BuildOwn();
  Status BuildImports();
  Outcome Take(const Event& event);
  // OK: the state is sound, and the simulator holds what the state says, each mapping where it was.
  Status Compare();
  // Takes all memory of the device but this, as if another program held it.
  Status LeaveOnly(DeviceOrdinal device, Bytes bytes);
  [[nodiscard]] const State& recorded() const { return recorded_; }
  [[nodiscard]] Counts counts() const { return counts_; }

  Result<SharedAllocation> Share(AllocationId allocation);

 private:
  // StepSide
  [[nodiscard]] const State& state() const override { return recorded_; }
  [[nodiscard]] DriverHandle HandleOf(AllocationId allocation) const override;
  [[nodiscard]] std::optional<DeviceOrdinal> SubstituteOf(AllocationId allocation) const override;
  [[nodiscard]] Address Here(Address recorded) const override { return recorded; }
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

  std::unique_ptr<Simulator> driver_;
  StepPerformer performer_{*driver_, *this};
  ExportRemote export_remote_;
  State recorded_;
  std::map<AllocationId, DriverHandle> handles_;
  std::map<AllocationId, DeviceOrdinal> stand_ins_;  // memory of that device stands in for it
  std::map<PoolId, Status> step_results_;            // of the step that was begun last, for NCCL and each pool
  std::set<SessionId> killed_;
  Counts counts_;
};

// Stands for the sessions whose journals a rerun was not given: memory that others import from them is made up when it is first
// asked for.
class AbsentOwner {
 public:
  AbsentOwner() = default;
  // `driver` must outlive it. All memory is made on its first device, whatever the journal says.
  explicit AbsentOwner(Driver& driver) : driver_(&driver) {}

  Result<UniqueFd> Export(const RemoteAllocation& remote, const Allocation& as_imported) {
    DriverHandle& handle = handles_[remote];
    if (!handle) {
      AllocationProperties properties = as_imported.properties;
      properties.handle_types = 1;
      if (properties.location.type == LocationType::kDevice) properties.location.id = 0;
      AMEM_ASSIGN(const auto created, driver_->Create(as_imported.bytes, properties, 0));
      handle = created;
    }
    return driver_->Export(handle);
  }

 private:
  Driver* driver_ = nullptr;
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
