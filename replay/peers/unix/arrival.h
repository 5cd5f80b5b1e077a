// Arriving at a round: a session tells the leader of its set that it has come, and waits until all members have.
//
// The set may grow while members wait (a member is still importing), and with it the leader may change. No message says so: a
// member that waits looks again - at once when something changes at home, now and then for what changes elsewhere - and moves.
#pragma once

#include <atomic>
#include <chrono>
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
  std::uint32_t timeout_ms = 0;
  std::shared_ptr<std::atomic<bool>> busy;
};

struct RoundBegun {                        // how waiting for the others ended
  std::unique_ptr<PeerConnection> leader;  // null: no session shares memory with this one
  BegunMessage begun;
  std::optional<Lifecycle> settled;  // of a member that will not come, as it has ended this cycle
};

class Arrival {
 public:
  // `again`: the leader of a round that had begun was lost.
  Arrival(const RoundContext& context, CycleKind kind, std::uint64_t cycle, bool again)
      : context_(context),
        kind_(kind),
        cycle_(cycle),
        again_(again),
        deadline_(In(std::chrono::milliseconds(context.timeout_ms))),
        discovery_(context.connection, *context.service, *context.delegate, context.timeout_ms, again) {}

  Result<RoundBegun> Run();
  // See Peers::Culprits.
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
  Status Poll(Deadline until);
  [[nodiscard]] bool Superseded() const;
  [[nodiscard]] std::optional<Lifecycle> Settled() const;

  // Members and leaders that are lost.
  Status RequireNoDeath(const std::vector<PeerIdentity>& set);
  Status LeaderClosed(const Status& why);

  // Ending the wait.
  Status Withdraw();
  Status GiveUp(const Status& why);
  Status TimedOut(const Status& withdrawn);
  Status Unanswered(const Status& why);
  // Looks at the processes of members that did not come, and tells the journal.
  std::map<SessionId, ProcessSeen> Witness(const std::vector<PeerIdentity>& late);

  [[nodiscard]] bool TooLate() const { return std::chrono::steady_clock::now() >= deadline_; }
  [[nodiscard]] std::string NameOf(SessionId session) const;

  const RoundContext& context_;
  const CycleKind kind_;
  const std::uint64_t cycle_;
  const bool again_;
  const Deadline deadline_;
  Discovery discovery_;
  State state_ = State::kWaiting;
  BegunMessage begun_;                                // if it has
  Lifecycle settled_{};                               // if it is
  std::unique_ptr<PeerConnection> leader_;            // null: this session has not come to one, or must come again
  std::vector<PeerIdentity> announced_;               // the set, as the leader was told
  std::optional<std::vector<PeerIdentity>> missing_;  // the leader's answer to a withdrawal
  std::vector<PeerIdentity> vanished_;                // were of the set, and are not any more
  SessionId last_leader_;                             // to which this session has come
  SessionId closed_leader_;                           // whose connection has ended
  std::optional<PeerIdentity> lost_;                  // whose end failed this call
  std::vector<PeerIdentity> culprits_;                // of a failure
  int closings_ = 0;
  std::chrono::milliseconds pause_{};
};

}  // namespace amem
