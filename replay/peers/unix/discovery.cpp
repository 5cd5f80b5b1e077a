#include "replay/peers/unix/discovery.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace amem {

constexpr auto kAfterFailure = std::chrono::milliseconds(50);  // for the rest to answer, once one has failed
constexpr auto kToAnswer = std::chrono::milliseconds(100);     // for this session's own service thread

Result<std::vector<SessionId>> Discovery::OwnNeighbours() {
  AMEM_ASSIGN(std::vector<SessionId> neighbours, delegate_.Neighbours(tag_, until_));
  std::erase(neighbours, service_.sessions().Self().session);
  std::erase_if(neighbours, [&](SessionId session) { return gone_.contains(session); });
  std::ranges::sort(neighbours);
  neighbours.erase(std::unique(neighbours.begin(), neighbours.end()), neighbours.end());
  for (const SessionId session : neighbours)
    if (auto identity = service_.sessions().Known(session)) known_.try_emplace(session, *identity);
  return neighbours;
}

void Discovery::NoteGone(SessionId session) {
  static_cast<void>(service_.loop().Run([&sessions = service_.sessions(), session] { sessions.NoteGone(session); }, until_));
}

Status Discovery::WhyLost(SessionId session, const Status& why) {
  Status means = service_.sessions().WhyLost(session, why);
  if (means != why && !service_.sessions().Hidden(session).ok()) refusing_ = IdentityOf(session);
  return means;
}

// True: that session is dead, and the others go on without it.
bool Discovery::LeaveOut(SessionId session, const Status& why) {
  if (why.code() != Code::kPeerLost || (progress_.contains(session) && !without_the_dead_)) return false;
  gone_.insert(session);
  NoteGone(session);
  return true;
}

PeerIdentity Discovery::IdentityOf(SessionId session) const {
  const auto known = known_.find(session);
  return known != known_.end() ? known->second : PeerIdentity{.session = session};
}

std::string Discovery::NameOf(SessionId session) const {
  const PeerIdentity known = IdentityOf(session);
  return known.pid != 0 ? ToText(known) : ToText(session);
}

// A session died while the others waited for it; they were told and gave up. A member that comes later would find only the
// living and wait for them in vain, so it fails too, unless they call again at once. With the next call all meet.
bool Discovery::FailedWithoutUs(const NeighbourhoodMessage& other) const {
  return other.lost && !without_the_dead_ && !service_.sessions().HasFailedBy(tag_, other.lost->session);
}

Status Discovery::FailAs(const NeighbourhoodMessage& other) {
  if (!others_failed_) others_failed_ = std::chrono::steady_clock::now();
  if (std::chrono::steady_clock::now() < *others_failed_ + kToCallAgain) return {};
  lost_ = other.lost;
  return {Code::kPeerLost, ToText(*lost_) + " " + HowItEnded(context_, lost_->session) + ", and so the call of " +
                               ToText(other.self) + " has failed: call it again on all that are left"};
}

Status Discovery::Unreachable(SessionId session, const Status& why) const {
  const std::string reason = why.code() == Code::kTimeout && !IsBusy(why)
                                 ? fmt::format("no answer within {} ms", SinceThen(began_).count())
                                 : why.message();
  return {why.code(), fmt::format("asking {} with whom it shares memory: {}", NameOf(session), reason), why.driver_result()};
}

Status Discovery::OtherGroup(SessionId by, const PeerIdentity& other) {
  refusing_ = other;
  const PeerIdentity sharer = IdentityOf(by);
  return {Code::kRefused,
          fmt::format("{} of group {} shares memory with {} of group {}: sessions that share memory pause together; give them "
                      "one group (AMEM_GROUPID, ncclSetGroupID)",
                      ToText(sharer), service_.sessions().Self().group, ToText(other), other.group)};
}

std::unique_ptr<PeerConnection> Discovery::Take(SessionId session) {
  auto taken = connections_.extract(session);
  return taken.empty() ? nullptr : std::move(taken.mapped());
}

Result<std::uint64_t> Discovery::Ask(SessionId session, Deadline deadline) {
  auto at = connections_.find(session);
  if (at == connections_.end()) {
    AMEM_ASSIGN(auto begun, PeerConnection::Begin(context_, session, Purpose::kRound, introduced_as_, deadline));
    at = connections_.emplace(session, std::move(begun)).first;
  }
  silent_.insert(session);
  const std::uint64_t question = at->second->NextRequest();
  AMEM_TRY(at->second->Send({question, AskNeighboursMessage{tag_}}, deadline));
  return question;
}

