// Failures that a session records of itself: a step, its own vote, its journal, pools, launches.
#include <algorithm>

#include "replay/diagnosis/cause_search.h"

namespace amem {
namespace {

using Weight = CandidateCause::Weight;

// The session voted no, and none of its steps failed.
void OwnVote(CauseSearch& s, const SessionStory& j, const Attempt::Decision& decision) {
  const Attempt& attempt = j.Last();
  if (attempt.failed_step || !j.findings.state.broken.empty()) return;
  const Attempt::Decision& vote = attempt.failed_vote ? *attempt.failed_vote : decision;
  const Code code = vote.code;
  if (code == Code::kTimeout && !attempt.failed_vote && attempt.on_board) return;  // see Ballots
  if (code == Code::kTimeout && !attempt.failed_vote) {                            // it came too late itself
    CandidateCause& late = s.Add(Weight::kAbsence, VerdictKind::kStalled, j, decision.at);
    late.wait.established_ns = late.wall_ns;
    late.record.message = decision.message;
    return;
  }
  const auto unknown =
      std::ranges::find_if(s.references.unknown_to_owner, [&](const auto& import) { return import.first == j.session(); });
  const bool owner_denies = decision.phase == PhaseKind::kResumeImport && unknown != s.references.unknown_to_owner.end();
  // Without a recorded code it is, as a rule, a peer that did not provide what a step needs.
  const bool by_itself = owner_denies || (code != Code::kOk && !BlamesAnother(code));
  CandidateCause& candidate = s.Add(by_itself ? Weight::kCause : Weight::kConsequence,
                                    owner_denies ? VerdictKind::kReferences : KindOfCode(code), j, vote.at);
  candidate.record.code = code;
  candidate.record.driver_result = decision.driver_result;
  candidate.record.message = vote.message;
  if (owner_denies) candidate.detail = CandidateCause::UnknownReference{unknown->second};
}

// Whether the owner's driver failed to export what the step imports.
bool IsOfOwner(const SessionStory& j, const Attempt::Failure& failure) {
  const bool of_driver = failure.code == Code::kDriver || failure.code == Code::kOutOfMemory;
  return of_driver && failure.reported_by && failure.reported_by != j.session();
}
void OwnersFailure(CauseSearch& s, const SessionStory& j, const Attempt::Failure& failure) {
  const SessionStory* owner = s.roster.Find(failure.reported_by);
  if (owner != nullptr && RecordsOwnFailure(*owner)) return;
  CandidateCause& candidate = s.AddWitnessed(Weight::kCause, KindOfCode(failure.code), failure.reported_by, j, failure.at);
  candidate.witness.alone = true;
  candidate.record.message = failure.message;
  candidate.record.code = failure.code;
  candidate.record.driver_result = failure.driver_result;
}

}  // namespace

VerdictKind KindOfCode(Code code) {
  if (code == Code::kOutOfMemory) return VerdictKind::kOutOfMemory;
  return code == Code::kBroken ? VerdictKind::kBroken : VerdictKind::kStepFailed;
}

bool RecordsOwnFailure(const SessionStory& culprit) {
  if (culprit.attempts.empty()) return false;
  const Attempt& attempt = culprit.Last();
  const bool own_vote = !culprit.records_votes && attempt.decided && attempt.decided->culprit == culprit.session() &&
                        attempt.decided->code != Code::kOk && !BlamesAnother(attempt.decided->code);
  const auto forward = [&](const auto& failure) {  // what fails in an undo is not why there is one
    return failure && (!attempt.decided || failure->at.seq < attempt.decided->at.seq);
  };
  return forward(attempt.failed_step) || forward(attempt.failed_vote) || own_vote || !culprit.findings.state.broken.empty();
}

void FailedStep(CauseSearch& s, const SessionStory& j) {
  if (LastAttemptDone(j) || !j.Last().failed_step) return;
  const Attempt::Failure& failure = *j.Last().failed_step;
  const bool unknown = s.references.unknown_to_owner.contains({j.session(), failure.step.allocation});
  const std::optional<Attempt::Decision>& decided = j.Last().decided;
  const bool in_undo = decided && decided->at.seq < failure.at.seq;
  const bool by_owner = IsOfOwner(j, failure) && !unknown;
  s.Add(BlamesAnother(failure.code) || in_undo || by_owner ? Weight::kConsequence : Weight::kCause,
        unknown ? VerdictKind::kReferences : KindOfCode(failure.code), j, failure.at);
  if (by_owner && !in_undo) OwnersFailure(s, j, failure);
  // The owner of what the step imports did not answer in time.
  if (failure.code != Code::kTimeout || !failure.remote || s.EndOf(failure.remote->owner) != nullptr) return;
  const SessionStory* owner = s.roster.Find(failure.remote->owner);
  if (owner != nullptr && (owner->attempts.empty() || owner->Last().failed_step)) return;
  CandidateCause& candidate = s.AddWitnessed(Weight::kAbsence, VerdictKind::kStalled, failure.remote->owner, j, failure.at);
  if (owner != nullptr) candidate.attempt = &owner->attempts.back();
  candidate.wait.established_ns = candidate.wall_ns;
  candidate.record.message = failure.message;
  candidate.live = owner != nullptr && IsLive(*owner);
}

// A vote that failed by this session's own vote.
void FailedVote(CauseSearch& s, const SessionStory& j) {
  if (LastAttemptDone(j)) return;
  const auto &decided = j.Last().decided, &vote = j.Last().failed_vote;
  if (decided && decided->culprit) {
    if (decided->culprit == j.session()) OwnVote(s, j, *decided);  // of another: see Ballots, and VoteOfAnother
  } else if (vote && !j.Last().failed_step) {                      // it was told nothing of the outcome
    CandidateCause& candidate =
        s.Add(BlamesAnother(vote->code) ? Weight::kConsequence : Weight::kCause, KindOfCode(vote->code), j, vote->at);
    candidate.record.code = vote->code;
    candidate.record.message = vote->message;
  }
}

void Broken(CauseSearch& s, const SessionStory& j) {
  const bool marked = j.findings.info.status == SessionStatus::kBroken;
  if (!marked && j.findings.state.broken.empty()) return;
  CandidateCause& candidate = s.Add(Weight::kCause, VerdictKind::kBroken, j, j.broken_at.value_or(j.last));
  candidate.record.message = j.findings.info.broken_reason.empty() ? j.findings.state.broken : j.findings.info.broken_reason;
}

void Undone(CauseSearch& s, const SessionStory& j) {
  if (j.Last().end != Attempt::End::kFailed || j.Last().undone) return;
  s.Add(Weight::kConsequence, VerdictKind::kHalfDone, j, j.Last().ended).record.message = j.Last().failure;
}

// Pauses and resumes of pools, which concern no other session.
void FailedPools(CauseSearch& s, const SessionStory& j) {
  for (const Attempt* attempt : j.LastOfPools()) {
    if (attempt->end != Attempt::End::kFailed) continue;
    const bool by_step = attempt->failed_step.has_value();
    const Code code = by_step ? attempt->failed_step->code : attempt->code;
    // It may be an old one that the program lives with: what is wrong with NCCL's memory is believed first.
    const Weight weight = LastAttemptDone(j) ? Weight::kCause : Weight::kEnd;
    CandidateCause& candidate = s.Add(weight, by_step || attempt->undone ? KindOfCode(code) : VerdictKind::kHalfDone, j,
                                      by_step ? attempt->failed_step->at : attempt->ended);
    candidate.attempt = attempt;
    candidate.record.code = code;
    candidate.record.message = attempt->failure;
  }
  // Of memory that several processes share: those that had not come, or why it could not begin.
  for (const auto& [id, attempts] : j.pools) {
    if (attempts.empty() || attempts.back().begun || attempts.back().end != Attempt::End::kFailed) continue;
    const Attempt& attempt = attempts.back();
    const std::vector<CycleMember>& culprits = attempt.culprits;
    CandidateCause& candidate = s.AddWitnessed(LastAttemptDone(j) ? Weight::kCause : Weight::kEnd, VerdictKind::kRefused,
                                               culprits.empty() ? j.session() : culprits.front().session, j, attempt.ended);
    for (std::size_t i = 1; i < culprits.size(); ++i) candidate.together.push_back(culprits[i].session);
    candidate.attempt = &attempt;
    candidate.wait.waited_ns = s.Wall(j, attempt.ended) - std::min(s.Wall(j, attempt.ended), s.Wall(j, attempt.came()));
    candidate.record.code = attempt.code;
    candidate.record.message = attempt.failure;
  }
}

// NCCL was used while its memory was away. The program got an error for that, which may have been its end.
void RefusedLaunch(CauseSearch& s, const SessionStory& j) {
  if (!j.refused) return;
  const bool ended = s.EndOf(j.session()) != nullptr;
  const bool failed = !LastAttemptDone(j);
  CandidateCause& candidate =
      s.Add(ended && !failed ? Weight::kCause : Weight::kEnd, VerdictKind::kLaunchRefused, j, j.refused->at);
  candidate.attempt = nullptr;
  candidate.record.message = j.refused->event.call;
}

// A communicator that NCCL did not make, although it tried for as long as is known, where some of its ranks have no session: a
// process without AMem cannot import what the others share. A job that has paused since has made up for it.
void Unmade(CauseSearch& s) {
  const auto given_up = [&](const SessionStory& j, const UnmadeCommunicator& one) {
    constexpr std::uint64_t kLong_ns = 30 * kPatience_ns;  // NCCL takes seconds at times
    return one.failed || !IsLive(j) || s.Since(s.Wall(j, one.at)) > kLong_ns;
  };
  const SessionStory* first = nullptr;
  const UnmadeCommunicator* failed = nullptr;
  std::set<std::int32_t> known;
  for (const SessionStory& j : s.roster.journals()) {
    if (!j.attempts.empty()) return;
    known.insert(j.who().rank);
    for (const auto& [session, peer] : j.findings.state.peers) known.insert(peer.rank);
    for (const UnmadeCommunicator& one : j.unmade) {
      // Only of one whose ranks are those of the job it is known which of them are not here.
      if (one.begun.ranks == 0 || one.begun.rank != j.who().rank || !given_up(j, one)) continue;
      if (failed != nullptr && s.Wall(j, one.at) >= s.Wall(*first, failed->at)) continue;
      first = &j;
      failed = &one;
    }
  }
  if (failed == nullptr) return;
  std::vector<std::int32_t> without;
  for (std::int32_t rank = 0; rank < failed->begun.ranks; ++rank)
    if (!known.contains(rank)) without.push_back(rank);
  if (without.empty()) return;
  CandidateCause& candidate =
      s.Add(Weight::kEnd, VerdictKind::kNotUnderAmem, *first, failed->failed ? failed->failed : failed->at);
  candidate.wall_ns = s.Wall(*first, failed->at);  // before the ends that followed from it
  candidate.attempt = nullptr;
  candidate.detail = CandidateCause::RanksWithoutSession{std::move(without)};
}

void Disagreements(CauseSearch& s) {
  const auto add = [&](const Violation& violation, VerdictKind kind) {
    const SessionStory* j = s.roster.Find(violation.session);
    if (j == nullptr) return;
    CandidateCause& candidate = s.Add(Weight::kDisagreement, kind, *j, {});
    candidate.record.seq = violation.seq;
    candidate.record.message = violation.text;
    candidate.attempt = nullptr;
    candidate.live = false;
  };
  for (const SessionStory& j : s.roster.journals())
    for (const Violation& v : j.findings.violations) add(v, VerdictKind::kImpossible);
  for (const Violation& v : s.references.violations) add(v, VerdictKind::kReferences);
}

}  // namespace amem
