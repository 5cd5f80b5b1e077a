// Whether contents are still those that were saved, without looking at what was saved: a hash of 128 bits, keyed at random.
//
// Contents are hashed in units of 128 KiB. A unit is 32 pages of 4096 bytes, the last of which may be missing.
//
//   pages   A bitmap: which pages have a byte that is not zero. Only those are hashed further.
//   sums    Of each such page four sums modulo 2^64, the hash NH of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway, 1999)
//           with words m of 32 bits, in the order that the kernel's lanes read them, and words k of the key:
//           sum j = sum over even i of (m[i] + k[i + 2j] mod 2^32) * (m[i+1] + k[i+1 + 2j] mod 2^32).
//   hashes  Two linear forms modulo the prime p = 2^61 - 1, in the bitmap and in both halves of all sums, each with a factor
//           below p of its own from the key.
//
// The bound. Two different contents of a unit have the same two hashes, for a key that is chosen at random and independently
// of both, with a probability below 2^-121:
//   1. Same bitmap: some page differs. Let i be the last pair of words that differs in it, and the key known but for what
//      follows. In sum j the words k[i + 2j] and k[i+1 + 2j] of the key occur with that pair for the first time: sums before j
//      have none so late, and pairs behind i add the same on both sides. Say m[i] differs (m[i+1] is alike). With k[i + 2j]
//      fixed, x = m[i] + k[i + 2j] and x' of the other contents differ, and the sums are equal for at most one of the 2^32
//      values of k[i+1 + 2j]: let y and y' be the second factors for one value and y + d, y' + d' for another, where d and d'
//      are the difference of the two values, D with 0 < D < 2^32, or D - 2^32. Were both equal, x d - x' d' = 0 modulo 2^64.
//      If d = d' that is (x - x') d, not zero and less than 2^64 in size. Else it is, but for the sign, x D + x' (2^32 - D),
//      which is above zero, as not both x and x' are zero, and less than 2^64. So sum j is equal with a probability of at most
//      2^-32 whatever the sums before it are, and all four are with at most 2^-128.
//   2. The bitmap or a half of a sum differs. All of them are below p, so they differ modulo p too, and each of the two linear
//      forms, whose factors are independent, has the same value with a probability of 1 / p: both, 1 / p^2 < 2^-121.99.
// Together below 2^-128 + 2^-121.99 < 2^-121.9. So a session that compares 2^40 units (128 PiB) misses a change with a
// probability below 2^-81. The key comes from getrandom, stays in this process and its GPU's memory, and no hash is written
// anywhere; contents cannot be chosen by who knows it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "replay/driver/content_key.h"
#include "statemachine/types.h"

namespace amem {

inline constexpr Bytes kUnitBytes = Bytes{kUnitPages} * kPageBytes;
constexpr std::size_t UnitsOf(Bytes bytes) { return (bytes + kUnitBytes - 1) / kUnitBytes; }
// All pages of the unit that begins `left` bytes before the end of some memory, as a bitmap.
constexpr std::uint32_t PagesOf(Bytes left) {
  return left >= kUnitBytes ? ~std::uint32_t{0} : (std::uint32_t{1} << (left / kPageBytes)) - 1;
}
constexpr Bytes SizeOf(
    std::uint32_t pages) {  // mostly none or all; counting bits is a call where processors need not have an instruction
  if (pages == 0 || pages == ~std::uint32_t{0}) return pages == 0 ? 0 : kUnitBytes;
  return Bytes{kPageBytes} * static_cast<unsigned>(std::popcount(pages));
}

struct ContentHash {
  std::uint64_t first = 0, second = 0;
  friend bool operator==(const ContentHash&, const ContentHash&) = default;
};

Result<std::shared_ptr<const ContentKey>> RandomContentKey();

// What the kernel computes of one unit, on the CPU, page by page: pages that are known to be zero need not be added.
class UnitHasher {
 public:
  explicit UnitHasher(const ContentKey& key) : key_(key) {}
  void Add(unsigned page, std::span<const std::byte, kPageBytes> contents);  // each page once at most
  [[nodiscard]] std::uint32_t pages() const { return pages_; }
  [[nodiscard]] ContentHash hash() const;

 private:
  const ContentKey& key_;
  std::uint32_t pages_ = 0;
  std::uint64_t hashes_[2] = {};
};

}  // namespace amem
