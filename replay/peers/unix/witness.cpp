#include "replay/peers/unix/witness.h"

#include "journal/base/process_sight.h"

namespace amem {

ProcessSeen SeeProcessOf(const PeerIdentity& who, pid_t pid, int pidfd, std::chrono::nanoseconds waited) {
  Sight sight = SeeProcess(pid, pidfd);
  ProcessSeen seen{who.session, who.pid, std::move(sight.state), std::move(sight.where), "", sight.exit_code};
  seen.waited_ns = static_cast<std::uint64_t>(std::max<std::chrono::nanoseconds::rep>(waited.count(), 0));
  return seen;
}

ProcessSeen SeeProcessOf(const PeerIdentity& who, const PeerConnection& connection, std::chrono::nanoseconds waited) {
  return SeeProcessOf(who, connection.pid(), connection.process_fd(), waited);
}

ProcessSeen SeeProcessOf(const PeerIdentity& who, const ConnectionContext& context, std::chrono::nanoseconds waited) {
  const auto connected = ConnectTo(context, who.session);
  if (connected) return SeeProcessOf(who, connected->owner.pid, connected->process.get(), waited);
  ProcessSeen seen = SeeProcessOf(who, 0, -1, waited);
  if (connected.status().code() == Code::kPeerLost) seen.state = "gone";
  return seen;
}

}  // namespace amem
