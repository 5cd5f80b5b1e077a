// The events of one rank of the reference workload, in their proportions, for benchmarks.
#pragma once

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "statemachine/event.h"

namespace amem::test {

// Per kind, how many of them the trace of one rank has: 30 795 calls in all.
inline std::vector<EventBody> Mix() {
  const CallSite site{{0xf05da, 0xf11cd, 0xf135f, 0x8a04f, 0}};
  const AllocationProperties properties{1, 1, {LocationType::kDevice, 3}, 0, 1, 0, 0};
  const Address at{0x7f1200000000};
  const Bytes bytes = 2 << 20;
  const std::pair<EventBody, int> kinds[] = {
      {AllocationReleased{AllocationId{17}}, 5913},
      {RangeFreed{at, bytes}, 2956},
      {Unmapped{at, bytes}, 2956},
      {AllocationRetained{AllocationId{17}, at}, 2956},
      {RangeReserved{at, bytes, bytes, {}, 0, site}, 2956},
      {Mapped{at, bytes, 0, AllocationId{17}, 0}, 2956},
      {AccessSet{at, bytes, {{{LocationType::kDevice, 3}, 3}}}, 2956},
      {AllocationCreated{AllocationId{17}, bytes, properties, 0, DriverHandle{0x1b4fcdf0}, site, {}}, 1773},
      {Imported{AllocationId{17}, {SessionId{5}, AllocationId{9}}, bytes, properties, 1, DriverHandle{0x1b4fcdf0}, site, {}},
       1184},
      {Exported{AllocationId{17}, 1}, 1184},
      {HostAllocated{at, bytes, 2, false}, 48},
  };
  std::vector<EventBody> mix;
  for (const auto& [body, count] : kinds) mix.insert(mix.end(), static_cast<std::size_t>(count), body);
  std::shuffle(mix.begin(), mix.end(), std::mt19937(1));
  return mix;
}

}  // namespace amem::test
