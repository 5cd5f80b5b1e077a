// What the kernel that hashes contents and its twin on the CPU agree on. Included by CUDA code too: plain types only.
#pragma once

#include <cstdint>

namespace amem {

inline constexpr unsigned kPageBytes = 4096;                     // the unit of everything that is not zero
inline constexpr unsigned kUnitPages = 32;                       // what is hashed at once, and one word of a bitmap
inline constexpr unsigned kHashLanes = 32;                       // that share a page; each has every 32nd part of it,
inline constexpr unsigned kHashParts = 8;                        // so many of them,
inline constexpr unsigned kPartWords = 4;                        // of so many words of 32 bits
inline constexpr unsigned kLaneWords = kHashParts * kPartWords;  // of a page, for one lane
inline constexpr unsigned kHashPasses = 4;                       // sums of a page
inline constexpr unsigned kSumFactors = 16;                      // a factor for each half of a sum, for both hashes
inline constexpr std::uint64_t kHashPrime = (std::uint64_t{1} << 61) - 1;

// Random, and known to nobody else; content_hash.h says what for.
struct ContentKey {
  alignas(16) std::uint32_t words[kHashLanes * kLaneWords + 8];  // two less are used
  // Below the prime. Of page p: [8 * hash + 4 * half + sum]; the last row is for the bitmap, which has one factor for each
  // hash.
  std::uint64_t factors[kUnitPages + 1][kSumFactors];
};

}  // namespace amem
