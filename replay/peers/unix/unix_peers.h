// Peers over Unix sockets: the sessions of one user on one host.
//
// Each session listens at DIRECTORY/<session id in 16 hex digits> and at an abstract name, and has one service thread
// (service.h) that answers its peers and calls the delegate. The calling thread of Import and Reimport talks to
// the peer's service itself. During these calls hold no lock that the delegate needs: two sessions that import from each other
// would wait for each other's delegates.
//
// Guarantees
// * A session counts as connected from the first data connection to or from it on, and as lost, for good, once it is known to
//   have closed or its process to have ended: OnPeerLost says "died", or "has closed" if it ended in order. The end of a
//   connection, an answer that is late, and a process that cannot be seen are no losses.
// * A session whose socket somebody removed is not lost: calls that need it fail, until its process ends.
// * Sockets that dead processes left are swept at the start of the next session; those of the living are never touched.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "replay/peers/assembly.h"
#include "replay/peers/peers.h"
#include "replay/peers/requests.h"

namespace amem {

struct UnixPeersOptions {
  std::filesystem::path socket_directory;  // made with mode 0700; must belong to this user, with no access for others
  Deadlines deadlines;                     // an import by itself is a call, too
  std::optional<uid_t> expected_uid;       // whose processes may connect; default: this user's. For tests
  // Also uses abstract sockets, which processes of one network namespace see without a common directory. Their names follow
  // from the session ids, so these must be random.
  bool abstract_names = false;
  std::function<void(const std::string&)> report = {};  // called once, with a sentence, if only one of the two ways works
  // Told for whom a resume waits beyond its time, more and more rarely; on the calling thread.
  std::function<void(const std::string&)> waiting = {};
  std::chrono::milliseconds hello_patience{5'000};  // with a connection that says nothing
  control::RequestServer* requests = nullptr;       // outlives the object; null: nothing can be asked from outside
};

// In a forked child its destructor leaves everything to the parent.
class UnixPeers : public Peers {
 public:
  // `delegate` must outlive what comes back; calls to it may come before this returns.
  static Result<std::unique_ptr<UnixPeers>> Start(const PeerIdentity& self, const UnixPeersOptions& options,
                                                  PeerDelegate& delegate);
};

}  // namespace amem
