// Candidate causes: everything in the journals of a job that could be the reason for what went wrong, each with the time it
// became true and who witnessed it, and the choice of the ones to believe.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "replay/diagnosis/roster.h"
#include "replay/diagnosis/verdict.h"

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

// References that only one side knows, and orders of events that are impossible.
struct References {
  std::uint64_t compared = 0;
  std::vector<Violation> disagreements, impossible;
  std::set<std::tuple<SessionId, AllocationId>> unknown_to_owner;  // imports (importer, its id) that the owner does not know
};
References CompareReferences(std::span<const SessionStory> journals);

// The one to believe first, and after it the others by weight and time. Empty: nothing is wrong.
std::vector<CandidateCause> FindCandidateCauses(const Roster& roster, const References& references);

}  // namespace amem
