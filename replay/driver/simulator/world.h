// A simulator's world: which device memory exists, how much of it, and which members hold references.
//
// A world is one host with its GPUs. It lives in a file that the processes of a job map (Open), or in one process (InMemory).
// Every simulator attaches as a member. A member whose process died is found by pid and start time whenever a member asks for
// usage or finds too little free memory, and its references drop. A process killed while it held the lock leaves the table
// usable.
//
// Memory counts from Add until no member holds a reference and no exported descriptor is open in a member's process. (A
// descriptor in flight through a socket is not seen; importing it counts the memory again.)
//
// Thread-safe and process-safe. A child must not use a world in memory after a fork.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "journal/base/no_copies.h"
#include "statemachine/types.h"

namespace amem {

// The name of an allocation in a world's table and in its memfd.
struct SimulatedMemoryKey {
  std::uint32_t index = 0;  // where to look first in the table
  std::uint64_t id = 0;     // never reused
  friend bool operator==(const SimulatedMemoryKey&, const SimulatedMemoryKey&) = default;
};

class SimulatorWorld : NoCopies {
 public:
  static constexpr std::uint32_t kMembers = 128;            // of all processes together
  static constexpr std::uint32_t kAllocations = 64 * 1024;  // allocations at once
  static constexpr std::uint32_t kMulticasts = 256;         // multicast objects at once
  static constexpr std::uint32_t kBindings = 128;           // to one multicast object
  static constexpr std::int32_t kMaxDevices = 64;
  static constexpr std::int32_t kHostMemory = -1;  // "device" of memory that counts to no device

  using Key = SimulatedMemoryKey;

  static Result<std::shared_ptr<SimulatorWorld>> InMemory(std::int32_t devices, Bytes capacity_per_device);
  // Joins or makes the world in this file. kInvalid: it has other devices or another capacity; kCorrupt: it is no world. The
  // caller removes the file when the job is over.
  static Result<std::shared_ptr<SimulatorWorld>> Open(const std::filesystem::path& path, std::int32_t devices,
                                                      Bytes capacity_per_device);
  ~SimulatorWorld();

  [[nodiscard]] std::uint64_t id() const;
  [[nodiscard]] std::int32_t devices() const;
  [[nodiscard]] Bytes capacity() const;  // of each device

  Result<std::uint32_t> Attach();     // kRefused: no place is free
  void Detach(std::uint32_t member);  // drops all its references

  // New memory with one reference; nothing: the device or the table is full.
  std::optional<Key> Add(std::uint32_t member, std::int32_t device, Bytes bytes);
  // Adds a reference. Memory that was forgotten meanwhile, because only a descriptor held it, is counted again under the same
  // id. Nothing: the table is full.
  std::optional<Key> AddReference(std::uint32_t member, Key key, std::int32_t device, Bytes bytes);
  void DropReference(std::uint32_t member, Key key);
  void MarkExported(Key key);  // open descriptors hold it from now on

  // Multicast objects: host memory with a list of devices and bindings. Bind holds a reference to the memory. The numbers are
  // CUresults; simulator.h has the rules.
  std::optional<Key> AddMulticast(std::uint32_t member, std::uint32_t devices, Bytes bytes);
  int AddDevice(Key multicast, std::int32_t device);
  [[nodiscard]] bool IsComplete(Key multicast);  // all devices were added
  struct Binding {
    std::int32_t device = 0;
    Bytes offset = 0, bytes = 0;  // in the object
    Key memory;
    Bytes memory_offset = 0;
  };
  int Bind(std::uint32_t member, Key multicast, const Binding& binding);
  int Unbind(std::uint32_t member, Key multicast, std::int32_t device, Bytes offset, Bytes bytes);

  [[nodiscard]] std::int32_t DeviceNow(std::uint32_t member, std::int32_t device) const;  // where a restore moved it
  [[nodiscard]] Bytes InUse(std::int32_t device);

  // For tests, and the stand-ins' checkpoint of a process (world_table.h).
  struct Table;
  class Guard;
  [[nodiscard]] Table& table() const { return *table_; }

 private:
  SimulatorWorld(Table* table) : table_(table) {}  // NOLINT(google-explicit-constructor)

  Table* table_;
};

}  // namespace amem
