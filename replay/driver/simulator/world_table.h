// The table of a simulated world, shared between processes. Only SimulatorWorld's sources include this, and the stand-ins'
// checkpoint of a process, which has what the members say of their state.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "journal/base/no_copies.h"
#include "replay/driver/simulator/world.h"

namespace amem {

inline constexpr std::uint64_t kWorldMagic = 0x616d656d2d73696dULL;  // "amem-sim"
inline constexpr std::uint64_t kWorldVersion = 5;

struct WorldMember {
  std::int32_t pid;  // as its /proc has it; 0: free; written last when taken and first when left
  std::uint64_t start_time;
  std::uint64_t proc;                  // which /proc, because a container has one of its own; 0: it has none
  std::uint32_t state;                 // checkpoint::ProcessState; accessed by std::atomic_ref, like the next two
  std::uint32_t in_calls;              // driver calls under way
  std::uint32_t busy;                  // its work does not end
  std::uint32_t shared;                // shared memory at its checkpoint
  std::array<std::int16_t, 64> moved;  // by device, one more than where a restore moved it; 0: not moved
};

struct WorldEntry {
  std::atomic<std::uint64_t> id;  // 0: free; written last, so that a half-written entry does not exist
  std::uint64_t bytes;
  std::int32_t device;
  std::uint32_t exported;
  std::uint32_t away;  // its process is checkpointed, so it takes no room on the device
  std::array<std::uint16_t, SimulatorWorld::kMembers> references;
};

struct WorldBinding : SimulatorWorld::Binding {  // free if it has no bytes
  std::uint32_t member;
};

struct WorldMulticast {  // belongs to the entry of the same id
  std::uint64_t id;      // 0: free
  std::uint64_t bytes;
  std::uint64_t added;  // one bit for each device of the world
  std::uint32_t devices;
  std::array<WorldBinding, SimulatorWorld::kBindings> bindings;

  [[nodiscard]] bool IsComplete() const { return static_cast<std::uint32_t>(std::popcount(added)) == devices; }
};

std::int32_t OwnPid();                      // as /proc has it
bool HasEnded(const WorldMember& member);   // and is not merely unseen
bool IsInSight(const WorldMember& member);  // it has the same /proc as this process
// The ids of this world's memory that a process has open descriptors of. False: they cannot be seen.
bool InsertOpenIds(std::int32_t pid, std::uint64_t world, std::set<std::uint64_t>& ids);

// std::random_device would need glibc 2.36.
inline std::uint64_t RandomNumber() {
  std::uint64_t number = 0;
  static_cast<void>(getrandom(&number, sizeof number, 0));  // never refused for so few bytes
  return number;
}

struct SimulatorWorld::Table {
  std::uint64_t magic, version, id;
  std::int32_t devices;
  bool shared;  // by processes; otherwise every member is this process
  Bytes capacity;
  pthread_mutex_t mutex;
  std::uint64_t next_id;
  std::uint32_t first_free;  // entries before this are used
  std::uint32_t end;         // entries from here on are free
  std::uint32_t lingering;   // entries that perhaps only exported descriptors hold
  std::array<Bytes, kMaxDevices> used;
  std::array<WorldMember, kMembers> members;
  std::array<WorldMulticast, kMulticasts> multicasts;
  std::array<WorldEntry, kAllocations> entries;

  static Table* Map(int fd) {  // -1: for this process alone
    const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, flags, fd, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<Table*>(memory);
  }

  void Initialise(std::int32_t device_count, Bytes device_capacity, bool between_processes) {
    magic = kWorldMagic;
    version = kWorldVersion;
    id = RandomNumber();
    devices = device_count;
    shared = between_processes;
    capacity = device_capacity;
    next_id = 1;
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
  }

  [[nodiscard]] WorldEntry* Find(Key key) {
    if (key.index >= kAllocations || key.id == 0) return nullptr;
    if (entries[key.index].id.load() == key.id) return &entries[key.index];
    for (WorldEntry& entry : Entries()) {  // forgotten, and counted again elsewhere
      if (entry.id.load() == key.id) return &entry;
    }
    return nullptr;
  }
  [[nodiscard]] std::span<WorldEntry> Entries() { return {entries.data(), end}; }  // some of them free
  [[nodiscard]] std::uint32_t IndexOf(const WorldEntry& entry) const {
    return static_cast<std::uint32_t>(&entry - entries.data());
  }

  static bool Referenced(const WorldEntry& entry) {
    return std::ranges::any_of(entry.references, [](std::uint16_t count) { return count != 0; });
  }

  void Use(std::uint32_t index, std::uint64_t entry_id, std::int32_t device, Bytes bytes, std::uint32_t member) {
    WorldEntry& entry = entries[index];
    entry.bytes = bytes;
    entry.device = device;
    entry.exported = 0;
    entry.away = 0;
    entry.references.fill(0);
    entry.references[member] = 1;
    entry.id.store(entry_id);
    if (device >= 0) used[device] += bytes;
    if (index >= end) end = index + 1;
  }

