// Absences, of attempts of which no board tells: sessions that others waited for, because they did not join a pause or resume,
// or did not finish their part of it. Nothing recorded says so, and it is inferred from all journals together. What was agreed
// on a board is in search_ballots.cpp; here is what came before all members had found each other, also once their set had
// changed.
#include <algorithm>

#include "replay/diagnosis/cause_search.h"

namespace amem {
namespace {

using Weight = CandidateCause::Weight;

// Of the sessions that share memory with it, those whose group is not that of most.
std::vector<SessionId> OtherGroups(CauseSearch& s, SessionId session, std::uint64_t wall_ns) {
  std::map<std::int64_t, std::vector<SessionId>> groups;
  std::map<SessionId, std::int64_t> met;
  const std::set<SessionId> set = s.roster.SharingWith(session, wall_ns);
  for (const SessionId member : set) {
    const SessionStory* j = s.roster.Find(member);
    if (j == nullptr) continue;
    for (const auto& [peer, known] : j->findings.state.peers) met.try_emplace(peer, known.group);
  }
  for (const SessionId member : set) {
    const SessionStory* j = s.roster.Find(member);
    if (j != nullptr) {
      groups[j->who().group].push_back(member);
    } else if (met.contains(member)) {
      groups[met[member]].push_back(member);
    }
  }
  if (groups.size() < 2) return {};
  const auto& most = std::ranges::max_element(groups, {}, [](const auto& g) { return g.second.size(); })->first;
  std::vector<SessionId> others;
  for (const auto& [group, members] : groups)
    if (group != most) others.insert(others.end(), members.begin(), members.end());
  return others;
}

// The session waited for a cycle of that kind, or was in one, at some time between `from` and `until`.
bool Joined(CauseSearch& s, const SessionStory& j, CycleKind kind, std::uint64_t from, std::uint64_t until) {
  return std::ranges::any_of(j.attempts, [&](const Attempt& a) {
    const std::uint64_t end = a.ended ? s.Wall(j, a.ended) : UINT64_MAX;
    return a.kind == kind && s.Wall(j, a.came()) <= until && end >= from;
  });
}

// A session's wait for the others to come, and how long it lasted.
struct Wait {
  const SessionStory* of = nullptr;
  const Attempt* attempt = nullptr;
  std::uint64_t from = 0, until = 0;
};

// Of the sessions that tried the same, the wait that was given up first. Whoever had not come by then is why all failed: who
// came later waited in vain for those that had given up.
Wait FirstGivenUp(CauseSearch& s, const Wait& own) {
  const bool first_try = std::ranges::none_of(
      own.of->attempts, [&](const Attempt& one) { return &one != own.attempt && SameTry(one, *own.attempt); });
  Wait first = own;
  const auto take = [&](const SessionStory& other, const Attempt& attempt) {
    if (!SameTry(attempt, *own.attempt) || !GaveUpWaiting(attempt)) return false;
    const Wait wait{&other, &attempt, s.Wall(other, attempt.arrived), s.Wall(other, attempt.ended)};
    const bool before = wait.until < first.until, while_it_waited = wait.until >= first.from;
    const bool came_late = first_try && first.of == own.of;
    if (!before || !(while_it_waited || came_late)) return false;
    first = wait;
    return true;
  };
  const std::set<SessionId> set = s.roster.SharingWith(own.of->session(), own.from);
  for (bool earlier = true; earlier;) {
    earlier = false;
    for (const SessionId session : set) {
      const SessionStory* other = session == own.of->session() ? nullptr : s.roster.Find(session);
      if (other == nullptr) continue;
      for (const Attempt& attempt : other->attempts) earlier |= take(*other, attempt);
    }
  }
  return first;
}

// Others have tried it again since, and it has not: then it is missing there.
bool TriedAgainWithout(CauseSearch& s, const Wait& own) {
  return std::ranges::any_of(s.roster.SharingWith(own.of->session(), own.from), [&](SessionId session) {
    const SessionStory* other = session == own.of->session() ? nullptr : s.roster.Find(session);
    if (other == nullptr || !SameTry(other->Last(), *own.attempt) || s.Wall(*other, other->Last().came()) <= own.until)
      return false;
    return std::ranges::any_of(other->attempts,
                               [&](const Attempt& one) { return &one != &other->Last() && SameTry(one, *own.attempt); });
  });
}

// Those that did not come, as far as their journals tell; of a session without a journal this is not known, and it is blamed
// when all others did come, unless the session that counts arrivals has heard it.
std::vector<SessionId> Missing(CauseSearch& s, const Wait& wait) {
  const SessionStory& j = *wait.of;
  const Attempt& attempt = *wait.attempt;
  const std::uint64_t from = wait.from, until = wait.until;
  std::set<SessionId> missing, silent, waited_for;
  for (const auto& [seen, at] : j.seen) {
    const bool now = at.time_ns >= attempt.came().time_ns && (!attempt.ended || at.time_ns <= attempt.ended.time_ns);
    if (now) waited_for.insert(seen.session);
  }
  const auto came = [&](SessionId session) { return attempt.heard.contains(session) || attempt.asking.contains(session); };
  if (attempt.code == Code::kTimeout)
    for (const CycleMember& culprit : attempt.culprits) waited_for.insert(culprit.session);
  std::set<SessionId> set = s.roster.SharingWith(j.session(), from);
  set.insert(waited_for.begin(), waited_for.end());
  for (const SessionId session : set) {
    if (session == j.session()) continue;
    const SessionEnd* end = s.EndOf(session);
    const bool gone = end != nullptr && end->witnessed && end->wall_ns <= from;
    const SessionStory* other = s.roster.Find(session);
    if (other != nullptr) {
      if (!gone && !Joined(s, *other, attempt.kind, from, until)) missing.insert(session);
    } else if (!gone && !came(session)) {
      silent.insert(session);
    }
  }
  std::erase_if(waited_for, came);  // as the one that counts and does not answer
  if (missing.empty()) {
    std::erase_if(silent, [&](SessionId one) { return !waited_for.empty() && !waited_for.contains(one); });
    missing = silent;
  } else {
    std::ranges::set_intersection(silent, waited_for, std::inserter(missing, missing.end()));
  }
  return {missing.begin(), missing.end()};
}

// Another member had come and waited as long, ran out of patience first, and left in order: what it waited for had not come.
bool GaveUpBefore(CauseSearch& s, const SessionStory& j) {
  const Attempt& attempt = j.Last();
  const std::uint64_t from = s.Wall(j, attempt.came()), until = s.Wall(j, attempt.ended);
  if (attempt.culprits.empty() || until < from + kPatience_ns) return false;
  for (const CycleMember& culprit : attempt.culprits) {
    const SessionEnd* end = s.EndOf(culprit.session);
    if (end == nullptr || !end->in_order) return false;
    if (!attempt.asking.contains(culprit.session) && !attempt.heard.contains(culprit.session)) return false;
  }
  return std::ranges::any_of(Missing(s, {&j, &attempt, from, until}), [&](SessionId session) {
    return s.EndOf(session) == nullptr || s.EndOf(session)->wall_ns > until;
  });
}

// All have come, and yet it did not begin: the members that stopped between their arrival and being counted.
std::vector<SessionId> Uncounted(CauseSearch& s, const SessionStory& j, std::uint64_t from) {
  const Attempt& attempt = j.Last();
  std::vector<const SessionStory*> members;
  std::set<SessionId> heard;
  for (const SessionId session : s.roster.SharingWith(j.session(), from)) {
    const SessionStory* other = s.roster.Find(session);
    if (other == nullptr || !SameTry(other->Last(), attempt)) continue;
    members.push_back(other);
    for (const auto& [member, what] : other->Last().heard) heard.insert(member);
  }
  const auto those = [&](auto holds) {
    std::vector<SessionId> found;
    for (const SessionStory* member : members)
      if (holds(*member)) found.push_back(member->session());
    return found.size() < members.size() ? found : std::vector<SessionId>{};
  };
  std::vector<SessionId> found = those([&](const SessionStory& m) { return s.SeenState(m.session()) == "stopped"; });
  if (found.empty() && !heard.empty())
    found = those([&](const SessionStory& m) { return !heard.contains(m.session()) && m.Last().heard.empty(); });
  if (found.empty()) {
    for (const auto& [seen, at] : j.seen) {
      if (at.time_ns >= attempt.came().time_ns && std::ranges::find(found, seen.session) == found.end())
        found.push_back(seen.session);
    }
  }
  if (found.empty()) found = those([](const SessionStory& m) { return m.Last().open() && !m.Last().begun; });
  // The one with the lowest number counts arrivals.
  if (found.empty() && attempt.open() && !members.empty()) found = {members.front()->session()};
  return found;
}

// All had come, some before it and some while it waited, and those that it was told of answer and wait no longer: they have
// given up. Where their journals are given, those tell more.
bool OthersGaveUp(CauseSearch& s, const Wait& wait, const std::vector<SessionId>& missing) {
  const Attempt& attempt = *wait.attempt;
  if (!missing.empty() || !GaveUpWaiting(attempt) || attempt.culprits.empty()) return false;
  const auto answers = [&](SessionId session) {
    return std::ranges::any_of(wait.of->seen, [&](const Dated<ProcessSeen>& seen) {
      const bool now = seen.at.time_ns >= attempt.arrived.time_ns && seen.event.session == session;
      return now && !seen.event.answer.empty() && seen.event.answer != "silent";
    });
  };
  return std::ranges::all_of(attempt.culprits, [&](const CycleMember& who) {
    return attempt.asking.contains(who.session) && s.roster.Find(who.session) == nullptr && answers(who.session);
  });
}

// `wait` was for sessions that share memory with it and had not joined the same kind of cycle, as its event at `at` shows.
void Absent(CauseSearch& s, const Wait& own, const Moment& shown) {
  if (TriedAgainWithout(s, own)) return;
  const Wait wait = FirstGivenUp(s, own);
  const SessionStory& j = *wait.of;
  const Attempt& attempt = *wait.attempt;
  const std::uint64_t from = wait.from, until = wait.until;
  const Moment& at = &attempt == own.attempt ? shown : attempt.ended;
  const bool waits = own.attempt->open() && IsLive(*own.of);
  for (CandidateCause& known : s.candidates) {  // others may have found it
    if (known.weight != Weight::kAbsence || known.witness.journal != &j || known.wall_ns != from) continue;
    known.live |= waits && known.session != own.of->session();
    return;
  }
  std::vector<SessionId> blamed = Missing(s, wait);
  const bool gave_up = OthersGaveUp(s, wait, blamed);
  if (gave_up && attempt.asked_before) return TooLate(s, j, attempt);
  // One that ended while it was waited for is told as an end, unless everybody was ended then, or the wait had failed before.
  const bool long_wait = s.torn_down && s.first_end >= from + kPatience_ns;
  const bool timed_out = attempt.end == Attempt::End::kFailed;
  std::erase_if(blamed, [&](SessionId session) {
    const SessionEnd* end = s.EndOf(session);
    return end != nullptr && end->wall_ns <= until && end->witnessed && !long_wait;
  });
  const bool missing = !blamed.empty();
  if (!missing && !gave_up) blamed = Uncounted(s, j, from);
  const VerdictKind kind = missing           ? VerdictKind::kNeverArrived
                           : !blamed.empty() ? VerdictKind::kStalled
                                             : VerdictKind::kRefused;
  CandidateCause& candidate = s.AddWitnessed(Weight::kAbsence, kind, blamed.empty() ? j.session() : blamed.front(), j, at);
  candidate.attempt = &attempt;
  candidate.wall_ns = from;
  candidate.wait.established_ns = timed_out   ? std::min(until, from + kPatience_ns)
                                  : long_wait ? from + kPatience_ns
                                              : UINT64_MAX;
  if (!blamed.empty()) candidate.together.assign(blamed.begin() + 1, blamed.end());
  candidate.wait.waited_ns = until > from ? until - from : 0;
  candidate.live = waits && (blamed.empty() || blamed.front() != own.of->session());
  candidate.record.message = attempt.failure;
  candidate.record.code = Code::kTimeout;
  const SessionStory* stalled = kind == VerdictKind::kStalled ? s.roster.Find(candidate.session) : nullptr;
  if (stalled != nullptr) candidate.attempt = &stalled->Last();
}

// How long the session had waited for the others when it was told that the vote had failed.
std::uint64_t WaitedForVotes(const Attempt& attempt) {
  const Moment& decided = attempt.decided->at;
  std::uint64_t since = attempt.begun.time_ns;
  for (const Attempt::PhaseTaken& phase : attempt.phases) {
    for (const Moment& moment : {phase.begun, phase.voted})
      if (moment.time_ns < decided.time_ns) since = std::max(since, moment.time_ns);
  }
  return decided.time_ns - std::min(decided.time_ns, since);
}

}  // namespace

// A vote that failed because of another member, as a leader counted it.
void VoteOfAnother(CauseSearch& s, const SessionStory& j) {
  const bool of_another = j.Last().decided && j.Last().decided->culprit && j.Last().decided->culprit != j.session();
  if (LastAttemptDone(j) || j.Last().on_board || !of_another) return;
  const Attempt::Decision& decision = *j.Last().decided;
  const SessionStory* culprit = s.roster.Find(decision.culprit);
  if (culprit != nullptr && RecordsOwnFailure(*culprit)) return;
  const bool ended_before =
      s.EndOf(decision.culprit) != nullptr && s.EndOf(decision.culprit)->wall_ns <= s.Wall(j, decision.at) + kPatience_ns;
  const bool unrecorded = decision.code == Code::kOk;
  if ((decision.code == Code::kPeerLost || unrecorded) && ended_before) return;  // see Death, Leaving and EndsOfAbsent
  if (unrecorded && culprit != nullptr && culprit->Last().open() && IsDead(*culprit)) return;
  // Lost by the one that counts the votes, and not connected with this session.
  const bool died = decision.code == Code::kPeerLost && culprit == nullptr && s.EndOf(decision.culprit) == nullptr;
  const bool silent = !died && (BlamesAnother(decision.code) ||
                                (unrecorded && (culprit != nullptr || WaitedForVotes(j.Last()) >= kPatience_ns)));
  CandidateCause& candidate = s.AddWitnessed(silent ? Weight::kAbsence : Weight::kCause,
                                             died     ? VerdictKind::kDied
                                             : silent ? VerdictKind::kStalled
                                                      : KindOfCode(decision.code),
                                             decision.culprit, j, decision.at);
  if (culprit != nullptr && !culprit->attempts.empty()) candidate.attempt = &culprit->attempts.back();
  candidate.wait.established_ns = candidate.wall_ns;
  candidate.wait.waited_ns = silent && culprit == nullptr ? WaitedForVotes(j.Last()) : 0;
  candidate.live = culprit != nullptr && IsLive(*culprit);
  candidate.witness.alone = !silent;
  candidate.record.message = decision.message;
  candidate.record.code = decision.code;
  candidate.record.driver_result = decision.driver_result;
}

void FailedArrival(CauseSearch& s, const SessionStory& j) {
  if (LastAttemptDone(j) || j.Last().begun || j.Last().end != Attempt::End::kFailed || FailedOnBoard(j.Last())) return;
  const Attempt& attempt = j.Last();
  const std::uint64_t until = s.Wall(j, attempt.ended), came = s.Wall(j, attempt.came());
  const bool unsaid = attempt.code == Code::kOk, lost = attempt.code == Code::kPeerLost;
  std::vector<SessionId> others;
  if (unsaid || attempt.code == Code::kRefused) others = OtherGroups(s, j.session(), came);
  const bool absent = unsaid || attempt.code == Code::kTimeout || (lost && GaveUpBefore(s, j));
  if (others.empty() && absent) return Absent(s, {&j, &attempt, came, until}, attempt.ended);
  // One that was asked said why it cannot answer. Its own journal tells more, where it is given.
  const bool told = !lost && !attempt.culprits.empty();
  const SessionId about = !others.empty() ? others.front() : told ? attempt.culprits.front().session : j.session();
  CandidateCause& candidate =
      s.AddWitnessed(lost ? Weight::kConsequence : Weight::kCause, VerdictKind::kRefused, about, j, attempt.ended);
  candidate.wait.waited_ns = until - std::min(until, came);
  candidate.record.message = attempt.failure;
  if (!others.empty()) {
    candidate.detail = CandidateCause::OtherGroup{};
    return candidate.together.assign(others.begin() + 1, others.end());
  }
  candidate.record.code = attempt.code;
  candidate.live = IsLive(j);
}

// A wait for a member that ended only when the launcher ended the member: the others then went on without it for a moment.
void LongArrival(CauseSearch& s, const SessionStory& j) {
  if (!s.torn_down || OnBoard(s, j)) return;
  const Attempt& attempt = j.Last();
  const bool begun = attempt.begun && attempt.arrived && attempt.begun.time_ns - attempt.arrived.time_ns >= kPatience_ns;
  if (!begun || s.Wall(j, attempt.begun) + kPatience_ns < s.first_end) return;
  Absent(s, {&j, &attempt, s.Wall(j, attempt.came()), s.Wall(j, attempt.begun)}, attempt.begun);
}

// It waits for others to join, as nobody has said yet that all have come.
void Waiting(CauseSearch& s, const SessionStory& j) {
  const Attempt& attempt = j.Last();
  if (!attempt.open() || attempt.begun || !IsSilent(s, j) || WaitsOnBoard(s, j)) return;
  const bool left_behind = std::ranges::any_of(s.roster.journals(), [&](const SessionStory& other) {
    return SameTry(other.Last(), attempt) && Contains(other.Last().members, j.session());
  });
  if (!left_behind) Absent(s, {&j, &attempt, s.Wall(j, attempt.came()), s.job_end}, attempt.arrived);  // else: see Ballots
}

}  // namespace amem
