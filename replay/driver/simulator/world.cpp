#include "replay/driver/simulator/world.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>

#include "journal/base/unique_fd.h"
#include "replay/driver/simulator/memfd.h"

namespace amem {
namespace {

constexpr std::uint64_t kMagic = 0x616d656d2d73696dULL;  // "amem-sim"
constexpr std::uint64_t kVersion = 1;

struct WorldMember {
  std::int32_t pid;  // 0: free; written last when taken and first when left
  std::uint64_t start_time;
};

struct Entry {
  std::atomic<std::uint64_t> id;  // 0: free; written last, so that a half-written entry does not exist
  std::uint64_t bytes;
  std::int32_t device;
  std::uint32_t exported;
  std::array<std::uint16_t, SimulatorWorld::kMembers> references;
};

struct ProcessStat {
  char state = 'X';
  std::uint64_t start_time = 0;
};

ProcessStat ReadProcessStat(std::int32_t pid) {
  const UniqueFd file(open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 1024> text{};
  if (!file || read(file.get(), text.data(), text.size() - 1) <= 0) return {};
  const char* after_name = std::strrchr(text.data(), ')');  // the name itself may hold anything
  if (after_name == nullptr) return {};
  ProcessStat stat;
  unsigned long long start = 0;
  // Field 3 is the state, field 22 the start time.
  if (std::sscanf(after_name + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                  &stat.state, &start) != 2) {
    return {};
  }
  stat.start_time = start;
  return stat;
}

bool Alive(const WorldMember& member) {
  const ProcessStat stat = ReadProcessStat(member.pid);
  return stat.state != 'X' && stat.state != 'Z' && stat.start_time == member.start_time;
}

void InsertOpenIds(std::int32_t pid, std::uint64_t world, std::set<std::uint64_t>& ids) {
  DIR* directory = opendir(("/proc/" + std::to_string(pid) + "/fd").c_str());
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    std::array<char, 320> link{};
    const ssize_t length = readlinkat(dirfd(directory), entry->d_name, link.data(), link.size());
    if (length <= 0) continue;
    const auto tag = ParseMemfdLink({link.data(), static_cast<std::size_t>(length)});
    if (tag && tag->world == world) ids.insert(tag->key.id);
  }
  closedir(directory);
}

std::string Errno(const std::string& tried) { return tried + ": " + std::strerror(errno); }

Status CheckSettings(std::int32_t devices, Bytes capacity) {
  if (devices < 1 || devices > SimulatorWorld::kMaxDevices) {
    return {Code::kInvalid, fmt::format("simulated world with {} devices: give 1 to {}", devices, SimulatorWorld::kMaxDevices)};
  }
  if (capacity == 0) return {Code::kInvalid, "simulated world with devices of 0 bytes: give them a capacity"};
  return {};
}

}  // namespace

struct SimulatorWorld::Table {
  std::uint64_t magic, version, id;
  std::int32_t devices;
  bool shared;  // between processes; otherwise every member is this process
  Bytes capacity;
  pthread_mutex_t mutex;
  std::uint64_t next_id;
  std::uint32_t first_free;  // no free entry before this
  std::uint32_t end;         // no used entry from here on
  std::uint32_t lingering;   // entries that only exported descriptors may hold
  std::array<Bytes, kMaxDevices> used;
  std::array<WorldMember, kMembers> members;
  std::array<Entry, kAllocations> entries;

  static Table* MapFile(int fd) {
    void* memory = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<Table*>(memory);
  }
  static Table* MapPrivate() {
    void* memory = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<Table*>(memory);
  }

