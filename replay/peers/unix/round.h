// A member's side of a round that has begun: voting, and gathering again when the leader is lost. The leader's side is
// vote_counter.h.
#pragma once

#include <memory>
#include <vector>

#include "replay/peers/peers.h"
#include "replay/peers/unix/arrival.h"

namespace amem {

// `culprits`: of a failure, as Peers::Culprits has them.
Result<std::unique_ptr<Round>> ArriveAtRound(const RoundContext& context, CycleKind kind, std::uint64_t cycle, Deadline until,
                                             bool patient, std::vector<PeerIdentity>& culprits);

}  // namespace amem
