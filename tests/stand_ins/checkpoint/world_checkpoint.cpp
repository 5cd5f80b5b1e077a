#include "tests/stand_ins/checkpoint/world_checkpoint.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include "replay/driver/driver.h"
#include "replay/driver/simulator/world_table.h"

namespace amem::checkpoint {
namespace {

using Guard = SimulatorWorld::Guard;
using Table = SimulatorWorld::Table;
constexpr std::uint32_t kMembers = SimulatorWorld::kMembers;
constexpr std::chrono::milliseconds kBetweenLooks{1};

std::atomic_ref<std::uint32_t> StateWord(WorldMember& member) { return std::atomic_ref(member.state); }
ProcessState StateIn(WorldMember& member) { return static_cast<ProcessState>(StateWord(member).load()); }
void SetState(WorldMember& member, ProcessState state) { StateWord(member).store(static_cast<std::uint32_t>(state)); }

// The member and its number; null: no member has that pid. The caller holds the lock.
struct OfProcess {
  OfProcess(Table& table, std::int32_t pid) {
    table.ReapTheDead();
    for (std::uint32_t m = 0; m < kMembers; ++m) {
      if (pid <= 0 || table.members[m].pid != pid) continue;
      member = &table.members[m];
      number = m;
      return;
    }
  }
  WorldMember* member = nullptr;
  std::uint32_t number = 0;
};

}  // namespace

// Dekker's handshake with LockProcess: the member counts its call and then reads the state; the other sets the state and then
// reads the count.
bool EnterCall(SimulatorWorld& world, std::uint32_t number) {
  WorldMember& member = world.table().members[number];
  const std::atomic_ref in_calls(member.in_calls);
  while (true) {
    ++in_calls;
    const ProcessState state = StateIn(member);
    if (state == ProcessState::kRunning || state == ProcessState::kFailed) return state == ProcessState::kRunning;
    --in_calls;
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

void LeaveCall(SimulatorWorld& world, std::uint32_t number) { --std::atomic_ref(world.table().members[number].in_calls); }

void SetBusy(SimulatorWorld& world, std::uint32_t number, bool busy) {
  std::atomic_ref(world.table().members[number].busy).store(busy ? 1 : 0);
}

std::optional<ProcessState> StateOf(SimulatorWorld& world, std::int32_t pid) {
  const Guard guard(world.table());
  const OfProcess found(world.table(), pid);
  if (found.member == nullptr) return std::nullopt;
  return StateIn(*found.member);
}

int LockProcess(SimulatorWorld& world, std::int32_t pid, std::uint32_t timeout_ms) {
  WorldMember* member = nullptr;
  {
    const Guard guard(world.table());
    member = OfProcess(world.table(), pid).member;
    if (member == nullptr) return cuda::kInvalidValue;
    if (StateIn(*member) != ProcessState::kRunning) return cuda::kIllegalState;
    SetState(*member, ProcessState::kLocked);
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  while (std::atomic_ref(member->in_calls).load() != 0 || std::atomic_ref(member->busy).load() != 0) {
    if (member->pid != pid) return cuda::kInvalidValue;
    if (timeout_ms != 0 && std::chrono::steady_clock::now() >= until) {
      SetState(*member, ProcessState::kRunning);
      return cuda::kNotReady;
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
  return cuda::kSuccess;
}

namespace {

bool HeldByAnother(const WorldEntry& entry, std::uint32_t member) {
  for (std::uint32_t m = 0; m < kMembers; ++m) {
    if (m != member && entry.references[m] != 0) return true;
  }
  return false;
}

}  // namespace

int CheckpointProcess(SimulatorWorld& world, std::int32_t pid) {
  const Guard guard(world.table());
  const OfProcess found(world.table(), pid);
  if (found.member == nullptr) return cuda::kInvalidValue;
  if (StateIn(*found.member) != ProcessState::kLocked) return cuda::kIllegalState;
  world.table().ForgetClosedDescriptors();
  std::uint32_t shared = 0;
  for (WorldEntry& entry : world.table().Entries()) {
    if (entry.id.load() == 0 || entry.references[found.number] == 0) continue;
    const bool elsewhere = HeldByAnother(entry, found.number);
    if (elsewhere || entry.device < 0) {
      shared |= elsewhere ? 1U : 0U;
      continue;
    }
    entry.away = 1;
    world.table().used[entry.device] -= entry.bytes;
  }
  for (const WorldMulticast& multicast : world.table().multicasts) {
    const WorldEntry* entry = world.table().Find({0, multicast.id});
    if (entry != nullptr && entry->references[found.number] != 0) shared = 1;
  }
  found.member->shared = shared;
  SetState(*found.member, ProcessState::kCheckpointed);
  return cuda::kSuccess;
}

int RestoreProcess(SimulatorWorld& world, std::int32_t pid, std::span<const DevicePair> pairs) {
  const Guard guard(world.table());
  const OfProcess found(world.table(), pid);
  if (found.member == nullptr) return cuda::kInvalidValue;
  if (StateIn(*found.member) != ProcessState::kCheckpointed) return cuda::kIllegalState;
  if (found.member->shared != 0) {
    SetState(*found.member, ProcessState::kFailed);
    return cuda::kNotSupported;
  }
  std::map<std::int32_t, std::int32_t> target;
  for (const DevicePair& pair : pairs) {
    const bool exists = pair.from >= 0 && pair.from < world.table().devices && pair.to >= 0 && pair.to < world.table().devices;
    if (!exists || !target.emplace(pair.from, pair.to).second) return cuda::kInvalidValue;
  }
  std::vector<WorldEntry*> away;
  std::map<std::int32_t, Bytes> needed;
  for (WorldEntry& entry : world.table().Entries()) {
    if (entry.id.load() == 0 || entry.references[found.number] == 0 || entry.away == 0) continue;
    if (!pairs.empty() && !target.contains(entry.device)) return cuda::kInvalidValue;
    away.push_back(&entry);
    needed[pairs.empty() ? entry.device : target[entry.device]] += entry.bytes;
  }
  world.table().Refresh();
  for (const auto& [device, bytes] : needed) {
    if (bytes > world.table().capacity - std::min(world.table().capacity, world.table().used[device]))
      return cuda::kOutOfMemory;
  }
  for (WorldEntry* entry : away) {
    if (!pairs.empty()) entry->device = target[entry->device];
    entry->away = 0;
    world.table().used[entry->device] += entry->bytes;
  }
  for (std::int32_t device = 0; device < world.table().devices && !pairs.empty(); ++device) {
    auto* const it = FindIn(target, world.DeviceNow(found.number, device));
    if (it == nullptr) continue;
    found.member->moved[static_cast<std::size_t>(device)] = static_cast<std::int16_t>(*it + 1);
  }
  SetState(*found.member, ProcessState::kLocked);
  return cuda::kSuccess;
}

int UnlockProcess(SimulatorWorld& world, std::int32_t pid) {
  const Guard guard(world.table());
  const OfProcess found(world.table(), pid);
  if (found.member == nullptr) return cuda::kInvalidValue;
  if (StateIn(*found.member) != ProcessState::kLocked) return cuda::kIllegalState;
  SetState(*found.member, ProcessState::kRunning);
  return cuda::kSuccess;
}

std::vector<Use> UsesOf(SimulatorWorld& world, std::int32_t device) {
  const Guard guard(world.table());
  world.table().Refresh();
  std::map<std::int32_t, Bytes> by_process;
  for (const WorldEntry& entry : world.table().Entries()) {
    if (entry.id.load() == 0 || entry.device != device || entry.away != 0) continue;
    const auto owner = std::ranges::find_if(entry.references, [](auto count) { return count != 0; });  // the first holder
    if (owner != entry.references.end())
      by_process[world.table().members[static_cast<std::size_t>(owner - entry.references.begin())].pid] += entry.bytes;
  }
  std::vector<Use> uses;
  for (const auto& [pid, bytes] : by_process) uses.push_back({pid, bytes});
  return uses;
}

}  // namespace amem::checkpoint
