#include "replay/peers/vote_counter.h"

#include <algorithm>

#include "journal/base/deadline.h"

namespace amem {

std::string ToText(const std::vector<PeerIdentity>& peers) {
  std::string text;
  for (const auto& peer : peers) text += (text.empty() ? "" : ", ") + ToText(peer);
  return text;
}

Status FailedVote(const PeerIdentity& who, PhaseKind phase, const Status& reason) {
  return {reason.code(), ToText(who) + " failed in phase " + std::string(ToText(phase)) + ": " + reason.message(),
          reason.driver_result()};
}

namespace {

// What a member does that has not come to a round, as its lifecycle tells.
struct Doing {
  std::string what;
  bool may_come = false;  // it only has not called yet
  std::string advice;     // otherwise
};

Doing DoingOf(const RoundCall& round, Lifecycle lifecycle) {
  const bool pause = round.kind == CycleKind::kPause;
  if (lifecycle == Lifecycle::kRunning)
    return pause ? Doing{"running", true, {}} : Doing{"running already", false, ": pause it, or let it call nothing"};
  if (lifecycle == Lifecycle::kPaused)
    return pause ? Doing{"paused already", false, ": resume it first"} : Doing{"paused", true, {}};
  if (lifecycle != Lifecycle::kPausing && lifecycle != Lifecycle::kResuming) return {};
  const char* const what = lifecycle == Lifecycle::kPausing ? "in the middle of a pause" : "in the middle of a resume";
  return {what, false, " that did not end well: call " + NameOf(CycleKind::kResume, round.tag) + " on all"};
}

}  // namespace

std::string WhatItDoes(const RoundCall& round, Lifecycle lifecycle) {
  const Doing doing = DoingOf(round, lifecycle);
  if (doing.what.empty()) return {};
  return "is " + doing.what + (doing.may_come ? " and has not called " + NameOf(round.kind, round.tag) : doing.advice);
}

std::string AnswerOf(const RoundCall& round, Lifecycle lifecycle) {
  const Doing doing = DoingOf(round, lifecycle);
  return doing.what + (doing.may_come ? ", has not called " + NameOf(round.kind, round.tag) : "");
}

std::string WhyLate(const ProcessSeen& seen) {
  if (seen.state == "stopped") return "is stopped (SIGSTOP?); SIGCONT lets it go on";
  if (seen.state == "zombie" || seen.state == "gone") return "has ended";
  const bool in_driver = seen.where.starts_with("in the CUDA driver");
  if (seen.state == "uninterruptible") return "cannot be interrupted" + (seen.where.empty() ? "" : " " + seen.where);
  return in_driver ? "is " + seen.where : "";
}

std::string WhatTheyDo(const RoundCall& call, const std::vector<PeerIdentity>& missing,
                       const std::map<SessionId, CycleProgress>& progress, const std::set<SessionId>& silent,
                       const std::map<SessionId, ProcessSeen>& seen) {
  std::string text;
  for (const auto& who : missing) {
    const auto at = progress.find(who.session);
    std::string what = at == progress.end() ? "" : WhatItDoes(call, at->second.lifecycle);
    if (silent.contains(who.session)) what = "does not answer: it is stopped, or overloaded";
    const auto sight = seen.find(who.session);
    if (const std::string why = sight == seen.end() ? "" : WhyLate(sight->second); !why.empty()) what = why;
    if (!what.empty()) text += (text.empty() ? ", of whom " : "; ") + ToText(who) + " " + what;
  }
  return text;
}

// ---- arrivals --------------------------------------------------------------------------------------------------------------

void VoteCounter::Arrived(ConnectionId connection, const PeerIdentity& who, const ArriveMessage& arrival, Time now) {
  if (places_.contains(connection)) return;  // the round has just begun, and the message that says so is on its way
  Arrival newcomer{connection, who, arrival.kind, arrival.set, {}};
  if (arrival.left_ms != 0) newcomer.until = now + std::chrono::milliseconds(arrival.left_ms);
  if (!gathering_.empty() && gathering_.begin()->second.kind != newcomer.kind) {
    // A member that changed its mind must not be compared with its earlier call.
    gathering_.erase(who.session);
    if (!gathering_.empty() && gathering_.begin()->second.kind != newcomer.kind) return RefuseMixture(newcomer);
  }
  gathering_.insert_or_assign(who.session, newcomer);
  if (observer_ != nullptr && tag_.empty() && heard_.insert(connection).second) {
    const bool pause = arrival.kind == CycleKind::kPause;
    observer_->Heard({who.session, arrival.kind, pause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive, false, true,
                      who.rank, who.pid});
  }
  gave_up_.erase(who.session);
  BeginIfComplete(now);
}

void VoteCounter::RefuseMixture(const Arrival& newcomer) {
  std::vector<PeerIdentity> waiting;
  for (const auto& [session, arrival] : gathering_) waiting.push_back(arrival.who);
  const std::string waiting_kind(ToText(gathering_.begin()->second.kind)), kind(ToText(newcomer.kind));
  const Status mixture{Code::kInvalid, ToText(newcomer.who) + " came for a " + kind + " while a " + waiting_kind +
                                           " was begun by " + ToText(waiting) +
                                           ": call the same on all ranks that share memory" +
                                           (tag_.empty() ? "" : " of tag " + tag_)};
  say_(newcomer.connection, FailureMessage{mixture});
  for (const auto& [session, arrival] : gathering_) say_(arrival.connection, FailureMessage{mixture});
  gathering_.clear();
  gave_up_.clear();
}

std::vector<PeerIdentity> VoteCounter::Missing() const {
  std::map<SessionId, PeerIdentity> expected;
  for (const auto& [session, arrival] : gathering_)
    for (const auto& peer : arrival.set) expected.try_emplace(peer.session, peer);
  std::vector<PeerIdentity> missing;
  for (const auto& [session, who] : expected)
    if (!gathering_.contains(session)) missing.push_back(who);
  return missing;
}

// If all run out of patience together, each is told of the members that never came, not of the others.
std::vector<PeerIdentity> VoteCounter::NeverCame() const {
  const auto missing = Missing();
  auto never = missing;
  std::erase_if(never, [&](const PeerIdentity& who) { return gave_up_.contains(who.session); });
  return never.empty() ? missing : never;
}

void VoteCounter::ForgetArrival(ConnectionId connection) {
  std::erase_if(gathering_, [&](const auto& item) { return item.second.connection == connection; });
  if (gathering_.empty()) gave_up_.clear();
}

std::uint32_t VoteCounter::LeastLeft(Time now) const {
  std::optional<Time> least;
  for (const auto& [session, arrival] : gathering_)
    if (arrival.until && (!least || *arrival.until < *least)) least = arrival.until;
  if (!least) return 0;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*least - now).count();
  return static_cast<std::uint32_t>(std::max<std::int64_t>(left, 1));
}

