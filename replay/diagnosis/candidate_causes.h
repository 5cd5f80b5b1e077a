// Candidate causes: everything in the journals of a job that could be the reason for what went wrong, and the choice of the
// one to believe.
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
    kEnd,           // a process ended without closing its journal, at no harm to a pause or resume
  };
  Weight weight{};
  VerdictKind kind{};
  SessionId session;
  std::uint64_t wall_ns = 0;
  const JournalHistory* journal = nullptr;  // of `session`; null: it was not given
  const Attempt* attempt = nullptr;         // that failed or hangs: of `session`, or of `witness`
  const JournalHistory* witness = nullptr;  // of a session that waited for this one, or noticed its end
  SequenceNumber witness_seq;
  AllocationId allocation;
  std::vector<SessionId> missing;  // sessions that did not join
  std::uint64_t waited_ns = 0;     // how long the others waited for it
  bool live = false;               // it is still so: the process lives
  std::string message;             // as recorded
};

// References that only one side knows, and orders of events that are impossible.
struct References {
  std::uint64_t compared = 0;
  std::vector<Violation> disagreements, impossible;
  std::set<std::tuple<SessionId, AllocationId>> unknown_to_owner;  // imports (importer, its id) that the owner does not know
};
References CompareReferences(std::span<const JournalHistory> journals);

std::vector<CandidateCause> FindCandidateCauses(const Roster& roster, const References& references);
// Null: nothing is wrong.
const CandidateCause* FirstDivergence(const std::vector<CandidateCause>& candidates);

}  // namespace amem
