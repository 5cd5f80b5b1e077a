#include <cuda.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <future>
#include <type_traits>

#include "replay/driver/checkpointer.h"
#include "replay/driver/driver.h"
#include "replay/driver/result_names.h"

namespace amem {
namespace {

constexpr int kVersionWithPairs = 13000;  // older drivers reserve the arguments' field for pairs

// Declared here because older toolkits lack them. The layouts are those of CUDA 13, which differ from 12.8 only in fields that
// were reserved and zero.
struct LockArguments {
  unsigned timeout_ms, reserved0;
  std::uint64_t reserved1[7];
};
struct PairArgument {
  CUuuid from, to;
};
struct RestoreArguments {
  PairArgument* pairs;
  unsigned count;
  char reserved[52 - sizeof(PairArgument*)];
  std::uint64_t reserved1;
};
static_assert(sizeof(LockArguments) == 64 && sizeof(RestoreArguments) == 64);

// Member, name in the library, type.
#define AMEM_CHECKPOINT_CALLS(X)                                             \
  X(init, "cuInit", CUresult(unsigned))                                      \
  X(version, "cuDriverGetVersion", CUresult(int*))                           \
  X(device_count, "cuDeviceGetCount", CUresult(int*))                        \
  X(device_get, "cuDeviceGet", CUresult(CUdevice*, int))                     \
  X(uuid, "cuDeviceGetUuid_v2", CUresult(CUuuid*, CUdevice))                 \
  X(state, "cuCheckpointProcessGetState", CUresult(int, int*))               \
  X(lock, "cuCheckpointProcessLock", CUresult(int, LockArguments*))          \
  X(checkpoint, "cuCheckpointProcessCheckpoint", CUresult(int, void*))       \
  X(restore, "cuCheckpointProcessRestore", CUresult(int, RestoreArguments*)) \
  X(unlock, "cuCheckpointProcessUnlock", CUresult(int, void*))

struct CheckpointCalls {
#define AMEM_CHECKPOINT_MEMBER(member, name, ...) std::add_pointer_t<__VA_ARGS__> member = nullptr;
  AMEM_CHECKPOINT_CALLS(AMEM_CHECKPOINT_MEMBER)
};

bool ReadUuid(std::string_view text, CUuuid& uuid) {
  if (!text.starts_with("GPU-")) return false;
  std::size_t nibble = 0;
  std::array<unsigned char, sizeof uuid.bytes> bytes{};
  for (const char c : text.substr(4)) {
    if (c == '-') continue;
    const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (value < 0 || nibble == 2 * bytes.size()) return false;
    bytes[nibble / 2] = static_cast<unsigned char>(bytes[nibble / 2] << 4 | value);
    ++nibble;
  }
  std::memcpy(uuid.bytes, bytes.data(), bytes.size());
  return nibble == 2 * bytes.size();
}

// What helps against a known answer of these calls; empty: nothing is known.
std::string_view RemedyOf(int result) {
  switch (result) {
    case cuda::kInvalidValue:
      return "; either the process uses no CUDA, or it is another user's or in a container that this program cannot look into: "
             "run amem as the job's user, where the job runs";
    case cuda::kNotPermitted:
      return "; run amem as the job's user, or as one who may trace it (CAP_SYS_PTRACE, /proc/sys/kernel/yama/ptrace_scope)";
    case cuda::kIllegalState:
      return "; another program (cuda-checkpoint?) locks or unlocks the process at the same time";
    case cuda::kNotSupported:
      return "; the driver cannot take this process: it shares GPU memory with another, or uses what a checkpoint does not "
             "cover";
    case cuda::kOutOfMemory:
      return "; host or GPU memory is short";
    default:
      return "";
  }
}

class CudaCheckpointer final : public Checkpointer {
 public:
  CudaCheckpointer(const CheckpointCalls& calls, int version)
      : calls_(calls), version_(version), started_(std::async(std::launch::async, [init = calls.init] { return init(0); })) {}

  [[nodiscard]] std::string Version() const override {
    return fmt::format("CUDA {}.{}", version_ / 1000, version_ % 1000 / 10);
  }
  [[nodiscard]] bool TakesPairs() const override { return version_ >= kVersionWithPairs; }

  Result<std::vector<std::string>> Gpus() override {
    AMEM_TRY(Started());
    int count = 0;
    AMEM_TRY(Said(calls_.device_count(&count), "cuDeviceGetCount"));
    std::vector<std::string> uuids;
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      CUdevice device = 0;
      CUuuid uuid{};
      AMEM_TRY(Said(calls_.device_get(&device, ordinal), "cuDeviceGet"));
      AMEM_TRY(Said(calls_.uuid(&uuid, device), "cuDeviceGetUuid"));
      uuids.push_back(GpuUuid(uuid.bytes));
    }
    return uuids;
  }

