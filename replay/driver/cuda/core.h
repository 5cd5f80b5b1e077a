// What the CUDA driver's sources share: the table of entry points, errors in words, contexts. No other file includes this.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "journal/base/mutex.h"
#include "replay/driver/cuda/cuda_driver.h"

namespace amem {

// Member, and its name for cuGetProcAddress, whose declaration has the type (cuda.h maps it to the newest variant).
#define AMEM_CUDA_CALLS(X)                                    \
  X(init, cuInit)                                             \
  X(driver_version, cuDriverGetVersion)                       \
  X(error_name, cuGetErrorName)                               \
  X(error_string, cuGetErrorString)                           \
  X(device_count, cuDeviceGetCount)                           \
  X(device_get, cuDeviceGet)                                  \
  X(device_uuid, cuDeviceGetUuid)                             \
  X(primary_retain, cuDevicePrimaryCtxRetain)                 \
  X(primary_release, cuDevicePrimaryCtxRelease)               \
  X(primary_state, cuDevicePrimaryCtxGetState)                \
  X(context_push, cuCtxPushCurrent)                           \
  X(context_pop, cuCtxPopCurrent)                             \
  X(context_current, cuCtxGetCurrent)                         \
  X(context_device, cuCtxGetDevice)                           \
  X(context_synchronize, cuCtxSynchronize)                    \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode) \
  X(stream_create, cuStreamCreate)                            \
  X(stream_destroy, cuStreamDestroy)                          \
  X(stream_synchronize, cuStreamSynchronize)                  \
  X(stream_is_capturing, cuStreamIsCapturing)                 \
  X(mem_create, cuMemCreate)                                  \
  X(mem_release, cuMemRelease)                                \
  X(mem_reserve, cuMemAddressReserve)                         \
  X(mem_address_free, cuMemAddressFree)                       \
  X(mem_map, cuMemMap)                                        \
  X(mem_unmap, cuMemUnmap)                                    \
  X(mem_set_access, cuMemSetAccess)                           \
  X(mem_export, cuMemExportToShareableHandle)                 \
  X(mem_import, cuMemImportFromShareableHandle)               \
  X(mem_granularity, cuMemGetAllocationGranularity)           \
  X(mem_info, cuMemGetInfo)                                   \
  X(host_alloc, cuMemHostAlloc)                               \
  X(host_free, cuMemFreeHost)                                 \
  X(copy_to_host, cuMemcpyDtoHAsync)                          \
  X(copy_to_device, cuMemcpyHtoDAsync)                        \
  X(fill, cuMemsetD8Async)

// Null if the driver lacks them; only speed depends on them.
#define AMEM_CUDA_OPTIONAL_CALLS(X)       \
  X(context_id, cuCtxGetId)               \
  X(host_register, cuMemHostRegister)     \
  X(host_unregister, cuMemHostUnregister) \
  X(module_load, cuModuleLoadData)        \
  X(module_function, cuModuleGetFunction) \
  X(module_global, cuModuleGetGlobal)     \
  X(launch, cuLaunchKernel)               \
  X(event_create, cuEventCreate)          \
  X(event_destroy, cuEventDestroy)        \
  X(event_record, cuEventRecord)          \
  X(event_query, cuEventQuery)            \
  X(stream_query, cuStreamQuery)          \
  X(stream_context, cuStreamGetCtx)       \
  X(stream_wait, cuStreamWaitEvent)

// Since CUDA 12.1; null in older drivers, which have no multicast objects.
#define AMEM_CUDA_MULTICAST_CALLS(X)             \
  X(multicast_create, cuMulticastCreate)         \
  X(multicast_add_device, cuMulticastAddDevice)  \
  X(multicast_bind_memory, cuMulticastBindMem)   \
  X(multicast_bind_address, cuMulticastBindAddr) \
  X(multicast_unbind, cuMulticastUnbind)         \
  X(multicast_granularity, cuMulticastGetGranularity)

struct CudaCalls {
#define AMEM_CUDA_MEMBER(member, name) decltype(&name) member = nullptr;
  AMEM_CUDA_CALLS(AMEM_CUDA_MEMBER)
  AMEM_CUDA_OPTIONAL_CALLS(AMEM_CUDA_MEMBER)
  AMEM_CUDA_MULTICAST_CALLS(AMEM_CUDA_MEMBER)
#undef AMEM_CUDA_MEMBER
};

class CudaDriver::Core {
 public:
  static Result<std::shared_ptr<Core>> Make(const Resolve& resolve);
  ~Core();

