#include "replay/driver/simulator/world.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <string>
#include <system_error>

#include "journal/base/process_sight.h"
#include "journal/base/unique_fd.h"
#include "replay/driver/driver.h"
#include "replay/driver/simulator/internal.h"
#include "replay/driver/simulator/memfd.h"
#include "replay/driver/simulator/world_table.h"

namespace amem {

static Status CheckSettings(std::int32_t devices, Bytes capacity) {
  if (devices < 1 || devices > SimulatorWorld::kMaxDevices)
    return {Code::kInvalid, fmt::format("simulated world with {} devices: give 1 to {}", devices, SimulatorWorld::kMaxDevices)};
  if (capacity == 0) return {Code::kInvalid, "simulated world with devices of 0 bytes: give them a capacity"};
  return {};
}

// The file gets its name only when it is whole, so no process maps half of one.
static Status MakeFile(const std::filesystem::path& path, Bytes bytes, const auto& initialise) {
  const std::string temporary = path.string() + "." + std::to_string(getpid()) + "." + std::to_string(RandomNumber());
  const UniqueFd fd(open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) return {Code::kIo, Errno("create the file of a simulated world " + temporary)};
  Status status;
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    status = {Code::kIo, Errno("size the file of a simulated world " + temporary)};
  } else {
    status = initialise(fd.get());
  }
  if (status.ok() && link(temporary.c_str(), path.c_str()) != 0 && errno != EEXIST)
    status = {Code::kIo, Errno("name the file of a simulated world " + path.string())};
  unlink(temporary.c_str());
  return status;
}

static std::uint64_t ProcHere() {
  struct stat info {};
  return ::stat("/proc/self/stat", &info) == 0 ? info.st_dev : 0;
}

// Not getpid(), which is the pid of a process's own namespace.
std::int32_t OwnPid() {
  std::error_code none;
  const std::string self = std::filesystem::read_symlink("/proc/self", none);
  return none || self.empty() ? getpid() : std::atoi(self.c_str());
}

bool IsInSight(const WorldMember& member) { return member.proc == ProcHere(); }

bool HasEnded(const WorldMember& member) {
  if (!IsInSight(member)) return false;
  if (OwnPid() == getpid()) return LifeOf({member.pid, member.start_time}).HasEnded();
  const auto stat = ReadProcessStat(member.pid);
  if (!stat) return stat.status().code() == Code::kNotFound;
  return stat->start_ticks != member.start_time || stat->ended() || stat->exiting;
}

bool InsertOpenIds(std::int32_t pid, std::uint64_t world, std::set<std::uint64_t>& ids) {
  std::error_code gone;
  const auto all = std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd", gone);
  for (auto at = begin(all); !gone && at != end(all); at.increment(gone)) {
    std::error_code none;
    const auto tag = ParseMemfdLink(std::filesystem::read_symlink(at->path(), none).native());
    if (tag && tag->world == world) ids.insert(tag->key.id);
  }
  return !gone || gone == std::errc::no_such_file_or_directory || gone == std::errc::no_such_process;
}

Result<std::shared_ptr<SimulatorWorld>> SimulatorWorld::InMemory(std::int32_t devices, Bytes capacity_per_device) {
  AMEM_TRY(CheckSettings(devices, capacity_per_device));
  Table* table = Table::Map(-1);
  if (table == nullptr) return Status(Code::kOutOfMemory, Errno("map the table of a simulated world"));
  table->Initialise(devices, capacity_per_device, false);
  return std::shared_ptr<SimulatorWorld>(new SimulatorWorld(table));
}

