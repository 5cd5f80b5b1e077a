#include "statemachine/agreement/clocks.h"

#include <algorithm>

namespace amem::agreement {
namespace {

std::uint64_t At(const Counts& counts, ClockId clock) {
  const auto found = counts.find(clock);
  return found == counts.end() ? 0 : found->second;
}

}  // namespace

Counts TargetsOf(std::span<const Launcher> ranks) {
  Counts targets;
  for (const Launcher& rank : ranks)
    for (const auto& [clock, count] : rank.launched) targets[clock] = std::max(targets[clock], count);
  return targets;
}

bool IsBehind(const Launcher& rank, const Counts& targets) {
  return !rank.ended &&
         std::ranges::any_of(rank.launched, [&](const auto& one) { return one.second < At(targets, one.first); });
}

std::vector<std::size_t> Behind(std::span<const Launcher> ranks, const Counts& targets) {
  std::vector<std::size_t> behind;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (IsBehind(ranks[i], targets)) behind.push_back(i);
  return behind;
}

Launch MayLaunch(std::span<const Launcher> ranks, std::size_t self, const Counts& targets, bool still) {
  if (IsBehind(ranks[self], targets)) return Launch::kFollow;
  if (!still || Behind(ranks, targets).empty()) return Launch::kHold;
  // All see the same ranks in the same order, so that one of them is let go.
  const auto is_held = [](const Launcher& rank) { return rank.held && !rank.ended; };
  std::size_t next = ranks.size();
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (is_held(ranks[i]) && !IsBehind(ranks[i], targets) && (next == ranks.size() || ranks[i].let_go < ranks[next].let_go))
      next = i;
  return next == self ? Launch::kOnceMore : Launch::kHold;
}

void Launched(Launcher& rank, std::span<const ClockId> clocks, Counts& targets) {
  for (const ClockId clock : clocks) {
    const std::uint64_t count = ++rank.launched[clock];
    targets[clock] = std::max(targets[clock], count);
  }
}

}  // namespace amem::agreement
