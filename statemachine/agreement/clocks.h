// Collective clocks: how the ranks of a job that nobody changed come to a place where nothing of NCCL's is in flight. A pure
// function; it knows no page, thread or GPU: counting launches and holding them is the caller's (launches.h, ncclpatch/nccl).
//
// Ranks launch the same collectives in the same order on each communicator. So if all members of a communicator have launched
// as many, each launched collective has all its members, and ends. A launch is counted on each of its clocks: that of a
// communicator, or that of a pair of its ranks in one direction, on which a send and its receive count; a group is one launch
// on several clocks.
//
// A stop sets the target of each clock to the largest count of its members (TargetsOf). A rank that is behind a target
// launches whatever its program launches next, and where it thereby passes a target, it raises it (Launched), so that the other
// members follow. A rank that is at all its targets is held at its next launch. When no rank is behind, all have stopped, also
// those that compute or wait elsewhere, because their next launch is held.
//
// A rank that is behind may wait, outside of NCCL, for one that is held. If nothing has changed for a while, one held rank
// launches once more: the one that was let go the fewest times, so that each is let go in turn.
//
// After the collective clocks of Xu and Cooperman (CLUSTER 2024), which are for MPI.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace amem::agreement {

// The same in all members: made from the communicator's unique id and, for a pair, from both ranks and the direction.
struct ClockId {
  std::uint64_t value = 0;
  friend auto operator<=>(const ClockId&, const ClockId&) = default;
};
using Counts = std::map<ClockId, std::uint64_t>;  // launches, or targets

struct Launcher {
  Counts launched;           // on each clock that it is a member of, also those it has not launched on: 0
  bool held = false;         // one of its threads wants to launch, and waits
  std::uint32_t let_go = 0;  // how often it launched once more
  bool ended = false;        // its process has; nobody waits for what it launched
};

enum class Launch : std::uint8_t {
  kHold = 0,  // hold launches
  kFollow,    // launch: this rank is behind a target
  kOnceMore,  // one launch, for a rank that is behind and does not move
};

Counts TargetsOf(std::span<const Launcher> ranks);
bool IsBehind(const Launcher& rank, const Counts& targets);
// The ranks that are behind, by their places; none: all have stopped. Those that ended are not among them.
std::vector<std::size_t> Behind(std::span<const Launcher> ranks, const Counts& targets);
// Whether rank `self` may launch. `still`: no count has changed for as long as a rank that is behind has to make a launch.
Launch MayLaunch(std::span<const Launcher> ranks, std::size_t self, const Counts& targets, bool still);
// Counts a launch on these clocks and raises their targets; before the launch itself, so that nobody counts as stopped who must
// follow.
void Launched(Launcher& rank, std::span<const ClockId> clocks, Counts& targets);

}  // namespace amem::agreement
