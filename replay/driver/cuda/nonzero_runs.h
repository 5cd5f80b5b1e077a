// From a bitmap of pages that are not zero to runs of blocks. No CUDA here.
#pragma once

#include <cstdint>
#include <span>

#include "replay/driver/driver.h"

namespace amem {

// Bit p % 32 of words[p / 32] says that page p (of 4096 bytes) of the extent is not zero; bits past its end are ignored.
// Appends the runs of blocks of `block` bytes (a power of two from 4096) that have such a page, and their count.
void AppendRuns(const Extent& extent, std::span<const std::uint32_t> words, Bytes block, NonZero& to);

}  // namespace amem