  Result<CheckpointState> StateOf(pid_t pid) override {
    int state = 0;
    AMEM_TRY(Call("cuCheckpointProcessGetState", calls_.state, pid, &state));
    if (state < 0 || state > static_cast<int>(CheckpointState::kFailed))
      return Status(Code::kUnsupported, fmt::format("cuCheckpointProcessGetState pid {}: an unknown state, {}", pid, state));
    return static_cast<CheckpointState>(state);
  }

  Status Lock(pid_t pid, std::chrono::milliseconds timeout) override {
    LockArguments arguments{};
    // Zero would mean no limit.
    arguments.timeout_ms = static_cast<unsigned>(std::clamp<std::int64_t>(timeout.count(), 1, 24 * 3'600'000));
    Status locked = Call("cuCheckpointProcessLock", calls_.lock, pid, &arguments);
    if (locked.driver_result() != cuda::kNotReady) return locked;
    return {Code::kTimeout,
            fmt::format("cuCheckpointProcessLock pid {}: its driver calls and its work on the GPU did not end within {} ms",
                        pid, arguments.timeout_ms),
            cuda::kNotReady};
  }

  Status Checkpoint(pid_t pid) override { return Call("cuCheckpointProcessCheckpoint", calls_.checkpoint, pid); }

  Status Restore(pid_t pid, std::span<const GpuPair> pairs) override {
    if (!pairs.empty() && !TakesPairs())
      return {Code::kUnsupported, "restore onto other GPUs needs a driver of CUDA 13 (580) or newer; this is " + Version()};
    std::vector<PairArgument> given(pairs.size());
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      if (!ReadUuid(pairs[i].from, given[i].from) || !ReadUuid(pairs[i].to, given[i].to))
        return {Code::kInvalid, fmt::format("\"{}={}\" are no UUIDs of GPUs", pairs[i].from, pairs[i].to)};
    }
    RestoreArguments arguments{};
    arguments.pairs = given.data();
    arguments.count = static_cast<unsigned>(given.size());
    return Call("cuCheckpointProcessRestore", calls_.restore, pid, pairs.empty() ? nullptr : &arguments);
  }

  Status Unlock(pid_t pid) override { return Call("cuCheckpointProcessUnlock", calls_.unlock, pid); }

 private:
  [[nodiscard]] Status Started() const {
    const CUresult result = started_.get();
    if (result == CUDA_SUCCESS) return {};
    return {Code::kUnsupported, "the CUDA driver does not start: " + CudaErrorText(result), result};
  }
  static Status Said(CUresult result, const std::string& tried) {
    if (result == CUDA_SUCCESS) return {};
    return {CodeOfResult(result), fmt::format("{}: {}{}", tried, CudaErrorText(result), RemedyOf(result)), result};
  }
  // A call on a process, once the driver has started.
  template <class Argument>
  [[nodiscard]] Status Call(const char* name, CUresult (*call)(int, Argument*), pid_t pid, Argument* argument = nullptr) const {
    AMEM_TRY(Started());
    return Said(call(pid, argument), fmt::format("{} pid {}", name, pid));
  }

  const CheckpointCalls calls_;
  const int version_;
  const std::shared_future<CUresult> started_;  // cuInit
};

}  // namespace

Result<std::unique_ptr<Checkpointer>> OpenCudaCheckpointer() {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // never unloaded
  if (library == nullptr) return Status(Code::kUnsupported, "there is no CUDA driver here (libcuda.so.1 cannot be loaded)");
  CheckpointCalls calls;
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto& pointer) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(::dlsym(library, name));
    if (pointer == nullptr && missing == nullptr) missing = name;
  };
#define AMEM_CHECKPOINT_FIND(member, name, ...) find(name, calls.member);
  AMEM_CHECKPOINT_CALLS(AMEM_CHECKPOINT_FIND)
  if (missing != nullptr) {
    return Status(
        Code::kUnsupported,
        fmt::format("the CUDA driver has no {}: a driver of CUDA 12.8 (570) or newer is needed for a freeze", missing));
  }
  int version = 0;
  if (const CUresult result = calls.version(&version); result != CUDA_SUCCESS) {  // answers without cuInit
    return Status(Code::kUnsupported, fmt::format("the CUDA driver does not tell its version ({})", static_cast<int>(result)),
                  result);
  }
  return std::unique_ptr<Checkpointer>(std::make_unique<CudaCheckpointer>(calls, version));
}

}  // namespace amem
