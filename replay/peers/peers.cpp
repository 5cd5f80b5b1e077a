#include "replay/peers/peers.h"

namespace amem {

std::string ToText(const PeerIdentity& peer) {
  const std::string process = "pid " + std::to_string(peer.pid) + " on host " + peer.host;
  return peer.rank < 0 ? process : "rank " + std::to_string(peer.rank) + " (" + process + ")";
}

}  // namespace amem
