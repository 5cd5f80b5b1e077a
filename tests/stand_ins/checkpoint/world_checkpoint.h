// The driver's checkpoint of a process, by any process of a simulated world on any other; with states and refusals as
// documented in cuda.h and as measured. For the stand-in libcuda and tests of freezes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "replay/driver/simulator/world.h"

namespace amem::checkpoint {

enum class ProcessState : std::uint32_t { kRunning, kLocked, kCheckpointed, kFailed };
struct DevicePair {
  std::int32_t from = 0, to = 0;
};

// Called around each of the member's driver calls: waits until its process may make calls. False: the process is lost
// (kFailed).
bool EnterCall(SimulatorWorld& world, std::uint32_t member);
void LeaveCall(SimulatorWorld& world, std::uint32_t member);
void SetBusy(SimulatorWorld& world, std::uint32_t member, bool busy);          // its work does not end, so it cannot be locked
std::optional<ProcessState> StateOf(SimulatorWorld& world, std::int32_t pid);  // nothing: no member has that pid
int LockProcess(SimulatorWorld& world, std::int32_t pid, std::uint32_t timeout_ms);  // CUresult, as below; 0: no timeout
// Its memory no longer counts to the devices. Succeeds although memory is shared, as measured.
int CheckpointProcess(SimulatorWorld& world, std::int32_t pid);
// NOT_SUPPORTED if the process shared memory at its checkpoint, and it is lost, as measured. OUT_OF_MEMORY if a device lacks
// room; nothing changes then. Pairs, if any, must name every device that it had memory on.
int RestoreProcess(SimulatorWorld& world, std::int32_t pid, std::span<const DevicePair> pairs);
int UnlockProcess(SimulatorWorld& world, std::int32_t pid);

struct Use {
  std::int32_t pid = 0;
  Bytes bytes = 0;
};
std::vector<Use> UsesOf(SimulatorWorld& world, std::int32_t device);  // by process

}  // namespace amem::checkpoint
