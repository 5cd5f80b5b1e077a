// The driver's checkpoint of a process, with states and refusals as documented in cuda.h and as measured.
#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include "replay/driver/driver.h"
#include "replay/driver/simulator/world_table.h"

namespace amem {
namespace {

using ProcessState = SimulatorWorld::ProcessState;
constexpr std::chrono::milliseconds kBetweenLooks{1};

std::atomic_ref<std::uint32_t> StateWord(WorldMember& member) { return std::atomic_ref(member.state); }
ProcessState StateIn(WorldMember& member) { return static_cast<ProcessState>(StateWord(member).load()); }
void SetState(WorldMember& member, ProcessState state) { StateWord(member).store(static_cast<std::uint32_t>(state)); }

std::int32_t MovedTo(const WorldMember& member, std::int32_t device) {
  if (device < 0 || static_cast<std::size_t>(device) >= member.moved.size()) return device;
  const std::int32_t moved = member.moved[static_cast<std::size_t>(device)];
  return moved == 0 ? device : moved - 1;
}

}  // namespace

// The member and its number; null: no member has that pid. The caller holds the lock.
struct SimulatorWorld::OfProcess {
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

// Dekker's handshake with LockProcess: the member counts its call and then reads the state; the other sets the state and then
// reads the count.
bool SimulatorWorld::EnterCall(std::uint32_t number) {
  WorldMember& member = table_->members[number];
  const std::atomic_ref in_calls(member.in_calls);
  while (true) {
    ++in_calls;
    const ProcessState state = StateIn(member);
    if (state == ProcessState::kRunning || state == ProcessState::kFailed) return state == ProcessState::kRunning;
    --in_calls;
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

void SimulatorWorld::LeaveCall(std::uint32_t number) { --std::atomic_ref(table_->members[number].in_calls); }

void SimulatorWorld::SetBusy(std::uint32_t number, bool busy) {
  std::atomic_ref(table_->members[number].busy).store(busy ? 1 : 0);
}

std::optional<ProcessState> SimulatorWorld::StateOf(std::int32_t pid) {
  const Guard guard(*table_);
  const OfProcess found(*table_, pid);
  if (found.member == nullptr) return std::nullopt;
  return StateIn(*found.member);
}

int SimulatorWorld::LockProcess(std::int32_t pid, std::uint32_t timeout_ms) {
  WorldMember* member = nullptr;
  {
    const Guard guard(*table_);
    member = OfProcess(*table_, pid).member;
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
  for (std::uint32_t m = 0; m < SimulatorWorld::kMembers; ++m) {
    if (m != member && entry.references[m] != 0) return true;
  }
  return false;
}

}  // namespace

int SimulatorWorld::CheckpointProcess(std::int32_t pid) {
  const Guard guard(*table_);
  const OfProcess found(*table_, pid);
  if (found.member == nullptr) return cuda::kInvalidValue;
  if (StateIn(*found.member) != ProcessState::kLocked) return cuda::kIllegalState;
  table_->ForgetClosedDescriptors();
  std::uint32_t shared = 0;
  for (WorldEntry& entry : table_->Entries()) {
    if (entry.id.load() == 0 || entry.references[found.number] == 0) continue;
    const bool elsewhere = HeldByAnother(entry, found.number);
    if (elsewhere || entry.device < 0) {
      shared |= elsewhere ? 1U : 0U;
      continue;
    }
    entry.away = 1;
    table_->used[entry.device] -= entry.bytes;
  }
  for (const WorldMulticast& multicast : table_->multicasts) {
    const WorldEntry* entry = table_->Find({0, multicast.id});
    if (entry != nullptr && entry->references[found.number] != 0) shared = 1;
  }
  found.member->shared = shared;
  SetState(*found.member, ProcessState::kCheckpointed);
  return cuda::kSuccess;
}

int SimulatorWorld::RestoreProcess(std::int32_t pid, std::span<const DevicePair> pairs) {
  const Guard guard(*table_);
  const OfProcess found(*table_, pid);
  if (found.member == nullptr) return cuda::kInvalidValue;
  if (StateIn(*found.member) != ProcessState::kCheckpointed) return cuda::kIllegalState;
  if (found.member->shared != 0) {
    SetState(*found.member, ProcessState::kFailed);
    return cuda::kNotSupported;
  }
  std::map<std::int32_t, std::int32_t> target;
  for (const DevicePair& pair : pairs) {
    const bool exists = pair.from >= 0 && pair.from < table_->devices && pair.to >= 0 && pair.to < table_->devices;
    if (!exists || !target.emplace(pair.from, pair.to).second) return cuda::kInvalidValue;
  }
  std::vector<WorldEntry*> away;
  std::map<std::int32_t, Bytes> needed;
  for (WorldEntry& entry : table_->Entries()) {
    if (entry.id.load() == 0 || entry.references[found.number] == 0 || entry.away == 0) continue;
    if (!pairs.empty() && !target.contains(entry.device)) return cuda::kInvalidValue;
    away.push_back(&entry);
    needed[pairs.empty() ? entry.device : target[entry.device]] += entry.bytes;
  }
  table_->Refresh();
  for (const auto& [device, bytes] : needed) {
    if (bytes > table_->capacity - std::min(table_->capacity, table_->used[device])) return cuda::kOutOfMemory;
  }
  for (WorldEntry* entry : away) {
    if (!pairs.empty()) entry->device = target[entry->device];
    entry->away = 0;
    table_->used[entry->device] += entry->bytes;
  }
  for (std::int32_t device = 0; device < table_->devices && !pairs.empty(); ++device) {
    const auto it = target.find(MovedTo(*found.member, device));
    if (it == target.end()) continue;
    found.member->moved[static_cast<std::size_t>(device)] = static_cast<std::int16_t>(it->second + 1);
  }
  SetState(*found.member, ProcessState::kLocked);
  return cuda::kSuccess;
}

int SimulatorWorld::UnlockProcess(std::int32_t pid) {
  const Guard guard(*table_);
  const OfProcess found(*table_, pid);
  if (found.member == nullptr) return cuda::kInvalidValue;
  if (StateIn(*found.member) != ProcessState::kLocked) return cuda::kIllegalState;
  SetState(*found.member, ProcessState::kRunning);
  return cuda::kSuccess;
}

std::int32_t SimulatorWorld::DeviceNow(std::uint32_t member, std::int32_t device) const {
  return MovedTo(table_->members[member], device);
}

std::vector<SimulatorWorld::Use> SimulatorWorld::UsesOf(std::int32_t device) {
  const Guard guard(*table_);
  table_->Refresh();
  std::map<std::int32_t, Bytes> by_process;
  for (const WorldEntry& entry : table_->Entries()) {
    if (entry.id.load() == 0 || entry.device != device || entry.away != 0) continue;
    const auto owner = std::ranges::find_if(entry.references, [](auto count) { return count != 0; });  // the first holder
    if (owner != entry.references.end())
      by_process[table_->members[static_cast<std::size_t>(owner - entry.references.begin())].pid] += entry.bytes;
  }
  std::vector<Use> uses;
  for (const auto& [pid, bytes] : by_process) uses.push_back({pid, bytes});
  return uses;
}

}  // namespace amem
