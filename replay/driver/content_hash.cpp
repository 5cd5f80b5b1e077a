#include "replay/driver/content_hash.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

namespace amem {
namespace {

constexpr std::uint64_t kHalf = 0xffffffff;

// Below 2^61 + 8, and the same modulo the prime.
std::uint64_t Folded(std::uint64_t value) { return (value & kHashPrime) + (value >> 61); }

std::uint64_t Times(std::uint64_t factor, std::uint64_t half) {
  const std::uint64_t low = (factor & kHalf) * half, high = (factor >> 32) * half;
  const std::uint64_t sum = low + (high << 32);
  const std::uint64_t over = (high >> 32) + (sum < low ? 1 : 0);  // times 2^64, which is 8 modulo the prime
  return Folded((sum & kHashPrime) + (sum >> 61) + (over << 3));
}

std::uint64_t Reduced(std::uint64_t value) {
  value = Folded(value);
  return value >= kHashPrime ? value - kHashPrime : value;
}

Status Randomize(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t some = getrandom(bytes.data(), bytes.size(), 0);
    if (some < 0 && errno == EINTR) continue;
    if (some <= 0) return {Code::kIo, std::string("getrandom for the key of contents: ") + std::strerror(errno)};
    bytes = bytes.subspan(static_cast<std::size_t>(some));
  }
  return {};
}

bool IsZero(std::span<const std::byte, kPageBytes> page) {
  return page[0] == std::byte{} && std::memcmp(page.data(), page.data() + 1, page.size() - 1) == 0;
}

std::array<std::uint64_t, kHashPasses> SumsOf(const ContentKey& key, std::span<const std::byte, kPageBytes> page) {
  std::array<std::uint64_t, kHashPasses> sums{};
  for (unsigned part = 0; part < kHashParts; ++part) {
    for (unsigned lane = 0; lane < kHashLanes; ++lane) {
      std::uint32_t m[kPartWords];
      std::memcpy(m, page.data() + (part * kHashLanes + lane) * sizeof m, sizeof m);
      const std::uint32_t* const k = key.words + lane * kLaneWords + part * kPartWords;
      for (unsigned j = 0; j < kHashPasses; ++j) {
        for (unsigned i = 0; i < kPartWords; i += 2)
          sums[j] += std::uint64_t{m[i] + k[i + 2 * j]} * std::uint64_t{m[i + 1] + k[i + 1 + 2 * j]};
      }
    }
  }
  return sums;
}

}  // namespace

Result<std::shared_ptr<const ContentKey>> RandomContentKey() {
  auto key = std::make_shared<ContentKey>();
  AMEM_TRY(Randomize(std::as_writable_bytes(std::span(key.get(), 1))));
  for (std::uint64_t& factor : std::span(&key->factors[0][0], sizeof key->factors / sizeof(std::uint64_t)))
    while ((factor &= kHashPrime) == kHashPrime) AMEM_TRY(Randomize(std::as_writable_bytes(std::span(&factor, 1))));
  return std::shared_ptr<const ContentKey>(std::move(key));
}

void UnitHasher::Add(unsigned page, std::span<const std::byte, kPageBytes> contents) {
  if (IsZero(contents)) return;
  pages_ |= 1U << page;
  const auto sums = SumsOf(key_, contents);
  for (unsigned i = 0; i < kSumFactors; ++i) {
    const std::uint64_t half = (i & 4) != 0 ? sums[i & 3] >> 32 : sums[i & 3] & kHalf;
    std::uint64_t& hash = hashes_[i >> 3];
    hash = Folded(hash + Times(key_.factors[page][i], half));
  }
}

ContentHash UnitHasher::hash() const {
  const auto& last = key_.factors[kUnitPages];
  return {Reduced(hashes_[0] + Times(last[0], pages_)), Reduced(hashes_[1] + Times(last[8], pages_))};
}

}  // namespace amem
