#include "replay/peers/unix/round.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "replay/peers/vote_counter.h"

namespace amem {
namespace {

constexpr auto kLookAgainFirst = std::chrono::milliseconds(10);
constexpr auto kLookAgainLast = std::chrono::milliseconds(200);
constexpr auto kWithdrawPatience = std::chrono::milliseconds(1000);
constexpr auto kAfterFailure = std::chrono::milliseconds(50);  // for the others to answer, once one has not
constexpr auto kDoubt = std::chrono::milliseconds(500);        // for a process that dies to be gone
constexpr auto kToCallAgain = std::chrono::milliseconds(300);  // for those who were told of a death
constexpr int kLeaderClosingsMax = 3;

Deadline In(std::chrono::milliseconds time) { return std::chrono::steady_clock::now() + time; }

std::chrono::milliseconds Grace(std::uint32_t timeout_ms) { return std::chrono::milliseconds(100 + timeout_ms / 4); }

bool CanBeRead(int fd) {
  pollfd polled{fd, POLLIN, 0};
  return fd >= 0 && ::poll(&polled, 1, 0) > 0;
}

}  // namespace

// ---- discovery -------------------------------------------------------------------------------------------------------------

Result<std::vector<SessionId>> Discovery::OwnNeighbours() {
  std::vector<SessionId> neighbours;
  std::vector<PeerIdentity> doubtful;
  const auto look = [&] {
    neighbours = delegate_.Neighbours();
    doubtful = service_.Doubtful();
  };
  if (!service_.Run(look)) return Status{Code::kRefused, "this process has stopped serving its peers"};
  AMEM_TRY(Dispel(doubtful));
  std::erase(neighbours, service_.Self().session);
  std::erase_if(neighbours, [&](SessionId session) { return gone_.contains(session); });
  std::ranges::sort(neighbours);
  neighbours.erase(std::ranges::unique(neighbours).begin(), neighbours.end());
  for (const SessionId session : neighbours) {
    if (auto who = service_.Known(session)) known_.try_emplace(session, *who);
  }
  return neighbours;
}

// A session that lives, and that this one has lost all the same (its connection broke), still has its half of what they shared.
// To pause without it would tear the two halves apart.
Status Discovery::Dispel(const std::vector<PeerIdentity>& doubtful) {
  for (const auto& who : doubtful) {
    if (!IsGone(context_, who.session, kDoubt)) {
      return {Code::kRefused, "the connection to " + ToText(who) +
                                  " broke while they shared memory, and it still lives: neither can be paused without the "
                                  "other; restart the job"};
    }
    (void)service_.Run([&] { service_.NoteGone(who.session); });
  }
  return {};
}

// True: that session is dead, and those that live go on without it.
bool Discovery::LeaveOut(SessionId session, const Status& why) {
  if (why.code() != Code::kPeerLost || (progress_.contains(session) && !without_the_dead_)) return false;
  if (!IsGone(context_, session, kDoubt)) return false;
  gone_.insert(session);
  (void)service_.Run([&] { service_.NoteGone(session); });
  return true;
}

PeerIdentity Discovery::IdentityOf(SessionId session) const {
  const auto known = known_.find(session);
  return known != known_.end() ? known->second : PeerIdentity{.session = session};
}

// Somebody died while others waited for it, and they were told; they do not wait any more. Who comes after that would find all
// that live, and wait for them in vain: unless they call again at once, it fails as they did, and with their next call all
// meet.
bool Discovery::FailedWithoutUs(const NeighbourhoodMessage& other) const {
  return other.lost && !without_the_dead_ && !service_.HasFailedBy(other.lost->session);
}

Status Discovery::FailAs(const NeighbourhoodMessage& other) {
  if (!others_failed_) others_failed_ = std::chrono::steady_clock::now();
  if (std::chrono::steady_clock::now() < *others_failed_ + kToCallAgain) return {};
  lost_ = other.lost;
  return {Code::kPeerLost, ToText(*lost_) + " " + HowItEnded(context_, lost_->session) + ", and so the call of " +
                               ToText(other.self) + " has failed: call it again on all that are left"};
}

Status Discovery::Unreachable(SessionId session, const Status& why) const {
  const PeerIdentity known = IdentityOf(session);
  const std::string who = known.pid != 0 ? ToText(known) : ToText(session);
  const std::string what =
      why.code() == Code::kTimeout ? "no answer within " + std::to_string(timeout_ms_) + " ms" : why.message();
  return {why.code(), "asking " + who + " with whom it shares memory: " + what};
}

Status Discovery::OtherGroup(SessionId by, const PeerIdentity& other) const {
  const PeerIdentity self = service_.Self();
  const auto at = known_.find(by);
  const PeerIdentity& sharer = at == known_.end() ? self : at->second;
  return {Code::kRefused,
          ToText(self.session == by ? self : sharer) + " of group " + std::to_string(self.group) + " shares memory with " +
              ToText(other) + " of group " + std::to_string(other.group) +
              ": sessions that share memory pause together; give them one group (AMEM_GROUPID, ncclSetGroupID)"};
}

Result<std::uint64_t> Discovery::Ask(SessionId session, Deadline deadline) {
  auto at = connections_.find(session);
  if (at == connections_.end()) {
    auto begun = PeerConnection::Begin(context_, session, Purpose::kRound, service_.Self(), deadline);
    if (!begun) return begun.status();
    at = connections_.emplace(session, *std::move(begun)).first;
  }
  silent_.insert(session);
  const std::uint64_t question = at->second->NextRequest();
  AMEM_TRY(at->second->Send({question, AskNeighboursMessage{}}, deadline));
  return question;
}

Result<NeighbourhoodMessage> Discovery::Hear(SessionId session, std::uint64_t question, Deadline deadline,
                                             int unless_readable) {
  PeerConnection& connection = *connections_.at(session);
  while (true) {
    auto answer = connection.TryReceive();
    if (!answer) return answer.status();
    if (!answer->has_value()) {
      if (CanBeRead(unless_readable)) return Status{Code::kTimeout, ""};
      AMEM_TRY(connection.Wait(PeerConnection::Until::kReadable, deadline, unless_readable));
      continue;
    }
    Message& message = (*answer)->message;
    if (const auto* failure = std::get_if<FailureMessage>(&message.body)) return failure->status;
    auto* neighbourhood = std::get_if<NeighbourhoodMessage>(&message.body);
    // What else comes is the welcome, or the answer to a question that was given up.
    if (neighbourhood != nullptr && message.request == question) return std::move(*neighbourhood);
  }
}

// All questions first, then all answers. When several do not answer all are named: the first may have gone because of the next.
Result<std::vector<NeighbourhoodMessage>> Discovery::AskAll(const std::vector<SessionId>& sessions, Deadline deadline,
                                                            int unless_readable) {
  std::map<SessionId, std::uint64_t> questions;
  std::vector<NeighbourhoodMessage> answers;
  Status failure;
  const auto failed = [&](SessionId session, const Status& why) {
    if (why.code() != Code::kTimeout) connections_.erase(session);
    if (LeaveOut(session, why)) return;
    const Status named = Unreachable(session, why);
    if (why.code() == Code::kPeerLost) lost_ = IdentityOf(session);
    failure = failure.ok() ? named : Status{failure.code(), failure.message() + "; " + named.message()};
    deadline = std::min(deadline, In(kAfterFailure));
  };
  for (const SessionId session : sessions) {
    auto question = Ask(session, deadline);
    if (question) questions[session] = *question;
    if (!question) failed(session, question.status());
  }
  for (const auto& [session, question] : questions) {
    auto answer = Hear(session, question, deadline, unless_readable);
    if (answer) answers.push_back(*std::move(answer));
    // Who has no time left because of another's failure is not to blame.
    if (!answer && (failure.ok() || answer.status().code() != Code::kTimeout)) failed(session, answer.status());
  }
  if (!failure.ok()) return failure;
  return answers;
}

Result<std::vector<PeerIdentity>> Discovery::Look(Deadline deadline, int unless_readable) {
  auto frontier = OwnNeighbours();
  if (!frontier) return frontier.status();
  const PeerIdentity self = service_.Self();
  std::map<SessionId, PeerIdentity> set{{self.session, self}};
  std::map<SessionId, SessionId> through;  // who shares memory with it
  for (const SessionId session : *frontier) through[session] = self.session;
  bool others_failed = false;
  while (!frontier->empty()) {
    auto answers = AskAll(*frontier, deadline, unless_readable);
    if (!answers) return answers.status();
    frontier->clear();
    for (const auto& answer : *answers) {
      set[answer.self.session] = known_[answer.self.session] = answer.self;
      progress_[answer.self.session] = answer.standing;
      silent_.erase(answer.self.session);
    }
    const auto other = std::ranges::find_if(*answers, [this](const auto& answer) { return FailedWithoutUs(answer); });
    if (other != answers->end()) {
      others_failed = true;
      AMEM_TRY(FailAs(*other));
    }
    for (const auto& answer : *answers) {
      const SessionId session = answer.self.session;
      if (answer.self.group != self.group) return OtherGroup(through[session], answer.self);
      for (const auto& neighbour : answer.neighbours) {
        if (neighbour.pid != 0) known_.try_emplace(neighbour.session, neighbour);
        if (set.contains(neighbour.session) || gone_.contains(neighbour.session)) continue;
        if (!through.try_emplace(neighbour.session, session).second) continue;
        frontier->push_back(neighbour.session);
      }
    }
  }
  if (!others_failed) others_failed_.reset();
  std::erase_if(connections_, [&](const auto& item) { return !set.contains(item.first); });
  std::vector<PeerIdentity> members;
  for (auto& [session, who] : set) members.push_back(std::move(who));
  return members;
}

namespace {

// ---- voting ----------------------------------------------------------------------------------------------------------------

struct RoundBegun {                        // how waiting for the others ended
  std::unique_ptr<PeerConnection> leader;  // null: there are none
  BegunMessage begun;
  std::optional<Lifecycle> settled;  // of a member that will not come, as it has ended this cycle
};
Result<RoundBegun> Gather(const RoundContext& context, CycleKind kind, std::uint64_t cycle, bool again);

class UnixRound final : public Round {
 public:
  UnixRound(const RoundContext& context, CycleKind kind, std::uint64_t cycle, RoundBegun begun)
      : context_(context), timeout_ms_(context.timeout_ms), kind_(kind), cycle_(cycle) {
    Adopt(std::move(begun));
  }
  ~UnixRound() override {
    Leave();
    *context_.busy = false;
  }
  [[nodiscard]] std::vector<PeerIdentity> Members() const override { return members_; }
  [[nodiscard]] bool Leaderless() const override { return !lost_.ok() && !given_up_; }

