// One session of a rerun: its two states (as recorded, and as replayed), its simulated driver, its handles.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "replay/simulator.h"
#include "statemachine/apply.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

// Gets a driver handle's descriptor from whoever owns an allocation.
using ExportRemote = std::function<Result<UniqueFd>(const RemoteAllocation& remote, const Allocation& as_imported)>;

class RerunSession {
 public:
  RerunSession(std::unique_ptr<Simulator> driver, ExportRemote export_remote)
      : driver_(std::move(driver)), export_remote_(std::move(export_remote)) {}

  // Begins from a snapshot's state: first what is its own, and when all sessions have that, what they import.
  void StartFrom(State state) { recorded_ = replayed_ = std::move(state); }
  Status BuildOwn();
  Status BuildImports();

  struct Outcome {
    Status mismatch;  // the recorded event cannot follow, or the replayed result differs; its message is the replayed side
    std::string what;
    bool reproduced = false;  // a failure that was recorded happened again
  };
  Outcome Take(const Event& event);
  // The digests are equal, and the driver holds what the state says.
  [[nodiscard]] Status Compare() const;

  [[nodiscard]] const State& recorded() const { return recorded_; }
  Result<UniqueFd> Export(AllocationId allocation);
  [[nodiscard]] std::uint64_t calls() const { return calls_; }

 private:
  Status Call(const Event& event, EventBody& replayed);
  Status Perform(const Step& step);
  Status CheckMemory(const Step& step);
  Status Create(AllocationId allocation, Bytes bytes, const AllocationProperties& properties, std::uint64_t flags);
  Status Drop(AllocationId allocation);  // its handle, if it has one
  Status Import(AllocationId allocation, const RemoteAllocation& remote, const Allocation& as_imported);
  Status Place(bool own);
  void ReleaseIfGone(AllocationId allocation);
  [[nodiscard]] DriverHandle HandleOf(AllocationId allocation) const;

  std::unique_ptr<Simulator> driver_;
  ExportRemote export_remote_;
  State recorded_, replayed_;
  std::map<AllocationId, DriverHandle> handles_;
  Status step_result_;  // of the step that was begun
  std::uint64_t calls_ = 0;
};

}  // namespace amem
