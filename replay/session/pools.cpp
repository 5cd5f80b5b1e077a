// Memory of pools: chunks from the driver, parts for the program.
#include "replay/session/pools.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "journal/base/no_memory.h"
#include "replay/session/new_memory.h"
#include "replay/session/session_options.h"

namespace amem {

Pools::Pools(const CycleContext& context, ScopeGates& gates, Drop drop, std::function<void()> ended,
             std::function<void()> first)
    : context_(context),
      driver_(context.driver),
      ledger_(context.ledger),
      gates_(gates),
      drop_(std::move(drop)),
      ended_(std::move(ended)),
      first_(std::move(first)) {}

Pools::~Pools() {
  if (fork_.InChild()) return;
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    changed_->NotifyAll();
  }
  for (auto& [kind, worker] : *workers_) worker.join();
}

Result<PoolId> Pools::Open(const std::string& tag, PoolPolicy policy, bool whole) {
  if (tag.empty() || tag == "nccl" || tag == "user")
    return Status{Code::kInvalid, tag.empty() ? "the tag of a pool is empty" : "tag " + tag + " is AMem's own; take another"};
  constexpr std::size_t kLongest = 1000;  // it travels in messages of bounded size
  if (tag.size() > kLongest) return Status{Code::kInvalid, fmt::format("a tag of a pool has at most {} bytes", kLongest)};
  const MutexLock lock(mutex_);
  Entry* const known = Named(tag);
  if (known == nullptr) return OpenNew(tag, policy, false, whole);
  if (known->policy != policy && !std::exchange(known->joined, false)) {
    return Status{Code::kInvalid, fmt::format("tag {} is open with policy {}, which cannot become {}", tag,
                                              ToText(known->policy), ToText(policy))};
  }
  known->whole = known->whole || (whole && known->spaces.empty());  // joined before, for a peer's memory
  if (std::exchange(known->policy, policy) != policy) ledger_.LockAndRecord(PoolOpened{known->id, tag, policy});
  return known->id;
}

Result<PoolId> Pools::Join(const std::string& tag, PoolPolicy policy) {
  const MutexLock lock(mutex_);
  const Entry* const known = Named(tag);
  return known != nullptr ? known->id : OpenNew(tag, policy, true);
}

Pools::Entry* Pools::Named(std::string_view tag) {
  const auto found = std::ranges::find_if(pools_, [&](const auto& pool) { return pool.second->tag == tag; });
  return found == pools_.end() ? nullptr : found->second.get();
}

Result<PoolId> Pools::OpenNew(const std::string& tag, PoolPolicy policy, bool joined, bool whole) {
  const PoolId id{static_cast<std::uint32_t>(pools_.size() + 1)};
  AMEM_ASSIGN(auto cycle, Coordinator::OfTag(context_, gates_.Of(id), id, tag));
  if (!any() && first_) first_();
  any_.store(true, std::memory_order_release);
  ledger_.LockAndRecord(PoolOpened{id, tag, policy});
  Entry pool{.id = id, .tag = tag, .policy = policy, .joined = joined, .whole = whole, .cycle = std::move(cycle)};
  pools_.emplace(id, std::make_unique<Entry>(std::move(pool)));
  return id;
}

Result<PoolId> Pools::Find(std::string_view tag) {
  const MutexLock lock(mutex_);
  if (const Entry* const pool = Named(tag)) return pool->id;
  std::string known;
  for (const auto& [id, pool] : pools_) known += pool->tag + ", ";
  return Status{Code::kNotFound, fmt::format("tag {} is not known; known: {}nccl", tag, known)};
}

Lifecycle Pools::LifecycleOf(const Entry& pool) {
  const LedgerLock ledger(ledger_);
  return ledger_.state().LifecycleOf(pool.id);
}

Status Pools::AwaitUse(Entry& pool) {
  const Status paused{Code::kRefused, fmt::format("tag {} is paused; resume it before memory is allocated in it", pool.tag),
                      cuda::kIllegalState};
  while (Busy(pool)) {
    if (pool.last_asked == CycleKind::kPause) return paused;
    changed_->Wait(mutex_);
  }
  return LifecycleOf(pool) == Lifecycle::kRunning ? Status{} : paused;
}

Result<Pools::Entry*> Pools::Known(PoolId id) {
  if (Entry* const pool = Find(id)) return pool;
  return Status{Code::kInvalid, ToText(id) + " is none of this process's tags"};
}

