#include "replay/session/pools/pools.h"

#include <spdlog/fmt/fmt.h>

#include <mutex>
#include <utility>

#include "replay/session/new_memory.h"
#include "replay/session/session_options.h"

namespace amem {

Result<PoolId> Pools::Open(const std::string& tag, PoolPolicy policy, bool whole) {
  if (tag.empty() || tag == "nccl" || tag == "user")
    return Status{Code::kInvalid, tag.empty() ? "the tag of a pool is empty" : "tag " + tag + " is AMem's own; take another"};
  constexpr std::size_t kLongest = 1000;  // it travels in messages of bounded size
  if (tag.size() > kLongest) return Status{Code::kInvalid, fmt::format("a tag of a pool has at most {} bytes", kLongest)};
  const MutexLock lock(table_.mutex);
  PoolEntry* const known = table_.Named(tag);
  if (known == nullptr) return OpenNew(tag, policy, false, whole);
  if (known->policy != policy) {
    const LedgerLock ledger(parts_.ledger);  // so that no library makes memory there between the check and the record
    // What a library has made under this tag is saved, because nobody had said that its contents may go.
    if (!known->joined || parts_.ledger.state().HasOwnMemory(known->id))
      return Status{Code::kInvalid,
                    fmt::format("tag {} {} with policy {}, which cannot become {}", tag,
                                known->joined ? "holds memory" : "is open", ToText(known->policy), ToText(policy))};
    known->policy = policy;
    parts_.ledger.Record(PoolOpened{known->id, tag, policy});
  }
  known->joined = false;
  if (whole) known->memory->SetWhole(table_.mutex);  // joined before, for a peer's memory
  return known->id;
}

Result<PoolId> Pools::Join(const std::string& tag, PoolPolicy policy, InTags& in) {
  MutexLock lock(table_.mutex);
  PoolId pool;
  if (const PoolEntry* const known = table_.Named(tag)) {
    pool = known->id;
  } else {
    AMEM_ASSIGN(pool, OpenNew(tag, policy, true));
  }
  lock.Unlock();
  parts_.calls.EnterTag(pool, in);
  if (!in.paused) return pool;
  return Status{Code::kRefused, fmt::format("import memory of tag {}: refused, that tag is paused here; resume it first", tag),
                cuda::kIllegalState};
}

Result<PoolId> Pools::OpenNew(const std::string& tag, PoolPolicy policy, bool joined, bool whole) {
  const PoolId id{static_cast<std::uint32_t>(table_.pools.size() + 1)};
  AMEM_ASSIGN(auto cycle, Coordinator::OfTag(context_, parts_.calls.GateOf(id), id, tag));
  if (!parts_.calls.HasTags() && parts_.options.first_tag) parts_.options.first_tag();
  parts_.calls.TagOpened();
  parts_.ledger.LockAndRecord(PoolOpened{id, tag, policy});
  auto memory = std::make_unique<PoolMemory>(parts_, id, *cycle, *table_.changed, whole);
  PoolEntry pool{
      .id = id, .tag = tag, .policy = policy, .joined = joined, .cycle = std::move(cycle), .memory = std::move(memory)};
  table_.pools.emplace(id, std::make_unique<PoolEntry>(std::move(pool)));
  return id;
}

Result<PoolId> Pools::Find(std::string_view tag) {
  const MutexLock lock(table_.mutex);
  if (const PoolEntry* const pool = table_.Named(tag)) return pool->id;
  std::string known;
  for (const auto& [id, pool] : table_.pools) known += pool->tag + ", ";
  return Status{Code::kNotFound, fmt::format("tag {} is not known; known: {}nccl", tag, known)};
}

Status Pools::AwaitUse(PoolEntry& pool) {
  const Status paused{Code::kRefused, fmt::format("tag {} is paused; resume it before memory is allocated in it", pool.tag),
                      cuda::kIllegalState};
  while (pool.turn.busy()) {
    if (pool.turn.last_asked == CycleKind::kPause) return paused;
    table_.changed->Wait(table_.mutex);
  }
  return LifecycleOf(pool, parts_.ledger) == Lifecycle::kRunning ? Status{} : paused;
}

Status Pools::Enter(PoolId id) {
  const MutexLock lock(table_.mutex);
  AMEM_ASSIGN(PoolEntry* const pool, table_.Known(id));
  AMEM_TRY(AwaitUse(*pool));
  ++pool->turn.inside;
  return {};
}

void Pools::Leave(PoolId id) {
  if (table_.fork.InChild()) return;
  const MutexLock lock(table_.mutex);
  if (PoolEntry* const pool = table_.Find(id)) --pool->turn.inside;
}

Result<Address> Pools::Allocate(PoolId id, Bytes bytes, DeviceOrdinal device) {
  if (bytes >= ChunkSpace::kTooMany) return NoSuchSize("allocate", bytes);
  context_.pinned.Busy();
  MutexLock lock(table_.mutex);
  AMEM_ASSIGN(PoolEntry* const known, table_.Known(id));
  PoolEntry& pool = *known;
  PoolMemory& memory = *pool.memory;
  AMEM_TRY(AwaitUse(pool));
  if (memory.HasFreed(table_.mutex)) {
    memory.GiveBackFreed(
        true, [&] { return pool.turn.busy(); }, table_.mutex);
    AMEM_TRY(AwaitUse(pool));
  }
  auto address = memory.Take(bytes, device, table_.mutex);
  if (!address) {
    GrantAccessEverywhere(device);
    const auto begun = memory.TakeNew(bytes, device, table_.devices, table_.mutex);
    if (!begun.ok()) return begun.status().Within(fmt::format("tag {}: allocate {}", pool.tag, FormatBytes(bytes)));
    address = *begun;
  }
  const auto part = memory.PartAt(*address, device, table_.mutex);
  const LedgerLock ledger(parts_.ledger);
  if (!parts_.ledger.Check(part.has_value(), "no part begins where one was just taken, " + Hex(*address)))
    return parts_.ledger.Broken();
  parts_.ledger.Record(PoolAllocated{*address, part->bytes, device, part->chunk, part->offset});
  return *address;
}

void Pools::Made(PoolId id, Bytes bytes) {
  const MutexLock lock(table_.mutex);
  const LedgerLock ledger(parts_.ledger);
  if (PoolEntry* const pool = table_.Find(id)) pool->cycle->Made(bytes);
}

Status Pools::AwaitCopies(PoolId id) {
  MutexLock lock(table_.mutex);
  AMEM_ASSIGN(PoolEntry* const pool, table_.Known(id));
  Coordinator& cycle = *pool->cycle;
  lock.Unlock();
  return cycle.AwaitCopies();
}

// If a process uses several devices, each may access the memory of all, as PyTorch expects of the CUDA runtime. A pool whose
// chunks are away follows at the end of its next resume.
void Pools::GrantAccessEverywhere(DeviceOrdinal device) {
  if (!table_.devices.insert(device).second) return;
  for (const auto& [id, pool] : table_.pools)
    if (!pool->turn.busy() && LifecycleOf(*pool, parts_.ledger) == Lifecycle::kRunning)
      pool->memory->GrantAccess(table_.devices, table_.mutex);
}

void Pools::OpenTo(DeviceOrdinal device) {
  const MutexLock lock(table_.mutex);
  GrantAccessEverywhere(device);
}

PoolEntry* Pools::Holding(Address address, DeviceOrdinal& device) {
  for (const auto& [id, pool] : table_.pools) {
    const auto on = pool->memory->DeviceOf(address, table_.mutex);
    if (!on) continue;
    device = *on;
    return pool.get();
  }
  return nullptr;
}

Status Pools::Free(Address address, std::optional<void*> stream) {
  context_.pinned.Busy();
  MutexLock lock(table_.mutex);
  FreedPart part{address, {}, stream.value_or(nullptr)};
  PoolEntry* const pool = Holding(address, part.device);
  if (pool == nullptr || pool->memory->IsFreed(address, table_.mutex))
    return NotOurs("amem_free", Hex(address), "nothing is allocated there");
  PoolMemory& memory = *pool->memory;
  const bool running = LifecycleOf(*pool, parts_.ledger) == Lifecycle::kRunning;
  const bool paused = !running && !pool->turn.busy();  // then nothing of the program touches it
  lock.Unlock();
  if (!paused && stream) memory.NoteMoment(part);
  const bool idle = (paused || (running && (!stream || memory.StreamIsDone(part)))) && pool->cycle->AwaitCopies().ok();
  lock.Lock();
  if (!memory.PartAt(address, part.device, table_.mutex) || memory.IsFreed(address, table_.mutex))
    return NotOurs("amem_free", Hex(address), "it was freed by two threads at once");
  if (idle && !pool->turn.busy()) return memory.GiveBack(address, part.device, table_.mutex);
  memory.GiveBackLater(std::move(part), table_.mutex);
  return {};
}

std::vector<PoolSnapshot> Pools::Snapshot() {
  std::vector<PoolSnapshot> all;
  const MutexLock lock(table_.mutex);
  for (const auto& [id, pool] : table_.pools) {
    const PoolTurn& turn = pool->turn;
    const Lifecycle now = LifecycleOf(*pool, parts_.ledger);
    const bool asked_to_pause = turn.busy() && turn.last_asked == CycleKind::kPause;
    const bool resuming = turn.busy() ? !asked_to_pause && now != Lifecycle::kRunning : now == Lifecycle::kResuming;
    const bool pausing = turn.busy() ? asked_to_pause && now != Lifecycle::kPaused : now == Lifecycle::kPausing;
    const char* const state = pausing ? "pausing" : resuming ? "resuming" : now == Lifecycle::kRunning ? "resident" : "paused";
    all.push_back({id, pool->tag, pool->policy, state, pool->cycle->Last(CycleKind::kPause).total_ns,
                   pool->cycle->Last(CycleKind::kResume).total_ns, turn.failure, pool->cycle->Contents()});
  }
  return all;
}

bool Pools::IfAllRun(const std::function<void()>& use) {
  if (!TryLockUntil(table_.mutex, Now())) return false;
  table_.mutex.AssertHeld();
  const MutexLock lock(table_.mutex, std::adopt_lock);
  for (const auto& [id, pool] : table_.pools)
    if (pool->turn.busy() || LifecycleOf(*pool, parts_.ledger) != Lifecycle::kRunning) return false;
  use();
  return true;
}

void Pools::FreeUnfinished() {
  const MutexLock lock(table_.mutex);
  for (const auto& [id, pool] : table_.pools) pool->cycle->FreeUnfinished();
}

bool Pools::IsResident(PoolId id) {
  const MutexLock lock(table_.mutex);
  const PoolEntry* const pool = table_.Find(id);
  if (pool == nullptr) return false;
  return pool->turn.busy() ? pool->turn.last_asked == CycleKind::kResume
                           : LifecycleOf(*pool, parts_.ledger) == Lifecycle::kRunning;
}

}  // namespace amem
