// What names one allocation of a simulated world, in its table and in the memfds that hold its bytes.
#pragma once

#include <cstdint>

namespace amem {

struct SimulatedMemoryKey {
  std::uint32_t index = 0;  // where to look first in the world's table
  std::uint64_t id = 0;     // never used again
  friend bool operator==(const SimulatedMemoryKey&, const SimulatedMemoryKey&) = default;
};

}  // namespace amem
