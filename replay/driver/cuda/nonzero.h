// The CUDA driver's copies of contents in parts: kernels that find what is not zero, hash and pack it, and a buffer on the
// device from which the copy engines take it to the host at the full speed of the link. Only the CUDA driver includes this.
//
// What one device needs:
//   kernels   loaded at first need, from the fatbin (0.1 ms), else from PTX (some 40 ms once). Where neither loads, everything
//             works without kernels. Not earlier, and never unloaded: the driver makes both wait for all kernels that run.
//   lanes     streams of our own, each with a slot of the buffer: a lane packs into its slot and copies that to the host, one
//             after the other in its stream, while the other lanes do the same; the host waits for none of it.
//   buffer    some 33 MiB; there only from the first need until Finish, because memory is given back when this runs. A smaller
//             one is tried where memory is short; without any, and in a copier of OpenLane, the kernels reach the host's memory
//             themselves. That way contents come back in any case: a copy to the device would hold up the making of memory.
//   tables    for the kernels, in pinned memory that is kept. They are read there: just after memory was released, a
//             copy to the device waits about a millisecond.
//
// Seen on H200 with a gigabyte in runs of some 500 KiB:
//   staged  in the buffer: 53 GB/s to the host and 50 back. Releasing memory goes on beside it as if alone. But giving access
//           to new memory waits a millisecond each time while a copy engine writes to the device; and just after a release
//           copies to the device take twice as long, presumably since the driver clears what was released with the same engine.
//   direct  to and from host memory: 51 and 49. It slows down mapping and importing the more, the more thread blocks there are:
//           driver calls of a resume that take 19 ms alone took 23 beside 32 blocks of 512 threads, and 31 beside 132.
//   runs    one copy for every part, without kernels: 44 and 42.
// Hence staged to the host, in a pause, and direct back, in a resume.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "journal/base/mutex.h"
#include "replay/driver/cuda/core.h"
#include "replay/driver/cuda/nonzero_parts.h"

namespace amem {

class CudaDriver::NonZeroCopier {
 public:
  NonZeroCopier(CudaDriver& driver, std::shared_ptr<Core> core);
  ~NonZeroCopier();
  class Device;
  Device& On(DeviceOrdinal device);
  Status Finish(DeviceOrdinal device, Deadline until);  // of a device on which nothing was ever done: nothing

 private:
  CudaDriver& driver_;
  const std::shared_ptr<Core> core_;
  Mutex mutex_{LockRank::kDriverLanes};
  std::map<DeviceOrdinal, std::unique_ptr<Device>> devices_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Device>> forgotten_ GUARDED_BY(mutex_);  // another thread may still be in one
};

// Of one device. Thread-safe.
class CudaDriver::NonZeroCopier::Device : NoCopies {
 public:
  Device(CudaDriver& driver, std::shared_ptr<Core> core, DeviceOrdinal device);
  ~Device();

  [[nodiscard]] bool Forgotten() const;  // its streams and kernels went with their context

  // As the methods of Driver.
  Result<NonZero> FindNonZero(std::span<const Extent> extents, const ContentKey* key, Deadline until);
  [[nodiscard]] bool CanScanNow();
  Status Move(std::span<const Extent> extents, bool gather);
  Status ClearAll(std::span<const Extent> extents);
  Status Finish(Deadline until);
  Result<std::uint64_t> Mark();
  Status Await(std::uint64_t mark, Deadline until);
  Status MakeStreamWaitForCopies(CUstream stream);
  // By a copy engine, in one of the lanes, after what is queued on the device's own stream: so that looking at contents, there,
  // waits for no copy. kUnsupported: there are no lanes.
  Status CopyWhole(const Extent& extent, bool to_host);

 private:
  Status Ready() REQUIRES(mutex_);  // lanes; why they cannot be had
  Status Load() REQUIRES(mutex_);   // kernels; why they cannot be had
  Status FollowMain() REQUIRES(mutex_);
  void Launch(InContext& current, CUfunction kernel, CUstream stream, std::size_t blocks, void** arguments) const;
  Status PrepareScan(const ContentKey* key) REQUIRES(mutex_);
  Status ScanPart(std::span<const sparse::TableExtent> table, std::uint32_t units, bool hash, NonZero& found, Deadline until)
      REQUIRES(mutex_);
  Status MovePieces(std::span<const Extent> extents, bool gather, bool staged) REQUIRES(mutex_);
  Status LaunchMove(std::uint64_t base, Bytes bytes, bool gather, bool staged) REQUIRES(mutex_);
  Status MoveRuns(std::span<const Extent> extents, bool gather) REQUIRES(mutex_);
  Status FailureOf(CUresult result, const char* tried, Deadline began = Now()) const;  // `began`: of a wait
  [[nodiscard]] const CudaCalls& calls() const { return core_->calls; }

  CudaDriver& driver_;
  const std::shared_ptr<Core> core_;
  const DeviceOrdinal device_;
  const std::uint64_t times_forgotten_;

  Mutex mutex_{LockRank::kDriverLane};
  Core::Device opened_ GUARDED_BY(mutex_);
  sparse::Module module_ GUARDED_BY(mutex_);
  sparse::Queue queue_ GUARDED_BY(mutex_);
  sparse::StagingBuffer buffer_ GUARDED_BY(mutex_);  // there until Finish
  sparse::Tables tables_ GUARDED_BY(mutex_);
  std::unique_ptr<PinnedBuffer> scan_ GUARDED_BY(mutex_);      // a table of extents, bitmap, hashes, and the key
  std::vector<sparse::TablePiece> pieces_ GUARDED_BY(mutex_);  // kept for its memory
};

}  // namespace amem
