// Cause search: goes through the journals of a job and collects candidate causes: everything that could be the reason for what
// went wrong, each with the time it became true and who witnessed it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "replay/diagnosis/roster.h"
#include "replay/diagnosis/verdict.h"
#include "replay/job/story/job_cycles.h"

namespace amem {

struct CandidateCause {
  // How well it explains what went wrong. Of two candidates the one whose weight comes first here is believed, of equals the
  // earlier.
  enum class Weight : std::uint8_t {
    kCause = 0,     // a step, a process or a journal failed by itself
    kAbsence,       // a session did not do what others waited for
    kConsequence,   // something failed, and its record says that another session was the reason
    kDisagreement,  // journals contradict each other
    kEnd,           // a process ended at no harm to a pause or resume, or after something else had gone wrong
  };
  Weight weight{};
  VerdictKind kind{};
  SessionId session;
  std::vector<SessionId> together;   // other sessions to which the same happened, each a root of its own
  const Attempt* attempt = nullptr;  // that failed or hangs: of `session`, or of the witness
  std::uint64_t wall_ns = 0;         // when it became true
  bool live = false;                 // it is still so: the process lives

  // Of an absence.
  struct Wait {
    std::uint64_t waited_ns = 0;  // how long the others waited
    std::uint64_t established_ns =
        UINT64_MAX;  // since when it was more than a wait that might have ended well; UINT64_MAX: never
  } wait;
  // Another session, which waited for this one or noticed its end.
  struct Witness {
    const SessionStory* journal = nullptr;  // null: there is none
    bool alone = false;                     // the session's own journal was not given, or does not have it
  } witness;
  // What the witness recorded, or where there is none the session itself.
  struct Record {
    SequenceNumber seq;
    std::string message;
    Code code = Code::kOk;
    int driver_result = 0;
    const BallotShown* shown = nullptr;  // on the board; null: nothing that is known
  } record;
  // What others saw of its process last: of one that ended, after its end.
  struct Sight {
    std::string state;                  // as ProcessSeen::state; empty: nobody looked
    const ProcessSeen* seen = nullptr;  // where it was recorded; null: it was seen just now, or not at all
    std::int32_t exit_code = -1;        // of an end; 128 + N: by signal N; -1: unknown
  } sight;
  // What only one kind has.
  struct UnknownReference {  // kReferences, with an attempt: an import that its owner does not know
    AllocationId allocation;
  };
  struct OtherGroup {};         // kRefused: `session` and `together` share memory with the witness, and are of another group
  struct RanksWithoutSession {  // kNotUnderAmem
    std::vector<std::int32_t> ranks;
  };
  std::variant<std::monostate, UnknownReference, OtherGroup, RanksWithoutSession> detail;
};
// Empty: it has none.
template <class Detail>
Detail DetailOf(const CandidateCause& cause) {
  const Detail* const detail = std::get_if<Detail>(&cause.detail);
  return detail == nullptr ? Detail{} : *detail;
}
[[nodiscard]] bool IsEnd(VerdictKind kind);  // of a process, whichever way

// How long the others have waited when a session that they ask records it.
inline constexpr std::uint64_t kAskedFor_ns = 500'000'000;
// A session that has been silent for less time than this is at work, not waiting.
inline constexpr std::uint64_t kPatience_ns = 1'000'000'000;

// How and when a process ended, as well as it is known.
struct SessionEnd {
  std::uint64_t wall_ns = 0;
  bool in_order = false;                  // it closed its journal
  bool witnessed = false;                 // false: the time is only the latest one possible
  const SessionStory* witness = nullptr;  // another session that noticed it
  SequenceNumber witness_seq;
};

// What is known of a job while its candidates are collected.
struct CauseSearch {
  using Weight = CandidateCause::Weight;
  CauseSearch(const Roster& job, const JobFindings& found);
  // The one to believe first, and after it the others by weight and time. Empty: nothing is wrong.
  std::vector<CandidateCause> Run();

