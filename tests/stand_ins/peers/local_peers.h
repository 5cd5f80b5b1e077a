// Peers in memory, for tests with several sessions in one process: no sockets and no threads.
//
// Imports and drops call the owner's delegate on the caller's thread, so that a single-threaded test decides the order of
// everything. Pauses and resumes need a thread per member, as they wait; they are agreed on the same boards, by the same code,
// as between processes.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

#include "replay/peers/peers.h"

namespace amem {

// Decides which thread runs and what time it is, for tests that must be able to repeat a run. Without one, the system does.
class LocalScheduler {
 public:
  using Time = std::chrono::steady_clock::time_point;
  virtual ~LocalScheduler() = default;
  virtual Time Now() = 0;
  virtual void Step() = 0;  // at the beginning of every call of Peers and Assembly that may wait; no lock is held
  virtual void Wait(std::unique_lock<std::mutex>& network, Time until) = 0;  // until something changed, or that time
  virtual void Changed() = 0;                                                // with the network's lock held
};

class LocalNetwork {
 public:
  // `scheduler` must outlive all that comes from here.
  explicit LocalNetwork(LocalScheduler* scheduler = nullptr);
  // `delegate` must outlive what comes back, which may outlive the network.
  std::unique_ptr<Peers> Join(const PeerIdentity& self, PeerDelegate& delegate);
  // As if that session's process had died: those connected to it are told, and it cannot do anything any more.
  void Kill(SessionId session);

  class Hub;

 private:
  std::shared_ptr<Hub> hub_;
};

}  // namespace amem
