// Absences: sessions that others waited for, because they did not join a pause or resume, or did not finish their part of it.
#include <algorithm>

#include "replay/diagnosis/cause_search.h"

namespace amem {
namespace {

// How long the others have waited when a session that they ask records it.
constexpr std::uint64_t kAskedFor_ns = 500'000'000;

// How far a session came in an attempt. Members go through the same phases, in the same order, also in an undo.
struct Position {
  std::size_t phases = 0;
  int within = 0;  // 0: it has something to do; 1: it voted, or did its part; 2: it knows the decision
  friend auto operator<=>(const Position&, const Position&) = default;
};

Position PositionOf(const SessionStory& j, const Progress& progress) {
  const Attempt& attempt = j.attempts.back();
  if (!attempt.begun || attempt.phases.empty()) return {};
  Position position{attempt.phases.size(), 0};
  if (attempt.phases.back().decided) {
    position.within = 2;
  } else if (attempt.phases.back().voted || progress.did_its_part) {
    position.within = 1;
  }
  return position;
}

bool SameAttempt(const Attempt& a, const Attempt& b) { return a.kind == b.kind && a.cycle == b.cycle; }

// It waits for what another session gives it.
bool WaitsForOwner(const SessionStory& j) {
  const Attempt& attempt = j.attempts.back();
  return attempt.open_step && attempt.open_step->step.kind == StepKind::kImport;
}

std::uint64_t ArrivalOf(const Attempt& attempt) {
  return (attempt.arrived ? attempt.arrived : attempt.begun ? attempt.begun : attempt.ended).time_ns;
}

}  // namespace

void CauseSearch::FailedArrival(const SessionStory& j) {
  if (LastAttemptDone(j) || j.attempts.back().begun || j.attempts.back().end != Attempt::End::kFailed) return;
  const Attempt& attempt = j.attempts.back();
  const std::uint64_t until = roster_.Wall(j, attempt.ended.time_ns), came = roster_.Wall(j, ArrivalOf(attempt));
  if (attempt.code == Code::kOk || attempt.code == Code::kRefused) {
    if (std::vector<SessionId> others = OtherGroups(j.session(), came); !others.empty()) {
      CandidateCause& candidate = AddWitnessed(Weight::kCause, VerdictKind::kRefused, others.front(), j, attempt.ended.seq);
      candidate.wall_ns = until;
      candidate.waited_ns = until - std::min(until, came);
      candidate.message = attempt.failure;
      candidate.groups_differ = true;
      candidate.together.assign(others.begin() + 1, others.end());
      return;
    }
  }
  if (attempt.code == Code::kOk || attempt.code == Code::kTimeout) return Absent(j, attempt, until, attempt.ended.seq);
  if (attempt.code == Code::kPeerLost && GaveUpBefore(j, attempt)) return Absent(j, attempt, until, attempt.ended.seq);
  // One that was asked said why it cannot answer. Its own journal tells more, where it is given.
  const bool told = attempt.code != Code::kPeerLost && !attempt.culprits.empty();
  const SessionId about = told ? attempt.culprits.front().session : j.session();
  const Weight weight = attempt.code == Code::kPeerLost ? Weight::kConsequence : Weight::kCause;
  CandidateCause& candidate = AddWitnessed(weight, VerdictKind::kRefused, about, j, attempt.ended.seq);
  candidate.attempt = &attempt;
  candidate.wall_ns = until;
  candidate.waited_ns = until - std::min(until, came);
  candidate.message = attempt.failure;
  candidate.code = attempt.code;
  candidate.live = IsLive(j);
}

// Another member had come and waited as long, ran out of patience first, and left in order: what it waited for had not come.
bool CauseSearch::GaveUpBefore(const SessionStory& j, const Attempt& attempt) const {
  const std::uint64_t from = roster_.Wall(j, ArrivalOf(attempt)), until = roster_.Wall(j, attempt.ended.time_ns);
  if (attempt.culprits.empty() || until < from + kPatience_ns) return false;
  for (const CycleMember& culprit : attempt.culprits) {
    const SessionEnd* end = EndOf(culprit.session);
    if (end == nullptr || !end->in_order) return false;
    if (!attempt.asking.contains(culprit.session) && !attempt.heard.contains(culprit.session)) return false;
  }
  const std::vector<SessionId> missing = Missing(j, attempt, from, until);
  return std::ranges::any_of(missing,
                             [&](SessionId session) { return EndOf(session) == nullptr || EndOf(session)->wall_ns > until; });
}

std::vector<SessionId> CauseSearch::OtherGroups(SessionId session, std::uint64_t wall_ns) const {
  std::map<std::int64_t, std::vector<SessionId>> groups;
  std::map<SessionId, std::int64_t> met;
  const std::set<SessionId> set = roster_.SharingWith(session, wall_ns);
  for (const SessionId member : set) {
    const SessionStory* j = roster_.Find(member);
    if (j == nullptr) continue;
    for (const auto& [peer, known] : j->findings.state.peers) met.try_emplace(peer, known.group);
  }
  for (const SessionId member : set) {
    const SessionStory* j = roster_.Find(member);
    if (j != nullptr) {
      groups[j->who().group].push_back(member);
    } else if (met.contains(member)) {
      groups[met[member]].push_back(member);
    }
  }
  if (groups.size() < 2) return {};
  const auto& most = std::ranges::max_element(groups, {}, [](const auto& g) { return g.second.size(); })->first;
  std::vector<SessionId> others;
  for (const auto& [group, members] : groups) {
    if (group != most) others.insert(others.end(), members.begin(), members.end());
  }
  return others;
}

// A wait for a member that ended only when the launcher ended the member: the others then went on without it for a moment.
void CauseSearch::LongArrival(const SessionStory& j) {
  if (!WasTornDown() || j.attempts.empty()) return;
  const Attempt& attempt = j.attempts.back();
  const bool begun = attempt.begun && attempt.arrived && attempt.begun.time_ns - attempt.arrived.time_ns >= kPatience_ns;
  if (!begun || roster_.Wall(j, attempt.begun.time_ns) + kPatience_ns < first_end_) return;
  Absent(j, attempt, roster_.Wall(j, attempt.begun.time_ns), attempt.begun.seq);
}

// Others asked this session for so long whether it comes that it was recorded, and it never came. Where one of their journals
// is given, that tells of it.
void CauseSearch::Awaited(const SessionStory& j) {
  if (!j.awaited) return;
  const Attempt& attempt = *j.awaited;
  if (std::ranges::any_of(attempt.asking, [&](SessionId session) { return roster_.Find(session) != nullptr; })) return;
  const std::uint64_t noted = roster_.Wall(j, attempt.arrived.time_ns), from = noted - std::min(noted, kAskedFor_ns);
  if (IsLive(j) && job_end_ - std::min(job_end_, from) < kPatience_ns) return;  // it may come yet
  CandidateCause& candidate = AddWitnessed(Weight::kAbsence, VerdictKind::kNeverArrived, j.session(), j, attempt.arrived.seq);
  candidate.attempt = &attempt;
  candidate.wall_ns = from;
  const std::uint64_t until = std::min(first_end_, job_end_);
  if (until >= from + kPatience_ns) candidate.established_ns = from + kPatience_ns;
  candidate.missing = {j.session()};
  candidate.waited_ns = until - std::min(until, from);
  candidate.live = IsLive(j);
  candidate.code = Code::kTimeout;
}

// Those that did not come, as far as their journals tell; of a session without a journal this is not known, and it is blamed
// when all others did come, unless the session that counts arrivals has heard it.
std::vector<SessionId> CauseSearch::Missing(const SessionStory& j, const Attempt& attempt, std::uint64_t from,
                                            std::uint64_t until) const {
  std::set<SessionId> missing, silent, waited_for;
  for (const auto& [seen, at] : j.seen) {
    const bool now = at.time_ns >= ArrivalOf(attempt) && (!attempt.ended || at.time_ns <= attempt.ended.time_ns);
    if (now) waited_for.insert(seen.session);
  }
  const auto came = [&](SessionId session) { return attempt.heard.contains(session) || attempt.asking.contains(session); };
  if (attempt.code == Code::kTimeout)
    for (const CycleMember& culprit : attempt.culprits) waited_for.insert(culprit.session);
  std::set<SessionId> set = roster_.SharingWith(j.session(), from);
  set.insert(waited_for.begin(), waited_for.end());
  for (const SessionId session : set) {
    if (session == j.session()) continue;
    const SessionEnd* end = EndOf(session);
    const bool gone = end != nullptr && end->witnessed && end->wall_ns <= from;
    const SessionStory* other = roster_.Find(session);
    if (other != nullptr) {
      if (!gone && !Joined(*other, attempt.kind, from, until)) missing.insert(session);
    } else if (!gone && !came(session)) {
      silent.insert(session);
    }
  }
  std::erase_if(waited_for, came);  // as the one that counts and does not answer
  if (missing.empty()) {
    std::erase_if(silent, [&](SessionId s) { return !waited_for.empty() && !waited_for.contains(s); });
    missing = silent;
  } else {
    std::ranges::set_intersection(silent, waited_for, std::inserter(missing, missing.end()));
  }
  return {missing.begin(), missing.end()};
}

// All have come, and yet it did not begin: the members that stopped between their arrival and being counted.
std::vector<SessionId> CauseSearch::Uncounted(const SessionStory& j, const Attempt& attempt, std::uint64_t from) const {
  std::vector<const SessionStory*> members;
  std::set<SessionId> heard;
  bool counted = false;
  for (const SessionId session : roster_.SharingWith(j.session(), from)) {
    const SessionStory* other = roster_.Find(session);
    if (other == nullptr || other->attempts.empty() || !SameAttempt(other->attempts.back(), attempt)) continue;
    members.push_back(other);
    for (const auto& [member, what] : other->attempts.back().heard) heard.insert(member);
    counted = counted || !other->attempts.back().heard.empty();
  }
  const auto those = [&](auto holds) {
    std::vector<SessionId> found;
    for (const SessionStory* member : members) {
      if (holds(*member)) found.push_back(member->session());
    }
    return found.size() < members.size() ? found : std::vector<SessionId>{};
  };
  std::vector<SessionId> found = those([&](const SessionStory& m) { return SeenState(m.session()) == "stopped"; });
  if (found.empty() && counted) {
    found = those([&](const SessionStory& m) { return !heard.contains(m.session()) && m.attempts.back().heard.empty(); });
  }
  if (found.empty()) {
    for (const auto& [seen, at] : j.seen) {
      if (at.time_ns >= ArrivalOf(attempt) && std::ranges::find(found, seen.session) == found.end())
        found.push_back(seen.session);
    }
  }
  if (found.empty()) found = those([](const SessionStory& m) { return HasOpenAttempt(m) && !m.attempts.back().begun; });
  // The one with the lowest number counts arrivals.
  if (found.empty() && attempt.end == Attempt::End::kOpen && !members.empty()) found = {members.front()->session()};
  return found;
}

void CauseSearch::Absent(const SessionStory& j, const Attempt& attempt, std::uint64_t until, SequenceNumber seq) {
  const std::uint64_t from = roster_.Wall(j, ArrivalOf(attempt));
  std::vector<SessionId> missing = Missing(j, attempt, from, until);
  // One that ended while it was waited for is told as an end, unless everybody was ended then, or the wait had failed before.
  const bool long_wait = WasTornDown() && first_end_ >= from + kPatience_ns;
  const bool timed_out = attempt.end == Attempt::End::kFailed;
  std::erase_if(missing, [&](SessionId session) {
    const SessionEnd* end = EndOf(session);
    return end != nullptr && end->wall_ns <= until && end->witnessed && !long_wait;
  });
  std::vector<SessionId> uncounted = missing.empty() ? Uncounted(j, attempt, from) : std::vector<SessionId>{};
  const VerdictKind kind = !missing.empty()     ? VerdictKind::kNeverArrived
                           : !uncounted.empty() ? VerdictKind::kStalled
                                                : VerdictKind::kRefused;
  const SessionId about = !missing.empty() ? missing.front() : !uncounted.empty() ? uncounted.front() : j.session();
  CandidateCause& candidate = AddWitnessed(Weight::kAbsence, kind, about, j, seq);
  candidate.attempt = &attempt;
  candidate.wall_ns = from;
  candidate.established_ns = timed_out ? std::min(until, from + kPatience_ns) : long_wait ? from + kPatience_ns : UINT64_MAX;
  candidate.missing = std::move(missing);
  candidate.together = std::move(uncounted);
  if (!candidate.together.empty()) candidate.together.erase(candidate.together.begin());
  candidate.waited_ns = until > from ? until - from : 0;
  candidate.live = attempt.end == Attempt::End::kOpen && IsLive(j);
  candidate.message = attempt.failure;
  candidate.code = Code::kTimeout;
  if (kind == VerdictKind::kStalled && candidate.journal != nullptr) candidate.attempt = &candidate.journal->attempts.back();
}

// The session waited for a cycle of that kind, or was in one, at some time between `from` and `until`.
bool CauseSearch::Joined(const SessionStory& j, CycleKind kind, std::uint64_t from, std::uint64_t until) const {
  return std::ranges::any_of(j.attempts, [&](const Attempt& a) {
    const Moment came = a.arrived ? a.arrived : a.begun;
    if (a.kind != kind || !came) return false;
    const std::uint64_t end = a.ended ? roster_.Wall(j, a.ended.time_ns) : UINT64_MAX;
    return roster_.Wall(j, came.time_ns) <= until && end >= from;
  });
}

// An attempt that is open: the session waits, for others to join or to finish their parts, or is waited for itself.
void CauseSearch::Waiting(const SessionStory& j) {
  if (!HasOpenAttempt(j)) return;
  const Attempt& attempt = j.attempts.back();
  const Progress& progress = ProgressOfSession(j);
  const std::uint64_t since = roster_.Wall(j, progress.since.time_ns);
  const bool stopped = SeenState(j.session()) == "stopped";
  if (IsLive(j) && !stopped && job_end_ - std::min(job_end_, since) < kPatience_ns) return;  // under way
  if (attempt.begun) return WaitingInside(j, attempt, progress);
  const bool left_behind = std::ranges::any_of(roster_.SharingWith(j.session(), since), [&](SessionId session) {
    const SessionStory* other = session == j.session() ? nullptr : roster_.Find(session);
    return other != nullptr && !other->attempts.empty() && other->attempts.back().begun &&
           SameAttempt(other->attempts.back(), attempt) &&
           std::ranges::find(other->attempts.back().members, j.session()) != other->attempts.back().members.end();
  });
  if (left_behind && CounterStalled(attempt)) return;
  left_behind ? Stalled(j, nullptr, progress.since.time_ns) : Absent(j, attempt, job_end_, attempt.arrived.seq);
}

// The one that counts says to each member that the cycle has begun. If several have not heard so, or one has not and it
// did not finish its own next work either, it was stopped while it told them.
bool CauseSearch::CounterStalled(const Attempt& attempt) {
  std::size_t untold = 0;
  const Attempt* begun = nullptr;
  for (const SessionStory& other : roster_.journals()) {
    if (!HasOpenAttempt(other) || !SameAttempt(other.attempts.back(), attempt)) continue;
    if (other.attempts.back().begun) {
      begun = &other.attempts.back();
    } else {
      ++untold;
    }
  }
  if (begun == nullptr || begun->members.empty()) return false;
  const SessionStory* counter = roster_.Find(*std::ranges::min_element(begun->members));
  if (counter == nullptr || !HasOpenAttempt(*counter) || !counter->attempts.back().begun) return false;
  const bool at_work = PositionOf(*counter, ProgressOfSession(*counter)).within == 0;
  if (untold < 2 && !at_work) return false;
  const bool told = std::ranges::any_of(
      candidates_, [&](const CandidateCause& c) { return c.session == counter->session() && c.kind == VerdictKind::kStalled; });
  if (!told) Stalled(*counter, nullptr, ProgressOfSession(*counter).since.time_ns);
  return true;
}

void CauseSearch::WaitingInside(const SessionStory& j, const Attempt& attempt, const Progress& progress) {
  const Position own = PositionOf(j, progress);
  bool behind = false, ahead = false, stopped = false, unknown = false, dead = false, others_work = false;
  const SessionId counter = attempt.members.empty() ? j.session() : *std::ranges::min_element(attempt.members);
  const bool counts = counter == j.session();
  // The one that counts has gone on and is at work; all others have voted and were not told the decision.
  bool counter_ahead = false, others_wait = true;
  SessionId lowest = j.session();
  for (const SessionId session : attempt.members) {
    if (session == j.session()) continue;
    const SessionStory* other = roster_.Find(session);
    unknown = unknown || other == nullptr;
    stopped = stopped || SeenState(session) == "stopped";
    if (other == nullptr || other->attempts.empty() || !SameAttempt(other->attempts.back(), attempt)) continue;
    if (!HasOpenAttempt(*other)) {
      ahead = true;
      continue;
    }
    lowest = std::min(lowest, session);
    dead = dead || IsDead(*other);
    const Position position = PositionOf(*other, ProgressOfSession(*other));
    behind = behind || position < own;
    ahead = ahead || position > own;
    if (position > own && position.within == 0 && session == counter) {
      counter_ahead = true;
    } else {
      others_wait = others_wait && position.within == 1 && (counts ? position < own : position == own);
    }
    others_work = others_work || (position == own && position.within == 0 && !WaitsForOwner(*other));
  }
  const bool own_stopped = SeenState(j.session()) == "stopped";
  if (own_stopped) return Stalled(j, nullptr, progress.since.time_ns);
  if (stopped) return;  // another one is told of
  if (behind && others_wait && !unknown && counts && own.within == 0) return Stalled(j, nullptr, progress.since.time_ns);
  if (behind || (own.within == 1 && counter_ahead && others_wait)) return;
  if (own.within == 0 && WaitsForOwner(j) && others_work) return;
  if (own.within == 0 || ahead) return Stalled(j, nullptr, progress.since.time_ns);
  if (unknown) return AbsentVoters(j, attempt, progress);
  // All have done their parts and wait for the decision, which is for the session with the lowest number to make.
  if (lowest == j.session() && !dead) Stalled(j, nullptr, progress.since.time_ns);
}

void CauseSearch::Stalled(const SessionStory& j, const SessionStory* witness, std::uint64_t since_ns) {
  CandidateCause& candidate = Add(Weight::kAbsence, VerdictKind::kStalled, j, since_ns);
  candidate.witness = witness;
  candidate.waited_ns = job_end_ - std::min(job_end_, candidate.wall_ns);
  const bool before_the_end = WasTornDown() && first_end_ >= candidate.wall_ns + kPatience_ns;
  if (before_the_end) candidate.established_ns = candidate.wall_ns + kPatience_ns;
}

void CauseSearch::StalledPools(const SessionStory& j) {
  if (IsDead(j) || j.closed) return;  // see Death
  for (const Attempt* attempt : j.LastOfPools()) {
    if (!attempt->open()) continue;
    const Moment since = ProgressOf(j, attempt->tag).since;
    const std::uint64_t wall_ns = roster_.Wall(j, since.time_ns);
    if (SeenState(j.session()) != "stopped" && job_end_ - std::min(job_end_, wall_ns) < kPatience_ns) continue;
    Stalled(j, nullptr, since.time_ns);
    candidates_.back().attempt = attempt;
  }
}

// It did its part and waits for votes. A member whose journal was not given may be the one that did not vote.
void CauseSearch::AbsentVoters(const SessionStory& j, const Attempt& attempt, const Progress& progress) {
  for (const SessionId member : attempt.members) {
    if (roster_.Find(member) != nullptr || EndOf(member) != nullptr) continue;
    const auto heard = attempt.heard.find(member);
    if (heard != attempt.heard.end() && heard->second.votes >= attempt.phases.size()) continue;
    CandidateCause& candidate = AddWitnessed(Weight::kConsequence, VerdictKind::kStalled, member, j, progress.since.seq);
    candidate.wall_ns = roster_.Wall(j, progress.since.time_ns);
    candidate.waited_ns = job_end_ - std::min(job_end_, candidate.wall_ns);
    candidate.live = IsLive(j);
  }
}

}  // namespace amem
