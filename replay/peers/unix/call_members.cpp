#include "replay/peers/unix/call_members.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/no_memory.h"
#include "statemachine/check.h"

namespace amem {

constexpr std::chrono::milliseconds kForOthersToSee{300};  // longer than a member sleeps between two readings of its board
constexpr std::chrono::milliseconds kBetweenSights{200};   // of the pages, while a session of one of them is met in vain

CallMembers::CallMembers(const ConnectionContext& context, PeerService& service, PeerDelegate& delegate, CycleKind kind,
                         std::string tag)
    : context_(context), service_(service), delegate_(delegate), self_(service.sessions().Self().session), kind_(kind) {
  own_.tag = std::move(tag);
  const board::SessionFacts said = pages().OwnFacts();
  if (const board::ScopeFacts* const last = said.ScopeOf(own_.tag)) {
    own_.lifecycle = last->lifecycle;
    own_.cycle = last->cycle;
  }
  own_.call = kind;
  own_.call_since_ns = MonotonicNs();
}

// The last that its page says of this call. For that it needs no memory, unless nothing was published of it.
CallMembers::~CallMembers() {
  static_cast<void>(OrNoMemory([this] { return Note(delegate_.Progress(own_.tag)), Status(); }));
  own_.call.reset();
  static_cast<void>(OrNoMemory([this] { return pages().Publish(std::move(own_)); }));
}

// While a driver call holds the ledger it is not known, and is as it was.
void CallMembers::Note(CycleProgress now) {
  if (now.lifecycle == Lifecycle::kNew) return;
  own_.lifecycle = now.lifecycle;
  own_.cycle = now.cycle;
}

Status CallMembers::Publish(Deadline until) {
  AMEM_ASSIGN(auto neighbours, delegate_.Neighbours(own_.tag, until));
  std::ranges::sort(neighbours);
  neighbours.erase(std::unique(neighbours.begin(), neighbours.end()), neighbours.end());
  std::erase(neighbours, self_);
  Note(delegate_.Progress(own_.tag));
  own_.neighbours = std::move(neighbours);
  return pages().Publish(own_);
}

void CallMembers::EndCall() {
  own_.call.reset();
  static_cast<void>(pages().Publish(own_));
}

// ---- who is there -------------------------------------------------------------------------------------------------------

board::SharingSet CallMembers::Set() {
  return board::SetOf(self_, own_.tag, [this](SessionId session) -> board::Sighted {
    if (session == self_) return {false, pages().OwnFacts()};
    if (ended_.contains(session)) return {true, {}};
    // One that this call saw alive is a member until a ballot says that it has ended.
    if (!known_.contains(session) && LifeHere(session).HasEnded()) return {true, {}};
    const auto page = pages().PageOf(session);
    if (!page) return {};
    auto facts = (*page)->Facts();
    if (!facts) return {};
    known_[session] = {session, facts->host, facts->pid, facts->group, facts->rank, facts->keeps};
    return {false, *std::move(facts)};
  });
}

Result<std::vector<SessionId>> CallMembers::Find(Deadline until) {
  const Deadline began = Now();
  while (true) {
    AMEM_TRY(Publish(until));
    const board::SharingSet set = Set();
    if (set.unknown.empty()) {
      AMEM_CHECK(std::ranges::binary_search(set.members, self_));
      AMEM_TRY(RequireOneGroup(set.members));
      if (const auto failed = FailedWithoutUs(set.members)) {
        if (SinceThen(began) < kToCallAgain) {
          std::this_thread::sleep_for(kToCallAgain / 10);
          continue;
        }
        return FailedWith(*failed);
      }
      if (Status mixture = RequireOneKind(set.members); !mixture.ok()) {
        std::this_thread::sleep_for(std::min(kForOthersToSee, LeftUntil(until)));  // or the other waits for its whole time
        return mixture;
      }
      return set.members;
    }
    for (const SessionId session : set.unknown) {
      // A page may list a session that its owner shares nothing with any more, and will say so when it comes.
      const Status met = Meet(session, std::min(until, In(kBetweenSights)));
      if (met.code() == Code::kTimeout && !Passed(until)) break;
      if (!met.ok()) return About(session, "its page", met, began);
    }
  }
}

Status CallMembers::FailedWith(SessionId member) {
  const board::ScopeFacts theirs = FactsOf(member);
  const SessionId lost = theirs.lost;
  const PeerIdentity self = service_.sessions().Self();
  known_.try_emplace(lost, PeerIdentity{lost, self.host, theirs.lost_pid, self.group, theirs.lost_rank});
  return Status{Code::kPeerLost, ToText(IdentityOf(lost)) + " " + HowItEnded(lost) + ", and so the call of " +
                                     ToText(IdentityOf(member)) + " has failed: call it again on all that are left"}
      .ReportedBy(lost);
}

Result<PeerConnection*> CallMembers::ConnectionTo(SessionId session, Deadline until) {
  if (const auto at = connections_.find(session); at != connections_.end()) return at->second.get();
  AMEM_ASSIGN(auto begun, PeerConnection::Begin(context_, session, Purpose::kRound, service_.sessions().Self(), until));
  AMEM_ASSIGN(auto who, begun->AwaitWelcome(until));
  known_.try_emplace(session, std::move(who));
  return connections_.emplace(session, std::move(begun)).first->second.get();
}

Status CallMembers::Meet(SessionId session, Deadline until) {
  connections_.erase(session);
  const auto met = ConnectionTo(session, until);
  if (!met) {
    const Status why = service_.sessions().WhyLost(session, met.status());
    if (why.code() != Code::kPeerLost) return why;
    ended_.insert(session);
    return {};
  }
  const auto page = pages().PageOf(session);
  if (!page) return page.status();
  const auto facts = (*page)->Facts();
  return facts ? Status{} : facts.status();
}

Status CallMembers::RequireOneGroup(const std::vector<SessionId>& members) {
  const PeerIdentity self = service_.sessions().Self();
  std::vector<SessionId> of_others;
  for (const SessionId session : members)
    if (session != self_ && IdentityOf(session).group != self.group) of_others.push_back(session);
  const auto session = SharesNow(of_others);
  if (!session) return {};
  const PeerIdentity other = IdentityOf(*session);
  return Status{Code::kRefused,
                fmt::format("{} of group {} shares memory with {} of group {}: sessions that share memory pause together; give "
                            "them one group (AMEM_GROUPID, ncclSetGroupID)",
                            ToText(self), self.group, ToText(other), other.group)}
      .ReportedBy(*session);
}

std::optional<SessionId> CallMembers::CallsOtherwise(const std::vector<SessionId>& members) {
  std::vector<SessionId> otherwise;
  for (const SessionId session : members) {
    if (session == self_) continue;
    const board::ScopeFacts facts = FactsOf(session);
    if (facts.call && *facts.call != kind_ && !HasEnded(session)) otherwise.push_back(session);
  }
  return SharesNow(otherwise);
}

Status CallMembers::RequireOneKind(const std::vector<SessionId>& members) {
  const auto other = CallsOtherwise(members);
  if (!other) return {};
  const CycleKind theirs = kind_ == CycleKind::kPause ? CycleKind::kResume : CycleKind::kPause;
  return Status{Code::kInvalid,
                fmt::format("{} came for a {} while a {} was begun by {}: call the same on all ranks that share "
                            "memory{}",
                            ToText(IdentityOf(self_)), ToText(kind_), ToText(theirs), ToText(IdentityOf(*other)),
                            own_.tag.empty() ? "" : " of tag " + own_.tag)}
      .ReportedBy(*other);
}

bool CallMembers::HaveChanged(const std::vector<SessionId>& from) {
  for (const SessionId session : from)
    if (HasEnded(session)) return false;
  if (!Publish(In(kForOwnNeighbours)).ok()) return false;
  const board::SharingSet set = Set();
  return !set.unknown.empty() || set.members != from || CallsOtherwise(set.members) || FailedWithoutUs(set.members);
}

// A page names the neighbours of its session's last call. One that has become a neighbour since then was no member of a call
// that failed, unless it shared memory with the session that ended.
std::optional<SessionId> CallMembers::FailedWithoutUs(const std::vector<SessionId>& members) {
  std::vector<SessionId> failed;
  for (const SessionId session : members) {
    if (session == self_) continue;
    const board::ScopeFacts facts = FactsOf(session);
    const bool with_us = std::ranges::find(facts.neighbours, self_) != facts.neighbours.end() ||
                         (facts.lost && service_.sessions().Known(facts.lost));
    if (facts.lost && facts.lost_ns >= pages().made_ns() && with_us && !facts.call &&
        !service_.sessions().HasFailedBy(own_.tag, facts.lost))
      failed.push_back(session);
  }
  return SharesNow(failed);
}

void CallMembers::FailedBy(SessionId lost) {
  const PeerIdentity who = IdentityOf(lost);
  own_.lost = lost;
  own_.lost_rank = who.rank;
  own_.lost_pid = who.pid;
  own_.lost_ns = MonotonicNs();
  service_.sessions().FailedBy(own_.tag, lost);
}

// ---- what is seen of each -----------------------------------------------------------------------------------------------

bool CallMembers::HasEnded(SessionId session) {
  if (ended_.contains(session)) return true;
  if (session == self_) return pages().HasLetGo();
  return LifeHere(session).HasEnded();
}

ProcessLife CallMembers::LifeHere(SessionId session) {
  ProcessLife life;
  if (const auto page = pages().PageOf(session)) {
    const auto connection = connections_.find(session);
    life = (*page)->Life(connection == connections_.end() ? -1 : connection->second->process_fd());
  }
  if (!life.HasEnded() && pages().HasEnded(session)) return {ProcessLife::Is::kEnded, {}};
  return life;
}

std::string CallMembers::EndSeenBy(SessionId session) {
  const ProcessLife life = LifeHere(session);
  return life.HasEnded() ? life.why : "";
}

std::string CallMembers::HowItEnded(SessionId session) const { return amem::HowItEnded(context_, session); }

PeerIdentity CallMembers::IdentityOf(SessionId session) const {
  if (session == self_) return service_.sessions().Self();
  if (const auto known = known_.find(session); known != known_.end()) return known->second;
  return service_.sessions().Known(session).value_or(PeerIdentity{.session = session});
}

board::ScopeFacts CallMembers::FactsOf(SessionId session) const {
  if (session == self_) return own_;
  const auto page = pages().PageOf(session);
  const auto facts = page ? (*page)->Facts() : page.status();
  const board::ScopeFacts* const scope = facts ? facts->ScopeOf(own_.tag) : nullptr;
  if (scope != nullptr) return *scope;
  return {.tag = own_.tag, .lifecycle = facts ? Lifecycle::kRunning : Lifecycle::kNew};  // it was never in a call of that scope
}

ProcessSeen CallMembers::See(SessionId session, std::chrono::milliseconds waited) {
  const auto open = connections_.find(session);
  return SeeProcessOf(IdentityOf(session), open == connections_.end() ? nullptr : open->second.get(), context_, waited);
}

std::optional<SessionId> CallMembers::SharesNow(const std::vector<SessionId>& sessions) {
  if (sessions.empty()) return {};
  const std::set<SessionId> reached = ReachedNow();
  const auto first = std::ranges::find_if(sessions, [&](SessionId session) { return reached.contains(session); });
  return first == sessions.end() ? std::nullopt : std::optional(*first);
}

// Each page is read once. Sharing goes both ways, so one page that is new is enough.
std::set<SessionId> CallMembers::ReachedNow() {
  std::map<SessionId, std::vector<SessionId>> of_those_in_the_call, named_by;
  const auto add = [&](SessionId session, const board::ScopeFacts& facts) {
    for (const SessionId neighbour : facts.neighbours) named_by[neighbour].push_back(session);
    if (session == self_ || facts.call == kind_) of_those_in_the_call[session] = facts.neighbours;
  };
  add(self_, own_);
  std::set<SessionId> left_out{self_};
  for (const auto& [session, who] : known_) {
    if (HasEnded(session)) left_out.insert(session);
    if (!left_out.contains(session)) add(session, FactsOf(session));
  }
  std::set<SessionId> reached;
  for (std::vector<SessionId> next{self_}; !next.empty();) {
    const SessionId session = next.back();
    next.pop_back();
    for (const auto* const said : {&of_those_in_the_call, &named_by})
      if (const auto at = said->find(session); at != said->end())
        for (const SessionId other : at->second)
          if (!left_out.contains(other) && reached.insert(other).second) next.push_back(other);
  }
  return reached;
}

Status CallMembers::About(SessionId session, const char* doing, const Status& why, Deadline began) const {
  const std::string reason = why.code() == Code::kTimeout && !IsBusy(why)
                                 ? fmt::format("no answer within {} ms", SinceThen(began).count())
                                 : why.message();
  return Status{why.code(), fmt::format("asking {} for {}: {}", ToText(IdentityOf(session)), doing, reason),
                why.driver_result()}
      .ReportedBy(session);
}

}  // namespace amem