Result<NeighbourhoodMessage> Discovery::Hear(SessionId session, std::uint64_t question, Deadline deadline,
                                             int unless_readable) {
  PeerConnection& connection = *connections_.at(session);
  while (true) {
    AMEM_ASSIGN(auto answer, connection.TryReceive());
    if (!answer.has_value()) {
      if (CanBeRead(unless_readable)) return Status{Code::kTimeout, ""};
      AMEM_TRY(connection.Wait(POLLIN, deadline, unless_readable));
      continue;
    }
    Message& message = answer->message;
    if (const auto* failure = std::get_if<FailureMessage>(&message.body)) return failure->status;
    auto* neighbourhood = std::get_if<NeighbourhoodMessage>(&message.body);
    // Other messages are the welcome, or the answer to an earlier question.
    if (neighbourhood == nullptr || message.request != question) continue;
    silent_.erase(session);
    return std::move(*neighbourhood);
  }
}

// Sends all questions before it takes the first answer. If several members do not answer, all are named: one may have ended
// because of another.
Result<std::vector<NeighbourhoodMessage>> Discovery::AskAll(const std::vector<SessionId>& sessions, Deadline deadline,
                                                            int unless_readable) {
  std::map<SessionId, std::uint64_t> questions;
  std::vector<NeighbourhoodMessage> answers;
  Status failure;
  const auto failed = [&](SessionId session, const Status& said) {
    if (said.code() != Code::kTimeout) connections_.erase(session);
    const Status why = WhyLost(session, said);
    if (LeaveOut(session, why)) return;
    const Status named = Unreachable(session, why);
    if (why.code() == Code::kPeerLost) lost_ = IdentityOf(session);
    if (why.reported_by() && !IsBusy(why)) refusing_ = IdentityOf(session);
    failure =
        failure.ok() ? named : Status{failure.code(), failure.message() + "; " + named.message(), failure.driver_result()};
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
    // A member that had no time because another failed is not to blame.
    if (!answer && (failure.ok() || answer.status().code() != Code::kTimeout)) failed(session, answer.status());
  }
  if (!failure.ok()) return failure;
  return answers;
}

Result<CycleProgress> Discovery::ProgressOf(SessionId session, Deadline deadline) {
  introduced_as_ = service_.sessions().Self();
  const auto question = Ask(session, deadline);
  const auto answer = question ? Hear(session, *question, deadline, -1) : question.status();
  if (!answer) connections_.erase(session);
  if (!answer) return answer.status();
  return answer->progress;
}

Result<std::vector<PeerIdentity>> Discovery::Look(Deadline deadline, int unless_readable) {
  until_ = deadline;
  AMEM_ASSIGN(auto frontier, OwnNeighbours());
  const auto had = LeftUntil(until_);
  if (had.count() == 0) return Status{Code::kTimeout, ""};
  refusing_.reset();
  // Its answer is waited for last: others answer meanwhile.
  auto served = service_.loop().Ask([] {});
  const PeerIdentity self = service_.sessions().Self();
  if (self != introduced_as_) connections_.clear();
  introduced_as_ = known_[self.session] = self;
  std::map<SessionId, PeerIdentity> set{{self.session, self}};
  std::map<SessionId, SessionId> through;  // through which member it was found
  for (const SessionId session : frontier) through[session] = self.session;
  bool others_failed = false;
  while (!frontier.empty()) {
    AMEM_ASSIGN(const auto answers, AskAll(frontier, deadline, unless_readable));
    frontier.clear();
    for (const auto& answer : answers) {
      set[answer.self.session] = known_[answer.self.session] = answer.self;
      progress_[answer.self.session] = answer.progress;
    }
    const auto other = std::ranges::find_if(answers, [this](const auto& answer) { return FailedWithoutUs(answer); });
    if (other != answers.end()) {
      others_failed = true;
      AMEM_TRY(FailAs(*other));
    }
    for (const auto& answer : answers) {
      const SessionId session = answer.self.session;
      // Asks the service thread only if something is new, which is rare.
      if (const auto known = service_.sessions().Known(session); known && *known != answer.self)
        static_cast<void>(
            service_.loop().Run([&sessions = service_.sessions(), self = answer.self] { sessions.SeenAs(self); }, until_));
      if (answer.self.group != self.group) return OtherGroup(through[session], answer.self);
      for (const auto& neighbour : answer.neighbours) {
        if (neighbour.pid != 0) known_.try_emplace(neighbour.session, neighbour);
        if (set.contains(neighbour.session) || gone_.contains(neighbour.session)) continue;
        if (!through.try_emplace(neighbour.session, session).second) continue;
        frontier.push_back(neighbour.session);
      }
    }
  }
  // A thread that was asked at the very end of the call hangs nowhere: the time is up.
  if (!served.Await(until_)) return had < kToAnswer ? Status{Code::kTimeout, ""} : PeerService::NotServed();
  if (!others_failed) others_failed_.reset();
  std::erase_if(connections_, [&](const auto& item) { return !set.contains(item.first); });
  std::vector<PeerIdentity> members;
  for (auto& [session, identity] : set) members.push_back(std::move(identity));
  return members;
}

}  // namespace amem
