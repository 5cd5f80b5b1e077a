// The driver's checkpoint of another process: it is locked, its GPU memory moves to its own host memory, and returns to the
// same addresses. CUDA implements it (cuda/checkpoint.h); tests have fakes.
//
// RUNNING -> LOCKED -> CHECKPOINTED -> LOCKED -> RUNNING, and FAILED, from which nothing leads back. Any thread may call, for
// several processes at once. A failure is Code::kDriver with the driver's CUresult, and names the remedy if one is known;
// nothing has changed then, unless the state is FAILED.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "statemachine/event.h"

namespace amem {

// CUprocessState.
enum class CheckpointState : std::uint8_t { kRunning = 0, kLocked, kCheckpointed, kFailed };
AMEM_NAMES(CheckpointState, kFailed, "checkpoint state", "running", "locked", "checkpointed", "failed");

class Checkpointer {
 public:
  virtual ~Checkpointer() = default;
  // "CUDA 13.0", for the record.
  [[nodiscard]] virtual std::string Version() const = 0;
  // Whether Restore takes pairs.
  [[nodiscard]] virtual bool TakesPairs() const = 0;
  // UUIDs of the GPUs that this process sees, by CUDA's ordinal.
  virtual Result<std::vector<std::string>> Gpus() = 0;

  virtual Result<CheckpointState> StateOf(pid_t pid) = 0;
  // Waits until the process's driver calls and its work on GPUs have ended. kTimeout: they did not; it runs as before.
  virtual Status Lock(pid_t pid, std::chrono::milliseconds timeout) = 0;
  virtual Status Checkpoint(pid_t pid) = 0;
  // Pairs, if any, must name every GPU that the process uses.
  virtual Status Restore(pid_t pid, std::span<const GpuPair> pairs) = 0;
  virtual Status Unlock(pid_t pid) = 0;
};

// Loads and initialises libcuda.so.1, which makes no context and takes no GPU memory. kUnsupported: there is no driver, or it
// is older than 570; the message says which.
Result<std::unique_ptr<Checkpointer>> OpenCudaCheckpointer();

}  // namespace amem
