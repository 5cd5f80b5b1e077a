// A member's side of a round that has begun: voting, and gathering again when the leader is lost.
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "replay/peers/unix/arrival.h"
#include "replay/peers/vote_counter.h"

namespace amem {
namespace {

constexpr std::chrono::milliseconds kPatienceWithJournal{100};

class UnixRound final : public Round {
 public:
  UnixRound(const RoundContext& context, RoundCall call, RoundBegun begun) : context_(context), call_(std::move(call)) {
    Adopt(std::move(begun));
  }
  ~UnixRound() override {
    if (leader_ != nullptr) (void)leader_->TrySend({0, LeaveMessage{id_}});
  }
  [[nodiscard]] std::vector<PeerIdentity> Members() const override { return members_; }
  [[nodiscard]] Deadline until() const override { return until_; }
  void SetUntil(Deadline until) override { until_ = until; }
  [[nodiscard]] bool Leaderless() const override { return !lost_.ok() && !given_up_; }

  Result<std::optional<Lifecycle>> Regather() override {
    given_up_ = true;
    lost_leaders_.insert(leader_session_);
    leader_.reset();  // it may be stopped rather than dead; it does not count this session any more
    RoundCall call = call_;
    call.until = std::max(until_, In(context_.deadlines.round_least()));
    call.patient = false;
    AMEM_ASSIGN(auto again, Arrival(context_, std::move(call), lost_leaders_, spared_)
                                .Run()
                                .Within("going on without " + ToText(LeaderIdentity())));
    if (again.settled) return again.settled;
    Adopt(std::move(again));
    return std::optional<Lifecycle>();
  }

  Decision Vote(PhaseKind phase, const Status& mine) override {
    if (leader_ == nullptr && lost_.ok()) return VoteAlone(phase, mine);
    const Deadline began = Now();
    Decision decision = lost_.ok() ? AskLeader(phase, mine) : NotHeard(lost_);
    // The leader has looked at its process for the message; this member looks for its own journal. A lost one was looked at
    // when its connection ended.
    const bool late = decision.status.code() == Code::kTimeout && lost_.ok();
    if (late && decision.culprit && decision.culprit != context_.service->sessions().Self().session)
      Witness(IdentityOf(decision.culprit), began);
    return decision;
  }

 private:
  void Adopt(RoundBegun begun) {
    leader_ = std::move(begun.leader);
    leader_session_ = leader_ ? leader_->to() : context_.service->sessions().Self().session;
    until_ = begun.until;
    id_ = begun.begun.round;
    members_ = std::move(begun.begun.members);
    spared_ = std::move(begun.spared);
    if (leader_ == nullptr) members_ = {context_.service->sessions().Self()};
    std::ranges::sort(members_, {}, &PeerIdentity::session);
    index_ = 0;
    lost_ = {};
    given_up_ = false;
  }
  // No session shares memory with this one.
  [[nodiscard]] Decision VoteAlone(PhaseKind phase, const Status& mine) const {
    if (mine.ok()) return {};
    return {.culprit = leader_session_, .status = FailedVote(members_.front(), phase, mine), .against = true};
  }
  // The leader has not told what was decided, so nothing is known of the others either.
  [[nodiscard]] Decision NotHeard(Status why) const {
    Decision decision{.culprit = leader_session_, .status = std::move(why), .heard = false};
    for (const PeerIdentity& who : members_)
      if (who.session != context_.service->sessions().Self().session) decision.absent.push_back(who.session);
    return decision;
  }

