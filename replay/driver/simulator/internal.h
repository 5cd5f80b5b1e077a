// What the simulator's source files share; nobody else includes this.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "journal/base/unique_fd.h"
#include "replay/driver/result_names.h"
#include "replay/driver/simulator/simulator.h"

namespace amem {

struct Simulator::Physical {
  SimulatorWorld::Key key;
  Bytes bytes = 0;
  AllocationProperties properties;  // location in this process's ordinals
  std::int32_t world_device = SimulatorWorld::kHostMemory;
  UniqueFd descriptor;  // made when it is first needed
  DriverHandle handle;
  std::uint32_t references = 0;
  std::uint32_t mappings = 0;
  bool imported = false;
};

struct Simulator::PinnedRegistry {
  std::mutex mutex;
  std::map<const std::byte*, Bytes> buffers;

  bool Holds(const std::byte* from, Bytes bytes) {
    const std::lock_guard lock(mutex);
    auto it = buffers.upper_bound(from);
    if (it == buffers.begin()) return false;
    --it;
    return bytes <= it->second && static_cast<Bytes>(from - it->first) <= it->second - bytes;
  }
};

struct Simulator::Faults {
  struct Planned {
    std::uint64_t at_count = 0;
    int result = 0;
  };
  std::mutex mutex;
  std::array<std::vector<Planned>, kCalls.size()> planned;
  std::array<std::chrono::nanoseconds, kCalls.size()> latency{};
  std::shared_ptr<const Hook> hook;
};

}  // namespace amem
