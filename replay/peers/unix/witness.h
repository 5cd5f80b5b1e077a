// What this process sees of another session's process that it waits for or has lost.
#pragma once

#include <sys/types.h>

#include <chrono>

#include "replay/peers/peers.h"
#include "replay/peers/unix/connection.h"

namespace amem {

// The process at the other end of a socket. `pid` is the kernel's, in this pid namespace, not the peer's word.
ProcessSeen SeeProcessOf(const PeerIdentity& who, pid_t pid, int pidfd, std::chrono::nanoseconds waited);
ProcessSeen SeeProcessOf(const PeerIdentity& who, const PeerConnection& connection, std::chrono::nanoseconds waited);
// Connects to find the pid, without waiting. "gone": nobody listens.
ProcessSeen SeeProcessOf(const PeerIdentity& who, const ConnectionContext& context, std::chrono::nanoseconds waited);

}  // namespace amem
