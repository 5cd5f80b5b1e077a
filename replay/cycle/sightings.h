// What a member journals of the others on a board: who has come and voted, and what is seen of those that are late.
#pragma once

#include <chrono>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "replay/ledger/ledger.h"
#include "replay/peers/assembly.h"
#include "replay/peers/late.h"

namespace amem {

constexpr std::chrono::milliseconds kToJournal{100};  // to wait for the ledger, which a hanging driver call may hold

// As journals name what is before a ballot.
inline PhaseKind PhaseOf(CycleKind kind, agreement::Ballot ballot) {
  using agreement::Ballot;
  switch (ballot) {
    case Ballot::kCome:
      return kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive;
    case Ballot::kIdle:
      return PhaseKind::kPauseArrive;
    case Ballot::kSaved:
      return PhaseKind::kPauseSave;
    case Ballot::kGone:
      return PhaseKind::kPauseReleaseOwn;
    case Ballot::kMade:
      return PhaseKind::kResumeCreateOwn;
    case Ballot::kJoined:
      return PhaseKind::kResumeImport;
    case Ballot::kOpen:
      return PhaseKind::kResumeVerify;
  }
  return {};
}

// What a member journals of the others.
class Sightings {
 public:
  Sightings(Ledger& ledger, Assembly& assembly, CallOfSet call)
      : ledger_(ledger), assembly_(assembly), call_(std::move(call)) {}

  // Who has come and voted, each once. Of a tag nothing is said.
  void Votes(agreement::Ballot ballot, const board::BoardReading& reading) {
    if (!call_.tag.empty()) return;
    std::vector<EventBody> facts;
    for (std::size_t seat = 0; seat < reading.seats.size(); ++seat) {
      const SessionId session = assembly_.board().members()[seat];
      const agreement::Vote vote = reading.seats[seat].votes[static_cast<std::size_t>(ballot)];
      const bool voted = vote == agreement::Vote::kYes || vote == agreement::Vote::kNo;
      if (seat == assembly_.seat() || !voted || !heard_.emplace(session, ballot).second) continue;
      const PeerIdentity who = assembly_.IdentityOf(session);
      facts.emplace_back(MemberHeard{session, call_.kind, PhaseOf(call_.kind, ballot), ballot != agreement::Ballot::kCome,
                                     vote == agreement::Vote::kYes, who.rank, who.pid});
    }
    Record(std::move(facts));
  }
  // Of one that has not voted; for messages.
  std::string Late(SessionId session, bool comes, std::chrono::milliseconds waited) {
    const Lifecycle last = assembly_.FactsOf(session).lifecycle;
    ProcessSeen seen = assembly_.See(session, waited);
    if (comes) seen.answer = AnswerOf(call_, last);
    std::string what = WhyLate(seen);
    if (comes) {
      const std::string doing = WhatItDoes(call_, last),
                        hindrance = seen.state == "stopped" ? "" : assembly_.Hindrance(session);
      if (what.empty()) what = doing;
      if (!hindrance.empty()) what += (what.empty() ? "says: " : ": ") + hindrance;
    }
    Record({std::move(seen)});
    return what;
  }
  void NextRound() { heard_.clear(); }

 private:
  void Record(std::vector<EventBody> facts) {
    if (facts.empty() || !ledger_.TryLockFor(kToJournal)) return;
    const LedgerLock lock(ledger_, std::adopt_lock);
    for (EventBody& fact : facts) ledger_.Record(std::move(fact));
  }

  Ledger& ledger_;
  Assembly& assembly_;
  const CallOfSet call_;
  std::set<std::pair<SessionId, agreement::Ballot>> heard_;  // in this round
};

}  // namespace amem
