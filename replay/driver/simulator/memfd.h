// The descriptors behind simulated memory: sealed memfds whose names say which allocation of which world they are.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "journal/base/unique_fd.h"
#include "replay/driver/simulator/world.h"
#include "statemachine/types.h"

namespace amem {

struct MemfdTag {
  std::uint64_t world = 0;
  SimulatedMemoryKey key;
  AllocationProperties properties;  // the location's id is a device of the world
  friend bool operator==(const MemfdTag&, const MemfdTag&) = default;
};

// A memfd without pages. If descriptors run out, the process's soft limit is raised once.
Result<UniqueFd> MakeTaggedMemfd(const MemfdTag& tag, Bytes bytes);

// What a descriptor is; nothing if no simulator made it.
struct TaggedMemfd {
  MemfdTag tag;
  Bytes bytes = 0;
};
std::optional<TaggedMemfd> ReadTaggedMemfd(int fd);

// The tag in the target of /proc/PID/fd/N.
std::optional<MemfdTag> ParseMemfdLink(std::string_view link);

}  // namespace amem
