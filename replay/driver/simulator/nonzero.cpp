// The simulator's copies of contents in parts: what is not zero is read off the memfds, whose holes are known to be zero, and
// hashed by the kernel's twin.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "replay/driver/simulator/internal.h"

namespace amem {
namespace {

bool Multiple(const Extent& extent) {
  const auto host = reinterpret_cast<std::uintptr_t>(extent.host);
  return extent.address.value % kPageBytes == 0 && extent.bytes % kPageBytes == 0 && host % kPageBytes == 0;
}

// Calls saw(offset, page) for every page of [from, from + bytes) of the memfd that is not a hole. False: errno says why.
bool EachPage(int fd, Bytes from, Bytes bytes, const auto& saw) {
  const Bytes end = from + bytes;
  while (from < end) {
    const off_t data = lseek(fd, static_cast<off_t>(from), SEEK_DATA);
    if (data < 0) return errno == ENXIO;  // only holes from here on
    from = static_cast<Bytes>(data) / kPageBytes * kPageBytes;
    std::array<std::byte, kPageBytes> page;
    const off_t hole = lseek(fd, data, SEEK_HOLE);
    for (const Bytes stop = std::min(end, static_cast<Bytes>(std::max<off_t>(hole, 0))); from < stop; from += kPageBytes) {
      if (pread(fd, page.data(), kPageBytes, static_cast<off_t>(from)) != static_cast<ssize_t>(kPageBytes)) return false;
      saw(from, std::span<const std::byte, kPageBytes>(page));
    }
  }
  return true;
}

constexpr ContentKey kNoKey{};

}  // namespace

Result<NonZero> Simulator::Look(LaneNumber lane, DeviceOrdinal device, std::span<const Extent> extents, const ContentKey* key) {
  const auto fail = Failing([&] { return "find what is not zero on device " + std::to_string(device.value); });
  AMEM_TRY(EnterOn(device, kFindNonZero, fail));
  OpenContext(device);
  const MutexLock lock(mutex_);
  auto* const queued = FindIn(queued_, {lane, device});
  if (queued != nullptr && std::ranges::any_of(*queued, [](const Copy& copy) { return copy.kind != CopyKind::kToHost; }))
    return fail(cuda::kIllegalState, "copies to the device are queued; finish them first");
  kernels_.insert(lane);
  NonZero found;
  for (const Extent& extent : extents) {
    const std::string where = " at " + InRange(extent.address, extent.bytes);
    if (!Multiple(extent)) return fail(cuda::kInvalidValue, "not a multiple of 4096" + where);
    const auto pieces = Resolve(device, {CopyKind::kLook, extent.address, nullptr, extent.bytes});
    if (!pieces.ok()) return fail(cuda::kInvalidValue, pieces.status().message() + where);
    std::vector<UnitHasher> units(UnitsOf(extent.bytes), UnitHasher(key != nullptr ? *key : kNoKey));
    Bytes passed = 0;
    for (const Piece& piece : *pieces) {
      if (!options_.physical) break;  // all is zero
      const auto saw = [&](Bytes in_memory, std::span<const std::byte, kPageBytes> page) {
        const Bytes at = passed + in_memory - piece.offset;
        units[at / kUnitBytes].Add(static_cast<unsigned>(at % kUnitBytes / kPageBytes), page);
      };
      if (!EachPage(piece.memory->descriptor.get(), piece.offset, piece.bytes, saw))
        return fail(cuda::kUnknown, Errno("read the memfd"));
      passed += piece.bytes;
    }
    for (const UnitHasher& unit : units) {
      found.pages.push_back(unit.pages());
      if (key != nullptr) found.hashes.push_back(unit.hash());
    }
  }
  return found;
}

// Queues a copy between each extent and its part of host memory, or a clear of each.
Status Simulator::MoveAll(Call call, LaneNumber lane, DeviceOrdinal device, std::span<const Extent> extents) {
  const CopyKind kind = call == kGather ? CopyKind::kToHost : call == kScatter ? CopyKind::kToDevice : CopyKind::kClear;
  std::vector<Copy> copies;
  for (const Extent& extent : extents)
    copies.push_back({kind, extent.address, extent.host, Multiple(extent) ? extent.bytes : 0});
  {
    const MutexLock lock(mutex_);
    kernels_.insert(lane);
  }
  return Queue(call, lane, device, copies);
}

}  // namespace amem
