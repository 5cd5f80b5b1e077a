#include "replay/session/legacy_pool.h"

namespace amem {

std::optional<Address> LegacyPool::TakeIn(Entry& entry, Bytes bytes) {
  const Bytes rounded = bytes == 0 ? kAlignment : (bytes + kAlignment - 1) / kAlignment * kAlignment;
  for (auto it = entry.free.begin(); it != entry.free.end(); ++it) {
    const auto [offset, room] = *it;
    if (room < rounded) continue;
    entry.free.erase(it);
    if (room > rounded) entry.free.emplace(offset + rounded, room - rounded);
    entry.used.emplace(offset, rounded);
    return entry.block.address + offset;
  }
  return std::nullopt;
}

Address LegacyPool::AddBlock(const LegacyBlock& block, Bytes bytes) {
  Entry& entry = blocks_[block.address] = {block, {{0, block.bytes}}, {}};
  return TakeIn(entry, bytes).value_or(block.address);
}

std::optional<std::pair<LegacyBlock, Address>> LegacyPool::Take(Bytes bytes, DeviceOrdinal device) {
  for (auto& [address, entry] : blocks_) {
    if (entry.block.device != device) continue;
    if (const auto place = TakeIn(entry, bytes)) return std::pair{entry.block, *place};
  }
  return std::nullopt;
}

std::optional<LegacyBlock> LegacyPool::Give(Address address) {
  const auto block = BlockAt(address);
  if (!block) return std::nullopt;
  Entry& entry = blocks_[block->address];
  const auto used = entry.used.find(address.value - block->address.value);
  if (used == entry.used.end()) return std::nullopt;
  auto it = entry.free.emplace(used->first, used->second).first;
  entry.used.erase(used);
  if (entry.used.empty()) {
    blocks_.erase(block->address);
    return block;
  }
  if (const auto next = std::next(it); next != entry.free.end() && it->first + it->second == next->first) {
    it->second += next->second;
    entry.free.erase(next);
  }
  if (it != entry.free.begin()) {
    if (const auto before = std::prev(it); before->first + before->second == it->first) {
      before->second += it->second;
      entry.free.erase(it);
    }
  }
  return std::nullopt;
}

std::optional<LegacyBlock> LegacyPool::BlockAt(Address address) const {
  auto it = blocks_.upper_bound(address);
  if (it == blocks_.begin()) return std::nullopt;
  --it;
  if (address.value - it->first.value >= it->second.block.bytes) return std::nullopt;
  return it->second.block;
}

}  // namespace amem
