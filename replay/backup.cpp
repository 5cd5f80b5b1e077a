#include "replay/backup.h"

#include <algorithm>

namespace amem {
namespace {

constexpr Bytes kBufferBytes = Bytes{512} << 20;
constexpr Bytes kAlign = 4096;

}  // namespace

Result<std::byte*> Backup::Room(Bytes bytes) {
  const Bytes rounded = (bytes + kAlign - 1) / kAlign * kAlign;
  for (; filling_ < buffers_.size(); ++filling_, filled_ = 0) {
    if (buffers_[filling_]->size() - filled_ >= rounded) break;
  }
  if (filling_ == buffers_.size()) {
    auto buffer = driver_.AllocatePinned(std::max(rounded, kBufferBytes));
    if (!buffer.ok()) return buffer.status().Within("pin host memory for contents");
    pinned_bytes_ += (*buffer)->size();
    buffers_.push_back(*std::move(buffer));
    filled_ = 0;
  }
  std::byte* at = buffers_[filling_]->data() + filled_;
  filled_ += rounded;
  return at;
}

Status Backup::Save(AllocationId allocation, DeviceOrdinal device, Address address, Bytes bytes) {
  auto room = Room(bytes);
  if (!room.ok()) return room.status();
  AMEM_TRY(driver_.CopyToHost(device, *room, address, bytes));
  busy_.insert(device);
  saved_[allocation] = {*room, bytes};
  return {};
}

Status Backup::Restore(AllocationId allocation, DeviceOrdinal device, Address address) {
  const auto it = saved_.find(allocation);
  if (it == saved_.end()) {
    return {Code::kNotFound, "the backup has no contents of allocation " + std::to_string(allocation.value)};
  }
  AMEM_TRY(driver_.CopyToDevice(device, address, it->second.host, it->second.bytes));
  busy_.insert(device);
  return {};
}

Status Backup::Finish() {
  Status first;
  for (const DeviceOrdinal device : busy_) {
    if (Status done = driver_.FinishCopies(device); !done.ok() && first.ok()) first = std::move(done);
  }
  busy_.clear();
  return first;
}

void Backup::ForgetAll() {
  saved_.clear();
  filling_ = 0;
  filled_ = 0;
}

}  // namespace amem
