// The descriptors behind simulated memory: sealed memfds whose name says which allocation of which world they are.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "journal/base/unique_fd.h"
#include "replay/driver/simulator/memory_key.h"
#include "statemachine/types.h"

namespace amem {

struct MemfdTag {
  std::uint64_t world = 0;
  SimulatedMemoryKey key;
  AllocationProperties properties;  // the location's id is a device of the world, not of a process
  friend bool operator==(const MemfdTag&, const MemfdTag&) = default;
};

// A memfd of `bytes` bytes without pages. When descriptors run out, the soft limit of the process is raised once.
Result<UniqueFd> MakeTaggedMemfd(const MemfdTag& tag, Bytes bytes);

// What a descriptor is, or nothing for one that no simulator made.
struct TaggedMemfd {
  MemfdTag tag;
  Bytes bytes = 0;
};
std::optional<TaggedMemfd> ReadTaggedMemfd(int fd);

// The tag in the target of a link /proc/PID/fd/N.
std::optional<MemfdTag> ParseMemfdLink(std::string_view link);

}  // namespace amem
