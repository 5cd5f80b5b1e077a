// What the kernels of nonzero_kernels.cu and the code that launches them agree on. Included by CUDA code too: plain types only.
#pragma once

#include <cstdint>

#include "replay/driver/content_key.h"

namespace amem::sparse {

inline constexpr unsigned kPiecePages = 16;  // what one thread block copies at once, at most
inline constexpr unsigned kThreads = 256;    // of a thread block, in every kernel; a warp looks at a unit, or clears it

// Device memory, for the kernels that find and clear. A table of them is ordered by first_unit, without gaps; every extent
// begins with a unit of its own, the last of which may be part only.
struct TableExtent {
  std::uint64_t address;
  std::uint32_t first_unit;
  std::uint32_t pages;
};

// A part of device memory and its place in the other memory of a copy.
struct TablePiece {
  std::uint64_t address;
  std::uint32_t first_page;  // from where the kernel is told that the other memory begins
  std::uint32_t pages;
};

static_assert(sizeof(TableExtent) == 16 && sizeof(TablePiece) == 16);

}  // namespace amem::sparse
