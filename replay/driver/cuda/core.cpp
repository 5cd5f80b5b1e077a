#include "replay/driver/cuda/core.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "replay/driver/result_names.h"

namespace amem {

// The first CUDA with cuGetProcAddress_v2, and with every variant that is used here.
constexpr int kCudaVersion = 12000, kMulticastVersion = 12010;

using GetProcAddress = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

Result<std::shared_ptr<CudaDriver::Core>> CudaDriver::Core::Make(const Resolve& resolve) {
  const auto lookup = reinterpret_cast<GetProcAddress>(resolve("cuGetProcAddress_v2"));
  if (lookup == nullptr) {
    return Status(Code::kUnsupported,
                  "the CUDA driver has no cuGetProcAddress_v2: a driver of CUDA 12.0 (525) or newer is needed");
  }
  auto core = std::make_shared<Core>();
  const char* missing = nullptr;
  int version = kCudaVersion;
  const auto find = [&](const char* name, auto& pointer) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult why{};
    if (lookup(name, &found, version, 0, &why) != CUDA_SUCCESS || found == nullptr) {
      missing = missing == nullptr ? name : missing;
      return;
    }
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(found);
  };
#define AMEM_CUDA_FIND(member, name) find(#name, core->calls.member);
  AMEM_CUDA_CALLS(AMEM_CUDA_FIND)
  const char* const needed = missing;
  AMEM_CUDA_OPTIONAL_CALLS(AMEM_CUDA_FIND)
  version = kMulticastVersion;
  AMEM_CUDA_MULTICAST_CALLS(AMEM_CUDA_FIND)
  missing = needed;
#undef AMEM_CUDA_FIND
  if (missing == nullptr) return core;
  return Status(Code::kUnsupported,
                std::string("the CUDA driver has no ") + missing + ": a driver of CUDA 12.0 (525) or newer is needed");
}

CudaDriver::Core::~Core() {
  for (const Device& device : devices_) {
    if (device.context == nullptr) continue;
    if (device.stream != nullptr) InContext(calls, device.context).Call(calls.stream_destroy, device.stream);
  }
}

CudaDriver::Core::Shared::~Shared() {
  for (std::size_t device = 0; device < retained.size(); ++device)
    if (retained[device]) release(static_cast<int>(device));  // fails while the process ends, which does not matter
}

// One reference stands for all lanes.
CUresult CudaDriver::Core::Retain(CUdevice device, CUcontext* context) const {
  const std::lock_guard lock(shared->contexts);
  const CUresult result = calls.primary_retain(context, device);
  const auto index = static_cast<std::size_t>(device);
  if (result != CUDA_SUCCESS || index >= kDevices) return result;
  if (std::exchange(shared->retained[index], true)) return calls.primary_release(device);
  shared->release = [release = calls.primary_release](int which) { release(which); };
  return result;
}

// Which context is the primary one now, by the driver's own number; 0: there is none, or this driver has no numbers.
unsigned long long CudaDriver::Core::PrimaryId(CUdevice device) const {
  unsigned flags = 0;
  int active = 0;
  CUcontext context = nullptr;
  if (calls.context_id == nullptr || calls.primary_state(device, &flags, &active) != CUDA_SUCCESS || active == 0 ||
      calls.primary_retain(&context, device) != CUDA_SUCCESS)
    return 0;
  unsigned long long id = 0;
  const bool told = calls.context_id(context, &id) == CUDA_SUCCESS;
  calls.primary_release(device);
  return told ? id : 0;
}

// Other threads see the context with AMem's reference or without it, and never between two of the program's. One of them may
// make the next context before this one has asked what became of it.
Driver::Released CudaDriver::Core::Release(DeviceOrdinal device, const std::function<int()>& release) {
  const std::lock_guard lock(shared->contexts);
  const auto index = static_cast<std::size_t>(device.value);
  if (index >= kDevices) return {release(), false};
  const unsigned long long before = PrimaryId(device.value);
  const bool retained = std::exchange(shared->retained[index], false);
  if (retained) calls.primary_release(device.value);
  const int result = release();
  unsigned flags = 0;
  int active = 1;
  CUcontext context = nullptr;
  const bool ended = calls.primary_state(device.value, &flags, &active) == CUDA_SUCCESS && active == 0;
  // First, so that what is asked then goes on being so.
  if (retained && !ended) shared->retained[index] = calls.primary_retain(&context, device.value) == CUDA_SUCCESS;
  const unsigned long long after = ended ? 0 : PrimaryId(device.value);
  if (!ended && (before == 0 || after == 0 || after == before)) return {result, false};
  if (std::exchange(shared->retained[index], false)) calls.primary_release(device.value);  // of another one
  Forget(device);
  return {result, true};
}

