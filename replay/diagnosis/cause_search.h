// Cause search: goes through the journals of a job and collects candidate causes: everything that could be the reason for what
// went wrong, each with the time it became true and who witnessed it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "replay/diagnosis/roster.h"
#include "replay/diagnosis/verdict.h"
#include "replay/job/story/job_cycles.h"

namespace amem {

struct CandidateCause {
  // How well it explains what went wrong: of two candidates the one named first here is believed, and of equals the earlier.
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
  std::uint64_t wall_ns = 0;  // when it became true
  // An absence: since when it was more than a wait that might have ended well. UINT64_MAX: it was not.
  std::uint64_t established_ns = UINT64_MAX;
  const SessionStory* journal = nullptr;  // of `session`; null: it was not given
  const Attempt* attempt = nullptr;       // that failed or hangs: of `session`, or of `witness`
  const SessionStory* witness = nullptr;  // of a session that waited for this one, or noticed its end
  SequenceNumber witness_seq;
  AllocationId allocation;
  std::vector<SessionId> missing;  // sessions that did not join
  std::uint64_t waited_ns = 0;     // how long the others waited for it
  bool live = false;               // it is still so: the process lives
  bool reported = false;           // only a witness tells of it: the session's own journal was not given, or does not have it
  std::string message;             // as recorded
  Code code = Code::kOk;           // as the witness was told
  int driver_result = 0;
  std::int32_t exit_code = -1;        // of an end; 128 + N: by signal N; -1: unknown
  std::string seen_state;             // of its process, as ProcessSeen::state; empty: nobody looked
  const ProcessSeen* seen = nullptr;  // where it was recorded; null: it was looked at just now, or not at all
  bool groups_differ = false;         // of sessions that share memory
  std::vector<SessionId> together;    // other sessions to which the same happened, each a root of its own
};
[[nodiscard]] bool IsEnd(VerdictKind kind);  // of a process, whichever way

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

class CauseSearch {
 public:
  CauseSearch(const Roster& roster, const JobFindings& references);
  // The one to believe first, and after it the others by weight and time. Empty: nothing is wrong.
  std::vector<CandidateCause> Run();

 private:
  using Weight = CandidateCause::Weight;

  // ---- cause_search.cpp: what the others build on, and the order in the end ----
  CandidateCause& Add(Weight weight, VerdictKind kind, const SessionStory& j, std::uint64_t time_ns);
  // About a session that `witness` waited for or heard of, as its event `seq` shows.
  CandidateCause& AddWitnessed(Weight weight, VerdictKind kind, SessionId session, const SessionStory& witness,
                               SequenceNumber seq);
  void FindEnds();
  void WitnessAtArrival(const SessionStory& j);
  [[nodiscard]] bool AllEnded() const;
  [[nodiscard]] const SessionEnd* EndOf(SessionId session) const;
  // All processes ended within moments, so that somebody ended them all.
  [[nodiscard]] bool WasTornDown() const { return torn_down_; }
  [[nodiscard]] std::string SeenState(SessionId session) const;  // as ProcessSeen::state; empty: nobody looked
  const Progress& ProgressOfSession(const SessionStory& j);
  void DemoteEnds();
  void Order();

  // ---- search_failures.cpp: what a session records of itself, or a vote of another one ----
  void FailedStep(const SessionStory& j);
  void FailedVote(const SessionStory& j);
  void OwnVote(const SessionStory& j, const Attempt::Decision& decision);
  void FailedVoteAlone(const SessionStory& j);
  void VoteOfAnother(const SessionStory& j, const Attempt::Decision& decision);
  void Broken(const SessionStory& j);
  void Undone(const SessionStory& j);
  // Pauses and resumes of pools, which concern no other session.
  void FailedPools(const SessionStory& j);
  void RefusedLaunch(const SessionStory& j);
  void Disagreements();

  // ---- search_absences.cpp: who was waited for ----
  void FailedArrival(const SessionStory& j);
  [[nodiscard]] bool GaveUpBefore(const SessionStory& j, const Attempt& attempt) const;
  void LongArrival(const SessionStory& j);
  void Awaited(const SessionStory& j);
  // `j` waited until `until` for sessions that share memory with it and had not joined the same kind of cycle.
  void Absent(const SessionStory& j, const Attempt& attempt, std::uint64_t until, SequenceNumber seq);
  [[nodiscard]] std::vector<SessionId> Missing(const SessionStory& j, const Attempt& attempt, std::uint64_t from,
                                               std::uint64_t until) const;
  [[nodiscard]] std::vector<SessionId> Uncounted(const SessionStory& j, const Attempt& attempt, std::uint64_t from) const;
  [[nodiscard]] bool Joined(const SessionStory& j, CycleKind kind, std::uint64_t from, std::uint64_t until) const;
  // Of the sessions that share memory with it, those whose group is not that of most.
  [[nodiscard]] std::vector<SessionId> OtherGroups(SessionId session, std::uint64_t wall_ns) const;
  void Waiting(const SessionStory& j);
  bool CounterStalled(const Attempt& attempt);
  struct Inside;
  [[nodiscard]] Inside Look(const SessionStory& j, const Attempt& attempt);
  void WaitingInside(const SessionStory& j, const Attempt& attempt, const Progress& progress);
  void Stalled(const SessionStory& j, std::uint64_t since_ns);
  // Pauses and resumes of pools that are open and silent.
  void StalledPools(const SessionStory& j);
  void AbsentVoters(const SessionStory& j, const Attempt& attempt, const Progress& progress);

  // ---- search_ends.cpp: processes that ended ----
  void Death(const SessionStory& j);
  void Leaving(const SessionStory& j);
  void EndsOfAbsent();
  [[nodiscard]] bool FailedBecauseOf(const SessionStory& j, SessionId session, const SessionEnd& end) const;
  [[nodiscard]] std::uint64_t MissedSince(const SessionStory& j) const;
  [[nodiscard]] bool CalledOffBecauseOf(const SessionStory& j) const;
  [[nodiscard]] bool OneDiedIn(const SessionStory& j, const Attempt& attempt) const;
  [[nodiscard]] bool EndedTogether(const SessionStory& j, std::uint64_t wall_ns) const;
  [[nodiscard]] bool OthersNeeded(const SessionStory& j, std::uint64_t since) const;

  const Roster& roster_;
  const JobFindings& references_;
  std::map<SessionId, Progress> progress_;
  std::map<SessionId, SessionEnd> ends_;
  struct Sight {
    const ProcessSeen* seen = nullptr;
    const SessionStory* by = nullptr;
    std::uint64_t wall_ns = 0;
  };
  std::map<SessionId, Sight> sights_;                                // the last look at each while it lived
  std::map<SessionId, Sight> end_sights_;                            // and when it had ended
  [[nodiscard]] std::int32_t SeenExitCode(SessionId session) const;  // -1: not known
  std::uint64_t first_end_ = UINT64_MAX, job_end_ = 0;
  bool torn_down_ = false;
  std::vector<CandidateCause> candidates_;
};

bool LastAttemptDone(const SessionStory& j);  // or there is none
bool IsDead(const SessionStory& j);
bool IsLive(const SessionStory& j);
bool IsHalfWay(Lifecycle lifecycle);  // paused, or on the way to it or back
bool BlamesAnother(Code code);

}  // namespace amem