  Result<std::optional<Lifecycle>> Regather() override {
    given_up_ = true;
    leader_.reset();  // it may be stopped, and not dead: it counts this session no more
    auto again = Gather(context_, kind_, cycle_, true);
    if (!again) return again.status().Within("gathering without " + ToText(LeaderIdentity()));
    if (again->settled) return again->settled;
    Adopt(*std::move(again));
    return std::optional<Lifecycle>();
  }

  Status Vote(PhaseKind phase, const Status& mine, SessionId* culprit) override {
    if (leader_ == nullptr && lost_.ok()) return VoteAlone(phase, mine, culprit);
    const auto decision = lost_.ok() ? AskLeader(phase, mine) : DecisionMessage{id_, index_, leader_session_, lost_};
    if (culprit != nullptr) *culprit = decision.culprit;
    return decision.status;
  }

 private:
  void Adopt(RoundBegun begun) {
    leader_ = std::move(begun.leader);
    leader_session_ = leader_ ? leader_->to() : context_.service->Self().session;
    id_ = begun.begun.round;
    members_ = std::move(begun.begun.members);
    if (leader_ == nullptr) members_ = {context_.service->Self()};
    std::ranges::sort(members_, {}, &PeerIdentity::session);
    index_ = 0;
    lost_ = {};
    given_up_ = false;
  }
  void Leave() {
    if (leader_ != nullptr) (void)leader_->TrySend({0, LeaveMessage{id_}});
    leader_.reset();
  }
  // Nobody shares memory with this session.
  Status VoteAlone(PhaseKind phase, const Status& mine, SessionId* culprit) const {
    if (culprit != nullptr) *culprit = mine.ok() ? SessionId{} : leader_session_;
    return mine.ok() ? mine : FailedVote(members_.front(), phase, mine);
  }

