#include "journal/base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace amem {
namespace {

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables MakeTables() {
  Tables t{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) != 0 ? 0x82f63b78U : 0U);
    t[0][i] = c;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t i = 0; i < 256; ++i) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xff];
  }
  return t;
}
constexpr Tables kCrcTables = MakeTables();

std::uint64_t Load(const std::byte* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t WithInstruction(std::span<const std::byte> bytes) {
  std::uint64_t crc = 0xffffffffU;
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) crc = _mm_crc32_u64(crc, Load(at));
  auto tail = static_cast<std::uint32_t>(crc);
  for (; left > 0; --left, ++at) tail = _mm_crc32_u8(tail, static_cast<unsigned char>(*at));
  return ~tail;
}
const bool kHaveInstruction = __builtin_cpu_supports("sse4.2") != 0;
#endif

}  // namespace

std::uint32_t Crc32cPortable(std::span<const std::byte> bytes) {
  std::uint32_t crc = 0xffffffffU;
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {  // eight tables, eight bytes a step
    const std::uint64_t x = Load(at) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kCrcTables[7 - k][(x >> (8 * k)) & 0xff];
  }
  for (; left > 0; --left, ++at) crc = (crc >> 8) ^ kCrcTables[0][(crc ^ static_cast<std::uint32_t>(*at)) & 0xff];
  return ~crc;
}

std::uint32_t Crc32c(std::span<const std::byte> bytes) {
#if defined(__x86_64__)
  if (kHaveInstruction) return WithInstruction(bytes);
#endif
  return Crc32cPortable(bytes);
}

}  // namespace amem