  CandidateCause& Add(Weight weight, VerdictKind kind, const SessionStory& j, const Moment& at);
  // About a session that `witness` waited for or heard of, as its event at that moment shows.
  CandidateCause& AddWitnessed(Weight weight, VerdictKind kind, SessionId session, const SessionStory& witness,
                               const Moment& at);
  [[nodiscard]] std::uint64_t Wall(const SessionStory& j, const Moment& at) const { return roster.Wall(j, at.time_ns); }
  // How long it was from then to the end of the job.
  [[nodiscard]] std::uint64_t Since(std::uint64_t wall_ns) const { return job_end - std::min(job_end, wall_ns); }
  [[nodiscard]] const SessionEnd* EndOf(SessionId session) const { return FindIn(ends, session); }
  [[nodiscard]] std::string SeenState(SessionId session) const;  // as ProcessSeen::state; empty: nobody looked
  const Progress& ProgressOfSession(const SessionStory& j);

  const Roster& roster;
  const JobFindings& references;
  std::map<SessionId, SessionEnd> ends;
  std::uint64_t first_end = UINT64_MAX, job_end = 0;
  bool torn_down = false;  // all processes ended within moments, so that somebody ended them all
  std::vector<CandidateCause> candidates;

 private:
  void FindEnds();
  void NoteEnd(SessionId session, bool in_order, const SessionStory& witness, const Moment& at);
  void NoteEndsOfOthers(const SessionStory& j);
  void NoteOwnEnd(const SessionStory& j);
  void WitnessAtArrival(const SessionStory& j);
  [[nodiscard]] bool AllEnded() const;
  void DemoteEnds();
  void Order();

  std::map<SessionId, Progress> progress_;
  struct LastSight {
    const ProcessSeen* seen = nullptr;
    std::uint64_t wall_ns = 0;
  };
  std::map<SessionId, LastSight> sights_;      // of processes that lived
  std::map<SessionId, LastSight> end_sights_;  // of those that had ended
};

// The searches in one journal. Each adds the candidates that it finds.
using SearchOfOne = void(CauseSearch& s, const SessionStory& j);
SearchOfOne FailedStep, FailedVote, Broken, Undone, FailedPools, RefusedLaunch;  // search_failures.cpp
SearchOfOne Awaited, StalledPools;                                               // search_waits.cpp
SearchOfOne VoteOfAnother, FailedArrival, LongArrival, Waiting;                  // search_without_board.cpp
SearchOfOne Death, Leaving;                                                      // search_ends.cpp
// The searches in all journals together.
void Ballots(CauseSearch& s);  // search_ballots.cpp
void EndsOfAbsent(CauseSearch& s);
void Disagreements(CauseSearch& s);
void Unmade(CauseSearch& s);

// Whether the last attempt was agreed on a board, by this journal or that of another member of it.
bool OnBoard(const CauseSearch& s, const SessionStory& j);
// Whether Ballots finds why the attempt failed, and for whom it waits. A change of the set is neither.
bool FailedOnBoard(const Attempt& attempt);
bool WaitsOnBoard(CauseSearch& s, const SessionStory& j);
// Whether it has recorded no progress in its open attempt for kPatience_ns.
bool IsSilent(CauseSearch& s, const SessionStory& j);
void TooLate(CauseSearch& s, const SessionStory& j, const Attempt& attempt);
// Its open attempt has made no progress since.
CandidateCause& Stalled(CauseSearch& s, const SessionStory& j, const Moment& since);
template <class Range, class Value, class Projection = std::identity>
bool Contains(const Range& range, const Value& value, Projection projection = {}) {
  return std::ranges::find(range, value, projection) != std::ranges::end(range);
}
VerdictKind KindOfCode(Code code);                    // of a step or a vote that failed with it
bool RecordsOwnFailure(const SessionStory& culprit);  // its own journal says how its last attempt failed
bool LastAttemptDone(const SessionStory& j);          // or there is none
bool IsDead(const SessionStory& j);
bool IsLive(const SessionStory& j);
bool IsUnsure(const SessionStory& j);  // whether its process lives is not known
bool IsHalfWay(Lifecycle lifecycle);   // paused, or on the way to it or back
bool BlamesAnother(Code code);
// Whether NCCL's memory was paused in that session at that time of the job.
bool WasPausedAt(const Roster& roster, const SessionStory& j, std::uint64_t wall_ns);
bool GaveUpWaiting(const Attempt& attempt);
bool SameTry(const Attempt& a, const Attempt& b);  // at one pause or resume of NCCL's memory

}  // namespace amem