Status CudaDriver::Core::Failure(CUresult result, const std::string& tried) const {
  const char* name = nullptr;
  const char* description = nullptr;
  if (calls.error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "an unknown error";
  if (calls.error_string(result, &description) != CUDA_SUCCESS || description == nullptr) description = "without a description";
  const int number = static_cast<int>(result);
  return {CodeOfResult(number), fmt::format("{}: {} ({}, {})", tried, name, number, description), number};
}

Status CudaDriver::Core::Initialise() {
  if (initialised_.load(std::memory_order_acquire)) return {};
  const CUresult result = calls.init(0);
  if (result != CUDA_SUCCESS) return Failure(result, "cuInit");
  initialised_.store(true, std::memory_order_release);
  return {};
}

Result<int> CudaDriver::Core::Devices() {
  AMEM_TRY(Initialise());
  int count = 0;
  const CUresult result = calls.device_count(&count);
  if (result != CUDA_SUCCESS) return Failure(result, "cuDeviceGetCount");
  return count;
}

Result<CudaDriver::Core::Device> CudaDriver::Core::Open(DeviceOrdinal device) {
  AMEM_ASSIGN(const auto count, Devices());
  if (device.value < 0 || device.value >= count)
    return Failure(CUDA_ERROR_INVALID_DEVICE, fmt::format("device {} of the {} that this process sees", device.value, count));
  const MutexLock lock(mutex_);
  devices_.resize(static_cast<std::size_t>(count));
  Device& opened = devices_[static_cast<std::size_t>(device.value)];
  if (const std::uint64_t now = TimesForgotten(device); opened.times_forgotten != now) {
    opened = {.times_forgotten = now};
  }
  if (opened.stream == nullptr) AMEM_TRY(OpenLocked(opened, device.value));
  return opened;
}

void CudaDriver::Core::Forget(DeviceOrdinal device) {
  auto& forgotten = shared->forgotten;
  if (const auto index = static_cast<std::size_t>(device.value); index < forgotten.size()) ++forgotten[index];
}

std::uint64_t CudaDriver::Core::TimesForgotten(DeviceOrdinal device) const {
  const auto index = static_cast<std::size_t>(device.value);
  return index < shared->forgotten.size() ? shared->forgotten[index].load() : 0;
}

Status CudaDriver::Core::OpenLocked(Device& device, int ordinal) {
  const std::string of = " device " + std::to_string(ordinal);
  const RelaxedCapture relaxed(calls);
  if (device.context == nullptr) {
    CUresult result = calls.device_get(&device.device, ordinal);
    if (result != CUDA_SUCCESS) return Failure(result, "cuDeviceGet" + of);
    result = Retain(device.device, &device.context);
    if (result != CUDA_SUCCESS) {
      device.context = nullptr;
      return Failure(result, "cuDevicePrimaryCtxRetain" + of);
    }
  }
  const InContext current(calls, device.context);
  if (!current.ok()) return Failure(current.result(), "cuCtxPushCurrent" + of);
  CUstream stream = nullptr;
  const CUresult result = calls.stream_create(&stream, CU_STREAM_NON_BLOCKING);
  if (result != CUDA_SUCCESS) return Failure(result, "cuStreamCreate" + of);
  device.stream = stream;
  return {};
}

Result<bool> CudaDriver::Core::HasContext(DeviceOrdinal device) {
  const auto tried = [&] { return fmt::format("cuDevicePrimaryCtxGetState device {}", device.value); };
  CUdevice known = 0;
  unsigned flags = 0;
  int active = 0;
  AMEM_TRY(Call(tried, calls.device_get, &known, device.value));
  AMEM_TRY(Call(tried, calls.primary_state, known, &flags, &active));
  return active != 0;
}

// Most waits end within milliseconds, so it polls; but not so often that it delays driver calls of other threads.
CUresult CudaDriver::Core::Await(Deadline until, const std::function<CUresult()>& ask) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kBetween{2}, kNap{50};
  constexpr std::chrono::milliseconds kAwake{50};
  const auto began = Clock::now();
  while (true) {
    const CUresult result = ask();
    if (result != CUDA_ERROR_NOT_READY) return result;
    const auto now = Clock::now();
    if (now >= until) return result;
    if (now - began >= kAwake) {
      std::this_thread::sleep_for(kNap);
    } else {
      while (Clock::now() - now < kBetween) std::this_thread::yield();
    }
  }
}

CUresult CudaDriver::Core::AwaitStream(Deadline until, CUstream stream) const {
  if (calls.stream_query == nullptr) return calls.stream_synchronize(stream);
  return Await(until, [&] { return calls.stream_query(stream); });
}

Result<CUcontext> CudaDriver::Core::HostContext() {
  AMEM_ASSIGN(const auto count, Devices());
  {
    const MutexLock lock(mutex_);
    for (const Device& device : devices_) {
      if (device.context != nullptr && device.times_forgotten == TimesForgotten(DeviceOrdinal{device.device}))
        return device.context;
    }
  }
  const int preferred = std::max(shared->has_memory.load(), 0);
  int chosen = preferred;
  for (int i = 0; i < count; ++i) {
    const int candidate = (preferred + i) % count;
    const auto has = HasContext(DeviceOrdinal{candidate});
    if (!has.ok() || !*has) continue;
    chosen = candidate;
    break;
  }
  AMEM_ASSIGN(const auto opened, Open(DeviceOrdinal{chosen}));
  return opened.context;
}

}  // namespace amem
