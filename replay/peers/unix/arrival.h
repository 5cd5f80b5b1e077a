// Arriving at a round: a session tells its set's leader that it has come, and waits until all members have.
//
// The set may grow while members wait, because a member still imports, and the leader may change with it. Nobody sends news of
// that: a waiting member looks again, at once if something changes in its own session and from time to time otherwise, and
// moves to the new leader.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "replay/peers/peers.h"
#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/discovery.h"
#include "replay/peers/unix/service.h"

namespace amem {

struct RoundContext {
  ConnectionContext connection;
  PeerService* service = nullptr;
  PeerDelegate* delegate = nullptr;
  Deadlines deadlines;
  std::shared_ptr<void> busy;                       // held while a round of that tag exists
  std::function<void(const std::string&)> waiting;  // as in UnixPeersOptions
};

struct RoundBegun {                        // how waiting for the others ended
  std::unique_ptr<PeerConnection> leader;  // null: no session shares memory with this one
  BegunMessage begun;
  Deadline until;                    // of the round
  std::optional<Lifecycle> settled;  // a member ended this cycle in that state and will not come
  std::set<SessionId> spared{};      // run, share memory and are no members (RoundCall)
};

class Arrival {
 public:
  // `without`: a round had begun, and these, its leaders one after the other, were lost. `spared`: of that round.
  Arrival(const RoundContext& context, RoundCall call, const std::set<SessionId>& without = {}, std::set<SessionId> spared = {})
      : context_(context),
        call_(std::move(call)),
        without_(without),
        spared_(std::move(spared)),
        again_(!without_.empty()),
        began_(again_ ? Now() : std::min(Now(), call_.until - context.deadlines.call())),
        deadline_(call_.until),
        discovery_(context.connection, *context.service, *context.delegate, call_.tag, without_, spared_) {}

  Result<RoundBegun> Run();
  // As in Peers::Arrive.
  [[nodiscard]] const std::vector<PeerIdentity>& culprits() const { return culprits_; }

 private:
  enum class State {
    kWaiting,  // for members, at the leader if connected
    kBegun,    // the leader said that all have come
    kAlone,    // no session shares memory with this one
    kSettled,  // a member has ended the cycle, and will not come
  };

  Result<RoundBegun> Wait();
  RoundBegun Outcome();

  // Look again, and move to the leader.
  Status LookAndArrive();
  void Spare(std::vector<PeerIdentity>& set);
  Status MoveTo(std::vector<PeerIdentity> set);
  Status Arrive(SessionId leader);
  Status WaitForNews();
  Status Take(const MessageBody& body);
  Status Nap();
  Status Poll(Deadline until);
  [[nodiscard]] bool Superseded() const;
  [[nodiscard]] std::optional<Lifecycle> Settled();

  // Lost members and leaders.
  Status RequireNoDeath(const std::vector<PeerIdentity>& set);
  Status RequireAlive(const std::vector<PeerIdentity>& members);
  Status LeaderClosed(const Status& why);

  // Whether and how the wait ends.
  [[nodiscard]] std::vector<PeerIdentity> Absent(const Status& why, const Status& withdrawn) const;
  [[nodiscard]] bool MayComeYet(const std::vector<PeerIdentity>& absent) const;
  Status WaitOn(const std::vector<PeerIdentity>& absent);
  void SayForWhom(const std::vector<PeerIdentity>& absent);
  Status Withdraw();
  Status GiveUp(const Status& why);
  Status TimedOut(const std::vector<PeerIdentity>& absent, const Status& withdrawn);
  Status Unanswered(const std::vector<PeerIdentity>& silent, const Status& why);
  // Looks at the processes of missing members, and tells the journal.
  std::map<SessionId, ProcessSeen> Witness(const std::vector<PeerIdentity>& late);

  [[nodiscard]] bool TooLate() const { return Passed(deadline_); }
  [[nodiscard]] std::chrono::milliseconds Waited() const { return SinceThen(began_); }
  const RoundContext& context_;
  const RoundCall call_;
  const std::set<SessionId> without_;
  std::set<SessionId> spared_;
  const bool again_;
  const Deadline began_;        // of the call, or of gathering again
  Deadline deadline_;           // of a patient resume: of the next look
  Deadline next_word_ = Now();  // when to say next for whom it waits
  Discovery discovery_;
  State state_ = State::kWaiting;
  BegunMessage begun_;                                // valid if kBegun
  std::optional<Lifecycle> settled_;                  // if kSettled
  std::unique_ptr<PeerConnection> leader_;            // null: not arrived, or to arrive again
  std::vector<PeerIdentity> announced_;               // the set as the leader knows it
  std::optional<std::vector<PeerIdentity>> missing_;  // the leader's answer to a withdrawal
  std::vector<PeerIdentity> vanished_;                // left the set
  SessionId last_leader_;                             // where this session arrived last
  SessionId closed_leader_;                           // its connection has ended
  std::optional<PeerIdentity> lost_;                  // its end failed this call
  std::vector<PeerIdentity> culprits_;                // of a failure
  Status busy_;                                       // why the last look failed, if a member was busy
  int closings_ = 0;
  std::chrono::milliseconds pause_{};
};

// As Peers::Arrive. The round is a member's side of it (round.cpp); the leader's is vote_counter.h.
Result<std::unique_ptr<Round>> ArriveAtRound(const RoundContext& context, RoundCall call, std::vector<PeerIdentity>* culprits);

}  // namespace amem
