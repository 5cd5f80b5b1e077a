#include "replay/driver/cuda/nonzero.h"

#include <algorithm>
#include <cstring>

#include "statemachine/check.h"

namespace amem {

using sparse::kExtentsBytes;
using sparse::kPiecePages;
using sparse::kTableExtents;
using sparse::Lane;
using sparse::TableExtent;
using sparse::TablePiece;

constexpr std::uint32_t kTableUnits = 65536;  // 8 GiB, likewise
constexpr Bytes kBitmapBytes = Bytes{kTableUnits} * sizeof(std::uint32_t),
                kHashesBytes = Bytes{kTableUnits} * sizeof(ContentHash);
constexpr Bytes kBitmapAt = kExtentsBytes, kHashesAt = kBitmapAt + kBitmapBytes, kKeyAt = kHashesAt + kHashesBytes;
constexpr Bytes kScanBytes = kKeyAt + sizeof(ContentKey);
constexpr Bytes kDirectBytes = Bytes{16} << 20;  // copied by one launch where there is no buffer
constexpr Bytes kStagedBytes = Bytes{1} << 20;   // without gaps in host memory are worth a copy by a copy engine
constexpr std::size_t kMaxBlocks = 4096;         // thread blocks of a launch; each takes several units then
constexpr std::size_t kDirectBlocks = 24;        // of those, that reach host memory at once, in each lane
constexpr std::uint32_t kWarps = sparse::kThreads / 32;

static Status Multiples(std::span<const Extent> extents) {
  for (const Extent& extent : extents) {
    const auto host = reinterpret_cast<std::uintptr_t>(extent.host);
    if (extent.bytes % kPageBytes == 0 && extent.address.value % kPageBytes == 0 && host % kPageBytes == 0) continue;
    return {Code::kInvalid, "contents in parts: " + InRange(extent.address, extent.bytes) + ", host memory " + Hex(host) +
                                ": all must be multiples of 4096"};
  }
  return {};
}

// Cuts extents into tables, and calls done(table, units) for each that is full and for the last.
static Status InTables(std::span<const Extent> extents, const auto& done) {
  std::vector<TableExtent> table;
  std::uint32_t units = 0;
  for (const Extent& extent : extents) {
    Address at = extent.address;
    for (Bytes left = extent.bytes; left > 0;) {
      const Bytes bytes = std::min(left, (kTableUnits - units) * kUnitBytes);
      table.push_back({at.value, units, static_cast<std::uint32_t>(bytes / kPageBytes)});
      units += static_cast<std::uint32_t>((bytes + kUnitBytes - 1) / kUnitBytes);
      at = at + bytes;
      left -= bytes;
      if (units < kTableUnits && table.size() < kTableExtents) continue;
      AMEM_TRY(done(std::span<const TableExtent>(table), units));
      table.clear();
      units = 0;
    }
  }
  return table.empty() ? Status{} : done(std::span<const TableExtent>(table), units);
}

void CudaDriver::NonZeroCopier::Device::Launch(InContext& current, CUfunction kernel, CUstream stream, std::size_t blocks,
                                               void** arguments) const {
  const auto grid = static_cast<unsigned>(std::min(blocks, kMaxBlocks));
  current.Call(calls().launch, kernel, grid, 1, 1, sparse::kThreads, 1, 1, 0, stream, arguments, nullptr);
}

bool CudaDriver::NonZeroCopier::Device::CanScanNow() {
  const MutexLock lock(mutex_);
  return module_.loaded && module_.loaded->ok();
}

Result<NonZero> CudaDriver::NonZeroCopier::Device::FindNonZero(std::span<const Extent> extents, const ContentKey* key,
                                                               Deadline until) {
  AMEM_TRY(Multiples(extents));
  const MutexLock lock(mutex_);
  if (Status loaded = Load(); !loaded.ok()) return Unscanned(extents, loaded.message());
  if (!driver_.is_lane_) buffer_.Open(driver_, device_, queue_.lanes());
  AMEM_TRY(PrepareScan(key));
  NonZero found;
  AMEM_TRY(InTables(extents, [&](std::span<const TableExtent> table, std::uint32_t units) {
    mutex_.AssertHeld();
    return ScanPart(table, units, key != nullptr, found, until);
  }));
  return found;
}

// The key is uploaded once, unless there is another.
Status CudaDriver::NonZeroCopier::Device::PrepareScan(const ContentKey* key) {
  if (scan_ == nullptr) {
    auto pinned = driver_.AllocatePinned(kScanBytes);
    if (!pinned.ok()) return pinned.status().Within("pin host memory to look for contents");
    scan_ = *std::move(pinned);
  }
  std::byte* const kept = scan_->data() + kKeyAt;
  if (key == nullptr || (module_.has_key && std::memcmp(kept, key, sizeof *key) == 0)) return {};
  std::memcpy(kept, key, sizeof *key);
  InContext current(calls(), opened_.context);
  current.Call(calls().copy_to_device, module_.key, kept, sizeof *key, opened_.stream);
  module_.has_key = current.ok();
  return FailureOf(current.result(), "copy the key of hashes");
}

Status CudaDriver::NonZeroCopier::Device::ScanPart(std::span<const TableExtent> table, std::uint32_t units, bool hash,
                                                   NonZero& found, Deadline until) {
  const Deadline began = Now();
  AMEM_CHECK(table.size_bytes() <= kExtentsBytes);
  AMEM_CHECK(units <= kTableUnits);
  std::memcpy(scan_->data(), table.data(), table.size_bytes());
  const bool buffered = buffer_.slot() != 0;
  const auto pinned = reinterpret_cast<CUdeviceptr>(scan_->data());
  CUdeviceptr extents = buffered ? buffer_.extents() : pinned;
  // Written by the kernel itself: a copy would wait behind those of contents that are under way.
  CUdeviceptr bitmap = pinned + kBitmapAt, hashes = pinned + kHashesAt;
  auto count = static_cast<unsigned>(table.size());
  void* arguments[] = {&extents, &count, &units, &bitmap, &hashes};
  InContext current(calls(), opened_.context);
  if (buffered) current.Call(calls().copy_to_device, extents, scan_->data(), table.size_bytes(), opened_.stream);
  Launch(current, hash ? module_.scan : module_.find, opened_.stream, (units + kWarps - 1) / kWarps, arguments);
  current.Call(&Core::AwaitStream, core_.get(), until, opened_.stream);
  AMEM_TRY(FailureOf(current.result(), "look for what is not zero", began));
  const auto* const pages = reinterpret_cast<const std::uint32_t*>(scan_->data() + kBitmapAt);
  const auto* const values = reinterpret_cast<const ContentHash*>(scan_->data() + kHashesAt);
  found.pages.insert(found.pages.end(), pages, pages + units);
  if (hash) found.hashes.insert(found.hashes.end(), values, values + units);
  return {};
}

Status CudaDriver::NonZeroCopier::Device::ClearAll(std::span<const Extent> extents) {
  AMEM_TRY(Multiples(extents));
  const MutexLock lock(mutex_);
  if (!Load().ok()) return driver_.Driver::ClearAll(device_, extents);
  return InTables(extents, [&](std::span<const TableExtent> table, std::uint32_t units) -> Status {
    mutex_.AssertHeld();
    AMEM_ASSIGN(auto pinned, tables_.Take(driver_, table.size_bytes()));
    std::memcpy(pinned, table.data(), table.size_bytes());
    auto at = reinterpret_cast<CUdeviceptr>(pinned);
    auto count = static_cast<unsigned>(table.size());
    void* arguments[] = {&at, &count, &units};
    InContext current(calls(), opened_.context);
    Launch(current, module_.clear, opened_.stream, (units + kWarps - 1) / kWarps, arguments);
    return FailureOf(current.result(), "clear memory");
  });
}

Status CudaDriver::NonZeroCopier::Device::FollowMain() {
  InContext current(calls(), opened_.context);
  queue_.Follow(current, opened_.stream);
  return FailureOf(current.result(), "cuEventRecord");
}

Status CudaDriver::NonZeroCopier::Device::Move(std::span<const Extent> extents, bool gather) {
  AMEM_TRY(Multiples(extents));
  if (extents.empty()) return {};
  MutexLock lock(mutex_);
  if (!Ready().ok()) {
    lock.Unlock();  // the copies of a lane take it
    return gather ? driver_.Driver::Gather(device_, extents) : driver_.Driver::Scatter(device_, extents);
  }
  AMEM_TRY(FollowMain());
  if (!Load().ok()) return MoveRuns(extents, gather);
  const bool staged = gather && !driver_.is_lane_;
  if (staged) buffer_.Open(driver_, device_, queue_.lanes());
  if (!staged || buffer_.slot() == 0) return MovePieces(extents, gather, false);
  std::vector<Extent> scattered;
  while (!extents.empty()) {
    std::size_t count = 1;
    Bytes bytes = extents.front().bytes;
    for (; count < extents.size() && extents[count].host == extents.front().host + bytes; ++count)
      bytes += extents[count].bytes;
    if (bytes >= kStagedBytes) {
      AMEM_TRY(MovePieces(extents.first(count), gather, true));
    } else {
      scattered.insert(scattered.end(), extents.begin(), extents.begin() + static_cast<std::ptrdiff_t>(count));
    }
    extents = extents.subspan(count);
  }
  return MovePieces(scattered, gather, false);
}

// By as few launches as there is room for. Staged: to the host, whose memory for these extents has no gaps.
Status CudaDriver::NonZeroCopier::Device::MovePieces(std::span<const Extent> extents, bool gather, bool staged) {
  const auto room = static_cast<std::uint32_t>((staged ? buffer_.slot() : kDirectBytes) / kPageBytes);
  pieces_.clear();
  std::uint32_t filled = 0;  // pages
  std::uint64_t base = 0;    // of the host addresses that the pieces' page numbers reach
  const auto flush = [&]() -> Status {
    mutex_.AssertHeld();
    if (pieces_.empty()) return {};
    Status moved = LaunchMove(base, Bytes{filled} * kPageBytes, gather, staged);
    pieces_.clear();
    filled = 0;
    return moved;
  };
  for (const Extent& extent : extents) {
    for (Bytes done = 0; done < extent.bytes;) {
      const std::uint64_t host = reinterpret_cast<std::uint64_t>(extent.host) + done;
      const std::uint64_t reached = host - host % (Bytes{kPageBytes} << 32);
      if (filled == room || reached != base) AMEM_TRY(flush());
      base = reached;
      const auto pages =
          static_cast<std::uint32_t>(std::min<Bytes>({(extent.bytes - done) / kPageBytes, kPiecePages, room - filled}));
      pieces_.push_back({extent.address.value + done, static_cast<std::uint32_t>((host - base) / kPageBytes), pages});
      done += Bytes{pages} * kPageBytes;
      filled += pages;
    }
  }
  return flush();
}

Status CudaDriver::NonZeroCopier::Device::LaunchMove(std::uint64_t base, Bytes bytes, bool gather, bool staged) {
  const std::span<const TablePiece> pieces = pieces_;
  if (staged) AMEM_CHECK(bytes <= buffer_.slot());
  AMEM_ASSIGN(auto pinned, tables_.Take(driver_, pieces.size_bytes()));
  std::memcpy(pinned, pieces.data(), pieces.size_bytes());
  Lane& lane = queue_.Next();
  const Bytes past = Bytes{pieces.front().first_page} * kPageBytes;
  auto* const host = reinterpret_cast<std::byte*>(base + past);
  auto table = reinterpret_cast<CUdeviceptr>(pinned);
  CUdeviceptr other = staged ? lane.slot - past : base;  // may wrap, and does so back in the kernel
  auto count = static_cast<unsigned>(pieces.size());
  int direction = gather ? 1 : 0;
  void* arguments[] = {&table, &count, &other, &direction};
  InContext current(calls(), opened_.context);
  queue_.CatchUp(current, lane);
  Launch(current, module_.copy, lane.stream, staged ? pieces.size() : std::min(pieces.size(), kDirectBlocks), arguments);
  if (staged) current.Call(calls().copy_to_host, host, lane.slot, bytes, lane.stream);
  return FailureOf(current.result(), gather ? "copy to the host" : "copy to the device");
}

Status CudaDriver::NonZeroCopier::Device::MoveRuns(std::span<const Extent> extents, bool gather) {
  InContext current(calls(), opened_.context);
  for (const Extent& extent : extents) {
    Lane& lane = queue_.Next();
    queue_.CatchUp(current, lane);
    if (gather) current.Call(calls().copy_to_host, extent.host, extent.address.value, extent.bytes, lane.stream);
    if (!gather) current.Call(calls().copy_to_device, extent.address.value, extent.host, extent.bytes, lane.stream);
  }
  return FailureOf(current.result(), gather ? "copy to the host" : "copy to the device");
}

Status CudaDriver::NonZeroCopier::Device::CopyWhole(const Extent& extent, bool to_host) {
  const MutexLock lock(mutex_);
  AMEM_TRY(Ready());
  AMEM_TRY(FollowMain());
  return MoveRuns(std::span(&extent, 1), to_host);
}

Result<std::uint64_t> CudaDriver::NonZeroCopier::Device::Mark() {
  const MutexLock lock(mutex_);
  if (!Ready().ok()) return std::uint64_t{0};
  InContext current(calls(), opened_.context);
  const std::uint64_t mark = queue_.Mark(current, opened_.stream);
  AMEM_TRY(FailureOf(current.result(), "cuEventRecord"));
  return mark;
}

Status CudaDriver::NonZeroCopier::Device::Await(std::uint64_t mark, Deadline until) {
  const Deadline began = Now();
  const MutexLock lock(mutex_);
  if (queue_.IsDone(mark)) return {};  // since Finish, if there is no such mark
  InContext current(calls(), opened_.context);
  for (const CUevent event : queue_.EventsOf(mark))
    current.Call(Core::Await, until, [&] { return calls().event_query(event); });
  AMEM_TRY(FailureOf(current.result(), "cuEventQuery", began));
  queue_.NoteDone(mark);
  return {};
}

// Of a stream of the program, in the context that is current. An event may be given back while a stream still waits for it.
Status CudaDriver::NonZeroCopier::Device::MakeStreamWaitForCopies(CUstream stream) {
  const MutexLock lock(mutex_);
  AMEM_TRY(Ready());
  std::vector<CUstream> own{opened_.stream};
  for (const Lane& lane : queue_.lanes()) own.push_back(lane.stream);
  for (const CUstream one : own) {
    CUevent event = nullptr;
    CUresult result = CUDA_SUCCESS;
    {
      InContext current(calls(), opened_.context);
      current.Call(calls().event_create, &event, CU_EVENT_DISABLE_TIMING);
      current.Call(calls().event_record, event, one);
      result = current.result();
    }
    if (result == CUDA_SUCCESS) result = calls().stream_wait(stream, event, 0);
    const InContext current(calls(), opened_.context);
    if (event != nullptr) calls().event_destroy(event);
    AMEM_TRY(FailureOf(result, "let a stream wait"));
  }
  return {};
}

CudaDriver::NonZeroCopier::NonZeroCopier(CudaDriver& driver, std::shared_ptr<Core> core)
    : driver_(driver), core_(std::move(core)) {}
CudaDriver::NonZeroCopier::~NonZeroCopier() = default;

CudaDriver::NonZeroCopier::Device& CudaDriver::NonZeroCopier::On(DeviceOrdinal device) {
  const MutexLock lock(mutex_);
  auto& found = devices_[device];  // null until there is memory for one
  if (found != nullptr && found->Forgotten()) forgotten_.push_back(std::move(found));
  if (found == nullptr) found = std::make_unique<Device>(driver_, core_, device);
  return *found;
}

Status CudaDriver::NonZeroCopier::Finish(DeviceOrdinal device, Deadline until) {
  Device* found = nullptr;
  {
    const MutexLock lock(mutex_);
    auto* const it = FindIn(devices_, device);
    if (it == nullptr || *it == nullptr || (*it)->Forgotten()) return {};
    found = it->get();
  }
  return found->Finish(until);
}

}  // namespace amem
