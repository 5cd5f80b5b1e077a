// The simulator's copies in parts: what is not zero is read from the memfds, whose holes are zero.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

#include "replay/driver/simulator/internal.h"

namespace amem {
namespace {

constexpr Bytes kSparsePage = 4096;

bool Multiple(const Extent& extent) { return extent.address.value % kSparsePage == 0 && extent.bytes % kSparsePage == 0; }

// Calls saw(offset) for every page of [from, from + bytes) of the memfd that is not zero. False: errno says why.
bool EachPage(int fd, Bytes from, Bytes bytes, const auto& saw) {
  const Bytes end = from + bytes;
  while (from < end) {
    const off_t data = lseek(fd, static_cast<off_t>(from), SEEK_DATA);
    if (data < 0) return errno == ENXIO;  // only holes follow
    from = static_cast<Bytes>(data) / kSparsePage * kSparsePage;
    std::array<std::byte, kSparsePage> page;
    const off_t hole = lseek(fd, data, SEEK_HOLE);
    for (const Bytes stop = std::min(end, static_cast<Bytes>(std::max<off_t>(hole, 0))); from < stop; from += kSparsePage) {
      if (pread(fd, page.data(), kSparsePage, static_cast<off_t>(from)) != static_cast<ssize_t>(kSparsePage)) return false;
      if (std::any_of(page.begin(), page.end(), [](std::byte b) { return b != std::byte{}; })) saw(from);
    }
  }
  return true;
}

}  // namespace

Result<NonZero> Simulator::FindNonZero(DeviceOrdinal device, std::span<const Extent> extents, Bytes block, Deadline) {
  return Look(0, device, extents, block);
}

Result<NonZero> Simulator::Look(LaneNumber lane, DeviceOrdinal device, std::span<const Extent> extents, Bytes block) {
  const auto fail = Failing([&] { return "find what is not zero on device " + std::to_string(device.value); });
  if (const int result = Enter(kFindNonZero)) return fail(result, WhyNotEntered());
  if (WorldDevice(device.value) < 0) return fail(cuda::kInvalidDevice, kNoSuchDevice);
  if (!std::has_single_bit(block) || block < kSparsePage) return fail(cuda::kInvalidValue, "not a size of blocks");
  OpenContext(device);
  const MutexLock lock(mutex_);
  const auto queued = queued_.find({lane, device});
  if (queued != queued_.end() && std::any_of(queued->second.begin(), queued->second.end(),
                                             [](const Copy& copy) { return copy.kind != CopyKind::kToHost; })) {
    return fail(cuda::kIllegalState, "copies to the device are queued; finish them first");
  }
  NonZero found;
  for (const Extent& extent : extents) {
    const std::string where = " at " + Hex(extent.address.value) + ", " + std::to_string(extent.bytes) + " bytes";
    if (!Multiple(extent)) return fail(cuda::kInvalidValue, "not a multiple of 4096" + where);
    const char* why = "";
    const auto pieces = Resolve(device, {CopyKind::kLook, extent.address, nullptr, extent.bytes}, why);
    if (!pieces.ok()) return fail(cuda::kInvalidValue, why + where);
    const std::size_t before = found.runs.size();
    const auto saw = [&](Bytes offset) {  // of the extent
      const Bytes first = offset / block * block;
      const Extent one{extent.address + first, std::min(block, extent.bytes - first)};
      if (found.runs.size() == before || found.runs.back().address + found.runs.back().bytes < one.address) {
        found.runs.push_back(one);
      } else {
        found.runs.back().bytes = one.address.value + one.bytes - found.runs.back().address.value;
      }
    };
    Bytes passed = 0;
    for (const Piece& piece : *pieces) {
      if (!options_.physical) break;  // all is zero
      const auto at = [&](Bytes in_memory) { saw(passed + in_memory - piece.offset); };
      if (!EachPage(piece.memory->descriptor.get(), piece.offset, piece.bytes, at)) {
        return fail(cuda::kUnknown, std::string("read the memfd: ") + std::strerror(errno));
      }
      passed += piece.bytes;
    }
    found.counts.push_back(found.runs.size() - before);
  }
  return found;
}

// Queues a copy between the extents and what lies at `host` without gaps, or a clear of each.
Status Simulator::MoveAll(Call call, LaneNumber lane, DeviceOrdinal device, std::span<const Extent> extents, std::byte* host) {
  const CopyKind kind = call == kGather ? CopyKind::kToHost : call == kScatter ? CopyKind::kToDevice : CopyKind::kClear;
  std::vector<Copy> copies;
  for (const Extent& extent : extents) {
    copies.push_back({kind, extent.address, host, Multiple(extent) ? extent.bytes : 0});
    if (host != nullptr) host += extent.bytes;
  }
  return Queue(call, lane, device, copies);
}

Status Simulator::Gather(DeviceOrdinal device, std::byte* to, std::span<const Extent> from) {
  return MoveAll(kGather, 0, device, from, to);
}

Status Simulator::Scatter(DeviceOrdinal device, std::span<const Extent> to, const std::byte* from) {
  return MoveAll(kScatter, 0, device, to, const_cast<std::byte*>(from));
}

Status Simulator::ClearAll(DeviceOrdinal device, std::span<const Extent> extents) {
  return MoveAll(kClearAll, 0, device, extents, nullptr);
}

}  // namespace amem
