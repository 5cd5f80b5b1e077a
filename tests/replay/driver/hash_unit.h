// The hash of a whole unit, on the CPU.
#pragma once

#include <cstdint>
#include <span>

#include "replay/driver/content_hash.h"

namespace amem {

// The contents are a multiple of 4096 bytes; `pages` (if not null) gets the bitmap.
inline ContentHash HashUnit(const ContentKey& key, std::span<const std::byte> contents, std::uint32_t* pages = nullptr) {
  UnitHasher hasher(key);
  for (unsigned page = 0; page < contents.size() / kPageBytes; ++page)
    hasher.Add(page, contents.subspan(std::size_t{page} * kPageBytes).first<kPageBytes>());
  if (pages != nullptr) *pages = hasher.pages();
  return hasher.hash();
}

}  // namespace amem
