// Where cuMemAlloc memory lies inside the blocks AMem made for it. Bookkeeping only: no driver, no lock.
#pragma once

#include <map>
#include <optional>
#include <utility>

#include "statemachine/types.h"

namespace amem {

struct LegacyBlock {  // one allocation, mapped whole at `address`
  Address address;
  Bytes bytes = 0;
  AllocationId allocation;
  DeviceOrdinal device;
};

class LegacyPool {
 public:
  static constexpr Bytes kBlockBytes = Bytes{2} << 20;  // a block that small requests share
  static constexpr Bytes kAlignment = 512;              // as cuMemAlloc gives

  // A request that should have a block of its own.
  [[nodiscard]] static bool IsLarge(Bytes bytes) { return bytes > kBlockBytes / 2; }

  // Adds a block and takes its first piece, which must fit.
  Address AddBlock(const LegacyBlock& block, Bytes bytes);
  // Takes `bytes` on `device`: the block and the address. nullopt: no block has room, so one must be added first.
  std::optional<std::pair<LegacyBlock, Address>> Take(Bytes bytes, DeviceOrdinal device);
  // Gives a piece back. If its block is empty then, the pool forgets the block and returns it.
  std::optional<LegacyBlock> Give(Address address);
  [[nodiscard]] std::optional<LegacyBlock> BlockAt(Address address) const;
  [[nodiscard]] const auto& blocks() const { return blocks_; }

 private:
  struct Entry {
    LegacyBlock block;
    std::map<Bytes, Bytes> free;  // offset -> bytes
    std::map<Bytes, Bytes> used;
  };
  static std::optional<Address> TakeIn(Entry& entry, Bytes bytes);

  std::map<Address, Entry> blocks_;
};

}  // namespace amem
