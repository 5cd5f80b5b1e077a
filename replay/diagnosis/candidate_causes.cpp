#include "replay/diagnosis/candidate_causes.h"

#include <algorithm>

#include "replay/diagnosis/diagnosis.h"

namespace amem {
namespace {

// Shorter than this, nobody calls it waiting.
constexpr std::uint64_t kPatience_ns = 1'000'000'000;
// A process that was silent for so long before it was seen to be dead had been stuck; it did not die at its work.
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
  Search(const Roster& cast, const References& references) : cast_(cast), references_(references) {}

  std::vector<CandidateCause> Run() {
    for (const JournalHistory& j : cast_.journals()) {
      FailedStep(j);
      FailedVote(j);
      FailedArrival(j);
      Broken(j);
      Death(j);
      Undone(j);
    }
    Waiting();
    Disagreements();
    return std::move(suspects_);
  }

 private:
  CandidateCause& Add(CandidateCause::Weight weight, const char* kind, const JournalHistory& j, std::uint64_t time_ns) {
    CandidateCause suspect;
    suspect.weight = weight;
    suspect.kind = kind;
    suspect.session = j.session();
    suspect.journal = &j;
    suspect.wall_ns = cast_.Wall(j, time_ns);
    suspect.live = Live(j);
    if (!j.attempts.empty()) suspect.attempt = &j.attempts.back();
    return suspects_.emplace_back(std::move(suspect));
  }

  void FailedStep(const JournalHistory& j) {
    if (Done(j) || !j.attempts.back().failed_step) return;
    const Attempt::Failure& failure = *j.attempts.back().failed_step;
    const bool unknown = references_.unknown_to_owner.contains({j.session(), failure.step.allocation});
    const char* kind = unknown                              ? verdict::kReferences
                       : failure.code == Code::kOutOfMemory ? verdict::kOutOfMemory
                                                            : verdict::kStepFailed;
    Add(BlamesAnother(failure.code) ? CandidateCause::Weight::kConsequence : CandidateCause::Weight::kCause, kind, j,
        failure.at.time_ns);
  }

  // A vote that failed because somebody did not cast his in time.
  void FailedVote(const JournalHistory& j) {
    if (Done(j) || !j.attempts.back().decided) return;
    const Attempt::Decision& decision = *j.attempts.back().decided;
    const JournalHistory* culprit = cast_.Find(decision.culprit);
    if (!decision.culprit) return;
    if (decision.culprit == j.session()) return OwnVote(j, decision);
    if (culprit != nullptr && Open(*culprit) && Dead(*culprit) && !culprit->attempts.back().failed_step) return;  // Death
    if (culprit != nullptr && !culprit->attempts.empty() && culprit->attempts.back().failed_step) return;  // its own step
    CandidateCause suspect;
    suspect.weight = CandidateCause::Weight::kAbsence;
    suspect.kind = verdict::kStalled;
    suspect.session = decision.culprit;
    suspect.journal = culprit;
    suspect.attempt = culprit != nullptr && !culprit->attempts.empty() ? &culprit->attempts.back() : &j.attempts.back();
    suspect.witness = &j;
    suspect.witness_seq = decision.at.seq;
    suspect.wall_ns = cast_.Wall(j, decision.at.time_ns);
    suspect.text = decision.message;
    suspects_.push_back(std::move(suspect));
  }

  // Its own vote was a no, and no step is to blame: it could not get what its steps need, from a peer as a rule.
  void OwnVote(const JournalHistory& j, const Attempt::Decision& decision) {
    if (j.attempts.back().failed_step || !j.findings.state.broken.empty()) return;
    const auto unknown = std::ranges::find_if(references_.unknown_to_owner,
                                              [&](const auto& import) { return std::get<0>(import) == j.session(); });
    const bool owner_denies = decision.phase == PhaseKind::kResumeImport && unknown != references_.unknown_to_owner.end();
    CandidateCause& suspect = Add(owner_denies ? CandidateCause::Weight::kCause : CandidateCause::Weight::kConsequence,
                                  owner_denies ? verdict::kReferences : verdict::kStepFailed, j, decision.at.time_ns);
    suspect.text = decision.message;
    if (owner_denies) suspect.allocation = std::get<1>(*unknown);
  }

