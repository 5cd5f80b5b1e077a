// Arriving at a round: a session tells the leader of its set that it has come, and waits until all members have.
//
// The set may grow while members wait (a member is still importing), and with it the leader may change. No message says so: a
// member that waits looks again - at once when something changes at home, now and then for what changes elsewhere - and moves.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "replay/peers/peers.h"
#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/discovery.h"
#include "replay/peers/unix/service.h"

namespace amem {

// `busy` is true as long as the round exists; the caller has set it.
struct RoundContext {
  ConnectionContext connection;
  PeerService* service = nullptr;
  PeerDelegate* delegate = nullptr;
  Deadlines deadlines;
  std::shared_ptr<std::atomic<bool>> busy;          // of rounds about that tag
  std::function<void(const std::string&)> waiting;  // as UnixPeersOptions has it
};

struct RoundBegun {                        // how waiting for the others ended
  std::unique_ptr<PeerConnection> leader;  // null: no session shares memory with this one
  BegunMessage begun;
  Deadline until;                    // of the round
  std::optional<Lifecycle> settled;  // of a member that will not come, as it has ended this cycle
};

class Arrival {
 public:
  // `again`: the leader of a round that had begun was lost.
  Arrival(const RoundContext& context, RoundCall call, bool again)
      : context_(context),
        call_(std::move(call)),
        again_(again),
        began_(again ? Now() : std::min(Now(), call_.until - context.deadlines.call())),
        deadline_(call_.until),
        discovery_(context.connection, *context.service, *context.delegate, call_.tag, again) {}

  Result<RoundBegun> Run();
  // As Peers::Arrive has them.
  [[nodiscard]] const std::vector<PeerIdentity>& culprits() const { return culprits_; }

 private:
  enum class State {
    kWaiting,  // for members, at the leader if there is a connection to it
    kBegun,    // the leader said that all have come
    kAlone,    // no session shares memory with this one
    kSettled,  // a member has ended the cycle, and will not come
  };

  Result<RoundBegun> Wait();
  RoundBegun Outcome();

  // What makes a member look again, and move.
  Status LookAndArrive();
  Status MoveTo(std::vector<PeerIdentity> set);
  Status Arrive(SessionId leader);
  Status WaitForNews();
  Status Take(const MessageBody& body);
  Status Nap();
  Status Poll(Deadline until);
  [[nodiscard]] bool Superseded() const;
  [[nodiscard]] std::optional<Lifecycle> Settled() const;

  // Members and leaders that are lost.
  Status RequireNoDeath(const std::vector<PeerIdentity>& set);
  Status LeaderClosed(const Status& why);

  // Ending the wait, or not.
  [[nodiscard]] std::vector<PeerIdentity> Absent(const Status& why, const Status& withdrawn) const;
  [[nodiscard]] bool MayComeYet(const std::vector<PeerIdentity>& absent) const;
  Status WaitOn(const std::vector<PeerIdentity>& absent);
  Status Withdraw();
  Status GiveUp(const Status& why);
  Status TimedOut(const std::vector<PeerIdentity>& absent, const Status& withdrawn);
  Status Unanswered(const Status& why);
  // Looks at the processes of members that did not come, and tells the journal.
  std::map<SessionId, ProcessSeen> Witness(const std::vector<PeerIdentity>& late);

  [[nodiscard]] bool TooLate() const { return Passed(deadline_); }
  [[nodiscard]] std::chrono::milliseconds Waited() const { return SinceThen(began_); }
  [[nodiscard]] std::string NameOf(SessionId session) const;

  const RoundContext& context_;
  const RoundCall call_;
  const bool again_;
  const Deadline began_;        // the call, or gathering again
  Deadline deadline_;           // of a resume that waits for a peer that is paused: of the next look at that
  Deadline next_word_ = Now();  // of whom it waits for
  Discovery discovery_;
  State state_ = State::kWaiting;
  BegunMessage begun_;                                // if it has
  Lifecycle settled_{};                               // if it is
  std::unique_ptr<PeerConnection> leader_;            // null: this session has not come to one, or must come again
  std::vector<PeerIdentity> announced_;               // the set, as the leader was told
  bool withdrawn_ = false;                            // and must be told again
  std::optional<std::vector<PeerIdentity>> missing_;  // the leader's answer to a withdrawal
  std::vector<PeerIdentity> vanished_;                // were of the set, and are not any more
  SessionId last_leader_;                             // to which this session has come
  SessionId closed_leader_;                           // whose connection has ended
  std::optional<PeerIdentity> lost_;                  // whose end failed this call
  std::vector<PeerIdentity> culprits_;                // of a failure
  Status busy_;                                       // of the last look, if that was why it failed
  int closings_ = 0;
  std::chrono::milliseconds pause_{};
};

}  // namespace amem