  void Initialise(std::int32_t device_count, Bytes device_capacity, bool between_processes) {
    std::random_device random;
    magic = kMagic;
    version = kVersion;
    id = (std::uint64_t{random()} << 32) | random();
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

  [[nodiscard]] Entry* Find(Key key) {
    if (key.index >= kAllocations || key.id == 0) return nullptr;
    if (entries[key.index].id.load() == key.id) return &entries[key.index];
    for (std::uint32_t i = 0; i < end; ++i) {  // counted again after it was forgotten, elsewhere
      if (entries[i].id.load() == key.id) return &entries[i];
    }
    return nullptr;
  }
  [[nodiscard]] std::uint32_t IndexOf(const Entry& entry) const { return static_cast<std::uint32_t>(&entry - entries.data()); }

  static bool Referenced(const Entry& entry) {
    for (const std::uint16_t count : entry.references) {
      if (count != 0) return true;
    }
    return false;
  }

  void Use(std::uint32_t index, std::uint64_t entry_id, std::int32_t device, Bytes bytes, std::uint32_t member) {
    Entry& entry = entries[index];
    entry.bytes = bytes;
    entry.device = device;
    entry.exported = 0;
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

  void Forget(std::uint32_t index) {
    Entry& entry = entries[index];
    entry.id.store(0);
    if (entry.device >= 0) used[entry.device] -= entry.bytes;
    if (index < first_free) first_free = index;
    while (end > 0 && entries[end - 1].id.load() == 0) --end;
  }

  void AfterDrop(std::uint32_t index) {
    const Entry& entry = entries[index];
    if (Referenced(entry)) return;
    if (entry.exported) {
      ++lingering;
    } else {
      Forget(index);
    }
  }

  void DropAll(std::uint32_t member) {
    for (std::uint32_t i = 0; i < end; ++i) {
      Entry& entry = entries[i];
      if (entry.id.load() == 0 || entry.references[member] == 0) continue;
      entry.references[member] = 0;
      AfterDrop(i);
    }
    members[member] = {};
  }

  void ReapTheDead() {
    if (!shared) return;
    for (std::uint32_t m = 0; m < kMembers; ++m) {
      if (members[m].pid != 0 && !Alive(members[m])) DropAll(m);
    }
  }

  // Forgets what neither a member nor an open descriptor holds. Costs a walk through the members' descriptors, only if needed.
  void ForgetClosedDescriptors() {
    if (lingering == 0) return;
    std::set<std::int32_t> pids;
    for (const WorldMember& member : members) {
      if (member.pid != 0) pids.insert(member.pid);
    }
    pids.insert(getpid());
    std::set<std::uint64_t> open_ids;
    for (const std::int32_t pid : pids) InsertOpenIds(pid, id, open_ids);
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

  // After a process was killed inside: everything that is derived is derived again.
  void Repair() {
    used.fill(0);
    first_free = 0;
    end = 0;
    lingering = 0;
    for (std::uint32_t i = 0; i < kAllocations; ++i) {
      Entry& entry = entries[i];
      if (entry.id.load() == 0) continue;
      if (!Referenced(entry) && !entry.exported) {
        entry.id.store(0);
        continue;
      }
      if (entry.id.load() >= next_id) next_id = entry.id.load() + 1;
      if (entry.device >= 0) used[entry.device] += entry.bytes;
      if (!Referenced(entry)) ++lingering;
      end = i + 1;
    }
    ReapTheDead();
  }
};

class SimulatorWorld::Guard {
 public:
  explicit Guard(Table& table) : table_(table) {
    if (pthread_mutex_lock(&table_.mutex) != EOWNERDEAD) return;
    table_.Repair();
    pthread_mutex_consistent(&table_.mutex);
  }
  ~Guard() { pthread_mutex_unlock(&table_.mutex); }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  Table& table_;
};

Result<std::shared_ptr<SimulatorWorld>> SimulatorWorld::InMemory(std::int32_t devices, Bytes capacity_per_device) {
  AMEM_TRY(CheckSettings(devices, capacity_per_device));
  Table* table = Table::MapPrivate();
  if (table == nullptr) return Status(Code::kOutOfMemory, Errno("map the table of a simulated world"));
  table->Initialise(devices, capacity_per_device, false);
  return std::shared_ptr<SimulatorWorld>(new SimulatorWorld(table));
}

namespace {

// The file appears under its name only when it is whole, so that no process maps half of one.
Status MakeFile(const std::filesystem::path& path, Bytes bytes, const auto& initialise) {
  const std::string temporary = path.string() + "." + std::to_string(getpid()) + "." + std::to_string(std::random_device{}());
  const UniqueFd fd(open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) return {Code::kIo, Errno("create the file of a simulated world " + temporary)};
  Status status;
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    status = {Code::kIo, Errno("size the file of a simulated world " + temporary)};
  } else {
    status = initialise(fd.get());
  }
  if (status.ok() && link(temporary.c_str(), path.c_str()) != 0 && errno != EEXIST) {
    status = {Code::kIo, Errno("name the file of a simulated world " + path.string())};
  }
  unlink(temporary.c_str());
  return status;
}

}  // namespace

Result<std::shared_ptr<SimulatorWorld>> SimulatorWorld::Open(const std::filesystem::path& path, std::int32_t devices,
                                                             Bytes capacity_per_device) {
  AMEM_TRY(CheckSettings(devices, capacity_per_device));
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd && errno == ENOENT) {
    AMEM_TRY(MakeFile(path, sizeof(Table), [&](int file) -> Status {
      Table* table = Table::MapFile(file);
      if (table == nullptr) return {Code::kIo, Errno("map the file of a simulated world")};
      table->Initialise(devices, capacity_per_device, true);
      munmap(table, sizeof(Table));
      return {};
    }));
    fd.Reset(open(path.c_str(), O_RDWR | O_CLOEXEC));
  }
  if (!fd) return Status(Code::kIo, Errno("open the simulated world " + path.string()));
  struct stat info {};
  if (fstat(fd.get(), &info) != 0 || static_cast<std::size_t>(info.st_size) != sizeof(Table)) {
    return Status(Code::kCorrupt, fmt::format("the simulated world {} has {} bytes and not {}: remove it if no job uses it",
                                              path.string(), info.st_size, sizeof(Table)));
  }
  Table* table = Table::MapFile(fd.get());
  if (table == nullptr) return Status(Code::kIo, Errno("map the simulated world " + path.string()));
  std::shared_ptr<SimulatorWorld> world(new SimulatorWorld(table));
  if (table->magic != kMagic || table->version != kVersion) {
    return Status(Code::kCorrupt, path.string() + " is no simulated world of this version: remove it if no job uses it");
  }
  if (table->devices != devices || table->capacity != capacity_per_device) {
    return Status(Code::kInvalid, fmt::format("the simulated world {} has {} devices of {} bytes, not {} of {}: give every "
                                              "process of the job the same",
                                              path.string(), table->devices, table->capacity, devices, capacity_per_device));
  }
  return world;
}

SimulatorWorld::~SimulatorWorld() { munmap(table_, sizeof(Table)); }

std::uint64_t SimulatorWorld::id() const { return table_->id; }
std::int32_t SimulatorWorld::devices() const { return table_->devices; }
Bytes SimulatorWorld::capacity() const { return table_->capacity; }

Result<std::uint32_t> SimulatorWorld::Attach() {
  const Guard guard(*table_);
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (std::uint32_t m = 0; m < kMembers; ++m) {
      if (table_->members[m].pid != 0) continue;
      table_->members[m].start_time = ReadProcessStat(getpid()).start_time;
      table_->members[m].pid = getpid();
      return m;
    }
    table_->ReapTheDead();
  }
  return Status(Code::kRefused, fmt::format("join the simulated world: all {} places are taken; end a process", kMembers));
}

void SimulatorWorld::Detach(std::uint32_t member) {
  const Guard guard(*table_);
  table_->DropAll(member);
}

std::optional<SimulatorWorld::Key> SimulatorWorld::Add(std::uint32_t member, std::int32_t device, Bytes bytes) {
  const Guard guard(*table_);
  const auto fits = [&] { return device < 0 || bytes <= table_->capacity - std::min(table_->capacity, table_->used[device]); };
  if (!fits()) table_->Refresh();
  if (!fits()) return std::nullopt;
  const auto index = table_->FreeIndex();
  if (!index) return std::nullopt;
  const std::uint64_t id = table_->next_id++;
  table_->Use(*index, id, device, bytes, member);
  return Key{*index, id};
}

std::optional<SimulatorWorld::Key> SimulatorWorld::AddReference(std::uint32_t member, Key key, std::int32_t device,
                                                                Bytes bytes) {
  const Guard guard(*table_);
  if (Entry* entry = table_->Find(key)) {
    if (entry->references[member] == std::numeric_limits<std::uint16_t>::max()) return std::nullopt;
    if (entry->exported && !Table::Referenced(*entry)) --table_->lingering;
    ++entry->references[member];
    return Key{table_->IndexOf(*entry), key.id};
  }
  const auto index = table_->FreeIndex();
  if (!index) return std::nullopt;
  table_->Use(*index, key.id, device, bytes, member);
  table_->entries[*index].exported = 1;  // that is how the caller came to know it
  return Key{*index, key.id};
}

void SimulatorWorld::DropReference(std::uint32_t member, Key key) {
  const Guard guard(*table_);
  Entry* entry = table_->Find(key);
  if (entry == nullptr || entry->references[member] == 0) return;
  --entry->references[member];
  table_->AfterDrop(table_->IndexOf(*entry));
}

void SimulatorWorld::MarkExported(Key key) {
  const Guard guard(*table_);
  if (Entry* entry = table_->Find(key)) entry->exported = 1;
}

Bytes SimulatorWorld::InUse(std::int32_t device) {
  const Guard guard(*table_);
  table_->Refresh();
  return device >= 0 && device < table_->devices ? table_->used[device] : 0;
}

std::uint32_t SimulatorWorld::Members() {
  const Guard guard(*table_);
  table_->ReapTheDead();
  std::uint32_t count = 0;
  for (const WorldMember& member : table_->members) count += member.pid != 0;
  return count;
}

void SimulatorWorld::LockForEver() { pthread_mutex_lock(&table_->mutex); }

}  // namespace amem