  void FailedArrival(const JournalHistory& j) {
    if (Done(j) || j.attempts.back().begun || j.attempts.back().end != Attempt::End::kFailed) return;
    const Attempt& attempt = j.attempts.back();
    const std::uint64_t until = cast_.Wall(j, attempt.ended.time_ns);
    Absent(j, attempt, until, attempt.failure, attempt.ended.seq);
  }

  // Who waited for whom, until `until`: those of its set that had not come for the same.
  void Absent(const JournalHistory& j, const Attempt& attempt, std::uint64_t until, const std::string& text,
              SequenceNumber seq) {
    const std::uint64_t from = cast_.Wall(j, attempt.arrived ? attempt.arrived.time_ns : attempt.ended.time_ns);
    std::vector<SessionId> missing;
    for (const SessionId session : cast_.Set(j.session(), from)) {
      const JournalHistory* other = cast_.Find(session);
      if (session != j.session() && other != nullptr && !CameFor(*other, attempt.kind, from, until)) missing.push_back(session);
    }
    // Of those who are not here it is not known whether they came; when everybody else did, it was they.
    if (missing.empty()) {
      for (const SessionId session : cast_.Set(j.session(), from)) {
        if (cast_.Find(session) == nullptr) missing.push_back(session);
      }
    }
    const SessionId blamed = missing.empty() ? j.session() : missing.front();
    CandidateCause suspect;
    suspect.weight = CandidateCause::Weight::kAbsence;
    suspect.kind = missing.empty() ? verdict::kRefused : verdict::kNeverArrived;
    suspect.session = blamed;
    suspect.journal = cast_.Find(blamed);
    suspect.attempt = &attempt;
    suspect.witness = &j;
    suspect.witness_seq = seq;
    suspect.wall_ns = from;
    suspect.missing = std::move(missing);
    suspect.waited_ns = until > from ? until - from : 0;
    suspect.live = attempt.end == Attempt::End::kOpen && Live(j);
    suspect.text = text;
    suspects_.push_back(std::move(suspect));
  }

  // It waited for that kind of cycle, or was in one, at some time between `from` and `until`.
  [[nodiscard]] bool CameFor(const JournalHistory& j, CycleKind kind, std::uint64_t from, std::uint64_t until) const {
    return std::ranges::any_of(j.attempts, [&](const Attempt& a) {
      const Moment came = a.arrived ? a.arrived : a.begun;
      if (a.kind != kind || !came) return false;
      const std::uint64_t end = a.ended ? cast_.Wall(j, a.ended.time_ns) : UINT64_MAX;
      return cast_.Wall(j, came.time_ns) <= until && end >= from;
    });
  }

  void Broken(const JournalHistory& j) {
    const bool marked = j.findings.info.status == SessionStatus::kBroken;
    if (!marked && j.findings.state.broken.empty()) return;
    CandidateCause& suspect =
        Add(CandidateCause::Weight::kCause, verdict::kBroken, j, j.broken_at ? j.broken_at->time_ns : j.last.time_ns);
    suspect.text = j.findings.info.broken_reason.empty() ? j.findings.state.broken : j.findings.info.broken_reason;
  }

  // The first of the others to see that this session is gone.
  [[nodiscard]] std::uint64_t SeenDead(const JournalHistory& dead, const JournalHistory** by, SequenceNumber* seq) const {
    std::uint64_t first = 0;
    for (const JournalHistory& other : cast_.journals()) {
      for (std::size_t i = 0; i < other.lost.size(); ++i) {
        const std::uint64_t wall = cast_.Wall(other, other.lost_at[i].time_ns);
        if (other.lost[i].peer != dead.session() || (first != 0 && wall >= first)) continue;
        first = wall;
        *by = &other;
        *seq = other.lost_at[i].seq;
      }
    }
    return first;
  }