Result<std::shared_ptr<SimulatorWorld>> SimulatorWorld::Open(const std::filesystem::path& path, std::int32_t devices,
                                                             Bytes capacity_per_device) {
  AMEM_TRY(CheckSettings(devices, capacity_per_device));
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd && errno == ENOENT) {
    AMEM_TRY(MakeFile(path, sizeof(Table), [&](int file) -> Status {
      Table* table = Table::Map(file);
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
  Table* table = Table::Map(fd.get());
  if (table == nullptr) return Status(Code::kIo, Errno("map the simulated world " + path.string()));
  std::shared_ptr<SimulatorWorld> world(new SimulatorWorld(table));
  if (table->magic != kWorldMagic || table->version != kWorldVersion)
    return Status(Code::kCorrupt, path.string() + " is no simulated world of this version: remove it if no job uses it");
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
      table_->members[m].start_time = StartTicks(OwnPid());
      table_->members[m].proc = ProcHere();
      table_->members[m].pid = OwnPid();
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
  if (WorldEntry* entry = table_->Find(key)) {
    if (entry->references[member] == std::numeric_limits<std::uint16_t>::max()) return std::nullopt;
    if (entry->exported && !Table::Referenced(*entry)) --table_->lingering;
    ++entry->references[member];
    return Key{table_->IndexOf(*entry), key.id};
  }
  const auto index = table_->FreeIndex();
  if (!index) return std::nullopt;
  table_->Use(*index, key.id, device, bytes, member);
  table_->entries[*index].exported = 1;  // the caller knows it by its descriptor
  return Key{*index, key.id};
}

void SimulatorWorld::DropReference(std::uint32_t member, Key key) {
  const Guard guard(*table_);
  table_->DropReferenceOf(member, key);
}

void SimulatorWorld::MarkExported(Key key) {
  const Guard guard(*table_);
  if (WorldEntry* entry = table_->Find(key)) entry->exported = 1;
}

Bytes SimulatorWorld::InUse(std::int32_t device) {
  const Guard guard(*table_);
  table_->Refresh();
  return device >= 0 && device < table_->devices ? table_->used[device] : 0;
}

std::int32_t SimulatorWorld::DeviceNow(std::uint32_t member, std::int32_t device) const {
  if (device < 0 || device >= kMaxDevices) return device;
  const std::int32_t moved = table_->members[member].moved[static_cast<std::size_t>(device)];
  return moved == 0 ? device : moved - 1;
}

// ---- multicast objects, shared by all processes of the world

std::optional<SimulatorWorld::Key> SimulatorWorld::AddMulticast(std::uint32_t member, std::uint32_t devices, Bytes bytes) {
  const Guard guard(*table_);
  const auto room = std::ranges::find_if(table_->multicasts, [](const auto& one) { return one.id == 0; });
  const auto index = table_->FreeIndex();
  if (room == table_->multicasts.end() || !index) return std::nullopt;
  const std::uint64_t id = table_->next_id++;
  table_->Use(*index, id, kHostMemory, bytes, member);
  *room = {};
  room->devices = devices;
  room->bytes = bytes;
  room->id = id;
  return Key{*index, id};
}

int SimulatorWorld::AddDevice(Key key, std::int32_t device) {
  const Guard guard(*table_);
  WorldMulticast* multicast = table_->FindMulticast(key);
  if (multicast == nullptr) return cuda::kInvalidValue;
  const std::uint64_t bit = std::uint64_t{1} << static_cast<unsigned>(device);
  if ((multicast->added & bit) != 0) return cuda::kInvalidValue;
  if (multicast->IsComplete()) return cuda::kInvalidValue;
  multicast->added |= bit;
  return 0;
}

bool SimulatorWorld::IsComplete(Key key) {
  const Guard guard(*table_);
  const WorldMulticast* multicast = table_->FindMulticast(key);
  return multicast != nullptr && multicast->IsComplete();
}

int SimulatorWorld::Bind(std::uint32_t member, Key key, const Binding& wanted) {
  const Guard guard(*table_);
  WorldMulticast* multicast = table_->FindMulticast(key);
  WorldEntry* memory = table_->Find(wanted.memory);
  if (multicast == nullptr || memory == nullptr) return cuda::kInvalidValue;
  if ((multicast->added >> static_cast<unsigned>(wanted.device) & 1) == 0) return cuda::kInvalidDevice;
  if (!multicast->IsComplete()) return cuda::kNotReady;
  if (wanted.offset > multicast->bytes || wanted.bytes > multicast->bytes - wanted.offset) return cuda::kInvalidValue;
  WorldBinding* room = nullptr;
  for (WorldBinding& one : multicast->bindings) {
    if (one.bytes == 0) {
      room = room == nullptr ? &one : room;
    } else if (one.device == wanted.device && one.offset < wanted.offset + wanted.bytes &&
               wanted.offset < one.offset + one.bytes) {
      return cuda::kInvalidValue;
    }
  }
  if (room == nullptr || memory->references[member] == std::numeric_limits<std::uint16_t>::max()) return cuda::kOutOfMemory;
  ++memory->references[member];
  *room = {wanted, member};
  return 0;
}

int SimulatorWorld::Unbind(std::uint32_t member, Key key, std::int32_t device, Bytes offset, Bytes bytes) {
  const Guard guard(*table_);
  WorldMulticast* multicast = table_->FindMulticast(key);
  if (multicast == nullptr || bytes == 0) return cuda::kInvalidValue;
  for (WorldBinding& one : multicast->bindings) {
    if (one.bytes != bytes || one.offset != offset || one.device != device || one.member != member) continue;
    const Key memory = one.memory;
    one = {};
    table_->DropReferenceOf(member, memory);
    return 0;
  }
  return cuda::kInvalidValue;
}

}  // namespace amem
