// The name by which all ranks know a communicator: of one made from a unique id, the hash of the id's bytes as NCCL computes it
// (its commHash, which its log calls commId from 2.26 on); of a part of another, a hash of the parent's name and of the calls
// that made parts of it.
#include "ncclpatch/nccl/names.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace amem::nccl::names {
namespace {

constexpr int kWordwiseSince = 22600;  // as ncclGetVersion counts: 2.26.0

// DJB2a. char has the sign that it has in NCCL, which is built for the same processor.
std::uint64_t BytewiseHash(const UniqueId& id) {
  std::uint64_t hash = 5381;
  for (const char byte : id.bytes) hash = (hash * 33) ^ static_cast<std::uint64_t>(byte);
  return hash;
}

// Mixes the two accumulators before each word, which is then added to the first.
std::uint64_t WordwiseHash(std::span<const std::uint64_t> words) {
  std::uint64_t first = 1 ^ words.size_bytes(), second = 1;
  for (const std::uint64_t word : words) {
    first += second;
    second ^= first;
    first = (first ^ (first >> 31)) * 0x9de62bbc8cef3ce3;
    second = (second ^ (second >> 32)) * 0x485cd6311b599e79;
    first += word;
  }
  std::uint64_t hash = (first ^ (first >> 31)) * 0xbac3bd562846de6b + second;
  hash = (hash ^ (hash >> 32)) * 0x995a187a14e7b445;
  return hash;
}

}  // namespace

std::uint64_t OfUniqueId(const UniqueId& id, int version) noexcept {
  if (version > 0 && version < kWordwiseSince) return BytewiseHash(id);
  std::array<std::uint64_t, sizeof id.bytes / sizeof(std::uint64_t)> words;
  std::memcpy(words.data(), id.bytes, sizeof id.bytes);
  return WordwiseHash(words);
}

std::uint64_t OfPart(std::uint64_t parent, const Part& part, std::uint64_t number) noexcept {
  if (parent == 0) return 0;
  const std::array words = {parent, part.series, number, part.color};
  return std::max<std::uint64_t>(WordwiseHash(words), 1);
}

std::uint64_t OfThisProcess() noexcept {
  std::uint64_t name = 0;
  return getrandom(&name, sizeof name, GRND_NONBLOCK) == sizeof name ? name : 0;
}

Part SplitBy(int color) noexcept { return {.series = 1, .color = static_cast<std::uint32_t>(color)}; }

Part ShrinkWithout(std::span<const int> ranks) noexcept {
  try {
    std::vector<int> left(ranks.begin(), ranks.end());
    std::ranges::sort(left);  // NCCL takes the list in any order
    std::vector<std::uint64_t> words{2};
    for (const int rank : left) words.push_back(static_cast<std::uint32_t>(rank));
    return {.series = WordwiseHash(words)};
  } catch (...) {
    return {};
  }
}

}  // namespace amem::nccl::names