void VoteCounter::BeginIfComplete(Time now) {
  if (gathering_.empty() || !Missing().empty()) return;
  Ongoing round;
  round.id = ++last_round_;
  round.kind = gathering_.begin()->second.kind;
  BegunMessage begun{round.id, {}, LeastLeft(now)};
  for (const auto& [session, arrival] : gathering_) {
    round.members[session] = Member{arrival.connection, arrival.who, false, false, {}};
    places_[arrival.connection] = {round.id, session};
    begun.members.push_back(arrival.who);
  }
  gathering_.clear();
  gave_up_.clear();
  for (const auto& [session, member] : round.members) say_(member.connection, begun);
  rounds_[round.id] = std::move(round);
}

// Those that stay may be complete: a member that shares nothing with them any more has waited for others until now.
void VoteCounter::Withdrew(ConnectionId connection, Time now) {
  if (places_.contains(connection)) return;
  const auto missing = NeverCame();
  for (const auto& [session, arrival] : gathering_)
    if (arrival.connection == connection) gave_up_.insert(session);
  ForgetArrival(connection);
  say_(connection, WithdrawnMessage{missing});
  BeginIfComplete(now);
}

// ---- votes -----------------------------------------------------------------------------------------------------------------

void VoteCounter::Voted(ConnectionId connection, const VoteMessage& vote, Time now) {
  const auto place = places_.find(connection);
  if (place == places_.end() || place->second.round != vote.round || vote.index == 0)
    return say_(connection, FailureMessage{{Code::kInvalid, "a vote in a round that does not exist here"}});
  Ongoing& round = rounds_.at(vote.round);
  // Nothing passes after the deadline: those that voted in time may have gone, which is not known yet if this process was
  // stopped.
  if (vote.status.ok() && vote.index == round.open_index() && round.ballot.late(now)) DecideIfPossible(round, now);
  if (vote.index < round.open_index()) return say_(connection, round.decisions[vote.index - 1]);
  if (vote.index > round.open_index()) return say_(connection, FailureMessage{{Code::kInvalid, "a vote ahead of its time"}});
  if (observer_ != nullptr && tag_.empty()) {
    const PeerIdentity& who = round.members.at(place->second.session).who;
    observer_->Heard({who.session, round.kind, vote.phase, true, vote.status.ok(), who.rank, who.pid});
  }
  Ballot& ballot = round.ballot;
  if (ballot.votes.empty()) ballot.opened = now;
  if (!vote.status.ok() && !ballot.first_failure) ballot.first_failure = place->second.session;
  // The vote with the least time left sets the deadline, so that every member hears the common decision in time.
  const Time until = now + std::chrono::milliseconds(vote.left_ms);
  ballot.deadline = std::min(ballot.deadline.value_or(until), until);
  ballot.votes[place->second.session] = vote;
  Member& member = round.members.at(place->second.session);
  member.late = member.against = false;
  DecideIfPossible(round, now);
}