  DecisionMessage AskLeader(PhaseKind phase, const Status& mine) {
    const VoteMessage vote{id_, ++index_, phase, timeout_ms_, mine};
    const Deadline deadline = In(std::chrono::milliseconds(timeout_ms_) + Grace(timeout_ms_));
    Status failed = leader_->Send({leader_->NextRequest(), vote}, deadline);
    while (failed.ok()) {
      auto answer = leader_->Receive(deadline);
      if (!answer) {
        failed = answer.status();
      } else if (auto* decision = std::get_if<DecisionMessage>(&answer->message.body)) {
        if (decision->round == id_ && decision->index == index_) return std::move(*decision);
      } else if (auto* failure = std::get_if<FailureMessage>(&answer->message.body)) {
        return {id_, index_, leader_session_, failure->status.Within(About(phase))};
      }
    }
    lost_ = Describe(failed, phase);
    return {id_, index_, leader_session_, lost_};
  }

  [[nodiscard]] std::string About(PhaseKind phase) const {
    return ToText(LeaderIdentity()) + ", who counts the votes, in phase " + std::string(ToText(phase));
  }
  [[nodiscard]] Status Describe(const Status& failed, PhaseKind phase) const {
    if (failed.code() != Code::kTimeout) return failed.Within(About(phase));
    return {Code::kTimeout, "waited " + std::to_string(timeout_ms_ + Grace(timeout_ms_).count()) + " ms for " + About(phase) +
                                ": no decision came; look at what it is doing, or raise AMEM_TIMEOUT_MS"};
  }

