// Finding the set of sessions that share memory, directly or through others, by asking neighbours for theirs.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "replay/peers/peers.h"
#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/service.h"

namespace amem {

// One session's search. It keeps its connections, so that looking again is cheap.
class Discovery {
 public:
  // `tag`: whose memory they share; empty: NCCL's. `without`: leaders of a round that its members have lost one after the
  // other. They are left out even if they live, because all other members leave them out; so are those that the round spares.
  Discovery(const ConnectionContext& context, PeerService& service, PeerDelegate& delegate, std::string tag = {},
            const std::set<SessionId>& without = {}, std::set<SessionId> spared = {})
      : context_(context),
        service_(service),
        delegate_(delegate),
        tag_(std::move(tag)),
        gone_(std::move(spared)),
        without_the_dead_(!without.empty()) {
    gone_.insert(without.begin(), without.end());
  }

  // The set with this session, sorted. kRefused: a neighbour has another group. kTimeout: a neighbour does not answer.
  // kPeerLost: a neighbour is lost, or a session's end has failed this call at another member and not yet at this one.
  // Neighbours that are dead when first asked are left out; with `without`, all that die. Stops early with kTimeout
  // once `unless_readable` can be read.
  Result<std::vector<PeerIdentity>> Look(Deadline deadline, int unless_readable = -1);
  // Where one session is in its cycles.
  Result<CycleProgress> ProgressOf(SessionId session, Deadline deadline);
  // As of the registry.
  Status WhyLost(SessionId session, const Status& why);
  // For the caller to arrive by, who greets the leader no second time; null: there is none. A later look makes another.
  std::unique_ptr<PeerConnection> Take(SessionId session);
  // For a caller that waits: a connection becomes readable when its session ends.
  [[nodiscard]] const std::map<SessionId, std::unique_ptr<PeerConnection>>& connections() const { return connections_; }
  // Where the others were in their cycles when last asked.
  [[nodiscard]] const std::map<SessionId, CycleProgress>& progress() const { return progress_; }
  [[nodiscard]] PeerIdentity IdentityOf(SessionId session) const;
  [[nodiscard]] std::string NameOf(SessionId session) const;
  // Sessions that did not answer the last question.
  [[nodiscard]] const std::set<SessionId>& silent() const { return silent_; }
  // Whose end made the last look fail with kPeerLost.
  [[nodiscard]] const std::optional<PeerIdentity>& lost() const { return lost_; }
  // Which session made the last look fail, because of its group or because it said why it cannot answer.
  [[nodiscard]] const std::optional<PeerIdentity>& refusing() const { return refusing_; }

 private:
  Result<std::vector<SessionId>> OwnNeighbours();
  void NoteGone(SessionId session);
  bool LeaveOut(SessionId session, const Status& why);
  Result<std::uint64_t> Ask(SessionId session, Deadline deadline);
  Result<NeighbourhoodMessage> Hear(SessionId session, std::uint64_t question, Deadline deadline, int unless_readable);
  Result<std::vector<NeighbourhoodMessage>> AskAll(const std::vector<SessionId>& sessions, Deadline deadline,
                                                   int unless_readable);
  [[nodiscard]] bool FailedWithoutUs(const NeighbourhoodMessage& other) const;
  Status FailAs(const NeighbourhoodMessage& other);
  [[nodiscard]] Status Unreachable(SessionId session, const Status& why) const;
  Status OtherGroup(SessionId by, const PeerIdentity& other);

  ConnectionContext context_;
  PeerService& service_;
  PeerDelegate& delegate_;
  const std::string tag_;
  const Deadline began_ = Now();
  Deadline until_;              // of the look
  PeerIdentity introduced_as_;  // on all connections
  std::map<SessionId, std::unique_ptr<PeerConnection>> connections_;
  std::map<SessionId, PeerIdentity> known_;
  std::map<SessionId, CycleProgress> progress_;  // of all that ever answered
  std::set<SessionId> silent_;                   // did not answer the last question
  std::set<SessionId> gone_;                     // left out for good
  std::optional<PeerIdentity> lost_, refusing_;
  std::optional<std::chrono::steady_clock::time_point> others_failed_;  // since when looks have found that the others failed
  const bool without_the_dead_;
};

}  // namespace amem
