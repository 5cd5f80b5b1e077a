// Memory of pools: chunks from the driver, parts for the program.
#include "replay/session/pools.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "replay/session/failures.h"
#include "replay/session/new_memory.h"

namespace amem {

Pools::Pools(Driver& driver, Ledger& ledger, Peers& peers, Bytes pinned_limit, Drop drop)
    : driver_(driver), ledger_(ledger), peers_(peers), pinned_limit_(pinned_limit), drop_(std::move(drop)) {}

Pools::~Pools() {
  if (fork_.InChild()) {  // the threads did not come along
    for (auto& [kind, worker] : workers_) static_cast<void>(new std::thread(std::move(worker)));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  for (auto& [kind, worker] : workers_) worker.join();
}

Result<PoolId> Pools::Open(const std::string& tag, PoolPolicy policy) {
  if (tag.empty() || tag == "nccl" || tag == "user")
    return Status{Code::kInvalid, tag.empty() ? "the tag of a pool is empty" : "tag " + tag + " is AMem's own; take another"};
  const std::lock_guard lock(mutex_);
  for (const auto& [id, pool] : pools_) {
    if (pool->tag != tag) continue;
    if (pool->policy == policy) return id;
    return Status{Code::kInvalid, fmt::format("tag {} is open with policy {}, which cannot become {}", tag,
                                              ToText(pool->policy), ToText(policy))};
  }
  const PoolId id{static_cast<std::uint32_t>(pools_.size() + 1)};
  auto cycle = PoolCycle::Open(ledger_, driver_, peers_, id);
  if (!cycle.ok()) return cycle.status();
  {
    const auto ledger = ledger_.Lock();
    ledger_.Record(PoolOpened{id, tag, policy});
  }
  auto pool = std::make_unique<Entry>();
  pool->id = id;
  pool->tag = tag;
  pool->policy = policy;
  pool->cycle = *std::move(cycle);
  pools_.emplace(id, std::move(pool));
  return id;
}

Result<PoolId> Pools::Find(std::string_view tag) {
  const std::lock_guard lock(mutex_);
  std::string known;
  for (const auto& [id, pool] : pools_) {
    if (pool->tag == tag) return id;
    known += pool->tag + ", ";
  }
  return Status{Code::kNotFound, fmt::format("tag {} is not known; known: {}nccl", tag, known)};
}

Lifecycle Pools::LifecycleOf(const Entry& pool) {
  const auto ledger = ledger_.Lock();
  return ledger_.state().LifecycleOf(pool.id);
}

// ---- allocating ------------------------------------------------------------------------------------------------------------

Status Pools::AwaitUse(Lock& lock, Entry& pool) {
  const Status paused{Code::kRefused, fmt::format("tag {} is paused; resume it before memory is allocated in it", pool.tag),
                      cuda::kIllegalState};
  while (Busy(pool)) {
    if (pool.last_asked == CycleKind::kPause) return paused;
    changed_.wait(lock);
  }
  return LifecycleOf(pool) == Lifecycle::kRunning ? Status{} : paused;
}

Result<Address> Pools::Allocate(PoolId id, Bytes bytes, DeviceOrdinal device) {
  Lock lock(mutex_);
  Entry& pool = At(id);
  AMEM_TRY(AwaitUse(lock, pool));
  if (!pool.late.empty()) {
    GiveLate(lock, pool);
    AMEM_TRY(AwaitUse(lock, pool));
  }
  PoolSpace& space = pool.spaces[device];
  auto address = space.Take(bytes);
  if (!address) {
    AMEM_TRY(AddChunk(pool, space, bytes, device));
    address = space.Take(bytes);
  }
  if (!address) return Status{Code::kBroken, fmt::format("tag {}: a new chunk has no room for {} bytes", pool.tag, bytes)};
  const PoolSpace::Part part = *space.PartAt(*address);
  const auto ledger = ledger_.Lock();
  ledger_.Record(PoolAllocated{*address, part.bytes, device, part.chunk, part.offset});
  return *address;
}

// Where memory is short, smaller chunks do: what a pool has in advance, the program's other allocators do not have.
Status Pools::AddChunk(Entry& pool, PoolSpace& space, Bytes bytes, DeviceOrdinal device) {
  const auto granularity = driver_.Granularity(PropertiesOn(device, 0));
  if (!granularity.ok()) return granularity.status();
  const auto memory = driver_.Memory(device);
  const Bytes most = std::max(memory.ok() ? memory->free / 16 : 0, PoolSpace::kLeastChunk);
  Status failure;
  for (std::size_t attempt = 0;; ++attempt) {
    const auto chunk = space.ChunkFor(bytes, *granularity, attempt);
    if (!chunk) break;
    if (*chunk > std::max(most, bytes + *granularity)) continue;
    failure = MakeChunk(pool, space, *chunk, device);
    if (failure.code() != Code::kOutOfMemory) break;
  }
  return failure.Within(fmt::format("tag {}: allocate {}", pool.tag, FormatBytes(bytes)));
}

Status Pools::MakeChunk(Entry& pool, PoolSpace& space, Bytes bytes, DeviceOrdinal device) {
  LetInEverywhere(device);
  LetAllIn(pool);
  auto memory = CreateMemory(driver_, bytes, device);
  if (!memory.ok()) return memory.status();
  const AccessDescriptor access = ReadWrite(device);
  auto region = MappedRegion::Map(driver_, memory->handle.get(), memory->bytes, 0, std::span(&access, 1));
  if (!region.ok()) return region.status();
  PoolSpace::Chunk chunk{{}, region->Keep(), memory->bytes};
  const DriverHandle handle = memory->handle.Keep();
  {
    const auto ledger = ledger_.Lock();
    chunk.allocation = ledger_.TakeAllocationId();
    ledger_.SetHandle(chunk.allocation, handle);
    ledger_.Record(
        AllocationCreated{chunk.allocation, chunk.bytes, memory->properties, 0, handle, {}, {}, MemoryTag::kUser, {}, pool.id});
    ledger_.Record(RangeReserved{chunk.address, chunk.bytes, 0, {}, 0, {}, {}, pool.id});
    ledger_.Record(Mapped{chunk.address, chunk.bytes, 0, chunk.allocation, 0});
    ledger_.Record(AccessSet{chunk.address, chunk.bytes, {access}, {}});
  }
  for (const DeviceOrdinal other : devices_) {
    if (other != device) LetIn(other, chunk);
  }
  space.Add(chunk);
  pool.held += chunk.bytes;
  Prepare(pool);
  return {};
}

// Devices without a link to each other stay apart, as they would with cudaMalloc.
void Pools::LetIn(DeviceOrdinal device, const PoolSpace::Chunk& chunk) {
  const AccessDescriptor access = ReadWrite(device);
  if (!driver_.SetAccess(chunk.address, chunk.bytes, std::span(&access, 1)).ok()) return;
  const auto ledger = ledger_.Lock();
  ledger_.Record(AccessSet{chunk.address, chunk.bytes, {access}, {}});
}

// A process that uses several devices lets each reach the memory of all, as PyTorch expects it of memory that the CUDA runtime
// allocates. A pool whose chunks are not there just now follows at the end of its next resume, or of what is under way.
void Pools::LetInEverywhere(DeviceOrdinal device) {
  if (!devices_.insert(device).second) return;
  for (const auto& [id, pool] : pools_) {
    if (!Busy(*pool) && LifecycleOf(*pool) == Lifecycle::kRunning) LetAllIn(*pool);
  }
}

void Pools::LetAllIn(Entry& pool) {
  for (const DeviceOrdinal device : devices_) {
    if (!pool.let_in.insert(device).second) continue;
    for (const auto& [on, space] : pool.spaces) {
      for (const auto& [address, chunk] : space.chunks()) {
        if (on != device) LetIn(device, chunk);
      }
    }
  }
}

// Pinned host memory follows what is held, in steps of a sixteenth.
void Pools::Prepare(Entry& pool) {
  constexpr Bytes kPrepareFrom = Bytes{64} << 20;
  if (pool.policy == PoolPolicy::kDiscard) return;
  pool.cycle->Busy();
  if (pool.held < pool.prepared + std::max(pool.prepared / 16, kPrepareFrom)) return;
  Bytes others = 0;
  for (const auto& [id, other] : pools_) {
    if (other.get() != &pool) others += std::max(other->cycle->pinned_bytes(), std::min(other->prepared, other->held));
  }
  pool.prepared = pool.held;
  pool.cycle->Prepare(std::min(pool.cycle->Expected(pool.held), pinned_limit_ - std::min(pinned_limit_, others)));
}

// ---- giving back -----------------------------------------------------------------------------------------------------------

Pools::Entry* Pools::Holding(Address address, DeviceOrdinal& device) {
  for (const auto& [id, pool] : pools_) {
    for (const auto& [on, space] : pool->spaces) {
      if (!space.PartAt(address)) continue;
      device = on;
      return pool.get();
    }
  }
  return nullptr;
}

// Nothing that was submitted to the stream is under way any more. A stream that is gone says nothing of that; its device does.
bool Pools::Idle(const Late& late) const {
  const Status done = driver_.AwaitStream(late.device, late.stream);
  return done.ok() || (done.code() != Code::kRefused && driver_.Synchronize(late.device).ok());
}

Status Pools::Free(Address address, void* stream) {
  Lock lock(mutex_);
  Late late{address, {}, stream};
  Entry* const pool = Holding(address, late.device);
  const auto given_already = [&] {
    return std::ranges::any_of(pool->late, [&](const Late& one) { return one.address == address; });
  };
  if (pool == nullptr || given_already())
    return NotOurs(fmt::format("amem_free {}: nothing is allocated there", Hex(address.value)));
  if (!Busy(*pool) && LifecycleOf(*pool) == Lifecycle::kRunning) {
    lock.unlock();
    const bool idle = Idle(late);
    lock.lock();
    if (pool->spaces[late.device].PartAt(address) == std::nullopt || given_already())
      return NotOurs(fmt::format("amem_free {}: it was freed by two threads at once", Hex(address.value)));
    if (idle && !Busy(*pool)) return GiveBack(lock, *pool, address, late.device);
    pool->late.push_back(late);
    return {};
  }
  if (!Busy(*pool)) return GiveBack(lock, *pool, address, late.device);  // it is paused, so nothing touches it
  pool->late.push_back(late);
  return {};
}

// The lock is not held while the driver takes a chunk back, which waits for a pause or resume of NCCL.
Status Pools::GiveBack(Lock& lock, Entry& pool, Address address, DeviceOrdinal device) {
  const auto given = pool.spaces[device].Give(address);
  if (!given) return NotOurs(fmt::format("amem_free {}: nothing is allocated there", Hex(address.value)));
  {
    const auto ledger = ledger_.Lock();
    ledger_.Record(PoolFreed{address});
  }
  if (!given->emptied) return {};
  pool.held -= given->emptied->bytes;
  ++pool.dropping;
  lock.unlock();
  Status dropped = drop_(*given->emptied);
  lock.lock();
  --pool.dropping;
  changed_.notify_all();
  return dropped;
}

// What could not be given back when the program freed it. What its stream does not let go of yet stays for the next time.
void Pools::GiveLate(Lock& lock, Entry& pool) {
  const bool running = LifecycleOf(pool) == Lifecycle::kRunning;
  for (const Late& one : std::exchange(pool.late, {})) {
    lock.unlock();
    const bool idle = !running || Idle(one);
    lock.lock();
    if (idle) {
      static_cast<void>(GiveBack(lock, pool, one.address, one.device));
    } else {
      pool.late.push_back(one);
    }
  }
}

}  // namespace amem
