// The vote counter: the leader of a set counts arrivals and votes here. It belongs to the service thread of every session, so
// that it works before the leader's own thread has come to its pause, and it knows nothing of sockets or clocks: events go in
// with their time, and messages to members come out through `say`.
//
// A round's votes are numbered from 1. Each vote gets one decision, made once and kept until all members have left the round: a
// member that votes late is told what was decided, and so all members always see the same.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "replay/peers/messages.h"

namespace amem {

// Hears what a counter hears. Called on the counter's thread, which waits for nobody.
class VoteObserver {
 public:
  virtual ~VoteObserver() = default;
  virtual void Heard(const MemberHeard& heard) = 0;  // in rounds about NCCL's memory
  // A vote is decided without that member, which did not come in time. Returns what is seen of its process, in words for the
  // message of all members, such as "is stopped (SIGSTOP?)"; empty: nothing.
  virtual std::string Late(const PeerIdentity& who, std::chrono::nanoseconds waited) = 0;
};

class VoteCounter {
 public:
  using ConnectionId = std::uint64_t;
  using Time = std::chrono::steady_clock::time_point;
  using Say = std::function<void(ConnectionId, MessageBody)>;

  // For the rounds about one tag. `observer` may be null.
  explicit VoteCounter(Say say, VoteObserver* observer = nullptr, std::string tag = {})
      : say_(std::move(say)), observer_(observer), tag_(std::move(tag)) {}

  // A member says which set it sees, and how much time it has left; a later message of the same member replaces an earlier one.
  void Arrived(ConnectionId connection, const PeerIdentity& who, const ArriveMessage& arrival, Time now);
  // "Do not count me": answered with the members that were missing - or not at all, when the round has begun in the same
  // moment.
  void Withdrew(ConnectionId connection, Time now);
  void Voted(ConnectionId connection, const VoteMessage& vote, Time now);
  void Left(ConnectionId connection, std::uint64_t round);
  void Closed(ConnectionId connection, const std::string& how, Time now);  // "died", "has closed"

  [[nodiscard]] std::optional<Time> NextDeadline() const;
  void Tick(Time now);
  [[nodiscard]] bool idle() const { return rounds_.empty() && gathering_.empty() && heard_.empty(); }

 private:
  struct Arrival {
    ConnectionId connection = 0;
    PeerIdentity who;
    CycleKind kind{};
    std::vector<PeerIdentity> set;
    std::optional<Time> until;
  };
  struct Member {
    ConnectionId connection = 0;
    PeerIdentity who;
    bool gone = false;
    bool told = false;     // a decision has named its death
    bool against = false;  // it voted against an arrival, which was decided, and has not voted since
    bool late = false;     // a decision has named its absence; votes do not wait for it until it has caught up
    std::string how;       // how it ended
  };
  struct Ballot {  // the open vote
    std::map<SessionId, VoteMessage> votes;
    std::optional<SessionId> first_failure;
    Time opened;
    std::optional<Time> deadline;
    [[nodiscard]] bool late(Time now) const { return deadline && now >= *deadline; }
  };
  struct Ongoing {
    std::uint64_t id = 0;
    CycleKind kind{};
    std::map<SessionId, Member> members;
    std::vector<DecisionMessage> decisions;
    Ballot ballot;
    [[nodiscard]] std::uint32_t open_index() const { return static_cast<std::uint32_t>(decisions.size()) + 1; }
  };
  struct Place {  // a connection's part in rounds
    std::uint64_t round = 0;
    SessionId session;
  };

  [[nodiscard]] std::vector<PeerIdentity> Missing() const;
  [[nodiscard]] std::vector<PeerIdentity> NeverCame() const;
  void ForgetArrival(ConnectionId connection);
  void RefuseMixture(const Arrival& newcomer);
  void BeginIfComplete(Time now);
  [[nodiscard]] std::uint32_t LeastLeft(Time now) const;
  void Disconnected(ConnectionId connection, const std::string& how);
  void DecideIfPossible(Ongoing& round, Time now);
  [[nodiscard]] Status DidNotVote(const std::vector<PeerIdentity>& absent, Time::duration waited, const std::string& in_phase);
  void Decide(Ongoing& round, SessionId culprit, Status status);

  Say say_;
  VoteObserver* observer_;
  const std::string tag_;
  std::map<SessionId, Arrival> gathering_;  // all of one kind
  std::set<ConnectionId> heard_;            // whose arrival the observer was told of; a member that waits comes again and again
  std::set<SessionId> gave_up_;             // came, and withdrew because others did not
  std::map<std::uint64_t, Ongoing> rounds_;
  std::map<ConnectionId, Place> places_;  // of members of ongoing rounds
  std::uint64_t last_round_ = 0;
};

// "rank 2 (pid 4711 on host a) failed in phase create own: out of memory", the form of every vote that fails.
Status FailedVote(const PeerIdentity& who, PhaseKind phase, const Status& reason);
std::string ToText(const std::vector<PeerIdentity>& peers);  // "rank 1 (...), rank 2 (...)"
// What a missing member said of itself: "running, has not called ncclPause"; empty: nothing.
std::string AnswerOf(const RoundCall& call, Lifecycle lifecycle);
// The same for a message about the member: "is running and has not called ncclPause".
std::string WhatItDoes(const RoundCall& call, Lifecycle lifecycle);
// What explains why a process is late, for messages: "is stopped (SIGSTOP?)"; empty: nothing.
std::string WhyLate(const ProcessSeen& seen);
// What is known of missing members: ", of whom rank 1 (...) is running and has not called ncclPause"; or nothing.
std::string WhatTheyDo(const RoundCall& call, const std::vector<PeerIdentity>& missing,
                       const std::map<SessionId, CycleProgress>& progress, const std::set<SessionId>& silent,
                       const std::map<SessionId, ProcessSeen>& seen);

}  // namespace amem
