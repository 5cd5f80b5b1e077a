// Ballots: what the board showed when one failed, and for whom members wait while one is undecided. Who came, who voted, and
// because of whom it failed is read here, and not inferred.
#include <algorithm>

#include "replay/diagnosis/cause_search.h"

namespace amem {
namespace {

using agreement::Ballot;
using agreement::Cause;
using agreement::Vote;
using Weight = CandidateCause::Weight;

// One failed ballot. All members read the same decision of it.
struct FailedBallot {
  const SessionStory* told_by = nullptr;  // whose reading has the most of those that had not voted
  const Attempt* attempt = nullptr;
  const Dated<BallotShown>* reading = nullptr;
  std::uint64_t wall_ns = 0;
  bool counts = false;  // it is of the last attempt of one that read it
  bool told = false;
  [[nodiscard]] const BallotShown& shown() const { return reading->event; }
};

const SeatShown* SeatOf(const BallotShown& shown, SessionId session) {
  const auto seat = std::ranges::lower_bound(shown.seats, session, {}, &SeatShown::session);
  return seat == shown.seats.end() || seat->session != session ? nullptr : &*seat;
}
// Members without a seat in the list have voted yes.
bool HasVotedFor(const BallotShown& shown, SessionId session) {
  const SeatShown* seat = SeatOf(shown, session);
  return seat == nullptr ? shown.members > shown.seats.size() : seat->vote == Vote::kYes;
}

// After a change of the set its members come again: that is no failure.
bool IsFailedBallot(const BallotShown& shown) { return agreement::IsFailure(shown.cause) && shown.cause != Cause::kSetChanged; }

// It may have come again since.
bool IsOfLastRound(const Attempt& attempt, const BallotShown& shown) {
  const BallotShown& last = attempt.ballots.back().event;
  return last.board == shown.board && last.round == shown.round;
}

// The first that failed of each round, by time.
std::vector<FailedBallot> FailedBallots(CauseSearch& s) {
  std::map<std::pair<std::uint64_t, std::uint32_t>, FailedBallot> rounds;
  for (const SessionStory& j : s.roster.journals()) {
    if (LastAttemptDone(j)) continue;
    for (const Attempt& attempt : j.attempts) {
      if (!SameTry(attempt, j.Last())) continue;
      for (const Dated<BallotShown>& reading : attempt.ballots) {
        const BallotShown& shown = reading.event;
        if (!IsFailedBallot(shown) || shown.cause == Cause::kSuperseded) continue;
        FailedBallot& known = rounds[{shown.board, shown.round}];
        const bool first = known.reading == nullptr || shown.ballot < known.shown().ballot;
        const bool same = known.reading != nullptr && shown.ballot == known.shown().ballot;
        const bool is_last = &attempt == &j.Last() && IsOfLastRound(attempt, shown);
        const bool counts = (same && known.counts) || is_last;
        if (first || (same && shown.culprits.size() > known.shown().culprits.size()))
          known = {&j, &attempt, &reading, s.Wall(j, reading.at)};
        if (first || same) known.counts = counts;
      }
    }
  }
  std::vector<FailedBallot> all;
  for (const auto& [round, ballot] : rounds) all.push_back(ballot);
  std::ranges::sort(all, {}, &FailedBallot::wall_ns);
  return all;
}

bool IsMissedMeeting(const FailedBallot& one) {
  const BallotShown& shown = one.shown();
  return shown.ballot == Ballot::kCome && (shown.cause == Cause::kLate || shown.cause == Cause::kEnded);
}

// Whether a member that was missing at the later meeting had come to the earlier one, and given up there.
bool FollowsFrom(const FailedBallot& later, const FailedBallot& earlier) {
  if (!IsMissedMeeting(later) || !IsMissedMeeting(earlier) || earlier.shown().cause != Cause::kLate) return false;
  return SameTry(*later.attempt, *earlier.attempt) && std::ranges::any_of(later.shown().culprits, [&](SessionId session) {
           const SeatShown* seat = SeatOf(later.shown(), session);
           const bool died = seat != nullptr && seat->end == kPeerDied;
           const bool known = later.shown().board == earlier.shown().board || SeatOf(earlier.shown(), session) != nullptr;
           return !died && known && HasVotedFor(earlier.shown(), session);
         });
}

// The others waited for its culprits to come.
void NeverArrived(CauseSearch& s, const FailedBallot& one) {
  const BallotShown& shown = one.shown();
  const bool had_come = std::ranges::all_of(shown.culprits, [&](SessionId session) {
    return one.attempt->asking.contains(session) && s.roster.Find(session) == nullptr;
  });
  if (one.attempt->asked_before && had_come) return TooLate(s, *one.told_by, *one.attempt);
  CandidateCause& candidate =
      s.AddWitnessed(Weight::kAbsence, VerdictKind::kNeverArrived, shown.culprits.front(), *one.told_by, one.reading->at);
  candidate.attempt = one.attempt;
  candidate.together.assign(shown.culprits.begin() + 1, shown.culprits.end());
  const std::uint64_t from =
      shown.first_ns != 0 ? s.roster.Wall(*one.told_by, shown.first_ns) : s.Wall(*one.told_by, one.attempt->came());
  candidate.wall_ns = std::min(from, one.wall_ns);
  candidate.wait.waited_ns = one.wall_ns - candidate.wall_ns;
  candidate.wait.established_ns = std::min(one.wall_ns, from + kPatience_ns);
  candidate.record.message = shown.message;
  candidate.record.code = Code::kTimeout;
  candidate.record.shown = &shown;
}

// The culprit had come, and did not vote in time.
void StalledIn(CauseSearch& s, const FailedBallot& one) {
  const BallotShown& shown = one.shown();
  const SessionId culprit = shown.culprits.front();
  CandidateCause& candidate = s.AddWitnessed(Weight::kAbsence, VerdictKind::kStalled, culprit, *one.told_by, one.reading->at);
  candidate.together.assign(shown.culprits.begin() + 1, shown.culprits.end());
  const SessionStory* journal = s.roster.Find(culprit);
  candidate.attempt = journal != nullptr && SameTry(journal->Last(), *one.attempt) ? &journal->Last() : one.attempt;
  candidate.wait.established_ns = candidate.wall_ns;
  const std::uint64_t from = shown.first_ns != 0 ? s.roster.Wall(*one.told_by, shown.first_ns) : one.wall_ns;
  candidate.record.shown = &shown;
  if (journal == nullptr) candidate.wait.waited_ns = one.wall_ns - std::min(one.wall_ns, from);
  candidate.live = journal != nullptr && IsLive(*journal);
  candidate.record.message = shown.message;
  candidate.record.code = shown.code;
}

// The culprit's own journal has more, where it is given.
void VotedNo(CauseSearch& s, const FailedBallot& one) {
  const BallotShown& shown = one.shown();
  const SessionId culprit = shown.culprits.front();
  const SessionStory* journal = s.roster.Find(culprit);
  if (journal != nullptr && SameTry(journal->Last(), *one.attempt) && RecordsOwnFailure(*journal)) return;
  const bool of_another = BlamesAnother(shown.code);
  CandidateCause& candidate = s.AddWitnessed(of_another ? Weight::kConsequence : Weight::kCause,
                                             of_another                      ? VerdictKind::kStalled
                                             : shown.ballot == Ballot::kCome ? VerdictKind::kRefused
                                                                             : KindOfCode(shown.code),
                                             culprit, *one.told_by, one.reading->at);
  candidate.attempt = journal != nullptr && SameTry(journal->Last(), *one.attempt) ? &journal->Last() : one.attempt;
  const SeatShown* seat = SeatOf(shown, culprit);
  if (seat != nullptr && seat->voted_ns != 0)  // it may have left before the others read its vote
    candidate.wall_ns = std::min(one.wall_ns, s.roster.Wall(*one.told_by, seat->voted_ns));
  candidate.record.shown = &shown;
  candidate.witness.alone = !of_another && shown.ballot != Ballot::kCome;
  candidate.record.message = shown.message;
  candidate.record.code = shown.code;
  candidate.record.driver_result = shown.driver_result;
  candidate.live = journal != nullptr && IsLive(*journal);
}

void AddCauseOf(CauseSearch& s, const FailedBallot& one) {
  const BallotShown& shown = one.shown();
  if (shown.culprits.empty()) return;
  if (shown.cause == Cause::kLate) return shown.ballot == Ballot::kCome ? NeverArrived(s, one) : StalledIn(s, one);
  if (shown.cause == Cause::kVotedNo || shown.cause == Cause::kDamaged) VotedNo(s, one);  // ends: see Death and Leaving
}

// The round went on without this member, which only its own journal has.
void Superseded(CauseSearch& s, const SessionStory& j) {
  if (LastAttemptDone(j)) return;
  for (const Dated<BallotShown>& reading : j.Last().ballots) {
    if (reading.event.cause != Cause::kSuperseded) continue;
    CandidateCause& candidate = s.Add(Weight::kConsequence, VerdictKind::kStalled, j, reading.at);
    candidate.record.message = reading.event.message;
    candidate.record.code = Code::kTimeout;
    candidate.record.shown = &reading.event;
    return;
  }
}

// ---- undecided

// The members of one attempt that is open, as their journals and what they read of the board last have it.
struct OpenRound {
  std::set<SessionId> set;  // that shares memory
  std::vector<const SessionStory*> journals;
  const SessionStory* reader = nullptr;  // of the newest reading
  const BallotShown* newest = nullptr;   // null: nobody has waited long enough to record one
  bool begun = false;                    // all have come
};

// Also where nothing was recorded since: readings of `come` are dropped once all have come.
bool AllHaveCome(const Attempt& attempt) {
  const auto later = [](const Dated<BallotShown>& reading) { return reading.event.ballot > Ballot::kCome; };
  return attempt.begun || (attempt.on_board && std::ranges::all_of(attempt.ballots, later));
}

OpenRound RoundOf(CauseSearch& s, const SessionStory& j) {
  OpenRound round;
  std::uint64_t newest_ns = 0;
  round.set = s.roster.SharingWith(j.session(), s.Wall(j, j.Last().came()));
  round.set.insert(j.Last().members.begin(), j.Last().members.end());
  for (const SessionStory& other : s.roster.journals()) {
    if (!round.set.contains(other.session()) || !other.Last().open() || !SameTry(other.Last(), j.Last())) continue;
    round.journals.push_back(&other);
    round.begun |= AllHaveCome(other.Last());
    if (other.Last().ballots.empty()) continue;
    const Dated<BallotShown>& last = other.Last().ballots.back();
    if (last.event.cause != Cause::kUndecided || s.Wall(other, last.at) < newest_ns) continue;
    newest_ns = s.Wall(other, last.at);
    round.newest = &last.event;
    round.reader = &other;
  }
  return round;
}

bool IsStopped(const CauseSearch& s, SessionId session) { return s.SeenState(session) == "stopped"; }

// How many votes a member has cast, and whether it works on the next one.
std::pair<std::size_t, bool> VotesOf(CauseSearch& s, const SessionStory& j) {
  if (!j.Last().begun || j.Last().phases.empty()) return {0, true};
  const Progress& progress = s.ProgressOfSession(j);
  const bool voted = (j.Last().on_board ? progress.voted() : progress.did_its_part) || progress.decided();
  return {j.Last().phases.size() - (voted ? 0 : 1), !voted};
}
// It waits for an owner's memory; or, without a board, for the message that the cycle has begun.
bool WaitsForAnother(const SessionStory& j) {
  const Attempt& attempt = j.Last();
  return (attempt.open_step && attempt.open_step->event.kind == StepKind::kImport) || (!attempt.begun && !attempt.on_board);
}

// Those without a journal that had not voted when the board was read last.
std::vector<SessionId> UnvotedWithoutJournal(const CauseSearch& s, const OpenRound& round) {
  std::vector<SessionId> found;
  if (round.newest == nullptr) return found;
  for (const SessionId session : round.newest->culprits)
    if (s.roster.Find(session) == nullptr) found.push_back(session);
  return found;
}

std::vector<SessionId> Stopped(const CauseSearch& s, const OpenRound& round) {
  std::vector<SessionId> found;
  for (const SessionStory* j : round.journals)
    if (IsStopped(s, j->session())) found.push_back(j->session());
  for (const SessionId session : UnvotedWithoutJournal(s, round))
    if (IsStopped(s, session)) found.push_back(session);
  return found;
}

// By their journals, and by the board for those without one. Of those with the fewest votes, who works on the next one, or has
// not read a decision after which others have voted again. Members that wait for another one themselves are named where nobody
// else is.
std::vector<SessionId> WithFewestVotes(CauseSearch& s, const OpenRound& round) {
  std::size_t fewest = SIZE_MAX, most = 0;
  for (const SessionStory* j : round.journals) {
    fewest = std::min(fewest, VotesOf(s, *j).first);
    most = std::max(most, VotesOf(s, *j).first);
  }
  std::vector<SessionId> found, waiting;
  for (const SessionStory* j : round.journals) {
    const auto [votes, works] = VotesOf(s, *j);
    if (votes == fewest && (works || votes < most)) (WaitsForAnother(*j) ? waiting : found).push_back(j->session());
  }
  const std::vector<SessionId> unvoted = UnvotedWithoutJournal(s, round);
  found.insert(found.end(), unvoted.begin(), unvoted.end());
  return found.empty() ? waiting : found;
}

// Where all known members have voted, of journals that agreed through a leader: the members whose votes it did not record.
std::vector<SessionId> WithoutRecordedVotes(const CauseSearch& s, const OpenRound& round) {
  std::set<SessionId> others;
  for (const SessionStory* j : round.journals)
    for (const SessionId member : j->Last().members) {
      const std::uint64_t* votes = FindIn(j->Last().heard, member);  // as a leader recorded them
      if (votes != nullptr && *votes >= j->Last().phases.size()) continue;
      if (s.roster.Find(member) == nullptr && s.EndOf(member) == nullptr) others.insert(member);
    }
  if (others.empty())  // the one with the lowest number counted them, where there was a leader
    others.insert(std::ranges::min(round.journals, {}, &SessionStory::session)->session());
  return {others.begin(), others.end()};
}

// The members that the others wait for; if some of them are stopped, only these.
std::vector<SessionId> HoldsOthersUp(CauseSearch& s, const OpenRound& round) {
  if (std::vector<SessionId> found = Stopped(s, round); !found.empty()) return found;
  if (std::vector<SessionId> found = WithFewestVotes(s, round); !found.empty()) return found;
  return WithoutRecordedVotes(s, round);
}

// Who had not come when the board was read last, and has not since.
// One that ended while it was waited for is told as an end, unless everybody was ended then.
std::vector<SessionId> NotCome(CauseSearch& s, const OpenRound& round, bool long_wait) {
  std::vector<SessionId> missing;
  const auto here = [&](SessionId session) {
    return std::ranges::any_of(round.journals, [&](const SessionStory* j) { return j->session() == session; });
  };
  const auto has_ended = [&](SessionId session) { return s.EndOf(session) != nullptr && s.EndOf(session)->witnessed; };
  for (const SessionId session : round.newest->culprits)
    if (!here(session) && (long_wait || !has_ended(session))) missing.push_back(session);
  return missing;
}

void WaitsForOthersToCome(CauseSearch& s, const OpenRound& round) {
  if (round.newest == nullptr) return;
  const std::uint64_t from = round.newest->first_ns != 0 ? s.roster.Wall(*round.reader, round.newest->first_ns)
                                                         : s.Wall(*round.reader, round.reader->Last().came());
  const bool long_wait = s.torn_down && s.first_end >= from + kPatience_ns;
  const std::vector<SessionId> missing = NotCome(s, round, long_wait);
  if (missing.empty()) return;
  CandidateCause& candidate = s.AddWitnessed(Weight::kAbsence, VerdictKind::kNeverArrived, missing.front(), *round.reader,
                                             round.reader->Last().arrived);
  candidate.together.assign(missing.begin() + 1, missing.end());
  candidate.wall_ns = from;
  candidate.wait.established_ns = long_wait ? from + kPatience_ns : UINT64_MAX;
  candidate.wait.waited_ns = s.Since(from);
  candidate.live = std::ranges::any_of(round.journals, [](const SessionStory* j) { return IsLive(*j); });
  candidate.record.shown = round.newest;
  candidate.record.code = Code::kTimeout;
}

void WaitsForVotes(CauseSearch& s, const OpenRound& round) {
  for (const SessionId session : HoldsOthersUp(s, round)) {
    if (const SessionStory* j = s.roster.Find(session)) {
      if (IsSilent(s, *j)) Stalled(s, *j, s.ProgressOfSession(*j).since);
      continue;
    }
    const SessionStory& waits = round.reader != nullptr ? *round.reader : *round.journals.front();
    CandidateCause& candidate = s.AddWitnessed(round.newest != nullptr ? Weight::kAbsence : Weight::kConsequence,
                                               VerdictKind::kStalled, session, waits, s.ProgressOfSession(waits).since);
    candidate.wait.waited_ns = s.Since(candidate.wall_ns);
    candidate.live = IsLive(waits);
    candidate.record.shown = round.newest;
  }
}

}  // namespace

bool OnBoard(const CauseSearch& s, const SessionStory& j) {
  if (j.Last().on_board) return true;
  const std::set<SessionId> set = s.roster.SharingWith(j.session(), s.Wall(j, j.Last().came()));
  return std::ranges::any_of(s.roster.journals(), [&](const SessionStory& other) {
    return other.Last().on_board && SameTry(other.Last(), j.Last()) && set.contains(other.session());
  });
}

bool FailedOnBoard(const Attempt& attempt) {
  return std::ranges::any_of(attempt.ballots, [&](const Dated<BallotShown>& reading) {
    const BallotShown& shown = reading.event;
    return IsFailedBallot(shown) && (IsOfLastRound(attempt, shown) || shown.cause == Cause::kSuperseded);
  });
}

bool WaitsOnBoard(CauseSearch& s, const SessionStory& j) {
  const Attempt& attempt = j.Last();
  const bool reads = !attempt.ballots.empty() && attempt.ballots.back().event.cause == Cause::kUndecided;
  if (reads || AllHaveCome(attempt)) return true;
  const OpenRound round = RoundOf(s, j);
  return round.newest != nullptr || round.begun || std::ranges::any_of(s.roster.journals(), [&](const SessionStory& other) {
           return round.set.contains(other.session()) && SameTry(other.Last(), attempt) && FailedOnBoard(other.Last());
         });
}

void Ballots(CauseSearch& s) {
  std::vector<FailedBallot> failed = FailedBallots(s);
  for (std::size_t last = failed.size(); last-- > 0;) {
    if (failed[last].told || !failed[last].counts) continue;
    // Who came later waited in vain for those that had given up. The first such meeting is why; of several without the same
    // members the last counts.
    std::vector<std::size_t> chain{last};
    for (std::size_t i = last; i-- > 0;)
      if (FollowsFrom(failed[chain.back()], failed[i])) chain.push_back(i);
    for (const std::size_t i : chain) failed[i].told = true;
    const auto& root = failed[chain.back()].shown().culprits;
    AddCauseOf(s, failed[*std::ranges::find_if(chain, [&](std::size_t i) { return failed[i].shown().culprits == root; })]);
  }
  std::set<SessionId> seen;
  for (const SessionStory& j : s.roster.journals()) {
    Superseded(s, j);
    if (!j.Last().open() || seen.contains(j.session())) continue;
    const OpenRound round = RoundOf(s, j);
    for (const SessionStory* member : round.journals) seen.insert(member->session());
    seen.insert(j.session());
    const auto decided = [&](const FailedBallot& one) {
      return one.counts && SameTry(*one.attempt, j.Last()) && round.set.contains(one.told_by->session());
    };
    if (std::ranges::any_of(failed, decided)) continue;  // they have not read it
    const bool silent = std::ranges::any_of(round.journals, [&](const SessionStory* member) { return IsSilent(s, *member); });
    if (silent) round.begun ? WaitsForVotes(s, round) : WaitsForOthersToCome(s, round);
  }
}

}  // namespace amem
