// The simulator's copies: queued, checked twice, and made through the memfds, so that holes stay holes.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <new>

#include "replay/driver/simulator/internal.h"

namespace amem {
namespace {

constexpr std::align_val_t kAlignment{4096};

// Repeats a read or write until all bytes are done. False: errno says why.
bool Fully(Bytes bytes, const auto& some) {
  for (Bytes done = 0; done < bytes;) {
    const ssize_t now = some(done);
    if (now < 0 && errno == EINTR) continue;
    if (now <= 0) return false;
    done += static_cast<Bytes>(now);
  }
  return true;
}

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

class Simulator::SimulatedPinnedBuffer final : public PinnedBuffer, NoCopies {
 public:
  SimulatedPinnedBuffer(std::shared_ptr<PinnedRegistry> registry, std::shared_ptr<SimulatedHost> host, std::byte* data,
                        Bytes bytes)
      : registry_(std::move(registry)), host_(std::move(host)), data_(data), bytes_(bytes) {
    const MutexLock lock(registry_->mutex);
    registry_->buffers.emplace(AddressOf(data_), bytes_);
  }
  ~SimulatedPinnedBuffer() override {
    {
      const MutexLock lock(registry_->mutex);
      registry_->buffers.erase(AddressOf(data_));
    }
    ::operator delete(data_, kAlignment);
    if (host_ != nullptr) host_->left += bytes_;
  }
  [[nodiscard]] std::byte* data() override { return data_; }
  [[nodiscard]] Bytes size() const override { return bytes_; }

