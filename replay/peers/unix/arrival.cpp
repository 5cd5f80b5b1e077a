#include "replay/peers/unix/arrival.h"

#include <fmt/format.h>

#include <utility>

#include "replay/peers/vote_counter.h"

namespace amem {

constexpr auto kLookAgainFirst = std::chrono::milliseconds(10);
constexpr auto kLookAgainLast = std::chrono::milliseconds(200);
constexpr auto kWithdrawPatience = std::chrono::milliseconds(1000);
constexpr int kLeaderClosingsMax = 3;
constexpr std::chrono::milliseconds kWitnessPatience{100};  // to wait for the journal
constexpr std::chrono::milliseconds kForLostLeader{20};     // to answer, if it lives

static std::string OfTag(const std::string& tag) { return tag.empty() ? "" : " of tag " + tag; }

Result<RoundBegun> Arrival::Run() {
  SessionRegistry& sessions = context_.service->sessions();
  if (!again_) sessions.SetLoss(call_.tag, std::nullopt);
  pause_ = kLookAgainFirst;
  auto begun = Wait();
  if (!begun && begun.status().code() == Code::kPeerLost) {
    if (!lost_) lost_ = discovery_.lost();
    if (!lost_) lost_ = discovery_.IdentityOf(last_leader_);  // it was one of the members
    sessions.SetLoss(call_.tag, *lost_);
    culprits_ = {*lost_};
  }
  if (!begun && discovery_.refusing()) culprits_ = {*discovery_.refusing()};
  return begun;
}

Result<RoundBegun> Arrival::Wait() {
  while (true) {
    Status status = LookAndArrive();
    // A member said earlier that it is busy; this look had no time to hear it again.
    if (status.code() == Code::kTimeout && !IsBusy(status) && !busy_.ok()) status = busy_;
    if (status.ok() && state_ == State::kWaiting) status = WaitForNews();
    busy_ = IsBusy(status) ? status : Status{};
    if (IsBusy(status) && Nap().ok() && !TooLate()) continue;
    if (!status.ok() && state_ == State::kWaiting) status = GiveUp(status);
    if (state_ != State::kWaiting) return Outcome();
    if (!status.ok()) return status;
  }
}

RoundBegun Arrival::Outcome() {
  // A resume has no shortest time left; its time begins when all have come.
  const Deadline common = In(begun_.left_ms == 0 ? context_.deadlines.call() : std::chrono::milliseconds(begun_.left_ms));
  const Deadline until = std::max(common, In(context_.deadlines.round_least()));
  return {state_ == State::kBegun ? std::move(leader_) : nullptr, std::move(begun_), until, settled_, std::move(spared_)};
}

// ---- looking ---------------------------------------------------------------------------------------------------------------

// What the leader says counts first. A member that had no time to answer is not to blame.
bool Arrival::Superseded() const { return leader_ != nullptr && (TooLate() || CanBeRead(leader_->fd())); }

// Finds the current set, and makes sure that its leader knows of this session and of that set.
Status Arrival::LookAndArrive() {
  if (Superseded()) return {};
  auto set = discovery_.Look(deadline_, leader_ != nullptr ? leader_->fd() : -1);
  if (!set && Superseded() && !IsBusy(set.status())) return {};
  if (!set) return set.status();
  Spare(*set);
  AMEM_TRY(RequireNoDeath(*set));
  if (again_) {
    if (const auto settled = Settled()) {
      if (leader_ != nullptr) (void)Withdraw();
      if (state_ == State::kBegun) return {};
      settled_ = settled;
      state_ = State::kSettled;
      return {};
    }
  }
  return MoveTo(*std::move(set));
}

void Arrival::Spare(std::vector<PeerIdentity>& set) {
  if (!call_.spares || again_) return;  // who runs now may be a member that has ended this cycle
  spared_.clear();
  for (const auto& [session, progress] : discovery_.progress())
    if (progress.lifecycle == Lifecycle::kRunning && call_.spares(session)) spared_.insert(session);
  std::erase_if(set, [this](const PeerIdentity& who) { return spared_.contains(who.session); });
}

Status Arrival::MoveTo(std::vector<PeerIdentity> set) {
  const SessionId lowest = set.front().session;
  if (leader_ != nullptr && leader_->to() != lowest) {
    (void)Withdraw();
    if (state_ == State::kBegun) return {};
    leader_.reset();
  }
  if (leader_ == nullptr && set.size() == 1) {
    state_ = State::kAlone;
    return {};
  }
  if (leader_ != nullptr && set == announced_) return {};
  announced_ = std::move(set);
  return Arrive(lowest);
}

Status Arrival::Arrive(SessionId leader) {
  last_leader_ = leader;
  if (leader_ == nullptr) leader_ = discovery_.Take(leader);
  const auto outcome = [&](const Status& status) {
    if (status.code() == Code::kPeerLost) leader_.reset();
    return discovery_.WhyLost(leader, status).Within(discovery_.NameOf(leader));
  };
  if (leader_ == nullptr) {
    auto connection =
        PeerConnection::Begin(context_.connection, leader, Purpose::kRound, context_.service->sessions().Self(), deadline_);
    if (!connection) return outcome(connection.status());
    leader_ = *std::move(connection);
  }
  const auto left = call_.kind == CycleKind::kPause ? static_cast<std::uint32_t>(LeftUntil(deadline_).count()) : 0U;
  Status sent =
      leader_->Send({leader_->NextRequest(), ArriveMessage{call_.kind, call_.cycle, announced_, left, call_.tag}}, deadline_);
  return outcome(sent);
}

// A member in a round is neither running nor paused; one that left it in order does not come back. Nor does a lost leader,
// which may have been stopped between two members that it told.
std::optional<Lifecycle> Arrival::Settled() {
  const auto ended = [](Lifecycle now) { return now == Lifecycle::kRunning || now == Lifecycle::kPaused; };
  for (const auto& [session, progress] : discovery_.progress())
    if (ended(progress.lifecycle)) return progress.lifecycle;
  for (const SessionId leader : without_) {
    const auto progress = discovery_.ProgressOf(leader, std::min(deadline_, In(kForLostLeader)));
    if (progress.ok() && ended(progress->lifecycle)) return progress->lifecycle;
  }
  return std::nullopt;
}

// ---- waiting ---------------------------------------------------------------------------------------------------------------

// Ok: something may have changed, so look again unless the wait is over.
Status Arrival::WaitForNews() {
  auto answer = leader_->TryReceive();
  while (answer && answer->has_value()) {
    AMEM_TRY(Take((*answer)->message.body));
    if (state_ != State::kWaiting) return {};
    answer = leader_->TryReceive();
  }
  if (!answer) return LeaderClosed(answer.status());
  if (TooLate()) return {Code::kTimeout, ""};  // GiveUp writes the message
  return Nap();
}

Status Arrival::Nap() {
  const Deadline look_again = std::min(deadline_, In(pause_));
  pause_ = std::min<std::chrono::milliseconds>(pause_ * 2, kLookAgainLast);
  return Poll(look_again);
}

Status Arrival::Take(const MessageBody& body) {
  if (const auto* begun = std::get_if<BegunMessage>(&body)) {
    begun_ = *begun;
    state_ = State::kBegun;
  }
  if (const auto* failure = std::get_if<FailureMessage>(&body)) {
    const PeerIdentity leader = discovery_.IdentityOf(leader_->to());
    leader_.reset();  // it has forgotten this arrival
    if (failure->status.code() != Code::kNoDescriptors) return failure->status;
    culprits_ = {leader};
    return failure->status.Within(ToText(leader));
  }
  if (const auto* withdrawn = std::get_if<WithdrawnMessage>(&body)) missing_ = withdrawn->missing;
  return {};
}

Status Arrival::Poll(Deadline until) {
  const int change = context_.service->sessions().change_fd();
  std::vector<pollfd> polled{{leader_ != nullptr ? leader_->fd() : -1, POLLIN, 0},
                             {context_.connection.stop, POLLIN, 0},
                             {change, POLLIN, 0},
                             {leader_ != nullptr ? leader_->process_fd() : -1, POLLIN, 0}};
  for (const auto& [session, connection] : discovery_.connections()) {
    polled.push_back({connection->fd(), POLLIN, 0});
    polled.push_back({connection->process_fd(), POLLIN, 0});
  }
  const int n = PollUntil(polled, until);
  if (n < 0) return {Code::kIo, "poll: " + ErrnoText(errno)};
  if (n > 0 && polled[1].revents != 0) return {Code::kRefused, "this process has stopped serving its peers"};
  if (n > 0 && polled[2].revents != 0) {
    ReadEvent(change);
    pause_ = kLookAgainFirst;
  }
  return {};
}

// ---- members and leaders that are lost -------------------------------------------------------------------------------------

// A member that left the set has dropped its shared memory or died. If it died, sessions that share memory with it fail, and
// those that knew it only through them must fail too.
Status Arrival::RequireNoDeath(const std::vector<PeerIdentity>& set) {
  for (const auto& member : announced_)
    if (std::ranges::find(set, member.session, &PeerIdentity::session) == set.end()) vanished_.push_back(member);
  AMEM_TRY(RequireAlive(vanished_));
  closed_leader_ = {};
  return {};
}

Status Arrival::RequireAlive(const std::vector<PeerIdentity>& members) {
  for (const auto& member : members) {
    // A dying process may still seem to listen. Wait for a leader whose connection has ended; look at the others later.
    const auto patience = member.session == closed_leader_ ? kDyingPatience : kDyingPatience.zero();
    if (again_ || !context_.service->sessions().IsGone(member.session, patience)) continue;
    lost_ = member;
    return {Code::kPeerLost,
            ToText(member) + " " + HowItEnded(context_.connection, member.session) + " while it was waited for"};
  }
  return {};
}

Status Arrival::LeaderClosed(const Status& why) {
  const std::string name = discovery_.NameOf(leader_->to());
  closed_leader_ = leader_->to();
  leader_.reset();
  // The next look tells whether it is still in the set, or has died.
  return ++closings_ < kLeaderClosingsMax ? Status{} : discovery_.WhyLost(closed_leader_, why).Within(name);
}

// ---- ending the wait -------------------------------------------------------------------------------------------------------

// After this the leader does not count this session - or the round has begun in the same moment, for all members.
Status Arrival::Withdraw() {
  const Deadline patience = In(kWithdrawPatience);
  missing_.reset();
  Status status = leader_->Send({leader_->NextRequest(), WithdrawMessage{}}, patience);
  while (status.ok() && state_ != State::kBegun && !missing_) {
    auto answer = leader_->Receive(patience);
    status = answer ? Take(answer->message.body) : answer.status();
    if (leader_ == nullptr) break;
  }
  return status;
}

Status Arrival::GiveUp(const Status& why) {
  Status withdrawn;
  if (leader_ != nullptr) withdrawn = Withdraw();
  if (state_ == State::kBegun) return {};
  if (why.code() != Code::kTimeout) return why;
  const auto absent = Absent(why, withdrawn);
  AMEM_TRY(RequireAlive(absent));  // the end may have come between the last look and the deadline
  // This process was stopped in its call, or hardly ran, and does not know yet for whom it waits.
  const bool learned_nothing = why.message().empty() && absent.empty() && announced_.empty();
  if (MayComeYet(absent) || (call_.patient && learned_nothing)) return WaitOn(absent);
  return why.message().empty() ? TimedOut(absent, withdrawn) : Unanswered(absent, why);
}

std::vector<PeerIdentity> Arrival::Absent(const Status& why, const Status& withdrawn) const {
  std::vector<PeerIdentity> absent;
  if (!why.message().empty()) {  // it did not even say with whom it shares memory
    for (const SessionId session : discovery_.silent()) absent.push_back(discovery_.IdentityOf(session));
    return absent;
  }
  if (!withdrawn.ok() && leader_ != nullptr) return {discovery_.IdentityOf(leader_->to())};
  absent = missing_.value_or(announced_);
  std::erase(absent, context_.service->sessions().Self());
  return absent;
}

// Ranks finish what they do between a pause and a resume minutes apart; without AMem the first would wait as long in the next
// collective. A stopped member that was not seen running took part in the pause, so it is paused.
bool Arrival::MayComeYet(const std::vector<PeerIdentity>& absent) const {
  if (!call_.patient || absent.empty()) return false;
  return std::ranges::all_of(absent, [this](const PeerIdentity& who) {
    const auto at = discovery_.progress().find(who.session);
    const Lifecycle last = at == discovery_.progress().end() ? Lifecycle::kNew : at->second.lifecycle;
    const bool unheard = last == Lifecycle::kNew && discovery_.silent().contains(who.session);
    return last == Lifecycle::kPaused || unheard;
  });
}

Status Arrival::WaitOn(const std::vector<PeerIdentity>& absent) {
  // Counted again before anything that takes time, so that nobody who comes meanwhile misses this session. A leader that did
  // not answer is asked anew.
  deadline_ = In(context_.deadlines.margin());
  if (leader_ != nullptr && (!missing_ || !Arrive(leader_->to()).ok())) leader_.reset();
  if (!absent.empty() && Passed(next_word_)) SayForWhom(absent);
  deadline_ = In(context_.deadlines.margin());
  return {};
}

void Arrival::SayForWhom(const std::vector<PeerIdentity>& absent) {
  const auto waited = Waited();
  next_word_ = In(waited);  // more and more rarely
  const auto seen = Witness(absent);
  if (!context_.waiting) return;
  context_.waiting(fmt::format("resume{}: waits since {} s for {}{}", OfTag(call_.tag), waited.count() / 1000, ToText(absent),
                               WhatTheyDo(call_, absent, discovery_.progress(), discovery_.silent(), seen)));
}

// A member did not even say with whom it shares memory.
Status Arrival::Unanswered(const std::vector<PeerIdentity>& silent, const Status& why) {
  culprits_ = silent;
  std::string text = why.message();
  for (const auto& [session, seen] : Witness(silent)) {
    if (const std::string what = WhyLate(seen); !what.empty())
      text += "; " + ToText(discovery_.IdentityOf(session)) + " " + what;
  }
  return {why.code(), text, why.driver_result()};
}

std::map<SessionId, ProcessSeen> Arrival::Witness(const std::vector<PeerIdentity>& late) {
  const std::chrono::milliseconds waited = Waited();
  std::map<SessionId, ProcessSeen> all;
  std::vector<EventBody> facts;
  for (const PeerIdentity& who : late) {
    if (who.session == context_.service->sessions().Self().session) continue;
    const auto* const open = FindIn(discovery_.connections(), who.session);
    ProcessSeen seen = SeeProcessOf(who, open == nullptr ? nullptr : open->get(), context_.connection, waited);
    if (const auto at = discovery_.progress().find(who.session); at != discovery_.progress().end())
      seen.answer = AnswerOf(call_, at->second.lifecycle);
    if (discovery_.silent().contains(who.session)) seen.answer = "silent";
    facts.emplace_back(seen);
    all.emplace(who.session, std::move(seen));
  }
  if (!facts.empty()) (void)context_.delegate->OnWitnessed(facts, kWitnessPatience);
  return all;
}

Status Arrival::TimedOut(const std::vector<PeerIdentity>& absent, const Status& withdrawn) {
  const std::string advice = OrRaiseTheTimeout(": all that share memory must call it; look at what they are doing");
  if (!withdrawn.ok() && leader_ != nullptr) {
    const PeerIdentity leader = discovery_.IdentityOf(leader_->to());
    if (leader.session == context_.service->sessions().Self().session) return PeerService::NotServed();
    culprits_ = {leader};
    const std::string why = WhyLate(Witness(culprits_).at(leader.session));
    return {Code::kTimeout, fmt::format("waited {} ms for {}, who counts arrivals, to answer{}{}", Waited().count(),
                                        ToText(leader), why.empty() ? why : ", which " + why, advice)};
  }
  culprits_ = absent;
  if (absent.empty()) {
    return {Code::kTimeout,
            fmt::format("after {} ms this process had not yet learned with whom it shares memory: it had hardly "
                        "any time to run{}",
                        Waited().count(), OrRaiseTheTimeout("; look at the load of this host"))};
  }
  const auto seen = Witness(absent);
  return {Code::kTimeout, fmt::format("waited {} ms for {} to come{}{}", Waited().count(), ToText(absent),
                                      WhatTheyDo(call_, absent, discovery_.progress(), discovery_.silent(), seen), advice)};
}

}  // namespace amem
