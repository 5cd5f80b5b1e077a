// Waits that a session's own journal tells of: others ask whether it comes, or it has recorded nothing for long.
#include <algorithm>

#include "replay/diagnosis/cause_search.h"

namespace amem {
namespace {
using Weight = CandidateCause::Weight;
}

bool GaveUpWaiting(const Attempt& attempt) {
  return !attempt.begun && attempt.arrived && attempt.end == Attempt::End::kFailed && attempt.code == Code::kTimeout;
}

bool IsSilent(CauseSearch& s, const SessionStory& j) {
  const bool stopped = s.SeenState(j.session()) == "stopped";
  return !IsLive(j) || stopped || s.Since(s.Wall(j, s.ProgressOfSession(j).since)) >= kPatience_ns;
}

// Others had come to it before this session did, and had given up by then. Only its own journal tells of it.
void TooLate(CauseSearch& s, const SessionStory& j, const Attempt& attempt) {
  const std::uint64_t noted = s.Wall(j, attempt.asked_before), from = noted - std::min(noted, kAskedFor_ns);
  CandidateCause& candidate = s.AddWitnessed(Weight::kAbsence, VerdictKind::kNeverArrived, j.session(), j, attempt.arrived);
  candidate.attempt = &attempt;
  candidate.wall_ns = candidate.wait.established_ns = from;
  candidate.wait.waited_ns = s.Wall(j, attempt.arrived) - std::min(s.Wall(j, attempt.arrived), from);
  candidate.record.code = Code::kTimeout;
}

CandidateCause& Stalled(CauseSearch& s, const SessionStory& j, const Moment& since) {
  CandidateCause& candidate = s.Add(Weight::kAbsence, VerdictKind::kStalled, j, since);
  candidate.wait.waited_ns = s.Since(candidate.wall_ns);
  const bool before_the_end = s.torn_down && s.first_end >= candidate.wall_ns + kPatience_ns;
  if (before_the_end) candidate.wait.established_ns = candidate.wall_ns + kPatience_ns;
  return candidate;
}

// Others asked this session for so long whether it comes that it was recorded, and it never came. Where one of their journals
// is given, that tells of it.
void Awaited(CauseSearch& s, const SessionStory& j) {
  if (!j.awaited) return;
  const Attempt& attempt = *j.awaited;
  if (std::ranges::any_of(attempt.asking, [&](SessionId session) { return s.roster.Find(session) != nullptr; })) return;
  const std::uint64_t noted = s.Wall(j, attempt.arrived), from = noted - std::min(noted, kAskedFor_ns);
  if (IsLive(j) && s.Since(from) < kPatience_ns) return;                       // it may come yet
  const bool gave_up = SameTry(j.Last(), attempt) && GaveUpWaiting(j.Last());  // before them
  CandidateCause& candidate = s.AddWitnessed(gave_up ? Weight::kConsequence : Weight::kAbsence, VerdictKind::kNeverArrived,
                                             j.session(), j, attempt.arrived);
  candidate.attempt = &attempt;
  candidate.wall_ns = from;
  const std::uint64_t until = std::min(s.first_end, s.job_end);
  if (until >= from + kPatience_ns) candidate.wait.established_ns = from + kPatience_ns;
  candidate.wait.waited_ns = until - std::min(until, from);
  candidate.live = IsLive(j);
  candidate.record.code = Code::kTimeout;
}

// Pauses and resumes of pools that are open and silent.
void StalledPools(CauseSearch& s, const SessionStory& j) {
  if (IsDead(j) || j.closed) return;  // see Death
  for (const Attempt* attempt : j.LastOfPools()) {
    if (!attempt->open()) continue;
    const Moment since = ProgressOf(j, attempt->tag).since;
    if (s.SeenState(j.session()) != "stopped" && s.Since(s.Wall(j, since)) < kPatience_ns) continue;
    Stalled(s, j, since).attempt = attempt;
  }
}

}  // namespace amem
