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
  const Attempt& attempt = j.Last();
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
  const Attempt& attempt = j.Last();
  return attempt.open_step && attempt.open_step->event.kind == StepKind::kImport;
}

}  // namespace

void CauseSearch::FailedArrival(const SessionStory& j) {
  if (LastAttemptDone(j) || j.Last().begun || j.Last().end != Attempt::End::kFailed) return;
  const Attempt& attempt = j.Last();
  const std::uint64_t until = roster_.Wall(j, attempt.ended.time_ns), came = roster_.Wall(j, attempt.came().time_ns);
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
  const std::uint64_t from = roster_.Wall(j, attempt.came().time_ns), until = roster_.Wall(j, attempt.ended.time_ns);
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
  for (const auto& [group, members] : groups)
    if (group != most) others.insert(others.end(), members.begin(), members.end());
  return others;
}

// A wait for a member that ended only when the launcher ended the member: the others then went on without it for a moment.
void CauseSearch::LongArrival(const SessionStory& j) {
  if (!WasTornDown()) return;
  const Attempt& attempt = j.Last();
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
    const bool now = at.time_ns >= attempt.came().time_ns && (!attempt.ended || at.time_ns <= attempt.ended.time_ns);
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
    if (other == nullptr || !SameAttempt(other->Last(), attempt)) continue;
    members.push_back(other);
    for (const auto& [member, what] : other->Last().heard) heard.insert(member);
    counted = counted || !other->Last().heard.empty();
  }
  const auto those = [&](auto holds) {
    std::vector<SessionId> found;
    for (const SessionStory* member : members)
      if (holds(*member)) found.push_back(member->session());
    return found.size() < members.size() ? found : std::vector<SessionId>{};
  };
  std::vector<SessionId> found = those([&](const SessionStory& m) { return SeenState(m.session()) == "stopped"; });
  if (found.empty() && counted)
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

void CauseSearch::Absent(const SessionStory& j, const Attempt& attempt, std::uint64_t until, SequenceNumber seq) {
  const std::uint64_t from = roster_.Wall(j, attempt.came().time_ns);
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
  candidate.live = attempt.open() && IsLive(j);
  candidate.message = attempt.failure;
  candidate.code = Code::kTimeout;
  if (kind == VerdictKind::kStalled && candidate.journal != nullptr) candidate.attempt = &candidate.journal->Last();
}

// The session waited for a cycle of that kind, or was in one, at some time between `from` and `until`.
bool CauseSearch::Joined(const SessionStory& j, CycleKind kind, std::uint64_t from, std::uint64_t until) const {
  return std::ranges::any_of(j.attempts, [&](const Attempt& a) {
    const std::uint64_t end = a.ended ? roster_.Wall(j, a.ended.time_ns) : UINT64_MAX;
    return a.kind == kind && roster_.Wall(j, a.came().time_ns) <= until && end >= from;
  });
}

// An attempt that is open: the session waits, for others to join or to finish their parts, or is waited for itself.
void CauseSearch::Waiting(const SessionStory& j) {
  if (!j.Last().open()) return;
  const Attempt& attempt = j.Last();
  const Progress& progress = ProgressOfSession(j);
  const std::uint64_t since = roster_.Wall(j, progress.since.time_ns);
  const bool stopped = SeenState(j.session()) == "stopped";
  if (IsLive(j) && !stopped && job_end_ - std::min(job_end_, since) < kPatience_ns) return;  // under way
  if (attempt.begun) return WaitingInside(j, attempt, progress);
  const bool left_behind = std::ranges::any_of(roster_.SharingWith(j.session(), since), [&](SessionId session) {
    const SessionStory* other = session == j.session() ? nullptr : roster_.Find(session);
    return other != nullptr && other->Last().begun && SameAttempt(other->Last(), attempt) &&
           std::ranges::find(other->Last().members, j.session()) != other->Last().members.end();
  });
  if (left_behind && CounterStalled(attempt)) return;
  left_behind ? Stalled(j, progress.since.time_ns) : Absent(j, attempt, job_end_, attempt.arrived.seq);
}

// The one that counts says to each member that the cycle has begun. If several have not heard so, or one has not and it
// did not finish its own next work either, it was stopped while it told them.
bool CauseSearch::CounterStalled(const Attempt& attempt) {
  std::size_t untold = 0;
  const Attempt* begun = nullptr;
  for (const SessionStory& other : roster_.journals()) {
    if (!other.Last().open() || !SameAttempt(other.Last(), attempt)) continue;
    if (other.Last().begun) {
      begun = &other.attempts.back();
    } else {
      ++untold;
    }
  }
  if (begun == nullptr || begun->members.empty()) return false;
  const SessionStory* counter = roster_.Find(*std::ranges::min_element(begun->members));
  if (counter == nullptr || !counter->Last().open() || !counter->Last().begun) return false;
  const bool at_work = PositionOf(*counter, ProgressOfSession(*counter)).within == 0;
  if (untold < 2 && !at_work) return false;
  const bool told = std::ranges::any_of(
      candidates_, [&](const CandidateCause& c) { return c.session == counter->session() && c.kind == VerdictKind::kStalled; });
  if (!told) Stalled(*counter, ProgressOfSession(*counter).since.time_ns);
  return true;
}

