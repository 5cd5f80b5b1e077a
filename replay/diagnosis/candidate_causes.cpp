#include "replay/diagnosis/candidate_causes.h"

#include <algorithm>

#include "replay/diagnosis/progress.h"

namespace amem {
namespace {

// A session that has been silent for less time than this is at work, not waiting.
constexpr std::uint64_t kPatience_ns = 1'000'000'000;
// A process that was silent for this long before its death was noticed had been stuck: others ended it, and it is not the
// cause.
constexpr std::uint64_t kStuck_ns = 5'000'000'000;

bool Open(const JournalHistory& j) { return !j.attempts.empty() && j.attempts.back().end == Attempt::End::kOpen; }
bool Done(const JournalHistory& j) { return j.attempts.empty() || j.attempts.back().end == Attempt::End::kDone; }
bool Dead(const JournalHistory& j) { return j.findings.info.status == SessionStatus::kCrashed; }
bool Live(const JournalHistory& j) { return j.findings.info.status == SessionStatus::kLive; }

bool HalfWay(Lifecycle lifecycle) {
  return lifecycle == Lifecycle::kPausing || lifecycle == Lifecycle::kPaused || lifecycle == Lifecycle::kResuming;
}

bool BlamesAnother(Code code) { return code == Code::kPeerLost || code == Code::kTimeout; }

class Search {
 public:
  Search(const Roster& roster, const References& references) : roster_(roster), references_(references) {}

  std::vector<CandidateCause> Run() {
    for (const JournalHistory& j : roster_.journals()) {
      FailedStep(j);
      FailedVote(j);
      FailedArrival(j);
      Broken(j);
      Death(j);
      Undone(j);
    }
    Waiting();
    Disagreements();
    return std::move(candidates_);
  }

 private:
  CandidateCause& Add(CandidateCause::Weight weight, VerdictKind kind, const JournalHistory& j, std::uint64_t time_ns) {
    return candidates_.emplace_back(CandidateCause{.weight = weight,
                                                   .kind = kind,
                                                   .session = j.session(),
                                                   .wall_ns = roster_.Wall(j, time_ns),
                                                   .journal = &j,
                                                   .attempt = j.attempts.empty() ? nullptr : &j.attempts.back(),
                                                   .live = Live(j)});
  }

  // A session that `witness` waited for, as its event `seq` shows.
  CandidateCause& AddAbsence(CandidateCause::Weight weight, VerdictKind kind, SessionId session, const JournalHistory& witness,
                             SequenceNumber seq) {
    return candidates_.emplace_back(CandidateCause{.weight = weight,
                                                   .kind = kind,
                                                   .session = session,
                                                   .journal = roster_.Find(session),
                                                   .attempt = &witness.attempts.back(),
                                                   .witness = &witness,
                                                   .witness_seq = seq});
  }

  void FailedStep(const JournalHistory& j) {
    if (Done(j) || !j.attempts.back().failed_step) return;
    const Attempt::Failure& failure = *j.attempts.back().failed_step;
    const bool unknown = references_.unknown_to_owner.contains({j.session(), failure.step.allocation});
    const VerdictKind kind = unknown                              ? VerdictKind::kReferences
                             : failure.code == Code::kOutOfMemory ? VerdictKind::kOutOfMemory
                                                                  : VerdictKind::kStepFailed;
    Add(BlamesAnother(failure.code) ? CandidateCause::Weight::kConsequence : CandidateCause::Weight::kCause, kind, j,
        failure.at.time_ns);
  }

  // A vote that failed because a member did not vote in time.
  void FailedVote(const JournalHistory& j) {
    if (Done(j) || !j.attempts.back().decided) return;
    const Attempt::Decision& decision = *j.attempts.back().decided;
    const JournalHistory* culprit = roster_.Find(decision.culprit);
    if (!decision.culprit) return;
    if (decision.culprit == j.session()) return OwnVote(j, decision);
    if (culprit != nullptr && Open(*culprit) && Dead(*culprit) && !culprit->attempts.back().failed_step) return;  // see Death
    if (culprit != nullptr && !culprit->attempts.empty() && culprit->attempts.back().failed_step) return;  // see FailedStep
    CandidateCause& candidate =
        AddAbsence(CandidateCause::Weight::kAbsence, VerdictKind::kStalled, decision.culprit, j, decision.at.seq);
    if (culprit != nullptr && !culprit->attempts.empty()) candidate.attempt = &culprit->attempts.back();
    candidate.wall_ns = roster_.Wall(j, decision.at.time_ns);
    candidate.message = decision.message;
  }

