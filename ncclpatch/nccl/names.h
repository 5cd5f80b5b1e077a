// The name by which all ranks know a communicator, from what they all pass to NCCL. 0: unknown, where they pass nothing in
// common: a grown communicator's joining ranks know the unique id alone, and most staying ones do not.
#pragma once

#include <cstdint>
#include <span>

#include "ncclpatch/nccl/communicators.h"

namespace amem::nccl::names {

// `version`: as ncclGetVersion says it; 0: unknown.
std::uint64_t OfUniqueId(const UniqueId& id, int version) noexcept;

// A part that a call makes of another communicator. Calls of one series are made by the same ranks, so all of these count them
// alike.
struct Part {
  std::uint64_t series = 0;  // 0: its ranks have nothing in common
  std::uint64_t color = 0;   // tells parts apart that one call makes on different ranks
};
Part SplitBy(int color) noexcept;
// A rank that is left out makes no such call, but perhaps one that leaves out others.
Part ShrinkWithout(std::span<const int> ranks) noexcept;
// `number`: of the call in its series.
std::uint64_t OfPart(std::uint64_t parent, const Part& part, std::uint64_t number) noexcept;

// Of a communicator whose ranks are all in this process; no other process has it.
std::uint64_t OfThisProcess() noexcept;

}  // namespace amem::nccl::names
