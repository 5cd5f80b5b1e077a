// What tests ask about the simulator: what it holds, in words; whose memory is mapped somewhere; and what a store to a mapped
// multicast object would reach.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "replay/driver/simulator/simulator.h"
#include "replay/driver/simulator/world_table.h"

namespace amem {

inline std::string ToText(const SimulatorSnapshot& snapshot) {
  const auto number = [](const auto value) { return std::to_string(value); };
  std::string text;
  for (const SimulatedHandle& one : snapshot.handles) {
    text += "handle " + Hex(one.handle) + ": " + number(one.bytes) + " bytes at location " +
            number(one.properties.location.id) + ", " + number(one.references) + " references, " + number(one.mappings) +
            " mappings" + (one.imported ? ", imported\n" : "\n");
  }
  for (const Extent& one : snapshot.ranges) text += "range " + Hex(one.address) + ": " + number(one.bytes) + " bytes\n";
  for (const SimulatedMapping& one : snapshot.mappings) {
    text += "mapping " + Hex(one.address) + ": " + number(one.bytes) + " bytes of handle " + Hex(one.handle) + ", access";
    for (const AccessDescriptor& access : one.access) text += " " + number(access.location.id) + "=" + number(access.flags);
    text += one.access.empty() ? " none\n" : "\n";
  }
  return text;
}

inline std::optional<SimulatorWorld::Key> MemoryAt(Simulator& sim, Address address) {
  const auto mapping = sim.MappingAt(address);
  return mapping.ok() ? std::optional(mapping->memory) : std::nullopt;
}

struct Reached {
  std::int32_t device = 0;  // of the world
  SimulatorWorld::Key memory;
  Bytes offset = 0;
  friend bool operator==(const Reached&, const Reached&) = default;
};
// For each device with memory bound there, by device. Empty: no multicast object, or not all devices were added.
inline std::vector<Reached> Reach(Simulator& sim, Address address) {
  const auto mapping = sim.MappingAt(address);
  if (!mapping.ok()) return {};
  SimulatorWorld::Table& world = sim.world()->table();
  const SimulatorWorld::Guard guard(world);
  const WorldMulticast* const object = world.FindMulticast(mapping->memory);
  if (object == nullptr || !object->IsComplete()) return {};
  const Bytes at = address.value - mapping->address.value;
  std::vector<Reached> reached;
  for (const WorldBinding& one : object->bindings) {
    if (one.bytes != 0 && one.offset <= at && at - one.offset < one.bytes)
      reached.push_back({one.device, one.memory, one.memory_offset + at - one.offset});
  }
  std::ranges::sort(reached, {}, &Reached::device);
  return reached;
}

}  // namespace amem
