// Contents of megabytes, word by word and many times over: neither instrumented nor left unoptimised. A sanitizer's memcpy and
// memcmp look at each byte, and ThreadSanitizer's need four times the memory for that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "statemachine/types.h"

namespace amem::test {

#ifdef __clang__  // which knows no such attribute
#define AMEM_BULK __attribute__((no_sanitize("address", "thread", "undefined")))
#else
#define AMEM_BULK __attribute__((optimize("O2"), no_sanitize("address", "thread", "undefined")))
#endif
AMEM_BULK inline std::uint64_t Word(Bytes i, unsigned seed) { return (i + 1) * 0x9E3779B97F4A7C15U + seed; }
// Different for every place that a mistake could exchange for another.
AMEM_BULK inline void Fill(std::byte* memory, Bytes bytes, unsigned seed) {
  auto* const words = reinterpret_cast<std::uint64_t*>(memory);
  for (Bytes i = 0; i < bytes / 8; ++i) words[i] = Word(i, seed);
}
AMEM_BULK inline bool Holds(const std::byte* memory, Bytes bytes, unsigned seed) {
  const auto* const words = reinterpret_cast<const std::uint64_t*>(memory);
  for (Bytes i = 0; i < bytes / 8; ++i) {
    if (words[i] != Word(i, seed)) return false;
  }
  return true;
}

}  // namespace amem::test
