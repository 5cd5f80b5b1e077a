#include "replay/peers/peers.h"

#include <fmt/format.h>

namespace amem {

std::string ToText(const PeerIdentity& peer) {
  const std::string process = fmt::format("pid {} on host {}", peer.pid, peer.host);
  return peer.rank < 0 ? process : fmt::format("rank {} ({})", peer.rank, process);
}

}  // namespace amem