  // Its own vote was no, and no step of its own failed: as a rule a peer did not give what its steps need.
  void OwnVote(const JournalHistory& j, const Attempt::Decision& decision) {
    if (j.attempts.back().failed_step || !j.findings.state.broken.empty()) return;
    const auto unknown = std::ranges::find_if(references_.unknown_to_owner,
                                              [&](const auto& import) { return std::get<0>(import) == j.session(); });
    const bool owner_denies = decision.phase == PhaseKind::kResumeImport && unknown != references_.unknown_to_owner.end();
    CandidateCause& candidate = Add(owner_denies ? CandidateCause::Weight::kCause : CandidateCause::Weight::kConsequence,
                                    owner_denies ? VerdictKind::kReferences : VerdictKind::kStepFailed, j, decision.at.time_ns);
    candidate.message = decision.message;
    if (owner_denies) candidate.allocation = std::get<1>(*unknown);
  }

  void FailedArrival(const JournalHistory& j) {
    if (Done(j) || j.attempts.back().begun || j.attempts.back().end != Attempt::End::kFailed) return;
    const Attempt& attempt = j.attempts.back();
    const std::uint64_t until = roster_.Wall(j, attempt.ended.time_ns);
    Absent(j, attempt, until, attempt.failure, attempt.ended.seq);
  }

  // `j` waited until `until` for those that share memory with it and had not joined the same kind of cycle.
  void Absent(const JournalHistory& j, const Attempt& attempt, std::uint64_t until, const std::string& message,
              SequenceNumber seq) {
    const std::uint64_t from = roster_.Wall(j, attempt.arrived ? attempt.arrived.time_ns : attempt.ended.time_ns);
    std::vector<SessionId> missing;
    for (const SessionId session : roster_.SharingWith(j.session(), from)) {
      const JournalHistory* other = roster_.Find(session);
      if (session != j.session() && other != nullptr && !Joined(*other, attempt.kind, from, until)) missing.push_back(session);
    }
    // Whether a session without a journal joined is not known; it is blamed when all others did.
    if (missing.empty()) {
      for (const SessionId session : roster_.SharingWith(j.session(), from)) {
        if (roster_.Find(session) == nullptr) missing.push_back(session);
      }
    }
    CandidateCause& candidate =
        AddAbsence(CandidateCause::Weight::kAbsence, missing.empty() ? VerdictKind::kRefused : VerdictKind::kNeverArrived,
                   missing.empty() ? j.session() : missing.front(), j, seq);
    candidate.wall_ns = from;
    candidate.missing = std::move(missing);
    candidate.waited_ns = until > from ? until - from : 0;
    candidate.live = attempt.end == Attempt::End::kOpen && Live(j);
    candidate.message = message;
  }

  // The session waited for a cycle of that kind, or was in one, at some time between `from` and `until`.
  [[nodiscard]] bool Joined(const JournalHistory& j, CycleKind kind, std::uint64_t from, std::uint64_t until) const {
    return std::ranges::any_of(j.attempts, [&](const Attempt& a) {
      const Moment came = a.arrived ? a.arrived : a.begun;
      if (a.kind != kind || !came) return false;
      const std::uint64_t end = a.ended ? roster_.Wall(j, a.ended.time_ns) : UINT64_MAX;
      return roster_.Wall(j, came.time_ns) <= until && end >= from;
    });
  }

  void Broken(const JournalHistory& j) {
    const bool marked = j.findings.info.status == SessionStatus::kBroken;
    if (!marked && j.findings.state.broken.empty()) return;
    CandidateCause& candidate =
        Add(CandidateCause::Weight::kCause, VerdictKind::kBroken, j, j.broken_at ? j.broken_at->time_ns : j.last.time_ns);
    candidate.message = j.findings.info.broken_reason.empty() ? j.findings.state.broken : j.findings.info.broken_reason;
  }

  struct Notice {  // an end, as another session recorded it
    std::uint64_t wall_ns = 0;
    const JournalHistory* witness = nullptr;  // null: no other session noticed it
    SequenceNumber seq;
  };
  [[nodiscard]] Notice FirstNotice(const JournalHistory& dead) const {
    Notice first;
    for (const JournalHistory& other : roster_.journals()) {
      for (std::size_t i = 0; i < other.lost.size(); ++i) {
        const std::uint64_t wall = roster_.Wall(other, other.lost_at[i].time_ns);
        if (other.lost[i].peer != dead.session() || (first.witness != nullptr && wall >= first.wall_ns)) continue;
        first = {wall, &other, other.lost_at[i].seq};
      }
    }
    return first;
  }