void VoteCounter::DecideIfPossible(Ongoing& round, Time now) {
  Ballot& ballot = round.ballot;
  if (ballot.votes.empty()) return;  // no member waits for a decision
  std::vector<PeerIdentity> absent, gone;
  std::string how;
  bool worth_waiting = false;
  for (auto& [session, member] : round.members) {
    if (ballot.votes.contains(session)) continue;
    if (!member.gone) absent.push_back(member.who);
    worth_waiting = worth_waiting || (!member.gone && !member.late);
    if (member.gone && !member.told) {
      gone.push_back(member.who);
      if (how.empty()) how = member.how;
    }
  }
  const PhaseKind phase = ballot.votes.begin()->second.phase;
  const std::string in_phase = " in phase " + std::string(ToText(phase)) + " of the " + std::string(ToText(round.kind));
  if (worth_waiting && gone.empty() && !ballot.late(now)) return;
  if (ballot.first_failure) {
    const VoteMessage& vote = ballot.votes.at(*ballot.first_failure);
    const bool of_another = vote.status.code() == Code::kPeerLost && vote.reported_by;
    return Decide(round, of_another ? vote.reported_by : *ballot.first_failure,
                  FailedVote(round.members.at(*ballot.first_failure).who, vote.phase, vote.status));
  }
  if (!gone.empty()) return Decide(round, gone.front().session, {Code::kPeerLost, ToText(gone) + " " + how + in_phase});
  if (!absent.empty()) {
    for (const auto& who : absent) round.members.at(who.session).late = true;
    return Decide(round, absent.front().session, DidNotVote(absent, now - ballot.opened, in_phase));
  }
  for (const auto& [session, vote] : ballot.votes) {
    if (vote.phase == phase) continue;
    return Decide(
        round, SessionId{},
        {Code::kInvalid, ToText(round.members.at(session).who) + " voted on phase " + std::string(ToText(vote.phase)) +
                             " while " + ToText(round.members.at(ballot.votes.begin()->first).who) + " voted on phase " +
                             std::string(ToText(phase))});
  }
  Decide(round, SessionId{}, {});
}

Status VoteCounter::DidNotVote(const std::vector<PeerIdentity>& absent, Time::duration waited, const std::string& in_phase) {
  std::string seen;
  for (const PeerIdentity& who : absent) {
    const std::string why = observer_ == nullptr ? "" : observer_->Late(who, waited);
    if (!why.empty()) seen += (seen.empty() ? ": " : "; ") + ToText(who) + " " + why;
  }
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(waited).count();
  return {Code::kTimeout, "waited " + std::to_string(ms) + " ms for " + ToText(absent) + in_phase + ": no vote came" + seen +
                              OrRaiseTheTimeout("; look at what it is doing")};
}

void VoteCounter::Decide(Ongoing& round, SessionId culprit, Status status) {
  DecisionMessage decision{round.id, round.open_index(), {culprit, std::move(status)}};
  decision.decision.against = round.ballot.first_failure.has_value();
  const auto votes = std::move(round.ballot.votes);
  round.ballot = {};
  for (auto& [session, member] : round.members) {
    member.told = member.told || member.gone;
    if (!votes.contains(session)) decision.decision.absent.push_back(session);
  }
  round.decisions.push_back(decision);
  for (const auto& [session, vote] : votes) {
    Member& member = round.members.at(session);
    member.against = !vote.status.ok() && IsArrival(vote.phase);
    if (!member.gone) say_(member.connection, decision);
  }
}

// ---- leaving ---------------------------------------------------------------------------------------------------------------

void VoteCounter::Left(ConnectionId connection, std::uint64_t round) {
  const auto place = places_.find(connection);
  if (place == places_.end() || place->second.round != round) return;
  Member& member = rounds_.at(round).members.at(place->second.session);
  member.told = member.told || member.against;  // it refused before anything had changed, and all have been told so
  Disconnected(connection, "withdrew");
}

void VoteCounter::Closed(ConnectionId connection, const std::string& how, Time now) {
  // Before the round begins an arrival is simply forgotten: the members that wait find out who is missing.
  ForgetArrival(connection);
  Disconnected(connection, how);
  BeginIfComplete(now);
}

void VoteCounter::Disconnected(ConnectionId connection, const std::string& how) {
  heard_.erase(connection);
  const auto place = places_.find(connection);
  if (place == places_.end()) return;
  const Place at = place->second;
  places_.erase(place);
  Ongoing& round = rounds_.at(at.round);
  Member& member = round.members.at(at.session);
  member.gone = true;
  member.how = how;
  round.ballot.votes.erase(at.session);
  if (round.ballot.first_failure == at.session) round.ballot.first_failure.reset();
  if (round.ballot.votes.empty()) round.ballot = {};  // its deadline went with the voter
  DecideIfPossible(round, round.ballot.opened);
  if (std::ranges::all_of(round.members, [](const auto& item) { return item.second.gone; })) rounds_.erase(at.round);
}

// ---- time ------------------------------------------------------------------------------------------------------------------

std::optional<VoteCounter::Time> VoteCounter::NextDeadline() const {
  std::optional<Time> next;
  for (const auto& [id, round] : rounds_) {
    const auto& deadline = round.ballot.deadline;
    if (!round.ballot.votes.empty() && deadline && (!next || *deadline < *next)) next = deadline;
  }
  return next;
}

void VoteCounter::Tick(Time now) {
  for (auto& [id, round] : rounds_)
    if (round.ballot.late(now)) DecideIfPossible(round, now);
}

}  // namespace amem