  void Death(const JournalHistory& j) {
    if (!Dead(j)) return;
    const bool in_cycle = Open(j), half = HalfWay(j.findings.state.lifecycle);
    const JournalHistory* by = nullptr;
    SequenceNumber seq;
    const std::uint64_t seen = SeenDead(j, &by, &seq);
    const std::uint64_t last = cast_.Wall(j, j.last.time_ns);
    // Without anybody who saw it go it may have been ended with all the others.
    const bool others_lived = std::ranges::any_of(cast_.journals(), [&](const JournalHistory& other) {
      return &other != &j && (!Dead(other) || cast_.KnownUntil(other) > last + kPatience_ns);
    });
    const bool alone = cast_.journals().size() == 1;
    const bool first = seen != 0 || others_lived || alone;
    const bool was_stuck = in_cycle && seen > last + kStuck_ns;
    const bool matters = (in_cycle || half) && first && !was_stuck;
    CandidateCause& suspect = Add(matters ? CandidateCause::Weight::kCause : CandidateCause::Weight::kEnd,
                                  in_cycle || half ? verdict::kDied : verdict::kEnded, j, j.last.time_ns);
    suspect.live = false;
    suspect.witness = by;
    suspect.witness_seq = seq;
    if (seen > last) suspect.wall_ns = seen;
    if (!in_cycle) suspect.attempt = nullptr;
  }

  void Undone(const JournalHistory& j) {
    if (j.attempts.empty() || j.attempts.back().end != Attempt::End::kFailed || j.attempts.back().undone) return;
    Add(CandidateCause::Weight::kConsequence, verdict::kHalfDone, j, j.attempts.back().ended.time_ns).text =
        j.attempts.back().failure;
  }

  // Attempts that are open: somebody waits, and somebody is waited for.
  void Waiting() {
    std::uint64_t now = 0;
    for (const JournalHistory& j : cast_.journals()) now = std::max(now, cast_.KnownUntil(j));
    for (const JournalHistory& j : cast_.journals()) {
      if (!Open(j)) continue;
      const Attempt& attempt = j.attempts.back();
      const Progress progress = ProgressOf(j);
      const std::uint64_t since = cast_.Wall(j, progress.since.time_ns);
      if (Live(j) && now - since < kPatience_ns) continue;  // under way
      if (!attempt.begun) {
        Absent(j, attempt, now, "", attempt.arrived.seq);
      } else if (!progress.did_its_part) {
        CandidateCause& suspect = Add(CandidateCause::Weight::kAbsence, verdict::kStalled, j, progress.since.time_ns);
        suspect.waited_ns = now - since;
      } else {
        AbsentVoters(j, attempt, now, progress);
      }
    }
  }

  // It waits for votes, and all whose journals are here have done their part: it is one of those who are not here.
  void AbsentVoters(const JournalHistory& j, const Attempt& attempt, std::uint64_t now, const Progress& progress) {
    for (const SessionId member : attempt.members) {
      if (cast_.Find(member) != nullptr) continue;
      CandidateCause suspect;
      suspect.weight = CandidateCause::Weight::kConsequence;
      suspect.kind = verdict::kStalled;
      suspect.session = member;
      suspect.attempt = &attempt;
      suspect.witness = &j;
      suspect.witness_seq = progress.since.seq;
      suspect.wall_ns = cast_.Wall(j, progress.since.time_ns);
      suspect.waited_ns = now - suspect.wall_ns;
      suspect.live = Live(j);
      suspects_.push_back(std::move(suspect));
    }
  }

  void Disagreements() {
    const auto add = [&](const Violation& violation, const char* kind) {
      const JournalHistory* j = cast_.Find(violation.session);
      if (j == nullptr) return;
      CandidateCause& suspect = Add(CandidateCause::Weight::kDisagreement, kind, *j, 0);
      suspect.witness_seq = violation.seq;
      suspect.text = violation.text;
      suspect.attempt = nullptr;
      suspect.live = false;
    };
    for (const Violation& v : references_.impossible) add(v, verdict::kImpossible);
    for (const Violation& v : references_.disagreements) add(v, verdict::kReferences);
  }

  const Roster& cast_;
  const References& references_;
  std::vector<CandidateCause> suspects_;
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

std::vector<CandidateCause> FindSuspects(const Roster& cast, const References& references) {
  return Search(cast, references).Run();
}

const CandidateCause* FirstDivergence(const std::vector<CandidateCause>& suspects) {
  const auto first =
      std::ranges::min_element(suspects, {}, [](const CandidateCause& s) { return std::pair(s.weight, s.wall_ns); });
  return first == suspects.end() ? nullptr : &*first;
}

}  // namespace amem