  [[nodiscard]] PeerIdentity LeaderIdentity() const {
    const auto at = std::ranges::find(members_, leader_session_, &PeerIdentity::session);
    return at == members_.end() ? PeerIdentity{.session = leader_session_} : *at;
  }

  const RoundContext context_;
  const std::uint32_t timeout_ms_;
  const CycleKind kind_;
  const std::uint64_t cycle_;
  std::unique_ptr<PeerConnection> leader_;
  SessionId leader_session_;
  std::uint64_t id_ = 0;
  std::vector<PeerIdentity> members_;
  std::uint32_t index_ = 0;
  Status lost_;            // the leader
  bool given_up_ = false;  // and there is no other
};

// ---- arriving --------------------------------------------------------------------------------------------------------------

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

  Result<RoundBegun> Run() {
    if (!again_) context_.service->SetLoss(std::nullopt);
    auto begun = Wait();
    if (!begun && begun.status().code() == Code::kPeerLost) {
      if (!lost_) lost_ = discovery_.lost();
      context_.service->SetLoss(lost_ ? *lost_ : discovery_.IdentityOf(last_leader_));  // it must have been one of them
    }
    return begun;
  }

 private:
  Result<RoundBegun> Wait() {
    while (true) {
      Status looked = LookAndArrive();
      if (begun_) return Begin();
      if (alone_) return RoundBegun{};
      if (settled_) return RoundBegun{nullptr, {}, settled_};
      if (looked.ok()) looked = WaitForNews();
      if (!looked.ok() && !begun_) looked = GiveUp(looked);
      if (begun_) return Begin();
      if (!looked.ok()) return looked;
    }
  }
  Result<RoundBegun> Begin() { return RoundBegun{std::move(leader_), std::move(*begun_), {}}; }

  // Whoever is in a round is neither running nor paused; who has left it in order will not come back to it.
  [[nodiscard]] std::optional<Lifecycle> Settled() const {
    for (const auto& [session, standing] : discovery_.progress()) {
      const bool ended = standing.lifecycle == Lifecycle::kRunning || standing.lifecycle == Lifecycle::kPaused;
      if (ended) return standing.lifecycle;
    }
    return std::nullopt;
  }

