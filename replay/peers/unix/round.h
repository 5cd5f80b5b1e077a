// A member's side of a round that has begun: voting, and gathering again when the leader is lost. The leader's side is
// vote_counter.h.
#pragma once

#include <memory>
#include <vector>

#include "replay/peers/peers.h"
#include "replay/peers/unix/arrival.h"

namespace amem {

// As Peers::Arrive.
Result<std::unique_ptr<Round>> ArriveAtRound(const RoundContext& context, RoundCall call, std::vector<PeerIdentity>* culprits);

}  // namespace amem
