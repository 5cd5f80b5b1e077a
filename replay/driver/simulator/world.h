// The simulator's world: which device memory exists, how much of it, and which members hold references to it.
//
// One world is one host with its GPUs. It lives in a file that the processes of a job map (Open), or in one process (InMemory).
// Every simulator attaches as one member; a member whose process died without detaching is found by its pid and start time, and
// its references drop, whenever a member asks how much is in use or finds too little free. A process killed while it held the
// lock leaves the table usable.
//
// Memory is counted from Add until no member holds a reference and no descriptor that was exported is open in any member's
// process. (A descriptor that is only in flight through a socket is not seen; importing it counts the memory again.)
//
// Thread-safe and process-safe. A world in memory must not be used after a fork by the child.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "replay/driver/simulator/memory_key.h"
#include "statemachine/types.h"

namespace amem {

class SimulatorWorld {
 public:
  static constexpr std::uint32_t kMembers = 128;            // simulators attached at once, all processes together
  static constexpr std::uint32_t kAllocations = 64 * 1024;  // allocations at once
  static constexpr std::uint32_t kMulticasts = 256;         // multicast objects at once
  static constexpr std::uint32_t kBindings = 128;           // to one multicast object
  static constexpr std::int32_t kMaxDevices = 64;
  static constexpr std::int32_t kHostMemory = -1;  // "device" of memory that is counted to no device

  using Key = SimulatedMemoryKey;

  static Result<std::shared_ptr<SimulatorWorld>> InMemory(std::int32_t devices, Bytes capacity_per_device);
  // Joins the world in this file, or makes it. kInvalid: it exists with other devices or capacity; kCorrupt: it is no world.
  // Remove the file when the job is over; nothing else does.
  static Result<std::shared_ptr<SimulatorWorld>> Open(const std::filesystem::path& path, std::int32_t devices,
                                                      Bytes capacity_per_device);
  ~SimulatorWorld();
  SimulatorWorld(const SimulatorWorld&) = delete;
  SimulatorWorld& operator=(const SimulatorWorld&) = delete;

  [[nodiscard]] std::uint64_t id() const;
  [[nodiscard]] std::int32_t devices() const;
  [[nodiscard]] Bytes capacity() const;  // of each device

  Result<std::uint32_t> Attach();     // kRefused: all places are taken
  void Detach(std::uint32_t member);  // drops all its references

  // New memory with one reference; nothing if the device has not enough left, or the table is full.
  std::optional<Key> Add(std::uint32_t member, std::int32_t device, Bytes bytes);
  // One more reference. Memory that was forgotten in between (only a descriptor held it) is counted again, under the same id.
  // Nothing if the table is full.
  std::optional<Key> AddReference(std::uint32_t member, Key key, std::int32_t device, Bytes bytes);
  void DropReference(std::uint32_t member, Key key);
  void MarkExported(Key key);  // from now on open descriptors hold it, too

  // Multicast objects: memory of the host with an account of devices and bindings. Bind holds a reference to the memory for the
  // member. The numbers are CUresults; simulator.h has the rules.
  std::optional<Key> AddMulticast(std::uint32_t member, std::uint32_t devices, Bytes bytes);
  int AddDevice(Key multicast, std::int32_t device);
  [[nodiscard]] bool IsComplete(Key multicast);  // all of its devices were added
  struct Binding {
    std::int32_t device = 0;
    Bytes offset = 0, bytes = 0;  // in the object
    Key memory;
    Bytes memory_offset = 0;
  };
  int Bind(std::uint32_t member, Key multicast, const Binding& binding);
  int Unbind(std::uint32_t member, Key multicast, std::int32_t device, Bytes offset, Bytes bytes);
  [[nodiscard]] std::vector<Binding> Bindings(Key multicast);  // by device and offset

  // ---- the driver's checkpoint of a process (world_checkpoint.cpp), by any process of the world on any other
  enum class ProcessState : std::uint32_t { kRunning, kLocked, kCheckpointed, kFailed };
  struct DevicePair {
    std::int32_t from = 0, to = 0;
  };
  // Around each driver call of the member: waits until its process may make calls. False: its process is lost (kFailed).
  bool EnterCall(std::uint32_t member);
  void LeaveCall(std::uint32_t member);
  void SetBusy(std::uint32_t member, bool busy);                // its work does not end, so that it cannot be locked
  std::optional<ProcessState> StateOf(std::int32_t pid);        // nothing: no member is of that process
  int LockProcess(std::int32_t pid, std::uint32_t timeout_ms);  // CUresult, as those below; 0: no timeout
  // Its memory is no longer counted to the devices. Succeeds although memory is shared with other processes, as measured.
  int CheckpointProcess(std::int32_t pid);
  // Of a process that shared memory at its checkpoint: NOT_SUPPORTED, and it is lost, as measured. OUT_OF_MEMORY where a
  // device lacks room, and the process stays as it was. Pairs, if any, must name every device that it had memory on.
  int RestoreProcess(std::int32_t pid, std::span<const DevicePair> pairs);
  int UnlockProcess(std::int32_t pid);
  [[nodiscard]] std::int32_t DeviceNow(std::uint32_t member, std::int32_t device) const;  // where a restore put it
  struct Use {
    std::int32_t pid = 0;
    Bytes bytes = 0;
  };
  [[nodiscard]] std::vector<Use> UsesOf(std::int32_t device);  // by process that holds memory there now

  [[nodiscard]] Bytes InUse(std::int32_t device);
  [[nodiscard]] std::uint32_t Members();  // attached and alive

  // For tests: takes the lock and never gives it back, as a process killed at that instant would.
  void LockForEver();

 private:
  struct Table;
  class Guard;
  struct OfProcess;
  SimulatorWorld(Table* table) : table_(table) {}  // NOLINT(google-explicit-constructor)

  Table* table_;
};

}  // namespace amem
