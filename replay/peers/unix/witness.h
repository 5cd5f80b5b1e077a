// What this process sees of the process of another session that it waits for, or whose connection it has lost.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>

#include "replay/peers/peers.h"
#include "replay/peers/unix/connection.h"

namespace amem {

// The process at the other end of a socket. Its number is the kernel's, in this pid namespace, and not what the peer said.
ProcessSeen SeeProcessOf(const PeerIdentity& who, pid_t pid, int pidfd, std::chrono::nanoseconds waited);
ProcessSeen SeeProcessOf(const PeerIdentity& who, const PeerConnection& connection, std::chrono::nanoseconds waited);
// Connects to find out who it is, and does not wait. "gone" where nobody listens any more.
ProcessSeen SeeProcessOf(const PeerIdentity& who, const ConnectionContext& context, std::chrono::nanoseconds waited);

}  // namespace amem