Status Pools::Enter(PoolId id) {
  const MutexLock lock(mutex_);
  AMEM_ASSIGN(Entry* const pool, Known(id));
  AMEM_TRY(AwaitUse(*pool));
  ++pool->inside;
  return {};
}

void Pools::Leave(PoolId id) {
  if (fork_.InChild()) return;
  const MutexLock lock(mutex_);
  if (Entry* const pool = Find(id)) --pool->inside;
}

Result<Address> Pools::Allocate(PoolId id, Bytes bytes, DeviceOrdinal device) {
  if (bytes >= ChunkSpace::kTooMany) return NoSuchSize("allocate", bytes);
  context_.pinned.Busy();
  MutexLock lock(mutex_);
  AMEM_ASSIGN(Entry* const known, Known(id));
  Entry& pool = *known;
  AMEM_TRY(AwaitUse(pool));
  if (!pool.late.empty()) {
    GiveLate(pool, Who::kAnybody);
    AMEM_TRY(AwaitUse(pool));
  }
  ChunkSpace& space = pool.spaces.try_emplace(device, pool.whole).first->second;
  auto address = space.Take(bytes);
  if (!address) {
    const auto begun = AddChunk(pool, space, bytes, device);
    if (!begun.ok()) return begun.status().Within(fmt::format("tag {}: allocate {}", pool.tag, FormatBytes(bytes)));
    address = *begun;
  }
  const ChunkSpace::Part part = *space.PartAt(*address);
  ledger_.LockAndRecord(PoolAllocated{*address, part.bytes, device, part.chunk, part.offset});
  return *address;
}

// If memory is short, smaller chunks do: what a pool has in reserve, the program's other allocators lack.
Result<Address> Pools::AddChunk(Entry& pool, ChunkSpace& space, Bytes bytes, DeviceOrdinal device) {
  if (pool.whole) return MakeChunk(pool, space, bytes, bytes, device);
  AMEM_ASSIGN(const auto granularity, driver_.Granularity(PropertiesOn(device)));
  const auto memory = driver_.Memory(device);
  const Bytes most = std::max(memory.ok() ? memory->free / 16 : 0, ChunkSpace::kLeastChunk);
  Result<Address> made = Status{Code::kOutOfMemory, "no chunk is small enough", cuda::kOutOfMemory};
  for (std::size_t attempt = 0; made.status().code() == Code::kOutOfMemory; ++attempt) {
    const auto chunk = space.ChunkFor(bytes, granularity, attempt);
    if (!chunk) break;
    if (*chunk <= std::max(most, bytes + granularity)) made = MakeChunk(pool, space, *chunk, bytes, device);
  }
  return made;
}

Result<Address> Pools::MakeChunk(Entry& pool, ChunkSpace& space, Bytes bytes, Bytes first, DeviceOrdinal device) {
  LetInEverywhere(device);
  LetAllIn(pool);
  const std::set<DeviceOrdinal> devices = devices_;
  ++pool.changing;  // its pauses wait; those of other tags do not wait for the driver
  WithoutLock apart(mutex_);
  auto chunk = amem::MakeChunk(driver_, ledger_, bytes, device, {MemoryTag::kUser, pool.id, {}}, devices);
  if (chunk.ok()) {
    const LedgerLock ledger(ledger_);
    pool.cycle->Made(chunk->bytes);
  }
  apart.End();
  --pool.changing;
  changed_->NotifyAll();
  if (!chunk.ok()) return chunk.status();
  for (const DeviceOrdinal other : devices_) {  // also those that came meanwhile
    const auto set = devices.contains(other) ? std::nullopt : LetIn(driver_, other, {chunk->address, chunk->bytes});
    if (set) ledger_.LockAndRecord(*set);
  }
  return space.Add(*chunk, first);
}

void Pools::Made(PoolId id, Bytes bytes) {
  const MutexLock lock(mutex_);
  const LedgerLock ledger(ledger_);
  if (Entry* const pool = Find(id)) pool->cycle->Made(bytes);
}

Status Pools::AwaitCopies(PoolId id) {
  MutexLock lock(mutex_);
  AMEM_ASSIGN(Entry* const pool, Known(id));
  Coordinator& cycle = *pool->cycle;
  lock.Unlock();
  return cycle.AwaitCopies();
}

// If a process uses several devices, each may access the memory of all, as PyTorch expects of the CUDA runtime. A pool whose
// chunks are away follows at the end of its next resume.
void Pools::LetInEverywhere(DeviceOrdinal device) {
  if (!devices_.insert(device).second) return;
  for (const auto& [id, pool] : pools_)
    if (!Busy(*pool) && LifecycleOf(*pool) == Lifecycle::kRunning) LetAllIn(*pool);
}

