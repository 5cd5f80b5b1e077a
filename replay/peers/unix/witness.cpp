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
  const auto owner = CredentialsOf(connection.fd());
  return SeeProcessOf(who, owner ? owner->pid : 0, connection.process_fd(), waited);
}

ProcessSeen SeeProcessOf(const PeerIdentity& who, const ConnectionContext& context, std::chrono::nanoseconds waited) {
  const auto socket = ConnectTo(context, who.session);
  if (!socket) {
    ProcessSeen seen = SeeProcessOf(who, 0, -1, waited);
    if (socket.status().code() == Code::kPeerLost) seen.state = "gone";
    return seen;
  }
  const auto owner = CredentialsOf(socket->get());
  const UniqueFd process = WatchProcess(owner ? owner->pid : 0);
  return SeeProcessOf(who, owner ? owner->pid : 0, process.get(), waited);
}

}  // namespace amem