  std::optional<std::uint32_t> FreeIndex() {
    for (std::uint32_t i = first_free; i < kAllocations; ++i) {
      if (entries[i].id.load() == 0) {
        first_free = i + 1;
        return i;
      }
    }
    return std::nullopt;
  }

  [[nodiscard]] WorldMulticast* FindMulticast(Key key) {
    for (WorldMulticast& one : multicasts)
      if (key.id != 0 && one.id == key.id) return &one;
    return nullptr;
  }

  void DropReferenceOf(std::uint32_t member, Key key) {
    WorldEntry* entry = Find(key);
    if (entry == nullptr || entry->references[member] == 0) return;
    --entry->references[member];
    AfterDrop(IndexOf(*entry));
  }

  // The object's bindings go with it, and their references.
  void ForgetMulticast(std::uint64_t object) {
    WorldMulticast* multicast = FindMulticast({0, object});
    if (multicast == nullptr) return;
    multicast->id = 0;
    for (WorldBinding& binding : multicast->bindings) {
      if (binding.bytes != 0) DropReferenceOf(binding.member, binding.memory);
      binding = {};
    }
  }

  void Forget(std::uint32_t index) {
    WorldEntry& entry = entries[index];
    const std::uint64_t entry_id = entry.id.load();
    entry.id.store(0);
    ForgetMulticast(entry_id);
    if (entry.device >= 0 && entry.away == 0) used[entry.device] -= entry.bytes;
    if (index < first_free) first_free = index;
    while (end > 0 && entries[end - 1].id.load() == 0) --end;
  }

  void AfterDrop(std::uint32_t index) {
    const WorldEntry& entry = entries[index];
    if (Referenced(entry)) return;
    if (entry.exported) {
      ++lingering;
    } else {
      Forget(index);
    }
  }

  void DropAll(std::uint32_t member) {
    for (WorldEntry& entry : Entries())
      if (entry.id.load() != 0 && std::exchange(entry.references[member], 0) != 0) AfterDrop(IndexOf(entry));
    for (WorldMulticast& multicast : multicasts) {
      for (WorldBinding& binding : multicast.bindings) {
        if (binding.bytes != 0 && binding.member == member) binding = {};  // its reference is gone already
      }
    }
    members[member] = {};
  }

  void ReapTheDead() {
    if (!shared) return;
    for (std::uint32_t m = 0; m < kMembers; ++m)
      if (members[m].pid != 0 && HasEnded(members[m])) DropAll(m);
  }

  // Forgets what neither a member nor an open descriptor holds. Reads the members' descriptors only if needed.
  void ForgetClosedDescriptors() {
    if (lingering == 0) return;
    std::set<std::int32_t> pids;
    for (const WorldMember& member : members) {
      if (member.pid == 0) continue;
      if (!IsInSight(member)) return;  // what it has open cannot be read
      pids.insert(member.pid);
    }
    pids.insert(OwnPid());
    std::set<std::uint64_t> open_ids;
    for (const std::int32_t pid : pids)
      if (!InsertOpenIds(pid, id, open_ids)) return;
    for (std::uint32_t i = 0; i < end; ++i) {
      const std::uint64_t entry_id = entries[i].id.load();
      if (entry_id == 0 || Referenced(entries[i]) || open_ids.contains(entry_id)) continue;
      Forget(i);
      --lingering;
    }
  }

  void Refresh() {
    ReapTheDead();
    ForgetClosedDescriptors();
  }

  // Computes everything that is derived anew, after a process was killed inside.
  void Repair() {
    used.fill(0);
    first_free = 0;
    end = 0;
    lingering = 0;
    for (std::uint32_t i = 0; i < kAllocations; ++i) {
      WorldEntry& entry = entries[i];
      if (entry.id.load() == 0) continue;
      if (!Referenced(entry) && !entry.exported) {
        entry.id.store(0);
        continue;
      }
      if (entry.id.load() >= next_id) next_id = entry.id.load() + 1;
      if (entry.device >= 0 && entry.away == 0) used[entry.device] += entry.bytes;
      if (!Referenced(entry)) ++lingering;
      end = i + 1;
    }
    for (const WorldMulticast& multicast : multicasts)
      if (multicast.id != 0 && Find({0, multicast.id}) == nullptr) ForgetMulticast(multicast.id);
    ReapTheDead();
  }
};

class SimulatorWorld::Guard : NoCopies {
 public:
  explicit Guard(Table& table) : table_(table) {
    if (pthread_mutex_lock(&table_.mutex) != EOWNERDEAD) return;
    table_.Repair();
    pthread_mutex_consistent(&table_.mutex);
  }
  ~Guard() { pthread_mutex_unlock(&table_.mutex); }

 private:
  Table& table_;
};

}  // namespace amem