  CudaCalls calls;
  static constexpr std::size_t kDevices = 64;
  struct Shared {                                                  // with all lanes
    std::array<std::atomic<std::uint64_t>, kDevices> forgotten{};  // by device
    std::atomic<int> has_memory = -1;                              // a device on which memory was made here; -1: none yet
    // The primary contexts that are retained, once for all lanes.
    std::mutex contexts;
    std::array<bool, kDevices> retained{};
    std::function<void(int)> release;
    ~Shared();
  };
  std::shared_ptr<Shared> shared = std::make_shared<Shared>();

  // The failure of `tried`, in the driver's words.
  [[nodiscard]] Status Failure(CUresult result, const std::string& tried) const;
  // cuInit, once.
  Status Initialise();
  // Makes a call that needs no context, once the driver is initialised; null: this driver lacks it. `tried` is asked for the
  // message of a failure. Other threads' captures are as with RelaxedCapture.
  template <class... Parameters, class... Arguments>
  Status Call(const auto& tried, CUresult (*call)(Parameters...), Arguments... arguments);
  Result<int> Devices();  // how many; initialises

  struct Device {
    CUdevice device = 0;
    CUcontext context = nullptr;  // primary, retained
    CUstream stream = nullptr;
    std::uint64_t times_forgotten = 0;  // when it was opened
  };
  // The device with context and stream, made at first need.
  Result<Device> Open(DeviceOrdinal device);
  // Driver::ForgetContext, of all lanes, too. When the number has changed, what was made in the context before is gone.
  void Forget(DeviceOrdinal device);
  [[nodiscard]] std::uint64_t TimesForgotten(DeviceOrdinal device) const;
  unsigned long long PrimaryId(CUdevice device) const;
  // Driver::ReleaseContext.
  Released Release(DeviceOrdinal device, const std::function<int()>& release);
  // Whether this process has a primary context on the device. Makes none.
  Result<bool> HasContext(DeviceOrdinal device);
  // Asks until the answer is not "not ready" or the time is up, because the driver's own waits have no limit.
  static CUresult Await(Deadline until, const std::function<CUresult()>& ask);
  [[nodiscard]] CUresult AwaitStream(Deadline until, CUstream stream) const;
  // The context that page-locked host memory belongs to. The driver frees such memory together with its context, so it is a
  // primary context that is retained here, and never the thread's current one, which the program may destroy at any time. All
  // contexts of the process reach the memory, so one context serves all devices. Where no device is open, an existing primary
  // context is taken, because a new one costs hundreds of MiB. Where the program has none, it is that of a device on which
  // AMem has memory: the first copy from there needs it anyway.
  Result<CUcontext> HostContext();

 private:
  Status OpenLocked(Device& device, int ordinal) REQUIRES(mutex_);
  CUresult Retain(CUdevice device, CUcontext* context) const;

  std::atomic<bool> initialised_ = false;
  Mutex mutex_{LockRank::kDriverState};
  std::vector<Device> devices_ GUARDED_BY(mutex_);
};

// While it lives, this thread's calls neither fail because of another thread's capture nor break it.
class RelaxedCapture : NoCopies {
 public:
  explicit RelaxedCapture(const CudaCalls& calls) : calls_(calls) { calls_.exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { calls_.exchange_capture_mode(&mode_); }

 private:
  const CudaCalls& calls_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

template <class... Parameters, class... Arguments>
Status CudaDriver::Core::Call(const auto& tried, CUresult (*call)(Parameters...), Arguments... arguments) {
  AMEM_TRY(Initialise());
  const RelaxedCapture relaxed(calls);
  const CUresult result = call == nullptr ? CUDA_ERROR_NOT_SUPPORTED : call(static_cast<Parameters>(arguments)...);
  return result == CUDA_SUCCESS ? Status{} : Failure(result, tried());
}

// The same, and makes a context current. Its calls are made one after the other until one fails; none is, if the context cannot
// be made current.
class InContext : NoCopies {
 public:
  InContext(const CudaCalls& calls, CUcontext context)
      : calls_(calls), relaxed_(calls), result_(calls.context_push(context)), pushed_(ok()) {}
  ~InContext() {
    CUcontext popped = nullptr;
    if (pushed_) calls_.context_pop(&popped);
  }
  void Call(const auto& call, auto... arguments) {
    if (ok()) result_ = std::invoke(call, arguments...);
  }
  [[nodiscard]] CUresult result() const { return result_; }  // of what failed
  [[nodiscard]] bool ok() const { return result_ == CUDA_SUCCESS; }

 private:
  const CudaCalls& calls_;
  const RelaxedCapture relaxed_;
  CUresult result_;
  const bool pushed_;
};

}  // namespace amem
