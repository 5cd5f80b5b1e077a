// What a member journals of the others on a board: what it shows of each ballot, and what is seen of those that are late.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "journal/base/no_memory.h"
#include "replay/cycle/ballot_shown.h"
#include "replay/cycle/cycle_journal.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/assembly.h"
#include "replay/peers/late.h"

namespace amem {

// What a member journals of the others.
class Sightings {
 public:
  Sightings(Ledger& ledger, Assembly& assembly, CallOfSet call)
      : ledger_(ledger), assembly_(assembly), call_(std::move(call)) {}

  // What the board shows of a ballot: once it is decided, and while it is not, ever more rarely. If there is no memory for the
  // record, nothing is recorded.
  void BallotOf(std::uint64_t cycle, PoolId pool, agreement::Ballot ballot, const board::BoardReading& reading,
                const Status& why = {}) {
    const bool decided = reading.decisions[static_cast<std::size_t>(ballot)].cause != agreement::Cause::kUndecided;
    if (!decided) {
      if (waits_at_ != ballot) pause_ = kFirst;
      if (waits_at_ == ballot && assembly_.Time() < next_) return;
      waits_at_ = ballot;
      next_ = assembly_.Time() + pause_;
      pause_ *= 2;
    }
    static_cast<void>(OrNoMemory([&] {
      Record(ShownOf(call_.kind, cycle, pool, assembly_, ballot, reading, why));
      return Status{};
    }));
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
    Record(std::move(seen));
    return what;
  }
  void NextRound() {
    pause_ = kFirst;
    next_ = {};
  }

 private:
  void Record(EventBody fact) {
    if (!ledger_.TryLockFor(kToRecord)) return;
    const LedgerLock lock(ledger_, std::adopt_lock);
    ledger_.Record(std::move(fact));
  }

  Ledger& ledger_;
  Assembly& assembly_;
  const CallOfSet call_;
  static constexpr std::chrono::milliseconds kFirst{100};
  agreement::Ballot waits_at_{};  // the last one that was undecided
  std::chrono::milliseconds pause_ = kFirst;
  Deadline next_{};  // not before then while that is undecided
};

}  // namespace amem
