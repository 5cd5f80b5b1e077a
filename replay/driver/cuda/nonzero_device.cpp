// What one device needs for its copies of contents in parts: lanes, kernels, a buffer and tables.
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

using sparse::kExtentsBytes;

constexpr Bytes kTablesBytes = Bytes{2} << 20;  // pinned at once
constexpr std::size_t kLanes = 2;
constexpr Bytes kSlot = Bytes{16} << 20;  // of the buffer, for each lane

CudaDriver::NonZeroCopier::Device::Device(CudaDriver& driver, std::shared_ptr<Core> core, DeviceOrdinal device)
    : driver_(driver),
      core_(std::move(core)),
      calls_(core_->calls),
      device_(device),
      times_forgotten_(core_->TimesForgotten(device)) {}

bool CudaDriver::NonZeroCopier::Device::Forgotten() const { return core_->TimesForgotten(device_) != times_forgotten_; }

CudaDriver::NonZeroCopier::Device::~Device() {
  if (opened_.context == nullptr) return;
  static_cast<void>(CloseBuffer());
  if (buffer_.reserved != 0) static_cast<void>(driver_.FreeRange(buffer_.address, buffer_.reserved));
  if (Forgotten()) return;
  const InContext current(calls_, opened_.context);
  if (!current.ok()) return;
  for (const Lane& lane : lanes_) calls_.stream_destroy(lane.stream);
  if (main_event_ != nullptr) calls_.event_destroy(main_event_);
  for (const CUevent event : events_) calls_.event_destroy(event);
}

Status CudaDriver::NonZeroCopier::Device::FailureOf(CUresult result, const char* tried, Deadline began) const {
  if (result == CUDA_SUCCESS) return {};
  if (result == CUDA_ERROR_NOT_READY) return CopiesNotDone(device_, began);
  return core_->Failure(result, std::string(tried) + " for contents in parts, device " + std::to_string(device_.value));
}

