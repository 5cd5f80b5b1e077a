// The driver's checkpoint of a process: calls of one process about another in the same simulated world.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <vector>

#include "tests/stand_ins/checkpoint/world_checkpoint.h"
#include "tests/stand_ins/cuda/stand_in.h"

using amem::stand_in::AskFault;
using amem::stand_in::Get;

namespace amem::stand_in {
namespace {
thread_local int depth = 0;
}

InCall::InCall() : stand_in_(Get()) {
  if (stand_in_ == nullptr) return;
  if (depth++ > 0) return;
  const Simulator& simulator = *stand_in_->simulator;
  if (amem::checkpoint::EnterCall(*simulator.world(), simulator.member())) return;
  amem::checkpoint::LeaveCall(*simulator.world(), simulator.member());
  depth = 0;
  stand_in_ = nullptr;
}

InCall::~InCall() {
  if (stand_in_ == nullptr || --depth > 0) return;
  amem::checkpoint::LeaveCall(*stand_in_->simulator->world(), stand_in_->simulator->member());
}

}  // namespace amem::stand_in

namespace {

template <class Bytes>
bool IsZero(const Bytes& bytes) {
  const auto* begin = reinterpret_cast<const unsigned char*>(&bytes);
  return std::all_of(begin, begin + sizeof bytes, [](unsigned char byte) { return byte == 0; });
}

std::optional<std::int32_t> DeviceOf(amem::stand_in::StandIn& stand_in, const CUuuid& wanted) {
  for (int device = 0; device < stand_in.devices; ++device) {
    CUuuid uuid{};
    if (cuDeviceGetUuid(&uuid, device) == CUDA_SUCCESS && std::memcmp(&uuid, &wanted, sizeof uuid) == 0) return device;
  }
  return std::nullopt;
}

// What every one of these calls begins with.
std::optional<CUresult> Refused(amem::stand_in::StandIn* stand_in, const char* name) {
  if (stand_in == nullptr) return CUDA_ERROR_NOT_INITIALIZED;
  if (const int wanted = AskFault(name); wanted != 0) return static_cast<CUresult>(wanted);
  return std::nullopt;
}

CUresult As(int result) { return static_cast<CUresult>(result); }

}  // namespace

CUDA_CALL CUresult cuCheckpointProcessGetState(int pid, CUprocessState* state) {
  auto* const stand_in = Get();
  if (const auto refused = Refused(stand_in, "CheckpointState")) return *refused;
  const auto found = amem::checkpoint::StateOf(*stand_in->simulator->world(), pid);
  if (!found || state == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *state = static_cast<CUprocessState>(*found);  // the same numbers
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs* args) {
  auto* const stand_in = Get();
  if (const auto refused = Refused(stand_in, "CheckpointLock")) return *refused;
  if (args != nullptr && (args->reserved0 != 0 || !IsZero(args->reserved1))) return CUDA_ERROR_INVALID_VALUE;
  return As(amem::checkpoint::LockProcess(*stand_in->simulator->world(), pid, args == nullptr ? 0 : args->timeoutMs));
}

CUDA_CALL CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs* args) {
  auto* const stand_in = Get();
  if (const auto refused = Refused(stand_in, "CheckpointTake")) return *refused;
  if (args != nullptr && !IsZero(*args)) return CUDA_ERROR_INVALID_VALUE;
  return As(amem::checkpoint::CheckpointProcess(*stand_in->simulator->world(), pid));
}

CUDA_CALL CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs* args) {
  auto* const stand_in = Get();
  if (const auto refused = Refused(stand_in, "CheckpointRestore")) return *refused;
  std::vector<amem::checkpoint::DevicePair> pairs;
  if (args != nullptr) {
    if (!IsZero(args->reserved) || args->reserved1 != 0) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < args->gpuPairsCount; ++i) {
      const auto from = DeviceOf(*stand_in, args->gpuPairs[i].oldUuid), to = DeviceOf(*stand_in, args->gpuPairs[i].newUuid);
      if (!from || !to) return CUDA_ERROR_INVALID_VALUE;
      pairs.push_back({*from, *to});
    }
  }
  return As(amem::checkpoint::RestoreProcess(*stand_in->simulator->world(), pid, pairs));
}

CUDA_CALL CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs* args) {
  auto* const stand_in = Get();
  if (const auto refused = Refused(stand_in, "CheckpointUnlock")) return *refused;
  if (args != nullptr && !IsZero(*args)) return CUDA_ERROR_INVALID_VALUE;
  return As(amem::checkpoint::UnlockProcess(*stand_in->simulator->world(), pid));
}
