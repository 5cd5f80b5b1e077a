// A member's side of a round: finding the set, arriving at its leader, voting. The leader's side is unix_peers_board.h.
//
// The set may grow while members wait (somebody is still importing), and with it the leader may change. Nobody is told: whoever
// waits looks again - at once when something changes at home, now and then for what changes elsewhere - and moves.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "replay/peers/peers.h"
#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/service.h"

namespace amem {

// Finds the set of a session by asking its neighbours for theirs. Keeps the connections, so that to look again is cheap.
class Discovery {
 public:
  Discovery(const ConnectionContext& context, PeerService& service, PeerDelegate& delegate, std::uint32_t timeout_ms,
            bool without_the_dead = false)
      : context_(context),
        service_(service),
        delegate_(delegate),
        timeout_ms_(timeout_ms),
        without_the_dead_(without_the_dead) {}

  // Sorted by session, with this one. kRefused: a neighbour has another group. kPeerLost, kTimeout: a neighbour does not
  // answer. kPeerLost, too: another member has failed by somebody's end in this call, and this session has not yet.
  // Neighbours that are dead when they are first asked are left out; with `without_the_dead` all that die are.
  // Gives up early, with kTimeout, once `unless_readable` can be read.
  Result<std::vector<PeerIdentity>> Look(Deadline deadline, int unless_readable = -1);
  // To wait until one of them has something to say, which is its end.
  [[nodiscard]] const std::map<SessionId, std::unique_ptr<PeerConnection>>& connections() const { return connections_; }
  // Where the others stood when they were last asked.
  [[nodiscard]] const std::map<SessionId, CycleProgress>& progress() const { return progress_; }
  [[nodiscard]] PeerIdentity IdentityOf(SessionId session) const;
  [[nodiscard]] const std::set<SessionId>& silent() const { return silent_; }
  // Why the last look failed with kPeerLost.
  [[nodiscard]] const std::optional<PeerIdentity>& lost() const { return lost_; }

 private:
  Result<std::vector<SessionId>> OwnNeighbours();
  Status Dispel(const std::vector<PeerIdentity>& doubtful);
  bool LeaveOut(SessionId session, const Status& why);
  Result<std::uint64_t> Ask(SessionId session, Deadline deadline);
  Result<NeighbourhoodMessage> Hear(SessionId session, std::uint64_t question, Deadline deadline, int unless_readable);
  Result<std::vector<NeighbourhoodMessage>> AskAll(const std::vector<SessionId>& sessions, Deadline deadline,
                                                   int unless_readable);
  [[nodiscard]] bool FailedWithoutUs(const NeighbourhoodMessage& other) const;
  Status FailAs(const NeighbourhoodMessage& other);
  [[nodiscard]] Status Unreachable(SessionId session, const Status& why) const;
  [[nodiscard]] Status OtherGroup(SessionId by, const PeerIdentity& other) const;

  ConnectionContext context_;
  PeerService& service_;
  PeerDelegate& delegate_;
  const std::uint32_t timeout_ms_;  // for messages
  std::map<SessionId, std::unique_ptr<PeerConnection>> connections_;
  std::map<SessionId, PeerIdentity> known_;
  std::map<SessionId, CycleProgress> progress_;  // of all that ever answered
  std::set<SessionId> silent_;                   // have not answered the last question
  std::set<SessionId> gone_;                     // left out for ever
  std::optional<PeerIdentity> lost_;
  std::optional<std::chrono::steady_clock::time_point> others_failed_;  // since when looks have found that
  const bool without_the_dead_;
};

// `busy` is true as long as the round exists; the caller has set it.
struct RoundContext {
  ConnectionContext connection;
  PeerService* service = nullptr;
  PeerDelegate* delegate = nullptr;
  std::uint32_t timeout_ms = 0;
  std::shared_ptr<std::atomic<bool>> busy;
};

Result<std::unique_ptr<Round>> ArriveAtRound(const RoundContext& context, CycleKind kind, std::uint64_t cycle);

}  // namespace amem
