// What one device needs for its copies of contents in parts: kernels, lanes, a buffer and tables.
#include <algorithm>

#include "replay/driver/cuda/nonzero.h"
#include "replay/driver/mapped_region.h"

// Assembled from nonzero_image.S.
extern "C" {
extern const unsigned char amem_nonzero_fatbin[];
extern const unsigned char amem_nonzero_fatbin_end[];
extern const char amem_nonzero_ptx[];
}

namespace amem {

constexpr Bytes kTablesBytes = Bytes{2} << 20;  // pinned at once
constexpr std::size_t kLanes = 2;
constexpr Bytes kSlot = Bytes{16} << 20;  // of the buffer, for each lane

CudaDriver::NonZeroCopier::Device::Device(CudaDriver& driver, std::shared_ptr<Core> core, DeviceOrdinal device)
    : driver_(driver),
      core_(std::move(core)),
      device_(device),
      times_forgotten_(core_->TimesForgotten(device)),
      queue_(core_->calls) {}

bool CudaDriver::NonZeroCopier::Device::Forgotten() const { return core_->TimesForgotten(device_) != times_forgotten_; }

CudaDriver::NonZeroCopier::Device::~Device() {
  if (opened_.context == nullptr) return;
  static_cast<void>(buffer_.Close(driver_));
  buffer_.FreeRange(driver_);
  if (Forgotten()) return;
  const InContext current(calls(), opened_.context);
  if (current.ok()) queue_.Destroy();
}

Status CudaDriver::NonZeroCopier::Device::FailureOf(CUresult result, const char* tried, Deadline began) const {
  if (result == CUDA_SUCCESS) return {};
  if (result == CUDA_ERROR_NOT_READY) return CopiesNotDone(device_, began);
  return core_->Failure(result, std::string(tried) + " for contents in parts, device " + std::to_string(device_.value));
}

Status CudaDriver::NonZeroCopier::Device::Ready() {
  if (queue_.ready()) return *queue_.ready();
  AMEM_ASSIGN(opened_, core_->Open(device_));
#define AMEM_CUDA_LACKS(member, name) \
  if (calls().member == nullptr) return queue_.SetReady({Code::kUnsupported, "the CUDA driver has no " #name});
  AMEM_CUDA_OPTIONAL_CALLS(AMEM_CUDA_LACKS)
#undef AMEM_CUDA_LACKS
  InContext current(calls(), opened_.context);
  if (!current.ok()) return queue_.SetReady(FailureOf(current.result(), "cuCtxPushCurrent"));
  queue_.Open(current);
  return queue_.SetReady(FailureOf(current.result(), "cuStreamCreate"));
}

Status CudaDriver::NonZeroCopier::Device::Load() {
  if (module_.loaded) return *module_.loaded;
  AMEM_TRY(Ready());
  const InContext current(calls(), opened_.context);
  const auto [result, tried] = module_.Load(calls());
  Status loaded = FailureOf(result, tried);
  if (loaded.code() != Code::kOutOfMemory) module_.loaded = loaded;  // a shortage may pass
  return loaded;
}

namespace sparse {

std::pair<CUresult, const char*> Module::Load(const CudaCalls& calls) {
  CUresult result = CUDA_ERROR_NO_BINARY_FOR_GPU;
  if (amem_nonzero_fatbin_end - amem_nonzero_fatbin > 0) result = calls.module_load(&module, amem_nonzero_fatbin);
  if (result != CUDA_SUCCESS) result = calls.module_load(&module, amem_nonzero_ptx);
  if (result != CUDA_SUCCESS) {
    module = nullptr;
    return {result, "cuModuleLoadData"};
  }
  std::size_t bytes = 0;
  result = calls.module_global(&key, &bytes, module, "amem_sparse_key");
  if (result == CUDA_SUCCESS && bytes != sizeof(ContentKey)) result = CUDA_ERROR_INVALID_IMAGE;
  if (result == CUDA_SUCCESS) result = calls.module_function(&find, module, "amem_sparse_find");
  if (result == CUDA_SUCCESS) result = calls.module_function(&scan, module, "amem_sparse_look");
  if (result == CUDA_SUCCESS) result = calls.module_function(&copy, module, "amem_sparse_copy");
  if (result == CUDA_SUCCESS) result = calls.module_function(&clear, module, "amem_sparse_clear");
  return {result, "cuModuleGetFunction"};
}

void Queue::Open(InContext& current) {
  current.Call(calls_.event_create, &main_event_, CU_EVENT_DISABLE_TIMING);
  while (current.ok() && lanes_.size() < kLanes) {
    Lane lane;
    current.Call(calls_.stream_create, &lane.stream, CU_STREAM_NON_BLOCKING);
    if (current.ok()) lanes_.push_back(lane);
  }
}

void Queue::Destroy() const {
  for (const Lane& lane : lanes_) calls_.stream_destroy(lane.stream);
  if (main_event_ != nullptr) calls_.event_destroy(main_event_);
  for (const CUevent event : events_) calls_.event_destroy(event);
}

void Queue::Follow(InContext& current, CUstream main) {
  current.Call(calls_.event_record, main_event_, main);
  if (!current.ok()) return;
  for (Lane& lane : lanes_) lane.behind = true;
}

void Queue::CatchUp(InContext& current, Lane& lane) {
  if (!lane.behind) return;
  current.Call(calls_.stream_wait, lane.stream, main_event_, 0);
  lane.behind = !current.ok();
}

std::uint64_t Queue::Mark(InContext& current, CUstream main) {
  const std::size_t first = marks_ * (lanes_.size() + 1);
  while (current.ok() && events_.size() < first + lanes_.size() + 1) {
    CUevent event = nullptr;
    current.Call(calls_.event_create, &event, CU_EVENT_DISABLE_TIMING);
    if (current.ok()) events_.push_back(event);
  }
  for (std::size_t i = 0; i <= lanes_.size() && current.ok(); ++i)
    current.Call(calls_.event_record, events_[first + i], i == 0 ? main : lanes_[i - 1].stream);
  return current.ok() ? ++marks_ : 0;
}

void StagingBuffer::Open(CudaDriver& driver, DeviceOrdinal device, std::span<Lane> lanes) {
  if (slot_ != 0 || refused_) return;
  for (Bytes slot = kSlot; slot >= kUnitBytes; slot /= 8) {
    if (Try(driver, device, lanes, slot / kUnitBytes * kUnitBytes).ok()) return;
  }
  refused_ = true;
}

Status StagingBuffer::Try(CudaDriver& driver, DeviceOrdinal device, std::span<Lane> lanes, Bytes slot) {
  AllocationProperties properties;
  properties.location = {LocationType::kDevice, device.value};
  AMEM_ASSIGN(const auto granularity, driver.Granularity(properties));
  const Bytes needed = lanes.size() * slot + kExtentsBytes;
  const Bytes bytes = (needed + granularity - 1) / granularity * granularity;
  if (reserved_ < bytes) {
    AMEM_ASSIGN(const auto range, driver.Reserve(bytes, 0, {}, 0));
    FreeRange(driver);
    address_ = range;
    reserved_ = bytes;
  }
  AMEM_ASSIGN(const auto created, driver.Create(bytes, properties, 0));
  OwnedHandle handle(driver, created);
  const AccessDescriptor access{properties.location, 3};
  AMEM_ASSIGN(auto region, MappedRegion::MapAt(driver, address_, handle.get(), bytes, std::span(&access, 1)));
  region.Detach();
  handle_ = handle.Detach();
  mapped_ = bytes;
  CUdeviceptr at = address_.value;
  for (Lane& lane : lanes) {
    lane.slot = at;
    at += slot;
  }
  extents_ = at;
  slot_ = slot;
  return {};
}

Status StagingBuffer::Close(CudaDriver& driver) {
  slot_ = 0;
  refused_ = false;
  Status first;
  if (mapped_ != 0) {
    first = driver.Unmap(address_, mapped_);
    if (!first.ok()) return first;
    mapped_ = 0;
  }
  if (handle_) {
    first = driver.Release(handle_);
    handle_ = {};
  }
  return first;
}

void StagingBuffer::FreeRange(CudaDriver& driver) const {
  if (reserved_ != 0) static_cast<void>(driver.FreeRange(address_, reserved_));
}

Result<std::byte*> Tables::Take(CudaDriver& driver, Bytes bytes) {
  for (; filling_ < buffers_.size(); ++filling_, filled_ = 0)
    if (buffers_[filling_]->size() - filled_ >= bytes) break;
  if (filling_ == buffers_.size()) {
    auto buffer = driver.AllocatePinned(std::max(bytes, kTablesBytes));
    if (!buffer.ok()) return buffer.status().Within("pin host memory for tables of contents");
    buffers_.push_back(*std::move(buffer));
    filled_ = 0;
  }
  std::byte* at = buffers_[filling_]->data() + filled_;
  filled_ += bytes;
  return at;
}

}  // namespace sparse

Status CudaDriver::NonZeroCopier::Device::Finish(Deadline until) {
  const Deadline began = Now();
  const MutexLock lock(mutex_);
  if (opened_.context == nullptr) return {};
  CUresult result = CUDA_SUCCESS;
  {
    const InContext current(calls(), opened_.context);
    result = current.result();
    for (const sparse::Lane& lane : queue_.lanes()) {
      const CUresult done = core_->AwaitStream(until, lane.stream);
      if (done == CUDA_ERROR_NOT_READY)
        return FailureOf(done, "cuStreamQuery", began);  // its copies still use the buffer and the tables
      if (result == CUDA_SUCCESS) result = done;
    }
  }
  tables_.Reuse();
  queue_.ForgetMarks();
  const Status closed = buffer_.Close(driver_);
  return result == CUDA_SUCCESS ? closed : FailureOf(result, "cuStreamSynchronize");
}

}  // namespace amem
