// Peers in memory, for tests with several sessions in one process: no sockets and no threads.
//
// Imports and drops call the owner's delegate on the caller's thread, so that a single-threaded test decides the order of
// everything. Rounds need a thread per member, as they wait; decisions are made by the same board as between processes.
#pragma once

#include <cstdint>
#include <memory>

#include "replay/peers.h"

namespace amem {

class LocalNetwork {
 public:
  explicit LocalNetwork(std::uint32_t timeout_ms = 10'000);
  // `delegate` must outlive what comes back, which may outlive the network.
  std::unique_ptr<Peers> Join(const PeerIdentity& self, PeerDelegate& delegate);
  // As if that session's process had died: those connected to it are told, and it cannot do anything any more.
  void Kill(SessionId session);

  class Hub;

 private:
  std::shared_ptr<Hub> hub_;
};

}  // namespace amem
