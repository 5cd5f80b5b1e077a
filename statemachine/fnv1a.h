// FNV-1a with 64 bits: the checksums and keys that are the same on every machine. It finds accidents, not forgeries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace amem {

class Fnv1a {
 public:
  static constexpr std::uint64_t kOffsetBasis = 0xcbf29ce484222325ULL;

  constexpr explicit Fnv1a(std::uint64_t offset_basis = kOffsetBasis) : hash_(offset_basis) {}
  constexpr void AddByte(std::uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3ULL; }
  constexpr void Add(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) AddByte(static_cast<std::uint8_t>(byte));
  }
  constexpr void Add(std::uint64_t word) {  // its bytes, the lowest first
    for (int shift = 0; shift < 64; shift += 8) AddByte(static_cast<std::uint8_t>(word >> shift));
  }
  [[nodiscard]] constexpr std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_;
};

}  // namespace amem
