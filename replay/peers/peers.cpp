#include "replay/peers/peers.h"

#include <fmt/format.h>

namespace amem {

std::string ToText(const PeerIdentity& peer) {
  const std::string process = fmt::format("pid {} on host {}", peer.pid, peer.host);
  return peer.rank < 0 ? process : fmt::format("rank {} ({})", peer.rank, process);
}

std::string NameOf(CycleKind kind, const std::string& tag) {
  const bool pause = kind == CycleKind::kPause;
  if (tag.empty()) return pause ? "ncclPause" : "ncclResume";
  return (pause ? "amem_pause of tag " : "amem_resume of tag ") + tag;
}

}  // namespace amem
