// Peers over Unix sockets: the sessions of one user on one host.
//
// Each session listens at DIRECTORY/<session id in 16 hex digits> and at an abstract name, and has one service thread
// (service.h) that answers its peers and calls the delegate. The calling thread of Import, Reimport, Arrive and Vote talks to
// the peer's service itself. Do not hold a lock over these calls that the delegate needs: two sessions that import from each
// other would wait for each other's delegates.
//
// Guarantees
// * A session is connected when the first connection for data to or from it stands, and lost when one of them closes or its
//   process dies, once and for all: OnPeerLost says "died", or "has closed" if it stopped in order.
// * The set of a round is found by asking; its leader is the session with the lowest id. Votes are numbered, and each has one
//   decision, which the leader makes once. If the leader itself is lost, every vote from then on is kPeerLost at once. If the
//   leader's process is stopped (not dead), members give up a little after it should have decided (Deadlines::margin).
// * Sockets that dead processes left are swept at the start of the next session; those of the living are never touched.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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
  std::function<void(const std::string&)> report = {};  // told once, in a sentence, if only one of the two ways works
  // Told for whom a resume waits beyond its time, more and more rarely; on the calling thread.
  std::function<void(const std::string&)> waiting = {};
  control::RequestServer* requests = nullptr;  // outlives the object; null: nothing can be asked from outside
};

class UnixPeers final : public Peers {
 public:
  // `delegate` must outlive what comes back; calls to it may come before this returns.
  static Result<std::unique_ptr<UnixPeers>> Start(const PeerIdentity& self, const UnixPeersOptions& options,
                                                  PeerDelegate& delegate);
  // Stops. In a forked child it leaves everything to the parent.
  ~UnixPeers() override;

  [[nodiscard]] PeerIdentity Self() const override;
  void SetGroup(std::int64_t group) override;
  void KeepEverything() override;
  Result<SharedAllocation> Import(const Token& token, AllocationId as) override;
  Result<std::vector<SharedAllocation>> Reimport(SessionId owner, const std::vector<ShareRequest>& requests,
                                                 Deadline until) override;
  void DropReference(const RemoteAllocation& remote, AllocationId as) override;
  bool AwaitLoss(SessionId session) override;
  // One of a tag at a time: kRefused while a round of this session about that tag is not destroyed. The round must not outlive
  // this object.
  Result<std::unique_ptr<Round>> Arrive(const RoundCall& call, std::vector<PeerIdentity>* culprits = nullptr) override;
  void Stop() override;

 private:
  class Impl;
  explicit UnixPeers(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace amem