  // Sees who is in the set now, and makes sure that its leader knows that this session has come and what it sees.
  Status LookAndArrive() {
    // The leader's word comes first; and nobody is to blame who just had no time left to answer.
    const auto superseded = [&] { return leader_ != nullptr && (TooLate() || CanBeRead(leader_->fd())); };
    if (superseded()) return {};
    auto set = discovery_.Look(deadline_, leader_ != nullptr ? leader_->fd() : -1);
    if (!set && superseded()) return {};
    if (!set) return set.status();
    AMEM_TRY(NobodyDied(*set));
    alone_ = set->size() == 1 && leader_ == nullptr;
    if (alone_) return {};
    if (again_) settled_ = Settled();
    if (settled_) {
      if (leader_ != nullptr) (void)Withdraw();
      return {};
    }
    const SessionId lowest = set->front().session;
    if (leader_ != nullptr && leader_->to() == lowest && *set == said_) return {};
    if (leader_ != nullptr && leader_->to() != lowest) {
      (void)Withdraw();
      if (begun_) return {};
      leader_.reset();
      alone_ = set->size() == 1;
      if (alone_) return {};
    }
    said_ = *std::move(set);
    return Arrive(lowest);
  }

  // Whoever was waited for and is of the set no more has let go of what it shared, or has died. Those who share memory with it
  // fail; so must those who only knew it through them.
  Status NobodyDied(const std::vector<PeerIdentity>& set) {
    for (const auto& who : said_) {
      if (std::ranges::find(set, who.session, &PeerIdentity::session) == set.end()) vanished_.push_back(who);
    }
    for (const auto& who : vanished_) {
      // One that is dying may still seem to listen: the leader whose connection has ended is waited for, the others looked at
      // again later.
      const auto patience = who.session == closed_leader_ ? kDoubt : std::chrono::milliseconds(0);
      if (again_ || !IsGone(context_.connection, who.session, patience)) continue;
      lost_ = who;
      return {Code::kPeerLost, ToText(who) + " " + HowItEnded(context_.connection, who.session) + " while it was waited for"};
    }
    closed_leader_ = {};
    return {};
  }

  Status Arrive(SessionId leader) {
    last_leader_ = leader;
    if (leader_ == nullptr) {
      auto connection =
          PeerConnection::Begin(context_.connection, leader, Purpose::kRound, context_.service->Self(), deadline_);
      if (!connection) return connection.status().Within(NameOf(leader));
      leader_ = *std::move(connection);
    }
    Status sent = leader_->Send({leader_->NextRequest(), ArriveMessage{kind_, cycle_, said_}}, deadline_);
    return sent.Within(NameOf(leader));
  }

  // Ok: something may have changed; look again, unless it has begun.
  Status WaitForNews() {
    auto answer = leader_->TryReceive();
    while (answer && answer->has_value()) {
      AMEM_TRY(Take((*answer)->message.body));
      if (begun_) return {};
      answer = leader_->TryReceive();
    }
    if (!answer) return LeaderClosed(answer.status());
    if (TooLate()) return {Code::kTimeout, ""};  // GiveUp finds the words
    const Deadline look_again = std::min(deadline_, In(pause_));
    pause_ = std::min<std::chrono::milliseconds>(pause_ * 2, kLookAgainLast);
    return Poll(look_again);
  }

  Status Take(const MessageBody& body) {
    if (const auto* begun = std::get_if<BegunMessage>(&body)) begun_ = *begun;
    if (const auto* failure = std::get_if<FailureMessage>(&body)) {
      leader_.reset();  // it has forgotten this arrival
      return failure->status;
    }
    if (const auto* withdrawn = std::get_if<WithdrawnMessage>(&body)) missing_ = withdrawn->missing;
    return {};
  }

  Status LeaderClosed(const Status& why) {
    const std::string who = NameOf(leader_->to());
    closed_leader_ = leader_->to();
    leader_.reset();
    // Looking again tells whether it is still of the set, and says so if it has died.
    return ++closings_ < kLeaderClosingsMax ? Status{} : why.Within(who);
  }