 private:
  std::shared_ptr<PinnedRegistry> registry_;
  std::shared_ptr<SimulatedHost> host_;
  std::byte* data_;
  Bytes bytes_;
};

std::optional<HostRoom> Simulator::HostMemory() {
  if (options_.host == nullptr) return std::nullopt;
  return HostRoom{options_.host->left, "the simulated host"};
}

Result<std::unique_ptr<PinnedBuffer>> Simulator::AllocatePinned(Bytes bytes) {
  const auto fail = Failing([&] { return fmt::format("cuMemHostAlloc {} bytes", bytes); });
  AMEM_TRY(Enter(kAllocatePinned, fail));
  if (bytes == 0) return fail(cuda::kInvalidValue, "the size is zero");
  auto* data = static_cast<std::byte*>(::operator new(bytes, kAlignment, std::nothrow));
  if (data == nullptr) return fail(cuda::kOutOfMemory, "the host has not enough left");
  if (options_.host != nullptr && options_.host->left.fetch_sub(bytes) < bytes) options_.host->exhausted = true;
  return std::unique_ptr<PinnedBuffer>(std::make_unique<SimulatedPinnedBuffer>(pinned_, options_.host, data, bytes));
}

// Queues a copy between each extent and its part of host memory, or a clear of each.
Status Simulator::Queue(Call call, LaneNumber lane, DeviceOrdinal device, std::span<const Extent> extents) {
  const bool in_parts = call == kGather || call == kScatter || call == kClearAll;
  const CopyKind kind = call == kGather || call == kCopyToHost      ? CopyKind::kToHost
                        : call == kScatter || call == kCopyToDevice ? CopyKind::kToDevice
                                                                    : CopyKind::kClear;
  std::vector<Copy> copies;
  for (const Extent& extent : extents)
    copies.push_back({kind, extent.address, extent.host, !in_parts || Multiple(extent) ? extent.bytes : 0});
  if (in_parts) {
    const MutexLock lock(mutex_);
    kernels_.insert(lane);
  }
  const Copy* at = copies.data();
  const auto fail = [&](int result, std::string_view why) {
    const std::string what = copies.empty() ? "" : ", " + InRange(at->device_address, at->bytes);
    return SimulatedFailure(result, fmt::format("{} device {}{}", kCalls[call], device.value, what), why);
  };
  AMEM_TRY(EnterOn(device, call, fail));
  OpenContext(device);
  const MutexLock lock(mutex_);
  for (; at != copies.data() + copies.size(); ++at) {
    if (at->bytes == 0) return fail(cuda::kInvalidValue, "the size is zero");
    if (const auto pieces = Resolve(device, *at); !pieces.ok()) return fail(cuda::kInvalidValue, pieces.status().message());
  }
  if (!options_.physical) return {};  // the rules hold, and nothing is moved
  auto& queue = queued_[{lane, device}];
  queue.insert(queue.end(), copies.begin(), copies.end());
  return {};
}

Result<std::vector<Simulator::Piece>> Simulator::Resolve(DeviceOrdinal device, const Copy& copy) const {
  const bool copies = copy.kind == CopyKind::kToHost || copy.kind == CopyKind::kToDevice;
  if (copies && !pinned_->Holds(copy.host, copy.bytes)) return Status(Code::kInvalid, "the host side lies in no pinned buffer");
  const bool writes = copy.kind == CopyKind::kToDevice || copy.kind == CopyKind::kClear || copy.kind == CopyKind::kKernelWrites;
  const std::uint32_t needed = writes ? 3 : 1;
  std::vector<Piece> pieces;
  Address at = copy.device_address;
  Bytes left = copy.bytes;
  while (left > 0) {
    const auto it = Containing(mappings_, at);
    if (it == mappings_.end()) return Status(Code::kInvalid, "not all of the device side is mapped");
    if (!Allows(it->second.access, {{LocationType::kDevice, device.value}, needed}))
      return Status(Code::kInvalid, "the device has no access to all of the device side");
    const Bytes offset = at.value - it->first.value;
    const Bytes bytes = std::min(left, it->second.bytes - offset);
    pieces.push_back({it->second.memory, offset, bytes});
    at = at + bytes;
    left -= bytes;
  }
  return pieces;
}

Result<std::vector<Simulator::Piece>> Simulator::LockAndResolve(DeviceOrdinal device, const Copy& copy) const {
  const MutexLock lock(mutex_);
  return Resolve(device, copy);
}

Status Simulator::Finish(LaneNumber lane, DeviceOrdinal device, Deadline until) {
  const Deadline began = Now();
  const auto fail = Failing([&] { return "finish the copies of device " + std::to_string(device.value); });
  AMEM_TRY(EnterOn(device, kFinishCopies, fail));
  if (!AwaitUntil(until, [&] { return work_ != Work::kCopies; })) return CopiesNotDone(device, began);
  OpenContext(device);
  return Drain(lane, device, until);
}

Status Simulator::Drain(LaneNumber lane, DeviceOrdinal device, Deadline until) {
  const Deadline began = Now();
  const auto fail = Failing([&] { return "finish the copies of device " + std::to_string(device.value); });
  const auto at = std::pair{lane, device};
  const auto passed = [&] {
    const MutexLock lock(mutex_);
    return std::ranges::all_of(follows_[at], [](const auto& moment) { return moment(); });
  };
  if (!AwaitUntil(until, passed)) return CopiesNotDone(device, began);
  const MutexLock finishing(finishing_);
  std::vector<Copy> copies;
  {
    const MutexLock lock(mutex_);
    copies.swap(queued_[at]);
    follows_.erase(at);
  }
  for (const Copy& copy : copies) {
    const auto pieces = LockAndResolve(device, copy);
    const Status done = pieces.ok() ? Perform(copy, *pieces) : Status{};
    const auto after = LockAndResolve(device, copy);
    if (!pieces.ok() || !after.ok() || *after != *pieces) {
      dead_ = true;
      return fail(cuda::kIllegalAddress, fmt::format("{} any more: {} was unmapped or freed before its copy was finished",
                                                     after.status().message(), InRange(copy.device_address, copy.bytes)));
    }
    if (!done.ok()) return fail(cuda::kOperatingSystem, done.message());
  }
  return {};
}

Status Simulator::Perform(const Copy& copy, const std::vector<Piece>& pieces) {
  std::byte* host = copy.host;
  for (const Piece& piece : pieces) {
    const int fd = piece.memory->descriptor.get();
    const auto at = [&](Bytes done) { return static_cast<off_t>(piece.offset + done); };
    bool done = false;
    switch (copy.kind) {
      case CopyKind::kToHost:
      case CopyKind::kKernelReads:
        done = Fully(piece.bytes, [&](Bytes n) { return pread(fd, host + n, piece.bytes - n, at(n)); });
        break;
      case CopyKind::kToDevice:
      case CopyKind::kKernelWrites:
        done = Fully(piece.bytes, [&](Bytes n) { return pwrite(fd, host + n, piece.bytes - n, at(n)); });
        break;
      case CopyKind::kClear:
        done = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at(0), static_cast<off_t>(piece.bytes)) == 0;
        break;
    }
    if (!done) return {Code::kIo, Errno("copy through the memfd")};
    if (host != nullptr) host += piece.bytes;
  }
  return {};
}

// ---- contents in parts: what is not zero is read off the memfds, whose holes are known to be zero, and hashed by the kernel's
// twin

Result<NonZero> Simulator::Scan(LaneNumber lane, DeviceOrdinal device, std::span<const Extent> extents, const ContentKey* key) {
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
    const auto pieces = Resolve(device, {CopyKind::kKernelReads, extent.address, nullptr, extent.bytes});
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

}  // namespace amem
