// Ends: processes that died, and those that left in order while others needed them.
#include <algorithm>

#include "replay/diagnosis/cause_search.h"

namespace amem {
namespace {

using Weight = CandidateCause::Weight;

// A pause or resume of a pool that the process was in the middle of; null: none.
const Attempt* OpenPoolAttempt(const SessionStory& j) {
  for (const Attempt* attempt : j.LastOfPools())
    if (attempt->open()) return attempt;
  return nullptr;
}

// A process whose journal has no event for this long before its death was noticed had been stuck: others ended it, and its
// death is not the cause.
constexpr std::uint64_t kStuck_ns = 5'000'000'000;

// A launcher ends one process of a job after the other, each within this time of the one before.
constexpr std::uint64_t kNextEnd_ns = 100'000'000;

// Whether another session was paused, or in a pause or resume, also a failed one, after that time. Sessions that exited with 0
// while they were paused did not need each other.
bool OthersNeeded(CauseSearch& s, const SessionStory& j, std::uint64_t since) {
  return std::ranges::any_of(s.roster.journals(), [&](const SessionStory& other) {
    const SessionEnd* end = s.EndOf(other.session());
    if (&other == &j || (end != nullptr && end->witnessed && end->wall_ns <= since)) return false;
    const Moment ended = other.Last().ended;
    if (!LastAttemptDone(other) && (!ended || s.Wall(other, ended) >= since)) return true;
    if (!other.closed) return IsHalfWay(other.findings.state.lifecycle);
    const bool well = j.closed->event.exit_code == 0 && other.closed->event.exit_code == 0;
    return !well && IsHalfWay(other.closed->before);
  });
}

bool Blames(const Attempt& attempt, SessionId session) {
  return std::ranges::find(attempt.culprits, session, &CycleMember::session) != attempt.culprits.end();
}

// Whether the last pause or resume of another session did not begin because this one had ended. A process that ends closes its
// connections before it records its end.
bool CalledOffBecauseOf(CauseSearch& s, const SessionStory& j) {
  return std::ranges::any_of(s.roster.journals(), [&](const SessionStory& other) {
    const bool lost = !LastAttemptDone(other) && other.Last().code == Code::kPeerLost;
    return &other != &j && lost && Blames(other.Last(), j.session());
  });
}

// When others noticed its end, or failed because of it; UINT64_MAX: none did.
std::uint64_t MissedSince(CauseSearch& s, const SessionStory& j) {
  std::uint64_t since = UINT64_MAX;
  for (const SessionStory& other : s.roster.journals()) {
    for (const auto& [lost, at] : other.lost)
      if (lost.peer == j.session()) since = std::min(since, s.Wall(other, at));
    if (other.Last().code == Code::kPeerLost && Blames(other.Last(), j.session()))
      since = std::min(since, s.Wall(other, other.Last().ended));
  }
  return since;
}

// Whether each end that this session saw after that time, and its own, followed the one before within kNextEnd_ns.
bool EndedTogether(CauseSearch& s, const SessionStory& j, std::uint64_t wall_ns) {
  std::vector<std::uint64_t> ends;
  for (const auto& [lost, at] : j.lost) ends.push_back(s.Wall(j, at));
  if (j.closed) ends.push_back(s.Wall(j, j.closed->at));
  std::ranges::sort(ends);
  for (const std::uint64_t next : ends) {
    if (next <= wall_ns) continue;
    if (next - wall_ns > kNextEnd_ns) return false;
    wall_ns = next;
  }
  return true;
}

// Whether the last attempt of that journal failed because of this end, which the session noticed only a moment later.
bool FailedBecauseOf(CauseSearch& s, const SessionStory& j, SessionId session, const SessionEnd& end) {
  if (LastAttemptDone(j) || j.Last().end != Attempt::End::kFailed) return false;
  const Attempt& attempt = j.Last();
  const std::uint64_t failed = s.Wall(j, attempt.ended);
  if (attempt.code != Code::kPeerLost || end.wall_ns < failed || end.wall_ns > failed + kPatience_ns) return false;
  return (attempt.decided && attempt.decided->culprit == session) || Blames(attempt, session);
}

bool OneDiedIn(CauseSearch& s, const SessionStory& j, const Attempt& attempt) {
  const std::uint64_t from = s.Wall(j, attempt.came());
  const std::uint64_t until = attempt.ended ? s.Wall(j, attempt.ended) : UINT64_MAX;
  return std::ranges::any_of(s.ends, [&](const auto& item) {
    const SessionEnd& end = item.second;
    return item.first != j.session() && !end.in_order && end.witnessed && end.wall_ns >= from && end.wall_ns <= until;
  });
}

}  // namespace

void Death(CauseSearch& s, const SessionStory& j) {
  if (!IsDead(j)) return;
  const SessionEnd end = s.ends[j.session()];  // one that is dead has an end
  const bool in_cycle = j.Last().open(), half = IsHalfWay(j.findings.state.lifecycle);
  const std::uint64_t last = s.Wall(j, j.last);
  // Sessions that share memory with a process notice its death. A death that none of them noticed was, as a rule, the end of
  // all.
  const std::set<SessionId> sharing = s.roster.SharingWith(j.session(), last);
  const bool others_lived = std::ranges::any_of(s.roster.journals(), [&](const SessionStory& other) {
    if (&other == &j) return false;
    if (sharing.size() > 1) return sharing.contains(other.session()) && !IsDead(other);
    return !IsDead(other) || s.roster.KnownUntil(other) > last + kPatience_ns;
  });
  const bool waited_for = std::ranges::any_of(s.roster.journals(), [&](const SessionStory& other) {
    if (&other == &j || LastAttemptDone(other)) return false;
    const Attempt& attempt = other.Last();
    return attempt.arrived && s.Wall(other, attempt.arrived) <= end.wall_ns &&
           (!attempt.ended || s.Wall(other, attempt.ended) >= end.wall_ns);
  });
  const bool alone = s.roster.journals().size() == 1;
  const bool awaited = alone && j.awaited.has_value();  // others waited for it when it ended
  const bool first = end.witness != nullptr || others_lived || alone;
  const bool was_stuck = in_cycle && end.witnessed && end.wall_ns > last + kStuck_ns && !s.ProgressOfSession(j).did_its_part;
  const Attempt* of_pool = in_cycle ? nullptr : OpenPoolAttempt(j);
  const bool needed = in_cycle || half || awaited || of_pool != nullptr || (waited_for && end.witnessed);
  const bool matters = needed && first && !was_stuck;
  CandidateCause& candidate =
      s.Add(matters ? Weight::kCause : Weight::kEnd, needed ? VerdictKind::kDied : VerdictKind::kEnded, j, j.last);
  candidate.live = false;
  candidate.witness.journal = end.witness;
  candidate.record.seq = end.witness_seq;
  candidate.wall_ns = end.wall_ns;
  if (!in_cycle) candidate.attempt = of_pool;
}

// A rank that ends in order while it is paused takes its memory with it. A job may end so; it is a cause where others still
// need that memory, or where the rank ended because of an error.
void Leaving(CauseSearch& s, const SessionStory& j) {
  if (!j.closed) return;
  const std::uint64_t at = s.Wall(j, j.closed->at);
  const bool half = j.closed->in_attempt || IsHalfWay(j.closed->before);
  // Of one journal alone it is not known whether the others ended in order, too.
  const bool met = !j.findings.state.peers.empty() || (std::ranges::any_of(j.Last().members, [&](SessionId member) {
    return member != j.session() && s.EndOf(member) == nullptr;
  }));
  const bool alone = s.roster.journals().size() == 1 && met;
  const bool awaited = s.roster.journals().size() == 1 && j.awaited.has_value();
  const bool needed = alone || OthersNeeded(s, j, at) || CalledOffBecauseOf(s, j);
  const bool error = j.closed->event.exit_code > 0;
  if (!error && !(half && needed)) return;
  // It ended because its last attempt had lost another session.
  const bool followed = !LastAttemptDone(j) && j.Last().code == Code::kPeerLost && !j.Last().culprits.empty();
  CandidateCause& candidate = s.Add(!followed && (half || awaited || (needed && !alone)) ? Weight::kCause : Weight::kEnd,
                                    VerdictKind::kLeft, j, j.closed->at);
  candidate.live = false;
  candidate.wall_ns = std::min(candidate.wall_ns, MissedSince(s, j));
  if (!j.closed->in_attempt) candidate.attempt = nullptr;
}

// Sessions without a journal that others lost.
void EndsOfAbsent(CauseSearch& s) {
  for (const auto& [session, end] : s.ends) {
    if (s.roster.Find(session) != nullptr || end.witness == nullptr) continue;
    const SessionStory& witness = *end.witness;
    // What the witness was in the middle of at that moment.
    const Attempt* during = nullptr;
    for (const Attempt& attempt : witness.attempts) {
      const bool from = s.Wall(witness, attempt.came()) <= end.wall_ns;
      if (from && (!attempt.ended || s.Wall(witness, attempt.ended) >= end.wall_ns)) during = &attempt;
    }
    if (during == nullptr && FailedBecauseOf(s, witness, session, end)) during = &witness.attempts.back();
    // The attempt failed because of another session, where it names one; of several ends it may name one that followed the
    // first.
    const bool blamed =
        during == nullptr || during->culprits.empty() || during->code == Code::kPeerLost || Blames(*during, session);
    const bool failed = !LastAttemptDone(witness) && during == &witness.attempts.back() && blamed;
    // A session that died while the witness was paused had memory that the witness needs, also where that ran or ended later.
    const bool half =
        IsHalfWay(witness.findings.state.lifecycle) || (!end.in_order && WasPausedAt(s.roster, witness, end.wall_ns));
    constexpr std::int32_t kBySignal = 128;
    const bool by_signal = witness.closed && witness.closed->event.exit_code > kBySignal;
    if (end.in_order && !failed && !half && !IsDead(witness) && !by_signal) continue;
    if (end.in_order && failed && OneDiedIn(s, witness, *during)) continue;  // it left because of that
    // The witness ended by a signal, as all of them: sessions that ended in order just before it are no cause either.
    if (end.in_order && by_signal && EndedTogether(s, witness, end.wall_ns)) continue;
    CandidateCause& candidate = s.AddWitnessed(failed || half ? Weight::kCause : Weight::kEnd,
                                               end.in_order     ? VerdictKind::kLeft
                                               : failed || half ? VerdictKind::kDied
                                                                : VerdictKind::kEnded,
                                               session, witness, {end.witness_seq});
    candidate.wall_ns = end.wall_ns;
    candidate.attempt = failed ? during : nullptr;
    candidate.witness.alone = true;
    if (failed && during->decided && during->decided->culprit == session) candidate.record.message = during->decided->message;
  }
}

}  // namespace amem
