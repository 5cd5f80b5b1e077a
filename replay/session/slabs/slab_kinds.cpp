#include "replay/session/slabs/slab_kinds.h"

#include <algorithm>
#include <bit>

namespace amem {

std::optional<Bytes> SlabKinds::GranularityIfSuited(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags) {
  if (options_.layout != Layout::kSlab) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (properties.location.type == LocationType::kDevice) devices_.insert(properties.location.id);
  constexpr std::uint32_t kPinned = 1, kPosix = 1;
  if (devices_.size() > 1 || properties.location.type != LocationType::kDevice || properties.type != kPinned)
    return std::nullopt;
  if ((properties.handle_types & ~kPosix) != 0 || properties.compression != 0 || flags != 0) return std::nullopt;
  if (bytes == 0 || bytes > options_.slab_bytes / 2) return std::nullopt;
  auto it = granularity_.find(properties);
  if (it == granularity_.end()) {
    const auto granularity = driver_.Granularity(properties);
    if (!granularity.ok()) return std::nullopt;
    it = granularity_.emplace(properties, *granularity).first;
  }
  if (bytes % it->second != 0) return std::nullopt;  // the driver says what is wrong with the size
  return it->second;
}

Bytes SlabKinds::AlignmentFor(const SlabKind& kind, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  if (multicast_granularity_ == 0) {
    const auto asked = driver_.MulticastGranularity();
    multicast_granularity_ = asked.ok() && std::has_single_bit(*asked) ? *asked : 1;  // without multicast nothing is bound
  }
  return bytes < multicast_granularity_ ? kind.granularity : std::max(kind.granularity, multicast_granularity_);
}

}  // namespace amem
