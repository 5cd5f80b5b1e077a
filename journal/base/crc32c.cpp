#include "journal/base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace amem {
namespace {

constexpr auto kCrcOfByte = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) table[i] = (table[i] >> 1) ^ ((table[i] & 1) != 0 ? 0x82f63b78U : 0U);
  }
  return table;
}();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t WithInstruction(std::span<const std::byte> bytes) {
  std::uint64_t crc = 0xffffffffU;
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    crc = _mm_crc32_u64(crc, word);
  }
  auto tail = static_cast<std::uint32_t>(crc);
  for (; left > 0; --left, ++at) tail = _mm_crc32_u8(tail, static_cast<unsigned char>(*at));
  return ~tail;
}
const bool kHaveInstruction = __builtin_cpu_supports("sse4.2") != 0;
#endif

}  // namespace

std::uint32_t Crc32cPortable(std::span<const std::byte> bytes) {
  std::uint32_t crc = 0xffffffffU;
  for (const std::byte byte : bytes) crc = (crc >> 8) ^ kCrcOfByte[(crc ^ static_cast<std::uint32_t>(byte)) & 0xff];
  return ~crc;
}

std::uint32_t Crc32c(std::span<const std::byte> bytes) {
#if defined(__x86_64__)
  if (kHaveInstruction) return WithInstruction(bytes);
#endif
  return Crc32cPortable(bytes);
}

}  // namespace amem
