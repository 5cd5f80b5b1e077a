#include "replay/diagnosis/cause_search.h"

#include <algorithm>
#include <tuple>

namespace amem {

// A launcher that ends a job ends its processes within this time of each other.
constexpr std::uint64_t kTeardown_ns = 2'000'000'000;
// Roots of one kind that came to be within this time of each other are told together.
constexpr std::uint64_t kTogether_ns = 50'000'000;

static bool SameCycle(const CandidateCause& a, const CandidateCause& b) {
  if (a.attempt == nullptr || b.attempt == nullptr) return a.attempt == b.attempt;
  return a.attempt->kind == b.attempt->kind && a.attempt->cycle == b.attempt->cycle && a.attempt->tag == b.attempt->tag;
}

// Whether what happened to `b` is a root of its own beside `a`.
static bool SameRoot(const CandidateCause& a, const CandidateCause& b) {
  if (a.weight != b.weight || a.kind != b.kind || a.session == b.session || !SameCycle(a, b)) return false;
  switch (a.kind) {
    case VerdictKind::kNeverArrived:
    case VerdictKind::kBroken:
    case VerdictKind::kStalled:
      return true;
    case VerdictKind::kStepFailed:
    case VerdictKind::kOutOfMemory:
      return a.weight == CandidateCause::Weight::kCause &&
             (a.attempt == nullptr || !a.attempt->failed_step || !b.attempt->failed_step ||
              a.attempt->failed_step->phase == b.attempt->failed_step->phase);
    case VerdictKind::kDied:
      return a.weight == CandidateCause::Weight::kCause && b.wall_ns <= a.wall_ns + kTogether_ns;
    default:
      return false;
  }
}

bool LastAttemptDone(const SessionStory& j) { return j.Last().end == Attempt::End::kDone; }
bool IsDead(const SessionStory& j) { return j.findings.info.status == SessionStatus::kCrashed; }
bool IsLive(const SessionStory& j) { return j.findings.info.status == SessionStatus::kLive; }
bool IsUnsure(const SessionStory& j) {
  return j.findings.info.status == SessionStatus::kCopied || j.findings.info.status == SessionStatus::kUnknown;
}
bool IsHalfWay(Lifecycle lifecycle) {
  return lifecycle == Lifecycle::kPausing || lifecycle == Lifecycle::kPaused || lifecycle == Lifecycle::kResuming;
}
bool BlamesAnother(Code code) { return code == Code::kPeerLost || code == Code::kTimeout; }
bool WasPausedAt(const Roster& roster, const SessionStory& j, std::uint64_t wall_ns) {
  bool paused = !j.attempts.empty() && j.attempts.front().kind == CycleKind::kResume;
  for (const Attempt& attempt : j.attempts)
    if (attempt.end == Attempt::End::kDone && roster.Wall(j, attempt.ended.time_ns) <= wall_ns)
      paused = attempt.kind == CycleKind::kPause;
  return paused;
}
bool SameTry(const Attempt& a, const Attempt& b) { return a.kind == b.kind && a.cycle == b.cycle; }
bool IsEnd(VerdictKind kind) { return kind == VerdictKind::kDied || kind == VerdictKind::kEnded || kind == VerdictKind::kLeft; }

CauseSearch::CauseSearch(const Roster& job, const JobFindings& found) : roster(job), references(found) { FindEnds(); }

std::vector<CandidateCause> CauseSearch::Run() {
  for (const SessionStory& j : roster.journals()) {
    for (SearchOfOne* const search : {FailedStep, FailedVote, VoteOfAnother, FailedArrival, LongArrival, Awaited, Waiting,
                                      StalledPools, Broken, Death, Leaving, RefusedLaunch, Undone, FailedPools})
      search(*this, j);
  }
  Ballots(*this);
  EndsOfAbsent(*this);
  Disagreements(*this);
  Unmade(*this);
  DemoteEnds();
  Order();
  return std::move(candidates);
}

CandidateCause& CauseSearch::Add(Weight weight, VerdictKind kind, const SessionStory& j, const Moment& at) {
  return candidates.emplace_back(CandidateCause{.weight = weight,
                                                .kind = kind,
                                                .session = j.session(),
                                                .attempt = LastAttempt(j),
                                                .wall_ns = Wall(j, at),
                                                .live = IsLive(j)});
}

CandidateCause& CauseSearch::AddWitnessed(Weight weight, VerdictKind kind, SessionId session, const SessionStory& witness,
                                          const Moment& at) {
  return candidates.emplace_back(CandidateCause{.weight = weight,
                                                .kind = kind,
                                                .session = session,
                                                .attempt = LastAttempt(witness),
                                                .wall_ns = Wall(witness, at),
                                                .witness = {.journal = &witness},
                                                .record = {.seq = at.seq}});
}

// Whether all processes are known to have ended. Where one journal alone was given, also those that it shared memory with.
bool CauseSearch::AllEnded() const {
  if (roster.journals().size() != 1) return true;
  const SessionStory& j = roster.journals().front();
  const std::set<SessionId> sharing = roster.SharingWith(j.session(), Wall(j, j.last));
  std::set<SessionId> ended;
  for (const auto& [session, end] : ends) ended.insert(session);
  return ended.size() > 1 && std::ranges::includes(ended, sharing);
}

// A session gave up its arrival because another had ended, before it noted whose connection was lost. Journals of older builds
// do not name that other: then it is the one that is dead and did not give up itself.
void CauseSearch::WitnessAtArrival(const SessionStory& j) {
  const auto gave_up = [](const SessionStory& one) {
    return !one.Last().begun && one.Last().end == Attempt::End::kFailed && one.Last().code == Code::kPeerLost;
  };
  if (!gave_up(j)) return;
  const Moment& at = j.Last().ended;
  const std::uint64_t wall = Wall(j, at);
  for (const CycleMember& culprit : j.Last().culprits) {
    const SessionStory* other = roster.Find(culprit.session);
    if (other != nullptr && !IsDead(*other)) continue;
    SessionEnd& end = ends[culprit.session];
    if (!end.witnessed || end.wall_ns > wall)
      end = {.wall_ns = wall, .in_order = end.in_order, .witnessed = true, .witness = &j, .witness_seq = at.seq};
  }
  if (!j.Last().culprits.empty()) return;
  for (const SessionId session : roster.SharingWith(j.session(), wall)) {
    const SessionStory* other = roster.Find(session);
    if (other == nullptr || !IsDead(*other) || gave_up(*other) || Wall(*other, other->last) > wall) continue;
    SessionEnd& end = ends[session];  // it is dead, so it has one
    if (!end.witnessed) end = {.wall_ns = wall, .witnessed = true, .witness = &j, .witness_seq = at.seq};
  }
}

// The first that noticed it is the witness.
void CauseSearch::NoteEnd(SessionId session, bool in_order, const SessionStory& witness, const Moment& at) {
  const std::uint64_t wall = Wall(witness, at);
  SessionEnd& end = ends[session];
  if (end.witnessed && end.wall_ns <= wall) return;
  end = {.wall_ns = wall, .in_order = in_order, .witnessed = true, .witness = &witness, .witness_seq = at.seq};
}

// What a session recorded of other processes: peers that it lost, seats whose members had ended, and sights.
void CauseSearch::NoteEndsOfOthers(const SessionStory& j) {
  for (const auto& [lost, at] : j.lost) NoteEnd(lost.peer, lost.reason != kPeerDied, j, at);
  for (const Dated<BallotShown>& shown : j.Last().ballots) {
    for (const SeatShown& seat : shown.event.seats)
      if (!seat.end.empty()) NoteEnd(seat.session, seat.end != kPeerDied, j, shown.at);
  }
  for (const auto& [seen, at] : j.seen) {
    if (seen.state.empty() || seen.state == "unknown") continue;
    const bool ended = seen.state == "zombie" || seen.state == "gone";
    LastSight& sight = (ended ? end_sights_ : sights_)[seen.session];
    const std::uint64_t wall = Wall(j, at);
    if (sight.seen == nullptr || wall >= sight.wall_ns) sight = {&seen, wall};
  }
}

// A death that nobody witnessed happened at some time after the last event. Those that were connected with the process did not
// notice it while they lived, so it is dated by the end of the job, and no such death comes before a witnessed one.
void CauseSearch::NoteOwnEnd(const SessionStory& j) {
  if (j.closed) {
    ends[j.session()] = {.wall_ns = Wall(j, j.closed->at), .in_order = true, .witnessed = true};
  } else if (IsDead(j)) {
    SessionEnd& end = ends[j.session()];
    end.in_order = false;
    end.wall_ns = end.witnessed ? std::max(end.wall_ns, Wall(j, j.last)) : job_end;
  } else {
    ends.erase(j.session());  // a connection that was lost is not an end
  }
}

void CauseSearch::FindEnds() {
  bool live = false;
  std::uint64_t last_event = 0;
  for (const SessionStory& j : roster.journals()) {
    job_end = std::max(job_end, roster.KnownUntil(j));
    last_event = std::max(last_event, Wall(j, j.last));
    live = live || IsLive(j) || IsUnsure(j);
  }
  for (const SessionStory& j : roster.journals()) NoteEndsOfOthers(j);
  for (const SessionStory& j : roster.journals()) NoteOwnEnd(j);
  for (const SessionStory& j : roster.journals()) WitnessAtArrival(j);
  for (const auto& [session, end] : ends)
    if (end.witnessed) first_end = std::min(first_end, end.wall_ns);
  if (first_end == UINT64_MAX && !ends.empty()) first_end = job_end;
  torn_down = !live && first_end != UINT64_MAX && last_event <= first_end + kTeardown_ns && AllEnded();
}

std::string CauseSearch::SeenState(SessionId session) const {
  const SessionStory* j = roster.Find(session);
  if (j != nullptr && !j->process_now.empty()) return j->process_now;
  const LastSight* sight = FindIn(sights_, session);
  return sight == nullptr ? "" : sight->seen->state;
}

const Progress& CauseSearch::ProgressOfSession(const SessionStory& j) {
  const auto [at, fresh] = progress_.try_emplace(j.session());
  if (fresh) at->second = ProgressOf(j);
  return at->second;
}

// A process that ended after something else had gone wrong is not the cause: as a rule the launcher, or a person, ended it. The
// same holds where another process had ended before, unless this one ended in the middle of a pause or resume.
void CauseSearch::DemoteEnds() {
  std::uint64_t earliest = UINT64_MAX, first_noticed = UINT64_MAX;
  for (const CandidateCause& c : candidates) {
    if (IsEnd(c.kind)) {
      const SessionEnd* end = EndOf(c.session);
      if (end != nullptr && end->witnessed) first_noticed = std::min(first_noticed, c.wall_ns);
    } else if (c.kind == VerdictKind::kLaunchRefused) {
      continue;
    } else if (c.weight == Weight::kCause) {
      earliest = std::min(earliest, c.wall_ns);
    } else if (c.weight == Weight::kAbsence) {
      earliest = std::min(earliest, c.wait.established_ns);
    }
  }
  for (CandidateCause& c : candidates) {
    const bool end = IsEnd(c.kind);
    if (c.weight != Weight::kCause || (!end && c.kind != VerdictKind::kLaunchRefused)) continue;
    const bool after_another = end && c.attempt == nullptr && first_noticed < c.wall_ns;
    if (after_another || earliest < c.wall_ns) c.weight = Weight::kEnd;
  }
}

void CauseSearch::Order() {
  const auto key = [this](const CandidateCause& c) {
    const SessionEnd* end = IsEnd(c.kind) ? EndOf(c.session) : nullptr;
    return std::tuple(c.weight, c.wall_ns, end != nullptr && !end->witnessed, roster.names().RankOf(c.session), c.session);
  };
  std::ranges::stable_sort(candidates, {}, key);
  if (candidates.empty()) return;
  for (CandidateCause& c : candidates) {
    const bool end = IsEnd(c.kind);
    if (const LastSight* sight = FindIn(end ? end_sights_ : sights_, c.session)) {
      c.sight.seen = sight->seen;
      if (end) c.sight.exit_code = sight->seen->exit_code;
    }
    c.sight.state = SeenState(c.session);
  }
  CandidateCause& first = candidates.front();
  std::set<SessionId> named{first.session};
  named.insert(first.together.begin(), first.together.end());
  for (const CandidateCause& c : candidates) {
    if (!SameRoot(first, c)) continue;
    std::vector<SessionId> too{c.session};
    if (c.kind == VerdictKind::kNeverArrived) too.insert(too.end(), c.together.begin(), c.together.end());
    for (const SessionId session : too)
      if (named.insert(session).second) first.together.push_back(session);
  }
}

}  // namespace amem