  void Death(const JournalHistory& j) {
    if (!Dead(j)) return;
    const bool in_cycle = Open(j), half = HalfWay(j.findings.state.lifecycle);
    const Notice notice = FirstNotice(j);
    const std::uint64_t last = roster_.Wall(j, j.last.time_ns);
    // A death that no other session noticed may have been the end of the whole job.
    const bool others_lived = std::ranges::any_of(roster_.journals(), [&](const JournalHistory& other) {
      return &other != &j && (!Dead(other) || roster_.KnownUntil(other) > last + kPatience_ns);
    });
    const bool alone = roster_.journals().size() == 1;
    const bool first = notice.witness != nullptr || others_lived || alone;
    const bool was_stuck = in_cycle && notice.wall_ns > last + kStuck_ns;
    const bool matters = (in_cycle || half) && first && !was_stuck;
    CandidateCause& candidate = Add(matters ? CandidateCause::Weight::kCause : CandidateCause::Weight::kEnd,
                                    in_cycle || half ? VerdictKind::kDied : VerdictKind::kEnded, j, j.last.time_ns);
    candidate.live = false;
    candidate.witness = notice.witness;
    candidate.witness_seq = notice.seq;
    candidate.wall_ns = std::max(last, notice.wall_ns);
    if (!in_cycle) candidate.attempt = nullptr;
  }

  void Undone(const JournalHistory& j) {
    if (j.attempts.empty() || j.attempts.back().end != Attempt::End::kFailed || j.attempts.back().undone) return;
    Add(CandidateCause::Weight::kConsequence, VerdictKind::kHalfDone, j, j.attempts.back().ended.time_ns).message =
        j.attempts.back().failure;
  }

  // Attempts that are open: some sessions wait, for others to join or to finish their parts.
  void Waiting() {
    std::uint64_t now = 0;
    for (const JournalHistory& j : roster_.journals()) now = std::max(now, roster_.KnownUntil(j));
    for (const JournalHistory& j : roster_.journals()) {
      if (!Open(j)) continue;
      const Attempt& attempt = j.attempts.back();
      const Progress progress = ProgressOf(j);
      const std::uint64_t since = roster_.Wall(j, progress.since.time_ns);
      if (Live(j) && now - since < kPatience_ns) continue;  // under way
      if (!attempt.begun) {
        Absent(j, attempt, now, "", attempt.arrived.seq);
      } else if (!progress.did_its_part) {
        CandidateCause& candidate = Add(CandidateCause::Weight::kAbsence, VerdictKind::kStalled, j, progress.since.time_ns);
        candidate.waited_ns = now - since;
      } else {
        AbsentVoters(j, attempt, now, progress);
      }
    }
  }

  // It did its part and waits for votes. A member whose journal was not given may be the one that did not vote.
  void AbsentVoters(const JournalHistory& j, const Attempt& attempt, std::uint64_t now, const Progress& progress) {
    for (const SessionId member : attempt.members) {
      if (roster_.Find(member) != nullptr) continue;
      CandidateCause& candidate =
          AddAbsence(CandidateCause::Weight::kConsequence, VerdictKind::kStalled, member, j, progress.since.seq);
      candidate.wall_ns = roster_.Wall(j, progress.since.time_ns);
      candidate.waited_ns = now - candidate.wall_ns;
      candidate.live = Live(j);
    }
  }

  void Disagreements() {
    const auto add = [&](const Violation& violation, VerdictKind kind) {
      const JournalHistory* j = roster_.Find(violation.session);
      if (j == nullptr) return;
      CandidateCause& candidate = Add(CandidateCause::Weight::kDisagreement, kind, *j, 0);
      candidate.witness_seq = violation.seq;
      candidate.message = violation.text;
      candidate.attempt = nullptr;
      candidate.live = false;
    };
    for (const Violation& v : references_.impossible) add(v, VerdictKind::kImpossible);
    for (const Violation& v : references_.disagreements) add(v, VerdictKind::kReferences);
  }

  const Roster& roster_;
  const References& references_;
  std::vector<CandidateCause> candidates_;
};

}  // namespace

References CompareReferences(std::span<const JournalHistory> journals) {
  References references;
  std::vector<const JournalFindings*> findings;
  std::map<SessionId, const JournalFindings*> by_session;
  for (const JournalHistory& j : journals) {
    findings.push_back(&j.findings);
    by_session[j.session()] = &j.findings;
    references.impossible.insert(references.impossible.end(), j.findings.violations.begin(), j.findings.violations.end());
  }
  JobFindings job = VerifyJob(findings);
  references.compared = job.references;
  references.disagreements = std::move(job.violations);
  for (const JournalHistory& j : journals) {
    for (const auto& [id, import] : j.findings.imports) {
      const auto owner = by_session.find(import.remote.owner);
      if (owner == by_session.end() || import.dropped) continue;
      if (!owner->second->references.contains({import.remote.allocation, j.session(), id}))
        references.unknown_to_owner.emplace(j.session(), id);
    }
  }
  return references;
}

std::vector<CandidateCause> FindCandidateCauses(const Roster& roster, const References& references) {
  return Search(roster, references).Run();
}

const CandidateCause* FirstDivergence(const std::vector<CandidateCause>& candidates) {
  const auto first =
      std::ranges::min_element(candidates, {}, [](const CandidateCause& c) { return std::pair(c.weight, c.wall_ns); });
  return first == candidates.end() ? nullptr : &*first;
}

}  // namespace amem
