#include "replay/session/pools/chunk_space.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "statemachine/check.h"

namespace amem {

constexpr Bytes kMostChunk = Bytes{1} << 30;

static Bytes UpTo(Bytes bytes, Bytes granularity) { return (bytes + granularity - 1) / granularity * granularity; }

std::optional<Address> ChunkSpace::Take(Bytes bytes) {
  bytes = Rounded(bytes);
  const auto found = by_size_.lower_bound({bytes, Address{}});
  if (found == by_size_.end()) return std::nullopt;
  const auto [room, address] = *found;
  RemoveFree(free_.find(address));
  TakeAt(address, room, bytes);
  return address;
}

void ChunkSpace::TakeAt(Address address, Bytes room, Bytes bytes) {
  if (room > bytes) AddFree(address + bytes, room - bytes);
  parts_.emplace(address, bytes);
  taken_ += bytes;
}

std::optional<ChunkSpace::Given> ChunkSpace::Give(Address address) {
  const auto part = parts_.find(address);
  if (part == parts_.end()) return std::nullopt;
  const Chunk chunk = ChunkAt(address);
  Bytes bytes = part->second;
  Given given{{chunk.allocation, address.value - chunk.address.value, bytes}, std::nullopt};
  parts_.erase(part);
  taken_ -= bytes;
  if (whole_) {
    given.emptied = Forget(chunk.address);
    return given;
  }
  // Joined with free neighbours, but never across the border of a chunk.
  auto behind = free_.find(address + bytes);
  if (behind != free_.end() && behind->first.value < chunk.address.value + chunk.bytes) {
    bytes += behind->second;
    RemoveFree(behind);
  }
  auto before = free_.lower_bound(address);
  if (before != free_.begin() && address != chunk.address) {
    --before;
    if (before->first >= chunk.address && before->first + before->second == address) {
      address = before->first;
      bytes += before->second;
      RemoveFree(before);
    }
  }
  if (bytes == chunk.bytes) {
    given.emptied = Forget(chunk.address);
  } else {
    AddFree(address, bytes);
  }
  return given;
}

ChunkSpace::Chunk ChunkSpace::Forget(Address address) {
  const Chunk chunk = chunks_.extract(address).mapped();
  held_ -= chunk.bytes;
  return chunk;
}

std::optional<Bytes> ChunkSpace::ChunkFor(Bytes bytes, Bytes granularity, std::size_t attempt) const {
  const Bytes least = UpTo(Rounded(bytes), granularity);
  if (least >= kOwnChunk) return attempt == 0 ? std::optional(least) : std::nullopt;
  Bytes chunk = std::max(least, std::bit_floor(std::clamp(held_ / 2, kLeastChunk, kMostChunk)));
  for (; attempt > 0; --attempt) {
    if (chunk <= least) return std::nullopt;
    chunk = std::max(least, chunk / 2);
  }
  return UpTo(chunk, granularity);
}

Address ChunkSpace::Add(const Chunk& chunk, Bytes first) {
  chunks_.emplace(chunk.address, chunk);
  held_ += chunk.bytes;
  if (whole_) {
    parts_.emplace(chunk.address, first);
    taken_ += first;
    return chunk.address;
  }
  TakeAt(chunk.address, chunk.bytes, Rounded(first));
  return chunk.address;
}

std::optional<ChunkSpace::Part> ChunkSpace::PartAt(Address address) const {
  const auto* const part = FindIn(parts_, address);
  if (part == nullptr) return std::nullopt;
  const Chunk& chunk = ChunkAt(address);
  return Part{chunk.allocation, address.value - chunk.address.value, *part};
}

Status ChunkSpace::Check() const {
  AMEM_CHECK(taken_ <= held_);
  AMEM_CHECK(parts_.empty() == chunks_.empty(), parts_.size(), chunks_.size());  // a chunk without parts goes at once
  AMEM_CHECK(chunks_.empty() == (held_ == 0), held_);
  AMEM_CHECK(free_.size() == by_size_.size(), free_.size(), by_size_.size());
  return {};
}

const ChunkSpace::Chunk& ChunkSpace::ChunkAt(Address address) const { return std::prev(chunks_.upper_bound(address))->second; }

void ChunkSpace::AddFree(Address address, Bytes bytes) {
  free_.emplace(address, bytes);
  by_size_.emplace(bytes, address);
}

void ChunkSpace::RemoveFree(std::map<Address, Bytes>::iterator free) {
  by_size_.erase({free->second, free->first});
  free_.erase(free);
}

}  // namespace amem