  Decision AskLeader(PhaseKind phase, const Status& mine) {
    const Deadline began = Now();
    const auto margin = context_.deadlines.margin();
    const auto left = std::max(LeftUntil(until_), margin);
    const VoteMessage vote{id_, ++index_, phase, static_cast<std::uint32_t>(left.count()), mine, mine.reported_by()};
    const Deadline deadline = began + left + margin;
    Status failed = leader_->Send({leader_->NextRequest(), vote}, deadline);
    while (failed.ok()) {
      const auto answer = leader_->Receive(deadline);
      if (!answer) failed = answer.status();
      if (auto decision = answer ? DecisionIn(answer->message.body, phase) : std::nullopt) return *std::move(decision);
    }
    // A leader that was stopped, and goes on, must not count this vote. It may have told the decision just before.
    (void)leader_->TrySend({0, LeaveMessage{id_}});
    leader_->HangUp();
    if (const auto last = leader_->TryReceive(); last && last->has_value())
      if (auto decision = DecisionIn((*last)->message.body, phase)) return *std::move(decision);
    const std::string why = failed.code() == Code::kTimeout ? Witness(LeaderIdentity(), began) : std::string();
    lost_ = Describe(failed, phase, began, why);
    return NotHeard(lost_);
  }

  // Empty: it is about an earlier vote.
  [[nodiscard]] std::optional<Decision> DecisionIn(const MessageBody& body, PhaseKind phase) const {
    const auto* decision = std::get_if<DecisionMessage>(&body);
    if (decision != nullptr && decision->round == id_ && decision->index == index_) return decision->decision;
    const auto* failure = std::get_if<FailureMessage>(&body);
    if (failure == nullptr) return std::nullopt;
    Decision refused = NotHeard(failure->status.Within(About(phase)));
    refused.against = true;
    return refused;
  }

  [[nodiscard]] std::string About(PhaseKind phase) const {
    return fmt::format("{}, who counts the votes, in phase {}", ToText(LeaderIdentity()), ToText(phase));
  }
  [[nodiscard]] Status Describe(const Status& failed, PhaseKind phase, Deadline began, const std::string& why) const {
    if (failed.code() != Code::kTimeout) return failed.Within(About(phase));
    return {Code::kTimeout, fmt::format("waited {} ms for {}: no decision came{}{}", SinceThen(began).count(), About(phase),
                                        why.empty() ? why : ": it " + why, OrRaiseTheTimeout("; look at what it is doing"))};
  }
  // Looks at a late member's process, tells the journal, and returns what would explain the delay.
  std::string Witness(const PeerIdentity& who, Deadline began) {
    const bool leads = leader_ != nullptr && leader_->to() == who.session;
    const EventBody fact = SeeProcessOf(who, leads ? leader_.get() : nullptr, context_.connection, SinceThen(began));
    (void)context_.delegate->OnWitnessed({&fact, 1}, kPatienceWithJournal);
    return WhyLate(std::get<ProcessSeen>(fact));
  }

  [[nodiscard]] PeerIdentity LeaderIdentity() const { return IdentityOf(leader_session_); }
  [[nodiscard]] PeerIdentity IdentityOf(SessionId session) const {
    const auto at = std::ranges::find(members_, session, &PeerIdentity::session);
    return at == members_.end() ? PeerIdentity{.session = session} : *at;
  }

  const RoundContext context_;
  const RoundCall call_;
  Deadline until_;
  std::unique_ptr<PeerConnection> leader_;
  SessionId leader_session_;
  std::set<SessionId> lost_leaders_, spared_;
  std::uint64_t id_ = 0;
  std::vector<PeerIdentity> members_;
  std::uint32_t index_ = 0;
  Status lost_;            // why the leader is lost; ok: it is not
  bool given_up_ = false;  // no new leader was found
};

}  // namespace

Result<std::unique_ptr<Round>> ArriveAtRound(const RoundContext& context, RoundCall call, std::vector<PeerIdentity>* culprits) {
  call.patient = call.patient && call.kind == CycleKind::kResume;
  Arrival arrival(context, call);
  auto begun = arrival.Run();
  if (!begun) {
    if (culprits != nullptr) *culprits = arrival.culprits();
    return begun.status();
  }
  return std::unique_ptr<Round>(new UnixRound(context, std::move(call), *std::move(begun)));
}

}  // namespace amem
