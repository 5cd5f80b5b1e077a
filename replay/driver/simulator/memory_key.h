// The name of an allocation in a simulated world's table and in its memfd.
#pragma once

#include <cstdint>

namespace amem {

struct SimulatedMemoryKey {
  std::uint32_t index = 0;  // where to look first in the table
  std::uint64_t id = 0;     // never reused
  friend bool operator==(const SimulatedMemoryKey&, const SimulatedMemoryKey&) = default;
};

}  // namespace amem