  Status Poll(Deadline until) {
    const int change = context_.service->change_fd();
    std::vector<pollfd> polled{{leader_->fd(), POLLIN, 0},
                               {context_.connection.stop, POLLIN, 0},
                               {change, POLLIN, 0},
                               {leader_->process_fd(), POLLIN, 0}};
    for (const auto& [session, connection] : discovery_.connections()) {
      polled.push_back({connection->fd(), POLLIN, 0});
      polled.push_back({connection->process_fd(), POLLIN, 0});
    }
    const int n = ::poll(polled.data(), polled.size(), MillisecondsUntil(until));
    if (n < 0 && errno != EINTR) return {Code::kIo, "poll: " + ErrnoText(errno)};
    if (n > 0 && polled[1].revents != 0) return {Code::kRefused, "this process has stopped serving its peers"};
    if (n > 0 && polled[2].revents != 0) {
      std::uint64_t count = 0;
      (void)!::read(change, &count, sizeof(count));
      pause_ = kLookAgainFirst;
    }
    return {};
  }

  // After this the leader does not count this session any more - or the round has begun in the same moment, for everybody.
  Status Withdraw() {
    const Deadline patience = In(kWithdrawPatience);
    missing_.reset();
    Status status = leader_->Send({leader_->NextRequest(), WithdrawMessage{}}, patience);
    while (status.ok() && !begun_ && !missing_) {
      auto answer = leader_->Receive(patience);
      status = answer ? Take(answer->message.body) : answer.status();
      if (leader_ == nullptr) break;
    }
    return status;
  }

  Status GiveUp(const Status& why) {
    Status withdrawn;
    if (leader_ != nullptr) withdrawn = Withdraw();
    if (begun_ || why.code() != Code::kTimeout || !why.message().empty()) return begun_ ? Status{} : why;
    const std::string waited = "waited " + std::to_string(context_.timeout_ms) + " ms for ";
    const std::string advice = ": all that share memory must call it; look at what they are doing, or raise AMEM_TIMEOUT_MS";
    if (!withdrawn.ok() && leader_ != nullptr)
      return {Code::kTimeout, waited + NameOf(leader_->to()) + ", who counts arrivals, to answer" + advice};
    const auto missing = missing_.value_or(said_);
    return {Code::kTimeout, waited + ToText(missing) + " to come" +
                                WhatTheyDo(kind_, missing, discovery_.progress(), discovery_.silent()) + advice};
  }

  [[nodiscard]] bool TooLate() const { return std::chrono::steady_clock::now() >= deadline_; }

  [[nodiscard]] std::string NameOf(SessionId session) const {
    const auto at = std::ranges::find(said_, session, &PeerIdentity::session);
    return at == said_.end() ? ToText(session) : ToText(*at);
  }

  const RoundContext& context_;
  const CycleKind kind_;
  const std::uint64_t cycle_;
  const bool again_;
  const Deadline deadline_;
  Discovery discovery_;
  std::unique_ptr<PeerConnection> leader_;
  std::vector<PeerIdentity> said_;  // the set, as the leader was told
  std::optional<BegunMessage> begun_;
  std::optional<std::vector<PeerIdentity>> missing_;
  std::optional<Lifecycle> settled_;
  std::vector<PeerIdentity> vanished_;  // were of the set, and are not any more
  SessionId last_leader_;               // to whom this session has come
  SessionId closed_leader_;             // its connection has ended
  std::optional<PeerIdentity> lost_;    // that failed this call
  bool alone_ = false;
  int closings_ = 0;
  std::chrono::milliseconds pause_ = kLookAgainFirst;
};

Result<RoundBegun> Gather(const RoundContext& context, CycleKind kind, std::uint64_t cycle, bool again) {
  return Arrival(context, kind, cycle, again).Run();
}

}  // namespace

Result<std::unique_ptr<Round>> ArriveAtRound(const RoundContext& context, CycleKind kind, std::uint64_t cycle) {
  auto begun = Gather(context, kind, cycle, false);
  if (!begun) {
    *context.busy = false;
    return begun.status();
  }
  return std::unique_ptr<Round>(new UnixRound(context, kind, cycle, *std::move(begun)));
}

}  // namespace amem