void Pools::OpenTo(DeviceOrdinal device) {
  const MutexLock lock(mutex_);
  LetInEverywhere(device);
}

void Pools::LetAllIn(Entry& pool) {
  for (const DeviceOrdinal device : devices_) {
    if (pool.let_in.contains(device)) continue;
    for (const auto& [on, space] : pool.spaces) {
      for (const auto& [address, chunk] : space.chunks()) {
        const auto set = on == device ? std::nullopt : LetIn(driver_, device, {address, chunk.bytes});
        if (set) ledger_.LockAndRecord(*set);
      }
    }
    pool.let_in.insert(device);
  }
}

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

// Notes what the stream holds now, which may still use the memory. Not while it is being captured.
void Pools::NoteMoment(Late& late) const {
  auto moment = driver_.MomentOf(late.device, late.stream);
  late.captured = moment.status().code() == Code::kRefused;
  if (moment.ok()) late.moment = *std::move(moment);
}

// Whether all that the stream held at the free has ended. If the stream is gone, its device tells.
bool Pools::Idle(Late& late) const {
  if (late.captured) NoteMoment(late);
  if (late.captured) return false;
  const Deadline until = In(context_.deadlines.call());
  return (late.moment != nullptr ? driver_.AwaitMoment(late.device, *late.moment, until)
                                 : driver_.Synchronize(late.device, until))
      .ok();
}

Status Pools::Free(Address address, std::optional<void*> stream) {
  context_.pinned.Busy();
  MutexLock lock(mutex_);
  Late late{address, {}, stream.value_or(nullptr)};
  Entry* const pool = Holding(address, late.device);
  const auto given_already = [&] {
    return std::ranges::any_of(pool->late, [&](const Late& one) { return one.address == address; });
  };
  if (pool == nullptr || given_already()) return NotOurs("amem_free", Hex(address), "nothing is allocated there");
  const bool running = LifecycleOf(*pool) == Lifecycle::kRunning;
  const bool paused = !running && !Busy(*pool);  // then nothing of the program touches it
  lock.Unlock();
  if (!paused && stream) NoteMoment(late);
  const bool idle = (paused || (running && (!stream || Idle(late)))) && pool->cycle->AwaitCopies().ok();
  lock.Lock();
  if (pool->spaces[late.device].PartAt(address) == std::nullopt || given_already())
    return NotOurs("amem_free", Hex(address), "it was freed by two threads at once");
  if (idle && !Busy(*pool)) return GiveBack(*pool, address, late.device);
  pool->late.push_back(std::move(late));
  return {};
}

// Releases the mutex while the driver takes a chunk back, because that waits for NCCL's cycles.
Status Pools::GiveBack(Entry& pool, Address address, DeviceOrdinal device) {
  const auto given = pool.spaces[device].Give(address);
  if (!given) return NotOurs("amem_free", Hex(address), "nothing is allocated there");
  ledger_.LockAndRecord(PoolFreed{address});
  return given->emptied ? DropNow(pool, *given->emptied) : Status{};
}

Status Pools::DropNow(Entry& pool, const ChunkSpace::Chunk& chunk) {
  ++pool.changing;
  WithoutLock apart(mutex_);
  Status dropped = drop_(chunk);
  apart.End();
  --pool.changing;
  changed_->NotifyAll();
  return dropped;
}

// Gives back what could not be given back at the free. What its stream still uses stays for the next time; everything does once
// another thread has begun a pause or resume, which works on all chunks.
void Pools::GiveLate(Entry& pool, Who who) {
  const bool running = LifecycleOf(pool) == Lifecycle::kRunning;
  std::vector<Late> all;
  all.reserve(pool.late.size());  // so that nothing is lost where there is no memory for it
  all.swap(pool.late);
  for (Late& one : all) {
    const auto wait = [&]() -> Status {
      mutex_.AssertHeld();
      WithoutLock apart(mutex_);
      if (running && !Idle(one)) return {Code::kRefused, "a stream may still use it"};
      return pool.cycle->AwaitCopies();
    };
    if (OrNoMemory(wait).ok() && (who == Who::kCycle || !Busy(pool))) {
      static_cast<void>(GiveBack(pool, one.address, one.device));
    } else {
      pool.late.push_back(std::move(one));
    }
  }
}

}  // namespace amem