Status CudaDriver::NonZeroCopier::Device::Ready() {
  if (ready_) return *ready_;
  AMEM_ASSIGN(opened_, core_->Open(device_));
#define AMEM_CUDA_LACKS(member, name) \
  if (calls_.member == nullptr) return *(ready_ = Status{Code::kUnsupported, "the CUDA driver has no " #name});
  AMEM_CUDA_OPTIONAL_CALLS(AMEM_CUDA_LACKS)
#undef AMEM_CUDA_LACKS
  InContext current(calls_, opened_.context);
  if (!current.ok()) return *(ready_ = FailureOf(current.result(), "cuCtxPushCurrent"));
  current.Call(calls_.event_create, &main_event_, CU_EVENT_DISABLE_TIMING);
  while (current.ok() && lanes_.size() < kLanes) {
    Lane lane;
    current.Call(calls_.stream_create, &lane.stream, CU_STREAM_NON_BLOCKING);
    if (current.ok()) lanes_.push_back(lane);
  }
  return *(ready_ = FailureOf(current.result(), "cuStreamCreate"));
}

Status CudaDriver::NonZeroCopier::Device::Load() {
  if (loaded_) return *loaded_;
  AMEM_TRY(Ready());
  Status loaded = LoadKernels();
  if (loaded.code() != Code::kOutOfMemory) loaded_ = loaded;  // a shortage may pass
  return loaded;
}

Status CudaDriver::NonZeroCopier::Device::LoadKernels() {
  const InContext current(calls_, opened_.context);
  CUresult result = CUDA_ERROR_NO_BINARY_FOR_GPU;
  if (amem_nonzero_fatbin_end - amem_nonzero_fatbin > 0) result = calls_.module_load(&module_, amem_nonzero_fatbin);
  if (result != CUDA_SUCCESS) result = calls_.module_load(&module_, amem_nonzero_ptx);
  if (result != CUDA_SUCCESS) {
    module_ = nullptr;
    return FailureOf(result, "cuModuleLoadData");
  }
  std::size_t bytes = 0;
  result = calls_.module_global(&key_, &bytes, module_, "amem_sparse_key");
  if (result == CUDA_SUCCESS && bytes != sizeof(ContentKey)) result = CUDA_ERROR_INVALID_IMAGE;
  if (result == CUDA_SUCCESS) result = calls_.module_function(&find_, module_, "amem_sparse_find");
  if (result == CUDA_SUCCESS) result = calls_.module_function(&look_, module_, "amem_sparse_look");
  if (result == CUDA_SUCCESS) result = calls_.module_function(&copy_, module_, "amem_sparse_copy");
  if (result == CUDA_SUCCESS) result = calls_.module_function(&clear_, module_, "amem_sparse_clear");
  return FailureOf(result, "cuModuleGetFunction");
}

void CudaDriver::NonZeroCopier::Device::OpenBuffer() {
  if (buffer_.slot != 0 || buffer_.refused) return;
  for (Bytes slot = kSlot; slot >= kUnitBytes; slot /= 8) {
    if (TryBuffer(slot / kUnitBytes * kUnitBytes).ok()) return;
  }
  buffer_.refused = true;
}

Status CudaDriver::NonZeroCopier::Device::TryBuffer(Bytes slot) {
  AllocationProperties properties;
  properties.location = {LocationType::kDevice, device_.value};
  AMEM_ASSIGN(const auto granularity, driver_.Granularity(properties));
  const Bytes needed = lanes_.size() * slot + kExtentsBytes;
  const Bytes bytes = (needed + granularity - 1) / granularity * granularity;
  if (buffer_.reserved < bytes) {
    AMEM_ASSIGN(const auto range, driver_.Reserve(bytes, 0, {}, 0));
    if (buffer_.reserved != 0) static_cast<void>(driver_.FreeRange(buffer_.address, buffer_.reserved));
    buffer_.address = range;
    buffer_.reserved = bytes;
  }
  AMEM_ASSIGN(const auto created, driver_.Create(bytes, properties, 0));
  OwnedHandle handle(driver_, created);
  const AccessDescriptor access{properties.location, 3};
  AMEM_ASSIGN(auto region, MappedRegion::MapAt(driver_, buffer_.address, handle.get(), bytes, std::span(&access, 1)));
  region.Detach();
  buffer_.handle = handle.Detach();
  buffer_.mapped = bytes;
  CUdeviceptr at = buffer_.address.value;
  for (Lane& lane : lanes_) {
    lane.slot = at;
    at += slot;
  }
  buffer_.extents = at;
  buffer_.slot = slot;
  return {};
}

Status CudaDriver::NonZeroCopier::Device::CloseBuffer() {
  buffer_.slot = 0;
  buffer_.refused = false;
  Status first;
  if (buffer_.mapped != 0) {
    first = driver_.Unmap(buffer_.address, buffer_.mapped);
    if (!first.ok()) return first;
    buffer_.mapped = 0;
  }
  if (buffer_.handle) {
    first = driver_.Release(buffer_.handle);
    buffer_.handle = {};
  }
  return first;
}

Result<std::byte*> CudaDriver::NonZeroCopier::Device::Table(Bytes bytes) {
  for (; filling_ < tables_.size(); ++filling_, filled_ = 0)
    if (tables_[filling_]->size() - filled_ >= bytes) break;
  if (filling_ == tables_.size()) {
    auto buffer = driver_.AllocatePinned(std::max(bytes, kTablesBytes));
    if (!buffer.ok()) return buffer.status().Within("pin host memory for tables of contents");
    tables_.push_back(*std::move(buffer));
    filled_ = 0;
  }
  std::byte* at = tables_[filling_]->data() + filled_;
  filled_ += bytes;
  return at;
}

Status CudaDriver::NonZeroCopier::Device::Finish(Deadline until) {
  const Deadline began = Now();
  const MutexLock lock(mutex_);
  if (opened_.context == nullptr) return {};
  CUresult result = CUDA_SUCCESS;
  {
    const InContext current(calls_, opened_.context);
    result = current.result();
    for (const Lane& lane : lanes_) {
      const CUresult done = core_->AwaitStream(until, lane.stream);
      if (done == CUDA_ERROR_NOT_READY)
        return FailureOf(done, "cuStreamQuery", began);  // its copies still use the buffer and the tables
      if (result == CUDA_SUCCESS) result = done;
    }
  }
  filling_ = 0;
  filled_ = 0;
  marks_ = awaited_ = 0;
  const Status closed = CloseBuffer();
  return result == CUDA_SUCCESS ? closed : FailureOf(result, "cuStreamSynchronize");
}

}  // namespace amem
