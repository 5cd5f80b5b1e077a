// The parts of what one device needs for its copies of contents (nonzero.h). Each is used with the lock of its device.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "replay/driver/cuda/core.h"
#include "replay/driver/cuda/nonzero_kernels.h"

namespace amem::sparse {

inline constexpr std::size_t kTableExtents = 16384;  // at once; more are done one table after the other
inline constexpr Bytes kExtentsBytes = kTableExtents * sizeof(TableExtent);

// Loaded once, and never unloaded: the driver makes both wait for all kernels that run.
struct Module {
  CUmodule module = nullptr;
  CUfunction find = nullptr, scan = nullptr, copy = nullptr, clear = nullptr;
  CUdeviceptr key = 0;             // where the key of hashes is on the device
  bool has_key = false;            // it was uploaded
  std::optional<Status> loaded{};  // once tried; why not

  // With the context. The result, and what was called last.
  std::pair<CUresult, const char*> Load(const CudaCalls& calls);
};

struct Lane {
  CUstream stream = nullptr;
  CUdeviceptr slot = 0;  // in the buffer
  bool behind = false;   // has yet to wait for what is queued on the device's own stream
};

// The lanes, and marks of what is queued in them and on the device's own stream (`main`). All calls are made in their context.
class Queue {
 public:
  explicit Queue(const CudaCalls& calls) : calls_(calls) {}

  void Open(InContext& current);                                               // once
  [[nodiscard]] const std::optional<Status>& ready() const { return ready_; }  // once tried; why there are no lanes
  Status SetReady(Status ready) { return *(ready_ = std::move(ready)); }
  void Destroy() const;
  [[nodiscard]] std::span<Lane> lanes() { return lanes_; }
  [[nodiscard]] std::span<const Lane> lanes() const { return lanes_; }
  Lane& Next() { return lanes_[next_++ % lanes_.size()]; }
  // What is queued in the lanes from now on comes after what is queued on the device's own stream. CatchUp: before the first.
  void Follow(InContext& current, CUstream main);
  void CatchUp(InContext& current, Lane& lane);
  std::uint64_t Mark(InContext& current, CUstream main);  // of no use if `current` has failed
  [[nodiscard]] bool IsDone(std::uint64_t mark) const { return mark <= awaited_ || mark > marks_; }
  [[nodiscard]] std::span<const CUevent> EventsOf(std::uint64_t mark) const {  // of a mark that is not done
    return std::span(events_).subspan((mark - 1) * (lanes_.size() + 1), lanes_.size() + 1);
  }
  void NoteDone(std::uint64_t mark) { awaited_ = mark; }
  void ForgetMarks() { marks_ = awaited_ = 0; }  // everything is done

 private:
  const CudaCalls& calls_;
  std::optional<Status> ready_;
  CUevent main_event_ = nullptr;
  std::vector<Lane> lanes_;
  std::size_t next_ = 0;
  std::vector<CUevent> events_;          // of marks, one for each stream; used again after ForgetMarks
  std::size_t marks_ = 0, awaited_ = 0;  // given out, and known to be done
};

// Memory of the device through which packed pages go to the host: a slot for each lane, and room for a table of extents.
class StagingBuffer {
 public:
  // A smaller one is tried where memory is short; where none can be had, no other is asked for until Close.
  void Open(CudaDriver& driver, DeviceOrdinal device, std::span<Lane> lanes);
  // Its address range stays. If it fails, it can be called again.
  Status Close(CudaDriver& driver);
  void FreeRange(CudaDriver& driver) const;           // after Close, at the end
  [[nodiscard]] Bytes slot() const { return slot_; }  // the size of each; 0: there is no buffer
  [[nodiscard]] CUdeviceptr extents() const { return extents_; }

 private:
  Status Try(CudaDriver& driver, DeviceOrdinal device, std::span<Lane> lanes, Bytes slot);

  Address address_;
  Bytes reserved_ = 0;
  DriverHandle handle_;
  Bytes mapped_ = 0, slot_ = 0;
  CUdeviceptr extents_ = 0;
  bool refused_ = false;
};

// Pinned memory for the kernels' tables, which is handed out in order and kept.
class Tables {
 public:
  Result<std::byte*> Take(CudaDriver& driver, Bytes bytes);  // until Reuse
  void Reuse() { filling_ = filled_ = 0; }                   // nothing reads them any more

 private:
  std::vector<std::unique_ptr<PinnedBuffer>> buffers_;
  std::size_t filling_ = 0;
  Bytes filled_ = 0;
};

}  // namespace amem::sparse
