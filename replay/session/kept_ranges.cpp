#include "replay/session/kept_ranges.h"

#include <algorithm>

namespace amem {

void KeptRanges::Add(const Home& home, Address address, Bytes bytes) {
  homes_.insert_or_assign(home.base, home);
  ranges_.emplace(address, bytes);
}

KeptRanges::Ranges::const_iterator KeptRanges::Find(Address address, Bytes bytes) const {
  const auto [first, last] = ranges_.equal_range(address);
  const auto it = std::find_if(first, last, [&](const auto& range) { return range.second == bytes; });
  return it == last ? ranges_.end() : it;
}

const KeptRanges::Home* KeptRanges::HomeOf(Address address, Bytes bytes) const {
  if (Find(address, bytes) == ranges_.end()) return nullptr;
  return &std::prev(homes_.upper_bound(address))->second;
}

const KeptRanges::Home* KeptRanges::HomeOf(const RemoteAllocation& slab) const {
  const auto it = std::ranges::find_if(homes_, [&](const auto& home) { return home.second.remote == slab; });
  return it == homes_.end() ? nullptr : &it->second;
}

void KeptRanges::Remove(Address address, Bytes bytes) {
  ranges_.erase(Find(address, bytes));
  const auto home = std::prev(homes_.upper_bound(address));
  const auto next = ranges_.lower_bound(home->first);
  if (next == ranges_.end() || !(next->first < home->first + home->second.bytes)) homes_.erase(home);
}

}  // namespace amem
