#include "replay/session/pools/pool_memory.h"

#include <algorithm>
#include <mutex>

#include "journal/base/no_memory.h"
#include "replay/session/new_memory.h"

namespace amem {

std::optional<Address> PoolMemory::Take(Bytes bytes, DeviceOrdinal device, Mutex& /*mutex*/) {
  return spaces_.try_emplace(device, whole_).first->second.Take(bytes);
}

// If memory is short, smaller chunks do: what a pool has in reserve, the program's other allocators lack.
Result<Address> PoolMemory::TakeNew(Bytes bytes, DeviceOrdinal device, const std::set<DeviceOrdinal>& devices, Mutex& mutex) {
  ChunkSpace& space = spaces_.try_emplace(device, whole_).first->second;
  if (whole_) return MakeChunk(space, bytes, bytes, device, devices, mutex);
  AMEM_ASSIGN(const auto granularity, parts_.driver.Granularity(PropertiesOn(device)));
  const auto memory = parts_.driver.Memory(device);
  const Bytes most = std::max(memory.ok() ? memory->free / 16 : 0, ChunkSpace::kLeastChunk);
  Result<Address> made = Status{Code::kOutOfMemory, "no chunk is small enough", cuda::kOutOfMemory};
  for (std::size_t attempt = 0; made.status().code() == Code::kOutOfMemory; ++attempt) {
    const auto chunk = space.ChunkFor(bytes, granularity, attempt);
    if (!chunk) break;
    if (*chunk <= std::max(most, bytes + granularity)) made = MakeChunk(space, *chunk, bytes, device, devices, mutex);
  }
  return made;
}

Result<Address> PoolMemory::MakeChunk(ChunkSpace& space, Bytes bytes, Bytes first, DeviceOrdinal device,
                                      const std::set<DeviceOrdinal>& devices, Mutex& mutex) {
  GrantAccess(devices, mutex);
  const std::set<DeviceOrdinal> before = devices;
  ++changing_;
  WithoutLock apart(mutex);
  auto chunk = amem::MakeChunk(parts_.driver, parts_.ledger, bytes, device, {MemoryTag::kUser, pool_, {}}, before);
  if (chunk.ok()) {
    const LedgerLock ledger(parts_.ledger);
    cycles_.Made(chunk->bytes);
  }
  apart.End();
  --changing_;
  changed_.NotifyAll();
  if (!chunk.ok()) return chunk.status();
  for (const DeviceOrdinal other : devices) {  // also those that came meanwhile
    const auto set =
        before.contains(other) ? std::nullopt : amem::GrantAccess(parts_.driver, other, {chunk->address, chunk->bytes});
    if (set) parts_.ledger.LockAndRecord(*set);
  }
  const Address part = space.Add(*chunk, first);
  AMEM_TRY(OrBreak(space.Check()));
  return part;
}

std::optional<ChunkSpace::Part> PoolMemory::PartAt(Address address, DeviceOrdinal device, Mutex& /*mutex*/) const {
  const auto* const space = FindIn(spaces_, device);
  return space == nullptr ? std::nullopt : space->PartAt(address);
}

std::optional<DeviceOrdinal> PoolMemory::DeviceOf(Address part, Mutex& /*mutex*/) const {
  for (const auto& [device, space] : spaces_)
    if (space.PartAt(part)) return device;
  return std::nullopt;
}

bool PoolMemory::IsFreed(Address part, Mutex& /*mutex*/) const {
  return std::ranges::any_of(freed_, [&](const FreedPart& one) { return one.address == part; });
}

void PoolMemory::GrantAccess(const std::set<DeviceOrdinal>& devices, Mutex& /*mutex*/) {
  for (const DeviceOrdinal device : devices) {
    if (granted_.contains(device)) continue;
    for (const auto& [on, space] : spaces_) {
      for (const auto& [address, chunk] : space.chunks()) {
        const auto set = on == device ? std::nullopt : amem::GrantAccess(parts_.driver, device, {address, chunk.bytes});
        if (set) parts_.ledger.LockAndRecord(*set);
      }
    }
    granted_.insert(device);
  }
}

void PoolMemory::NoteMoment(FreedPart& part) const {
  auto moment = parts_.driver.MomentOf(part.device, part.stream);
  part.captured = moment.status().code() == Code::kRefused;
  if (moment.ok()) part.moment = *std::move(moment);
}

bool PoolMemory::StreamIsDone(FreedPart& part) const {
  if (part.captured) NoteMoment(part);
  if (part.captured) return false;
  const Deadline until = In(parts_.options.deadlines.call());
  return (part.moment != nullptr ? parts_.driver.AwaitMoment(part.device, *part.moment, until)
                                 : parts_.driver.Synchronize(part.device, until))
      .ok();
}

Status PoolMemory::GiveBack(Address part, DeviceOrdinal device, Mutex& mutex) {
  auto* const space = FindIn(spaces_, device);
  const auto given = space == nullptr ? std::nullopt : space->Give(part);
  if (!given) return NotOurs("amem_free", Hex(part), "nothing is allocated there");
  parts_.ledger.LockAndRecord(PoolFreed{part});
  AMEM_TRY(OrBreak(space->Check()));
  if (!given->emptied) return {};
  ++changing_;
  WithoutLock apart(mutex);
  Status freed = FreeChunk(*given->emptied);
  apart.End();
  --changing_;
  changed_.NotifyAll();
  return freed;
}

Status PoolMemory::OrBreak(Status checked) const {
  if (checked.ok()) return checked;
  const LedgerLock lock(parts_.ledger);
  parts_.ledger.Break(ToText(pool_) + ": " + checked.message());
  return checked;
}

// NCCL or a peer may still hold the memory.
Status PoolMemory::FreeChunk(const ChunkSpace::Chunk& chunk) const {
  const auto gate = parts_.calls.EnterCall();
  InTags tag;
  parts_.calls.EnterTag(pool_, tag);
  AMEM_TRY(cycles_.AwaitCopies());
  const NotifyingLock lock(parts_.ledger, parts_.dropped);
  return parts_.allocations.FreeChunk(chunk, parts_.ledger);
}

void PoolMemory::GiveBackFreed(bool running, const std::function<bool()>& stops, Mutex& mutex) {
  std::vector<FreedPart> all;
  all.reserve(freed_.size());  // so that nothing is lost where there is no memory for it
  all.swap(freed_);
  for (FreedPart& one : all) {
    const auto wait = [&]() -> Status {
      mutex.AssertHeld();
      WithoutLock apart(mutex);
      if (running && !StreamIsDone(one)) return {Code::kRefused, "a stream may still use it"};
      return cycles_.AwaitCopies();
    };
    if (OrNoMemory(wait).ok() && !stops()) {
      static_cast<void>(GiveBack(one.address, one.device, mutex));
    } else {
      freed_.push_back(std::move(one));
    }
  }
}

}  // namespace amem