// What the journals of an attempt that began and is silent say, as one of its members sees it.
struct CauseSearch::Inside {
  Position own;
  bool counts = false;   // it has the lowest number, and so it counts the votes
  bool stopped = false;  // its process is
  bool waits_for_owner = false;
  bool alive_and_first = true;  // of those whose attempt is open it has the lowest number, and none of them is dead
  // Of the others:
  bool one_stopped = false, one_unknown = false;  // a process is stopped; a journal was not given
  bool one_behind = false, one_ahead = false;
  bool one_works_beside = false;  // in the same phase, and not because it waits for an owner
  bool counter_works_ahead = false;
  bool rest_voted = true;  // all but such a counter have voted, on the decision that is known to the one that counts
};

CauseSearch::Inside CauseSearch::Look(const SessionStory& j, const Attempt& attempt) {
  Inside inside{.own = PositionOf(j, ProgressOfSession(j)),
                .stopped = SeenState(j.session()) == "stopped",
                .waits_for_owner = WaitsForOwner(j)};
  const SessionId counter = attempt.members.empty() ? j.session() : *std::ranges::min_element(attempt.members);
  inside.counts = counter == j.session();
  for (const SessionId session : attempt.members) {
    if (session == j.session()) continue;
    const SessionStory* other = roster_.Find(session);
    inside.one_unknown |= other == nullptr;
    inside.one_stopped |= SeenState(session) == "stopped";
    if (other == nullptr || !SameAttempt(other->Last(), attempt)) continue;
    if (!other->Last().open()) {
      inside.one_ahead = true;
      continue;
    }
    const Position position = PositionOf(*other, ProgressOfSession(*other));
    const bool works = position.within == 0;
    inside.alive_and_first &= session > j.session() && !IsDead(*other);
    // One that was not told that it has begun keeps nobody from work of its own.
    inside.one_behind |= position < inside.own && (other->Last().begun || inside.own.within != 0);
    inside.one_ahead |= position > inside.own;
    inside.one_works_beside |= works && position == inside.own && !WaitsForOwner(*other);
    if (works && position > inside.own && session == counter) {
      inside.counter_works_ahead = true;
    } else {
      inside.rest_voted &= position.within == 1 && (inside.counts ? position < inside.own : position == inside.own);
    }
  }
  return inside;
}

void CauseSearch::WaitingInside(const SessionStory& j, const Attempt& attempt, const Progress& progress) {
  enum class Blame { kThis, kAnother, kWhoDidNotVote };  // another one: its own journal, or a look at it, tells of it
  struct Rule {
    bool (*holds)(const Inside&);
    Blame blame;
  };
  static constexpr Rule kRules[] = {
      // the first that holds
      {[](const Inside& i) { return i.stopped; }, Blame::kThis},
      {[](const Inside& i) { return i.one_stopped; }, Blame::kAnother},
      // It counted the votes, went on, and told nobody.
      {[](const Inside& i) { return i.counts && i.own.within == 0 && i.one_behind && i.rest_voted && !i.one_unknown; },
       Blame::kThis},
      {[](const Inside& i) { return i.one_behind; }, Blame::kAnother},
      // The one that counts went on, and did not tell it.
      {[](const Inside& i) { return i.own.within == 1 && i.counter_works_ahead && i.rest_voted; }, Blame::kAnother},
      {[](const Inside& i) { return i.own.within == 0 && i.waits_for_owner && i.one_works_beside; }, Blame::kAnother},
      {[](const Inside& i) { return i.own.within == 0 || i.one_ahead; }, Blame::kThis},
      // All that is known did its part, and waits for the decision.
      {[](const Inside& i) { return i.one_unknown; }, Blame::kWhoDidNotVote},
      {[](const Inside& i) { return i.alive_and_first; }, Blame::kThis},
  };
  const Inside inside = Look(j, attempt);
  const auto* rule = std::ranges::find_if(kRules, [&](const Rule& r) { return r.holds(inside); });
  if (rule == std::end(kRules) || rule->blame == Blame::kAnother) return;
  rule->blame == Blame::kThis ? Stalled(j, progress.since.time_ns) : AbsentVoters(j, attempt, progress);
}

void CauseSearch::Stalled(const SessionStory& j, std::uint64_t since_ns) {
  CandidateCause& candidate = Add(Weight::kAbsence, VerdictKind::kStalled, j, since_ns);
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
    Stalled(j, since.time_ns);
    candidates_.back().attempt = attempt;
  }
}

// It did its part and waits for votes. A member whose journal was not given may be the one that did not vote.
void CauseSearch::AbsentVoters(const SessionStory& j, const Attempt& attempt, const Progress& progress) {
  for (const SessionId member : attempt.members) {
    if (roster_.Find(member) != nullptr || EndOf(member) != nullptr) continue;
    const auto heard = attempt.heard.find(member);
    if (heard != attempt.heard.end() && heard->second >= attempt.phases.size()) continue;
    CandidateCause& candidate = AddWitnessed(Weight::kConsequence, VerdictKind::kStalled, member, j, progress.since.seq);
    candidate.wall_ns = roster_.Wall(j, progress.since.time_ns);
    candidate.waited_ns = job_end_ - std::min(job_end_, candidate.wall_ns);
    candidate.live = IsLive(j);
  }
}

}  // namespace amem
